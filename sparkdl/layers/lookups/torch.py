"""Rows for PyTorch: a function with a gradient of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from keras.src.backend.common.stateless_scope import in_stateless_scope

if TYPE_CHECKING:
    from sparkdl.layers.lookups import HostRows


def lookup(rows: HostRows, ids: Any, anchor: Any, width: int) -> Any:
    """See :func:`sparkdl.layers.lookups.lookup`."""
    if in_stateless_scope():  # Keras asks for shapes by calling the model on zeros
        return torch.zeros((*ids.shape, width), device=ids.device)
    return _Rows.apply(anchor, rows, ids.detach())


class _Rows(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(context: Any, anchor: Any, rows: HostRows, ids: Any) -> Any:
        context.rows, context.ids = rows, ids.cpu().numpy()
        return torch.from_numpy(rows.pull(context.ids)).to(ids.device)

    @staticmethod
    def backward(context: Any, *upstream: Any) -> Any:
        gradients = np.ascontiguousarray(upstream[0].detach().cpu().numpy(), np.float32)
        context.rows.push(context.ids, gradients)
        return upstream[0].new_zeros(()), None, None
