"""Layers that scale and shift features, whatever their names and however they make them:

    y = x̂ ∘ w + b,    G_w = Σ d ∘ x̂

RMSNorm of every name (the 1 + w of Gemma, the gated ones), layer norms in single precision, scales
of layers. No type is asked for: the layer itself says what x̂ is, run at w = 0 and w = 1, and on the
plan's examples whether it is affine: at weights drawn at random it must give what x̂ predicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from blr_analysis.backprop.layers import Axis, Call
from blr_analysis.backprop.record import Visit
from blr_analysis.backprop.terms import Dense, Term

CLOSE = 1e-4  # how near the prediction must come; the plan's own check is as strict as the dtype


def affine(call: Call, grads: list[Tensor]) -> list[Term]:
    """The rule: Σ d ∘ ∂y/∂p of every parameter p of the layer's own, by example."""
    _, slopes = _parts(call.module, call.args, call.kwargs, call.values)
    columns = {}
    for attribute, slope in slopes.items():
        x, shape = call.gradient(slope), tuple(call.values[attribute].shape)
        each = [_summed(call.gradient(d) * x, shape, call.batch) for d in grads]
        columns[call.names[attribute]] = torch.stack(each, dim=1)
    return [Dense(columns)]


def is_affine(visit: Visit, values: Mapping[str, Tensor], axis: Axis) -> bool:
    """Whether :func:`affine` can read this layer, seen with its own parameters' ``values``."""
    tensors = [x for x in tree_leaves((visit.args, visit.kwargs)) if isinstance(x, Tensor)]
    if len(visit.outputs) != 1 or not tensors or any(x.is_inference() for x in tensors):
        return False
    features = visit.outputs[0].ndim - 1  # beside the examples' dimension, which comes before them
    if axis.shared or any(v.ndim > features - axis.dim for v in values.values()):
        return False
    before = [x._version for x in tensors]
    generator = torch.Generator().manual_seed(0)
    drawn = {
        a: torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v)
        for a, v in values.items()
    }
    try:
        module, args, kwargs = visit.unit.module, visit.args, visit.kwargs
        predicted, slopes = _parts(module, args, kwargs, values)
        truth = functional_call(module, drawn, args, kwargs)
        for attribute, slope in slopes.items():
            predicted = predicted + slope * drawn[attribute]
        if predicted.shape != visit.outputs[0].shape or [x._version for x in tensors] != before:
            return False
        gap = torch.linalg.vector_norm((predicted - truth).double())
        size = torch.linalg.vector_norm(truth.double())
    except Exception:  # whatever a layer makes of weights that it did not expect
        return False
    bound = max(CLOSE, 4 * torch.finfo(truth.dtype).eps)
    return bool(gap <= bound * size)


def _parts(
    module: nn.Module, args: Any, kwargs: Any, values: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The layer's output where its own parameters are 0, and ∂y/∂p of each of them."""
    zeros = {a: torch.zeros_like(v) for a, v in values.items()}
    start = functional_call(module, zeros, args, kwargs)
    slopes = {
        a: functional_call(module, {**zeros, a: torch.ones_like(v)}, args, kwargs) - start
        for a, v in values.items()
    }
    return start, slopes


def _summed(product: Tensor, shape: tuple[int, ...], batch: int) -> Tensor:
    """``[B · r, ..., *shape]`` summed over what the parameter does not have, ``[B, *shape]``."""
    features = (1,) * (product.ndim - 1 - len(shape)) + shape
    rows = product.sum_to_size(len(product), *features)
    return rows.reshape(batch, -1, *shape).sum(1)
