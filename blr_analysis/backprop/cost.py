"""How much memory one example takes, measured on a plan's probe: what sets the chunk size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from blr_analysis.backprop.layout import probe_indices
from blr_analysis.backprop.reading import Plan
from blr_analysis.backprop.record import Recording, Visit, fetched, record
from blr_analysis.backprop.terms import Term
from blr_analysis.task import Task, parameter_places

SCORED = 3  # copies of a sequence's outputs that are held at once beside those of its last layer


def cost_of(
    plan: Plan,
    task: Task,
    params: Mapping[str, Tensor],
    recording: Recording,
    terms: list[Term],
) -> Callable[[int], float]:
    """Numbers held per example as a function of the columns K: graph, inputs, gradients."""
    visits = recording.visits
    probe = probe_indices(task.n_data)[0]
    batch = len(probe)
    own = [*task.model.parameters(), *task.model.buffers(), *params.values()]
    graph = _saved(
        own,
        lambda: record(
            task,
            params,
            fetched(task, probe),
            plan.units,
            shared=plan.shared,
            size=batch,
            indices=probe,
        ),
    )
    # torch.func holds the graph of one module at a time, and its gradients of one column.
    loose = [visit for visit in visits if visit.unit.rule is None]
    with task.evaluation():
        alone = max((_saved(own, lambda v=visit: _again(v)) for visit in loose), default=0)
    outputs = sum(leaf.numel() for visit in visits for leaf in visit.outputs) / batch
    scored = recording.outputs.numel() / batch if task.likelihood.is_sequence else 0.0
    costs = [term.cost() for term in terms]
    inputs, dense = sum(c.inputs for c in costs), sum(c.column for c in costs)

    def floats(columns: int) -> float:
        kept = (graph + 2 * alone) / batch + 2 * inputs
        gradients = (columns + 3) * outputs + 2.5 * columns * dense
        layer = max((c.gram(columns) for c in costs), default=0)
        return kept + gradients + layer + SCORED * scored

    return floats


def batch_numbers(batch: Any) -> int:
    """How many numbers the tensors of a batch hold."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    return sum(x.numel() for x in tree_leaves(parts) if isinstance(x, Tensor))


def _saved(own: list[Tensor], run: Callable[[], object]) -> int:
    """How many numbers autograd keeps for a backward pass through ``run``, weights apart."""
    kept: dict[int, int] = {}
    weights = {t.untyped_storage().data_ptr() for t in own}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            size = min(tensor.numel(), storage.nbytes() // tensor.element_size())
            kept[storage.data_ptr()] = max(size, kept.get(storage.data_ptr(), 0))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    return sum(kept.values())


def _again(visit: Visit) -> object:
    module: nn.Module = visit.unit.module
    with torch.enable_grad():
        leaves = {n: p.detach().requires_grad_() for n, p in parameter_places(module).items()}
        return functional_call(module, leaves, visit.args, visit.kwargs, tie_weights=False)
