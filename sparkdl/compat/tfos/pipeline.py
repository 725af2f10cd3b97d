"""``TFEstimator`` and ``TFModel``: a function that trains, as a stage of a pipeline of Spark ML."""

from __future__ import annotations

from typing import Any

from pyspark.ml.base import Estimator, Model

from sparkdl.compat.tfos import TFCluster
from sparkdl.compat.tfos.nodes import MapFunction
from sparkdl.compat.tfos.pipeline_params import (
    SERVED,
    HasBatchSize,
    HasClusterSize,
    HasDriverPSNodes,
    HasEpochs,
    HasExportDir,
    HasGraceSecs,
    HasInputMapping,
    HasInputMode,
    HasMasterNode,
    HasModelDir,
    HasNumPS,
    HasOutputMapping,
    HasProtocol,
    HasReaders,
    HasSignatureDefKey,
    HasSteps,
    HasTagSet,
    HasTensorboard,
    HasTFRecordDir,
    Namespace,
    TFParams,
    TFTypeConverters,
)
from sparkdl.errors import ConfigError
from sparkdl.spark.predict import predict
from sparkdl.spark.session.frames import require_frame

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
