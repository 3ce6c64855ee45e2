"""RegMean++: the inputs of every layer are taken after the layers below it were merged.

RegMean takes a layer's inputs in each task's own model. In the merge they come from merged layers:
so layer after layer, in the order in which the model runs them, the moments A_t of the inputs are
taken with everything below merged, and W = (Σ_t α_t W_t A_t)(Σ_t α_t A_t)⁻¹ follows. L layers and
T tasks take L · T sweeps of forward passes, with one layer's moments in memory.

Source: Nguyen et al., "RegMean++: enhancing effectiveness and generalization of regression mean for
model merging", 2025.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from blr_analysis.backprop.inputs import InputMoments, input_moments
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
    layers = [joint for joint, _ in _seen(tasks[0], models[0], None).moments.values()]
    joined = {n for joint in layers for n in joint.names}
    merged = {n: value for n, value in start.items() if n not in joined}
    for layer in track(layers, total=len(layers), label="layers", show=progress):
        parts, matrices = [], []
        for t, (task, model, alpha) in enumerate(zip(tasks, models, weights, strict=True), 1):
            sums = _seen(task, {**model, **merged}, layer.key)
            if sums.moments.keys() != {layer.key}:
                raise ModelError(f"task {t} does not run {layer.key!r}: give tasks of one model")
            moments = Moments(sums.moments[layer.key][1].cpu(), shrink)
            parts.append((float(alpha), moments, False))
            matrices.append(layer.join({n: model[n].double().cpu() for n in layer.names}))
        g, o, i = matrices[0].shape
        result, _ = dense(parts, None, 0.0, (g, o, i))(None, matrices)
        merged |= {n: value.to(models[0][n]) for n, value in layer.split(result).items()}
    return {n: merged[n] for n in start}


def _seen(task: Task, state: State, only: str | None) -> InputMoments:
    with at_weights(task, state, "a model") as params:
        return input_moments(task, params, only=only, progress=False)
