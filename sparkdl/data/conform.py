"""Decoded values -> the shape and dtype of their spec, or an error that names column and row."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.data.columns import Array, ColumnSpec, IndexArray, Ragged, Shape, Stored
from sparkdl.errors import DataError

_ROUNDING = 1e-5


@dataclass(frozen=True)
class ValuePlace:
    """The place of a value, for error messages.

    Args:
        label: The column's name in quotes, or several.
        spec: The spec that is being read.
        first_row: Number of the batch's first row in its partition.
        lengths: Positions of each row, where values are counted by positions and not by rows.
    """

    label: str
    spec: ColumnSpec
    first_row: int
    lengths: IndexArray | None = None

    def error(
        self, problem: str, *, expected: str, received: str, row: int | None = None, hint: str = ""
    ) -> DataError:
        """An error about these columns and, if given, the ``row`` of the batch."""
        if row is not None and self.lengths is not None:
            row = int(np.searchsorted(np.cumsum(self.lengths), row, side="right"))
        where = "" if row is None else f", row {self.first_row + row} of the partition"
        return DataError(
            f"column {self.label}{where}: {problem}", expected=expected, received=received,
            hint=hint,
        )  # fmt: skip

    def wrong_value(
        self, values: Array, bad: npt.NDArray[np.bool_], problem: str, expected: str, hint: str
    ) -> DataError:
        """An error about the first of the ``values`` that is ``bad``."""
        index = np.unravel_index(int(np.argmax(bad)), bad.shape)
        return self.error(
            problem, row=int(index[0]), expected=expected, received=str(values[index]), hint=hint
        )

    def check_nulls(self, array: Any, per_row: int | None = None) -> None:
        """Refuses nulls in an Arrow array.

        Args:
            array: One value per row, or what is inside the arrays of the rows.
            per_row: The number of values inside each row; None for the rows themselves.
        """
        if not array.null_count:
            return
        first = int(np.argmax(pc.is_null(array).to_numpy(zero_copy_only=False)))
        hint = "df.dropna() removes such rows, df.fillna() or an Imputer fills them"
        if per_row is not None:
            hint = (
                "df.dropna() and df.fillna() do not look inside arrays: there "
                "F.transform(column, lambda v: F.coalesce(v, F.lit(0.0))) fills nulls, and "
                "df.filter(~F.exists(column, lambda v: v.isNull())) drops the rows"
            )
        raise self.error(
            "the model takes no nulls" + (" inside an array" if per_row is not None else ""),
            row=first // max(per_row or 1, 1), expected="no nulls",
            received=f"{array.null_count} nulls in this batch of rows", hint=hint,
        )  # fmt: skip


def is_text(kind: object) -> bool:
    """Whether an Arrow type holds texts, views of them included (which pyarrow has from 16 on)."""
    return str(kind) in ("string", "large_string", "string_view")


def is_numeric(kind: object) -> bool:
    """Whether an Arrow type holds single numbers."""
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    )


def numbers_of(array: Any, place: ValuePlace, per_row: int | None = None) -> Array:
    """A primitive Arrow array without nulls as a flat NumPy array of its own dtype.

    Args:
        array, per_row: As for :meth:`ValuePlace.check_nulls`.
    """
    place.check_nulls(array, per_row)
    if pa.types.is_decimal(array.type):
        kind = place.spec.value_dtype.kind
        wide = {"i": pa.int64(), "u": pa.uint64()}.get(kind, pa.float64())
        for whole in (pa.int64(), pa.uint64()) if kind == "f" and array.type.scale <= 0 else ():
            with contextlib.suppress(pa.ArrowInvalid):  # an integer, of which no digit is lost
                return numbers_of(array.cast(whole), place, per_row)
        try:
            array = array.cast(wide)
        except pa.ArrowInvalid as error:
            limits = np.iinfo(str(wide))
            odd = (v for v in array.to_pylist() if v % 1 or not limits.min <= v <= limits.max)
            raise place.error(
                f"a value that {wide} cannot hold", received=str(next(odd, error)),
                expected=f"whole numbers in [{limits.min}, {limits.max}]",
            ) from error  # fmt: skip
    if pa.types.is_boolean(array.type):
        flags: Array = array.to_numpy(zero_copy_only=False)
        return flags
    if pa.types.is_integer(array.type) or pa.types.is_floating(array.type):
        numbers: Array = array.to_numpy(zero_copy_only=True)
        return numbers
    raise place.error(
        "values that are not numbers",
        expected=f"numbers for shape {place.spec.shape} and dtype {place.spec.dtype}",
        received=f"Arrow type {array.type}",
        hint="StringIndexer or a hash makes numbers of strings; images need a decoder",
    )


def conform(values: Array, spec: ColumnSpec, first_row: int = 0) -> Array:
    """Gives decoded rows the shape of ``spec`` and its dtype in compact form; checks labels."""
    place = ValuePlace(spec.label, spec, first_row)
    return compact(check_labels(_fit(values, place), spec, place), spec, place)


def empty_stored(spec: ColumnSpec) -> Stored:
    """No rows, as they are stored."""
    if not spec.is_ragged:
        return empty_rows(spec)
    return Ragged(np.empty((0, *spec.position_shape), spec.value_dtype), np.empty(0, np.int64))


def empty_rows(spec: ColumnSpec) -> Array:
    """No rows, in the shape and dtype of the spec; free dimensions are 0."""
    return np.empty((0, *(d or 0 for d in spec.value_shape)), spec.value_dtype)


def matches(shape: Sequence[int], wanted: Shape) -> bool:
    """Whether a shape is the one wanted, in which None stands for any size."""
    return len(shape) == len(wanted) and all(
        w is None or d == w for d, w in zip(shape, wanted, strict=True)
    )


def shape_error(
    shape: Sequence[int | None], place: ValuePlace, row: int | None, problem: str
) -> DataError:
    """The error for rows whose shape is not that of the spec."""
    return place.error(
        problem,
        row=row,
        expected=f"shape {place.spec.value_shape} per row",
        received=f"shape {tuple(shape)}",
        hint=_one_hot_hint(shape, place.spec)
        or "the shape comes from the model's input or output; reshape the column or the model",
    )


def _one_hot_hint(shape: Sequence[int | None], spec: ColumnSpec) -> str:
    if spec.classes is None or spec.classes < 2 or tuple(shape)[-1:] != (spec.classes,):
        return ""
    return (
        "these look like one-hot vectors, and the loss wants class numbers: compile with "
        "loss='categorical_crossentropy', or give y.argmax(-1)"
    )


def _fit(values: Array, place: ValuePlace) -> Array:
    """Gives ``(num_rows, ...)`` the per-row shape of the spec if the sizes agree."""
    rows, dims, wanted = len(values), values.shape[1:], place.spec.value_shape
    if rows == 0:
        return empty_rows(place.spec).astype(values.dtype)
    size = math.prod(dims)
    if size == 0:
        raise shape_error(dims, place, None, "rows without any values")
    if matches(dims, wanted):
        return values
    known = math.prod(d for d in wanted if d is not None)
    free = sum(d is None for d in wanted)
    if free == 0 and size == known:
        return values.reshape(rows, *(d or 0 for d in wanted))
    if free == 1 and len(dims) == 1 and known and size % known == 0:
        return values.reshape(rows, *(size // known if d is None else d for d in wanted))
    raise shape_error(dims, place, None, "values whose shape does not fit")


def compact(values: Array, spec: ColumnSpec, place: ValuePlace) -> Array:
    """Casts to the dtype wanted, unless the values are narrower and widen without loss."""
    target = spec.value_dtype
    native = values.dtype.newbyteorder("=")
    values = values.astype(native, copy=False)
    narrower = native.itemsize < target.itemsize and np.can_cast(native, target, "safe")
    return values if narrower else cast(values, target, place)


def cast(values: Array, target: np.dtype[Any], place: ValuePlace, row: int | None = None) -> Array:
    """Casts, and refuses what the dtype cannot hold instead of cutting it off or rounding it."""
    with np.errstate(over="ignore", invalid="ignore"):
        made = (values.real if target.kind != "c" else values).astype(target, copy=False)
    bad, expected, hint = lost(values, made)
    if bad.any():
        index = np.unravel_index(int(np.argmax(bad)), bad.shape)
        raise place.error(
            f"a value that {target} cannot hold",
            row=int(index[0]) if row is None and index else row, expected=expected,
            received=str(values[index]), hint=hint,
        )  # fmt: skip
    return made


def lost(values: Array, made: Array) -> tuple[npt.NDArray[np.bool_], str, str]:
    """True where a cast has changed an integer, or lost what an integer dtype does not hold (empty
    if it cannot); what was expected; a hint. Numbers with a point are rounded, as in Keras."""
    source, target = values.dtype, made.dtype
    if source.kind == "c" and target.kind != "c":
        return values.imag != 0, "real numbers", ""
    if target.kind == "b" and source.kind != "b":
        return (values != 0) & (values != 1), "0 or 1", ""
    if target.kind in "iu" and not np.can_cast(source, target, "safe"):
        limits = np.iinfo(target)
        bad = (values < limits.min) | (values > limits.max)
        if source.kind == "f":
            # float(max) may round up to a number that no longer fits.
            bad |= (values >= float(limits.max) + 1) | (values != np.floor(values))
        return bad, f"whole numbers in [{limits.min}, {limits.max}]", ""
    if source.kind in "iu" and target.kind == "f" and values.size:
        most = 2 ** (np.finfo(target).nmant + 1)
        if values.min() < -most or values.max() > most:
            wide = made.astype(np.float64)
            with np.errstate(invalid="ignore"):
                bad = ~np.isfinite(wide) | (wide >= float(np.iinfo(source).max) + 1)
                bad |= wide.astype(source) != values
            return (
                bad, f"whole numbers that {target} holds exactly, as all up to {most}",
                "the model's input, or the column asked for, of an integer dtype keeps all digits; "
                "F.col(...).cast('double') makes numbers that may be rounded",
            )  # fmt: skip
    return np.zeros(0, np.bool_), "", ""


def check_labels(values: Array, spec: ColumnSpec, place: ValuePlace) -> Array:
    """Returns ``values`` if they are what the loss takes: within bounds, or class numbers.

    Sample weights are not below 0.
    """
    if values.size == 0:
        return values
    if spec.is_weight:
        _check_weights(values, place)
    if spec.bounds is not None and spec.one_hot is None:
        _check_bounds(values, spec.bounds, place)
    classes = spec.num_classes
    if classes is None:
        return values
    low, high = values.min(), values.max()
    whole = values.dtype.kind != "f" or bool((values == np.floor(values)).all())
    if low >= 0 and high < classes and whole:
        return values
    bad = (values < 0) | (values >= classes) | (values != np.floor(values))
    if spec.ignored is not None:
        bad &= values != spec.ignored
        if not bad.any():
            return values
    raise place.wrong_value(
        values, bad, "a label out of range",
        f"integers from 0 to {classes - 1}: the model has {classes} classes",
        "labels start at 0; the model's last layer needs one unit per class",
    )  # fmt: skip


def _check_bounds(values: Array, bounds: tuple[float, float], place: ValuePlace) -> None:
    """Refuses a label outside of ``bounds``; NaN passes, which ``check_data`` finds."""
    low, high = bounds[0] - _ROUNDING, bounds[1] + _ROUNDING
    if values.min() >= low and values.max() <= high:
        return
    bad = (values < low) | (values > high)
    if not bad.any():
        return
    limits = f"from {bounds[0]:g} to {bounds[1]:g}" if bounds[1] < math.inf else "of at least 0"
    hint = "train on other numbers with loss='mse'"
    if bounds == (0, 1):
        hint = (
            "make labels of -1 and +1 (y + 1) / 2, number several classes for "
            f"sparse_categorical_crossentropy, and {hint}"
        )
    raise place.wrong_value(
        values, bad, "a label that the loss does not take",
        f"numbers {limits}, for which the model's loss has a meaning", hint,
    )  # fmt: skip


def _check_weights(values: Array, place: ValuePlace) -> None:
    """Refuses a weight below 0, whose row would drive the model away from its label."""
    bad = values < 0
    if bad.any():
        raise place.wrong_value(
            values, bad, "a sample weight below 0", "numbers of at least 0, as for class_weight",
            "a weight of 0 leaves a row out",
        )  # fmt: skip
