"""A SparkModel as one ``.keras`` file: Keras' model, its settings, and what its rule keeps."""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass

from sparkdl.errors import ConfigError, ModelError, ResourceError
from sparkdl.files import storage
from sparkdl.files.archive_parts import Settings, check_whole, run_state_of, settings_of, with_parts
from sparkdl.files.run_state import RunState

HDF5 = (".h5", ".hdf5")
"""Endings of files in Keras' older format."""
_HDF5_BEGIN = b"\x89HDF\r\n\x1a\n"
"""First bytes of such a file, whatever its name is."""


@dataclass(frozen=True)
class ModelFile:
    """The content of a ``.keras`` file.

    Args:
        content: All of it, for Keras.
        settings: Settings of the SparkModel; empty if plain Keras wrote the file.
        state: State of its runs; None if plain Keras wrote the file.
    """

    content: bytes
    settings: Settings
    state: RunState | None


def check_path(path: str, *, overwrite: bool) -> None:
    """Finds out, before a model is packed, whether it can be written to ``path``.

    Raises:
        ConfigError: The path does not end in ``.keras``.
        ResourceError: The path cannot be written, or exists and ``overwrite`` is False.
    """
    if not str(path).endswith(".keras"):
        raise ConfigError(
            "the path does not name a Keras file", expected="a path that ends in '.keras'",
            received=repr(path),
        )  # fmt: skip
    require_writable(path, overwrite=overwrite)


def require_writable(path: str, *, overwrite: bool) -> None:
    """Raises ResourceError if the path cannot be written, or exists and shall stay."""
    if not overwrite and storage.exists(path):
        raise ResourceError(
            f"{path!r} exists", expected="a new path", received="an existing one",
            hint="save(path, overwrite=True)",
        )  # fmt: skip
    storage.check_writable(path)


def write_model(path: str, content: bytes, settings: Settings, state: RunState) -> None:
    """Writes a model, its settings and the state of its runs as one ``.keras`` file.

    Args:
        path: A path or URI that :func:`check_path` has found to be good.
        content: The model as the bytes of a ``.keras`` file.
        state: What ``content`` does not hold: epochs done, and what the rule keeps.
    """
    storage.write_bytes(path, with_parts(content, settings=settings, state=state))


def read_model(path: str) -> ModelFile:
    """The counterpart of :func:`write_model`; Keras has yet to load the content.

    Raises:
        ModelError: It is no ``.keras`` file, or sparkdl's parts in it are malformed.
    """
    content = storage.read_bytes(path)
    if content.startswith(_HDF5_BEGIN):
        raise ModelError(
            f"{path!r} is a file of Keras' older format, which holds no settings of sparkdl",
            expected="a .keras file", received="an HDF5 file",
            hint=f"SparkModel(keras.models.load_model({path!r}))",
        )  # fmt: skip
    with errors_named(path):
        check_whole(content)
        return ModelFile(content, settings_of(content), run_state_of(content))


def read_keras_file(path: str) -> bytes:
    """The content of a file that Keras wrote, for Keras to load.

    Args:
        path: A path or URI; a ``.keras`` file unless it ends as one of :data:`HDF5` does.

    Raises:
        ModelError: It is no whole ``.keras`` file.
    """
    content = storage.read_bytes(path)
    if not path.endswith(HDF5):
        check_keras_file(content, path)
    return content


def check_keras_file(content: bytes, path: str) -> None:
    """Refuses what is no ``.keras`` file that Keras can unpack.

    Args:
        path: Where it is from, for the message.

    Raises:
        ModelError: It is cut off or damaged, or would fill the memory.
    """
    with errors_named(path):
        check_whole(content)


@contextlib.contextmanager
def errors_named(path: str) -> Iterator[None]:
    """Around what is done with a file: errors name it."""
    try:
        yield
    except ModelError as error:
        raise ModelError(
            f"{path!r}: {error.what}", expected=error.expected, received=error.received,
            hint=error.hint,
        ) from error  # fmt: skip


def read_config(content: bytes) -> bytes:
    """The architecture and the compile settings in a ``.keras`` archive."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.read("config.json")
