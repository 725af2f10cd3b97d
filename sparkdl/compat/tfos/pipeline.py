"""``TFEstimator`` and ``TFModel``: a function that trains, as a stage of a pipeline of Spark ML."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.ml.base import Estimator, Model

from sparkdl.compat.tfos import TFCluster
from sparkdl.compat.tfos.nodes import MapFunction
from sparkdl.errors import ConfigError
from sparkdl.settings.values import FLAG, shown, whole
from sparkdl.spark.ml.stage import ParamSpec, Stage, has_params, taking, text
from sparkdl.spark.predict import predict
from sparkdl.spark.session.frames import require_frame

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


@has_params(ParamSpec("batch_size", "rows per batch", taking(whole(1)), 100, title="BatchSize"))
class HasBatchSize(_Mixed):
    """``batch_size``, with ``setBatchSize`` and ``getBatchSize``; the others likewise."""


@has_params(ParamSpec("cluster_size", "nodes of all roles", taking(whole(1)), 1, False,
                      "ClusterSize"))  # fmt: skip
class HasClusterSize(_Mixed):
    """``cluster_size``."""


@has_params(ParamSpec("num_ps", "parameter servers among them", taking(whole(0)), 0, False,
                      "NumPS"))  # fmt: skip
class HasNumPS(_Mixed):
    """``num_ps``."""


@has_params(ParamSpec("driver_ps_nodes", "servers on the driver", taking(FLAG), False, False,
                      "DriverPSNodes"))  # fmt: skip
class HasDriverPSNodes(_Mixed):
    """``driver_ps_nodes``."""


@has_params(ParamSpec("epochs", "times that the rows are given", taking(whole(1)), 1, False,
                      "Epochs"))  # fmt: skip
class HasEpochs(_Mixed):
    """``epochs``."""


@has_params(ParamSpec("grace_secs", "without a meaning here", taking(whole(0)), 30, False,
                      "GraceSecs"))  # fmt: skip
class HasGraceSecs(_Mixed):
    """``grace_secs``."""


@has_params(ParamSpec("input_mapping", "column -> tensor", _mapping, {}, title="InputMapping"))
class HasInputMapping(_Mixed):
    """``input_mapping``."""


@has_params(ParamSpec("output_mapping", "tensor -> column", _mapping, {}, title="OutputMapping"))
class HasOutputMapping(_Mixed):
    """``output_mapping``."""


@has_params(ParamSpec("input_mode", "InputMode.SPARK", taking(whole(0)), 1, False, "InputMode"))
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


@has_params(ParamSpec("readers", "for the function", taking(whole(1)), 1, False, "Readers"))
class HasReaders(_Mixed):
    """``readers``."""


@has_params(ParamSpec("steps", "for the function", taking(whole(1)), 1000, False, "Steps"))
class HasSteps(_Mixed):
    """``steps``."""


@has_params(ParamSpec("tensorboard", "on the chief, while it trains", taking(FLAG), False, False,
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


__all__ = [
    "HasBatchSize", "HasClusterSize", "HasDriverPSNodes", "HasEpochs", "HasExportDir",
    "HasGraceSecs", "HasInputMapping", "HasInputMode", "HasMasterNode", "HasModelDir", "HasNumPS",
    "HasOutputMapping", "HasProtocol", "HasReaders", "HasSignatureDefKey", "HasSteps",
    "HasTFRecordDir", "HasTagSet", "HasTensorboard", "Namespace", "TFEstimator", "TFModel",
    "TFParams", "TFTypeConverters",
]  # fmt: skip


class TFEstimator(
    TFParams, HasInputMapping, HasClusterSize, HasNumPS, HasDriverPSNodes, HasInputMode,
    HasMasterNode, HasProtocol, HasGraceSecs, HasTensorboard, HasModelDir, HasExportDir,
    HasTFRecordDir, HasBatchSize, HasEpochs, HasReaders, HasSteps, Estimator[Any],
):  # fmt: skip
    """Trains by a function on the nodes of a cluster that is fed columns of a DataFrame.

    ::

        estimator = TFEstimator(train_fn, args).setInputMapping({'image': 'x', 'label': 'y'})
        model = estimator.setClusterSize(4).setExportDir('/models/mnist').fit(df)

    Args:
        train_fn: Called as ``train_fn(args, ctx)`` on each node. ``args`` has the arguments in
            ``tf_args`` and every Param by its name; its rows are the mapped columns in their
            alphabetical order (``ctx.get_data_feed(input_mapping=args.input_mapping)``). It exports
            the model.
        tf_args: An ``argparse.Namespace`` or a dict; a list goes to the function as it is, and
            becomes ``sys.argv``.
    """

    def __init__(self, train_fn: MapFunction, tf_args: Any = None) -> None:
        super().__init__()
        self.train_fn, self.args = train_fn, tf_args

    def _fit(self, dataset: Any) -> TFModel:
        require_frame(f"{type(self).__name__}.fit", dataset)
        columns = sorted(self.getOrDefault("input_mapping"))
        missing = [name for name in columns if name not in dataset.columns]
        if not columns or missing or self.getOrDefault("input_mode") != TFCluster.InputMode.SPARK:
            raise ConfigError(
                "a TFEstimator feeds columns of the DataFrame to its function",
                expected=f"setInputMapping of columns among {dataset.columns}, InputMode.SPARK",
                received=f"no columns {missing}"
                if missing
                else f"input_mapping of {columns}, input_mode {self.getOrDefault('input_mode')}",
                hint="TFCluster.run with InputMode.TENSORFLOW is for functions that read files",
            )
        merged = self.merge_args_params()
        cluster = TFCluster.run(
            dataset.sparkSession.sparkContext, self.train_fn,
            self.args if isinstance(self.args, list) else merged,
            merged.cluster_size, merged.num_ps, merged.tensorboard, TFCluster.InputMode.SPARK,
            driver_ps_nodes=merged.driver_ps_nodes, master_node=merged.master_node,
        )  # fmt: skip
        cluster.train(dataset.select(columns).rdd, merged.epochs)
        cluster.shutdown(grace_secs=merged.grace_secs)
        trained = TFModel(self.args)
        self._copyValues(trained)
        return trained


class TFModel(
    TFParams, HasInputMapping, HasOutputMapping, HasBatchSize, HasModelDir, HasExportDir,
    HasSignatureDefKey, HasTagSet, Model,
):  # fmt: skip
    """Scores a DataFrame with a SavedModel; :class:`TFEstimator` makes it.

    ``transform`` gives the output columns alone, as TensorFlowOnSpark does; outputs of one number
    are numbers, others arrays.

    Args:
        tf_args: May have ``export_dir``, as the Param.
    """

    def __init__(self, tf_args: Any = None) -> None:
        super().__init__()
        self.args = tf_args

    def _transform(self, dataset: Any) -> Any:
        require_frame(f"{type(self).__name__}.transform", dataset)
        merged = self.merge_args_params()
        path = merged.export_dir or merged.model_dir
        outputs = merged.output_mapping
        served = merged.tag_set == "serve" and merged.signature_def_key in SERVED
        if not path or not merged.input_mapping or not outputs or not served:
            raise ConfigError(
                "a TFModel does not know what to score with",
                expected="setExportDir (the folder of a SavedModel), setInputMapping (column -> "
                f"tensor), setOutputMapping (tensor -> column), tag_set 'serve', one of {SERVED}",
                received=f"export_dir {path!r}, input_mapping {merged.input_mapping}, "
                f"output_mapping {outputs}, tag_set {merged.tag_set!r}, "
                f"signature_def_key {merged.signature_def_key!r}",
            )
        inputs = {tensor: column for column, tensor in merged.input_mapping.items()}
        scored = predict(path, dataset, merged.batch_size, inputs, outputs=outputs)
        return scored.select([outputs[tensor] for tensor in sorted(outputs)])
