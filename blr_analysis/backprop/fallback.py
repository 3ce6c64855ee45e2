"""Per-example gradients of layers that have no rule: ``torch.func`` for that module alone.

A module is differentiated with respect to its own parameters by ``vmap`` over the examples of a
vector–Jacobian product; where ``vmap`` cannot go (data-dependent control flow, kernels without a
batching rule) the examples are taken one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from blr_analysis.backprop.layers import Axis, upcast
from blr_analysis.backprop.record import Visit, is_floating, leaves_of
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
        axes: batch axes of the input leaves (None: not a tensor) and of the output leaves.
        grads: ``[output leaf][column]`` gradients.
    """
    input_axes, output_axes = axes
    call = _OneExample.of(visit, params, places, input_axes, batch)
    cotangents = [
        torch.stack([_split(grad, axis, batch) for grad in column], dim=1)
        for column, axis in zip(grads, output_axes, strict=True)
    ]  # [B, K, (r,) ...]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        # The fused attention has no vmap rule; of others that lack one vmap only says it is slow.
        warnings.filterwarnings("ignore", "There is a performance drop")
        try:
            columns = vmap(call.columns, randomness="same")(call.mapped_inputs, cotangents)
        except Exception:  # vmap fails in as many ways as there are operations
            columns = _one_by_one(call, cotangents)
    return Dense({name: upcast(column.detach()) for name, column in columns.items()})


@dataclass(frozen=True)
class _OneExample:
    """A module's call for a single example, as a function of its parameters.

    ``inputs`` are the leaves of the arguments. Those of which every example has its own are put
    with examples first, and copied, because a module may work on them in place.
    """

    module: nn.Module
    values: dict[str, Tensor]  # of the parameters that are differentiated
    others: Mapping[str, Tensor]  # of all parameters
    places: Mapping[str, str]
    inputs: list[Any]
    axes: Sequence[Axis | None]
    structure: Any  # of the arguments

    @classmethod
    def of(
        cls,
        visit: Visit,
        params: Mapping[str, Tensor],
        places: Mapping[str, str],
        axes: Sequence[Axis | None],
        batch: int,
    ) -> _OneExample:
        leaves, structure = tree_flatten((visit.args, visit.kwargs))
        inputs = [
            _split(leaf.clone(), axis, batch) if _is_mapped(axis) else leaf
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        values = {name: params[name] for name in visit.unit.names.values()}
        return cls(visit.unit.module, values, params, places, inputs, axes, structure)

    @property
    def mapped_inputs(self) -> list[Tensor]:
        """The inputs of which every example has its own, ``[B, ...]``."""
        return [x for x, axis in zip(self.inputs, self.axes, strict=True) if _is_mapped(axis)]

    def outputs(
        self, values: Mapping[str, Tensor], example: list[Tensor], like: Sequence[Tensor]
    ) -> list[Tensor]:
        """Outputs of an example, in the shapes and dtypes of ``like``, at values of parameters.

        ``example``: its rows of the mapped inputs.
        """
        rows = iter(example)
        arguments = [
            _join(next(rows), axis) if _is_mapped(axis) else x
            for x, axis in zip(self.inputs, self.axes, strict=True)
        ]
        args, kwargs = tree_unflatten(arguments, self.structure)
        placed = {place: values.get(name, self.others[name]) for place, name in self.places.items()}
        output = functional_call(self.module, placed, args, kwargs, tie_weights=False)
        leaves = filter(is_floating, tree_leaves(output))
        return [x.reshape(c.shape).to(c.dtype) for x, c in zip(leaves, like, strict=True)]

    def columns(self, example: list[Tensor], cotangents: list[Tensor]) -> dict[str, Tensor]:
        """Gradients ``[K, *shape]`` of one example, for cotangents ``[K, ...]`` of its outputs."""
        like = [c[0] for c in cotangents]
        pull = vjp(lambda values: self.outputs(values, example, like), self.values)[1]
        columns = [pull(list(column))[0] for column in _columns_of(cotangents)]
        return {name: torch.stack([c[name] for c in columns]) for name in self.values}


def _columns_of(cotangents: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """From ``[K, ...]`` by output to one column of all outputs after the other."""
    return zip(*(c.unbind() for c in cotangents), strict=True)


def _one_by_one(call: _OneExample, cotangents: list[Tensor]) -> dict[str, Tensor]:
    """The same for all examples by plain autograd, ``[B, K, *shape]`` by name."""
    inputs = call.mapped_inputs
    gradients: dict[str, list[Tensor]] = {name: [] for name in call.values}
    for i in range(len(cotangents[0])):
        leaves = leaves_of(call.values)
        of_example = [c[i] for c in cotangents]
        with torch.enable_grad():
            outputs = call.outputs(leaves, [x[i] for x in inputs], [c[0] for c in of_example])
        columns = [pulled(outputs, column, leaves) for column in _columns_of(of_example)]
        for name, column in zip(call.values, zip(*columns, strict=True), strict=True):
            gradients[name].append(torch.stack(column))
    return {name: torch.stack(rows) for name, rows in gradients.items()}


def pulled(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    leaves: Mapping[str, Tensor],
    *,
    last: bool = False,
) -> list[Tensor]:
    """One vector–Jacobian product by plain autograd; zeros where nothing depends on a leaf.

    ``last`` frees what the forward pass saved.
    """
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
    gradients: dict[str, list[Tensor]] = {name: [] for name in names}
    for position, index in enumerate(indices.split(1)):
        row = slice(position, position + 1)
        with torch.inference_mode(False), torch.enable_grad():
            leaves = leaves_of({name: params[name] for name in names})
            model = task.at({**params, **leaves})
            outputs, _ = model.run(index)
            if outputs.shape[1:] != cotangents[0].shape[1:]:  # it was padded in company
                outputs = model.run(indices)[0][row]
        columns = [pulled([outputs], [c[row]], leaves) for c in cotangents]
        for name, column in zip(names, zip(*columns, strict=True), strict=True):
            gradients[name].append(torch.stack(column))
    return Dense({name: upcast(torch.stack(rows)) for name, rows in gradients.items()})


def _is_mapped(axis: Axis | None) -> TypeGuard[Axis]:
    """Whether every example has rows of its own in this input."""
    return axis is not None and not axis.shared


def _split(tensor: Tensor, axis: Axis, batch: int) -> Tensor:
    """Examples first: ``[B, ...]`` or ``[B, r, ...]``."""
    if axis.repeats > 1:
        return tensor.reshape(batch, axis.repeats, *tensor.shape[1:])
    return axis.first(tensor, batch)


def _join(example: Tensor, axis: Axis) -> Tensor:
    """One example as the batch of one that the module expects."""
    return example if axis.repeats > 1 else example.unsqueeze(axis.dim)
