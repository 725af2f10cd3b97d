"""decode: known answers for each kind of column, and one clear error for each kind of bad data."""

from __future__ import annotations

import dataclasses
import decimal
import pickle

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.data import Batch, ColumnSpec, DataSpec, decode, rows_from_numpy
from sparkdl.errors import ConfigError, DataError, UnknownNameError


def one(array, shape, dtype="float32", kind="array", first_row=0, **options):
    """Decodes one Arrow array as the only feature."""
    batch = pa.RecordBatch.from_pydict({"c": array})
    spec = DataSpec({"x": ColumnSpec(("c",), shape, dtype, kind, **options)})
    return decode(batch, spec, first_row).x["x"]


def check(array, want, dtype="float32"):
    assert array.dtype == dtype
    np.testing.assert_array_equal(array, want)


ROWS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


@pytest.mark.parametrize("item", [pa.float32(), pa.float64(), pa.int32(), pa.int8(), pa.float16()])
@pytest.mark.parametrize("make", [pa.list_, pa.large_list, lambda t: pa.list_(t, 2)])
def test_lists_of_numbers(item, make):
    rows = [list(row) for row in np.array(ROWS).astype(item.to_pandas_dtype())]
    check(one(pa.array(rows, make(item)), (2,)), ROWS)


def test_lists_of_decimals_and_booleans():
    rows = [[decimal.Decimal("1.5"), decimal.Decimal("2")]]
    check(one(pa.array(rows, pa.list_(pa.decimal128(10, 2))), (2,)), [[1.5, 2]])
    check(one(pa.array([[True, False]]), (2,)), [[1, 0]])
    check(one(pa.array([[True, False]]), (2,), "bool"), [[True, False]], "bool")


@pytest.mark.parametrize("make", [pa.list_, pa.large_list, lambda t: pa.list_(t, 2)])
def test_a_slice_keeps_its_offset(make):
    array = pa.array([[0.0, 0.0], *ROWS, [9.0, 9.0]], make(pa.float32())).slice(1, 3)
    check(one(array, (2,)), ROWS)


def test_float32_lists_are_not_copied():
    values = pa.array(np.arange(6, dtype=np.float32))
    array = pa.ListArray.from_arrays(pa.array([0, 2, 4, 6], pa.int32()), values)
    assert np.shares_memory(one(array, (2,)), values.to_numpy())


@pytest.mark.parametrize("offset", [0, 1])
def test_nested_lists(offset):
    want = np.arange(4 * 2 * 3 * 2, dtype=np.float32).reshape(4, 2, 3, 2)
    array = pa.array(want.tolist(), pa.list_(pa.list_(pa.list_(pa.float32())))).slice(offset)
    check(one(array, (2, 3, 2)), want[offset:])
    check(one(array, (None, None, 2)), want[offset:])
    check(one(array, (12,)), want[offset:].reshape(-1, 12))
    mixed = pa.array(want.tolist(), pa.list_(pa.list_(pa.list_(pa.float64(), 2)), 2)).slice(offset)
    check(one(mixed, (2, 3, 2)), want[offset:])


def test_a_flat_list_takes_the_shape_of_the_model():
    flat = pa.array([list(range(12)), list(range(12))], pa.list_(pa.int64()))
    assert one(flat, (2, 2, 3)).shape == (2, 2, 2, 3)
    assert one(flat, (None, 3)).shape == (2, 4, 3)
    assert one(flat, (None,)).shape == (2, 12)


def test_scalars():
    batch = pa.RecordBatch.from_pydict(
        {"a": pa.array([1, 2], pa.int64()), "b": [0.5, 1.5], "d": pa.array([True, False])}
    )
    spec = DataSpec(
        {
            "three": ColumnSpec(("a", "b", "d"), (3,), kind="scalars"),
            "none": ColumnSpec(("b",), (), "float64", kind="scalars"),
            "one": ColumnSpec(("a",), (1,), "int32", kind="scalars"),
            "plain": ColumnSpec(("a",), (1,)),
        }
    )
    x = decode(batch, spec).x
    check(x["three"], [[1, 0.5, 1], [2, 1.5, 0]])
    check(x["none"], [0.5, 1.5], "float64")
    check(x["one"], [[1], [2]], "int32")
    check(x["plain"], [[1], [2]])


VIEWS = [pa.binary_view()] if hasattr(pa, "binary_view") else []  # pyarrow 16 and newer


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(8), *VIEWS])
def test_raw_bytes(kind):
    want = np.array(ROWS, np.float32)
    array = pa.array([b"x" * 8, *(row.astype("<f4").tobytes() for row in want)], kind).slice(1)
    check(one(array, (2,), kind="binary"), want)
    check(one(array, (2, 1), kind="binary"), want[..., None])
    check(one(array, (None,), kind="binary"), want)


def test_raw_bytes_of_another_dtype_than_the_model():
    array = pa.array([bytes([0, 255]), bytes([7, 8])])
    check(one(array, (2,), kind="binary", source_dtype="uint8"), [[0, 255], [7, 8]])


def test_raw_bytes_at_an_odd_address():
    buffer = pa.py_buffer(b"x" + np.array(ROWS, "<f4").tobytes())
    offsets = pa.py_buffer(np.array([1, 9, 17, 25], np.int32))
    array = pa.Array.from_buffers(pa.binary(), 3, [None, offsets, buffer])
    check(one(array, (2,), kind="binary"), ROWS)


def vector_array(rows):
    kind = pa.struct(
        [
            ("type", pa.int8()),
            ("size", pa.int32()),
            ("indices", pa.list_(pa.int32())),
            ("values", pa.list_(pa.float64())),
        ]
    )
    return pa.array(rows, kind)


def dense(*values):
    return {"type": 1, "size": None, "indices": None, "values": list(values)}


def sparse(size, indices, values):
    return {"type": 0, "size": size, "indices": indices, "values": values}


def test_ml_vectors_dense_and_sparse():
    check(one(vector_array([dense(1, 2), dense(3, 4)]).slice(1), (2,)), [[3, 4]])
    mixed = vector_array(
        [dense(8, 8, 8), sparse(3, [0, 2], [1, 2]), dense(4, 5, 6), sparse(3, [], [])]
    )
    want = [[1, 0, 2], [4, 5, 6], [0, 0, 0]]
    check(one(mixed.slice(1), (3,)), want)
    check(one(mixed.slice(1), (3,), "int16"), want, "int16")


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([dense(1, 2), dense(1)], "row 11"),
        ([dense(1, 2), sparse(3, [0], [1])], "length 3"),
        ([sparse(2, [2], [1])], "indices"),
        ([sparse(2, [0, 1], [1])], "indices"),
        ([dense(1, 2), None], "nulls"),
    ],
)
def test_wrong_vectors(rows, word):
    with pytest.raises(DataError, match=word):
        one(vector_array(rows), (2,), first_row=10)


def image(height, width, channels, mode, data):
    return {
        "origin": "file",
        "height": height,
        "width": width,
        "nChannels": channels,
        "mode": mode,
        "data": data,
    }


IMAGE = pa.struct(
    [
        ("origin", pa.string()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("nChannels", pa.int32()),
        ("mode", pa.int32()),
        ("data", pa.binary()),
    ]
)


def test_images_become_rgb():
    bgr = image(1, 2, 3, 16, bytes([1, 2, 3, 4, 5, 6]))
    bgra = image(1, 2, 4, 24, bytes([1, 2, 3, 9, 4, 5, 6, 9]))
    grey = image(1, 2, 1, 0, bytes([7, 8]))
    rgb = [[[3, 2, 1], [6, 5, 4]]]
    images = pa.array([grey, bgr, bgr], IMAGE).slice(1)
    check(one(images, (1, 2, 3), kind="image"), [rgb, rgb])
    check(one(images, (None, None, 3), "uint8", kind="image"), [rgb, rgb], "uint8")
    mixed = pa.array([bgr, grey, bgra], IMAGE)
    check(one(mixed, (1, 2, 3), kind="image"), [rgb, [[[7] * 3, [8] * 3]], rgb])
    check(one(pa.array([bgra], IMAGE), (1, 2, 4), kind="image"), [[[[3, 2, 1, 9], [6, 5, 4, 9]]]])
    check(one(pa.array([grey], IMAGE), (1, 2, 1), kind="image"), [[[[7], [8]]]])


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (image(2, 1, 3, 16, bytes(6)), r"shape \(2, 1, 3\)"),
        (image(1, 2, 3, 16, bytes(5)), "5 bytes"),
        (image(-1, -1, -1, -1, b""), "mode -1"),
        (image(1, 2, 3, 21, bytes(24)), "mode 21"),
        (image(1, 2, 3, 16, None), "nulls"),
        (None, "nulls"),
    ],
)
def test_wrong_images(bad, word):
    good = image(1, 2, 3, 16, bytes(6))
    with pytest.raises(DataError, match=word) as info:
        one(pa.array([good, bad], IMAGE), (1, 2, 3), kind="image")
    assert "'c'" in str(info.value)


def test_an_image_input_needs_an_image_column_and_an_image_model():
    with pytest.raises(DataError, match="no image"):
        one(pa.array([1.0]), (1, 2, 3), kind="image")
    with pytest.raises(DataError, match="no image"):
        one(pa.array([image(1, 2, 3, 16, bytes(6))], IMAGE), (6,), kind="image")


def spread(value):
    """A decoder: the bytes as numbers."""
    return np.frombuffer(value, np.uint8).astype(np.int64)


def test_decoders_get_bytes_or_a_dict():
    check(one(pa.array([b"\x01\x02", b"\x03\x04"]), (2,), kind="decoded", decoder=spread),
          [[1, 2], [3, 4]])  # fmt: skip
    structs = pa.array([{"a": 1, "b": [2.0, 3.0]}])
    check(one(structs, (3,), kind="decoded", decoder=lambda s: [s["a"], *s["b"]]), [[1, 2, 3]])
    assert one(pa.array([], pa.binary()), (2,), kind="decoded", decoder=spread).shape == (0, 2)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([b"ab", b""], r"shape \(0,\)"),
        ([b"ab", b"abc"], r"shape \(3,\)"),
        ([b"ab", "stop"], "ValueError: cannot read this"),
        ([b"ab", "text"], "dtype <U"),
        ([b"ab", None], "nulls"),
    ],
)
def test_a_decoder_that_fails_names_row_and_column(values, word):
    def decoder(value):
        if value == b"stop":
            raise ValueError("cannot read this")
        return "text" if value == b"text" else spread(value)

    array = pa.array([v.encode() if isinstance(v, str) else v for v in values])
    with pytest.raises(DataError, match=word) as info:
        one(array, (2,), kind="decoded", decoder=decoder, first_row=40)
    assert "column 'c', row 41 of the partition" in str(info.value)
    assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)


def test_one_hot_and_class_labels():
    labels = pa.array([2.0, 0.0])
    check(one(labels, (3,), kind="scalars", one_hot=3), [[0, 0, 1], [1, 0, 0]])
    check(one(labels, (), "int32", kind="scalars", classes=3), [2, 0], "int32")
    sequences = pa.array([[0, 1], [1, 1]])
    check(one(sequences, (2, 2), one_hot=2), [[[1, 0], [0, 1]], [[0, 1], [0, 1]]])
    check(one(pa.array([True, False]), (2,), one_hot=2), [[0, 1], [1, 0]])
    check(one(pa.array([[4]], pa.list_(pa.int8())), (5,), one_hot=5), [[0, 0, 0, 0, 1]])


@pytest.mark.parametrize("options", [{"shape": (3,), "one_hot": 3}, {"shape": (), "classes": 3}])
@pytest.mark.parametrize("bad", [3.0, -1.0, 1.5, float("nan"), float("inf")])
def test_labels_out_of_range(bad, options):
    with pytest.raises(DataError, match="label out of range") as info:
        one(pa.array([0.0, bad]), kind="scalars", first_row=5, **options)
    assert "row 6" in str(info.value)
    assert f"received: {bad}" in str(info.value)


@pytest.mark.parametrize("bad", [-1.0, 1.5, 2.0])
def test_labels_that_a_binary_cross_entropy_does_not_take(bad):
    """-1 and +1 train to a loss of minus a thousand without a word."""
    good = pa.array([0.0, 0.25, 1.0, 1.0 + 1e-7])
    check(one(good, (), kind="scalars", bounds=(0, 1)), good.to_numpy().astype(np.float32))
    with pytest.raises(DataError, match="a label that the loss does not take") as info:
        one(pa.array([0.0, bad]), (), kind="scalars", first_row=5, bounds=(0, 1))
    text = str(info.value)
    assert "row 6" in text
    assert "numbers from 0 to 1" in text
    assert f"received: {bad}" in text
    assert "(y + 1) / 2" in text
    with pytest.raises(DataError, match="row 1 of the partition"):
        one(pa.array([[0, 1], [1, 2]]), (2,), bounds=(0, 1))


def test_labels_below_zero_for_a_loss_of_amounts():
    """To ``poisson`` they are a loss without a least value."""
    bounds = (0.0, float("inf"))
    check(one(pa.array([0.0, 7.5, 1e9]), (), kind="scalars", bounds=bounds), [0.0, 7.5, 1e9])
    with pytest.raises(DataError, match="a label that the loss does not take") as info:
        one(pa.array([0.0, -0.5]), (), kind="scalars", bounds=bounds)
    assert "numbers of at least 0" in info.value.expected
    assert info.value.hint == "train on other numbers with loss='mse'"


def weighed(weights, of="w"):
    spec = DataSpec(
        {"x": ColumnSpec(("x",), (), kind="scalars")},
        {"a": ColumnSpec(("x",), (), kind="scalars", bounds=(-1, 1))},
        {"a": ColumnSpec((of,), (), kind="scalars")},
    )
    return decode(
        pa.RecordBatch.from_pydict({"x": pa.array([0.5, -1.0]), "w": pa.array(weights)}), spec
    )


def test_sample_weights_below_zero():
    check(weighed([0.0, 2.5]).sample_weight["a"], [0.0, 2.5])
    assert np.isnan(weighed([float("nan"), 1.0]).sample_weight["a"][0])  # check_data finds it
    for weights in ([1.0, -0.5], [float("nan"), -0.5], [1, -1]):
        with pytest.raises(DataError, match="a sample weight below 0") as info:
            weighed(weights)
        assert "'w'" in info.value.what
        assert "row 1" in info.value.what
    with pytest.raises(DataError, match="a sample weight below 0"):
        weighed([1.0, 1.0], of="x")  # which is an input and a label, too
    with pytest.raises(DataError, match="a sample weight below 0"):
        rows_from_numpy(np.ones((2, 1)), np.ones(2), np.array([1.0, -1.0]), None)


def test_bounds_are_of_the_labels_that_the_loss_gets():
    one_hot = one(pa.array([2, 0]), (3,), kind="scalars", one_hot=3, bounds=(0, 1))
    check(one_hot, [[0, 0, 1], [1, 0, 0]])


def test_an_input_that_is_its_own_label_is_read_once_and_checked():
    x = ColumnSpec(("c",), (2,))
    spec = DataSpec({"x": x}, {"y": dataclasses.replace(x, bounds=(0, 1))})
    assert len(spec.entries) == 1
    batch = decode(pa.RecordBatch.from_pydict({"c": pa.array([[0.0, 1.0]])}), spec)
    assert batch.x["x"] is batch.y["y"]
    with pytest.raises(DataError, match="does not take"):
        decode(pa.RecordBatch.from_pydict({"c": pa.array([[0.0, 255.0]])}), spec)


@pytest.mark.parametrize(
    ("array", "options", "words"),
    [
        (pa.array([[1.0], None]), {}, ["1 nulls", "'c'", "row 101", "dropna"]),
        (pa.array([[1.0, 2.0], [1.0, None]]), {}, ["1 nulls", "row 101"]),
        (pa.array([[[1.0, 2.0]], [None]]), {"shape": (1, 2)}, ["1 nulls", "row 101"]),
        (pa.array([1.0, None, None]), {"kind": "scalars", "shape": ()}, ["2 nulls", "row 101"]),
        (pa.array([b"a", None]), {"kind": "binary", "shape": (1,), "dtype": "uint8"}, ["1 nulls"]),
        (pa.array([[1.0, 2.0], [1.0]]), {}, ["row 101", "(2,)", "length 1"]),
        (pa.array([[1.0], [1.0, 2.0]]), {}, ["row 100", "(2,)", "length 1"]),
        (pa.array([[[1.0], [2.0]], [[1.0], [2.0, 3.0]]]), {"shape": (2, 1)}, ["row 101"]),
        (pa.array([[1.0, 2.0, 3.0]]), {}, ["'c'", "(2,)", "(3,)"]),
        (pa.array([[1.0, 2.0, 3.0]]), {"shape": (None, 2)}, ["(None, 2)", "(3,)"]),
        (pa.array([[]], pa.list_(pa.float32())), {"shape": (None,)}, ["without any values"]),
        (pa.array(["a"]), {}, ["string", "StringIndexer"]),
        (pa.array(["a"]).dictionary_encode(), {}, ["string"]),
        (pa.array([["a", "b"]]), {}, ["not numbers", "string"]),
        (pa.array(["a"]), {"kind": "scalars", "shape": ()}, ["string"]),
        (pa.array(["a"]), {"kind": "binary"}, ["string"]),
        (pa.array([{"a": 1}]), {}, ["struct"]),
        (pa.array([b"abc", b"a"]), {"kind": "binary", "dtype": "uint8"}, ["bytes"]),
        (pa.array([b"abc"]), {"kind": "binary", "dtype": "uint8"}, ["2 bytes", "3 bytes"]),
        (pa.array([b"abc"]), {"kind": "binary", "shape": (None,)}, ["a multiple of 4 bytes"]),
        (pa.array([[300, 1]]), {"dtype": "uint8"}, ["300", "[0, 255]"]),
        (pa.array([[0.5, 1]]), {"dtype": "int32"}, ["0.5", "whole numbers"]),
        (pa.array([[2.0**63, 1]]), {"dtype": "int64"}, ["9.223372036854776e+18"]),
        (pa.array([[2.0, 1]]), {"dtype": "bool"}, ["0 or 1"]),
    ],
)
def test_bad_data_gets_one_clear_error(array, options, words):
    with pytest.raises(DataError) as info:
        one(array, options.pop("shape", (2,)), first_row=100, **options)
    message = str(info.value)
    assert not [word for word in [*words, "expected: ", "received: "] if word not in message]


def test_a_missing_column():
    with pytest.raises(DataError, match=r"columns \['c'\]"):
        decode(
            pa.RecordBatch.from_pydict({"c": [1.0]}), DataSpec({"x": ColumnSpec(("other",), ())})
        )


def test_empty_batches_keep_shape_and_dtype():
    for array in (pa.array([], pa.list_(pa.float64())), pa.array([[1.0] * 6]).slice(1)):
        assert one(array, (2, 3)).shape == (0, 2, 3)
    assert one(pa.array([], pa.binary()), (None, 3), kind="binary").shape == (0, 0, 3)
    assert one(pa.array([], IMAGE), (4, 4, 3), kind="image").shape == (0, 4, 4, 3)
    assert one(vector_array([]), (3,)).shape == (0, 3)
    assert one(pa.array([], pa.int32()), (3,), kind="scalars", one_hot=3).shape == (0, 3)


def test_inputs_labels_and_weights_by_name():
    batch = pa.RecordBatch.from_pydict({"f": ROWS, "l": [0, 1, 1], "w": [0.5, 1.0, 2.0]})
    feature, label = ColumnSpec(("f",), (2,)), ColumnSpec(("l",), (), "int64", "scalars")
    weight = ColumnSpec(("w",), (), kind="scalars")
    spec = DataSpec({"x": feature}, {"same": feature, "y": label}, weight)
    assert spec.columns == ("f", "l", "w")
    assert len(spec.entries) == 3
    found = decode(batch, pickle.loads(pickle.dumps(spec)))
    assert isinstance(found, Batch)
    assert found.x["x"] is found.y["same"]
    check(found.y["y"], [0, 1, 1], "int64")
    assert sorted(found.sample_weight) == ["same", "y"]
    check(found.sample_weight["y"], [0.5, 1, 2])
    only = DataSpec({"x": feature}, {"y": label, "z": label}, {"z": weight})
    assert sorted(decode(batch, only).sample_weight) == ["z"]
    assert decode(batch, DataSpec({"x": feature})).sample_weight is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"columns": ("a", "b"), "shape": (2,)},
        {"columns": (), "shape": (2,)},
        {"columns": ("a",), "shape": (0,)},
        {"columns": ("a",), "shape": (2,), "dtype": "string"},
        {"columns": ("a",), "shape": (2,), "dtype": "nonsense"},
        {"columns": ("a",), "shape": (2,), "kind": "decoded"},
        {"columns": ("a",), "shape": (2,), "decoder": spread},
        {"columns": ("a",), "shape": (2,), "one_hot": 3},
        {"columns": ("a",), "shape": (3,), "one_hot": 3, "classes": 3},
        {"columns": ("a",), "shape": (3,), "source_dtype": "uint8"},
    ],
)
def test_contradicting_specs_are_refused(arguments):
    with pytest.raises(ConfigError, match="column"):
        ColumnSpec(**arguments)


def test_unknown_kinds_and_stray_weights_are_refused():
    column = ColumnSpec("a", (2,))
    assert column.columns == ("a",)
    with pytest.raises(UnknownNameError, match="image"):
        ColumnSpec(("a",), (2,), kind="images")
    with pytest.raises(ConfigError, match="features"):
        DataSpec({})
    with pytest.raises(ConfigError, match="weights"):
        DataSpec({"x": column}, {"y": column}, {"z": column})
    with pytest.raises(ConfigError, match="weights"):
        DataSpec({"x": column}, {}, column)
