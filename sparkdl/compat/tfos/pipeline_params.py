"""TensorFlowOnSpark's ``Namespace``, ``TFParams`` and its classes of one Param each."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.spark.ml.params import flag, text, whole
from sparkdl.spark.ml.stage import ParamSpec, Stage, has_params
from sparkdl.values import shown

SERVED = ("serving_default", "serve")


class Namespace(argparse.Namespace):
    """Arguments as attributes, made of a dict, of another namespace, or of a list (``argv``).

    >>> Namespace({'steps': 7}) == argparse.Namespace(steps=7)
    True
    >>> list(Namespace(['--steps', '7']))
    ['--steps', '7']

    Raises:
        ConfigError: It is made of something else.
    """

    def __init__(self, d: Any = None, **more: Any) -> None:
        if isinstance(d, list):
            super().__init__(argv=d, **more)
        elif d is None or isinstance(d, (Mapping, argparse.Namespace)):
            given = d if isinstance(d, Mapping) else vars(d) if d is not None else {}
            super().__init__(**{**given, **more})
        else:
            raise ConfigError(
                "a Namespace cannot be made of this",
                expected="a dict, a Namespace or a list of texts",
                received=shown(d),
            )

    def __iter__(self) -> Iterator[str]:
        given = vars(self)
        return iter(given["argv"] if set(given) == {"argv"} else given)


class TFTypeConverters:
    """TensorFlowOnSpark's converter of Params."""

    @staticmethod
    def toDict(value: Any) -> dict[Any, Any]:
        """A dict as it is.

        Raises:
            TypeError: It is none.
        """
        if not isinstance(value, dict):
            raise TypeError("a dict")
        return value


def _mapping(value: Any) -> dict[str, str]:
    """Names to names."""
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) for pair in value.items() for name in pair
    ):
        raise TypeError("a dict of names to names")
    return dict(value)


class _Mixed(Stage):
    """A class with the Params of all of its bases."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        every = {s.name: s for base in cls.__mro__[::-1] for s in vars(base).get("SPECS", ())}
        cls.SPECS = tuple(every.values())


class TFParams(_Mixed):
    """Arguments of a function beside Params, for classes of the user's own."""

    args: Any = None

    def merge_args_params(self) -> Namespace:
        """The arguments; over them the Params that were set, beside them the other Params."""
        given = {} if self.args is None or isinstance(self.args, list) else self.args
        merged = dict(given if isinstance(given, Mapping) else vars(given))
        for param in self.params:
            known = self.isSet(param) or param.name not in merged
            if known and self.isDefined(param):
                merged[param.name] = self.getOrDefault(param)
        return Namespace(merged)


@has_params(ParamSpec("batch_size", "rows per batch", partial(whole, 1), 100, title="BatchSize"))
class HasBatchSize(_Mixed):
    """``batch_size``, with ``setBatchSize`` and ``getBatchSize``; the others likewise."""


@has_params(ParamSpec("cluster_size", "nodes of all roles", partial(whole, 1), 1, False,
                      "ClusterSize"))  # fmt: skip
class HasClusterSize(_Mixed):
    """``cluster_size``."""


@has_params(ParamSpec("num_ps", "parameter servers among them", partial(whole, 0), 0, False,
                      "NumPS"))  # fmt: skip
class HasNumPS(_Mixed):
    """``num_ps``."""


@has_params(ParamSpec("driver_ps_nodes", "servers on the driver", flag, False, False,
                      "DriverPSNodes"))  # fmt: skip
class HasDriverPSNodes(_Mixed):
    """``driver_ps_nodes``."""


@has_params(ParamSpec("epochs", "times that the rows are given", partial(whole, 1), 1, False,
                      "Epochs"))  # fmt: skip
class HasEpochs(_Mixed):
    """``epochs``."""


@has_params(ParamSpec("grace_secs", "without a meaning here", partial(whole, 0), 30, False,
                      "GraceSecs"))  # fmt: skip
class HasGraceSecs(_Mixed):
    """``grace_secs``."""


@has_params(ParamSpec("input_mapping", "column -> tensor", _mapping, {}, title="InputMapping"))
class HasInputMapping(_Mixed):
    """``input_mapping``."""


@has_params(ParamSpec("output_mapping", "tensor -> column", _mapping, {}, title="OutputMapping"))
class HasOutputMapping(_Mixed):
    """``output_mapping``."""


@has_params(ParamSpec("input_mode", "InputMode.SPARK", partial(whole, 0), 1, False, "InputMode"))
class HasInputMode(_Mixed):
    """``input_mode``."""


@has_params(ParamSpec("master_node", "'chief'; None: all are workers", text, "chief", True,
                      "MasterNode"))  # fmt: skip
class HasMasterNode(_Mixed):
    """``master_node``."""


@has_params(ParamSpec("model_dir", "the folder of checkpoints", text, None, True, "ModelDir"))
class HasModelDir(_Mixed):
    """``model_dir``."""


@has_params(ParamSpec("export_dir", "the folder of the SavedModel", text, None, True, "ExportDir"))
class HasExportDir(_Mixed):
    """``export_dir``."""


@has_params(ParamSpec("protocol", "for the function", text, "grpc", False, "Protocol"))
class HasProtocol(_Mixed):
    """``protocol``."""


@has_params(ParamSpec("readers", "for the function", partial(whole, 1), 1, False, "Readers"))
class HasReaders(_Mixed):
    """``readers``."""


@has_params(ParamSpec("steps", "for the function", partial(whole, 1), 1000, False, "Steps"))
class HasSteps(_Mixed):
    """``steps``."""


@has_params(ParamSpec("tensorboard", "on the chief, while it trains", flag, False, False,
                      "Tensorboard"))  # fmt: skip
class HasTensorboard(_Mixed):
    """``tensorboard``."""


@has_params(ParamSpec("tfrecord_dir", "for the function", text, None, True, "TFRecordDir"))
class HasTFRecordDir(_Mixed):
    """``tfrecord_dir``."""


@has_params(ParamSpec("signature_def_key", "of the SavedModel", text, SERVED[0], False,
                      "SignatureDefKey"))  # fmt: skip
class HasSignatureDefKey(_Mixed):
    """``signature_def_key``."""


@has_params(ParamSpec("tag_set", "of the SavedModel", text, "serve", False, "TagSet"))
class HasTagSet(_Mixed):
    """``tag_set``."""
