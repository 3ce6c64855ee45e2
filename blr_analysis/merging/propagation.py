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
from blr_analysis.merging.piece import Sink
from blr_analysis.merging.stream import Memory, Outcome, stream
from blr_analysis.progress import track
from blr_analysis.task import Task


@torch.inference_mode(False)
def stream_propagated(
    plan: MergePlan, sink: Sink, report_progress: Callable[[int], object]
) -> Outcome:
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
    _check(plan)
    tasks = list(plan.job.tasks or ())
    average, outcome = _average(plan, report_progress)
    orders = [
        _sums_at(task, _tensors(plan, t, plan.reference.specs), RunOrder())
        for t, task in enumerate(tasks)
    ]
    repeated = {key for order in orders for key in order.repeated}
    groups = _groups(orders, repeated)
    in_layers = {name for group in groups for layer in group for name in layer.names}
    merged = {name: value for name, value in average.items() if name not in in_layers}
    for group in track(groups, total=len(groups), label="layers", show=tasks[0].progress):
        keys = frozenset(layer.key for layer in group)
        is_repeated = bool(keys & repeated)
        moments = [
            _moments(plan, t, task, merged, keys, repeated=is_repeated)
            for t, task in enumerate(tasks)
        ]
        for layer in group:
            layer_moments = [moments_by_layer[layer.key] for moments_by_layer in moments]
            solution = _solved(plan, layer, layer_moments)
            merged |= {name: value.to(average[name].dtype) for name, value in solution.items()}
    _put(plan, merged, sink)
    return outcome


def _check(plan: MergePlan) -> None:
    """Raise unless there is one weight, 0 or more, and one task for each model."""
    weights = [member.weight for member in plan.job.members]
    numbers = [float(weight) for weight in weights if not callable(weight)]
    varies_by_layer = len(numbers) < len(weights)
    if varies_by_layer or min(numbers) < 0 or not sum(numbers) > 0:
        raise InputError(
            f"a merge by tasks needs one weight per model, at least 0 and not all 0: got {weights}"
        )
    tasks = plan.job.tasks or ()
    if len(tasks) != len(weights):
        raise InputError(f"got {len(tasks)} tasks for {len(weights)} models: give a task per model")


def _average(
    plan: MergePlan, report_progress: Callable[[int], object]
) -> tuple[dict[str, Tensor], Outcome]:
    """The average of the models, in the dtypes that they are stored in."""
    stored = plan.reference.specs
    tensors = tuple(
        replace(tensor, spec=replace(tensor.spec, dtype=stored[tensor.name].dtype))
        for tensor in plan.tensors
    )
    memory = Memory(tensors, dict.fromkeys(stored, torch.device("cpu")))
    outcome = stream(replace(plan, tensors=tensors), memory, report_progress)
    return memory.tensors, outcome


def _tensors(plan: MergePlan, t: int, names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors of one model, by the names of the result."""
    model = plan.models[t]
    return {name: model.source.tensor(model.names[name]) for name in names}


def _moments(
    plan: MergePlan,
    t: int,
    task: Task,
    merged: State,
    keys: frozenset[str],
    *,
    repeated: bool,
) -> dict[str, Moments]:
    """Moments of the inputs of some layers, with everything below them merged.

    Raises:
        ModelError: the task does not run them.
    """
    sums = InputMoments() if repeated else FirstMoments(layers=keys)
    state = {**_tensors(plan, t, plan.reference.specs), **merged}
    _sums_at(task, state, sums, keys)
    if sums.moments.keys() != keys:
        absent = min(keys - sums.moments.keys())
        raise ModelError(
            f"task {t + 1} does not run {absent!r}: give tasks of the same architecture"
        )
    moments = {}
    for key, (joint, matrix) in sums.moments.items():
        shrink = plan.job.shrink
        if shrink is None:
            shrink = 1 - sums.noise(key)
        moments[key] = Moments(matrix.cpu(), shrink, sums.looked_up(joint))
    return moments


def _solved(plan: MergePlan, layer: Joint, moments: Sequence[Moments]) -> dict[str, Tensor]:
    """One layer's parameters, W = (Σ_t α_t W_t A_t)(Σ_t α_t A_t)⁻¹."""
    parts = []
    for member, member_moments in zip(plan.job.members, moments, strict=True):
        assert not callable(member.weight)
        parts.append(Part(float(member.weight), member_moments, takes_base=False))
    matrices = [_matrix(plan, t, layer) for t in range(len(parts))]
    groups, rows, columns = matrices[0].shape
    solve = dense(parts, None, 0.0, (groups, rows, columns))
    result, _ = solve(None, matrices, 0)
    return layer.split(result)


def _matrix(plan: MergePlan, t: int, layer: Joint) -> Tensor:
    """W_t of a layer."""
    tensors = _tensors(plan, t, layer.names)
    return layer.join({name: value.double().cpu() for name, value in tensors.items()})


def _put(plan: MergePlan, merged: State, sink: Sink) -> None:
    """Write the result, in the dtypes that are asked for."""
    for tensor in plan.tensors:
        values = merged[tensor.name].to(tensor.spec.dtype)
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise ModelError(
                f"the merge of {tensor.name!r} does not fit into {values.dtype}: give a wider "
                "out_dtype"
            )
        sink.put(tensor.name, 0, values.cpu().reshape(-1))


def _groups(orders: Sequence[RunOrder], repeated: Collection[str]) -> list[list[Joint]]:
    """Layers that are always given the same tensor together, in the order in which they run."""
    layers = orders[0].layers
    starts_group = {key for order in orders for key in order.apart} | set(repeated)
    orders_differ = any(list(order.layers) != list(layers) for order in orders)
    if orders_differ:
        starts_group |= set(layers)
    groups: list[list[Joint]] = []
    for key, layer in layers.items():
        if key in starts_group:
            groups.append([])
        groups[-1].append(layer)
    return groups


def _sums_at(task: Task, state: State, sums: Sums, layers: Collection[str] | None = None) -> Sums:
    """Sums over a task's examples, at the weights of a state."""
    with at_weights(task, state, "a model") as params:
        return swept(task, params, sums, only=layers)
