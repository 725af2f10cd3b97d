"""A Keras model as bytes, with everything needed to go on training it elsewhere.

The bytes are Keras' own ``.keras`` archive (architecture, weights, compile settings, optimizer
state, assets such as vocabularies) plus the custom classes and functions it names, pickled by
value, so that a layer defined in a notebook cell needs no installation on the executors.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import json
import os
import re
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from sparkdl.errors import ConfigError, ModelError
from sparkdl.files.model_file import HDF5, read_config
from sparkdl.files.temporary import TemporaryFolder
from sparkdl.learner.archives.plain_config import TOLD, names_of_data, plain_config
from sparkdl.learner.framework import replaced
from sparkdl.learner.preprocessing import give_space, present_vocabularies, space_of
from sparkdl.learner.signature import compiles_itself, has_own
from sparkdl.process import payload
from sparkdl.tables.checkpoints import found_beside

if TYPE_CHECKING:
    import keras
    import numpy.typing as npt

    from sparkdl.learner.archives.unsaved_settings import BesideFile

making_models = threading.RLock()
"""Held while a Keras model is made, saved or loaded: Keras, and what is done to the classes of a
model's layers while it loads, keep some state per process."""
_KINDS = ("Operation", "Layer", "Functional", "Sequential", "Metric", "Optimizer", "Loss")
_SAFE_HDF5 = (3, 11, 3)
"""From this version on ``safe_mode`` holds for HDF5 files, too."""
_MISSING = (
    r"Could not locate (class|function) '([^']+)'",
    r"Could not interpret ([a-z ]+) identifier: \{[^{}]*'function', 'config': '(\w+)'",
    r"Could not interpret ([a-z ]+) identifier: \{[^{}]*'class_name': '(\w+)'",
)
"""How Keras says that it does not know a part of a model: its kind, and its name."""


@dataclass(frozen=True)
class ModelArchive:
    """A model as the driver sends it to the workers.

    Args:
        objects: cloudpickle of the custom objects by registered name.
        backend: The Keras backend it was made with: ``tensorflow``, ``jax`` or ``torch``.
        key: A digest of all that steps are compiled from: architecture, compile settings, and the
            content of ``objects``, so of every value that their code refers to. The weights and the
            names that Keras gives are left out. A reused worker process finds by it a model whose
            steps it has compiled before.
        beside: What the file does not hold, see
            :class:`sparkdl.learner.archives.unsaved_settings.BesideFile`; none for a model that is
            known as a file only.
        packages: Installed package -> its version, of those that ``objects`` names.
        named: See :func:`sparkdl.learner.archives.plain_config.names_of_data`.
        here: The custom objects by registered name, in the process that made the archive.
        values: Number of a variable -> its value, where that is not to be taken from the file.
    """

    content: payload.Bytes
    objects: bytes
    backend: str
    key: str
    beside: bytes = b""
    packages: dict[str, str] = field(default_factory=dict, compare=False)
    named: frozenset[str] = frozenset()
    here: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    values: dict[str, npt.NDArray[Any]] = field(default_factory=dict, compare=False, repr=False)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        has_buffers = protocol.__index__() >= 5  # pickle's own default is 4
        content = payload.cut(self.content) if has_buffers else payload.joined(self.content)
        return object.__new__, (type(self),), {**self.__dict__, "content": content, "here": None}

    def open_beside(self) -> BesideFile | None:
        """The settings beside the file; None for a model that is known as a file only."""
        found: BesideFile | None = payload.load(self.beside) if self.beside else None
        return found

    def own_code(self) -> dict[str, Any]:
        """The custom objects by registered name: the user's own, where the archive was made."""
        return self.code() if self.here is None else dict(self.here)

    def code(self) -> dict[str, Any]:
        """Copies of the custom objects as they were sent, which no other archive shares.

        Raises:
            ModelError: A package is missing in this process, or has another version.
        """
        error = None
        try:
            objects: dict[str, Any] = payload.load_apart(self.objects)
        except (ImportError, AttributeError) as raised:
            error = raised
        present = {name: payload.version_of(name) for name in self.packages}
        others = [
            f"{name} {there or 'not found'}"
            for name, there in present.items() if there != self.packages[name]
        ]  # fmt: skip
        if error is None and not others:
            return objects
        raise ModelError(
            "the model's code needs a package that this worker has not, or in another version",
            expected=", ".join(f"{name} {told}" for name, told in self.packages.items()),
            received=", ".join(others) or f"{type(error).__name__}: {error}",
            hint="install the driver's version on the workers, or let the code travel: of a module "
            "that is not installed it goes by value",
        ) from error

    def forget_content(self) -> None:
        """Drops the file, for all who hold this archive: a model was made of it."""
        vars(self).update(content=b"", beside=b"", values={})


def encode_model(
    model: keras.Model, custom_objects: dict[str, Any] | None = None, *, for_worker: bool = False
) -> ModelArchive:
    """A model, compiled or not, as an archive.

    Args:
        model: A built ``keras.Model``.
        custom_objects: Name → class or function, beside those found in the model itself.
        for_worker: Whether a large model's values go beside the file, where all layers are Keras'
            own: for :func:`decode_model` and :func:`restore_state`, and for no other reader.

    Raises:
        ModelError: Keras cannot serialize the model (e.g. a layer without ``get_config``).
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    from sparkdl.learner.archives.rebuilt import compared_with_rebuilt, parts_by_id, values_left_out
    from sparkdl.learner.custom_objects import (
        compile_settings,
        find_custom_objects,
        functions_in_configs,
        named_functions,
    )
    from sparkdl.learner.state.optimizer_state import forget_lost_variables

    if optimizer is not None:
        forget_lost_variables(model)
    objects = {**find_custom_objects(model), **(custom_objects or {})}
    try:
        with (
            making_models, named_functions(model) as functions,
            _present_settings(model, compile_settings(model)),
            values_left_out(model, for_worker) as whole,
        ):  # fmt: skip
            content = _save_bytes(model, objects)
        config = read_config(content).decode()
        objects |= {name: f for name, f in functions.items() if json.dumps(name) in config}
    except Exception as error:
        raise _cannot_travel(model, error) from error
    archive = archive_of_bytes(content, objects, parts_by_id(model))

    def load(with_values: bool) -> Any:
        if not with_values and not has_own(model, "compile_from_config"):
            with contextlib.suppress(Exception):  # a layer that wants values when it is made
                return _without_values(json.loads(read_config(content)), objects)
        with _model_file(content) as path:
            try:
                return load_model_file(path, objects, compiled=optimizer is not None)
            except Exception as error:  # in which Keras quotes the whole configuration
                raise _cannot_travel(model, error, functions_in_configs(model)) from None

    try:
        with making_models:
            beside, values = compared_with_rebuilt(model, archive.key, load, objects, whole)
    except ValueError as error:  # how Keras says that values found no place
        if isinstance(error, ModelError):
            raise
        raise _cannot_travel(
            model, error, "a layer that several other layers hold is made once by __init__ of a "
            "class of your own, or by get_config and from_config"
        ) from error  # fmt: skip
    given, key = space_of(model), archive.key
    space = None if given is None else archive_of_bytes(_save_bytes(given, objects), objects)
    key += space.key if space else ""
    key = hashlib.sha256(key.encode() + beside.settings.key).hexdigest()
    beside = replace(beside, space=space)
    return replace(archive, key=key, beside=payload.dump(beside), values=values)


def _cannot_travel(model: keras.Model, error: Exception, hint: str = "") -> ModelError:
    return ModelError(
        f"model {model.name!r} cannot be sent to the workers",
        expected="a model that keras can save and load (get_config on custom layers)",
        received=_in_short(error),
        hint=hint or "model.save('x.keras') and keras.models.load_model('x.keras') must both work",
    )


def _without_values(config: dict[str, Any], objects: dict[str, Any]) -> Any:
    """The model of a ``config.json``, whose variables have no values and no place in memory."""
    import keras

    def make() -> Any:
        given = {"custom_objects": objects, "safe_mode": False}
        compiled, bare = config.get("compile_config"), config | {"compile_config": None}
        with settings.set(), lenient_constructors(objects):
            with (
                keras.src.saving.serialization_lib.ObjectSharingScope(),
                keras.StatelessScope(initialize_variables=False),
            ):
                model = keras.saving.deserialize_keras_object(bare, **given)
            if compiled:  # not compile_from_config, which makes the optimizer's variables
                model.compile(**keras.saving.deserialize_keras_object(compiled, **given))
        return model

    from sparkdl.learner.archives.unsaved_settings import GlobalSettings

    settings = GlobalSettings.now()  # Keras has a policy per thread: that of this one
    return in_own_thread(make)


def in_own_thread(make: Callable[[], Any]) -> Any:
    """Makes a model without values in a thread of its own: Keras keeps the variables that wait for
    their first value per thread, and those of this model must never get one."""
    with ThreadPoolExecutor(1, "sparkdl-outline") as thread:
        return thread.submit(make).result()


@contextlib.contextmanager
def _present_settings(model: keras.Model, settings: dict[str, Any]) -> Iterator[None]:
    """Within, Keras saves the optimizer that the model has now, as it is now, and the arguments of
    a ``compile`` of the model's own.

    What it saves otherwise is what was given to ``keras.Model.compile``: a name such as ``'adam'``,
    or the optimizer before ``compile`` has wrapped it.
    """
    compiled: Any = getattr(model, "_compile_config", None)
    given = {} if compiled is None else compiled.config
    if given.get("optimizer") is None:
        yield
        return
    with replaced(compiled, "config", settings | {"optimizer": model.optimizer}):
        yield


def archive_of_bytes(
    content: bytes, objects: dict[str, Any], parts: dict[int, str] | None = None
) -> ModelArchive:
    """The archive of a model that is a ``.keras`` file already.

    Args:
        objects: Name -> class or function that does not come with Keras, all that the model uses.
        parts: ``id`` of each part of the model -> what it is, in words.

    Raises:
        ModelError: They cannot be pickled.
    """
    import keras

    try:
        given = dict(sorted(objects.items()))
        pickled, packages = payload.dump_with_packages(given, refused=parts)
    except Exception as error:
        raise ModelError(
            "a layer, loss or metric of the model cannot be sent to the workers",
            expected=f"classes and functions that can be pickled: {sorted(objects)}",
            received=_in_short(error),
            hint="what they use travels with them: no Spark session, open file or lock among their "
            "globals, and no part of the model: its own compute_loss and layers have these as self",
        ) from error
    digest = hashlib.sha256(pickled)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in sorted(archive.namelist()):
            if name == "config.json" or name.startswith("assets/"):
                part = archive.read(name)
                digest.update(plain_config(part) if name == "config.json" else part)
    backend, key = keras.backend.backend(), digest.hexdigest()
    named = frozenset(names_of_data(json.loads(read_config(content))))
    return ModelArchive(
        content, pickled, backend, key, packages=packages, named=named, here=dict(objects)
    )


def decode_model(archive: ModelArchive, *, compiled: bool = True, own_code: bool = False) -> Any:
    """Rebuilds the model: architecture, weights, compile settings and optimizer state.

    Args:
        compiled: False leaves compile settings and optimizer state out.
        own_code: Whether it is for the user, whose own classes it gets where the archive was made.

    Raises:
        ModelError: A class or function of the model is not among the archive's objects, or needs
            a package that is another one here.
    """
    objects = archive.own_code() if own_code else archive.code()
    beside = archive.open_beside()
    try:
        with _model_file(archive.content) as path:
            if beside is None:
                return load_model_file(path, objects, compiled=compiled)
            with beside.settings.set():
                model = load_model_file(path, objects, compiled=compiled)
            with making_models:
                give_space(model, beside.space and decode_model(beside.space))
                if beside.settings.apply(model, objects):
                    model.load_weights(path)
                beside.give_values(model, archive.values)
            return model
    except Exception as error:
        missing = _missing_object(error)
        if missing is None:
            raise
        raise ModelError(
            "the model cannot be loaded from what was sent of it",
            expected=f"its classes and functions, as {sorted(objects)}",
            received=f"a model with the {missing}, which was not found in it on the driver",
            hint="SparkModel(..., custom_objects={'name': the class or function}) sends it, too",
        ) from error


def load_model_file(
    path: str,
    custom_objects: dict[str, Any] | None = None,
    safe_mode: bool = False,
    *,
    compiled: bool = True,
) -> Any:
    """``keras.models.load_model``, also for classes whose constructor takes no ``name``.

    Keras passes ``name``, ``trainable`` and ``dtype`` to the constructor of a custom layer, and
    their like to that of a loss, a metric or an optimizer. A class that does not take them
    (``def __init__(self)``) trains in Keras, but Keras cannot load it. Here arguments that the
    constructor does not take are left out, unless the class has its own ``from_config``.
    """
    import keras

    objects = custom_objects or {}
    with making_models, lenient_constructors(objects):
        model = keras.models.load_model(
            path, custom_objects=objects, compile=compiled, safe_mode=safe_mode
        )
    if not compiled and compiles_itself(type(model)) and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            settings = json.loads(file.read("config.json")).get("compile_config")
        if settings:  # the constructor may have compiled it, with an optimizer
            with keras.saving.custom_object_scope(objects):
                compile_by_settings(model, settings, trains=False)
    return model


def compile_by_settings(
    model: keras.Model, settings: dict[str, Any], *, trains: bool = True
) -> None:
    """Compiles a loaded model whose class has a ``compile`` of its own, by saved settings.

    Args:
        model: Built.
        settings: What :func:`compile_settings` returned, as Keras serializes it.
        trains: False leaves the optimizer out.
    """
    import keras

    given = settings if trains else settings | {"optimizer": None}
    arguments = keras.saving.deserialize_keras_object(given, safe_mode=False)
    parameters = inspect.signature(model.compile).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        names = {p.name for p in parameters}
        arguments = {name: value for name, value in arguments.items() if name in names}
    model.compile(**arguments)
    if trains and model.built and model.optimizer is not None:
        model.optimizer.build(model.trainable_variables)


@contextlib.contextmanager
def lenient_constructors(objects: dict[str, Any]) -> Iterator[None]:
    """Within, classes of Keras' kinds among ``objects`` drop arguments that they do not take, and
    models with a ``compile`` of their own are compiled by what was saved, as all others are."""
    import keras

    kinds = (keras.Layer, keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer)

    def reviving(before: Any) -> Any:
        def from_config(cls: Any, config: dict[str, Any], custom_objects: object = None) -> Any:
            taken, told = inspect.signature(cls).parameters, config.get(TOLD)
            free = any(p.kind is p.VAR_KEYWORD for p in taken.values())
            if free and told is None:
                return before(cls, config)
            values = {n: revive(v, told is not None) for n, v in config.items() if n != TOLD}
            if not isinstance(told, list):
                return cls(**{n: value for n, value in values.items() if free or n in taken})
            made, bases = cls.__new__(cls), (keras.Sequential, keras.Model, keras.Layer)
            base = next(base for base in bases if issubclass(cls, base))  # not its own constructor
            base.__init__(made, **{n: value for n, value in values.items() if n not in told})
            for name in (name for name in told if name in values):
                setattr(made, name, values[name])
            return made

        return classmethod(from_config)

    def revive(value: object, told: bool) -> Any:
        saved = isinstance(value, dict) and "class_name" in value and "config" in value
        if saved or (told and isinstance(value, (dict, list))):
            return keras.saving.deserialize_keras_object(value, custom_objects=objects)
        return value

    classes = (c for c in objects.values() if isinstance(c, type) and issubclass(c, kinds))
    distiller = getattr(getattr(keras, "distillation", None), "Distiller", None)  # of Keras 3.12
    cls: Any
    with contextlib.ExitStack() as stack:
        for cls in filter(None, {id(cls): cls for cls in (*classes, distiller)}.values()):
            if compiles_itself(cls):
                cls.compile_from_config = compile_by_settings
                stack.callback(delattr, cls, "compile_from_config")
            if cls is not distiller and cls.from_config.__module__.startswith("keras."):
                cls.from_config = reviving(cls.from_config.__func__)
                stack.callback(delattr, cls, "from_config")
        yield


def restore_state(model: keras.Model, archive: ModelArchive) -> None:
    """Loads the archive's weights and optimizer state into an equal model (same ``key``)."""
    beside = archive.open_beside()
    if beside is None or not beside.whole:
        with _model_file(archive.content) as path:
            model.load_weights(path)
    if beside is not None:
        give_space(model, beside.space and decode_model(beside.space))
        beside.give_values(model, archive.values)


def model_bytes(model: keras.Model, *, told: bool = False) -> bytes:
    """A model as the bytes of a ``.keras`` file, which Keras itself loads unless it is ``told``.

    Raises:
        ModelError: Keras cannot save the model, or nobody could load the file.
    """
    try:
        return _save_bytes(model, {}, told=told)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"model {model.name!r} cannot be saved",
            expected="a model that Keras can save (get_config on custom layers)",
            received=_in_short(error),
        ) from error


def model_from_bytes(
    content: bytes,
    custom_objects: dict[str, Any] | None,
    *,
    safe_mode: bool,
    path: str,
    compiled: bool = True,
) -> Any:
    """The counterpart of :func:`model_bytes`; see ``keras.models.load_model``.

    Args:
        content: A ``.keras`` file, or an HDF5 file if ``path`` ends in ``.h5`` or ``.hdf5``.
        custom_objects: Name -> class or function that the model uses.
        safe_mode: False also loads what runs code from the file.
        compiled: False leaves compile settings and optimizer state out.

    Raises:
        ModelError: The file holds no Keras model that can be loaded so, or it is HDF5 and this
            Keras would run code from it in spite of ``safe_mode``.
    """
    hdf5 = os.fspath(path).endswith(HDF5)
    if hdf5 and safe_mode:
        _refuse_unsafe_hdf5(path)
    try:
        if not hdf5:
            content, _ = found_beside(content, f"{path}.tables")
        with _model_file(content, ".h5" if hdf5 else ".keras") as local:
            return load_model_file(local, custom_objects, safe_mode, compiled=compiled)
    except Exception as error:
        missing = _missing_object(error)
        raise ModelError(
            f"{path!r} cannot be loaded",
            expected="a .keras or .h5 file, and custom_objects for what does not come with Keras",
            received=f"a model with the {missing}, which custom_objects has not"
            if missing
            else _in_short(error),
            hint="pass custom_objects={'MyLayer': MyLayer} for classes of your own, and "
            "safe_mode=False for Lambda layers of a file that you trust",
        ) from error


def _refuse_unsafe_hdf5(path: str) -> None:
    """Refuses an HDF5 file where Keras ignores ``safe_mode`` for these (CVE-2025-9905)."""
    import keras

    version = tuple(int(part) for part in re.findall(r"\d+", keras.__version__)[:3])
    if version < _SAFE_HDF5:
        raise ModelError(
            f"{path!r} cannot be loaded safely: Keras {keras.__version__} runs the code that an "
            "HDF5 file holds, also in safe mode (CVE-2025-9905)",
            expected="Keras 3.11.3 or newer for .h5 files, or a .keras file",
            received=f"Keras {keras.__version__}",
            hint="safe_mode=False, where there is that argument, loads a file that you trust",
        )


def _missing_object(error: Exception) -> str | None:
    found = (re.search(pattern, str(error)) for pattern in _MISSING)
    missing = next((match for match in found if match), None)
    return None if missing is None else f"{missing[1]} {missing[2]!r}"


def _in_short(error: Exception) -> str:
    """Keras' error without the configuration of the model, which it may quote in full."""
    _, _, cause = re.sub("\x1b\\[[0-9]*m", "", str(error)).rpartition("Exception encountered: ")
    parts, dropped = re.split(r"\n\s*\n", cause), ("config=", "Arguments received")
    kept = [part for part in parts if not part.startswith(dropped)]
    text = f"{type(error).__name__}: " + " ".join(" ".join(kept).split())
    return text if len(text) <= 600 else f"{text[:600]}..."


def load_state(model: keras.Model, content: bytes, path: str) -> None:
    """Loads the weights and the optimizer state of a ``.keras`` file into a model.

    Args:
        model: The model that was saved, or an equal one.
        path: Where the bytes are from, for the message.

    Raises:
        ConfigError: The file is of another model.
    """
    if not model.optimizer.built:  # else Keras would leave its state out
        model.optimizer.build(model.trainable_variables)
    try:
        with _model_file(content) as local:
            model.load_weights(local)
    except ValueError as error:
        raise ConfigError(
            f"the checkpoint in {path!r} is of another model", expected="the model that wrote it",
            received=str(error).splitlines()[0],
        ) from error  # fmt: skip


def _save_bytes(model: keras.Model, objects: dict[str, Any], *, told: bool = True) -> bytes:
    """The model as Keras saves it; ``objects`` get what it cannot save, see ``told_arguments``."""
    from sparkdl.learner.archives.rebuilt import SharedLayers

    shared = SharedLayers(model)
    with _model_file() as path:
        with shared.numbered(objects, told), present_vocabularies(model):
            model.save(path)
        if shared:
            shared.mend_file(path, objects, _without_values)
        return Path(path).read_bytes()


@contextlib.contextmanager
def _model_file(content: payload.Bytes = b"", suffix: str = ".keras") -> Iterator[str]:
    """Within, a model's file, and this thread alone makes models.

    Keras keeps the names that a file leaves out under one key and looks for them under another.
    Unless they are put under the second key it makes a layer anew for each that it saves or loads.
    """
    from keras.src.backend.common import global_state
    from keras.src.saving import saving_lib

    with making_models, TemporaryFolder() as folder:
        known = vars(global_state.GLOBAL_STATE_TRACKER)
        for name, kind in ((f"saving_attr_skiplist_{kind}", kind) for kind in _KINDS):
            with contextlib.suppress(AttributeError, ValueError):  # a Keras without such a kind
                known[name] = known.get(name) or saving_lib.get_attr_skipset(kind)
        path = os.path.join(folder.path, f"model{suffix}")
        with open(path, "wb") as file:
            file.writelines(payload.parts_of(content))
        yield path
