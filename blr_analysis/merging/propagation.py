"""Merging by statistics of inputs that are taken behind merged layers, as RegMean++ does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from blr_analysis.backprop.inputs import FirstMoments, InputMoments, RunOrder, Sums, swept
from blr_analysis.backprop.matrices import Joint
from blr_analysis.errors import InputError, ModelError
from blr_analysis.merging.at_weights import State, at_weights
from blr_analysis.merging.layers import Moments, Part, dense
from blr_analysis.merging.merge_plan import MergePlan
from blr_analysis.merging.stream import Memory, Outcome, Sink, stream
from blr_analysis.progress import track
from blr_analysis.task import Task


@torch.inference_mode(False)
def stream_propagated(plan: MergePlan, sink: Sink, tell: Callable[[int], object]) -> Outcome:
    """RegMean++: the inputs of every layer are taken after the layers below it were merged.

    RegMean takes a layer's inputs in each task's own model. In the merge they come from merged
    layers: so layer after layer, in the order in which the model runs them, the moments A_t of the
    inputs are taken with everything below merged, and W = (Σ_t α_t W_t A_t)(Σ_t α_t A_t)⁻¹ follows.
    L layers and T tasks take L · T sweeps of forward passes that end at the layer, with its moments
    in memory; layers that are given the same tensor (queries, keys and values) share theirs.
    Without ``shrink``, the off-diagonals of A count less by the part of them that is chance.

    One model at a time, and the merged one, are in memory. The data are ``plan.job.tasks``; what
    is no layer with a matrix is averaged.

    Raises:
        InputError: weights by layer, below 0, or all 0; not one task per model.
        ModelError: two tasks run other layers.

    Source: Nguyen et al., "RegMean++: enhancing effectiveness and generalization of regression mean
    for model merging", 2025.
    """
    weights, tasks = _checked(plan)
    stored = plan.reference.specs
    tensors = tuple(
        replace(tensor, spec=replace(tensor.spec, dtype=stored[tensor.name].dtype))
        for tensor in plan.tensors
    )
    start = Memory(tensors, dict.fromkeys(stored, torch.device("cpu")))
    met = stream(replace(plan, tensors=tensors), start, tell)
    each = list(enumerate(tasks))
    orders = [_at(task, _own(plan, t, stored), RunOrder()) for t, task in each]
    repeated = {key for order in orders for key in order.repeated}
    groups = _groups(orders, repeated)
    joined = {n for group in groups for layer in group for n in layer.names}
    merged = {n: value for n, value in start.tensors.items() if n not in joined}
    for group in track(groups, total=len(groups), label="layers", show=tasks[0].progress):
        keys = frozenset(layer.key for layer in group)
        moments = []
        for t, task in each:
            sums = InputMoments() if keys & repeated else FirstMoments(layers=keys)
            _at(task, {**_own(plan, t, stored), **merged}, sums, keys)
            if sums.moments.keys() != keys:
                left = min(keys - sums.moments.keys())
                raise ModelError(f"task {t + 1} does not run {left!r}: give tasks of one model")
            moments.append(_moments(sums, plan.job.shrink))
        for layer in group:
            parts = [Part(a, m[layer.key], False) for a, m in zip(weights, moments, strict=True)]
            states = [_own(plan, t, layer.names) for t, _ in each]
            matrices = [layer.join({n: v.double().cpu() for n, v in s.items()}) for s in states]
            g, o, i = matrices[0].shape
            result, _ = dense(parts, None, 0.0, (g, o, i))(None, matrices, 0)
            own = layer.split(result).items()
            merged |= {n: value.to(start.tensors[n].dtype) for n, value in own}
    for tensor in plan.tensors:
        values = merged[tensor.name].to(tensor.spec.dtype)
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise ModelError(
                f"the merge of {tensor.name!r} does not fit into {values.dtype}: give a wider "
                "out_dtype"
            )
        sink.put(tensor.name, 0, values.cpu().reshape(-1))
    return met


def _checked(plan: MergePlan) -> tuple[list[float], Sequence[Task]]:
    """The weights of a merge by the models' data, and these."""
    weights, tasks = [m.weight for m in plan.job.members], plan.job.tasks or ()
    plain = [float(w) for w in weights if not callable(w)]
    if len(plain) < len(weights) or min(plain) < 0 or not sum(plain) > 0:
        raise InputError(f"propagated statistics take one weight of at least 0 a model: {weights}")
    if len(tasks) != len(weights):
        raise InputError(f"{len(tasks)} tasks for {len(weights)} models: give one each")
    return plain, tasks


def _own(plan: MergePlan, t: int, names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors of one model."""
    model = plan.models[t]
    return {name: model.source.tensor(model.names[name]) for name in names}


def _moments(sums: InputMoments, shrink: float | None) -> dict[str, Moments]:
    return {
        key: Moments(
            a.cpu(), 1 - sums.noise(key) if shrink is None else shrink, sums.looked_up(joint)
        )
        for key, (joint, a) in sums.moments.items()
    }


def _groups(orders: Sequence[RunOrder], repeated: Collection[str]) -> list[list[Joint]]:
    """Layers that are always given the same tensor together, in the order in which they run."""
    apart = {key for order in orders for key in order.apart} | set(repeated)
    if any(list(order.layers) != list(orders[0].layers) for order in orders):
        apart |= set(orders[0].layers)
    groups: list[list[Joint]] = []
    for key, layer in orders[0].layers.items():
        if key in apart:
            groups.append([])
        groups[-1].append(layer)
    return groups


def _at(task: Task, state: State, sums: Sums, only: Collection[str] | None = None) -> Sums:
    with at_weights(task, state, "a model") as params:
        return swept(task, params, sums, only=only)
