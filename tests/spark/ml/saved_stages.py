"""Stages in every kind of saved model, written by one process and read by another."""

from __future__ import annotations

from typing import Any

from stage_tables import quick, weights_digest

LARGE_UNITS = 3250


def large(seed: int) -> Any:
    """A transformer whose model has 40 MiB, so that its file is longer than one of 32 MiB."""
    import keras

    from sparkdl.ml import KerasTransformer

    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(units) for units in (LARGE_UNITS, LARGE_UNITS, 2)]
    return KerasTransformer(model=keras.Sequential([keras.Input((4,)), *layers]))


def holders(fitted: Any, seed: int) -> dict[str, Any]:
    """By name what holds a fitted stage: pipelines, and what validators return."""
    from pyspark.ml import PipelineModel
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.tuning import (
        CrossValidator,
        CrossValidatorModel,
        TrainValidationSplit,
        TrainValidationSplitModel,
    )

    said = {
        "estimator": quick(), "estimatorParamMaps": [{}],
        "evaluator": MulticlassClassificationEvaluator(metricName="accuracy"),
    }  # fmt: skip
    inside = PipelineModel([fitted])
    folds = [[inside.copy()], [inside.copy()]]
    crossed = CrossValidatorModel(inside, [0.5], folds, [0.1])
    split = TrainValidationSplitModel(fitted, [0.25], [inside.copy()])
    return {
        "pipeline": inside,
        "nested": PipelineModel([PipelineModel([PipelineModel([fitted])])]),
        "crossed": CrossValidator(numFolds=2, **said)._copyValues(crossed),
        "split": TrainValidationSplit(**said)._copyValues(split),
        "large": PipelineModel([large(seed)]),
    }


def write_all(fitted: Any, folder: str, seed: int) -> dict[str, str]:
    """Saves all of :func:`holders` in a folder, and again over it; their weights' digests."""
    told = {}
    for name, holder in holders(fitted, seed).items():
        holder.write().overwrite().save(f"{folder}/{name}")
        if name != "large":
            holder.write().overwrite().save(f"{folder}/{name}")
        told[name] = weights_digest(large(seed) if name == "large" else fitted)
    return told


def read_all(folder: str) -> dict[str, str]:
    """Loads what :func:`write_all` saved; the digests of the weights."""
    from pyspark.ml import PipelineModel
    from pyspark.ml.tuning import CrossValidatorModel, TrainValidationSplitModel

    crossed = CrossValidatorModel.load(f"{folder}/crossed")
    assert crossed.avgMetrics == [0.5]
    split = TrainValidationSplitModel.load(f"{folder}/split")
    assert split.validationMetrics == [0.25]
    nested = PipelineModel.load(f"{folder}/nested").stages[0].stages[0]
    found = {
        "pipeline": PipelineModel.load(f"{folder}/pipeline").stages[0],
        "nested": nested.stages[0],
        "crossed": crossed.bestModel.stages[0],
        "split": split.bestModel,
        "large": PipelineModel.load(f"{folder}/large").stages[0],
    }
    inner = crossed.subModels[1][0].stages[0], split.subModels[0].stages[0]
    assert {weights_digest(stage) for stage in inner} == {weights_digest(found["split"])}
    return {name: weights_digest(stage) for name, stage in found.items()}
