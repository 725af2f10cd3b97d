"""``TFEstimator`` and ``TFModel``: a function that trains, as a stage of a pipeline of Spark ML."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
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

    def __init__(self, d: object = None, **more: object) -> None:
        if isinstance(d, list):
            super().__init__(argv=d, **more)
        elif d is None or isinstance(d, (Mapping, argparse.Namespace)):
            given = d if isinstance(d, Mapping) else vars(d) if d is not None else {}
            super().__init__(**{**given, **more})
        else:
            raise ConfigError(
                "a Namespace cannot be made of this",
                expected="a dict, a Namespace or a list of texts", received=shown(d),
            )  # fmt: skip

    def __iter__(self) -> Iterator[str]:
        given = vars(self)
        return iter(given["argv"] if set(given) == {"argv"} else given)


class TFTypeConverters:
    """TensorFlowOnSpark's converter of Params."""

    @staticmethod
    def toDict(value: object) -> dict[Any, Any]:
        """A dict as it is.

        Raises:
            TypeError: It is none.
        """
        if not isinstance(value, dict):
            raise TypeError("a dict")
        return value


def _mapping(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) for pair in value.items() for name in pair
    ):
        raise TypeError("a dict of names to names")
    return dict(value)


class _Mixed(Stage):
    """A class with the Params of all of its bases."""

    def __init_subclass__(cls, **options: object) -> None:
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


def _has(
    name: str, title: str, doc: str, convert: Callable[[Any], Any], default: object,
    optional: bool = False,
) -> Any:  # fmt: skip
    spec = ParamSpec(name, doc, convert, default, optional, title)
    return has_params(spec)(type(f"Has{title}", (_Mixed,), {"__doc__": f"``{name}``: {doc}."}))


HasBatchSize: Any = _has("batch_size", "BatchSize", "rows per batch", taking(whole(1)), 100)
HasClusterSize: Any = _has("cluster_size", "ClusterSize", "nodes of all roles", taking(whole(1)), 1)
HasNumPS: Any = _has("num_ps", "NumPS", "parameter servers among them", taking(whole(0)), 0)
HasDriverPSNodes: Any = _has(
    "driver_ps_nodes", "DriverPSNodes", "servers on the driver", taking(FLAG), False
)
HasEpochs: Any = _has("epochs", "Epochs", "times that the rows are given", taking(whole(1)), 1)
HasGraceSecs: Any = _has("grace_secs", "GraceSecs", "without a meaning here", taking(whole(0)), 30)
HasInputMapping: Any = _has("input_mapping", "InputMapping", "column -> tensor", _mapping, {})
HasOutputMapping: Any = _has("output_mapping", "OutputMapping", "tensor -> column", _mapping, {})
HasInputMode: Any = _has("input_mode", "InputMode", "InputMode.SPARK", taking(whole(0)), 1)
HasMasterNode: Any = _has(
    "master_node", "MasterNode", "'chief'; None: all are workers", text, "chief", True
)
HasModelDir: Any = _has("model_dir", "ModelDir", "the folder of checkpoints", text, None, True)
HasExportDir: Any = _has(
    "export_dir", "ExportDir", "the folder of the SavedModel", text, None, True
)
HasProtocol: Any = _has("protocol", "Protocol", "for the function", text, "grpc")
HasReaders: Any = _has("readers", "Readers", "for the function", taking(whole(1)), 1)
HasSteps: Any = _has("steps", "Steps", "for the function", taking(whole(1)), 1000)
HasTensorboard: Any = _has(
    "tensorboard", "Tensorboard", "on the chief, while it trains", taking(FLAG), False
)
HasTFRecordDir: Any = _has("tfrecord_dir", "TFRecordDir", "for the function", text, None, True)
HasSignatureDefKey: Any = _has(
    "signature_def_key", "SignatureDefKey", "of the SavedModel", text, SERVED[0]
)
HasTagSet: Any = _has("tag_set", "TagSet", "of the SavedModel", text, "serve")

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

    def __init__(self, train_fn: MapFunction, tf_args: object = None) -> None:
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

    def __init__(self, tf_args: object = None) -> None:
        super().__init__()
        self.args = tf_args

    def _transform(self, dataset: object) -> Any:
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
