"""RDDs: their elements, ``(x, y)`` or ``LabeledPoint``, as the bytes of arrays.

The driver makes a :class:`PairEncoder` from the model's shapes; executors call it. To predict,
executors stack inputs with :func:`stack_inputs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from sparkdl.data import ColumnSpec, DataSpec
from sparkdl.data.arrays import as_numbers
from sparkdl.data.columns import Array
from sparkdl.data.conform import lost
from sparkdl.errors import DataError
from sparkdl.learner.signature import Signature, TensorSpec
from sparkdl.spark.forms.matching import label_dtype, one_number_error
from sparkdl.spark.forms.shared_rows import read_to_end
from sparkdl.spark.forms.sources import Columns, Form, Source
from sparkdl.spark.forms.wire import PROBLEM, pack_problem, wire_names
from sparkdl.spark.session.running import require_running_rdd, session_of, this_interpreter


class RddForm(Form):
    """An RDD of ``(x, y)`` pairs or ``LabeledPoint``; for ``predict`` one of inputs."""

    words: ClassVar[str] = "an RDD"

    def open(self, signature: Signature, columns: Columns) -> Source:
        """A frame of the bytes that executors make of the RDD's elements."""
        require_running_rdd(self.data)
        if signature.preprocessing is not None:
            raise DataError(
                "an RDD does not say of what kind its elements are, for a model's preprocessor",
                expected="a DataFrame", received="an RDD", hint="rdd.toDF(['text', 'label'])",
            )  # fmt: skip
        spark = session_of()
        free = any(spec.takes_whole for spec in signature.inputs.values())
        told = free or signature.own_step or "own" in signature.label_kinds.values()
        encoder = pair_encoder(signature, self.data.take(_TOLD) if told else ())
        spec = DataSpec(encoder.features, encoder.labels)
        fields = [f"{name} binary" for name in wire_names(len(spec.columns))]
        schema = ", ".join([*fields, f"{PROBLEM} string"])
        with this_interpreter(self.data.context):
            frame = spark.createDataFrame(self.data.mapPartitions(encoder), schema)
        return Source(frame, spec)


_TOLD = 32
"""Elements that tell the dtypes of an RDD's values, where the model takes integers as they are."""


def pair_encoder(signature: Signature, first: Sequence[Any] = ()) -> PairEncoder:
    """The encoder of an RDD's elements as rows of bytes, by the model's own, fixed shapes.

    The ``first`` elements tell the dtypes that the model leaves open.

    Raises:
        DataError: A shape of the model is free.
    """
    labels: dict[str, ColumnSpec] = {}
    for name, spec in signature.outputs.items():
        if name in signature.optional_labels:
            continue
        kind = signature.label_kinds.get(name)
        told = [_parts(y, signature.outputs).get(name) for _, y in map(_sides, first)]
        dtype = label_dtype(signature, name, _dtype(told))
        if kind == "sparse":
            classes, rest = signature.class_labels(name)
            labels[name] = ColumnSpec(
                (f"label {name}",), tuple(d or 1 for d in rest), "int32", "binary",
                classes=classes, ignored=signature.ignored_classes.get(name),
            )  # fmt: skip
        elif kind == "own":
            labels[name] = ColumnSpec((f"label {name}",), (None,), dtype, "binary")
        else:
            bounds = signature.label_bounds(name)
            labels[name] = replace(_fixed(spec, "output"), bounds=bounds, dtype=dtype)
    features = rdd_features(signature, [x for x, _ in map(_sides, first)])
    return PairEncoder(features, labels, signature)


def rdd_features(signature: Signature, rows: Sequence[Any] = ()) -> dict[str, ColumnSpec]:
    """How an RDD's inputs become arrays: by the model's own, fixed shapes, and the dtypes of some
    ``rows`` where the model leaves them open."""
    specs = {}
    for name, wanted in signature.inputs.items():
        told = [_parts(row, signature.inputs).get(name) for row in rows]
        specs[name] = _fixed(replace(wanted, dtype=wanted.dtype_for(_dtype(told))), "input")
    return specs


def _dtype(values: Sequence[Any]) -> str:
    dtypes = {_as_array(value).dtype for value in values}
    known = dtypes and all(dtype.kind in "biuf" for dtype in dtypes)
    return np.result_type(*dtypes).name if known else "float32"


def _sides(row: Any) -> tuple[Any, Any]:
    if hasattr(row, "features") and hasattr(row, "label"):
        return row.features, row.label
    x, y = row if isinstance(row, (tuple, list)) and len(row) == 2 else (None, None)
    return x, y


def stack_inputs(rows: list[Any], signature: Signature, first_row: int) -> dict[str, Any]:
    """A list of inputs ``x`` (or pairs, or LabeledPoints) as one array per model input."""
    known = rdd_features(signature)
    inputs = []
    for row in rows:
        x = row.features if hasattr(row, "features") and hasattr(row, "label") else row
        if isinstance(x, tuple) and len(x) == 2 and not _fits(x, known) and _fits(x[0], known):
            x = x[0]
        inputs.append(x)
    specs = rdd_features(signature, inputs)
    raw: dict[str, list[bytes]] = {name: [] for name in specs}
    for number, x in enumerate(inputs, first_row):
        for name, content in zip(specs, _encode(x, specs, number, "x"), strict=True):
            raw[name].append(content)
    return {
        name: np.frombuffer(b"".join(raw[name]), np.dtype(s.dtype)).reshape(len(rows), *s.shape)
        for name, s in specs.items()
    }


def _fits(x: Any, specs: Mapping[str, ColumnSpec]) -> bool:
    if isinstance(x, Mapping):
        return set(x) == set(specs)
    parts = x if len(specs) > 1 else [x]
    if not isinstance(parts, (list, tuple)) or len(parts) != len(specs):
        return False
    try:
        sizes = [int(p.size) if hasattr(p, "size") else int(np.size(p)) for p in parts]
    except ValueError:
        return False
    return sizes == [math.prod(d or 0 for d in spec.shape) for spec in specs.values()]


def _fixed(spec: TensorSpec, what: str) -> ColumnSpec:
    if spec.shape is None or any(d is None for d in spec.shape):
        raise DataError(
            f"an RDD needs a model whose {what} shapes are fixed",
            expected=f"a fixed shape for {what} {spec.name!r}", received=f"shape {spec.shape}",
            hint="build the model with keras.Input(shape), or use a DataFrame",
        )  # fmt: skip
    prefix = "x" if what == "input" else "label"
    dtype = spec.dtype if what == "input" else "float32"
    return ColumnSpec((f"{prefix} {spec.name}",), spec.shape, dtype, "binary")


@dataclass(frozen=True)
class PairEncoder:
    """Rows ``(x, y)`` or ``LabeledPoint`` -> tuples of little-endian bytes (on the executor).

    The last field is None, or an error that ends the partition: raised here, it would be an
    error of Spark's, retried and without its beats.
    """

    features: dict[str, ColumnSpec]
    labels: dict[str, ColumnSpec]
    signature: Signature | None = None

    def __call__(self, rows: Iterable[Any]) -> Iterator[tuple[bytes | str | None, ...]]:
        rows = iter(rows)
        for number, row in enumerate(rows):
            try:
                values = self._encode_row(row, number)
            except DataError as error:
                count = len(self.features) + len(self.labels)
                yield (*[None] * count, pack_problem(error))
                read_to_end(rows)
                return
            yield (*values, None)

    def _encode_row(self, row: Any, number: int) -> list[bytes]:
        x, y = _sides(row)
        if x is None:
            raise DataError(
                f"row {number} of a partition is no example",
                expected="a pair (x, y) or a LabeledPoint", received=f"{type(row).__qualname__}",
            )  # fmt: skip
        return [*_encode(x, self.features, number, "x"), *self._encode_labels(y, number)]

    def _encode_labels(self, y: Any, number: int) -> Iterator[bytes]:
        if self.signature is not None and np.ndim(y) == 0:
            for name, spec in self.labels.items():
                several = math.prod(d or 0 for d in spec.shape) > 1
                if several and name in self.signature.number_losses:
                    raise one_number_error(f"y of row {number}", name, self.signature)
        return _encode(y, self.labels, number, "y")


def _parts(value: Any, names: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    listed = isinstance(value, (list, tuple)) and len(names) > 1
    return dict(zip(names, value if listed else [value], strict=False))


def _encode(value: Any, specs: Mapping[str, ColumnSpec], number: int, side: str) -> Iterator[bytes]:
    parts = _parts(value, specs)
    if set(parts) != set(specs):
        raise DataError(
            f"{side} of row {number} does not fit the model",
            expected=f"{len(specs)} parts, for {list(specs)}", received=f"{len(parts)}",
        )  # fmt: skip
    for name, spec in specs.items():
        yield encode_value(parts[name], spec, number)


def _as_array(value: Any) -> Array:
    try:
        return as_numbers(value.toArray() if hasattr(value, "toArray") else value)
    except ValueError:  # lists of unequal length
        return np.asarray(None)


def encode_value(value: Any, spec: ColumnSpec, number: int) -> bytes:
    """One value as the bytes of the array that the model wants."""
    array = _as_array(value)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"row {number}: {spec.label} is no array of numbers",
            expected=f"numbers of shape {spec.shape}",
            received=f"{type(value).__qualname__} {str(value)[:60]}",
        )
    if None not in spec.shape:
        size = math.prod(d or 0 for d in spec.shape)
        if array.size == 1 and size > 1 and spec.label.startswith("'label "):
            return _one_hot(array, size, spec, number)
        if array.size != size:
            raise DataError(
                f"row {number}: {spec.label} does not fit the model",
                expected=f"shape {spec.shape}", received=f"shape {array.shape}",
            )  # fmt: skip
    dtype = np.dtype(spec.dtype).newbyteorder("<")
    with np.errstate(invalid="ignore", over="ignore"):
        encoded = array.astype(dtype)
    bad, expected, hint = lost(array, encoded)
    if bad.any():
        raise DataError(
            f"row {number}: {spec.label} has a value that {spec.dtype} cannot hold",
            expected=expected, received=str(array[bad][0]), hint=hint,
        )  # fmt: skip
    return bytes(encoded.tobytes())


def _one_hot(array: Any, size: int, spec: ColumnSpec, number: int) -> bytes:
    label = float(array.reshape(-1)[0])
    if not 0 <= label < size or label != int(label):
        raise DataError(
            f"row {number}: a label is out of range", expected=f"a class in [0, {size})",
            received=str(label),
        )  # fmt: skip
    row = np.zeros(size, np.dtype(spec.dtype).newbyteorder("<"))
    row[int(label)] = 1
    return row.tobytes()
