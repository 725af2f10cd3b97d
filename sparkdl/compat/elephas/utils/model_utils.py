"""The kind of prediction that a loss stands for."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar

from sparkdl.learner.description import name_of_loss

_REGRESSION = (
    "mean_squared_error", "mean_absolute_error", "mse", "mae", "cosine_proximity",
    "cosine_similarity", "mean_absolute_percentage_error", "mape", "log_cosh", "logcosh", "huber",
    "mean_squared_logarithmic_error", "msle", "poisson",
)  # fmt: skip
_CLASSIFICATION = (
    "binary_crossentropy", "categorical_crossentropy", "sparse_categorical_crossentropy",
)  # fmt: skip


class ModelType(Enum):
    """The kind of a model's predictions."""

    CLASSIFICATION = 1
    REGRESSION = 2


class LossModelTypeMapper:
    """The names of losses and what models with them predict; one list for the whole process."""

    _types: ClassVar[dict[str, ModelType]] = {
        **dict.fromkeys(_REGRESSION, ModelType.REGRESSION),
        **dict.fromkeys(_CLASSIFICATION, ModelType.CLASSIFICATION),
    }

    def get_model_type(self, loss: Any) -> ModelType | None:
        """The kind of prediction of a model with this loss; None for a loss that is not in the
        list.
        """
        return self._types.get(name_of_loss(loss))

    def register_loss(self, loss: str | Callable[..., Any], model_type: ModelType) -> None:
        """Adds a loss to the list."""
        self._types[name_of_loss(loss)] = model_type
