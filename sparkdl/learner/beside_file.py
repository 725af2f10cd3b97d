"""The settings and values that a model's file does not hold, as bytes beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkdl import payload
from sparkdl.files.packed_arrays import pack_arrays
from sparkdl.learner.carried_state import paired, variables_by_name
from sparkdl.learner.part_attributes import compared_parts
from sparkdl.learner.unsaved_settings import Attributes, UnsavedSettings


@dataclass(frozen=True)
class BesideFile:
    """What a model gets that was loaded from its file.

    Args:
        settings: Those that no configuration has.
        values: Of variables by name, packed.
    """

    settings: UnsavedSettings
    values: bytes

    @classmethod
    def of(cls, settings: UnsavedSettings, values: Mapping[str, np.ndarray]) -> BesideFile:
        """Settings and values of one model."""
        return cls(settings, pack_arrays(dict(values)))

    def to_bytes(self) -> bytes:
        """As bytes for :meth:`from_bytes`, which runs what is pickled in them."""
        return payload.dump(self)

    @classmethod
    def from_bytes(cls, content: bytes) -> BesideFile:
        """The counterpart of :meth:`to_bytes`."""
        found: BesideFile = payload.load(content)
        return found

    def give_settings(self, model: Any, custom_objects: dict[str, Any]) -> None:
        """Gives the settings to a model that was just loaded."""
        self.settings.apply(model, custom_objects)
        _give_attributes(model, self.settings.attributes)

    def give_values(self, model: Any) -> None:
        """Sets the variables whose values are not those of the file; without compile settings
        those of the model alone."""
        variables = variables_by_name(model)
        for variable, value in paired(variables, self.values, optional="optimizer"):
            variable.assign(value)


def _give_attributes(model: Any, attributes: Attributes) -> None:
    """Gives the parts of a loaded model the attributes that differ."""
    if not attributes:
        return
    parts = compared_parts(model)
    for number, values in attributes.items():
        vars(parts[number].thing).update(values)
