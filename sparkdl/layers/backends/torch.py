"""Rows for PyTorch: a function with a gradient of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from keras.src.backend.common.stateless_scope import in_stateless_scope
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

if TYPE_CHECKING:
    from sparkdl.layers.backends import Forgotten, HostClasses, HostRows
    from sparkdl.weights import FloatArray


def lookup(rows: HostRows, ids: Tensor, anchor: Tensor, width: int) -> Any:
    if in_stateless_scope():  # Keras asks for shapes by calling the model on zeros
        return torch.zeros((*ids.shape, width), device=ids.device)
    return _Rows.apply(anchor, rows, ids.detach(), torch.is_grad_enabled())


class _Rows(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(context: Any, anchor: Tensor, rows: HostRows, ids: Tensor, recorded: bool) -> Any:
        found, places = rows.pull(ids.cpu().numpy(), recorded and anchor.requires_grad)
        context.rows, context.count = rows, len(found)
        context.places = torch.from_numpy(places).to(ids.device)
        return torch.from_numpy(found).to(ids.device)[context.places]

    @staticmethod
    def backward(context: Any, *upstream: Any) -> Any:
        gradients = upstream[0].detach().float().flatten(0, context.places.ndim - 1)
        sums = gradients.new_zeros((context.count, gradients.shape[-1]))
        sums.index_add_(0, context.places.flatten(), gradients)
        found = context.rows.push(sums.cpu().numpy())
        return upstream[0].new_full((), float(found)), None, None, None


def losses(classes: HostClasses, features: Tensor, labels: Tensor, anchor: Tensor) -> Any:
    if in_stateless_scope():
        return torch.zeros(features.shape[:1], device=features.device)
    return _Losses.apply(features, anchor, classes, labels.detach(), torch.is_grad_enabled())


def after(function: Callable[[], FloatArray], like: Tensor) -> Any:
    if in_stateless_scope():
        return torch.zeros(like.shape[:1], device=like.device)
    return torch.from_numpy(function()).to(like.device)


class _Losses(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        context: Any,
        features: Tensor,
        anchor: Tensor,
        classes: HostClasses,
        labels: Tensor,
        recorded: bool,
    ) -> Any:  # fmt: skip
        differentiated = recorded and (features.requires_grad or anchor.requires_grad)
        context.classes = classes
        array = np.ascontiguousarray(features.detach().cpu().numpy(), np.float32)
        losses = classes.measure(array, labels.cpu().numpy(), differentiated)
        return torch.from_numpy(losses).to(features.device)

    @staticmethod
    def backward(context: Any, *upstream: Any) -> Any:
        gradient = context.classes.learn(upstream[0].detach().cpu().numpy().astype(np.float32))
        found = torch.from_numpy(gradient).to(upstream[0].device)
        return found, upstream[0].new_zeros(()), None, None, None


def recompute(
    function: Forgotten, inputs: Sequence[Any], weights: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The results of ``function``; PyTorch computes it again for the gradients."""
    # Stopped early, it would end with an exception inside of Keras' calls of layers.
    with set_checkpoint_early_stop(False):
        results: tuple[list[Any], list[Any]] = checkpoint(
            function, *inputs, *weights, use_reentrant=False
        )
    return results
