"""Per-example gradients of layers that have no rule: ``torch.func`` for that module alone.

A module is differentiated with respect to its own parameters by ``vmap`` over the examples of a
vector–Jacobian product; where ``vmap`` cannot go (data-dependent control flow, kernels without a
batching rule) the examples are taken one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten

from blr_analysis.backprop.layers import Axis, upcast
from blr_analysis.backprop.record import Visit, fetched
from blr_analysis.backprop.terms import Dense
from blr_analysis.task import Task


def module_columns(
    visit: Visit,
    params: Mapping[str, Tensor],
    places: Mapping[str, str],
    axes: tuple[Sequence[Axis | None], Sequence[Axis]],
    grads: list[list[Tensor]],
    batch: int,
) -> Dense:
    """G_ic for the unit's own parameters, ``[B, K, *shape]`` each.

    Args:
        params: every parameter's value by canonical name.
        places: every place below this module that holds a parameter → its canonical name.
        axes: batch axes of the input leaves (None: not a tensor) and of the output leaves; the
            inputs are copied, because a module may work on them in place.
        grads: ``[output leaf][column]`` gradients.
    """
    names = set(visit.unit.names.values())
    values = {n: params[n] for n in names}
    leaves, spec = tree_flatten((visit.args, visit.kwargs))
    in_axes, out_axes = axes
    moved = [
        _split(leaf.clone(), axis, batch) if axis is not None and not axis.shared else leaf
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
        placed = {a: own_values.get(n, params[n]) for a, n in places.items()}
        out = functional_call(visit.unit.module, placed, args, kwargs, tie_weights=False)
        leaves = [
            t for t in tree_flatten(out)[0] if isinstance(t, Tensor) and t.is_floating_point()
        ]
        return [t.reshape(c.shape[2:]).to(c) for t, c in zip(leaves, stacked, strict=True)]

    def one(inputs: list[Any], cotangents: list[Tensor]) -> dict[str, Tensor]:
        filled = _filled(moved, inputs, mapped)
        pull = vjp(lambda own_values: outputs(own_values, filled), values)[1]
        columns = [pull(list(c))[0] for c in zip(*(t.unbind(0) for t in cotangents), strict=True)]
        return {a: torch.stack([c[a] for c in columns]) for a in values}

    batched = [x for x, m in zip(moved, mapped, strict=True) if m]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        # The fused attention has no vmap rule; of others that lack one vmap only says it is slow.
        warnings.filterwarnings("ignore", "There is a performance drop")
        try:
            columns = vmap(one, randomness="same")(batched, stacked)
        except Exception:  # vmap fails in as many ways as there are operations
            columns = _one_by_one(outputs, values, moved, batched, mapped, stacked)
    return Dense({n: upcast(c.detach()) for n, c in columns.items()})


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
        columns = range(stacked[0].shape[1])
        rows.append([pulled(out, [c[i, k] for c in stacked], leaves) for k in columns])
    return {
        a: torch.stack([torch.stack([column[j] for column in row]) for row in rows])
        for j, a in enumerate(values)
    }


def pulled(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    leaves: Mapping[str, Tensor],
    *,
    last: bool = False,
) -> list[Tensor]:
    """One vector–Jacobian product by plain autograd; zeros where nothing depends on a leaf. The
    ``last`` lets go of what the forward pass kept."""
    pairs = [(f, c) for f, c in zip(outputs, cotangents, strict=True) if f.requires_grad]
    if not pairs:
        return [torch.zeros_like(leaf) for leaf in leaves.values()]
    grads = torch.autograd.grad(
        [f for f, _ in pairs],
        list(leaves.values()),
        [c for _, c in pairs],
        retain_graph=not last,
        allow_unused=True,
        materialize_grads=True,
    )
    return [g.detach().to_dense() for g in grads]


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
        with torch.inference_mode(False), torch.enable_grad(), task.evaluation():
            leaves = {n: params[n].detach().requires_grad_() for n in names}
            outputs, _ = task.run(fetched(task, index), {**params, **leaves}, index)
            if outputs.shape[1:] != cotangents[0].shape[1:]:  # it was padded in company
                outputs, _ = task.run(fetched(task, indices), {**params, **leaves}, indices)
                outputs = outputs[position : position + 1]
        rows_of = [pulled([outputs], [c[position : position + 1]], leaves) for c in cotangents]
        for name, column in zip(names, zip(*rows_of, strict=True), strict=True):
            rows[name].append(torch.stack(column))
    return Dense({n: upcast(torch.stack(r)) for n, r in rows.items()})


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
