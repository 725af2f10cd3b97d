"""What sparkdl adds to a ``.keras`` file; files that are damaged, or made to do harm."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from keras_zip import keras_zip, with_far_part, with_part

from sparkdl.errors import ConfigError, ModelError, ResourceError
from sparkdl.files.model_file import (
    RUN_STATE,
    SETTINGS,
    check_path,
    check_whole,
    read_model,
    run_state_of,
    settings_of,
    unpack_arrays,
    write_model,
)
from sparkdl.files.run_state import RunState

pytestmark = pytest.mark.long


def test_a_model_with_settings_and_state(tmp_path: Path) -> None:
    path = f"{tmp_path}/new/model.keras"
    check_path(path, overwrite=False)
    state = RunState(7, np.ones(3, np.float32), b"optimizer", b"rule")
    write_model(path, keras_zip(), {"mode": "allreduce", "port": [1, 2]}, state)
    file = read_model(path)
    assert file.settings == {"mode": "allreduce", "port": [1, 2]}
    assert file.state is not None
    assert file.state.to_bytes() == state.to_bytes()
    with zipfile.ZipFile(path) as archive:
        assert archive.read("model.weights.h5") == b"weights"
        assert archive.namelist()[:2] == ["config.json", "model.weights.h5"]
    with pytest.raises(ResourceError, match="exists"):
        check_path(path, overwrite=False)
    check_path(path, overwrite=True)


def test_a_file_of_plain_keras(tmp_path: Path) -> None:
    (tmp_path / "m.keras").write_bytes(keras_zip())
    file = read_model(f"{tmp_path}/m.keras")
    assert (file.content, file.settings, file.state) == (keras_zip(), {}, None)


def test_paths_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)'\.keras'.*model\.h5"):
        check_path(f"{tmp_path}/model.h5", overwrite=True)


def test_damaged_files_are_told_by_name(tmp_path: Path) -> None:
    whole = keras_zip(b"weights" * 1000)
    middle = bytearray(whole)
    middle[len(whole) // 2] ^= 1
    path = tmp_path / "m.keras"
    for content in (b"", b"no model", whole[:-30], whole[: len(whole) // 2], bytes(middle)):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"m\.keras"):
            read_model(str(path))


@pytest.mark.parametrize(
    "settings", [b"[1, 2]", b"null", b"{", b"[" * 100_000, b"\xff\xfe", b'"' + b"a" * 10 + b'"']
)
def test_malformed_settings_are_refused(settings: bytes) -> None:
    with pytest.raises(ModelError, match=r"sparkdl\.json.*malformed"):
        settings_of(with_part(keras_zip(b"w" * 200_000), SETTINGS, settings))


def test_a_malformed_state_is_refused() -> None:
    for state in (b"", b"no state", RunState(1, rule=b"x").to_bytes()[:-1]):
        with pytest.raises(ModelError, match=r"sparkdl_run_state.*malformed"):
            run_state_of(with_part(keras_zip(), RUN_STATE, state))


@pytest.mark.parametrize("offset", [2**40, 2**63, 2**64 - 1])
def test_a_part_that_begins_far_behind_the_end_is_refused(offset: int) -> None:
    """Before, 2^63 and more were an OverflowError."""
    with pytest.raises(ModelError, match="malformed"):
        check_whole(with_far_part(offset))
    with pytest.raises(ModelError, match="cannot be read"):
        unpack_arrays(with_far_part(offset), "the state")


@pytest.mark.parametrize("name", [SETTINGS, RUN_STATE, "model.weights.h5"])
def test_a_file_that_unpacks_to_a_thousand_times_its_size_is_refused(name: str) -> None:
    """Before, 599 KiB cost 1.2 GiB: a part was unpacked, whatever its size."""
    bomb = bytes(200 << 20)
    if name == "model.weights.h5":
        content = keras_zip(bomb, zipfile.ZIP_DEFLATED)
    else:
        content = with_part(keras_zip(), name, bomb)
    assert len(content) < 300_000
    del bomb
    tracemalloc.start()
    try:
        for act in (check_whole, settings_of, run_state_of):
            with pytest.raises(ModelError, match="fill the memory"):
                act(content)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("name", "act"), [(SETTINGS, settings_of), (RUN_STATE, run_state_of)])
def test_a_part_larger_than_the_file_is_refused(name: str, act: object) -> None:
    content = with_part(keras_zip(), name, bytes(5 << 20))
    with pytest.raises(ModelError, match=rf"(?s){name}.*malformed.*{5 << 20} bytes"):
        act(content)  # type: ignore[operator]


def with_lie(name: str, method: int) -> bytes:
    """A file whose part ``name`` declares 10 bytes (with their check sum) and unpacks to 64 MiB."""
    parts = {"config.json": b"{}", name: bytes(64 << 20)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for each, content in parts.items():
            archive.writestr(each, content)
    content, honest = buffer.getvalue(), zipfile.ZipFile(buffer).getinfo(name)
    told = struct.pack("<LLL", honest.CRC, honest.compress_size, honest.file_size)
    lie = struct.pack("<LLL", zlib.crc32(bytes(10)), honest.compress_size, 10)
    assert content.count(told) == 2
    return content.replace(told, lie)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("name", [SETTINGS, RUN_STATE, "config.json"])
def test_a_part_that_is_longer_than_it_declares_is_refused(name: str, method: int) -> None:
    """Before, all of it was unpacked: its size was believed."""
    content = with_lie(name, method)
    acts = {SETTINGS: settings_of, RUN_STATE: run_state_of}
    tracemalloc.start()
    try:
        for act in (check_whole, acts.get(name, check_whole)):
            with pytest.raises(ModelError):
                act(content)  # type: ignore[operator]
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
