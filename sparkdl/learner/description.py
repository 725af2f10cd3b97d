"""The inputs and outputs of a model, and its exchanged parts: for people and for the shell."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import keras

from sparkdl.learner.signature import TensorSpec, model_signature
from sparkdl.learner.state.model_weights import model_layout
from sparkdl.learner.steps.keras_learner import require_compiled
from sparkdl.progress.events import Json


def describe_model(model: keras.Model) -> dict[str, Json]:
    """Parameters, layers, loss and the optimizer's settings (``optimizer_learning_rate``, ...).

    Only numbers, texts and truth values; a learning-rate schedule is named by its class.
    """
    told: dict[str, Json] = {
        "model": model.name,
        "model_parameters": int(model.count_params()),
        "model_layers": len(model.layers),
        "loss": name_of_loss(model.loss),
        "optimizer": type(model.optimizer).__name__,
    }
    for name, value in model.optimizer.get_config().items():
        if isinstance(value, dict) and "class_name" in value:
            value = str(value["class_name"])
        if name != "name" and value is not None and isinstance(value, (bool, int, float, str)):
            told[f"optimizer_{name}"] = value
    return told


_STATE = frozenset({
    "name", "module", "registered_name", "build_config", "compile_config", "shared_object_id",
    "trainable", "dtype", "seed", "batch_shape", "batch_input_shape", "keras_history",
    "input_layers", "output_layers", "stored",
})  # fmt: skip
"""Parts of a configuration that say nothing of what a model with given weights computes."""


def config_difference(content: bytes, model: keras.Model) -> tuple[str, str, str] | None:
    """Finds what a saved model computes otherwise than a model with the same weights would.

    Names, initializers, seeds and dtypes do not count, nor a setting that one of the two Keras'
    does not know, nor the code of a lambda.

    Args:
        content: Its ``config.json``.
        model: The other model.

    Returns:
        The place, the saved value and the model's; None where there is no difference.
    """
    own = json.dumps(keras.saving.serialize_keras_object(model), default=str)
    return _difference(json.loads(content), json.loads(own), "the model")


def optimizer_classes(content: bytes, model: keras.Model) -> tuple[str, str] | None:
    """The class of a saved model's optimizer and that of a model's; None if one is not known."""
    settings = (json.loads(content).get("compile_config") or {}).get("optimizer")
    own = keras.saving.serialize_keras_object(model.optimizer)
    if not isinstance(settings, dict):
        return None
    return _classes(settings), _classes(own)


def _classes(optimizer: Any) -> str:
    inner = (optimizer.get("config") or {}).get("inner_optimizer")
    name = str(optimizer["class_name"])
    return name if inner is None else f"{name}({_classes(inner)})"


def _difference(saved: object, own: object, place: str) -> tuple[str, str, str] | None:
    if isinstance(saved, dict) and isinstance(own, dict):
        kind, other = saved.get("class_name"), own.get("class_name")
        if kind != other:
            return place, f"{kind}", f"{other}"
        if kind == "__lambda__" or (kind is None and "value" in saved):  # its code
            return None
        if isinstance(kind, str):
            place = f"{place} ({kind})"
        keys = [k for k in saved if k in own and k not in _STATE and "initializer" not in k]
        pairs = [(saved[k], own[k], place if k == "config" else f"{place}: {k}") for k in keys]
    elif isinstance(saved, list) and isinstance(own, list):
        if len(saved) != len(own):
            return place, f"{len(saved)}", f"{len(own)}"
        both = enumerate(zip(saved, own, strict=True), 1)
        pairs = [(a, b, f"{place} number {number}") for number, (a, b) in both]
    elif saved != own:
        return place, repr(saved), repr(own)
    else:
        return None
    return next(filter(None, (_difference(*pair) for pair in pairs)), None)


def name_of_loss(loss: object) -> str:
    """The name of a loss, or of several by output; ``'none'`` for None."""
    if loss is None or isinstance(loss, str):
        return loss or "none"
    if isinstance(loss, dict):
        return ", ".join(f"{output}: {name_of_loss(one)}" for output, one in loss.items())
    if isinstance(loss, (list, tuple)):
        return ", ".join(name_of_loss(one) for one in loss)
    return str(getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__))


_LABELS = {
    "sparse": "a whole number, the class",
    "binary": "numbers in [0, 1]",
    "dense": "numbers of the output's shape, or the class",
    "own": "what the loss takes",
}


@dataclass(frozen=True)
class ModelDescription:
    """A model in plain values.

    Args:
        inputs: Input -> what a column for it holds.
        outputs: Output -> its values per row.
        labels: Output -> what a label column for it holds.
        layers: Name, class and parameters of each layer.
        parameters: Numbers in all variables of the model.
        exchange_bytes: What workers exchange, in float32.
        optimizer_bytes: The optimizer's state, which stays where it is.
    """

    name: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    labels: dict[str, str]
    layers: list[tuple[str, str, int]]
    parameters: int
    exchange_bytes: int
    optimizer_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The description as plain values, e.g. for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"model {self.name}: {self.parameters:,} parameters"]
        lines += [f"  input   {name}: {text}" for name, text in self.inputs.items()]
        lines += [f"  output  {name}: {text}" for name, text in self.outputs.items()]
        lines += [f"  label   {name}: {text}" for name, text in self.labels.items()]
        lines += [f"  layer   {name} ({kind}): {count:,}" for name, kind, count in self.layers]
        lines.append(f"  an exchange carries {self.exchange_bytes:,} bytes each way")
        lines.append(f"  the optimizer's state has {self.optimizer_bytes:,} bytes")
        return "\n".join(lines)


def describe(model: keras.Model) -> ModelDescription:
    """Describes a compiled model.

    Args:
        model: A ``SparkModel``, or a built and compiled ``keras.Model``.

    Returns:
        Inputs, outputs and labels with shapes per row, layers, and the bytes of an exchange;
        ``print`` shows them as lines.

    Raises:
        ModelError: The model's losses and outputs do not match.
    """
    model = getattr(model, "model", model)
    require_compiled(model)
    signature = model_signature(model)
    optimizer = model.optimizer
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    state = sum(math.prod(v.shape) * 4 for v in optimizer.variables)
    return ModelDescription(
        str(model.name), {name: _tensor(spec) for name, spec in signature.inputs.items()},
        {name: _tensor(spec) for name, spec in signature.outputs.items()},
        {name: _LABELS[kind] for name, kind in signature.label_kinds.items()},
        [(layer.name, type(layer).__name__, int(layer.count_params())) for layer in model.layers],
        int(model.count_params()), model_layout(model).size_bytes, state,
    )  # fmt: skip


def _tensor(spec: TensorSpec) -> str:
    """A tensor's values per row, in words.

    >>> _tensor(TensorSpec('x', (28, 28), 'uint8')), _tensor(TensorSpec('x', (), 'float32'))
    ('uint8 array of shape (28, 28)', 'float32 number')
    """
    if spec.shape is None:
        return f"{spec.dtype} of any shape"
    if not spec.shape:
        return f"{spec.dtype} number"
    return f"{spec.dtype} array of shape {spec.shape}"
