"""A warning where several Python workers would load a model onto one GPU."""

from __future__ import annotations

import contextlib
from typing import Any

from sparkdl.config import UseGpu
from sparkdl.user_warnings import warn_user

AMOUNT = "spark.task.resource.gpu.amount"


def warn_of_shared_gpus(spark: Any, use_gpu: UseGpu) -> None:
    """Warns where Spark runs several tasks on one GPU: each has a model of its own there.

    Args:
        spark: The session, classic or of Spark Connect; None where there is none yet.
        use_gpu: See :class:`sparkdl.SparkModel`.
    """
    if use_gpu is False or spark is None:
        return
    amount = str(spark.conf.get(AMOUNT, ""))
    with contextlib.suppress(ValueError):
        tasks = int(1 / float(amount)) if 0 < float(amount) < 1 else 1
        if tasks > 1:
            warn_user(
                f"{tasks} workers share each GPU ({AMOUNT}={amount}), and each loads a model of "
                "its own into its memory"
            )
