"""Layer inputs and output gradients of one batch, caught by hooks on the layers that matter.

The forward pass runs at detached parameters, so that the backward passes go no deeper than the
first layer of interest and never form a weight gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from blr_analysis import ranks
from blr_analysis.backprop.layers import Rule, lifted
from blr_analysis.data import check_rows
from blr_analysis.task import Task

# Autograd's names of the operations that move rows to places that the data choose.
ROUTING = ("Index", "Gather", "Scatter", "Masked", "Take", "Put", "CopySlices")

SEVERAL = 4  # batches from which on it pays to look how large they may be
MOST = 4096  # examples of tensors in one pass
SMALL = 64 * 2**20  # bytes that autograd may hold for them
TF32 = 2.0**-10  # its eps


@dataclass(frozen=True)
class Unit:
    """A module whose own parameters are analysed, and the rule that reads its gradients."""

    path: str
    module: nn.Module
    names: dict[str, str]  # attribute (its own name for an adopted parameter) → canonical name
    rule: Rule | None  # None: torch.func on this module alone


def counted(grads: Iterable[Tensor], batch: int) -> Tensor:
    """Which examples have a gradient at a layer's output, ``[batch]``: all, where none has.

    ``ignore_index`` takes an example out of the mean that a loss is. All count where an example has
    a single output: the gradient of such a loss is exactly 0 where a logit saturates, too.

    >>> counted([torch.tensor([[0.0, 0.0], [0.5, -0.5]])], 2)
    tensor([False,  True])
    """
    some = torch.zeros(batch, dtype=torch.bool)
    for grad in grads:
        some = (grad != 0).reshape(batch, -1).any(1).to(some.device) | some
        if bool(some.all()) or grad.numel() == batch:
            return torch.ones_like(some)
    return some if bool(some.any()) else ~some


def warn_of_uncounted(counts: Tensor) -> bool:
    """Say that the loss is taken for a mean over the other examples."""
    warnings.warn(
        f"{int((~counts).sum())} of {len(counts)} examples of a minibatch have no gradient "
        "(ignore_index, weights of 0?): the loss is taken for the mean over the others",
        stacklevel=3,
    )
    return True


@dataclass
class Visit:
    """One forward call of a unit."""

    unit: Unit
    occurrence: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]  # of the same shapes, without their numbers
    edges: list[Any]
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    stale: bool = False  # the input was overwritten in place after the layer read it

    def settle(self) -> None:
        """Once the forward pass is over: let go of its graph, and note whether the input stands."""
        self.stale = any(tensor._version != version for tensor, version in self.versions)
        self.versions = []
        self.args, self.kwargs = tree_map(_detached, (self.args, self.kwargs))

    def shrink(self) -> None:
        """Let go of the inputs' numbers; their shapes stay."""
        self.args, self.kwargs = tree_map(_shape, (self.args, self.kwargs))


@dataclass
class Recording:
    """Outputs of a batch and everything that the terms of its units are made from."""

    outputs: Tensor
    targets: Tensor
    visits: list[Visit]

    def routes(self) -> bool:
        """Whether rows are picked or put by index between the layers and the outputs."""
        return any(node.name().startswith(ROUTING) for node in graph(self.outputs))

    def backward(
        self, cotangents: Sequence[Tensor], *, last: bool = False
    ) -> list[list[list[Tensor]]]:
        """Gradients at every visit's outputs: ``[visit][output leaf][column]``.

        ``cotangents``: K tensors in the shape of the outputs; one backward pass each; the ``last``
        lets go of what the forward pass kept for them.
        """
        edges = [edge for visit in self.visits for edge in visit.edges]
        leaves = [leaf for visit in self.visits for leaf in visit.outputs]
        columns: list[list[Tensor]] = [[] for _ in leaves]
        for k, cotangent in enumerate(cotangents, start=1):
            if edges and self.outputs.requires_grad:
                kept = not last or k < len(cotangents)
                grads = torch.autograd.grad(
                    self.outputs, edges, cotangent, retain_graph=kept, allow_unused=True
                )
            else:
                grads = [None] * len(leaves)
            for column, grad, leaf in zip(columns, grads, leaves, strict=True):
                column.append(torch.zeros_like(leaf) if grad is None else grad.detach())
        by_visit, start = [], 0
        for visit in self.visits:
            by_visit.append(columns[start : start + len(visit.edges)])
            start += len(visit.edges)
        return by_visit


def graph(outputs: Tensor) -> Iterator[Any]:
    """Every operation that the outputs were made by."""
    seen, waiting = set(), [outputs.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [parent for parent, _ in node.next_functions]


def rounding(outputs: Tensor) -> float:
    """The eps of the coarsest dtype on the way to the outputs: half precision, autocast, norms
    that are taken in single precision inside of a double one, TF32 of a GPU's convolutions."""
    kinds, coarse = {outputs.dtype}, 0.0
    for node in graph(outputs):
        kinds |= {m.dtype for m in getattr(node, "_input_metadata", ())}
        if outputs.is_cuda and _rounds_convolutions() and "Convolution" in node.name():
            coarse = TF32
    return max(coarse, *(torch.finfo(kind).eps for kind in kinds if kind.is_floating_point))


def _rounds_convolutions() -> bool:
    """Whether cuDNN takes TF32, by whichever of torch's settings there is."""
    convolutions = getattr(torch.backends.cudnn, "conv", None)
    if convolutions is None:  # torch < 2.9
        return torch.backends.cudnn.allow_tf32
    return convolutions.fp32_precision == "tf32"


def fetched(task: Task, indices: Tensor) -> Any:
    """The batch of these examples as tensors that autograd takes, also from inference mode."""
    with torch.inference_mode(False):
        return tree_map(
            lambda x: x.clone() if isinstance(x, Tensor) and x.is_inference() else x,
            task.fetch(indices),
        )


def together(task: Task, params: Mapping[str, Tensor], indices: Tensor) -> int:
    """Examples in one forward and backward pass over these: the task's batch; of tensors, whose
    batches cost nothing to fetch, as many more as keep what autograd holds below SMALL bytes."""
    size = task.batch_size
    if not task.examples.is_tensors or len(indices) <= SEVERAL * size:
        return size
    first, saved = indices[:size], SavedBytes(task, params)
    with torch.enable_grad(), task.evaluation(), saved:
        task.run(
            fetched(task, first), {n: p.detach().requires_grad_() for n, p in params.items()}, first
        )
    return max(size, min(MOST, size * SMALL // max(1, saved.total)))


def shared(task: Task, params: Mapping[str, Tensor], indices: Tensor | None = None) -> Tensor:
    """The examples (None: of all) that this rank visits, where several work together.

    Raises:
        InputError: more ranks than examples, or ranks with other weights or data.
    """
    order = torch.arange(task.n_data) if indices is None else indices
    if ranks.count() == 1:
        return order
    ranks.check_enough(task.n_data)
    example = tree_leaves(fetched(task, torch.zeros(1, dtype=torch.long)))
    sizes = [x.double().norm() for x in example if isinstance(x, Tensor)]
    sizes += [torch.linalg.vector_norm(p, dtype=torch.float64) for p in params.values()]
    return ranks.share(order, task.n_data, *(float(size) for size in sizes))


def record(
    task: Task,
    params: Mapping[str, Tensor],
    batch: Any,
    units: Sequence[Unit],
    *,
    shared: frozenset[tuple[str, int, int]] = frozenset(),
    size: int,
    indices: Tensor | None = None,
    shapes: bool = False,
) -> Recording:
    """Run one batch and catch what the units saw; with ``shapes``, of what shape it was.

    ``shared`` names outputs ``(path, occurrence, floating leaf)`` that all examples share; they are
    lifted to one row per example, so that each gets its own gradient.

    Raises:
        ModelError: the model fails, or does not return one row of outputs per example.
    """
    visits: list[Visit] = []
    counts: dict[str, int] = {}

    def visit(unit: Unit, args: Any, kwargs: Any, output: Any) -> Any:
        given = tree_leaves((args, kwargs))
        leaves, spec = tree_flatten(output)
        if any(map(inside_transform, (*given, *leaves))):
            return output  # the model's own torch.func: its tensors mean nothing outside of it
        occurrence = counts.get(unit.path, 0)
        counts[unit.path] = occurrence + 1
        outputs, edges = [], []
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                continue
            if (unit.path, occurrence, len(outputs)) in shared:
                leaf = lifted(leaf, size)
            if not leaf.requires_grad:
                start = leaf.detach().requires_grad_()
                edges.append(get_gradient_edge(start))
                leaf = start.clone()  # a later in-place operation must not touch a leaf
            else:
                edges.append(get_gradient_edge(leaf))
            outputs.append(_shape(leaf))
            leaves[position] = leaf
        tensors = [t for t in given if isinstance(t, Tensor) and not t.is_inference()]
        versions = [(t, t._version) for t in tensors]
        if shapes:
            args, kwargs, edges, versions = tree_map(_shape, (args, kwargs, [], []))
        visits.append(Visit(unit, occurrence, args, kwargs, outputs, edges, versions))
        return tree_unflatten(leaves, spec)

    with torch.inference_mode(False), torch.enable_grad(), task.evaluation(), watched(units, visit):
        outputs, targets = task.run(batch, params, indices)
    check_rows(outputs, size)
    for seen in visits:
        seen.settle()
    return Recording(outputs, targets, visits)


@contextmanager
def watched(units: Sequence[Unit], visit: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``visit(unit, args, kwargs, output)`` sees every call of the units, and may answer
    with another output."""
    with ExitStack() as hooks:
        for unit in units:

            def hook(_: nn.Module, args: Any, kwargs: Any, output: Any, unit: Unit = unit) -> Any:
                return visit(unit, args, kwargs, output)

            hooks.callback(unit.module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


def inside_transform(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and is_functorch_wrapped_tensor(leaf)


def _shape(leaf: Any) -> Any:
    """A tensor without its numbers."""
    return leaf.detach().new_zeros(()).expand(leaf.shape) if isinstance(leaf, Tensor) else leaf


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


class SavedBytes(saved_tensors_hooks):
    """Counts what autograd saves inside, each place once, but for the model and its weights."""

    def __init__(self, task: Task, params: Mapping[str, Tensor]) -> None:
        own = [*task.model.parameters(), *task.model.buffers(), *params.values()]
        self._weights = {t.untyped_storage().data_ptr() for t in own}
        self._seen: dict[tuple[int, int], int] = {}
        super().__init__(self._pack, lambda x: x)

    @property
    def total(self) -> int:
        return sum(self._seen.values())

    def _pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._weights:
            # Of a slice of the data that slice; of an expanded tensor what is expanded.
            self._seen[storage.data_ptr(), x.data_ptr()] = min(x.nbytes, storage.nbytes())
        return x.detach()  # autograd ties it to its graph again; x itself would keep both for ever
