"""Databricks' module path of ``LogCallback``."""

from sparkdl.learner.distributed.callbacks import LogCallback

__all__ = ["LogCallback"]
