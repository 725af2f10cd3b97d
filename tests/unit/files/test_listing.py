"""The listing of files has Spark's meaning; the answers are those of ``spark.read.parquet``."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkdl.errors import DataError, ResourceError
from sparkdl.files import storage
from sparkdl.files.listing import find_files, fits, table_at
from sparkdl.files.streams import place_of


def made(folder: Path, *names: str) -> Path:
    """The folder with files of these names."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def found(folder: Path, path: str = "") -> list[str]:
    whole = f"{folder}/{path}".rstrip("/")
    return [file.path.removeprefix(f"{folder}/") for file in find_files(whole)]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    folder = made(
        tmp_path, "p0", "p1", ".b", "_c", "d._COPYING_", "_metadata", ".p0.crc", "._SUCCESS.crc",
        "old/o", "_tmp/t", ".hid/h",
    )  # fmt: skip
    (folder / "zero").touch()
    return folder


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("", ["p0", "p1"]),
        ("p[^0]", ["p1"]),
        ("p[!0]", ["p1"]),
        ("p[01]", ["p0", "p1"]),
        ("p[0-9]", ["p0", "p1"]),
        ("p{0,1}", ["p0", "p1"]),
        ("{p0,old/o}", ["old/o", "p0"]),
        ("{p{0,1},old}", ["old/o", "p0", "p1"]),
        ("p?", ["p0", "p1"]),
        ("*", [".hid/h", "_tmp/t", "old/o", "p0", "p1"]),  # as Spark, which looks into both
        ("p\\0", ["p0"]),
        ("{none,old}/*", ["old/o"]),
        ("p{0\\,1,1}", ["p1"]),
        ("old", ["old/o"]),
        ("*/o", ["old/o"]),
        ("old//*/", ["old/o"]),
    ],
)
def test_patterns_and_hidden_files_are_those_of_spark(
    plain: Path, path: str, names: list[str]
) -> None:
    assert found(plain, path) == names


@pytest.mark.parametrize("path", ["_c", "d._COPYING_", "zero", "*.csv", "none"])
def test_files_without_rows_are_no_files(plain: Path, path: str) -> None:
    with pytest.raises(ResourceError, match="no files at"):
        found(plain, path)


def test_signs_of_expressions_mean_themselves() -> None:
    assert fits("a.b+c", "a.b+c")
    assert not fits("axb+c", "a.b+c")
    assert fits("a]b", "a[]x]b")
    assert fits("a,b", "{a\\,b,c}")
    assert not fits("ab", "a[^b]")
    with pytest.raises(DataError, match="pattern"):
        fits("a", "a[b")


def test_folders_of_partitions_hold_the_rows(tmp_path: Path) -> None:
    """A file beside the folders, which Spark does not read either, is none of them."""
    made(tmp_path, "w=0.5/a", "w=1/b", "W=2/c", "w=x%20y/_d=1/../e", "loose")
    files = {file.path.removeprefix(f"{tmp_path}/"): file for file in find_files(str(tmp_path))}
    assert sorted(files) == ["W=2/c", "w=0.5/a", "w=1/b", "w=x%20y/e"]
    values = [files[name].partition_values for name in sorted(files)]
    spelled = next(iter(values[0]))
    assert [v[spelled] for v in values] == ["2", "0.5", "1", "x%20y"]
    assert found(tmp_path, "w=*") == ["w=0.5/a", "w=1/b", "w=x%20y/e"]
    assert find_files(f"{tmp_path}/w=1")[0].partition_values == {}


@pytest.mark.parametrize("other", ["old/c", "x=1/c", "w=1/x=1/c", "w=1/w=1/c"])
def test_partitions_of_two_kinds_are_refused(tmp_path: Path, other: str) -> None:
    made(tmp_path, "w=1/b", "w=2/b", other)
    with pytest.raises(DataError, match="different partitions"):
        find_files(str(tmp_path))
    recursive = find_files(str(tmp_path), recursive=True)
    assert len(recursive) == 3


def test_partitions_of_several_folders_are_refused(tmp_path: Path) -> None:
    """As by Spark, to which each folder of a pattern is a table of its own."""
    made(tmp_path, "k=1/j=1/a", "k=2/j=1/b")
    assert found(tmp_path, "k=1") == ["k=1/j=1/a"]
    assert found(tmp_path, "k=[12]/j=1") == ["k=1/j=1/a", "k=2/j=1/b"]
    with pytest.raises(DataError, match="each of its own"):
        found(tmp_path, "k={1,2}")


def test_descriptions_beside_the_rows_are_none_of_them(tmp_path: Path) -> None:
    """Hugging Face and TFDS write them; a file of another name may well hold rows.

    What ``map`` of a data set that was loaded writes beside it would double the rows.
    """
    made(
        tmp_path, "data-0.arrow", "state.json", "dataset_info.json", "cache-3f_00000_of_00002.arrow"
    )
    assert found(tmp_path) == found(tmp_path, "*") == found(tmp_path, "*.arrow") == ["data-0.arrow"]
    with pytest.raises(ResourceError, match="no files at"):
        found(tmp_path, "cache-*")
    made(tmp_path / "tfds", "d-train.tfrecord-0", "features.json", "label.labels.txt")
    assert found(tmp_path / "tfds") == ["d-train.tfrecord-0"]
    made(tmp_path / "own", "cache-1.arrow", "a.txt")
    assert found(tmp_path / "own") == ["a.txt", "cache-1.arrow"]
    made(tmp_path / "rows", "a.json", "b.json")
    assert found(tmp_path / "rows") == ["a.json", "b.json"]


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("_delta_log/0.json", "delta"),
        ("metadata/v1.metadata.json", "iceberg"),
        ("metadata/other.json", None),
        (".hoodie/hoodie.properties", "hudi"),
        ("_spark_metadata/0", "parquet"),
        ("a.parquet", None),
    ],
)
def test_tables_that_are_more_than_their_files_are_known(
    tmp_path: Path, name: str, table: str | None
) -> None:
    """Also where a path reaches into one; of a stream's output Spark then reads all, too."""
    made(tmp_path / "t", "a.parquet", "data/k=1/b.parquet", "k=1/j=2/b.parquet", name)
    folder = str(tmp_path / "t")
    for path in (folder, f"{tmp_path}/*", f"{tmp_path}/{{t,none}}/"):
        found = table_at(path)
        assert (found.format if found else None) == table
        assert found is None or (found.folder, found.whole) == (folder, True)
    for path in ("a.parquet", "*.parquet", "k=1", "k=*/j=2/b*", "data/k=1/*", "k=1/j={2,3}"):
        found = table_at(f"{folder}/{path}")
        if table in (None, "parquet"):
            assert found is None
        else:
            assert found is not None
            assert (found.format, found.folder, found.whole) == (table, folder, False)


def test_a_folder_of_a_table_of_hudi_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    made(tmp_path, ".hoodie/hoodie.properties", "2020/01/.hoodie_partition_metadata", "2020/01/a")
    found = table_at(f"{tmp_path}/2020/01/a")
    assert found is not None
    assert not table_at(str(tmp_path / "2020"))


@pytest.mark.parametrize("query", ["", "?retry_limit_seconds=1"])
def test_a_uri_means_its_letters_as_to_spark(query: str) -> None:
    """pyarrow would decode them, and find no file below ``t=10%3A00``."""
    path = "bucket/a b/t=10%3A00/Zürich/f#1[x]"
    uri = f"gs://anonymous@{path}{query}"
    place = place_of(uri)
    assert place.inner == path
    assert place.outer(place.inner) == uri
    assert place_of(place.outer(f"{path}/50%25")).inner == f"{path}/50%25"
    assert place_of(f"gs://anonymous@bucket/{query}").outer("bucket/f") == (
        f"gs://anonymous@bucket/f{query}"
    )


@pytest.mark.parametrize("begin", ["file:", "file://", "file://localhost"])
def test_a_uri_of_this_machine_means_its_letters_too(tmp_path: Path, begin: str) -> None:
    """Beside ``a%20b`` another folder may be called as it is decoded."""
    made(tmp_path, "a b/x", "a%20b/y", "t=10%3A00/z")
    for folder, name in (("a b", "x"), ("a%20b", "y"), ("t=10%3A00", "z")):
        (file,) = find_files(f"{begin}{tmp_path}/{folder}")
        assert file.path == f"{tmp_path}/{folder}/{name}"
        assert (
            storage.read_bytes(f"{begin}{tmp_path}/{folder}/{name}") == f"{folder}/{name}".encode()
        )
