"""Layer inputs and output gradients of one batch, caught by hooks on the layers that matter.

The forward pass runs at detached parameters. The backward passes therefore go no deeper than the
first layer of interest and never form a weight gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from blr_analysis import ranks
from blr_analysis.backprop.layers import Rule, lifted
from blr_analysis.data.outputs import check_rows
from blr_analysis.half import stored_parts
from blr_analysis.task import Task

ROUTING = ("Index", "Gather", "Scatter", "Masked", "Take", "Put", "CopySlices")
"""What autograd's names begin with for operations that move rows to places that the data choose."""
MANY_BATCHES = 4  # with more batches than this it pays to look for a larger size
MAX_EXAMPLES = 4096  # in one pass over data that are tensors
MAX_SAVED_BYTES = 64 * 2**20  # that autograd may save for such a pass
TF32_EPS = 2.0**-10

SharedOutputs = frozenset[tuple[str, int, int]]
"""Outputs that all examples share: path of the unit, number of its call, number of the output."""


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are analysed, and the rule that reads its gradients.

    Attributes:
        path: the module's name in the model.
        names: the model's names of the parameters, by the module's attribute; a parameter that
            belongs to a module inside of it stands under the model's name.
        rule: None where ``torch.func`` differentiates the module by itself.
    """

    path: str
    module: nn.Module
    names: dict[str, str]
    rule: Rule | None


@dataclass
class Visit:
    """One forward call of a unit.

    Attributes:
        occurrence: the number of the call, from 0, in its forward pass.
        args, kwargs: the arguments of the call.
        outputs: its floating outputs as tensors without numbers, which have their shapes.
        edges: the places of these outputs in autograd's graph.
        versions: input tensors, and how often each had been overwritten before the call.
        stale: whether an input was overwritten in place after the layer read it.
    """

    unit: Unit
    occurrence: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    edges: list[Any]
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    stale: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return self.unit.path, self.occurrence

    @property
    def is_plain(self) -> bool:
        """Whether one tensor goes in, as of most layers."""
        return is_plain(self.args, self.kwargs)

    def note_stale(self) -> None:
        """Set :attr:`stale`, and forget the versions."""
        self.stale = any(tensor._version != version for tensor, version in self.versions)
        self.versions = []

    def settle(self) -> None:
        """Called after the forward pass: note overwritten inputs, and release their graph."""
        self.note_stale()
        self.args, self.kwargs = tree_map(_detached, (self.args, self.kwargs))

    def shrink(self) -> None:
        """Free the memory of the inputs; their shapes stay."""
        self.args, self.kwargs = tree_map(without_numbers, (self.args, self.kwargs))


@dataclass
class Recording:
    """The outputs and targets of one batch, and the calls of its units."""

    outputs: Tensor
    targets: Tensor
    visits: list[Visit]

    def routes(self) -> bool:
        """Whether the model picks or moves rows by index on the way to its outputs."""
        return any(node.name().startswith(ROUTING) for node in graph(self.outputs))

    def backward(
        self, cotangents: Sequence[Tensor], *, last: bool = False
    ) -> list[list[list[Tensor]]]:
        """Gradients at every visit's outputs: ``[visit][output leaf][column]``.

        Args:
            cotangents: K tensors in the shape of the outputs, each for one backward pass.
            last: whether the last of these passes frees what the forward pass saved.
        """
        leaves = [leaf for visit in self.visits for leaf in visit.outputs]
        columns: list[list[Tensor]] = [[] for _ in leaves]
        for k, cotangent in enumerate(cotangents, start=1):
            frees_graph = last and k == len(cotangents)
            gradients = self._gradients(cotangent, retain_graph=not frees_graph)
            for column, gradient, leaf in zip(columns, gradients, leaves, strict=True):
                column.append(torch.zeros_like(leaf) if gradient is None else gradient.detach())
        by_visit = []
        start = 0
        for visit in self.visits:
            stop = start + len(visit.edges)
            by_visit.append(columns[start:stop])
            start = stop
        return by_visit

    def _gradients(self, cotangent: Tensor, *, retain_graph: bool) -> Sequence[Tensor | None]:
        """One backward pass to all edges; None where the outputs do not depend on an edge."""
        edges = [edge for visit in self.visits for edge in visit.edges]
        if not edges or not self.outputs.requires_grad:
            return [None] * len(edges)
        return torch.autograd.grad(
            self.outputs, edges, cotangent, retain_graph=retain_graph, allow_unused=True
        )


def record(
    task: Task,
    params: Mapping[str, Tensor],
    batch: Any,
    units: Sequence[Unit],
    *,
    shared: SharedOutputs = frozenset(),
    size: int,
    indices: Tensor | None = None,
    shapes: bool = False,
) -> Recording:
    """Run one batch, and record the inputs and outputs of the units.

    Args:
        shared: outputs that all examples share. They are lifted to one row per example, so that
            each example gets its own gradient.
        size: the number of examples in the batch.
        indices: their places in the dataset.
        shapes: whether only shapes are recorded.

    Raises:
        ModelError: the model fails, or does not return one row of outputs per example.
    """
    recorder = _Recorder(shared, size, shapes)
    with torch.inference_mode(False), torch.enable_grad(), watched(units, recorder.visit):
        outputs, targets = task.at(params).run_batch(batch, indices)
    check_rows(outputs, size)
    for visit in recorder.visits:
        visit.settle()
    return Recording(outputs, targets, recorder.visits)


@dataclass
class _Recorder:
    """Records the units' calls in one forward pass."""

    shared: SharedOutputs
    n_examples: int
    shapes_only: bool
    visits: list[Visit] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)  # their number so far, by path

    def visit(self, unit: Unit, args: Any, kwargs: Any, output: Any) -> Any:
        """Record one call; returns the output with which the model goes on."""
        inputs = tree_leaves((args, kwargs))
        leaves, structure = tree_flatten(output)
        if any(map(inside_transform, (*inputs, *leaves))):
            return output  # the model's own torch.func: its tensors mean nothing outside of it
        occurrence = self.calls[unit.path]
        self.calls[unit.path] += 1
        visit = Visit(unit, occurrence, args, kwargs, outputs=[], edges=[])
        has_several_outputs = sum(map(is_floating, leaves)) > 1
        for position, leaf in enumerate(leaves):
            if is_floating(leaf):
                # One output may be computed from another (scores, softmax(scores)). The gradient of
                # a copy counts only what follows the module.
                separate = leaf.clone() if has_several_outputs else leaf
                leaves[position] = self._with_edge(visit, separate)
        if self.shapes_only:
            visit.shrink()
            visit.edges = []
        else:
            tensors = [x for x in inputs if isinstance(x, Tensor) and not x.is_inference()]
            visit.versions = [(tensor, tensor._version) for tensor in tensors]
        self.visits.append(visit)
        return tree_unflatten(leaves, structure)

    def _with_edge(self, visit: Visit, leaf: Tensor) -> Tensor:
        """Record one output and its place in the graph; returns what the model goes on with."""
        if (visit.unit.path, visit.occurrence, len(visit.outputs)) in self.shared:
            leaf = lifted(leaf, self.n_examples)
        if leaf.requires_grad:
            visit.edges.append(get_gradient_edge(leaf))
        else:
            start = leaf.detach().requires_grad_()
            visit.edges.append(get_gradient_edge(start))
            leaf = start.clone()  # a later in-place operation must not touch a leaf
        visit.outputs.append(without_numbers(leaf))
        return leaf


@contextmanager
def watched(units: Sequence[Unit], visit: Callable[..., Any]) -> Iterator[None]:
    """Inside, every call of the units is passed to ``visit(unit, args, kwargs, output)``.

    Where that returns something else than None, the model goes on with it in place of the output.
    """
    with ExitStack() as hooks:
        for unit in units:
            hooks.callback(hooked(unit, visit).remove)
        yield


def hooked(unit: Unit, visit: Callable[..., Any]) -> Any:
    """The handle of a hook that passes a unit's calls to ``visit(unit, args, kwargs, output)``.

    A copy of the module gets a copy of the hook; the calls of the copy are ignored.
    """

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return visit(unit, args, kwargs, output) if module is unit.module else None

    return unit.module.register_forward_hook(hook, with_kwargs=True)


def is_plain(args: Any, kwargs: Any) -> bool:
    """Whether a layer is called with one tensor, as most are."""
    return len(args) == 1 and not kwargs and isinstance(args[0], Tensor)


def is_floating(leaf: Any) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def inside_transform(leaf: Any) -> bool:
    """Whether this is a tensor inside of a ``torch.func`` transform."""
    return isinstance(leaf, Tensor) and is_functorch_wrapped_tensor(leaf)


def without_numbers(leaf: Any) -> Any:
    """A tensor of the same shape that stores a single 0; what is no tensor is returned as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.new_zeros(()).expand(leaf.shape)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def graph(outputs: Tensor) -> Iterator[Any]:
    """Every operation in the graph of the outputs."""
    visited: set[Any] = set()
    waiting: list[Any] = [outputs.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            waiting += [parent for parent, _ in node.next_functions]


def rounding(outputs: Tensor) -> float:
    """The eps of the coarsest dtype on the way to the outputs.

    It may be coarser than the eps of the outputs' dtype: because of half precision, autocast, a
    norm that a double model computes in single precision, or TF32 in a GPU's convolutions.
    """
    nodes = list(graph(outputs))
    dtypes = {outputs.dtype}
    for node in nodes:
        dtypes |= {metadata.dtype for metadata in getattr(node, "_input_metadata", ())}
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
    has_convolution = any("Convolution" in node.name() for node in nodes)
    if has_convolution and outputs.is_cuda and _rounds_convolutions():
        return max(TF32_EPS, coarsest)
    return coarsest


def _rounds_convolutions() -> bool:
    """Whether cuDNN's convolutions compute in TF32."""
    convolutions = getattr(torch.backends.cudnn, "conv", None)
    if convolutions is None:  # torch < 2.9
        return torch.backends.cudnn.allow_tf32
    return convolutions.fp32_precision == "tf32"


def examples_per_pass(task: Task, params: Mapping[str, Tensor], indices: Tensor) -> int:
    """How many of these examples one forward and backward pass takes.

    It is the task's batch size, unless the data are tensors and there are many batches. Tensors
    cost nothing to fetch: a pass then takes as many as MAX_SAVED_BYTES and MAX_EXAMPLES allow.
    """
    size = task.batch_size
    if not task.examples.is_tensors or len(indices) <= MANY_BATCHES * size:
        return size
    saved = SavedBytes(task, params)
    with torch.enable_grad(), saved:
        task.at(leaves_of(params)).run(indices[:size])
    fitting = size * MAX_SAVED_BYTES // max(1, saved.total)
    return max(size, min(MAX_EXAMPLES, fitting))


def leaves_of(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters as new leaves, with respect to which autograd differentiates."""
    return {name: p.detach().requires_grad_() for name, p in params.items()}


def indices_of_rank(
    task: Task, params: Mapping[str, Tensor], indices: Tensor | None = None
) -> Tensor:
    """Those of the examples ``indices`` (None: of all) that this rank visits.

    Raises:
        InputError: more ranks than examples, or ranks with other weights or data.
    """
    order = torch.arange(task.n_data) if indices is None else indices
    if ranks.count() == 1:
        return order
    ranks.check_enough(task.n_data)
    # The norms are compared between the ranks: other weights or data have other norms.
    first_example = tree_leaves(task.fetch(torch.zeros(1, dtype=torch.long)))
    norms = [x.double().norm() for x in first_example if isinstance(x, Tensor)]
    norms += [torch.linalg.vector_norm(p, dtype=torch.float64) for p in params.values()]
    return ranks.share(order, task.n_data, *(float(norm) for norm in norms))


class SavedBytes(saved_tensors_hooks):
    """Counts the bytes that autograd saves inside this context: each place once, and no weights."""

    def __init__(self, task: Task, params: Mapping[str, Tensor]) -> None:
        weights = [*task.model.parameters(), *task.model.buffers(), *params.values()]
        parts = [part for weight in weights for part in stored_parts(weight)]
        self._weights = {part.untyped_storage().data_ptr() for part in parts}
        self._bytes: dict[tuple[int, int], int] = {}
        super().__init__(self._pack, lambda x: x)

    @property
    def total(self) -> int:
        return sum(self._bytes.values())

    def _pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._weights:
            # A slice counts as the slice, not as its storage; an expanded tensor as its storage.
            n_bytes = min(x.nbytes, storage.nbytes())
            self._bytes[storage.data_ptr(), x.data_ptr()] = n_bytes
        return x.detach()  # x itself would refer to the graph, which would never be freed
