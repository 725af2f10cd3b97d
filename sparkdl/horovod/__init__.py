"""Databricks' module path of what it has for Horovod: ``sparkdl.horovod.log_to_driver``.

``runner_base``, ``tensorflow``: further modules that it has.
"""

from sparkdl.process.log_lines import log_to_driver

__all__ = ["log_to_driver"]
