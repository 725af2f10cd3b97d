"""Matches columns of a DataFrame with a model's inputs and outputs.

Runs on the driver, before a job starts: all that a schema can say is checked here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pyspark.sql import Column
from pyspark.sql import types as T

from sparkdl.data.columns import ColumnKind, ColumnSpec, DataSpec
from sparkdl.errors import DataError
from sparkdl.learner.preprocessing import ROW, SEGMENT, LayerEncoder, space_in
from sparkdl.learner.signature import AS_GIVEN, LABEL, Shape, Signature, TensorSpec, is_whole
from sparkdl.settings.values import shown
from sparkdl.spark.forms.fields import (
    check_vector_size,
    dtype_of,
    element_of,
    expression_error,
    field_of,
    is_number,
    wrong_type,
)
from sparkdl.spark.forms.sequences import Pad, mask_inputs, mask_spec, padded_spec, paddings_of
from sparkdl.spark.forms.wire import ONES, holds_vectors

Decoder = Callable[[Any], Any]


def decoders_of(
    decoder: Decoder | Mapping[str, Decoder] | None, inputs: Collection[str], signature: Signature
) -> dict[str, Decoder]:
    """The decoders by names of inputs, outputs or ``'label'``; a ``FeatureSpace`` is none of them.

    Layers of Keras become encoders.

    Args:
        inputs: Names of the inputs that may have one.

    Raises:
        DataError: One is no function, or of no input and no output.
    """
    space = space_in(decoder) is not None
    if decoder is None or (space and not isinstance(decoder, Mapping)):
        return {}
    only = next(iter(inputs)) if len(inputs) == 1 else "features"
    named = decoder if isinstance(decoder, Mapping) else dict.fromkeys(inputs, decoder)
    given = {
        only if name == "features" else name: made
        for name, made in named.items() if not (space and name == "features")
    }  # fmt: skip
    strange = sorted(set(given) - set(inputs) - {*signature.outputs, "label"})
    if strange:
        raise DataError(
            "a decoder for an unknown input",
            expected=f"names among {[*sorted(inputs), *signature.outputs, 'label']}",
            received=str(strange),
        )
    for made in given.values():
        if not callable(made):
            raise DataError(
                "a decoder must be a function", expected="a function from one value to one array",
                received=repr(made),
            )  # fmt: skip
    return {name: LayerEncoder.of(made) or made for name, made in given.items()}


ColumnNames = str | Iterable[str]
"""One column, or several numeric ones that make up a row of an array."""
InputColumns = ColumnNames | Mapping[str, ColumnNames]
"""The columns of a model's only input (or output), or of each by its name."""

IMAGE_FIELDS = {"origin", "height", "width", "nChannels", "mode", "data"}
"""The fields of Spark's image struct."""


def make_spec(
    schema: T.StructType,
    signature: Signature,
    features: InputColumns,
    label: InputColumns | None,
    sample_weight: str | Mapping[str, str] | None = None,
    decoder: Decoder | Mapping[str, Decoder] | None = None,
    pad: Pad | None = None,
) -> DataSpec:
    """Matches columns with a model's inputs and outputs.

    Args:
        features: A column, several numeric columns, or input name -> either.
        label: A column, several numeric columns, output name -> either, or None (to predict).
        sample_weight: A column of numbers, or of arrays with one for each position of an output's
            sequence or image; or output name -> column. Outputs that are not named weigh all rows
            alike, with a column of ones.
        decoder: Makes an array from a binary or struct value, or (a layer of Keras) of a column of
            texts; one for all inputs, or by name of an input or output, or by ``'features'`` and
            ``'label'``, where there is one.
        pad: Pads arrays of different length; an input called ``'<input>_mask'`` takes their mask.

    Raises:
        DataError: A column is missing or of a type that cannot be fed, or does not fit the model.
        ConfigError: ``pad`` has no effect.
    """
    before = signature.preprocessing
    if before is not None and before.columns:
        if not isinstance(features, Mapping):
            given = before.columns if features == "features" else _names(features, "features")
            features = {name: name for name in given}
    elif before is not None:
        features = _rows(schema, features)
    masks = mask_inputs(pad, features, signature.inputs)
    wanted = {name: spec for name, spec in signature.inputs.items() if name not in masks}
    known, strict = (before.columns, True) if before and before.columns else (
        wanted, signature.named_inputs,
    )  # fmt: skip
    inputs = _match(features, known, "features", "input", strict)
    decoders = decoders_of(decoder, inputs, signature)
    feature_specs = {
        name: _feature(
            schema,
            _names(columns, "features"),
            signature.inputs.get(ROW if before else name),
            decoders.get(name),
        )
        for name, columns in inputs.items()
    }

    def of_label(output: str) -> Decoder | None:
        return None if output in inputs else decoders.get(output, decoders.get("label"))

    for name, padding in paddings_of(pad, wanted).items():
        if name in feature_specs:
            feature_specs[name] = padded_spec(feature_specs[name], padding)
    for mask, name in masks.items():
        feature_specs[mask] = mask_spec(mask, signature.inputs[mask], feature_specs[name])
    if before is not None and before.model is not None:
        label = _label_beside(signature, feature_specs, label)
    label_specs: dict[str, ColumnSpec] = {}
    if label is not None:
        optional = signature.optional_labels
        if isinstance(label, Mapping):  # what has no loss may be left out
            optional -= set(label)
        needed = {name: spec for name, spec in signature.outputs.items() if name not in optional}
        # names that only code of the user's own knows
        own = signature.own_step and set(signature.label_kinds.values()) == {"own"}
        for_all = own and len(signature.outputs) > 1 and not isinstance(label, Mapping)
        outputs = {LABEL: label} if for_all else _match(label, needed, "label", "output", not own)
        label_specs = {
            name: replace(
                _label(schema, _names(columns, "label"), signature, name, of_label(name)),
                bounds=signature.label_bounds(name),
                ignored=signature.ignored_classes.get(name),
            )
            for name, columns in outputs.items()
        }
    weights: dict[str, ColumnSpec] | None = None
    if sample_weight is not None:
        by_output = (
            dict(sample_weight)
            if isinstance(sample_weight, Mapping)
            else dict.fromkeys(label_specs, sample_weight)
        )
        if not by_output or not set(by_output) <= set(label_specs):
            raise DataError(
                "sample_weight names other outputs than label",
                expected=f"a column for one or more of {sorted(label_specs)}",
                received=str(sorted(by_output)),
            )
        ones = ColumnSpec((ONES,), (), "float32", "scalars")
        weights = {
            name: _weight(schema, by_output[name], signature.row_shape(name))
            if name in by_output
            else ones
            for name in label_specs
        }
    return DataSpec(feature_specs, label_specs, weights)


def _rows(schema: T.StructType, features: InputColumns) -> InputColumns:
    if isinstance(features, (str, Mapping, Column)) or not isinstance(features, Iterable):
        return features
    names = list(features)
    kinds = [field_of(schema, name, "features").dataType for name in names]
    if len(names) > 1 and all(isinstance(kind, T.StringType) for kind in kinds):
        return {f"{SEGMENT}{i}": name for i, name in enumerate(names)}
    return names


def _label_beside(
    signature: Signature, features: Mapping[str, ColumnSpec], label: InputColumns | None
) -> InputColumns | None:
    """The label columns beside rows for a preprocessor, which may make labels of its own."""
    assert signature.preprocessing is not None
    makes_labels = bool(signature.preprocessing.example(DataSpec(features), 2).y)
    if makes_labels and label not in (None, "label"):
        raise DataError(
            "a column of labels would not be used",
            expected="label=None: the model's preprocessor makes the labels of the features",
            received=f"label={label!r}",
        )
    return None if makes_labels else label


def _match(
    given: Any, wanted: Mapping[str, object], argument: str, what: str, strict: bool
) -> dict[str, Any]:
    """The columns that the user named for each of the model's inputs (or outputs)."""
    if isinstance(given, Mapping):
        names = dict(given)
        if strict and set(names) != set(wanted):
            raise DataError(
                f"{argument} names other {what}s than the model has",
                expected=f"{what}s {sorted(wanted)}", received=str(sorted(names)),
            )  # fmt: skip
        return names
    if len(wanted) > 1:
        raise DataError(
            f"the model has {len(wanted)} {what}s, and {argument} tells none by its name",
            expected=f"{argument}={{{', '.join(f'{n!r}: column' for n in wanted)}}}",
            received=repr(given),
        )
    return {next(iter(wanted)): given}


def _names(columns: ColumnNames, argument: str) -> tuple[str, ...]:
    if isinstance(columns, str):
        return (columns,)
    if isinstance(columns, Column):
        raise expression_error(columns, argument)
    if not isinstance(columns, Iterable):
        raise DataError(
            f"{argument} must name columns", expected="a name, or several",
            received=f"{type(columns).__name__} {shown(columns)}",
        )  # fmt: skip
    return tuple(columns)


def _feature(
    schema: T.StructType,
    columns: tuple[str, ...],
    wanted: TensorSpec | None,
    decoder: Decoder | None,
) -> ColumnSpec:
    """How to read the columns of one input."""
    if not columns:
        raise DataError("features names no column", expected="at least one", received="()")
    fields = [field_of(schema, name, "features") for name in columns]
    wanted = TensorSpec("", None, "float32") if wanted is None else wanted
    encoder = LayerEncoder.of(decoder)
    if encoder is not None and isinstance(fields[0].dataType, T.StringType):
        return _encoded(
            fields, "features", encoder, lambda made: _feature(made, columns, wanted, None)
        )
    dtype, shape = wanted.dtype_for(dtype_of(*(field.dataType for field in fields))), wanted.shape
    text = wanted.dtype == AS_GIVEN and isinstance(fields[0].dataType, T.StringType)
    if (dtype == "string" or text) and decoder is None:
        return _text(fields, () if text else shape)
    if len(fields) > 1:
        for field in fields:
            if not is_number(field.dataType):
                raise wrong_type(field, "features", "numeric columns when several are named")
        return ColumnSpec(columns, _scalars_shape(columns, shape), dtype, "scalars")
    field = fields[0]
    kind = field.dataType
    if decoder is not None:
        if not isinstance(kind, (T.BinaryType, T.StructType, T.StringType)):
            raise wrong_type(field, "features", "a binary, image or string column for a decoder")
        return ColumnSpec(columns, _known(shape, field), dtype, "decoded", decoder=decoder)
    if holds_vectors(kind):
        check_vector_size(field, shape)
        return ColumnSpec(columns, (None,) if shape is None else shape, dtype, "array")
    if isinstance(kind, T.ArrayType):
        depth, element = element_of(kind)
        if not is_number(element):
            raise wrong_type(field, "features", "an array of numbers")
        return ColumnSpec(columns, (None,) * depth if shape is None else shape, dtype, "array")
    if is_number(kind):
        rows = () if wanted.dtype == AS_GIVEN else _scalars_shape(columns, shape)
        return ColumnSpec(columns, rows, dtype, "scalars")
    if isinstance(kind, T.BinaryType):
        return ColumnSpec(columns, _known(shape, field), dtype, "binary")
    if isinstance(kind, T.StructType) and set(kind.names) >= IMAGE_FIELDS:
        return ColumnSpec(columns, (None, None, None) if shape is None else shape, dtype, "image")
    raise wrong_type(
        field, "features", "numbers, an array, an ML vector, an image, or bytes with a decoder"
    )


def _text(fields: list[T.StructField], shape: Shape | None) -> ColumnSpec:
    """How to read the column of an input that takes text."""
    if len(fields) > 1 or shape not in ((), (1,)):
        raise DataError(
            "an input of text takes one column, with one string per row",
            expected="keras.Input((1,), dtype='string') and a column for it",
            received=f"an input of shape {shape} and {len(fields)} columns",
            hint="an input for each column: features={'input name': 'column', ...}",
        )
    if not isinstance(fields[0].dataType, T.StringType):
        raise wrong_type(fields[0], "features", "a column of strings, for an input of text")
    return ColumnSpec((fields[0].name,), shape, "string", "text")


def _encoded(
    fields: list[T.StructField],
    argument: str,
    encoder: LayerEncoder,
    read: Callable[[T.StructType], ColumnSpec],
) -> ColumnSpec:
    """How to read a column of texts of which a layer makes what ``read`` reads of its like."""
    if len(fields) > 1 or not isinstance(fields[0].dataType, T.StringType):
        raise wrong_type(fields[-1], argument, "one column of strings, for a layer as its decoder")
    whole, dimensions = encoder.kind(repr(fields[0].name))
    kind: T.DataType = T.LongType() if whole else T.FloatType()
    for _ in range(dimensions - 1):
        kind = T.ArrayType(kind)
    spec = read(T.StructType([T.StructField(fields[0].name, kind)]))
    return replace(spec, kind="text", encoder=encoder)


def _label(
    schema: T.StructType,
    columns: tuple[str, ...],
    signature: Signature,
    output: str,
    decoder: Decoder | None = None,
) -> ColumnSpec:
    """How to read the columns of one output's labels; of texts with a layer of Keras."""
    if decoder is not None:
        encoder = LayerEncoder.of(decoder)
        if encoder is None:
            raise DataError(
                "the decoder of a label makes numbers of a column of strings",
                expected="a layer of Keras, such as StringLookup", received=shown(decoder),
            )  # fmt: skip
        fields = [field_of(schema, name, "label") for name in columns]
        return _encoded(
            fields, "label", encoder, lambda made: _label(made, columns, signature, output)
        )
    if len(columns) != 1:
        return _several_labels(schema, columns, signature, output)
    name = columns[0]
    field = field_of(schema, name, "label")
    if signature.label_kinds.get(output, "own") == "own":
        return _own_label(field, signature, output)
    shape, kind = signature.outputs[output].shape, field.dataType
    if signature.label_kinds.get(output) == "sparse":
        classes, rest = signature.class_labels(output)
        if is_number(kind):
            if rest:
                raise DataError(
                    f"label {name!r} does not fit output {output!r}",
                    expected=f"an array of class labels of shape {rest}",
                    received=kind.simpleString(),
                )
            return ColumnSpec((name,), (), "int32", "scalars", classes=classes)
        if isinstance(kind, T.ArrayType) and is_number(element_of(kind)[1]):
            return ColumnSpec((name,), rest or (1,), "int32", "array", classes=classes)
        raise wrong_type(field, "label", "integer class labels")
    dtype = label_dtype(signature, output, dtype_of(kind))
    if is_number(kind):
        if shape and math.prod(d or 0 for d in shape) > 1:
            if output in signature.number_losses:
                raise one_number_error(f"label {name!r}", output, signature)
            if len(shape) == 1 and shape[0] is not None:
                return ColumnSpec((name,), shape, "float32", "scalars", one_hot=shape[0])
            raise DataError(
                f"label {name!r} does not fit output {output!r}",
                expected=f"an array of shape {shape}", received=kind.simpleString(),
            )  # fmt: skip
        # Code of the user's own gets one number per row as (n,), which Keras would give it, too.
        as_output = shape == (1,) and not signature.own_step
        return ColumnSpec((name,), (1,) if as_output else (), dtype, "scalars")
    if holds_vectors(kind):
        check_vector_size(field, shape)
        return ColumnSpec((name,), (None,) if shape is None else shape, dtype, "array")
    if isinstance(kind, T.ArrayType) and is_number(element_of(kind)[1]):
        depth = element_of(kind)[0]
        return ColumnSpec((name,), (None,) * depth if shape is None else shape, dtype, "array")
    if isinstance(kind, T.StructType) and set(kind.names) >= IMAGE_FIELDS:
        return ColumnSpec((name,), (None, None, None) if shape is None else shape, dtype, "image")
    if isinstance(kind, T.BinaryType):
        return ColumnSpec((name,), _known(shape, field), dtype, "binary")
    raise wrong_type(field, "label", "numbers, an array or an ML vector")


def one_number_error(what: str, output: str, signature: Signature) -> DataError:
    """The error for one number where a loss compares as many as the output has units."""
    shape, loss = signature.outputs[output].shape, signature.number_losses[output]
    return DataError(
        f"{what} does not fit output {output!r}",
        expected=f"an array of shape {shape}: loss {loss} compares numbers, one for each unit",
        received="one number per row",
        hint="a last layer of one unit, Dense(1), for one number; for classes "
        "loss='sparse_categorical_crossentropy' or 'categorical_crossentropy'",
    )


def _several_labels(
    schema: T.StructType, columns: tuple[str, ...], signature: Signature, output: str
) -> ColumnSpec:
    fields = [field_of(schema, name, "label") for name in columns]
    for field in fields:
        if not is_number(field.dataType):
            raise wrong_type(field, "label", "numeric columns when several are named")
    kind = signature.label_kinds.get(output, "own")
    shape = None if kind == "own" else signature.outputs[output].shape
    if not columns or kind == "sparse":
        raise DataError(
            f"label does not fit output {output!r}",
            expected="one column of class labels" if columns else "at least one column",
            received=repr(columns),
        )
    shape = _scalars_shape(columns, shape, "label", "output")
    return ColumnSpec(columns, shape, "float32", "scalars")


def _own_label(field: T.StructField, signature: Signature, output: str) -> ColumnSpec:
    """Labels for a loss of the user's own: as they are, since only the loss knows what it wants."""
    kind = field.dataType
    depth, element = element_of(kind) if isinstance(kind, T.ArrayType) else (0, kind)
    if holds_vectors(kind):
        return ColumnSpec((field.name,), (None,), "float32", "array")
    if not is_number(element):
        raise wrong_type(field, "label", "numbers, an array or an ML vector")
    dtype = label_dtype(signature, output, dtype_of(element))
    spec_kind: ColumnKind = "array" if depth else "scalars"
    return ColumnSpec((field.name,), (None,) * depth, dtype, spec_kind)


def label_dtype(signature: Signature, output: str, given: str) -> str:
    """The dtype of labels of dtype ``given``: code of the user's own gets integers as they are."""
    own = signature.own_step or signature.label_kinds.get(output) == "own"
    return given if own and is_whole(given) else "float32"


def _weight(schema: T.StructType, name: str, output: Shape | None) -> ColumnSpec:
    """How to read a column of sample weights: one of a row, or an array of its positions'."""
    field = field_of(schema, name, "sample_weight")
    if is_number(field.dataType):
        return ColumnSpec((name,), (), "float32", "scalars")
    if not isinstance(field.dataType, T.ArrayType) or not is_number(element_of(field.dataType)[1]):
        raise wrong_type(field, "sample_weight", "numbers, or an array of one for each position")
    depth = element_of(field.dataType)[0]
    if output is None:
        return ColumnSpec((name,), (None,) * depth, "float32", "array")
    if depth > len(output):
        raise DataError(
            f"sample_weight {name!r} does not fit the model",
            expected="one number per row"
            if len(output) < 2
            else f"one number per row, or an array of shape {output[:-1]}",
            received=field.dataType.simpleString(),
        )
    positions = output[:depth] if depth < len(output) else (*output[:-1], 1)
    return ColumnSpec((name,), positions, "float32", "array")


def _scalars_shape(
    columns: tuple[str, ...], shape: Shape | None, argument: str = "feature", side: str = "input"
) -> Shape:
    """The shape of a row made of numeric columns: the model's, if they are as many values."""
    count = len(columns)
    if shape is None:
        return (count,)
    size = math.prod(d if d is not None else count for d in shape)
    if size != count:
        raise DataError(
            f"the number of {argument} columns does not fit the model's {side}",
            expected=f"{size} values per row, for an {side} of shape {shape}",
            received=f"{count}: {', '.join(map(repr, columns))}",
        )
    return shape


def _known(shape: Shape | None, field: T.StructField) -> Shape:
    """``shape``, if the model has one: bytes do not tell theirs."""
    if shape is None:
        raise DataError(
            f"the shape of column {field.name!r} cannot be known",
            expected="a model whose input shape is fixed",
            received="a subclassed model that has not been built on an input shape",
            hint="call the model once on an example batch, or start it with keras.Input",
        )
    return shape
