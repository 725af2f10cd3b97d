"""dist-keras' evaluators."""

from __future__ import annotations

from typing import Any

from pyspark.sql import functions as F

from sparkdl.compat.distkeras.transformers import check_columns, column
from sparkdl.errors import DataError
from sparkdl.settings.call_arguments import lists_its_arguments


class Evaluator:
    """Compares a column of labels with one of predictions."""

    @lists_its_arguments
    def __init__(self, label_col: str = "label", prediction_col: str = "prediction") -> None:
        self.label_column, self.prediction_column = label_col, prediction_col

    def evaluate(self, dataframe: Any) -> float:
        """How good the predictions are."""
        raise NotImplementedError


class AccuracyEvaluator(Evaluator):
    """The share of the rows whose prediction is the label, both numbers."""

    def evaluate(self, dataframe: Any) -> float:
        """The accuracy, from 0 to 1; a null is no right prediction.

        Raises:
            DataError: There are no rows.
        """
        check_columns(self, dataframe, "label_col", self.label_column)
        check_columns(self, dataframe, "prediction_col", self.prediction_column)
        right = F.coalesce(
            column(self.label_column) == column(self.prediction_column), F.lit(False)
        )
        share = dataframe.agg(F.avg(right.cast("double"))).first()[0]
        if share is None:
            raise DataError(
                "there are no rows to evaluate", expected="at least one row", received="none"
            )
        return float(share)
