"""Files where Spark's are: a real ``viewfs:`` of the session's JVM, mounted on a local folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from needed import needs_spark
from pyarrow import feather
from spark_models import make_mlp

import sparkdl
from sparkdl import Feeding, SparkModel, load_spark_model
from sparkdl.errors import ConfigError, ResourceError
from sparkdl.files import file_system, storage
from sparkdl.files.file_system import DamagedFileError
from sparkdl.progress.events import EpochEnded
from sparkdl.spark.files import CHUNK_BYTES, HadoopFileSystem
from sparkdl.spark.session.versions import table_of_frame


@pytest.fixture
def mounted(spark: Any, tmp_path: Path) -> Iterator[str]:
    """The root of a file system that only the session's configuration knows."""
    name = tmp_path.name.replace("_", "-")
    setting = f"fs.viewfs.mounttable.{name}.link./models"
    (tmp_path / "behind").mkdir()
    spark.conf.set(setting, f"file:{tmp_path}/behind")
    yield f"viewfs://{name}/models"
    spark.conf.unset(setting)


@pytest.fixture
def default(spark: Any, mounted: str) -> Iterator[str]:
    """The same as the session's default file system; the path of its folder."""
    spark.conf.set("fs.defaultFS", mounted.removesuffix("/models"))
    yield "/models"
    spark.conf.unset("fs.defaultFS")


def names(folder: Path) -> list[str]:
    """Without Hadoop's check sums of local files."""
    return sorted(p.name for p in folder.rglob("*") if not p.name.endswith(".crc"))


def test_whole_files_through_the_jvm(mounted: str, tmp_path: Path) -> None:
    path = f"{mounted}/new/a.bin"
    assert not storage.exists(path)
    storage.check_writable(path)
    assert not storage.exists(path)
    large = np.random.default_rng(0).bytes(2 * CHUNK_BYTES + 17)
    for content in (b"", b"\x00\xff two", large, b"shorter"):
        storage.write_bytes(path, content)
        assert storage.read_bytes(path) == storage.read_bytes(path, len(content)) == content
        assert (tmp_path / "behind" / "new" / "a.bin").read_bytes() == content
    with pytest.raises(ResourceError, match="too long"):
        storage.read_bytes(path, at_most=3)
    assert names(tmp_path / "behind") == ["a.bin", "new"]
    storage.delete(path)
    storage.delete(path)
    assert not storage.exists(path)
    with pytest.raises(ResourceError, match=r"cannot be read(.|\n)*FileNotFoundError"):
        storage.read_bytes(path)
    with pytest.raises(ResourceError, match=r"cannot be written(.|\n)*is a folder"):
        storage.check_writable(f"{mounted}/new")
    with pytest.raises(ResourceError, match="cannot be written"):
        storage.write_bytes("viewfs://nosuchtable/a", b"")


def test_what_fails_leaves_the_file_as_it_was(
    mounted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{mounted}/a.bin"
    storage.write_bytes(path, b"before")
    monkeypatch.setattr(file_system.secrets, "token_hex", lambda size: "taken")
    (tmp_path / "behind" / ".sparkdl-taken.part").mkdir()
    with pytest.raises(ResourceError, match="cannot be written"):
        storage.write_bytes(path, b"after")
    assert storage.read_bytes(path) == b"before"


def test_what_killed_writers_left_is_deleted_by_its_age(mounted: str, tmp_path: Path) -> None:
    for age_s in (10, 1000):
        path = tmp_path / "behind" / f".sparkdl-{age_s:024}.part"
        path.write_bytes(b"part")
        os.utime(path, (time.time() - age_s, time.time() - age_s))
    storage.delete_partial(mounted, 500)
    assert names(tmp_path / "behind") == [f".sparkdl-{10:024}.part"]
    assert storage.sizes_of_files(mounted, ".part") == {f"{mounted}/.sparkdl-{10:024}.part": 4}


def test_a_file_whose_check_sum_is_another_is_damaged(mounted: str, tmp_path: Path) -> None:
    storage.write_bytes(f"{mounted}/a.bin", b"content")
    (tmp_path / "behind" / "a.bin").write_bytes(b"changed")
    with pytest.raises(DamagedFileError, match="bytes have changed"):
        storage.read_bytes(f"{mounted}/a.bin")


def test_a_system_without_a_rename_over_a_file(
    spark: Any, mounted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hadoop has only its older rename there, which says False, or moves into a folder."""
    spark.conf.set("fs.AbstractFileSystem.viewfs.impl", "no.such.Class")
    try:
        for content in (b"before", b"after"):
            storage.write_bytes(f"{mounted}/a.bin", content)
            assert storage.read_bytes(f"{mounted}/a.bin") == content
        (tmp_path / "behind" / "folder").mkdir()
        with pytest.raises(ResourceError, match="is a folder"):
            storage.write_bytes(f"{mounted}/folder", b"content")
        assert names(tmp_path / "behind") == ["a.bin", "folder"]
        rename, tried = HadoopFileSystem._rename, list[str]()

        def refuse(system: HadoopFileSystem, source: str, target: str) -> None:
            tried.append(target)
            if system.find(target) is not None:
                raise OSError("refused")
            rename(system, source, target)

        monkeypatch.setattr(HadoopFileSystem, "_rename", refuse)
        storage.write_bytes(f"{mounted}/a.bin", b"third")
        assert storage.read_bytes(f"{mounted}/a.bin") == b"third"
        assert len(tried) == 3
        assert names(tmp_path / "behind") == ["a.bin", "folder"]
    finally:
        spark.conf.unset("fs.AbstractFileSystem.viewfs.impl")


def test_what_is_read_while_others_write_is_never_mixed(mounted: str) -> None:
    """HDFS renames over a file in one step; the local folder that is mounted here does not."""
    path = f"{mounted}/a.bin"
    contents = [bytes([i]) * 300_000 for i in range(2)]
    storage.write_bytes(path, contents[0])
    done = threading.Event()
    found: list[bytes] = []

    def read() -> None:
        while not done.is_set():
            with contextlib.suppress(ResourceError):  # between two files
                found.append(storage.read_bytes(path))

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(20):
        storage.write_bytes(path, contents[i % 2])
    done.set()
    reader.join()
    assert found
    assert all(content in contents for content in found)


def test_paths_without_a_scheme_are_in_sparks_default_file_system(
    default: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    storage.write_bytes(f"{default}/a.bin", b"there")
    assert (tmp_path / "behind" / "a.bin").read_bytes() == b"there"
    storage.write_bytes(f"file:{tmp_path}/b.bin", b"here")
    assert (tmp_path / "b.bin").read_bytes() == b"here"
    assert not os.path.exists("/models")


def test_without_such_a_default_they_are_local(spark: Any, tmp_path: Path) -> None:
    storage.write_bytes(f"{tmp_path}/a.bin", b"here")
    assert names(tmp_path) == ["a.bin"]
    storage.write_bytes("memory://beside-spark/a.bin", b"in memory")
    assert storage.read_bytes("memory://beside-spark/a.bin") == b"in memory"


def test_models_and_checkpoints(mounted: str, tmp_path: Path, digits_df: Any) -> None:
    options: dict[str, Any] = {"verbose": 0, "checkpoint_dir": f"{mounted}/runs"}
    first = SparkModel(make_mlp(), "synchronous", num_workers=2)
    first.fit(digits_df, epochs=2, **options)
    again = SparkModel(make_mlp(), "synchronous", num_workers=2)
    assert again.fit(digits_df, epochs=3, resume=True, **options).epoch == [2]
    kept = names(tmp_path / "behind" / "runs")
    assert kept == ["checkpoint.json", "epoch-00002.keras", "epoch-00003.keras"]
    assert storage.list_files(f"{mounted}/runs", "2.keras") == [f"{mounted}/runs/epoch-00002.keras"]
    again.save(f"{mounted}/digits.keras")
    loaded = load_spark_model(f"{mounted}/digits.keras")
    for one, other in zip(loaded.model.get_weights(), again.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ResourceError, match="exists"):
        again.save(f"{mounted}/digits.keras", overwrite=False)


@needs_spark(4, 0, "its packages have no Connect server")
@pytest.mark.slow
def test_on_spark_connect() -> None:
    script = Path(__file__).parents[1] / "scripts" / "connect_files.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=False
    )
    assert "CONNECT FILES OK" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("kind", ["parquet", "tfrecord"])
def test_files_of_a_system_that_only_spark_knows_train_and_feed(
    spark: Any, mounted: str, tmp_path: Path, digits_df: Any, kind: str
) -> None:
    """pyarrow and fsspec know no ``viewfs:``; Spark reads the rows, and says so."""
    df = digits_df.select("features", digits_df.label.cast("bigint").alias("label"))
    count = df.count()
    if kind == "parquet":
        df.repartition(2).write.parquet(f"{mounted}/rows.parquet")
    else:
        sparkdl.write_tfrecords(df.repartition(2), f"{tmp_path}/behind/rows.tfrecord")
    path = f"{mounted}/rows.{kind}"
    model = SparkModel(make_mlp(), mode="synchronous", num_workers=2)
    with pytest.warns(RuntimeWarning, match="workers cannot read the files by themselves"):
        history = model.fit(path, epochs=3, batch_size=32, verbose=0).history
    assert history["loss"][-1] < 0.8 * history["loss"][0]

    def take(feed: Any) -> int:
        return sum(len(batch["label"]) for batch in feed.batches(100))

    said = pytest.warns(RuntimeWarning, match="ranks cannot read the files by themselves")
    with said if kind == "parquet" else contextlib.nullcontext():
        options: dict[str, Any] = {"num_workers": 2, "communicator": "builtin"}
        assert sum(sparkdl.run(take, data=path, feeding=Feeding(uneven="keep"), **options)) == count
    (tmp_path / "behind" / f"rows.{kind}").rename(tmp_path / "behind" / "unnamed")
    if kind == "parquet":  # the names of the files say it; those of written TFRecords do not
        assert sum(sparkdl.run(take, data=f"{mounted}/unnamed", **options)) > 0


@pytest.fixture
def two_places(spark: Any, tmp_path: Path, digits_df: Any) -> Iterator[tuple[str, int]]:
    """A folder's path with other rows on this machine than in Spark's default file system."""
    name = tmp_path.name.replace("_", "-")
    link = f"fs.viewfs.mounttable.{name}.link.{tmp_path}/data"
    df = digits_df.select("features", digits_df.label.cast("bigint").alias("label"))
    for place, rows in (("behind", df.limit(300)), ("data", df.limit(7))):
        rows.repartition(2).write.parquet(f"file:{tmp_path}/{place}/rows.parquet")
        (tmp_path / place / "rows.arrow").mkdir()
        feather.write_feather(table_of_frame(rows), f"{tmp_path}/{place}/rows.arrow/one.feather")
        sparkdl.write_tfrecords(rows.coalesce(1), f"file:{tmp_path}/{place}/rows.tfrecord")
    spark.conf.set(link, f"file:{tmp_path}/behind")
    spark.conf.set("fs.defaultFS", f"viewfs://{name}")
    yield f"{tmp_path}/data", 300
    spark.conf.unset("fs.defaultFS")
    spark.conf.unset(link)


def trained_rows(path: str) -> int:
    """Rows of an epoch of a fit of the files at a path."""
    trained: list[int] = []

    def hear(event: Any) -> None:
        if isinstance(event, EpochEnded):
            trained.append(event.rows)

    SparkModel(make_mlp(), "synchronous", num_workers=2).fit(path, verbose=0, sinks=[hear])
    return trained[0]


@pytest.mark.parametrize("kind", ["parquet", "tfrecord"])
def test_data_without_a_scheme_are_in_sparks_default_file_system(
    two_places: tuple[str, int], kind: str
) -> None:
    folder, rows = two_places
    with pytest.warns(RuntimeWarning, match="workers cannot read the files by themselves"):
        assert trained_rows(f"{folder}/rows.{kind}") == rows
    assert trained_rows(f"file:{folder}/rows.{kind}") == 7


def test_what_only_python_reads_is_never_taken_from_another_place(
    spark: Any, two_places: tuple[str, int], digits_df: Any
) -> None:
    """No library here reads ``viewfs:`` without Spark, so there is one error each."""
    folder, _ = two_places
    model = SparkModel(make_mlp())
    for action in (
        lambda: model.evaluate(f"{folder}/rows.arrow"),
        lambda: sparkdl.read_tfrecords(spark, f"{folder}/rows.tfrecord").count(),
        lambda: sparkdl.write_tfrecords(digits_df.select("label"), f"{folder}/new", "append"),
    ):
        with pytest.raises(Exception, match="viewfs://"):
            action()
    assert not os.path.exists(f"{folder}/new")

    def take(feed: Any) -> int:
        return sum(len(batch["label"]) for batch in feed.batches(100))

    options: dict[str, Any] = {"data": f"{folder}/rows.parquet", "feeding": Feeding(uneven="keep")}
    with pytest.warns(RuntimeWarning, match="ranks cannot read the files by themselves"):
        assert sum(sparkdl.run(take, num_workers=2, communicator="builtin", **options)) == 300


class Denied(fsspec.AbstractFileSystem):
    """Knows the scheme, and has no credentials: says so in an error of its own."""

    protocol = "viewfs"

    def info(self, path: str, **options: Any) -> Any:
        raise CredentialsError("no credentials")

    ls = info


class CredentialsError(Exception):
    """As those of the libraries of clouds."""


@pytest.mark.parametrize("kind", ["parquet", "tfrecord"])
def test_what_spark_reads_and_python_may_not_is_read_by_spark(
    mounted: str, tmp_path: Path, digits_df: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    df = digits_df.select("features", digits_df.label.cast("bigint").alias("label")).limit(50)
    if kind == "parquet":
        df.write.parquet(f"file:{tmp_path}/behind/rows.parquet")
    else:
        sparkdl.write_tfrecords(df.coalesce(1), f"{tmp_path}/behind/rows.tfrecord")
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "viewfs", Denied)
    with pytest.warns(RuntimeWarning, match="so Spark does: (.|\n)*cannot be read"):
        assert trained_rows(f"{mounted}/rows.{kind}") == 50
    with pytest.raises(ResourceError, match="viewfs"):
        trained_rows(f"{mounted}/missing.{kind}")


def test_a_table_of_delta_that_only_spark_reaches_is_known(mounted: str, tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent / "written" / "delta", tmp_path / "behind" / "delta")
    for path in (f"{mounted}/delta", f"{mounted}/delta/", f"{mounted}/delta/*.parquet"):
        with pytest.raises(ConfigError, match="a table of the format 'delta'"):
            trained_rows(path)
