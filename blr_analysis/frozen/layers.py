"""A frozen layer, the rows of its outputs, and passes in which rows are recorded or replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

# The output of a layer for one example: a tensor for each tensor of its outputs, or the shape of
# one that the model does not use.
Row = tuple[Any, ...]


@dataclass(frozen=True)
class Layer:
    """A frozen module, and the form of its outputs.

    Attributes:
        module: the module.
        structure: the lists, tuples and dicts that its outputs stand in.
        leaves: its outputs, flat; a tensor stands here without its numbers.
        used: whether the model looks at each leaf.
    """

    module: nn.Module
    structure: TreeSpec
    leaves: tuple[Any, ...]
    used: tuple[bool, ...]

    def rows(self, leaves: Sequence[Any]) -> list[Row]:
        """The rows of a batch of outputs, one for each example."""
        columns: list[Sequence[Any]] = []
        for leaf, is_used in zip(leaves, self.used, strict=True):
            if isinstance(leaf, Tensor):
                columns.append(leaf.unbind() if is_used else [leaf.shape[1:]] * len(leaf))
        return list(zip(*columns, strict=True))

    def batch(self, rows: Sequence[Row]) -> Any:
        """The outputs for a batch of these rows; unused ones are zeros."""
        columns = iter(zip(*rows, strict=True))
        leaves = []
        for leaf, is_used in zip(self.leaves, self.used, strict=True):
            if not isinstance(leaf, Tensor):
                leaves.append(leaf)
            elif is_used:
                leaves.append(torch.stack(list(next(columns))))
            else:
                shape, *_ = next(columns)
                leaves.append(leaf.new_zeros(()).expand(len(rows), *shape))
        return tree_unflatten(leaves, self.structure)


class Call(NamedTuple):
    """The outputs of one call of a layer: flat, and the structure that they stand in."""

    leaves: Sequence[Any]
    structure: TreeSpec


@contextmanager
def replaying(layers: Sequence[Layer], rows: Sequence[Sequence[Row]]) -> Iterator[None]:
    """Inside, each layer returns its rows, whatever its inputs are.

    Args:
        rows: of each layer, one for each example of the batch.
    """

    def forward_of(layer: Layer, rows_of_layer: Sequence[Row]) -> Callable[..., Any]:
        return lambda *args, **kwargs: layer.batch(rows_of_layer)

    forwards = [
        forward_of(layer, rows_of_layer) for layer, rows_of_layer in zip(layers, rows, strict=True)
    ]
    with _replaced([layer.module for layer in layers], forwards):
        yield


@contextmanager
def recording(layers: Sequence[Layer]) -> Iterator[list[list[Call]]]:
    """Inside, the calls of each layer are appended to its list; used outputs are copied."""
    calls: list[list[Call]] = [[] for _ in layers]

    def forward_of(layer: Layer, calls_of_layer: list[Call]) -> Callable[..., Any]:
        forward = layer.module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            leaves, structure = tree_flatten(output)
            if len(leaves) == len(layer.used):
                leaves = [
                    leaf.detach().clone() if is_used and isinstance(leaf, Tensor) else leaf
                    for leaf, is_used in zip(leaves, layer.used, strict=True)
                ]
            calls_of_layer.append(Call(leaves, structure))
            return output

        return call

    forwards = [
        forward_of(layer, calls_of_layer)
        for layer, calls_of_layer in zip(layers, calls, strict=True)
    ]
    with _replaced([layer.module for layer in layers], forwards):
        yield calls


@contextmanager
def _replaced(
    modules: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]
) -> Iterator[None]:
    """Inside, the modules have these forward functions."""
    with ExitStack() as stack:
        for module, forward in zip(modules, forwards, strict=True):
            attributes = vars(module)
            if "forward" in attributes:
                stack.callback(attributes.__setitem__, "forward", attributes["forward"])
            else:
                stack.callback(attributes.pop, "forward")
            attributes["forward"] = forward
        yield


def is_watched(module: nn.Module) -> bool:
    """Whether a hook looks at the module's calls."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
