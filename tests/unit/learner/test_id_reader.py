"""The ids of a batch are found as the layers will look them up."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from sparkdl.errors import DataError
from sparkdl.layers import ServedEmbedding
from sparkdl.learner.state.served_rows import ModelTables
from sparkdl.training.learning import BatchStack


class Asked:
    """A service that notes what layers ask for."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.ids: list[tuple[str, list[int]]] = []

    def pull(self, table: str, ids: Any, *, training: bool) -> tuple[np.ndarray, int]:
        self.ids.append((table, ids.tolist()))
        return np.zeros((len(ids), self.dim), np.float32), 0


def batch(**x: Any) -> BatchStack:
    arrays = {name: np.asarray(value)[np.newaxis] for name, value in x.items()}
    return BatchStack(arrays, {}, None, 1, len(next(iter(x.values()))))


def both(model: Any, given: BatchStack, inputs: Any) -> tuple[list[Any], list[Any]]:
    """What the reader finds, and what the layers ask for."""
    tables = ModelTables(model)
    found = [(table, ids.tolist()) for table, ids in tables.id_reader()(given)]
    service = Asked(2)
    tables.serve_from(service)  # type: ignore[arg-type]
    model(inputs, training=True)
    return sorted(found), sorted(service.ids)


IDS = np.array([[7, 3, 7], [0, -1, 3]])


def embedding(**more: Any) -> ServedEmbedding:
    return ServedEmbedding(2, table="ads", **more)


def test_an_input_of_the_model() -> None:
    given = keras.Input((3,), dtype="int32", name="ids")
    model = keras.Model(given, embedding(pad_id=0)(given))
    found, asked = both(model, batch(ids=IDS), IDS)
    assert found == asked == [("ads", [-1, 3, 7])]


def test_a_sequential_model() -> None:
    model = keras.Sequential([keras.Input((3,), dtype="int32"), embedding()])
    found, asked = both(model, batch(features=IDS), IDS)
    assert found == asked == [("ads", [-1, 0, 3, 7])]


def test_several_inputs_calls_and_tables() -> None:
    one = keras.Input((3,), dtype="int32", name="one")
    two = keras.Input((1,), dtype="int32", name="two")
    shared, other = embedding(), ServedEmbedding(2, table="users")
    outputs = [shared(one), shared(two), other(two)]
    model = keras.Model({"one": one, "two": two}, outputs)
    x = {"one": IDS, "two": np.array([[5], [5]])}
    found, asked = both(model, batch(**x), x)
    assert found == asked == [("ads", [-1, 0, 3, 7]), ("ads", [5]), ("users", [5])]


def test_ids_that_layers_without_weights_make() -> None:
    given = keras.Input((3,), dtype="int32", name="ids")
    crossed = keras.layers.Lambda(lambda x: x * 10 + 1, output_shape=(3,), dtype="int32")(given)
    model = keras.Model(given, embedding()(crossed))
    found, asked = both(model, batch(ids=IDS), IDS)
    assert found == asked == [("ads", [-9, 1, 31, 71])]


def test_ids_that_cannot_be_known_are_left_out() -> None:
    given = keras.Input((3,), dtype="int32", name="ids")
    inner = keras.Sequential([keras.Input((3,), dtype="int32"), embedding()])
    found, asked = both(keras.Model(given, inner(given)), batch(ids=IDS), IDS)
    assert found == []
    assert len(asked) == 1

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.look = embedding()

        def call(self, ids: Any) -> Any:
            return self.look(ids)

    found, asked = both(Own(), batch(ids=IDS), IDS)
    assert found == []
    assert len(asked) == 1


@pytest.mark.parametrize("count", [1, 4])
def test_a_batch_knows_the_one_after_it(count: int) -> None:
    from sparkdl.data import Batches, rows_from_numpy

    x = np.arange(22, dtype=np.float32).reshape(22, 1)
    stacks = Batches(rows_from_numpy(x, x[:, 0]), 2, shuffle=False).stacks(0, count)
    firsts, after = [], []
    for stack in stacks:
        for single in stack.single_batches():
            firsts.append(float(single.x["features"][0, 0, 0]))
            following = single.following
            after.append(None if following is None else float(following().x["features"][0, 0, 0]))
    assert firsts == [2.0 * i for i in range(11)]
    assert after == [*firsts[1:], None]


def test_rows_are_not_loaded_for_an_id_that_would_be_another() -> None:
    layer = ServedEmbedding(2, table="t", name="t")
    with pytest.raises(DataError, match="9223372036854775809"):
        layer.load(np.array([1, 2**63 + 1], np.uint64), np.zeros((2, 2)))
    layer.load(np.array([1, 2**63 - 1], np.uint64), np.ones((2, 2)))
    np.testing.assert_array_equal(layer.rows(np.array([2**63 - 1])), [[1, 1]])
