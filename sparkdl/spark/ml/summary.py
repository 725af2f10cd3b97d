"""``TrainingSummary``: how the training of a stage's model went."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sparkdl.errors import ResourceError


@dataclass(frozen=True)
class TrainingSummary:
    """How a fit went; a model keeps it when it is saved.

    Args:
        history: Metric -> its value after each epoch, over the rows of all workers.
        rows: Rows trained per epoch.
        seconds: From the first step to the last, on the slowest worker.
        num_workers: Workers that trained.
        transports: How workers reached the server or each other.
    """

    history: dict[str, list[Any]]
    rows: int
    seconds: float
    num_workers: int
    transports: tuple[str, ...]

    @property
    def totalIterations(self) -> int:
        """Epochs trained."""
        return len(self.history.get("loss", ()))

    @property
    def objectiveHistory(self) -> list[float]:
        """The loss after each epoch."""
        return list(self.history.get("loss", ()))

    def plot(self) -> Any:
        """Draws each metric over the epochs, beside it the same metric of the validation rows.

        Returns:
            A Matplotlib figure, which notebooks show.

        Raises:
            ResourceError: Matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ResourceError(
                "a plot needs Matplotlib",
                expected="matplotlib on the driver",
                received=str(error),
                hint="pip install matplotlib",
            ) from error
        names = [name for name in self.history if not name.startswith("val_")]
        names = [n for n in names if all(isinstance(v, (int, float)) for v in self.history[n])]

        class ShownFigure(Figure):
            """Notebooks show it, also before pyplot has chosen a backend."""

            def _repr_png_(self) -> bytes:
                picture = io.BytesIO()
                self.savefig(picture, format="png", dpi=100)
                return picture.getvalue()

        figure = ShownFigure(figsize=(4 * max(len(names), 1), 3), layout="constrained")
        for axes, name in zip(figure.subplots(1, max(len(names), 1), squeeze=False)[0], names,
                              strict=False):  # fmt: skip
            for key, label in ((name, "training"), (f"val_{name}", "validation")):
                values = self.history.get(key)
                if values:
                    axes.plot(range(1, len(values) + 1), values, marker=".", label=label)
            axes.set_xlabel("epoch")
            axes.set_title(name)
            axes.legend()
        return figure

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "transports": list(self.transports)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> TrainingSummary:
        """The counterpart of :meth:`to_json`."""
        return cls(**{**saved, "transports": tuple(saved["transports"])})
