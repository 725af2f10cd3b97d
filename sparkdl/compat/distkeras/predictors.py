"""dist-keras' predictors."""

from __future__ import annotations

from typing import Any

import sparkdl
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.spark.images.deep_image import as_vector


class Predictor:
    """Holds a Keras model."""

    @lists_its_arguments
    def __init__(self, keras_model: Any) -> None:
        self.model = keras_model

    def predict(self, dataframe: Any) -> Any:
        """The DataFrame with a column of predictions."""
        raise NotImplementedError


class ModelPredictor(Predictor):
    """Adds a column of vectors: a model's output for each row.

    Args:
        keras_model: A built Keras model.
        features_col: Column of the features; a list: several numeric columns.
        output_col: The new column.
    """

    @lists_its_arguments
    def __init__(
        self, keras_model: Any, features_col: Any = "features", output_col: str = "prediction"
    ) -> None:
        super().__init__(keras_model)
        self.features_column, self.output_column = features_col, output_col

    def predict(self, dataframe: Any) -> Any:
        scored = sparkdl.predict(
            self.model, dataframe, batch_size=256, features=self.features_column,
            output_column=self.output_column,
        )  # fmt: skip
        return as_vector(scored, self.output_column)
