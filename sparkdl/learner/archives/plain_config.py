"""A model's configuration without what differs between equal models: half of its key.

It imports no framework: a worker reads it before it knows its devices.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

TOLD = "sparkdl told"
"""Key of a layer's configuration with arguments of the constructor that Keras does not know of."""
_REFERENCES = frozenset({"name", "keras_history", "input_layers", "output_layers"})
"""Keys of a saved configuration below which the name of a layer means the layer."""


def plain_config(content: bytes) -> bytes:
    """A model's ``config.json`` without what differs between equal models.

    Left out are the learning rate (state: callbacks change it) and the optimizer's name. Names
    that Keras gave by itself are numbered anew, in their order; names that the user gave stay. So
    do those of several inputs or several outputs, whose data go by them.
    """
    config = json.loads(content)
    _drop_learning_rate(config)
    _number_shared(config)
    names = _names_by_keras(config)
    for kept in names_of_data(config):
        names.pop(kept, None)
    return json.dumps(_rename(config, names, False), sort_keys=True).encode()


def _drop_learning_rate(config: dict[str, Any]) -> None:
    try:
        settings = config["compile_config"]["optimizer"]["config"]
        while settings is not None:
            settings.pop("name", None)
            if isinstance(settings.get("learning_rate"), float):
                settings.pop("learning_rate")
            settings = (settings.get("inner_optimizer") or {}).get("config")
    except (KeyError, TypeError, AttributeError):
        pass


def dicts_in(value: object) -> Iterator[dict[str, Any]]:
    """All dicts in a saved configuration, each before those within it."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from dicts_in(item)


def _number_shared(config: dict[str, Any]) -> None:
    """Numbers objects that several layers share in their order: Keras writes their addresses."""
    numbers: dict[Any, int] = {}
    for part in dicts_in(config):
        if "shared_object_id" in part:
            part["shared_object_id"] = numbers.setdefault(part["shared_object_id"], len(numbers))


def names_of_data(config: dict[str, Any]) -> set[str]:
    """The names that data go by, of a model with several inputs, several outputs or keys for them.

    Args:
        config: The content of a ``config.json``.
    """
    sides = [(config.get("config") or {}).get(side) for side in ("input_layers", "output_layers")]
    found = [(side, list(_names_at(side))) for side in sides]
    return {name for side, at in found if len(at) > 1 or isinstance(side, dict) for name in at}


def _names_at(ends: object) -> Iterator[str]:
    if isinstance(ends, list) and len(ends) == 3 and isinstance(ends[0], str):
        yield ends[0]
    elif isinstance(ends, (dict, list)):
        yield from ends if isinstance(ends, dict) else ()
        for end in ends.values() if isinstance(ends, dict) else ends:
            yield from _names_at(end)


def _names_by_keras(config: dict[str, Any]) -> dict[str, str]:
    """The names that Keras made from a class (``dense``, ``dense_1`` for ``Dense``) -> new ones."""
    names: dict[str, str] = {}
    for part in dicts_in(config):
        cls, settings = part.get("class_name"), part.get("config")
        if isinstance(cls, str) and isinstance(settings, dict):
            name, stem = settings.get("name", part.get("name")), _snake_case(cls)
            if isinstance(name, str) and re.fullmatch(rf"{re.escape(stem)}(_\d+)?", name):
                names.setdefault(name, f"{stem} number {len(names)}")
    return names


def _rename(value: object, names: dict[str, str], is_reference: bool) -> Any:
    if isinstance(value, str):
        return names.get(value, value) if is_reference else value
    if isinstance(value, list):
        return [_rename(item, names, is_reference) for item in value]
    if isinstance(value, dict):
        return {k: _rename(v, names, k in _REFERENCES) for k, v in value.items()}
    return value


def _snake_case(name: str) -> str:
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
