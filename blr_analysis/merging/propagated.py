"""RegMean++: the inputs of every layer are taken after the layers below it were merged.

RegMean takes a layer's inputs in each task's own model. In the merge they come from merged layers:
so layer after layer, in the order in which the model runs them, the moments A_t of the inputs are
taken with everything below merged, and W = (Σ_t α_t W_t A_t)(Σ_t α_t A_t)⁻¹ follows. L layers and
T tasks take L · T sweeps of forward passes that end at the layer, with its moments in memory;
layers that are given the same tensor, such as queries, keys and values, share theirs.

Source: Nguyen et al., "RegMean++: enhancing effectiveness and generalization of regression mean for
model merging", 2025.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from blr_analysis.backprop.inputs import FirstMoments, InputMoments, RunOrder, Sums, swept
from blr_analysis.backprop.matrices import Joint
from blr_analysis.errors import InputError, ModelError
from blr_analysis.merging.at_weights import at_weights
from blr_analysis.merging.layers import Moments, dense
from blr_analysis.progress import track
from blr_analysis.task import Task

State = Mapping[str, Tensor]


def propagated(
    start: State,
    models: Sequence[State],
    tasks: Sequence[Task],
    weights: Sequence[float],
    *,
    shrink: float = 0.9,
    progress: bool | None = None,
) -> dict[str, Tensor]:
    """The merge of the layers that multiply their inputs with a matrix.

    Args:
        start: what the other parameters are merged to.
        models: θ_t.
        tasks: the data of each, any model of these names.
        weights: α_t ≥ 0, not all 0.
        shrink: of the off-diagonals of A.
        progress: of the layers.

    Raises:
        InputError: not one task per model, weights below 0.
        ModelError: two tasks run other layers.
    """
    if len(tasks) != len(models):
        raise InputError(f"{len(tasks)} tasks for {len(models)} models: give one each")
    if min(weights) < 0 or not sum(weights) > 0:
        raise InputError(f"propagated statistics need weights of at least 0, got {list(weights)}")
    orders = [_at(task, m, RunOrder()) for task, m in zip(tasks, models, strict=True)]
    repeated = {key for order in orders for key in order.repeated}
    groups = _groups(orders, repeated)
    joined = {n for group in groups for layer in group for n in layer.names}
    merged = {n: value for n, value in start.items() if n not in joined}
    for group in track(groups, total=len(groups), label="layers", show=progress):
        keys = frozenset(layer.key for layer in group)
        moments = []
        for t, (task, model) in enumerate(zip(tasks, models, strict=True), 1):
            sums = InputMoments() if keys & repeated else FirstMoments(layers=keys)
            _at(task, {**model, **merged}, sums, keys)
            if sums.moments.keys() != keys:
                left = min(keys - sums.moments.keys())
                raise ModelError(f"task {t} does not run {left!r}: give tasks of one model")
            moments.append(
                {
                    key: Moments(a.cpu(), shrink, sums.looked_up(joint))
                    for key, (joint, a) in sums.moments.items()
                }
            )
        for layer in group:
            own = zip(weights, moments, strict=True)
            parts = [(float(alpha), part[layer.key], False) for alpha, part in own]
            matrices = [layer.join({n: m[n].double().cpu() for n in layer.names}) for m in models]
            g, o, i = matrices[0].shape
            result, _ = dense(parts, None, 0.0, (g, o, i))(None, matrices, 0)
            merged |= {n: value.to(start[n]) for n, value in layer.split(result).items()}
    return {n: merged[n] for n in start}


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
