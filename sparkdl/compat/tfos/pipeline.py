"""``TFEstimator`` and ``TFModel``: a function that trains, as a stage of a pipeline of Spark ML."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from typing import Any

from pyspark.ml.base import Estimator, Model

from sparkdl.compat.tfos import TFCluster
from sparkdl.compat.tfos.nodes import MapFunction
from sparkdl.errors import ConfigError
from sparkdl.spark.columns.sources import require_frame
from sparkdl.spark.ml.params import flag, text, whole
from sparkdl.spark.ml.stage import ParamSpec, Stage, has_params
from sparkdl.spark.predict import predict

_SERVED = ("serving_default", "serve")


def _mapping(value: Any) -> dict[str, str]:
    """Names to names."""
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) for pair in value.items() for name in pair
    ):
        raise TypeError("a dict of names to names")
    return dict(value)


_SHARED = (
    ParamSpec("input_mapping", "column -> tensor", _mapping, {}, title="InputMapping"),
    ParamSpec("batch_size", "rows per batch", partial(whole, 1), 100, title="BatchSize"),
    ParamSpec("model_dir", "the folder of checkpoints", text, None, True, "ModelDir"),
    ParamSpec("export_dir", "the folder of the SavedModel", text, None, True, "ExportDir"),
)


@has_params(
    *_SHARED,
    ParamSpec("cluster_size", "nodes of all roles", partial(whole, 1), 1, False, "ClusterSize"),
    ParamSpec("num_ps", "parameter servers among them", partial(whole, 0), 0, False, "NumPS"),
    ParamSpec("driver_ps_nodes", "servers on the driver", flag, False, False, "DriverPSNodes"),
    ParamSpec("epochs", "times that the rows are given", partial(whole, 1), 1, False, "Epochs"),
    ParamSpec("grace_secs", "without a meaning here", partial(whole, 0), 30, False, "GraceSecs"),
    ParamSpec("input_mode", "InputMode.SPARK", partial(whole, 0), 1, False, "InputMode"),
    ParamSpec("master_node", "'chief'; None: all are workers", text, "chief", True, "MasterNode"),
    ParamSpec("protocol", "for the function", text, "grpc", False, "Protocol"),
    ParamSpec("readers", "for the function", partial(whole, 1), 1, False, "Readers"),
    ParamSpec("steps", "for the function", partial(whole, 1), 1000, False, "Steps"),
    ParamSpec("tensorboard", "on the chief, while it trains", flag, False, False, "Tensorboard"),
    ParamSpec("tfrecord_dir", "for the function", text, None, True, "TFRecordDir"),
)  # fmt: skip
class _TrainingParams(Stage):
    """The Params of training."""


@has_params(
    *_SHARED,
    ParamSpec("output_mapping", "tensor -> column", _mapping, {}, False, "OutputMapping"),
    ParamSpec("signature_def_key", "of the SavedModel", text, _SERVED[0], False, "SignatureDefKey"),
    ParamSpec("tag_set", "of the SavedModel", text, "serve", False, "TagSet"),
)
class _ScoringParams(Stage):
    """The Params of scoring."""


class TFEstimator(_TrainingParams, Estimator[Any]):
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

    def merge_args_params(self) -> Namespace:
        """The arguments; over them the Params that were set, beside them the other Params."""
        return _merged(self.args, self)

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


class TFModel(_ScoringParams, Model):
    """Scores a DataFrame with a SavedModel; :class:`TFEstimator` makes it.

    ``transform`` gives the output columns alone, as TensorFlowOnSpark does; outputs of one number
    are numbers, others arrays.

    Args:
        tf_args: May have ``export_dir``, as the Param.
    """

    def __init__(self, tf_args: Any = None) -> None:
        super().__init__()
        self.args = tf_args

    def merge_args_params(self) -> Namespace:
        """The arguments; over them the Params that were set, beside them the other Params."""
        return _merged(self.args, self)

    def _transform(self, dataset: Any) -> Any:
        require_frame(f"{type(self).__name__}.transform", dataset)
        merged = self.merge_args_params()
        path = merged.export_dir or merged.model_dir
        outputs = merged.output_mapping
        served = merged.tag_set == "serve" and merged.signature_def_key in _SERVED
        if not path or not merged.input_mapping or not outputs or not served:
            raise ConfigError(
                "a TFModel does not know what to score with",
                expected="setExportDir (the folder of a SavedModel), setInputMapping (column -> "
                f"tensor), setOutputMapping (tensor -> column), tag_set 'serve', one of {_SERVED}",
                received=f"export_dir {path!r}, input_mapping {merged.input_mapping}, "
                f"output_mapping {outputs}, tag_set {merged.tag_set!r}, "
                f"signature_def_key {merged.signature_def_key!r}",
            )
        inputs = {tensor: column for column, tensor in merged.input_mapping.items()}
        scored = predict(path, dataset, merged.batch_size, inputs, outputs=outputs)
        return scored.select([outputs[tensor] for tensor in sorted(outputs)])


def _merged(args: Any, stage: Stage) -> Namespace:
    """A stage's Params and the arguments that it was made with; see ``merge_args_params``."""
    given = {} if args is None or isinstance(args, list) else args
    merged = dict(given if isinstance(given, Mapping) else vars(given))
    for param in stage.params:
        known = stage.isSet(param) or param.name not in merged
        if known and stage.isDefined(param):
            merged[param.name] = stage.getOrDefault(param)
    return Namespace(**merged)
