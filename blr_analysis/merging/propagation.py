"""Merging by statistics of inputs that are taken behind merged layers, as RegMean++ does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from blr_analysis.backprop.inputs import FirstMoments, InputMoments, RunOrder, Sums, swept
from blr_analysis.backprop.matrices import Joint
from blr_analysis.errors import InputError, ModelError
from blr_analysis.merging.at_weights import State, at_weights
from blr_analysis.merging.layers import NOISE, Moments, dense
from blr_analysis.merging.plan import MergePlan
from blr_analysis.merging.stream import Memory, Outcome, Sink, stream
from blr_analysis.progress import track
from blr_analysis.task import Task


def propagated(
    start: State,
    models: Sequence[State],
    tasks: Sequence[Task],
    weights: Sequence[float],
    *,
    shrink: float | None,
) -> dict[str, Tensor]:
    """RegMean++: the inputs of every layer are taken after the layers below it were merged.

    RegMean takes a layer's inputs in each task's own model. In the merge they come from merged
    layers: so layer after layer, in the order in which the model runs them, the moments A_t of the
    inputs are taken with everything below merged, and W = (Σ_t α_t W_t A_t)(Σ_t α_t A_t)⁻¹ follows.
    L layers and T tasks take L · T sweeps of forward passes that end at the layer, with its moments
    in memory; layers that are given the same tensor (queries, keys and values) share theirs.

    Args:
        start: what the other parameters are merged to.
        models: θ_t.
        tasks: the data of each, any model of these names.
        weights: α_t ≥ 0, not all 0.
        shrink: of the off-diagonals of A; None: 1 less the part of them that is chance, which
            moments of few examples have most of (:meth:`InputMoments.noise`).

    Raises:
        ModelError: two tasks run other layers.

    Source: Nguyen et al., "RegMean++: enhancing effectiveness and generalization of regression mean
    for model merging", 2025.
    """
    orders = [_at(task, m, RunOrder()) for task, m in zip(tasks, models, strict=True)]
    repeated = {key for order in orders for key in order.repeated}
    groups, noise = _groups(orders, repeated), 0.0
    joined = {n for group in groups for layer in group for n in layer.names}
    merged = {n: value for n, value in start.items() if n not in joined}
    for group in track(groups, total=len(groups), label="layers", show=tasks[0].progress):
        keys = frozenset(layer.key for layer in group)
        moments = []
        for t, (task, model) in enumerate(zip(tasks, models, strict=True), 1):
            sums = InputMoments() if keys & repeated else FirstMoments(layers=keys)
            _at(task, {**model, **merged}, sums, keys)
            if sums.moments.keys() != keys:
                left = min(keys - sums.moments.keys())
                raise ModelError(f"task {t} does not run {left!r}: give tasks of one model")
            noise = max(noise, *(sums.noise(key, whole=True) for key in keys))
            moments.append(_moments(sums, shrink))
        for layer in group:
            own = zip(weights, moments, strict=True)
            parts = [(float(alpha), part[layer.key], False) for alpha, part in own]
            matrices = [layer.join({n: m[n].double().cpu() for n in layer.names}) for m in models]
            g, o, i = matrices[0].shape
            result, _ = dense(parts, None, 0.0, (g, o, i))(None, matrices, 0)
            merged |= {n: value.to(start[n]) for n, value in layer.split(result).items()}
    if noise > NOISE:
        warnings.warn(
            f"of so few examples {noise:.0%} of a layer's moments is chance: take more",
            UserWarning,
            stacklevel=2,
        )
    return {n: merged[n] for n in start}


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


@dataclass(frozen=True)
class Stored(Mapping[str, Tensor]):
    """A model of a plan, every tensor read when it is looked at."""

    plan: MergePlan
    k: int

    def __getitem__(self, name: str) -> Tensor:
        return self.plan.parts[self.k].source.tensor(self._reads[name])

    @cached_property
    def _reads(self) -> dict[str, str]:
        return {item.name: item.reads[self.k] for item in self.plan.items}

    def __iter__(self) -> Iterator[str]:
        return iter(self._reads)

    def __len__(self) -> int:
        return len(self._reads)


def check_propagates(plan: MergePlan) -> list[float]:
    """The weights of a merge by the models' data.

    Raises:
        InputError: weights by layer, below 0, or all 0; not one task per model.
    """
    weights = [m.weight for m in plan.job.members]
    plain = [float(w) for w in weights if not callable(w)]
    if len(plain) < len(weights) or min(plain) < 0 or not sum(plain) > 0:
        raise InputError(f"propagated statistics take one weight ≥ 0 a model, got {weights}")
    tasks = plan.job.tasks or ()
    if len(tasks) != len(weights):
        raise InputError(f"{len(tasks)} tasks for {len(weights)} models: give one each")
    return plain


def stream_propagated(plan: MergePlan, sink: Sink, tell: Callable[[int], object]) -> Outcome:
    """:func:`propagated` in the place of :func:`blr_analysis.merging.stream.stream`: one model at a
    time, and the merged one, are in memory."""
    weights = check_propagates(plan)
    stored = plan.reference.specs
    items = tuple(replace(i, spec=replace(i.spec, dtype=stored[i.name].dtype)) for i in plan.items)
    first = replace(plan, items=items)
    start = Memory(items, dict.fromkeys(stored, torch.device("cpu")))
    met = stream(first, start, tell)
    models = [Stored(first, k) for k in range(len(first.parts))]
    made = propagated(start.tensors, models, plan.job.tasks or (), weights, shrink=plan.job.shrink)
    for item in plan.items:
        values = made[item.name].to(item.spec.dtype)
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise ModelError(
                f"the merge of {item.name!r} does not fit into {values.dtype}: give a wider "
                "out_dtype"
            )
        sink.put(item.name, 0, values.cpu().reshape(-1))
    return met
