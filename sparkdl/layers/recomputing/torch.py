"""By ``torch.utils.checkpoint``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

Function = Callable[..., tuple[list[Any], list[Any]]]


def recompute(function: Function, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The results of ``function``; PyTorch computes it again for the gradients."""
    # Stopped early, it would end with an exception inside of Keras' calls of layers.
    with set_checkpoint_early_stop(False):
        results: tuple[list[Any], list[Any]] = checkpoint(function, *values, use_reentrant=False)
    return results
