"""Databricks' module path of ``LogCallback``."""

from sparkdl.learner.distributed_callbacks import LogCallback

__all__ = ["LogCallback"]
