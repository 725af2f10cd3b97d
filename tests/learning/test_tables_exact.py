"""Tables outside of the model are plain Keras with an ``Embedding``, in one process and spread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from harness import global_batches, split, spread_over_ranks

from sparkdl.collective.gradient_synchronizer import AllReduceGradientSynchronizer
from sparkdl.collective.synchronizer import AllReduceSynchronizer
from sparkdl.collective.table_exchange import TableSteps
from sparkdl.config import LoopSettings
from sparkdl.data import Batches, rows_from_numpy
from sparkdl.errors import ConfigError, ModelError, ResourceError
from sparkdl.layers import CountFilter, ServedEmbedding, serve_embeddings, to_plain_model
from sparkdl.learner import make_learner
from sparkdl.learner.state.model_weights import model_layout
from sparkdl.tables.checkpoints import TableCheckpoints
from sparkdl.tables.rules import RowStart
from sparkdl.testing.inproc import connect_threads
from sparkdl.worker import train

BATCH, IDS, DIM = 8, 400, 4
o = keras.optimizers
BACKEND = keras.backend.backend()


def data(rows: int, *, distinct: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ids that come many times in a batch, or each once in all."""
    rng = np.random.default_rng(0)
    x = rng.permutation(3 * rows).reshape(rows, 3) if distinct else rng.integers(0, 9, (rows, 3))
    return x.astype("int32"), (x.sum(1) % 3).astype("int32")


class Untold(keras.Model):
    """Its ``call`` has no ``training``, so ``fit`` does not tell the layers that they train."""

    def __init__(self, embed: Any) -> None:
        super().__init__()
        self.parts = [
            embed, keras.layers.Flatten(), keras.layers.Dense(5, "tanh"),
            keras.layers.Dense(3, "softmax"),
        ]  # fmt: skip

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


def build(embed: Any, optimizer: Any, form: str = "functional") -> Any:
    """A model around a layer; ``form``: how the layer is told that it trains."""
    keras.utils.set_random_seed(3)
    x = keras.Input((3,), dtype="int32")
    if form == "told nothing":
        model = Untold(embed)
        model(np.zeros((1, 3), "int32"))
    else:
        told = {"training": False} if form == "told no" else {}
        base = keras.Model(x, embed(x))
        rows = base(x, **told) if told else embed(x)
        hidden = keras.layers.Dense(5, "tanh")(keras.layers.Flatten()(rows))
        model = keras.Model(x, keras.layers.Dense(3, "softmax")(hidden))
    model.compile(optimizer(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def served(optimizer: Any, own: Any = None, form: str = "functional", **settings: Any) -> Any:
    own = optimizer() if own is None and BACKEND == "jax" else own
    layer = ServedEmbedding(DIM, table="words", seed=5, optimizer=own, **settings)
    return build(layer, optimizer, form)


def plain(optimizer: Any, initializer: str = "uniform") -> Any:
    """The same model with Keras' layer, and the same start of every row."""
    layer = keras.layers.Embedding(IDS, DIM)
    model = build(layer, optimizer)
    start = RowStart("words", DIM, initializer, 5)
    layer.set_weights([start.rows(np.arange(IDS))])
    return model


def layer_of(model: Any) -> Any:
    every = model._flatten_layers(include_self=False)
    return next(layer for layer in every if isinstance(layer, ServedEmbedding))


def compare(model: Any, rows: np.ndarray, expected: Any, atol: float) -> None:
    """``rows``: those of all ids."""
    table, *others = expected.get_weights()
    np.testing.assert_allclose(rows, table, atol=atol, rtol=0)
    found = [w for w in model.get_weights() if w.shape]
    for value, wanted in zip(found, others, strict=True):
        np.testing.assert_allclose(value, wanted, atol=atol, rtol=0)


OPTIMIZERS = {
    "SGD": (lambda: o.SGD(0.5), "uniform", False),
    "Adagrad": (lambda: o.Adagrad(0.2), "uniform", True),
    "Ftrl": (lambda: o.Ftrl(0.3), "zeros", True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_process_trains_as_with_an_embedding(name: str) -> None:
    make, start, distinct = OPTIMIZERS[name]
    x, y = data(100, distinct=distinct)
    model, expected = served(make, initializer=start), plain(make, start)
    for trained in (model, expected):
        trained.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    rows = layer_of(model).service.store("words").pull(np.arange(IDS))
    compare(model, rows, expected, 1e-6)


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("form", ["told nothing", "told no"])
def test_rows_train_where_a_call_does_not_say_that_it_trains(form: str, eagerly: bool) -> None:
    """A step learns from what it is differentiated by, as with Keras' layer; a call is no step."""
    make = OPTIMIZERS["SGD"][0]
    x, y = data(100, distinct=False)
    model, expected = served(make, form=form), plain(make)
    for trained in (model, expected):
        trained.run_eagerly = eagerly
        trained.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    model.evaluate(x + 100, y, verbose=0)
    model.predict(x + 100, verbose=0)
    model(x + 100)
    store = layer_of(model).service.store("words")
    assert len(store.export().ids) == 9
    compare(model, store.pull(np.arange(IDS)), expected, 1e-6)


@pytest.mark.parametrize("form", ["told nothing", "told no"])
def test_ranks_train_rows_where_a_call_does_not_say_so(form: str, tmp_path) -> None:
    make = OPTIMIZERS["SGD"][0]
    parts = split(*data(100, distinct=False), [70, 30])
    models = [served(make, form=form) for _ in parts]
    steps, _ = spread_over_ranks(models, parts, str(tmp_path), validation=data(21, distinct=False))
    expected = plain(make)
    for _ in range(2):
        for x, y in global_batches(parts, BATCH):
            expected.train_on_batch(x, y)
    compare(models[0], all_rows(steps), expected, 1e-5)


def test_layers_with_one_name_share_rows_and_take_one_step() -> None:
    def both(layers: Any) -> Any:
        keras.utils.set_random_seed(1)
        x = keras.Input((2,), dtype="int32")
        parts = [layer(x[:, i : i + 1]) for i, layer in enumerate(layers)]
        flat = keras.layers.Flatten()(keras.layers.Concatenate()(parts))
        model = keras.Model(x, keras.layers.Dense(1)(flat))
        model.compile(o.Adagrad(0.3), "mse")
        return model

    x = np.array([[1, 2], [2, 3], [4, 1]], "int32")
    y = np.array([[1.0], [2.0], [3.0]])
    own = o.Adagrad(0.3)
    two = [ServedEmbedding(DIM, table="t", seed=5, optimizer=own) for _ in range(2)]
    model = both(two)
    shared = ServedEmbedding(DIM, table="t", seed=5, optimizer=own)
    expected = both([shared, shared])
    for trained in (model, expected):
        trained.fit(x, y, batch_size=3, epochs=4, shuffle=False, verbose=0)
    found = two[0].service.store("t").pull(np.arange(6))
    assert two[1].service is two[0].service
    np.testing.assert_array_equal(found, shared.service.store("t").pull(np.arange(6)))
    np.testing.assert_array_equal(model.get_weights()[-2], expected.get_weights()[-2])


def test_a_saved_model_has_its_rows(tmp_path) -> None:
    make = OPTIMIZERS["Adagrad"][0]
    x, y = data(50, distinct=True)
    model = served(make)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    for trained in (model, loaded):
        trained.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)


@pytest.mark.parametrize(("combiner", "wanted"), [
    ("sum", [[5.0, 5.0]]), ("mean", [[2.5, 2.5]]), ("sqrtn", [[5 / 2**0.5, 5 / 2**0.5]]),
])  # fmt: skip
def test_combiners_do_not_count_the_padding(combiner: str, wanted: Any) -> None:
    layer = ServedEmbedding(2, table="t", combiner=combiner, pad_id=0, initializer="zeros",
                            optimizer=o.SGD(1.0))  # fmt: skip
    ids = np.array([[3, 4, 0]], "int32")
    model = keras.Sequential([keras.Input((3,), dtype="int32"), layer])
    model.compile("sgd", "mse")
    model.predict(ids, verbose=0)
    store = layer.service.store("t")
    store.load(np.array([3, 4]), np.array([[2, 2], [3, 3]], np.float32))
    np.testing.assert_allclose(model.predict(ids, verbose=0), wanted, rtol=1e-6)


def test_an_id_gets_its_row_when_it_was_seen_often_enough(tmp_path) -> None:
    layer = ServedEmbedding(2, table="t", seed=1, optimizer=o.SGD(0.0), entry=CountFilter(3))
    model = keras.Sequential([keras.Input((2,), dtype="int32"), layer, keras.layers.Flatten()])
    model.compile("sgd", "mse")
    ids, y = np.array([[1, 1], [1, 2]], "int32"), np.zeros((2, 4))
    model.fit(ids[:1], y[:1], verbose=0)  # id 1 was seen twice
    assert len(layer.service.store("t")) == 0
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        each.fit(ids[1:], y[1:], verbose=0)  # and once more, beside id 2
        store = next(iter(each.layers)).service.store("t")
        assert store.export().ids.tolist() == [1]
        assert (each.predict(ids, verbose=0)[1, 2:] == 0).all()


def test_at_most_so_many_rows_stay() -> None:
    layer = ServedEmbedding(2, table="t", seed=1, optimizer=o.SGD(0.1), max_rows=10)
    model = keras.Sequential([keras.Input((1,), dtype="int32"), layer, keras.layers.Flatten()])
    model.compile("sgd", "mse")
    often = np.array([[1], [2]] * 10 + [[n] for n in range(3, 60)], "int32")
    model.fit(often, np.zeros((len(often), 2)), batch_size=4, shuffle=False, verbose=0)
    ids = layer.service.store("t").export().ids
    assert len(ids) <= 10
    assert {1, 2} <= set(ids.tolist())


def test_an_embedding_is_moved_to_a_table_and_back(tmp_path) -> None:
    x, y = data(60, distinct=False)
    model = plain(lambda: o.SGD(0.3))
    assert serve_embeddings(model).count_params() == model.count_params()  # too small: it stays
    moved = serve_embeddings(model, larger_than_mb=0.001, optimizer=o.SGD(0.3))
    assert moved.count_params() < model.count_params()
    np.testing.assert_allclose(moved.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)
    for each in (moved, model):
        each.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    back = to_plain_model(moved, IDS)
    for found, wanted in zip(back.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert back.evaluate(x, y, verbose=0) == pytest.approx(
        model.evaluate(x, y, verbose=0), abs=1e-5
    )


@pytest.mark.parametrize("by", ["name", "variable"])
def test_a_copy_has_an_optimizer_that_was_told_the_same(by: str) -> None:
    model = plain(lambda: o.AdamW(0.1, weight_decay=0.5))
    model.optimizer.learning_rate = 0.25
    told = {"var_names": ["bias"]} if by == "name" else {"var_list": [model.weights[2]]}
    model.optimizer.exclude_from_weight_decay(**told)
    copy = serve_embeddings(model)
    assert float(copy.optimizer.learning_rate) == 0.25
    decays = [copy.optimizer._use_weight_decay(v) for v in copy.trainable_variables]
    assert decays == [True, True, False, True, by == "variable"]


def test_what_rows_in_a_table_cannot_have_stays_in_the_model() -> None:
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), keras.layers.Embedding(900, 900, mask_zero=True)]
    )
    with pytest.raises(ModelError, match="cannot lie"):
        serve_embeddings(model)
    served_ones = keras.Sequential([keras.Input((3,), dtype="int32"), ServedEmbedding(1024)])
    with pytest.raises(ResourceError, match="do not fit"):
        to_plain_model(served_ones, 2**30)


# -- over ranks ----------------------------------------------------------------------------------


def all_rows(steps: list[Any]) -> np.ndarray:
    """The rows of all ids, each from the rank that has it."""
    rows = np.empty((IDS, DIM), np.float32)
    owned = np.zeros(IDS, int)
    for each in steps:
        store = each.stores["words"]
        exported = store.export()
        rows[exported.ids] = exported.values
        owned[exported.ids] += 1
    assert owned.max() <= 1  # every row has one owner
    start = steps[0].stores["words"].pull(np.flatnonzero(owned == 0))
    rows[owned == 0] = start
    return rows


SIZES = {"1 worker": [100], "2 workers": [70, 30], "2 workers, one empty": [0, 100]}
if BACKEND != "tensorflow":
    # In one process two ranks that wait in TensorFlow's graphs take both of its threads.
    SIZES["3 workers, one empty"] = [40, 0, 60]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_train_as_one_process(name: str, sizes: str, tmp_path) -> None:
    make, start, distinct = OPTIMIZERS[name]
    parts = split(*data(100, distinct=distinct), SIZES[sizes])
    models = [served(make, initializer=start) for _ in parts]
    steps, _ = spread_over_ranks(models, parts, str(tmp_path), validation=data(21, distinct=False))
    expected = plain(make, start)
    for _ in range(2):
        for x, y in global_batches(parts, BATCH):
            expected.train_on_batch(x, y)
    compare(models[0], all_rows(steps), expected, 1e-6 if len(parts) == 1 else 1e-5)


@pytest.mark.parametrize("pad", [None, 3])
def test_a_stack_of_batches_trains_in_one_call(pad: int | None, tmp_path) -> None:
    """In the main thread, as in a worker's process, a step's rows are exchanged in the call."""
    make = OPTIMIZERS["SGD"][0]
    x, y = data(100, distinct=False)
    model, expected = served(make, pad_id=pad), plain(make)
    learner, layout = make_learner(model), model_layout(model)
    with connect_threads(1)[0] as communicator:
        dense = AllReduceGradientSynchronizer(communicator, layout)
        steps = TableSteps(dense, communicator, TableCheckpoints(str(tmp_path)))
        calls: list[int] = []
        train_dense = dense.train
        dense.train = lambda *given: (calls.append(given[1].num_batches), train_dense(*given))
        train(
            learner, AllReduceSynchronizer(communicator, layout, steps=steps),
            Batches(rows_from_numpy(x, y), BATCH, shuffle=False),
            LoopSettings(epochs=2, batch_size=BATCH, window=1, shuffle=False), num_rows=len(x),
        )  # fmt: skip
    learner.sync_model()
    assert calls == [12, 1] * 2  # the last batch is smaller
    table = expected.layers[1]
    for _ in range(2):
        for each in global_batches([(x, y)], BATCH):
            if pad is not None:  # its row is zeros, and stays so
                rows = table.get_weights()[0]
                rows[pad] = 0
                table.set_weights([rows])
            expected.train_on_batch(*each)
    rows, wanted = all_rows([steps]), [*expected.get_weights()]
    if pad is not None:
        rows[pad] = wanted[0][pad] = 0
    table.set_weights([wanted[0]])
    compare(model, rows, expected, 1e-6)


def test_another_number_of_ranks_goes_on_from_the_parts(tmp_path) -> None:
    make = OPTIMIZERS["Adagrad"][0]
    parts = split(*data(96, distinct=True), [48, 48])
    first = [served(make) for _ in range(2)]
    _, state = spread_over_ranks(first, parts, str(tmp_path), epochs=1)
    others = split(*data(96, distinct=True), [96] if BACKEND == "tensorflow" else [32, 32, 32])
    models = [served(make) for _ in others]
    for model in models:
        model.set_weights(first[0].get_weights())
        copy_optimizer(first[0], model)
    steps, _ = spread_over_ranks(models, others, str(tmp_path), first_epoch=1, state=state)
    expected = plain(make)
    for batches in (global_batches(parts, BATCH), global_batches(others, BATCH)):
        for x, y in batches:
            expected.train_on_batch(x, y)
    compare(models[0], all_rows(steps), expected, 1e-5)


def test_ranks_count_together_how_often_an_id_was_seen(tmp_path) -> None:
    """Id 1: twice on each of two ranks; id 2: once on each."""

    def make() -> Any:
        layer = ServedEmbedding(
            DIM, table="words", seed=5, optimizer=o.SGD(0.1), entry=CountFilter(4), max_rows=100
        )
        return build(layer, lambda: o.SGD(0.1))

    x, y = np.array([[1, 1, 2]], "int32"), np.zeros(1, "int32")
    steps, _ = spread_over_ranks(
        [make() for _ in range(2)], [(x, y), (x, y)], str(tmp_path), epochs=1
    )
    found = [each.stores["words"].export() for each in steps]
    assert np.concatenate([f.ids for f in found]).tolist() == [1]
    assert np.concatenate([f.counts for f in found]).tolist() == [4]


def copy_optimizer(source: Any, target: Any) -> None:
    target.optimizer.build(target.trainable_variables)
    pairs = zip(target.optimizer.variables, source.optimizer.variables, strict=True)
    for variable, value in pairs:
        variable.assign(value.numpy())


def test_the_schedule_of_the_model_moves_the_rows(tmp_path) -> None:
    def make() -> Any:
        return o.SGD(o.schedules.PiecewiseConstantDecay([5], [0.5, 0.05]))

    if BACKEND == "jax":
        pytest.skip("model.fit cannot follow the rate there, and served() gives the layer its own")
    parts = split(*data(100, distinct=False), [50, 50])
    models = [served(make) for _ in parts]
    steps, _ = spread_over_ranks(models, parts, str(tmp_path))
    expected = plain(make)
    for _ in range(2):
        for x, y in global_batches(parts, BATCH):
            expected.train_on_batch(x, y)
    compare(models[0], all_rows(steps), expected, 1e-5)


@pytest.mark.parametrize("optimizer", [
    lambda: o.SGD(0.1, momentum=0.9), lambda: o.AdamW(0.1), lambda: o.Adam(0.1, clipnorm=1.0),
    lambda: o.Adam(0.1, amsgrad=True), lambda: o.RMSprop(0.1), lambda: o.Adagrad(0.1, use_ema=True),
    lambda: o.SGD(0.1, global_clipnorm=1.0),
])  # fmt: skip
def test_rules_that_rows_cannot_have_are_refused(optimizer: Any) -> None:
    layer = ServedEmbedding(DIM)
    with pytest.raises((ConfigError, ModelError)):
        layer.table_spec(optimizer())


def scaled(optimizer: Any, scale: int = 22) -> Any:
    """With 2**22 a loss overflows at first: a float16 has no more than 65,504."""
    return lambda: o.LossScaleOptimizer(optimizer(), 2.0**scale, dynamic_growth_steps=9)


@pytest.fixture
def halves() -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


@pytest.mark.usefixtures("halves")
@pytest.mark.skipif(BACKEND == "jax", reason="Keras' compiled steps hide the scale there")
def test_rows_take_the_steps_that_a_scaled_loss_leaves() -> None:
    x, y = data(100, distinct=True)
    make = scaled(lambda: o.Adagrad(0.2))
    model, expected = served(make), plain(make)
    for trained in (model, expected):
        trained.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
    steps = [int(m.optimizer.inner_optimizer.iterations) for m in (model, expected)]
    assert steps[0] == steps[1]
    assert 20 < steps[0] < 37
    rows = layer_of(model).service.store("words").pull(np.arange(IDS))
    compare(model, rows, expected, 2e-3)


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize(
    ("sizes", "scale"),
    [([100], 22), ([100, 0], 22), ([50, 50], 22), ([50, 50], 10)],
    ids=["1 rank", "an empty rank", "2 ranks", "2 ranks, nothing overflows"],
)
def test_ranks_agree_where_a_scaled_loss_overflows(sizes: list[int], scale: int, tmp_path) -> None:
    make = scaled(lambda: o.Adagrad(0.2), scale)
    parts = split(*data(100, distinct=True), sizes)
    own = o.Adagrad(0.2) if BACKEND == "jax" else None
    models, expected = [served(make, own=own) for _ in parts], plain(make)
    steps, _ = spread_over_ranks(models, parts, str(tmp_path), epochs=3)
    batches = [batch for _ in range(3) for batch in global_batches(parts, BATCH)]
    for x, y in batches:
        expected.train_on_batch(x, y)
    taken = [int(m.optimizer.inner_optimizer.iterations) for m in (*models, expected)]
    assert len(set(taken[:-1])) == 1
    assert (len(batches) - taken[0] > 1) == (scale == 22)
    if sizes == [50, 50] and scale == 22:  # the mean of half of the rows overflows more easily
        assert taken[0] <= taken[-1]
    else:
        assert taken[0] == taken[-1]
        compare(models[0], all_rows(steps), expected, 2e-3)


@pytest.mark.usefixtures("halves")
def test_an_overflow_in_the_rows_alone_is_one() -> None:
    """The gradient of the rows is a product of the weights, which those of the others is not."""
    layer = ServedEmbedding(1, table="w", seed=1, optimizer=o.SGD(1.0))
    x = keras.Input((1,), dtype="int32")
    hidden = keras.layers.Dense(1, use_bias=False, kernel_initializer=ones(300.0))(layer(x)[:, 0])
    model = keras.Model(x, keras.layers.Activation("linear", dtype="float32")(hidden))
    model.compile(o.LossScaleOptimizer(o.SGD(1e-3), initial_scale=2.0**10), "mae")
    if BACKEND == "jax":
        pytest.skip("Keras' compiled steps hide the scale there")
    before = layer.rows([3])
    model.fit(np.array([[3]]), np.array([[1e3]]), verbose=0)
    assert float(model.optimizer.dynamic_scale) == 2.0**9
    np.testing.assert_array_equal(layer.rows([3]), before)
    model.fit(np.array([[3]]), np.array([[1e3]]), epochs=4, verbose=0)
    assert not np.array_equal(layer.rows([3]), before)


def ones(value: float) -> Any:
    return keras.initializers.Constant(value)


def test_rows_are_not_computed_again() -> None:
    with keras.RematScope(mode="full"), pytest.raises(ModelError, match="again"):
        ServedEmbedding(DIM)


def test_floats_are_no_ids() -> None:
    with pytest.raises(ModelError, match="integers"):
        ServedEmbedding(DIM)(keras.Input((3,)))
