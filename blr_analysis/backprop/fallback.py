"""Per-example gradients of layers that have no rule: ``torch.func`` for that module alone.

A vector–Jacobian product differentiates the module with respect to its own parameters, and ``vmap``
maps it over the examples. Where ``vmap`` cannot go (data-dependent control flow, kernels without a
batching rule), the examples are differentiated one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from blr_analysis.backprop.layers import Axis, upcast
from blr_analysis.backprop.record import Visit, is_floating, leaves_of
from blr_analysis.backprop.terms import Dense
from blr_analysis.models import called_with
from blr_analysis.ranks import gathered_piece
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
        params: the values of all the model's parameters, by canonical name.
        places: canonical names of the parameters in this module, by their name inside of it.
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

    Attributes:
        values: the parameters that are differentiated, by canonical name.
        frozen: the module's other parameters, by canonical name.
        places: canonical names by the parameter's name inside of the module.
        inputs: the leaves of the arguments. A leaf that has rows for each example comes with
            examples first, and as a copy, because a module may work on it in place.
        axes: where the examples are in each leaf; None where it is no tensor.
        structure: of the arguments, from which pytree puts the leaves together again.
    """

    module: nn.Module
    values: dict[str, Tensor]
    frozen: Mapping[str, Tensor]
    places: Mapping[str, str]
    inputs: list[Any]
    axes: Sequence[Axis | None]
    structure: Any

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
        frozen = {
            name: gathered_piece(params[name]) for name in places.values() if name not in values
        }
        return cls(
            module=visit.unit.module,
            values=values,
            frozen=frozen,
            places=places,
            inputs=inputs,
            axes=axes,
            structure=structure,
        )

    @property
    def mapped_inputs(self) -> list[Tensor]:
        """The inputs that have rows for each example, ``[B, ...]``."""
        return [x for x, axis in zip(self.inputs, self.axes, strict=True) if _is_mapped(axis)]

    def outputs(
        self, values: Mapping[str, Tensor], example: list[Tensor], like: Sequence[Tensor]
    ) -> list[Tensor]:
        """The outputs of one example at these values of the parameters.

        Args:
            example: the example's rows of :attr:`mapped_inputs`.
            like: tensors that have the shapes and dtypes of the outputs.
        """
        rows = iter(example)
        arguments = [
            _join(next(rows), axis) if _is_mapped(axis) else x
            for x, axis in zip(self.inputs, self.axes, strict=True)
        ]
        args, kwargs = tree_unflatten(arguments, self.structure)
        by_name = {**self.frozen, **values}
        module_values = {place: by_name[name] for place, name in self.places.items()}
        output = called_with(self.module, module_values, args, kwargs)
        leaves = filter(is_floating, tree_leaves(output))
        return [x.reshape(c.shape).to(c.dtype) for x, c in zip(leaves, like, strict=True)]

    def columns(self, example: list[Tensor], cotangents: list[Tensor]) -> dict[str, Tensor]:
        """Gradients ``[K, *shape]`` of one example, for cotangents ``[K, ...]`` of its outputs."""
        like = [c[0] for c in cotangents]
        pull = vjp(lambda values: self.outputs(values, example, like), self.values)[1]
        columns = [pull(list(column))[0] for column in _columns_of(cotangents)]
        return {name: torch.stack([c[name] for c in columns]) for name in self.values}


def _columns_of(cotangents: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """One column of all outputs after the other, from K columns ``[K, ...]`` of each output."""
    return zip(*(cotangent.unbind() for cotangent in cotangents), strict=True)


def _one_by_one(call: _OneExample, cotangents: list[Tensor]) -> dict[str, Tensor]:
    """:meth:`_OneExample.columns` of all examples by plain autograd, ``[B, K, *shape]``."""
    inputs = call.mapped_inputs
    gradients: dict[str, list[Tensor]] = {name: [] for name in call.values}
    for i in range(len(cotangents[0])):
        leaves = leaves_of(call.values)
        example = [x[i] for x in inputs]
        example_cotangents = [cotangent[i] for cotangent in cotangents]
        like = [cotangent[0] for cotangent in example_cotangents]
        with torch.enable_grad():
            outputs = call.outputs(leaves, example, like)
        columns = [pulled(outputs, column, leaves) for column in _columns_of(example_cotangents)]
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
    """One vector–Jacobian product by plain autograd: the gradient at each leaf, in their order.

    It is 0 at a leaf that the outputs do not depend on. ``last`` frees what the forward pass saved.
    """
    pairs = zip(outputs, cotangents, strict=True)
    differentiable = [(f, cotangent) for f, cotangent in pairs if f.requires_grad]
    if not differentiable:
        return [torch.zeros_like(leaf) for leaf in leaves.values()]
    grads = torch.autograd.grad(
        [f for f, _ in differentiable],
        list(leaves.values()),
        [cotangent for _, cotangent in differentiable],
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
    """G_ic of these parameters through the whole model, one example at a time.

    This is the last resort: slow, and always exact. ``cotangents``: K tensors ``[B, C]``, one for
    each column.
    """
    gradients: dict[str, list[Tensor]] = {name: [] for name in names}
    for position, index in enumerate(indices.split(1)):
        row = slice(position, position + 1)
        with torch.inference_mode(False), torch.enable_grad():
            leaves = leaves_of({name: params[name] for name in names})
            model = task.at({**params, **leaves})
            outputs, _ = model.run(index)
            if outputs.shape[1:] != cotangents[0].shape[1:]:  # padding depends on the batch
                outputs = model.run(indices)[0][row]
        columns = [pulled([outputs], [cotangent[row]], leaves) for cotangent in cotangents]
        for name, column in zip(names, zip(*columns, strict=True), strict=True):
            gradients[name].append(torch.stack(column))
    return Dense({name: upcast(torch.stack(rows)) for name, rows in gradients.items()})


def _is_mapped(axis: Axis | None) -> TypeGuard[Axis]:
    """Whether every example has rows of its own in this input."""
    return axis is not None and not axis.shared


def _split(tensor: Tensor, axis: Axis, batch: int) -> Tensor:
    """A tensor with examples first: ``[B, ...]``, or ``[B, r, ...]`` of r rows an example."""
    if axis.repeats > 1:
        return tensor.reshape(batch, axis.repeats, *tensor.shape[1:])
    return axis.first(tensor, batch)


def _join(example: Tensor, axis: Axis) -> Tensor:
    """One example's rows as a batch of one, which is what the module expects."""
    return example if axis.repeats > 1 else example.unsqueeze(axis.dim)
