"""Arrays of different length: which inputs are padded, and which inputs take the mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.data.columns import ColumnSpec, DataSpec, Padding
from sparkdl.errors import ConfigError, DataError
from sparkdl.learner.framework import running_backend
from sparkdl.learner.signature import TensorSpec

Pad = float | Mapping[str, float]
"""What to pad with: a number, or input name -> number."""
MASK = "_mask"
"""The input ``'words_mask'`` takes the mask of the input ``'words'``."""


@dataclass(frozen=True)
class MaskDecoder:
    """The mask of what a decoder makes of a value: True for each of its positions."""

    decoder: Callable[[Any], Any]

    def __call__(self, value: Any) -> npt.NDArray[np.bool_]:
        return np.ones(len(np.asarray(self.decoder(value))), bool)


def mask_inputs(pad: Pad | None, named: object, inputs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Inputs that take the mask of another one: name -> that other input.

    Args:
        pad: What the user asked for; None: no input is padded.
        named: The user's ``features``; an input that is named there takes its column.
    """
    if pad is None:
        return {}
    given = set(named) if isinstance(named, Mapping) else set()
    return {
        name + MASK: name for name in inputs if name + MASK in inputs and name + MASK not in given
    }


def paddings_of(pad: Pad | None, inputs: Mapping[str, TensorSpec]) -> dict[str, Padding]:
    """Input name -> how its rows are padded.

    Args:
        pad: A number is for all inputs whose first dimension is free.

    Raises:
        ConfigError: ``pad`` has no effect, or names an input that has a fixed length.
    """
    if pad is None:
        return {}
    free = [n for n, spec in inputs.items() if spec.shape is None or spec.shape[:1] == (None,)]
    values = dict(pad) if isinstance(pad, Mapping) else dict.fromkeys(free, pad)
    if not values or not set(values) <= set(free):
        raise ConfigError(
            "pad is for inputs whose first dimension is free",
            expected=f"one of {free}" if free else "a model with an input of shape (None,)",
            received=f"pad={pad!r}, and inputs "
            + ", ".join(f"{name} {spec.shape}" for name, spec in inputs.items()),
            hint="keras.Input((None,)), or keras.Input((None, 8)) for rows of vectors",
        )
    for name, value in values.items():
        if "int" in inputs[name].dtype and value != int(value):
            raise ConfigError(
                f"input {name!r} cannot be padded with this number",
                expected=f"a whole number, for an input of {inputs[name].dtype}",
                received=f"pad={pad!r}",
            )
    compiles_each = running_backend() == "jax"
    return {name: Padding(float(value), compiles_each) for name, value in values.items()}


def padded_spec(spec: ColumnSpec, padding: Padding) -> ColumnSpec:
    """A column of arrays as one that is padded.

    Raises:
        DataError: It has no arrays, or their positions have no fixed shape.
    """
    if spec.kind not in ("array", "decoded") or None in spec.shape[1:]:
        raise DataError(
            f"column {spec.label} cannot be padded",
            expected="a column of arrays or vectors, or of values for a decoder, and a model that "
            "fixes all dimensions but the first",
            received=f"a column of kind {spec.kind!r} for an input of shape {spec.shape}",
        )
    return replace(spec, padding=padding)


def few_lengths(spec: DataSpec) -> DataSpec:
    """Rounds the lengths of padded batches, for a backend that compiles for each (JAX).

    For specs that are made where the backend is not running yet.
    """

    def rounded(entry: ColumnSpec) -> ColumnSpec:
        if entry.padding is None:
            return entry
        return replace(entry, padding=replace(entry.padding, few_lengths=True))

    return replace(spec, features={name: rounded(e) for name, e in spec.features.items()})


def mask_spec(name: str, wanted: TensorSpec, padded: ColumnSpec) -> ColumnSpec:
    """The mask of a padded column, for an input of the model.

    Raises:
        DataError: The input does not take one value per position.
    """
    if wanted.shape != (None,):
        raise DataError(
            f"input {name!r} cannot take the mask of column {padded.label}",
            expected="keras.Input((None,), dtype='bool')",
            received=f"an input of shape {wanted.shape}",
            hint=f"features={{{name!r}: 'column', ...}} feeds a column of yours instead",
        )
    compiles_each = padded.padding is not None and padded.padding.few_lengths
    padding = Padding(0.0, compiles_each, math.prod(d or 0 for d in padded.shape[1:]))
    dtype = wanted.dtype_for("bool")
    if padded.decoder is not None:
        decoder = MaskDecoder(padded.decoder)
        return ColumnSpec(
            padded.columns, (None,), dtype, "decoded", decoder=decoder, padding=padding
        )
    return ColumnSpec(padded.columns, (None,), dtype, "mask", padding=padding)
