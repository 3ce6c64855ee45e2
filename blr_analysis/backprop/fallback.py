"""Per-example gradients of layers that have no rule: ``torch.func`` for that module alone.

A module is differentiated with respect to its own parameters by ``vmap`` over the examples of a
vector–Jacobian product; where ``vmap`` cannot go (data-dependent control flow, kernels without a
batching rule) the examples are taken one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from blr_analysis.backprop.layers import Axis
from blr_analysis.backprop.record import Visit
from blr_analysis.backprop.terms import Dense
from blr_analysis.task import Task


def module_columns(
    visit: Visit,
    params: Mapping[str, Tensor],
    canonical: Mapping[str, str],
    axes: tuple[Sequence[Axis | None], Sequence[Axis]],
    grads: list[list[Tensor]],
    batch: int,
) -> Dense:
    """G_ic for the unit's own parameters, ``[B, K, *shape]`` each.

    Args:
        params: every parameter's value by canonical name.
        canonical: the parameter names below this module → canonical names.
        axes: batch axes of the input leaves (None: not a tensor) and of the output leaves.
        grads: ``[output leaf][column]`` gradients.
    """
    own = visit.unit.names
    values = {a: params[n] for a, n in own.items()}
    rest = {a: params[n] for a, n in canonical.items() if a not in own}
    leaves, spec = tree_flatten((visit.args, visit.kwargs))
    in_axes, out_axes = axes
    moved = [
        _split(leaf, axis, batch) if axis is not None and not axis.shared else leaf
        for leaf, axis in zip(leaves, in_axes, strict=True)
    ]
    mapped = [a is not None and not a.shared for a in in_axes]
    stacked = [
        torch.stack([_split(g, axis, batch) for g in column], dim=1)
        for column, axis in zip(grads, out_axes, strict=True)
    ]  # [B, K, (r,) ...]

    def outputs(own_values: dict[str, Tensor], inputs: list[Any]) -> list[Tensor]:
        whole = [
            _join(x, axis) if m and axis is not None else x
            for x, axis, m in zip(inputs, in_axes, mapped, strict=True)
        ]
        args, kwargs = tree_unflatten(whole, spec)
        out = functional_call(visit.unit.module, {**rest, **own_values}, args, kwargs)
        found = [
            t for t in tree_flatten(out)[0] if isinstance(t, Tensor) and t.is_floating_point()
        ]
        return [_drop(t, axis) for t, axis in zip(found, out_axes, strict=True)]

    def one(inputs: list[Any], cotangents: list[Tensor]) -> dict[str, Tensor]:
        filled = _filled(moved, inputs, mapped)
        pull = vjp(lambda own_values: outputs(own_values, filled), values)[1]
        return vmap(lambda c: pull(c)[0])(cotangents)

    batched = [x for x, m in zip(moved, mapped, strict=True) if m]
    with torch.no_grad():
        try:
            columns = vmap(one, randomness="same")(batched, stacked)
        except (RuntimeError, NotImplementedError, ValueError, AttributeError, TypeError):
            columns = _one_by_one(outputs, values, moved, batched, mapped, stacked)
    return Dense({own[a]: c.detach() for a, c in columns.items()})


def _one_by_one(
    outputs: Any,
    values: dict[str, Tensor],
    moved: list[Any],
    batched: list[Tensor],
    mapped: list[bool],
    stacked: list[Tensor],
) -> dict[str, Tensor]:
    rows: list[list[list[Tensor]]] = []
    for i in range(len(stacked[0])):
        with torch.enable_grad():
            leaves = {a: v.detach().requires_grad_() for a, v in values.items()}
            out = outputs(leaves, _filled(moved, [x[i] for x in batched], mapped))
        rows.append([])
        for k in range(stacked[0].shape[1]):
            grads = torch.autograd.grad(
                out,
                list(leaves.values()),
                [c[i, k] for c in stacked],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            rows[-1].append(list(grads))
    return {
        a: torch.stack([torch.stack([column[j] for column in row]) for row in rows])
        for j, a in enumerate(values)
    }


def task_columns(
    task: Task,
    params: Mapping[str, Tensor],
    names: Sequence[str],
    indices: Tensor,
    cotangents: Sequence[Tensor],
) -> Dense:
    """The same through the whole model, one example at a time: the last resort, always exact."""
    rows: dict[str, list[Tensor]] = {n: [] for n in names}
    for position, index in enumerate(indices.split(1)):
        with torch.enable_grad(), task.evaluation():
            leaves = {n: params[n].detach().requires_grad_() for n in names}
            outputs, _ = task.run(task.fetch(index), {**params, **leaves}, index)
        per_column: dict[str, list[Tensor]] = {n: [] for n in names}
        for cotangent in cotangents:
            grads = torch.autograd.grad(
                outputs,
                list(leaves.values()),
                cotangent[position : position + 1],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            ) if outputs.requires_grad else [torch.zeros_like(v) for v in leaves.values()]
            for name, grad in zip(names, grads, strict=True):
                per_column[name].append(grad.detach())
        for name in names:
            rows[name].append(torch.stack(per_column[name]))
    return Dense({n: torch.stack(r) for n, r in rows.items()})


def _filled(moved: list[Any], inputs: list[Any], mapped: list[bool]) -> list[Any]:
    source = iter(inputs)
    return [next(source) if m else x for x, m in zip(moved, mapped, strict=True)]


def _split(tensor: Tensor, axis: Axis, batch: int) -> Tensor:
    """Examples first: ``[B, ...]`` or ``[B, r, ...]``."""
    if axis.repeats > 1:
        return tensor.reshape(batch, axis.repeats, *tensor.shape[1:])
    return axis.first(tensor, batch)


def _join(example: Tensor, axis: Axis) -> Tensor:
    """One example as the batch of one that the module expects."""
    return example if axis.repeats > 1 else example.unsqueeze(axis.dim)


def _drop(output: Tensor, axis: Axis) -> Tensor:
    """The inverse of :func:`_join` on an output."""
    return output if axis.repeats > 1 else output.squeeze(0 if axis.shared else axis.dim)
