"""``ColumnsStage``: which columns a stage reads, and where its model runs forward."""

from __future__ import annotations

from typing import Any, TypeVar

from sparkdl.spark.ml.params import FEATURE_PARAMS, SCORING_PARAMS
from sparkdl.spark.ml.stage import Stage, has_params

C = TypeVar("C", bound="ColumnsStage")


@has_params(*FEATURE_PARAMS, *SCORING_PARAMS)
class ColumnsStage(Stage):
    """A stage with a column of features, or several, or columns for each input of the model."""

    def setFeaturesCol(self: C, value: Any) -> C:
        """Sets :py:attr:`featuresCol`, or with a list or dict :py:attr:`featuresCols`."""
        if isinstance(value, str) or value is None:
            return self._set(featuresCol=value, featuresCols=None)
        return self._set(featuresCols=value)

    @property
    def features(self) -> Any:
        """What the model reads: a column, several, or input name -> either."""
        several = self.getOrDefault("featuresCols")
        return self.getOrDefault("featuresCol") if several is None else several
