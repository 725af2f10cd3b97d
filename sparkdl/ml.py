"""Keras models in ``pyspark.ml`` pipelines: estimators to train, models and transformers to score.

::

    from pyspark.ml import Pipeline
    from sparkdl.ml import KerasClassifier

    model = Pipeline(stages=[assembler, KerasClassifier(model=model, epochs=5)]).fit(df)
    model.write().overwrite().save('models/churn')

| estimator | what it fits | model |
|---|---|---|
| ``KerasClassifier`` | one class per row: prediction, probability, rawPrediction | \
``KerasClassificationModel`` |
| ``KerasRegressor`` | one number per row | ``KerasRegressionModel`` |
| ``KerasEstimator`` | any inputs and outputs, as arrays | ``KerasModel`` |

``KerasTransformer`` scores with a model that was trained elsewhere. ``trusted`` loads stages with
code in their files.
"""

from sparkdl.spark.ml.estimator import (
    KerasClassificationModel,
    KerasClassifier,
    KerasEstimator,
    KerasModel,
    KerasRegressionModel,
    KerasRegressor,
    KerasTransformer,
)
from sparkdl.spark.ml.files import trusted
from sparkdl.spark.ml.trained import TrainingSummary

__all__ = [
    "KerasClassificationModel",
    "KerasClassifier",
    "KerasEstimator",
    "KerasModel",
    "KerasRegressionModel",
    "KerasRegressor",
    "KerasTransformer",
    "TrainingSummary",
    "trusted",
]
