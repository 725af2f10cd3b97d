"""The models that users predict with: Keras models, compiled or not, or paths of saved ones.

Of an :class:`ArchiveSource` only the architecture is known: its weights stay in the file until they
are needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sparkdl.errors import ConfigError, ModelError, UnknownNameError
from sparkdl.files import storage
from sparkdl.files.model_file import HDF5, read_config, read_keras_file
from sparkdl.learner.archives.archive import (
    ModelArchive,
    decode_model,
    encode_model,
    in_own_thread,
    lenient_constructors,
    model_from_bytes,
)
from sparkdl.learner.framework import replaced
from sparkdl.learner.prediction.class_scores import ClassScores, class_scores
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.learner.preprocessing import give_space, space_in, space_of
from sparkdl.learner.signature import (
    Signature,
    TensorSpec,
    gives_otherwise,
    has_own,
    model_signature,
    unbuilt,
)

if TYPE_CHECKING:
    import keras


class ModelSource(Protocol):
    """A model on the driver, of which predictors are made."""

    @property
    def signature(self) -> Signature:
        """All that the model takes and gives."""

    def encode(self, outputs: Sequence[str], layers: Sequence[str] = ()) -> PredictorArchive:
        """A predictor that computes some outputs and some layers.

        Raises:
            UnknownNameError: No such output or layer.
            ModelError: The model cannot be sent, or its layers cannot be read.
        """

    def predict(self, x: object, batch_size: int) -> Any:
        """The outputs for NumPy arrays, in this process."""


def open_model(
    model: object,
    custom_objects: dict[str, Any] | None = None,
    *,
    safe_mode: bool = True,
    decoder: object = None,
) -> ModelSource:
    """A model to predict with.

    Args:
        model: A built ``keras.Model``, or the path or URI of a ``.keras`` file, an HDF5 file
            (``.h5``) or the folder of a SavedModel.
        custom_objects: Name -> class or function that the model uses.
        safe_mode: False also loads what runs code from a ``.keras`` or HDF5 file. A SavedModel is
            a program in any case.
        decoder: A ``FeatureSpace`` in it makes the model's inputs from now on.

    Raises:
        ModelError: No built model, or a file that holds none.
        ResourceError: The path cannot be read.
    """
    if not isinstance(model, (str, os.PathLike)):
        return KerasSource(model, custom_objects, decoder=decoder)
    path = os.fspath(model)
    if path.endswith((".keras", *HDF5)):
        content = read_keras_file(path)
        loaded = model_from_bytes(
            content, custom_objects, safe_mode=safe_mode, path=path, compiled=False
        )
        loss = _saved_loss(content) if path.endswith(".keras") else None
        return KerasSource(loaded, custom_objects, loss, decoder)
    if storage.exists(f"{path.rstrip('/')}/saved_model.pb"):
        if space_in(decoder) is not None:
            raise ConfigError(
                "a SavedModel has its inputs fixed", expected="a decoder that makes one of them",
                received="decoder=FeatureSpace", hint="a .keras file of the model takes one",
            )  # fmt: skip
        from sparkdl.learner.prediction.saved_model import SavedModelSource

        return SavedModelSource(path)
    raise ConfigError(
        f"{path!r} is no saved model",
        expected="a path that ends in .keras or .h5, or the folder of a SavedModel",
        received="a path without saved_model.pb in it",
    )


class KerasSource:
    """A Keras model; see :class:`ModelSource`.

    Args:
        model: A built ``keras.Model``, compiled or not.
        custom_objects: Name -> class or function, beside those found in the model itself.
        loss: What it was compiled with, if it is not compiled now.
        decoder: See :func:`open_model`.
    """

    def __init__(
        self,
        model: keras.Model,
        custom_objects: dict[str, Any] | None = None,
        loss: object = None,
        decoder: object = None,
    ) -> None:
        _require_built(model)
        if space_in(decoder) is not None:
            give_space(model, decoder)
        self._model, self._custom_objects, self._loss = model, custom_objects, loss
        from sparkdl.learner.prediction.predictor import prediction_signature

        self.signature = prediction_signature(model)

    def encode(self, outputs: Sequence[str], layers: Sequence[str] = ()) -> PredictorArchive:
        whole, model = self.signature, self._model
        chosen = list(outputs)
        forward = forward_model(model, whole, chosen, layers)
        if forward is model:
            chosen = list(whole.outputs)
        else:
            give_space(forward, space_of(model))
        specs = {name: whole.outputs[name] for name in chosen}
        if layers:
            found = list(model_signature(forward).outputs.values())
            by_name = {spec.name: spec for spec in found}
            for name in (LAYER + layer for layer in layers):
                spec = by_name[name] if len(found) > 1 else found[0]
                specs[name] = TensorSpec(name, spec.shape, spec.dtype)
        scores = class_scores(model, whole.outputs, self._loss)
        if gives_otherwise(model) and whole.outputs != model_signature(model).outputs:
            scores = {}  # the loss is about other numbers
        with _uncompiled(forward):
            archive = encode_model(forward, self._custom_objects)
        return PredictorArchive(
            archive, "keras", _digest(archive, forward), replace(whole, outputs=specs),
            {name: scores[name] for name in chosen if name in scores},
            {} if whole.preprocessing else kept_positions(forward, whole.inputs, specs),
        )  # fmt: skip

    def predict(self, x: object, batch_size: int) -> Any:
        space = space_of(self._model)
        given = x if space is None else space(x)
        if any(spec.dtype == "string" for spec in self.signature.inputs.values()):
            import keras  # whose predict takes tensors of text, and no arrays

            given = keras.tree.map_structure(keras.ops.convert_to_tensor, given)
        return self._model.predict(given, batch_size=batch_size, verbose=0)


@dataclass(frozen=True)
class Outline:
    """The facts about its model in a ``.keras`` file, beside the weights.

    Args:
        signature: The model's inputs and outputs.
        scores: Output name -> which classes its numbers are about, where that is known.
        loss: What the model was compiled with; None if it was not compiled.
        compiled: Whether the file has compile settings, and so may have optimizer state.
        one_tensor: The model gives one tensor, not a list or a dict.
        positions: See :class:`PredictorArchive`.
    """

    signature: Signature
    scores: Mapping[str, ClassScores]
    loss: Any
    compiled: bool
    one_tensor: bool
    positions: Mapping[str, str]


class ArchiveSource:
    """An archived model; see :class:`ModelSource`.

    A model without compile settings travels to those who predict as the file that it is: Keras
    neither loads nor saves it here.

    Args:
        objects: Name -> class or function that it uses.
        digest: Digest of the archive's content.
    """

    def __init__(
        self, archive: ModelArchive, objects: Mapping[str, Any], outline: Outline, digest: str
    ) -> None:
        self._archive, self._objects = archive, dict(objects)
        self._outline, self._digest = outline, digest
        self.signature = outline.signature

    def encode(self, outputs: Sequence[str], layers: Sequence[str] = ()) -> PredictorArchive:
        outline, archive = self._outline, self._archive
        every = list(outputs) == list(outline.signature.outputs)
        if outline.compiled or layers or not every or not outline.one_tensor:
            return KerasSource(self._load(), self._objects, outline.loss).encode(outputs, layers)
        digest = hashlib.sha256(f"{archive.key} {self._digest}".encode()).hexdigest()
        return PredictorArchive(
            archive, "keras", digest, outline.signature, outline.scores, outline.positions
        )

    def predict(self, x: object, batch_size: int) -> Any:
        return self._load().predict(x, batch_size=batch_size, verbose=0)

    def _load(self) -> Any:
        return decode_model(self._archive, compiled=False, own_code=True)


def outline_of(content: bytes, objects: Mapping[str, Any], *, safe_mode: bool) -> Outline | None:
    """The outline of a ``.keras`` file; its weights are neither read nor given a place in memory.

    Args:
        objects: Name -> class or function that the model uses.
        safe_mode: False also takes what runs code from the file.

    Returns:
        None if Keras cannot make such a model, or not without its variables' values: loading it
        whole tells which.
    """
    outline: Outline | None = None
    with contextlib.suppress(Exception):  # told by whoever then loads the model whole
        outline = in_own_thread(lambda: _outline(content, dict(objects), safe_mode))
    return outline


def _outline(content: bytes, objects: dict[str, Any], safe_mode: bool) -> Outline | None:
    import keras

    config = json.loads(read_config(content))
    settings, config["compile_config"] = config.get("compile_config"), None
    given = {"custom_objects": objects, "safe_mode": safe_mode}
    loss = None
    with lenient_constructors(objects):
        with keras.StatelessScope(initialize_variables=False):
            model = keras.saving.deserialize_keras_object(config, **given)
        if has_own(model, "compile", "compile_from_config") or gives_otherwise(model):
            return None
        if settings:
            loss = keras.saving.deserialize_keras_object(settings, **given).get("loss")
            model.compile(optimizer=None, loss=loss)
        with keras.StatelessScope(initialize_variables=False):
            signature = model_signature(model)
            scores = class_scores(model, signature.outputs)
            positions = kept_positions(model, signature.inputs, signature.outputs)
    structure = getattr(model, "_outputs_struct", None)
    one_tensor = structure is not None and not isinstance(structure, (dict, list, tuple))
    one_tensor = one_tensor or (type(model) is keras.Sequential and len(signature.outputs) == 1)
    return Outline(signature, scores, loss, bool(settings), one_tensor, positions)


@contextlib.contextmanager
def _uncompiled(model: Any) -> Iterator[None]:
    """Within, the model has no optimizer, whose state would be twice the weights, and no loss."""
    if not model.compiled:
        yield
        return
    with replaced(model, "optimizer", None), replaced(model, "compiled", False):
        yield


_LENGTH = 64
"""Positions to ask a model about, which networks that halve them several times take, too."""


def kept_positions(
    model: keras.Model, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]
) -> dict[str, str]:
    """The outputs with a value for each position of an input, found from the model's shapes.

    The model is asked, without numbers, what it makes of inputs of two lengths: an output that has
    the same length both times keeps the positions.

    Args:
        model: That gives these outputs.
        inputs: By name; those whose first dimension is free have positions.
        outputs: By name, in the order of the model.

    Returns:
        Output -> input; none of them where the model cannot be asked.
    """
    import keras

    from sparkdl.learner.prediction.predictor import symbolic_outputs

    free = [n for n, spec in inputs.items() if spec.shape is not None and spec.shape[:1] == (None,)]
    if not free or all(s.shape is not None and s.shape[:1] != (None,) for s in outputs.values()):
        return {}

    def lengths_of(lengths: Mapping[str, int]) -> dict[str, int | None]:
        tensors = {
            name: keras.KerasTensor(
                (1, *(lengths.get(name, d or 8) if axis == 0 else d or 8 for axis, d in dims)),
                spec.dtype,
            )
            for name, spec in inputs.items()
            if (dims := list(enumerate(spec.shape or ()))) or spec.shape == ()
        }
        made = symbolic_outputs(model, tensors)
        if not isinstance(made, dict):
            made = dict(zip(outputs, keras.tree.flatten(made), strict=True))
        return {n: t.shape[1] if len(t.shape) > 1 else None for n, t in made.items()}

    owners = {n: n.removesuffix("_mask") if n.removesuffix("_mask") in free else n for n in free}
    numbers = {name: i for i, name in enumerate(dict.fromkeys(owners.values()))}
    for step in (1, 0) if len(numbers) > 1 else (0,):  # inputs may have to be equally long
        tries = [
            {name: first * (1 + step * numbers[owner]) for name, owner in owners.items()}
            for first in (_LENGTH, _LENGTH * (1 + len(numbers)))
        ]
        try:
            made = [lengths_of(lengths) for lengths in tries]
        except Exception:  # a network that takes no such lengths, or none without numbers
            continue
        return {
            output: owner
            for output in outputs
            for owner in reversed(numbers)
            if all(got.get(output) == asked[owner] for got, asked in zip(made, tries, strict=True))
        }
    return {}


def _require_built(model: keras.Model) -> None:
    import keras

    if not isinstance(model, keras.Model):
        raise ModelError(
            "cannot predict with this object",
            expected="a keras.Model (Keras 3), or the path of a saved one",
            received=f"{type(model).__module__}.{type(model).__qualname__}",
        )
    if not model.built:
        raise unbuilt(model)


def _digest(archive: ModelArchive, model: keras.Model) -> str:
    """Equal for equal weights of an equal architecture, unlike the archive with its date."""
    import keras

    digest = hashlib.sha256(archive.key.encode())
    for weight in model.weights:
        array = np.ascontiguousarray(keras.ops.convert_to_numpy(weight.value))
        digest.update(f"{array.shape} {array.dtype}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _saved_loss(content: bytes) -> Any:
    """The loss in the compile settings of a ``.keras`` file; None if it has none of Keras' own."""
    import keras

    settings = json.loads(read_config(content)).get("compile_config") or {}
    try:
        return keras.saving.deserialize_keras_object(settings.get("loss"))
    except Exception:  # a loss of the user's own, which says nothing about classes
        return None


def pretrained(module: str, name: str, *, features: bool) -> Any:
    """A model trained on ImageNet, whose weights Keras downloads into its cache.

    Args:
        module: Of ``keras.applications``.
        name: Of the function there.
        features: Without the classes: the mean over the pixels of the last feature map.
    """
    make = getattr(importlib.import_module(f"keras.applications.{module}"), name)
    if features:
        return make(weights="imagenet", include_top=False, pooling="avg")
    return make(weights="imagenet")


def imagenet_names(module: str) -> list[tuple[str, str]]:
    """Identifier and description of the classes, in their order; Keras downloads them."""
    decode = importlib.import_module(f"keras.applications.{module}").decode_predictions
    rows = decode(np.eye(1000, dtype="float32"), top=1)
    return [(str(best[0]), str(best[1])) for (best,) in rows]


LAYER = "layer "
"""Stands before the name of a layer, where outputs and layers are named together."""


def forward_model(
    model: keras.Model, signature: Signature, outputs: Sequence[str], layers: Sequence[str]
) -> Any:
    """A model with the same inputs that computes no more than what is wanted.

    A plain functional or Sequential model becomes a new one around the same layers, with one output
    or a dict of them: by the outputs' names, and ``'layer <name>'`` for layers. It is not compiled,
    so no optimizer state travels to those who only predict. A model of a class of the user's, which
    may have a ``call`` or ``predict_step`` of its own, stays as it is.

    Args:
        model: A built ``keras.Model``.
        outputs: Names of the outputs wanted.
        layers: Names of the layers whose output is wanted.

    Raises:
        UnknownNameError: No such output or layer.
        ModelError: A layer whose output is not one tensor, or a model without a graph of layers.
    """
    import keras

    for name in outputs:
        if name not in signature.outputs:
            raise UnknownNameError("output of the model", name, signature.outputs)
    plain = type(model) in (keras.Model, keras.Sequential, keras.src.models.Functional)
    if not plain or not getattr(model, "inputs", None):
        if layers:
            raise ModelError(
                f"the layers of model {model.name!r} cannot be read",
                expected="a functional or Sequential model, whose layers make a graph",
                received=f"a model of the class {type(model).__qualname__}",
                hint="keras.Model(inputs, [tensors]) makes a functional model of the layers",
            )
        return model
    graph = model._functional if isinstance(model, keras.Sequential) else model
    tensors = dict(zip(signature.outputs, model.outputs, strict=True))
    wanted = {name: tensors[name] for name in outputs}
    wanted |= {LAYER + name: _tensor_of(graph, name) for name in layers}
    # Without names of their own, equal models have equal keys.
    outgoing = next(iter(wanted.values())) if len(wanted) == 1 else wanted
    return keras.Model(graph._inputs_struct, outgoing)


def _tensor_of(graph: Any, name: str) -> Any:
    every = [node for nodes in graph._nodes_by_depth.values() for node in nodes]
    nodes = [node for node in every if node.operation.name == name]
    if not nodes:
        raise UnknownNameError("layer", name, [layer.name for layer in graph.layers])
    tensors = [tensor for node in nodes for tensor in node.outputs]
    if len(tensors) != 1:
        raise ModelError(
            f"layer {name!r} has several outputs",
            expected="a layer that is called once, and gives one tensor",
            received=f"{len(nodes)} calls, {len(tensors)} tensors",
            hint="choose the layer after it, or make a keras.Model with the tensor as an output",
        )
    return tensors[0]
