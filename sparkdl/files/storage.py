"""Files anywhere: local paths, ``file://``, ``hdfs://``, ``s3://`` and what fsspec knows."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator
from typing import Any

from sparkdl.errors import ModelError, ResourceError

_SETTINGS = "sparkdl.json"
_RULE_STATE = "sparkdl_rule.npz"


def write_bytes(path: str, content: bytes) -> None:
    """Writes a file whole or not at all (it is renamed into place where the system can).

    Raises:
        ResourceError: The path cannot be written.
    """
    filesystem, inner = _resolve(path)
    partial = f"{inner}.{os.getpid()}.part"
    try:
        parent = os.path.dirname(inner)
        if parent:
            filesystem.create_dir(parent, recursive=True)
        with filesystem.open_output_stream(partial) as file:
            file.write(content)
        _replace(filesystem, partial, inner)
    except Exception as error:
        with contextlib.suppress(Exception):
            filesystem.delete_file(partial)
        if not isinstance(error, (OSError, ValueError)):
            raise
        raise _refused("written", path, error) from error


def _replace(filesystem: Any, source: str, target: str) -> None:
    """Renames over an existing file, also where the system (HDFS, fsspec) does not."""
    from pyarrow import fs

    local = isinstance(filesystem, fs.LocalFileSystem)
    if not local and filesystem.get_file_info(target).type == fs.FileType.File:
        filesystem.delete_file(target)
    filesystem.move(source, target)


def read_bytes(path: str) -> bytes:
    """Reads a whole file.

    Raises:
        ResourceError: The path cannot be read.
    """
    filesystem, inner = _resolve(path)
    try:
        with filesystem.open_input_stream(inner) as file:
            return bytes(file.read())
    except (OSError, ValueError) as error:
        raise _refused("read", path, error) from error


def exists(path: str) -> bool:
    """Whether a file or folder is there."""
    from pyarrow import fs

    filesystem, inner = _resolve(path)
    return bool(filesystem.get_file_info(inner).type != fs.FileType.NotFound)


def check_writable(path: str) -> None:
    """Tries to write next to ``path``, so that a long fit does not end in a full disk's error.

    Raises:
        ResourceError: The path cannot be written.
    """
    from pyarrow import fs

    filesystem, inner = _resolve(path)
    try:
        if filesystem.get_file_info(inner).type == fs.FileType.Directory:
            raise IsADirectoryError(f"{inner} is a folder")
        parent = os.path.dirname(inner) or "."
        filesystem.create_dir(parent, recursive=True)
        probe = f"{parent}/.sparkdl-{os.getpid()}"
        with filesystem.open_output_stream(probe) as file:
            file.write(b"ok")
        filesystem.delete_file(probe)
    except (OSError, ValueError) as error:
        raise _refused("written", path, error) from error


def delete(path: str) -> None:
    """Deletes a file if it is there."""
    filesystem, inner = _resolve(path)
    with contextlib.suppress(OSError):
        filesystem.delete_file(inner)


@contextlib.contextmanager
def local_copy(content: bytes) -> Iterator[str]:
    """A temporary ``.keras`` file with ``content``, for Keras, which reads only paths."""
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
        path = os.path.join(folder, "model.keras")
        with open(path, "wb") as file:
            file.write(content)
        yield path


def model_bytes(model: Any) -> bytes:
    """A Keras model as the bytes of a ``.keras`` file."""
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        with open(path, "rb") as file:
            return file.read()


def model_from_bytes(
    content: bytes, custom_objects: dict[str, Any] | None = None, safe_mode: bool = True
) -> Any:
    """The counterpart of :func:`model_bytes`; see ``keras.models.load_model``."""
    from sparkdl.learner.archive import load_model_file

    with local_copy(content) as path:
        return load_model_file(path, custom_objects, safe_mode)


def with_settings(content: bytes, settings: dict[str, Any]) -> bytes:
    """A ``.keras`` file with the SparkModel's settings beside Keras' own parts."""
    buffer = io.BytesIO(content)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(_SETTINGS, json.dumps(settings))
    return buffer.getvalue()


def settings_of(content: bytes) -> dict[str, Any]:
    """What :func:`with_settings` added; empty for a plain ``.keras`` file."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if _SETTINGS not in archive.namelist():
                return {}
            settings = json.loads(archive.read(_SETTINGS))
    except (zipfile.BadZipFile, ValueError) as error:
        raise ModelError("this is no Keras file", received=str(error)) from error
    return dict(settings)


def with_rule_state(content: bytes, state: bytes) -> bytes:
    """A ``.keras`` file with what a rule keeps between runs beside Keras' own parts."""
    if not state:
        return content
    buffer = io.BytesIO(content)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(_RULE_STATE, state)
    return buffer.getvalue()


def rule_state_of(content: bytes) -> bytes:
    """What :func:`with_rule_state` added; empty if nothing."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.read(_RULE_STATE) if _RULE_STATE in archive.namelist() else b""


def _resolve(path: str) -> tuple[Any, str]:
    """The pyarrow file system of a path or URI, and the path inside it."""
    from pyarrow import fs

    text = os.fspath(path)
    if "://" not in text:
        return fs.LocalFileSystem(), os.path.abspath(text)
    try:
        filesystem, inner = fs.FileSystem.from_uri(text)
        return filesystem, inner
    except Exception as first:
        try:
            import fsspec

            other, inner = fsspec.core.url_to_fs(text)
            return fs.PyFileSystem(fs.FSSpecHandler(other)), inner
        except Exception as error:
            raise ResourceError(
                f"no file system for {text!r}",
                expected="a local path, or a URI that pyarrow or fsspec knows",
                received=f"{type(first).__name__}: {first}",
                hint=f"install the fsspec driver for {text.split('://', 1)[0]}://",
            ) from error


def _refused(verb: str, path: str, error: Exception) -> ResourceError:
    return ResourceError(
        f"{path!r} cannot be {verb}",
        expected="a place that this process can " + ("write to" if verb == "written" else "read"),
        received=f"{type(error).__name__}: {error}",
    )
