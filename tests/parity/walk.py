"""All that Keras' lists hold, each name with a line that tries it, or with why it is not tried.

A line is an expression in the names of its list; what a name of the list stands in is tried with
it. ``KERAS_BACKEND=jax python tests/parity/walk.py "layers of image"`` tries one group of lines.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from local_spark import LocalSession, LocalSparkModel, Workers
from referee import values_of

from sparkdl.errors import SparkDLError

BACKEND = keras.backend.backend()
LISTS = (
    "losses", "metrics", "optimizers", "callbacks", "layers", "initializers", "regularizers",
    "constraints",
)  # fmt: skip
ROWS, BATCH = 13, 4
"""The last batch is a smaller one."""


@dataclass
class Trial:
    """A model, made anew at each call, and the rows that it is trained on."""

    make: Any
    x: Any
    y: Any
    callbacks: Any = list


class Refused(Exception):
    """One error before a job."""


# -- the lists -------------------------------------------------------------------------------------

_CLASS = "the class that the others are made from"
_FUNCTION = "makes objects of names and configurations"
_CODE = "a function of tensors, not a part of a model"
WHY: dict[str, dict[str, str]] = {
    "losses": {
        "Loss": _CLASS,
        "categorical_generalized_cross_entropy": "has no default for q: tried as a class",
        **dict.fromkeys(("deserialize", "get", "serialize"), _FUNCTION),
    },
    "metrics": {
        "Metric": _CLASS, "MeanMetricWrapper": "wraps a function: each function is tried",
        "Mean": "of single values, which Keras' own step does not feed",
        "Sum": "of single values, which Keras' own step does not feed",
        **dict.fromkeys(("deserialize", "get", "serialize"), _FUNCTION),
    },
    "optimizers": {
        "Optimizer": _CLASS, "legacy": "what Keras 2 had: importing one raises",
        "schedules": "a list of its own, of which tests/parity/parts.py tries some",
        **dict.fromkeys(("deserialize", "get", "serialize"), _FUNCTION),
    },
    "callbacks": {
        "Callback": _CLASS, "CallbackList": "Keras calls callbacks by it: no callback itself",
        "OrbaxCheckpoint": "needs the package orbax-checkpoint; as ModelCheckpoint otherwise",
        "RemoteMonitor": "sends logs to a server of the user's; runs on the driver",
    },
    "layers": {
        "Layer": _CLASS, "Wrapper": _CLASS, "InputSpec": "what a layer expects",
        "Input": "all models here begin with it", "InputLayer": "all models here begin with it",
        "AugMix": "draws from Python's own generator, where a step is compiled only once",
        "TFSMLayer": "predicts with a SavedModel's program, and is not trained",
        "MaxNumBoundingBoxes": "takes dicts of boxes, which no column feeds",
        "JaxLayer": "runs a function of the user's on JAX's arrays",
        "FlaxLayer": "runs a module of Flax, which is not installed",
        "TorchModuleWrapper": "runs a module of PyTorch's",
        **dict.fromkeys(("deserialize", "serialize"), _FUNCTION),
    },
    "initializers": {
        "Initializer": _CLASS, **dict.fromkeys(("deserialize", "get", "serialize"), _FUNCTION)
    },
    "regularizers": {
        "Regularizer": _CLASS, **dict.fromkeys(("deserialize", "get", "serialize"), _FUNCTION)
    },
    "constraints": {
        "Constraint": _CLASS, **dict.fromkeys(("deserialize", "get", "serialize"), _FUNCTION)
    },
}  # fmt: skip
"""List -> name -> why no line tries it."""

LAYERS: dict[str, str] = {
    "vector": """
        Dense(3)(x); Activation('tanh')(x); ActivityRegularization(l2=.1)(Dense(2)(x)); ELU()(x)
        AlphaDropout(.3, seed=1)(x); Dropout(.3, seed=2)(x); GaussianDropout(.3, seed=3)(x)
        GaussianNoise(.1, seed=4)(x); BatchNormalization(epsilon=.1)(x); Identity()(x)
        EinsumDense('ab,bc->ac', 3, bias_axes='c')(x); Flatten()(x); LeakyReLU()(x); ReLU()(x)
        LayerNormalization(epsilon=.1)(x); RMSNormalization(epsilon=.1)(x); PReLU()(x)
        UnitNormalization()(x); SpectralNormalization(Dense(2))(x); Softmax()(x); Rescaling(.5)(x)
        Lambda(lambda t: t * .5)(x); RepeatVector(2)(x); Reshape((2, 3))(x)
        Normalization(mean=.5, variance=2.)(x); Add()([x, x * 2.]); Average()([x, x * 2.])
        Maximum()([x, x * x]); Minimum()([x, x * x]); Multiply()([x, x]); Subtract()([x, x * 2.])
        Concatenate()([x, x]); Dot(1)([x, x]); Discretization([-.5, .5])(x)
        CategoryEncoding(4, 'multi_hot')(Discretization([-.5, .5])(x))
        add([x, x]); average([x, x]); maximum([x, x * x]); minimum([x, x * x]); multiply([x, x])
        subtract([x, x * 2.]); concatenate([x, x]); dot([x, x], 1)
    """,
    "sequence": """
        AdaptiveAveragePooling1D(2)(x); AdaptiveMaxPooling1D(2)(x); AveragePooling1D(2)(x)
        MaxPooling1D(2)(x); Conv1D(3, 2)(x); Conv1DTranspose(3, 2)(x); DepthwiseConv1D(2)(x)
        SeparableConv1D(3, 2)(x); Cropping1D(1)(x); UpSampling1D(2)(x); ZeroPadding1D(1)(x)
        GlobalAveragePooling1D()(x); GlobalMaxPooling1D()(x); SpatialDropout1D(.3, seed=1)(x)
        Masking()(x); Permute((2, 1))(x); TimeDistributed(Dense(3))(x); SimpleRNN(3)(x); GRU(3)(x)
        LSTM(3)(x); Bidirectional(GRU(3))(x); RNN(StackedRNNCells([LSTMCell(3), GRUCell(3)]))(x)
        RNN(SimpleRNNCell(3))(x); Attention(use_scale=True)([x, x]); AdditiveAttention()([x, x])
        MultiHeadAttention(2, 3)(x, x); GroupQueryAttention(3, 2, 1)(x, x)
    """,
    "image": """
        AdaptiveAveragePooling2D(2)(x); AdaptiveMaxPooling2D(2)(x); AveragePooling2D(2)(x)
        MaxPooling2D(2)(x); Conv2D(3, 2)(x); Conv2DTranspose(3, 2)(x); DepthwiseConv2D(2)(x)
        SeparableConv2D(3, 2)(x); Cropping2D(1)(x); UpSampling2D(2)(x); ZeroPadding2D(1)(x)
        GlobalAveragePooling2D()(x); GlobalMaxPooling2D()(x); SpatialDropout2D(.3, seed=1)(x)
        GroupNormalization(3, epsilon=.1)(x); CenterCrop(4, 4)(x); Resizing(4, 4)(x)
    """,
    "video": """
        AdaptiveAveragePooling3D(2)(x); AdaptiveMaxPooling3D(2)(x); AveragePooling3D(2)(x)
        MaxPooling3D(2)(x); Conv3D(3, 2)(x); Conv3DTranspose(3, 2)(x); Cropping3D(1)(x)
        UpSampling3D(2)(x); ZeroPadding3D(1)(x); GlobalAveragePooling3D()(x)
        GlobalMaxPooling3D()(x); SpatialDropout3D(.3, seed=1)(x); ConvLSTM2D(2, 2)(x)
    """,
    "movie": "ConvLSTM1D(2, 2)(x)",
    "film": "ConvLSTM3D(2, 2)(x)",
    "ids": """
        Embedding(9, 3)(x); IntegerLookup(vocabulary=[1, 2, 3])(x)
        ReversibleEmbedding(9, 3)(x)
    """,
    "hashed": "Hashing(4)(x); HashedCrossing(4)((x[:, :1], x[:, 1:2]))",
    "wave": """
        MelSpectrogram(16, 8, num_mel_bins=4, sampling_rate=64, min_freq=2.)(x)
        STFTSpectrogram('log', 16, 8, 16, expand_dims=False)(x[:, :, None])
    """,
    "picture": """
        AutoContrast(value_range=(0, 1))(x); Equalization((0, 1))(x)
        ContrastLimitedAdaptiveHistogramEqualization((0, 1), tile_grid_size=(2, 2))(x)
        RandomBrightness(.2, (0, 1), seed=1)(x)
        RandomColorDegeneration(.5, seed=2)(x); RandomContrast(.3, (0, 1), seed=3)(x)
        RandomColorJitter((0, 1), .2, .2, .2, .2, seed=4)(x)
        GlobalMaxPooling2D()(RandomCrop(4, 4, seed=5)(x))
        RandomElasticTransform(1., 1., seed=6)(x); RandomErasing(1., seed=7)(x)
        RandomFlip(seed=8)(x); RandomGaussianBlur(1., 3, 1., (0, 1), seed=9)(x)
        RandomGrayscale(.5, seed=10)(x); RandomHue(.3, (0, 1), seed=11)(x)
        RandomInvert(.5, (0, 1), seed=12)(x); RandomPerspective(1., .3, seed=13)(x)
        RandomPosterization(3, (0, 1), seed=14)(x); RandomRotation(.2, seed=15)(x)
        RandomSaturation(.5, (0, 1), seed=16)(x); RandomSharpness(.5, (0, 1), seed=17)(x)
        RandomShear(.3, .3, seed=18)(x); RandomTranslation(.2, .2, seed=19)(x)
        RandomZoom(.2, seed=20)(x); Solarization(.1, .3, (0, 1), seed=21)(x)
        CutMix(.5, seed=23)(x); MixUp(.3, seed=24)(x)
        RandAugment((0, 1), seed=25)(x); Pipeline([RandomFlip(seed=26), Rescaling(.5)])(x)
    """,
    "words": """
        StringLookup(vocabulary=['a', 'b', 'c'])(x)
        TextVectorization(vocabulary=['a', 'b', 'c'], output_sequence_length=3)(x)
    """,
}
"""Kind of input -> lines."""
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "vector": ((6,), "float32"), "sequence": ((5, 4), "float32"), "image": ((6, 6, 3), "float32"),
    "video": ((4, 4, 4, 2), "float32"), "movie": ((3, 4, 2), "float32"),
    "film": ((2, 3, 3, 3, 1), "float32"), "ids": ((5,), "int32"), "hashed": ((2,), "int32"),
    "wave": ((64,), "float32"), "picture": ((6, 6, 3), "float32"), "words": ((1,), "string"),
}  # fmt: skip
"""Kind of input -> shape and dtype."""

LOSSES: dict[str, str] = {
    "numbers": """
        MeanSquaredError(); MeanAbsoluteError(); MeanAbsolutePercentageError(); Huber(.5)
        CosineSimilarity(); LogCosh(); mean_squared_error; mean_absolute_error; huber; log_cosh
        mean_absolute_percentage_error; cosine_similarity
    """,
    "signs": "Hinge(); SquaredHinge(); hinge; squared_hinge",
    "shares": """
        KLDivergence(); Poisson(); MeanSquaredLogarithmicError(); CategoricalCrossentropy()
        CategoricalFocalCrossentropy(); kl_divergence; poisson; mean_squared_logarithmic_error
        categorical_crossentropy; categorical_focal_crossentropy
    """,
    "one-hot": "CategoricalHinge(); Dice(); Tversky(); categorical_hinge; dice; tversky",
    "bits": """
        BinaryCrossentropy(); BinaryFocalCrossentropy(); binary_crossentropy
        binary_focal_crossentropy
    """,
    "classes": """
        SparseCategoricalCrossentropy(); sparse_categorical_crossentropy
        CategoricalGeneralizedCrossEntropy()
    """,
    "directions": "Circle(); circle",
    "texts": "CTC(); ctc",
}
METRICS: dict[str, str] = {
    "numbers": """
        MeanSquaredError(); MeanAbsoluteError(); MeanAbsolutePercentageError(); LogCoshError()
        RootMeanSquaredError(); CosineSimilarity(); R2Score(); PearsonCorrelation()
        ConcordanceCorrelation(); mean_squared_error; mean_absolute_error; log_cosh; huber
        mean_absolute_percentage_error; pearson_correlation; concordance_correlation
    """,
    "signs": "Hinge(); SquaredHinge(); hinge; squared_hinge",
    "shares": """
        KLDivergence(); Poisson(); MeanSquaredLogarithmicError(); kl_divergence; poisson
        mean_squared_logarithmic_error; categorical_focal_crossentropy
    """,
    "one-hot": """
        CategoricalAccuracy(); CategoricalCrossentropy(); CategoricalHinge()
        F1Score(average='macro'); FBetaScore(average='macro', name='fbeta')
        TopKCategoricalAccuracy(2); OneHotIoU(3, [0, 2]); OneHotMeanIoU(3)
        categorical_accuracy; categorical_crossentropy; categorical_hinge
        top_k_categorical_accuracy
    """,
    "bits": """
        AUC(name='auc'); Accuracy(); BinaryAccuracy(); BinaryCrossentropy(); BinaryIoU()
        FalseNegatives(name='fn'); FalsePositives(name='fp'); TrueNegatives(name='tn')
        TruePositives(name='tp'); Precision(name='p'); Recall(name='r')
        PrecisionAtRecall(.5, name='par'); RecallAtPrecision(.5, name='rap')
        SensitivityAtSpecificity(.5, name='sas'); SpecificityAtSensitivity(.5, name='spas')
        IoU(2, [1]); MeanIoU(2); binary_accuracy; binary_crossentropy; binary_focal_crossentropy
    """,
    "classes": """
        SparseCategoricalAccuracy(); SparseCategoricalCrossentropy()
        SparseTopKCategoricalAccuracy(2); sparse_categorical_accuracy
        sparse_categorical_crossentropy; sparse_top_k_categorical_accuracy
    """,
}
WHOLE = {"numbers": "mse", "signs": "hinge", "shares": "kl_divergence", "bits":
          "binary_crossentropy", "one-hot": "categorical_crossentropy",
          "classes": "sparse_categorical_crossentropy"}  # fmt: skip
"""The loss beside metrics."""
OPTIMIZERS = """
    SGD(.05); Adadelta(.05, epsilon=1e-3); Adafactor(.05); Adagrad(.05, epsilon=1e-3); Ftrl(.05)
    Adam(.05, epsilon=1e-3); AdamW(.05, epsilon=1e-3); Adamax(.05, epsilon=1e-3); Lion(.01)
    Lamb(.05, epsilon=1e-3); Nadam(.05, epsilon=1e-3); RMSprop(.05, epsilon=1e-3)
    ScheduleFreeAdamW(.05, epsilon=1e-3, warmup_steps=3); Muon(.05, epsilon=1e-3)
    LossScaleOptimizer(SGD(.05)); MultiOptimizer(OptimizerMap(SGD(.05), {'.*kernel': SGD(.1)}))
"""
INITIALIZERS = """
    Constant(.2); GlorotNormal(1); GlorotUniform(1); HeNormal(1); HeUniform(1); Identity()
    LecunNormal(1); LecunUniform(1); Ones(); Orthogonal(1.0, 1); RandomNormal(seed=1)
    RandomUniform(seed=1); STFT(); TruncatedNormal(seed=1); VarianceScaling(seed=1); Zeros()
"""
REGULARIZERS = "L1(.1); L1L2(.1, .1); L2(.1); OrthogonalRegularizer(.1)"
CONSTRAINTS = "MaxNorm(.5); MinMaxNorm(.2, .5); NonNeg(); UnitNorm()"
CALLBACKS = """
    CSVLogger(path); EarlyStopping('loss', patience=0, min_delta=9.); History(); ProgbarLogger()
    LambdaCallback(on_epoch_end=lambda epoch, logs: None); TensorBoard(path); TerminateOnNaN()
    LearningRateScheduler(lambda epoch, rate: rate * .5); ModelCheckpoint(path + '{epoch}.keras')
    ReduceLROnPlateau('loss', patience=0, min_delta=9.); SwapEMAWeights(True)
    BackupAndRestore(path)
"""
UNSEEDED = {"torch": {"RandomElasticTransform"}}
"""Backend -> layers that draw from the backend's own generator there, whatever their seed is."""
REFUSED: dict[str, str] = {
    "RandomShear": "Keras cannot load it: what it writes is out of the range that it takes",
    "BackupAndRestore": "fit has checkpoints of its own: checkpoint_dir=..., resume=True",
}
"""Name -> why it may end in one error before a job."""


# -- lines -----------------------------------------------------------------------------------------


def lines_of(text: str) -> list[str]:
    """The lines of a table."""
    return [part.strip() for part in re.split(r"[;\n]", text) if part.strip()]


def names_in(line: str) -> set[str]:
    """The identifiers of a line, without attributes, names of arguments and texts."""
    line = re.sub(r"'[^']*'", "", line)
    return set(re.findall(r"(?<![\w.])([A-Za-z_]\w*)(?!\w*\s*=[^=])", line))


def known(list_name: str, text: str) -> list[str]:
    """The lines of a table whose classes and functions the installed Keras has."""
    module = {*dir(getattr(keras, list_name)), "None", "True", "False"}

    def has(name: str) -> bool:  # what begins so is no argument of a lambda
        return name in module or not (name[0].isupper() or "_" in name)

    unseeded = UNSEEDED.get(BACKEND, set())
    lines = [line for line in lines_of(text) if not names_in(line) & unseeded]
    return [line for line in lines if all(map(has, names_in(line)))]


def tables(list_name: str) -> list[str]:
    """The tables of a list."""
    kinds: dict[str, Any] = {
        "losses": LOSSES, "metrics": METRICS, "layers": LAYERS, "optimizers": OPTIMIZERS,
        "callbacks": CALLBACKS, "initializers": INITIALIZERS, "regularizers": REGULARIZERS,
        "constraints": CONSTRAINTS,
    }  # fmt: skip
    table = kinds[list_name]
    return [table] if isinstance(table, str) else [*table.values()]


def unknown(list_name: str) -> list[str]:
    """Names of the installed Keras that no line tries and nothing is said of."""
    module = getattr(keras, list_name)
    lines = [line for text in tables(list_name) for line in lines_of(text)]
    told = {name for line in lines for name in names_in(line)} | {*WHY[list_name]}
    seen = {id(getattr(module, name)) for name in told if hasattr(module, name)}
    names = [name for name in dir(module) if not name.startswith("_")]
    return [n for n in names if n not in told and id(getattr(module, n)) not in seen]


def made(list_name: str, line: str, **more: Any) -> Any:
    """What a line makes."""
    return eval(line, {**vars(getattr(keras, list_name)), **more})


# -- models ----------------------------------------------------------------------------------------


def _begin() -> None:
    """Equal weights and names for each model."""
    keras.utils.set_random_seed(7)
    global_state.set_global_attribute("object_name_uids", None)


def layer_trial(kind: str, lines: list[str]) -> Trial:
    """A model with a branch for each line."""
    shape, dtype = SHAPES[kind]

    def make() -> Any:
        _begin()
        x = keras.Input(shape, dtype=dtype, name="x")
        branches = []
        for line in lines:
            y = keras.ops.cast(made("layers", line, x=x), "float32")
            y = keras.layers.Flatten()(y) if len(y.shape) > 1 else keras.layers.Reshape((1,))(y)
            branches.append(keras.layers.Dense(1, kernel_initializer="glorot_normal")(y))
        whole = branches[0] if len(branches) == 1 else keras.layers.Add()(branches)
        model = keras.Model(x, whole)
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        return model

    rng = np.random.default_rng(1)
    if dtype == "string":
        x: Any = rng.choice(["a", "b", "c", "d"], (ROWS, *shape))
    elif dtype == "int32":
        x = rng.integers(0, 9, (ROWS, *shape)).astype(dtype)
    elif kind == "picture":
        x = rng.uniform(0, 1, (ROWS, *shape)).astype(dtype)
    else:
        x = rng.normal(0, 0.7, (ROWS, *shape)).astype(dtype)
    return Trial(make, x, rng.normal(size=(ROWS, 1)).astype("float32"))


_HEADS = {
    "numbers": (2, None), "signs": (2, "tanh"), "shares": (3, "softmax"), "one-hot": (3, "softmax"),
    "bits": (1, "sigmoid"), "classes": (3, "softmax"), "directions": (3, None), "texts": (5, None),
}  # fmt: skip


def labels_of(kind: str, rng: np.random.Generator) -> Any:
    if kind == "numbers":
        return rng.normal(2, 1, (ROWS, 2)).astype("float32")
    if kind == "signs":
        return (2 * rng.integers(0, 2, (ROWS, 2)) - 1).astype("float32")
    if kind == "shares":
        return rng.dirichlet(np.ones(3), ROWS).astype("float32")
    if kind == "one-hot":
        return np.eye(3, dtype="float32")[rng.integers(0, 3, ROWS)]
    if kind == "bits":
        return rng.integers(0, 2, (ROWS, 1)).astype("float32")
    if kind == "texts":
        return rng.integers(1, 5, (ROWS, 2)).astype("int32")
    return rng.integers(0, 3, ROWS).astype("int32")


def head_trial(pairs: list[tuple[str, Any]], metrics: dict[str, list[str]] | None = None) -> Trial:
    """A model with an output for each pair of a kind of labels and the line of a loss."""

    def make() -> Any:
        _begin()
        x = keras.Input((6,), name="x")
        steps = keras.layers.Reshape((6, 1))(x)
        outputs, losses, shown = [], [], []
        for kind, line in pairs:
            units, activation = _HEADS[kind]
            tail = keras.layers.Dense(units, activation=activation)(steps if kind == "texts" else x)
            if kind == "directions":
                tail = keras.layers.UnitNormalization()(tail)
            outputs.append(tail)
            losses.append(
                made("losses", line) if "(" in line or line in vars(keras.losses) else line
            )
            shown.append([made("metrics", m) for m in (metrics or {}).get(kind, [])])
        model = keras.Model(x, outputs if len(pairs) > 1 else outputs[0])
        several = len(pairs) > 1
        model.compile(
            keras.optimizers.SGD(0.01), losses if several else losses[0],
            metrics=(shown if several else shown[0]) if metrics else None,
        )  # fmt: skip
        return model

    rng = np.random.default_rng(1)
    x = rng.normal(0, 0.7, (ROWS, 6)).astype("float32")
    y = tuple(labels_of(kind, rng) for kind, _ in pairs)
    return Trial(make, x, y if len(y) > 1 else y[0])


def part_trial(
    lines: dict[str, list[str]], optimizer: str = "SGD(.05)", callbacks: list[str] | None = None,
    path: str = "",
) -> Trial:  # fmt: skip
    """A chain of square layers, one with each initializer, regularizer or constraint."""

    def make() -> Any:
        _begin()
        x = y = keras.Input((4,), name="x")
        for argument, each in lines.items():
            for line in each:
                part = made(f"{argument}s", line)
                if line == "STFT()":  # of a window, not of a square
                    continue
                y = keras.layers.Dense(4, "tanh", **{f"kernel_{argument}": part})(y)
        model = keras.Model(x, keras.layers.Dense(2)(y))
        model.compile(made("optimizers", optimizer), "mse")
        return model

    rng = np.random.default_rng(1)
    x = rng.normal(0, 0.7, (ROWS, 4)).astype("float32")
    y = rng.normal(size=(ROWS, 2)).astype("float32")

    def make_callbacks() -> list[Any]:
        return [made("callbacks", line, path=path) for line in callbacks or ()]

    return Trial(make, x, y, make_callbacks)


# -- trying ----------------------------------------------------------------------------------------


def tried(trial: Trial, workers: Workers, mode: str = "synchronous") -> list[str]:
    """What differs from Keras.

    Raises:
        Refused: sparkdl refuses it.
    """
    session = LocalSession(workers, (ROWS,), ())
    jobs = workers.jobs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = trial.make()
        try:
            ours = LocalSparkModel.of(session)(
                model, mode=mode, num_workers=1, batch_size=BATCH, frequency="batch"
            )
            history = ours.fit(
                (trial.x, trial.y), epochs=2, verbose=0, shuffle=False,
                callbacks=trial.callbacks() or None,
            ).history  # fmt: skip
        except SparkDLError as error:
            if workers.jobs > jobs:
                raise
            raise Refused(f"{type(error).__name__}: {error}") from error
        plain, expected = with_keras(trial)
        found: list[str] = []
        pairs = zip(
            values_of(plain.variables).items(), values_of(model.variables).items(), strict=True
        )
        for (name, a), (_, b) in pairs:
            _compare(name, a, b, found)
        states = values_of(plain.optimizer.variables), values_of(model.optimizer.variables)
        for (name, a), (_, b) in zip(*(s.items() for s in states), strict=True):
            _compare(f"optimizer {name}", a, b, found)
        if sorted(expected) != sorted(history):
            found.append(f"history {sorted(history)}, Keras {sorted(expected)}")
        for name in set(expected) & set(history):
            _compare(f"history {name}", expected[name], history[name], found)
        _compare("predict", *(_flat(m.predict(trial.x, batch_size=ROWS, verbose=0))
                              for m in (plain, model)), found)  # fmt: skip
    return found


def with_keras(trial: Trial) -> tuple[Any, dict[str, Any]]:
    """The model that Keras trains, and its history."""
    plain = trial.make()
    plain.run_eagerly = BACKEND != "jax" and not isinstance(trial.y, tuple)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = plain.fit(
            trial.x, trial.y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False,
            callbacks=trial.callbacks(),
        )  # fmt: skip
    return plain, history.history


def _flat(outputs: Any) -> Any:
    return np.concatenate([np.ravel(part) for part in keras.tree.flatten(outputs)])


def _compare(what: str, expected: Any, received: Any, found: list[str]) -> None:
    a, b = np.asarray(expected, "float64"), np.asarray(received, "float64")
    if a.shape != b.shape:
        found.append(f"{what}: shape {b.shape}, Keras {a.shape}")
        return
    wrong = (np.abs(a - b) > 1e-5 * (1 + np.abs(a))) | (np.isnan(a) != np.isnan(b))
    if wrong.any():
        place = np.unravel_index(int(np.argmax(np.where(wrong, np.abs(a - b), 0))), a.shape)
        found.append(f"{what}: {b[place]:.7g}, Keras {a[place]:.7g}")


# -- groups ----------------------------------------------------------------------------------------


def walks(folder: str) -> dict[str, tuple[list[str], Callable[[list[str]], Trial]]]:
    """Name of a group of lines -> the lines, and what makes one model of several of them.

    Args:
        folder: For what callbacks write.
    """
    found: dict[str, tuple[list[str], Callable[[list[str]], Trial]]] = {}
    for kind, text in LAYERS.items():
        found[f"layers of {kind}"] = known("layers", text), partial(layer_trial, kind)
    found["losses"] = _in_kinds(
        "losses",
        LOSSES,
        lambda kinds: head_trial([(kind, line) for kind, lines in kinds.items() for line in lines]),
    )
    found["metrics"] = _in_kinds(
        "metrics", METRICS, lambda kinds: head_trial([(kind, WHOLE[kind]) for kind in kinds], kinds)
    )
    parts = {"initializer": INITIALIZERS, "regularizer": REGULARIZERS, "constraint": CONSTRAINTS}
    for argument, text in parts.items():
        found[f"{argument}s"] = (
            known(f"{argument}s", text),
            lambda lines, argument=argument: part_trial({argument: lines}),
        )
    for line in known("optimizers", OPTIMIZERS):
        found[line] = [line], lambda lines: part_trial({}, lines[0])
    for line in known("callbacks", CALLBACKS):
        found[line] = (
            [line],
            lambda lines: part_trial({}, "SGD(.05, use_ema=True)", lines, f"{folder}/written"),
        )
    return found


def _in_kinds(
    list_name: str, table: dict[str, str], make: Callable[[dict[str, list[str]]], Trial]
) -> tuple[list[str], Callable[[list[str]], Trial]]:
    """The lines of a table by kinds of labels, and what makes a model of them."""
    by_kind = {kind: known(list_name, text) for kind, text in table.items()}

    def of(lines: list[str]) -> Trial:
        kept = {kind: [one for one in each if one in lines] for kind, each in by_kind.items()}
        return make({kind: each for kind, each in kept.items() if each})

    return [line for each in by_kind.values() for line in each], of


GROUPS = [*walks("")]


def problems(group: str, folder: str, workers: Workers) -> list[str]:
    """What a group's lines have in common neither with Keras nor with :data:`REFUSED`.

    All lines together first, in one model; if that fails, each alone.
    """
    lines, make = walks(folder)[group]
    free = [line for line in lines if not names_in(line) & {*REFUSED}]
    if len(free) > 1 and not _problem(make, free, workers):
        lines = [line for line in lines if line not in free]
    return [text for line in lines if (text := _problem(make, [line], workers))]


def _problem(make: Callable[[list[str]], Trial], lines: list[str], workers: Workers) -> str:
    """What is wrong with a trial; empty for nothing, or where Keras does not train it either."""
    try:
        found = tried(make(lines), workers)
        return f"{lines}: {found}" if found else ""
    except Exception as error:
        if len(lines) > 1:
            return str(error)
        if isinstance(error, Refused) and names_in(lines[0]) & {*REFUSED}:
            return ""
        try:
            with_keras(make(lines))
        except Exception:
            return ""
        return f"{lines}: {type(error).__name__}: {error}"


def main() -> int:
    """Tries all groups, or those that are named; 1 where something is wrong."""
    wrong = [f"{name}: {unknown(name)}" for name in LISTS if unknown(name)]
    with Workers(1) as workers, tempfile.TemporaryDirectory() as folder:
        for group in sys.argv[1:] or GROUPS:
            found = problems(group, folder, workers)
            print(f"{time.process_time():.0f} s: {group}: {found or 'as Keras'}", flush=True)
            wrong += found
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
