"""A SparkModel as one ``.keras`` file: Keras' model, its settings, and what its rule keeps."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.errors import ConfigError, ModelError, ResourceError
from sparkdl.files import storage
from sparkdl.files.archive_parts import (
    Settings,
    check_whole,
    run_state_of,
    settings_of,
    with_parts,
)
from sparkdl.run_state import RunState


@dataclass(frozen=True)
class ModelFile:
    """What a ``.keras`` file holds.

    Args:
        content: All of it, for Keras.
        settings: Of the SparkModel; empty if plain Keras wrote the file.
        state: Of its runs; None if plain Keras wrote the file.
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
        settings: Plain values.
        state: What ``content`` does not hold: epochs done, and what the rule keeps.

    Raises:
        ResourceError: The path cannot be written.
    """
    storage.write_bytes(path, with_parts(content, settings=settings, state=state))


def read_model(path: str) -> ModelFile:
    """The counterpart of :func:`write_model`; Keras has yet to load the content.

    Raises:
        ResourceError: The path cannot be read.
        ModelError: It is no ``.keras`` file, or sparkdl's parts in it are malformed.
    """
    content = storage.read_bytes(path)
    try:
        check_whole(content)
        return ModelFile(content, settings_of(content), run_state_of(content))
    except ModelError as error:
        raise ModelError(
            f"{path!r}: {error.what}", expected=error.expected, received=error.received,
            hint=error.hint,
        ) from error  # fmt: skip
