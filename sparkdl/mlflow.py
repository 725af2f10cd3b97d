"""MLflow: ``sparkdl.mlflow.autolog()`` logs every fit of this process."""

from sparkdl.tracking.mlflow_sink import MLflow, autolog

__all__ = ["MLflow", "autolog"]
