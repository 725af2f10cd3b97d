"""What each rank runs in the tests of the distributed optimizer; the expected values too."""

from __future__ import annotations

from typing import Any

import numpy as np

STEPS = 24


def data(rows: int = 8 * STEPS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    x = rng.normal(size=(rows, 6)).astype("float32")
    return x, (x @ rng.normal(size=(6, 2)) + 0.3).astype("float32")


def own_part(values: np.ndarray, batch: int, rank: int, size: int, passes: int = 1) -> np.ndarray:
    """The rows of this rank: each global batch, cut into ``size`` parts of ``passes`` batches."""
    each = batch // size
    steps = values.reshape(len(values) // batch, size, each, *values.shape[1:])
    return steps[:, rank].reshape(-1, *values.shape[1:])


def dense_model(seed: int = 3, **options: Any) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(2, dtype="float32"),
        ],
        **options,
    )


def optimizers() -> dict[str, Any]:
    import keras

    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.9)
    return {
        "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        "adam": lambda: keras.optimizers.Adam(0.01),
        "schedule": lambda: keras.optimizers.SGD(schedule, momentum=0.5),
        "clipped": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.05, weight_decay=0.01),
    }


def distance(model: Any, reference: Any) -> float:
    pairs = zip(model.get_weights(), reference.get_weights(), strict=True)
    return max(float(np.max(np.abs(a - b))) for a, b in pairs)


def fit(model: Any, optimizer: Any, x: Any, y: Any, batch: int, **options: Any) -> Any:
    loss = options.pop("loss", "mse")
    model.compile(optimizer, loss, jit_compile=options.pop("jit_compile", False))
    return model.fit(
        x, y, batch_size=batch, epochs=options.pop("epochs", 1), shuffle=False, verbose=0, **options
    )


def same_as_one_process(jit_compile: bool = False) -> dict[str, float]:
    """Every optimizer, with and without accumulation: largest distance to one process."""
    import sparkdl

    communicator = sparkdl.communicator()
    rank, size = communicator.rank, communicator.size
    x, y = data()
    found = {}
    for name, make in optimizers().items():
        reference = dense_model()
        fit(reference, make(), x, y, 8, jit_compile=jit_compile)
        for passes in (1, 2):
            optimizer = sparkdl.DistributedOptimizer(make(), backward_passes_per_step=passes)
            model = dense_model()
            mine = [own_part(v, 8, rank, size) for v in (x, y)]
            fit(model, optimizer, *mine, 8 // size // passes, jit_compile=jit_compile)
            assert int(optimizer.iterations) == STEPS, int(optimizer.iterations)
            found[f"{name}, {passes} passes"] = distance(model, reference)
    return found


def on_the_wire() -> dict[str, float]:
    """Distance to one process with each compression, and with sums in place of means."""
    import keras

    import sparkdl

    communicator = sparkdl.communicator()
    rank, size = communicator.rank, communicator.size
    x, y = data()
    mine = [own_part(v, 8, rank, size) for v in (x, y)]
    reference = dense_model()
    fit(reference, keras.optimizers.SGD(0.05), x, y, 8)
    found = {}
    bf16 = keras.backend.backend() != "tensorflow" or communicator.name != "horovod"
    for name in ("none", "fp16", *(["bf16"] if bf16 else [])):
        model = dense_model()
        optimizer = sparkdl.DistributedOptimizer(keras.optimizers.SGD(0.05), compression=name)
        fit(model, optimizer, *mine, 8 // size)
        found[name] = distance(model, reference)
    model = dense_model()
    optimizer = sparkdl.DistributedOptimizer(keras.optimizers.SGD(0.05 / size), op="sum")
    fit(model, optimizer, *mine, 8 // size)
    found["sum"] = distance(model, reference)
    return found


def embeddings() -> dict[str, float]:
    """Sparse gradients by rows and indices, and made dense, with Adam; indices come twice."""
    import keras
    import tensorflow as tf

    import sparkdl

    communicator = sparkdl.communicator()
    rank, size = communicator.rank, communicator.size
    rng = np.random.default_rng(1)
    words = rng.integers(0, 12, size=(8 * STEPS, 4)).astype("int32")
    labels = rng.normal(size=(8 * STEPS, 1)).astype("float32")
    mine = [own_part(v, 8, rank, size) for v in (words, labels)]

    def make() -> Any:
        keras.utils.set_random_seed(5)
        layers = [keras.layers.Embedding(12, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((4,), dtype="int32"), *layers])

    class Dense(keras.optimizers.Adam):
        """One process with dense gradients: what summing first, and adding up passes, comes to."""

        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            grads = [tf.convert_to_tensor(g) for g in grads]
            super().apply(grads, trainable_variables)

    dense, plain = make(), make()
    fit(dense, Dense(0.01), words, labels, 8)
    fit(plain, keras.optimizers.Adam(0.01), words, labels, 8)
    found = {}
    for as_dense, passes in ((False, 1), (True, 1), (False, 2)):
        optimizer = sparkdl.DistributedOptimizer(
            keras.optimizers.Adam(0.01), sparse_as_dense=as_dense, backward_passes_per_step=passes
        )
        model = make()
        fit(model, optimizer, *mine, 8 // size // passes)
        reference = dense if as_dense or passes > 1 else plain
        found[f"as dense {as_dense}, {passes} passes"] = distance(model, reference)
    return found


def overflow_on_one_rank() -> dict[str, Any]:
    """mixed_float16: a batch of rank 1 has an infinite gradient; all ranks skip that step."""
    import keras

    import sparkdl

    communicator = sparkdl.communicator()
    rank, size = communicator.rank, communicator.size
    keras.config.set_dtype_policy("mixed_float16")
    try:
        x, y = data(40)
        mine = [own_part(v, 8, rank, size) for v in (x, y)]
        if rank == 1:
            mine[1][9] = np.inf  # in the third of five batches
        inner = keras.optimizers.SGD(0.05, momentum=0.9)
        scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0)
        optimizer = sparkdl.DistributedOptimizer(scaled, compression="fp16")
        model = dense_model()
        fit(model, optimizer, *mine, 8 // size)
        weights = np.concatenate([w.reshape(-1) for w in model.get_weights()])
        scale = float(keras.ops.convert_to_numpy(optimizer.dynamic_scale.value))
        steps = int(optimizer.iterations)
        return {
            "weights": weights, "scale": scale / 64, "steps": steps,
            "type": type(model.optimizer).__name__,
        }  # fmt: skip
    finally:
        keras.config.set_dtype_policy("float32")


def callbacks_and_loops() -> dict[str, Any]:
    """Ranks that begin apart, a log that is a mean, and a hand-written eager loop."""
    import keras

    import sparkdl

    communicator = sparkdl.communicator()
    rank, size = communicator.rank, communicator.size
    x, y = data()
    mine = [own_part(v, 8, rank, size) for v in (x, y)]

    reference = dense_model()
    whole = fit(reference, keras.optimizers.Adam(0.01), x, y, 8, epochs=2)
    model = dense_model(seed=3 + rank)
    seen: list[float] = []
    history = fit(
        model, sparkdl.DistributedOptimizer(keras.optimizers.Adam(0.01)), *mine, 8 // size,
        epochs=2,
        callbacks=[
            sparkdl.BroadcastCallback(),
            sparkdl.MetricAverageCallback(),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda e, logs: seen.append(logs["loss"])),
        ],
    )  # fmt: skip
    losses = np.subtract(history.history["loss"], whole.history["loss"])
    by_hand, plain = dense_model(), dense_model()
    loop(by_hand, sparkdl.DistributedOptimizer(keras.optimizers.SGD(0.05)), mine, 8 // size)
    loop(plain, keras.optimizers.SGD(0.05), [x, y], 8)
    twice = dense_model()
    optimizer = sparkdl.DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=2)
    loop(twice, optimizer, mine, 8 // size // 2)
    return {
        "broadcast": distance(model, reference),
        "losses": float(np.abs(losses).max()),
        "seen": seen == history.history["loss"],
        "loop": distance(by_hand, plain),
        "loop, 2 passes": distance(twice, plain),
    }


def loop(model: Any, optimizer: Any, parts: list[np.ndarray], batch: int) -> None:
    """An eager loop in the user's own code, on any backend."""
    import keras

    x, y = parts
    for i in range(0, len(x), batch):
        grads = gradients(model, x[i : i + batch], y[i : i + batch])
        optimizer.apply(grads, model.trainable_variables)
    assert keras.backend.backend()


def gradients(model: Any, x: np.ndarray, y: np.ndarray) -> list[Any]:
    import keras

    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        return list(tape.gradient(loss, [v.value for v in model.trainable_variables]))
    if backend == "torch":
        model.zero_grad()
        keras.ops.mean((model(x) - keras.ops.convert_to_tensor(y)) ** 2).backward()
        return [v.value.grad for v in model.trainable_variables]
    import jax

    rest = [v.value for v in model.non_trainable_variables]

    def loss_of(values: Any) -> Any:
        predicted, _ = model.stateless_call(values, rest, x)
        return ((predicted - y) ** 2).mean()

    return list(jax.grad(loss_of)([v.value for v in model.trainable_variables]))


def two_optimizers() -> dict[str, float]:
    """Two models trained in one step of the user's own (as in a GAN), after unlike beginnings."""
    import keras
    import tensorflow as tf

    import sparkdl

    communicator = sparkdl.communicator()
    rank, size = communicator.rank, communicator.size
    for _ in range(rank):  # Keras numbers names: the ranks' differ from here on
        dense_model(), keras.optimizers.SGD(0.1)

    def train(wrap: Any, x: np.ndarray, y: np.ndarray, batch: int) -> list[Any]:
        models = [dense_model(), dense_model(seed=4)]
        made = [wrap(keras.optimizers.SGD(0.05)) for _ in models]
        for optimizer, model in zip(made, models, strict=True):
            optimizer.build(model.trainable_variables)

        @tf.function
        def step(x: Any, y: Any) -> None:
            grads = []
            for model in models:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x) - y) ** 2)
                grads.append(tape.gradient(loss, [v.value for v in model.trainable_variables]))
            for optimizer, model, values in zip(made, models, grads, strict=True):
                optimizer.apply(values, model.trainable_variables)

        for i in range(0, len(x), batch):
            step(tf.constant(x[i : i + batch]), tf.constant(y[i : i + batch]))
        return models

    x, y = data()
    expected = train(lambda optimizer: optimizer, x, y, 8)
    mine = [own_part(v, 8, rank, size) for v in (x, y)]
    found = train(sparkdl.DistributedOptimizer, *mine, 8 // size)
    pairs = zip("ab", found, expected, strict=True)
    return {name: distance(model, reference) for name, model, reference in pairs}


PROGRAMS = (same_as_one_process, on_the_wire, overflow_on_one_rank, callbacks_and_loops)


def everything(programs: list[Any], jit_compile: bool) -> dict[str, Any]:
    """Several programs in one start of the ranks."""
    import sparkdl

    found: dict[str, Any] = {"communicator": sparkdl.communicator().name}
    for program in programs:
        options = {"jit_compile": jit_compile} if program is same_as_one_process else {}
        found[program.__name__] = program(**options)
    return found


def scatter_on(pipe: Any, host: Any, rank: int) -> None:
    """A rank on one of two hosts: reduces and scatters arrays as often as its parent asks."""
    from support.network import enter

    from sparkdl.collective.communicator import Member, make_communicator

    enter(host.name)
    connector = make_communicator("builtin", rank=rank, advertised_host=host.address)
    pipe.send(connector.prepare().to_json())
    texts, token = pipe.recv()
    with connector.connect([Member.from_json(t) for t in texts], token) as communicator:
        while (order := pipe.recv()) is not None:
            size_bytes, repeats = order
            array = np.ones(size_bytes // 4, np.float32)
            for _ in range(repeats):
                shard = communicator.reduce_scatter(array)
            communicator.barrier()
            assert (shard == communicator.size).all()
            pipe.send(0.0)
