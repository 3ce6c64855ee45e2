"""RegMean++: layers are merged by their inputs in the merge, one after the other."""

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
from blr_analysis.posterior.capture import tied_names
from blr_analysis.progress import track
from blr_analysis.task import Task


@torch.inference_mode(False)
def stream_propagated(
    plan: MergePlan, sink: Sink, report_progress: Callable[[int], object]
) -> Outcome:
    """Merge by RegMean++: each layer's inputs are measured behind the layers merged before it.

    RegMean measures a layer's inputs in each task's model. In the merge, however, they come from
    merged layers. Here the layers are merged in the order in which the model runs them. For each
    layer, the moments A_t of its inputs are measured with everything below it merged, and
    W = (Σ_t α_t W_t A_t)(Σ_t α_t A_t)⁻¹ follows. Without ``shrink``, the off-diagonals of A are
    multiplied by 1 less the part of them that is chance. Tensors that are no matrix of a layer are
    averaged.

    L layers and T tasks take L · T sweeps of forward passes, each of which ends at the layer.
    Layers that read the same tensor (queries, keys and values) share a sweep. Two models are in
    memory at a time, the merged one and one of the tasks', and the moments of one layer.

    Args:
        plan: the merge; its data are ``plan.job.tasks``.
        sink: where the result is written.
        report_progress: called with the bytes that were read.

    Returns:
        The outcome of the average, from which the merge starts.

    Raises:
        InputError: weights that differ by layer, are below 0, or all 0; not one task per model.
        ModelError: two tasks run different layers.

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
    tied = {first: [first, *aliases] for first, aliases in tied_names(tasks[0].model).items()}
    names_in_layers = {
        name
        for group in groups
        for layer in group
        for first in layer.names
        for name in tied.get(first, [first])
    }
    merged = {name: value for name, value in average.items() if name not in names_in_layers}
    for group in track(groups, total=len(groups), label="layers", show=tasks[0].progress):
        keys = frozenset(layer.key for layer in group)
        is_repeated = bool(keys & repeated)
        moments_of_tasks = [
            _moments(plan, t, task, merged, keys, repeated=is_repeated)
            for t, task in enumerate(tasks)
        ]
        for layer in group:
            moments = [moments_by_layer[layer.key] for moments_by_layer in moments_of_tasks]
            for first, value in _solved(plan, layer, moments).items():
                for name in average.keys() & tied.get(first, [first]):
                    merged[name] = value.to(average[name].dtype)
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
    """The average of the models in memory, in the dtypes that they are stored in."""
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
    """The moments of the inputs of some layers in task ``t``, with everything below merged.

    Args:
        merged: the tensors that are merged already.
        keys: of the layers.
        repeated: whether the model runs one of the layers several times.

    Returns:
        The moments by the layers' keys.

    Raises:
        ModelError: the task does not run the layers.
    """
    # FirstMoments ends a forward pass after the last of the layers, which run once each.
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
    """The merged parameters of one layer, W = (Σ_t α_t W_t A_t)(Σ_t α_t A_t)⁻¹, by name."""
    parts = []
    for member, member_moments in zip(plan.job.members, moments, strict=True):
        assert not callable(member.weight)
        parts.append(Part(float(member.weight), member_moments, takes_base=False))
    matrices = [_matrix(plan, t, layer) for t in range(len(parts))]
    groups, rows, columns = matrices[0].shape
    solve = dense(parts, base_factors=None, delta=0.0, shape=(groups, rows, columns))
    result, _ = solve(None, matrices, 0)
    return layer.split(result)


def _matrix(plan: MergePlan, t: int, layer: Joint) -> Tensor:
    """W_t of a layer, ``[g, O, I']`` in float64."""
    tensors = _tensors(plan, t, layer.names)
    return layer.join({name: value.double().cpu() for name, value in tensors.items()})


def _put(plan: MergePlan, merged: State, sink: Sink) -> None:
    """Write the result in the dtypes of the plan.

    Raises:
        ModelError: a number does not fit into its dtype.
    """
    for tensor in plan.tensors:
        values = merged[tensor.name].to(tensor.spec.dtype)
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise ModelError(
                f"the merge of {tensor.name!r} does not fit into {values.dtype}: give a wider "
                "out_dtype"
            )
        sink.put(tensor.name, 0, values.cpu().reshape(-1))


def _groups(orders: Sequence[RunOrder], repeated: Collection[str]) -> list[list[Joint]]:
    """The layers in the order in which they run; those that read the same tensor are one group."""
    layers = orders[0].layers
    starts_group = set(repeated)
    for order in orders:
        starts_group |= set(order.apart)
    orders_differ = any(list(order.layers) != list(layers) for order in orders)
    if orders_differ:
        starts_group |= set(layers)  # each layer is a group of its own
    groups: list[list[Joint]] = []
    for key, layer in layers.items():
        if key in starts_group:
            groups.append([])
        groups[-1].append(layer)
    return groups


def _sums_at(task: Task, state: State, sums: Sums, layers: Collection[str] | None = None) -> Sums:
    """Add up a task's examples at these weights; the pass ends behind ``layers``.

    Returns:
        ``sums``, filled.
    """
    with at_weights(task, state, "a model") as params:
        return swept(task, params, sums, only=layers)
