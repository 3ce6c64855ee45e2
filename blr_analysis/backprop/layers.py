"""The rule for each kind of layer: from its input and its output gradients to a :class:`Term`.

A rule is a function ``(call, grads) -> list[Term]``; :data:`RULES` maps layer types to rules, and
a new layer is one more row. Layers without a row are differentiated by themselves with
``torch.func`` (see :mod:`blr_analysis.backprop.fallback`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from blr_analysis.backprop.matrices import Joint, MatrixShape
from blr_analysis.backprop.outer import Outer
from blr_analysis.backprop.rows import Rows
from blr_analysis.backprop.terms import Dense, Term
from blr_analysis.half import working


@dataclass(frozen=True)
class Axis:
    """Where the examples are in a tensor that one layer saw.

    ``dim`` is the batch dimension; ``repeats`` r > 1 says that dimension 0 holds ``B · r`` rows,
    r consecutive ones for each example; ``shared`` that no dimension belongs to the examples.
    """

    dim: int = 0
    repeats: int = 1
    shared: bool = False

    def first(self, tensor: Tensor, batch: int) -> Tensor:
        """The tensor with rows first, ``[B · r, ...]``."""
        if self.shared:
            return lifted(tensor, batch)
        return tensor.movedim(self.dim, 0) if self.dim else tensor

    def fits(self, tensor: Tensor, batch: int) -> bool:
        """Whether a tensor of another chunk can be laid out this way."""
        if self.shared:
            return True
        return tensor.ndim > self.dim and tensor.shape[self.dim] == batch * self.repeats


def lifted(tensor: Tensor, batch: int) -> Tensor:
    """One row per example of what all examples share: ``[1, ...]`` or ``[...]`` → ``[B, ...]``."""
    row = tensor if tensor.ndim > 1 and len(tensor) == 1 else tensor.unsqueeze(0)
    return row.expand(batch, *row.shape[1:])


def upcast(tensor: Tensor) -> Tensor:
    """Half precision as float32, in which sums are taken; everything else as it is."""
    return tensor.to(working(tensor.dtype))


def axis_between(small: torch.Size, large: torch.Size, sizes: tuple[int, int]) -> Axis | None:
    """Where the examples are, from the shapes that batches of two sizes gave; None: nowhere.

    >>> axis_between(torch.Size([4, 3, 5]), torch.Size([4, 7, 5]), (3, 7))
    Axis(dim=1, repeats=1, shared=False)
    >>> axis_between(torch.Size([6, 5]), torch.Size([14, 5]), (3, 7)).repeats
    2
    """
    if len(small) != len(large):
        return None
    changed = [d for d, (s, t) in enumerate(zip(small, large, strict=True)) if s != t]
    if not changed:
        return Axis(shared=True) if 0 not in small else None
    dim = changed[0]
    repeats, rest = divmod(small[dim], sizes[0])
    proportional = rest == 0 and large[dim] == repeats * sizes[1]
    if len(changed) > 1 or not proportional or (repeats > 1 and dim > 0):
        return None
    return Axis(dim=dim, repeats=repeats)


@dataclass(frozen=True)
class Call:
    """One forward call of a layer: its input, where the examples are, its parameters' names."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: int
    input_axis: Axis
    output_axis: Axis
    names: dict[str, str]  # attribute ("weight", "bias") → the parameter's name in the model
    values: dict[str, Tensor]  # the parameters' values, by attribute
    every_grad: list[list[Tensor]] = field(default_factory=list)  # [output leaf][column], as made

    @property
    def x(self) -> Tensor:
        value = self.args[0] if self.args else next(iter(self.kwargs.values()))
        return upcast(self.input_axis.first(value, self.batch))

    def gradient(self, grad: Tensor) -> Tensor:
        return upcast(self.output_axis.first(grad, self.batch))

    def fold(self, rows: Tensor) -> Tensor:
        """``[B · r, g, T, D]`` → ``[B, g, r · T, D]``."""
        r = len(rows) // self.batch
        if r == 1:
            return rows
        _, g, t, d = rows.shape
        return rows.reshape(self.batch, r, g, t, d).transpose(1, 2).reshape(self.batch, g, r * t, d)


Rule = Callable[[Call, list[Tensor]], list[Term]]


def _outer(call: Call, layout: MatrixShape, a: Tensor, d: list[Tensor]) -> list[Term]:
    names = call.names
    return [Outer(Joint(names.get("weight"), names.get("bias"), layout), a, d)]


def _positions(tensor: Tensor) -> Tensor:
    """``[R, ..., D]`` → ``[R, 1, T, D]``."""
    return tensor.reshape(len(tensor), 1, -1, tensor.shape[-1])


def _columns(call: Call, grads: list[Tensor]) -> list[Tensor]:
    """Output gradients as ``[B, 1, T, D]``; where that is another shape alone, it is found once."""
    first = call.fold(_positions(call.gradient(grads[0])))
    if call.output_axis == Axis() and first.dtype == grads[0].dtype:
        return [g.reshape(first.shape) for g in grads]
    return [first, *(call.fold(_positions(call.gradient(g))) for g in grads[1:])]


def linear(call: Call, grads: list[Tensor]) -> list[Term]:
    """z = W a + b at every position."""
    a = call.fold(_positions(call.x))
    d = _columns(call, grads)
    shape = (d[0].shape[-1], a.shape[-1])
    return _outer(call, MatrixShape(1, *shape, shape), a, d)


def transposed_linear(call: Call, grads: list[Tensor]) -> list[Term]:
    """Hugging Face ``Conv1D``: z = a W + b with W stored ``[I, O]``."""
    a = call.fold(_positions(call.x))
    d = _columns(call, grads)
    rows, columns = d[0].shape[-1], a.shape[-1]
    return _outer(call, MatrixShape(1, rows, columns, (columns, rows), True), a, d)


def convolution(call: Call, grads: list[Tensor]) -> list[Term]:
    """Conv1d/2d/3d as one matrix product over the patches, group by group."""
    conv = call.module
    assert isinstance(conv, _ConvNd)
    patches = unfold(call.x, conv)  # [R, g, I, T]
    o = conv.out_channels // conv.groups
    d = [call.gradient(g).reshape(-1, conv.groups, o, patches.shape[-1]).mT for g in grads]
    layout = MatrixShape(conv.groups, o, patches.shape[2], tuple(conv.weight.shape))
    return _outer(call, layout, call.fold(patches.mT), [call.fold(x) for x in d])


def unfold(x: Tensor, conv: _ConvNd) -> Tensor:
    """The patches that a convolution multiplies with its kernel, ``[R, g, (C/g)·Πk, T]``."""
    n = len(conv.kernel_size)
    if any(conv._reversed_padding_repeated_twice):
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = F.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
    geometry = (conv.kernel_size, conv.dilation, conv.stride)
    for dim, (k, dilation, stride) in enumerate(zip(*geometry, strict=True)):
        x = x.unfold(2 + dim, dilation * (k - 1) + 1, stride)[..., ::dilation]
    # x: [R, C, t_1 … t_n, k_1 … k_n] → [R, C, k_1 … k_n, t_1 … t_n]
    order = [0, 1, *range(2 + n, 2 + 2 * n), *range(2, 2 + n)]
    x = x.permute(order)
    kernel = x.shape[1] // conv.groups
    for k in conv.kernel_size:
        kernel *= k
    return x.reshape(len(x), conv.groups, kernel, -1)


def embedding(call: Call, grads: list[Tensor]) -> list[Term]:
    """Row look-up; the padding row never learns."""
    module = call.module
    assert isinstance(module, nn.Embedding)
    ids = call.x.reshape(call.batch, -1)
    d = [call.gradient(g).reshape(call.batch, ids.shape[1], -1) for g in grads]
    if module.padding_idx is not None:
        kept = (ids != module.padding_idx).unsqueeze(-1)
        d = [g * kept for g in d]
    return [Rows.collect(call.names["weight"], tuple(module.weight.shape), ids, d)]


def norm(call: Call, grads: list[Tensor]) -> list[Term]:
    """y = x̂ ∘ w + b, BatchNorm in eval mode: G_w = Σ d ∘ x̂ and G_b = Σ d, over all dimensions that
    w has not."""
    module: Any = call.module
    by_channel = isinstance(module, nn.GroupNorm | _BatchNorm)
    normalised = _normalised(module, call.x)
    if by_channel:
        reduce = [d for d in range(1, normalised.ndim) if d != 1]
    else:
        reduce = [*range(1, normalised.ndim - len(module.normalized_shape))]
    columns: dict[str, list[Tensor]] = {name: [] for name in call.names.values()}

    def total(tensor: Tensor) -> Tensor:
        summed = tensor.sum(reduce) if reduce else tensor
        return summed.reshape(call.batch, -1, *summed.shape[1:]).sum(1)

    for raw in grads:
        d = call.gradient(raw)
        for attribute, name in call.names.items():
            columns[name].append(total(d * normalised if attribute == "weight" else d))
    return [Dense({n: torch.stack(c, dim=1) for n, c in columns.items()})]


def _normalised(module: Any, x: Tensor) -> Tensor:
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, None, None, module.eps)
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(x, module.normalized_shape, None, module.eps)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, None, None, module.eps)
    mean, var = module.running_mean, module.running_var
    return F.batch_norm(x, mean, var, None, None, False, 0.0, module.eps)


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.Embedding: embedding,
    nn.LayerNorm: norm,
    nn.RMSNorm: norm,
    nn.GroupNorm: norm,
    nn.BatchNorm1d: norm,
    nn.BatchNorm2d: norm,
    nn.BatchNorm3d: norm,
}


OF_FORWARD = ("forward", "_conv_forward")  # the methods that a layer's output comes from


def inherited(module: nn.Module, kinds: Collection[type[nn.Module]]) -> type[nn.Module] | None:
    """The type among ``kinds`` that the module is of, or whose forward pass it inherits unchanged.

    >>> class Head(nn.Linear):
    ...     purpose = "logits"
    >>> inherited(Head(2, 2), RULES) is nn.Linear
    True
    """
    kind = type(module)
    parent = next((base for base in kind.__mro__ if base in kinds), None)
    unchanged = all(getattr(kind, n, None) is getattr(parent, n, None) for n in OF_FORWARD)
    return parent if unchanged else None


def rule_for(module: nn.Module) -> Rule | None:
    """The rule of this layer; a subclass with a forward pass of its own has none."""
    kind = type(module)
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return transposed_linear
    parent = inherited(module, RULES)
    return None if parent is None else RULES[parent]
