"""A SparkModel as one ``.keras`` file: Keras' model, its settings, and its rule's state."""

from __future__ import annotations

from typing import Any

from sparkdl.errors import ConfigError, ModelError, ResourceError
from sparkdl.files import storage


def write_model(
    path: str, model: Any, settings: dict[str, Any], rule_state: bytes, *, overwrite: bool
) -> None:
    """Writes the model with its optimizer state, the settings, and what the rule keeps.

    Raises:
        ConfigError: The path does not end in ``.keras``.
        ResourceError: The path cannot be written, or exists and ``overwrite`` is False.
        ModelError: Keras cannot save the model.
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
    try:
        content = storage.model_bytes(model)
    except Exception as error:
        raise ModelError(
            f"model {model.name!r} cannot be saved",
            received=f"{type(error).__name__}: {error}",
        ) from error
    content = storage.with_settings(content, settings)
    storage.write_bytes(path, storage.with_rule_state(content, rule_state))


def read_model(
    path: str, custom_objects: dict[str, Any] | None, *, safe_mode: bool
) -> tuple[Any, dict[str, Any], bytes]:
    """The counterpart of :func:`write_model`; no settings if plain Keras wrote the file.

    Raises:
        ResourceError: The path cannot be read.
        ModelError: The file holds no Keras model that can be loaded so.
    """
    content = storage.read_bytes(path)
    settings = storage.settings_of(content)
    try:
        model = storage.model_from_bytes(content, custom_objects, safe_mode)
    except Exception as error:
        raise ModelError(
            f"{path!r} cannot be loaded",
            received=f"{type(error).__name__}: {error}",
            hint="pass custom_objects={'MyLayer': MyLayer} for classes of your own, and "
            "safe_mode=False for Lambda layers of a file that you trust",
        ) from error
    return model, settings, storage.rule_state_of(content)
