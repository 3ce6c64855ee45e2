"""State dicts in memory merged by a named method, and nothing written."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.backprop.inputs import FirstMoments, InputMoments, RunOrder, Sums, swept
from blr_analysis.backprop.matrices import Joint
from blr_analysis.checks import some
from blr_analysis.errors import InputError, ModelError
from blr_analysis.files import Loaded, Source
from blr_analysis.merging.at_weights import State, at_weights, state_of
from blr_analysis.merging.fates import OpenModel
from blr_analysis.merging.job import MergeSettings, Weight
from blr_analysis.merging.layers import NOISE, Moments, dense
from blr_analysis.merging.matching import MERGEABLE
from blr_analysis.merging.methods import CURVED, METHODS, Method
from blr_analysis.merging.plan import MAX_MEMORY, MergePlan, make_plan
from blr_analysis.merging.precisions import precision_in_memory
from blr_analysis.merging.stream import Memory, Outcome, stream
from blr_analysis.progress import bar, track
from blr_analysis.task import Task


@torch.no_grad()
@torch.inference_mode(False)  # also where the caller switched it on
def merged(
    base: Any,
    models: Sequence[Any],
    *,
    precisions: Sequence[Any] | None = None,
    weights: Sequence[Weight] | Weight | None = None,
    base_precision: Any = None,
    n_data: Sequence[int | None] | None = None,
    density: Sequence[Weight] | Weight = 1.0,
    tasks: Sequence[Any] | None = None,
    max_memory: int = MAX_MEMORY,
    threads: int | None = None,
    progress: bool | None = None,
    tell: Callable[[MergePlan, Outcome], object] = lambda plan, met: None,
    **settings: Any,
) -> dict[str, Tensor]:
    """:func:`blr_analysis.merge` of models in memory by a named method.

    Args:
        tell: told the plan, and what was met on the way.
        settings: of :class:`blr_analysis.merging.job.MergeSettings`; all others as there.
    """
    how = MergeSettings(**settings)
    count = len(models)
    alphas = one_each("weights", weights, count, 1.0)
    if tasks is not None:
        if how.method != "fisher" or precisions is not None:
            raise InputError('tasks= stands for precisions, with method="fisher"')
        states = [state_of(m, f"models[{t}]") for t, m in enumerate(models)]
        alphas = [float(a) for a in alphas]
        limits: Any = {"max_memory": max_memory, "threads": threads, "progress": False}
        start = merged(base, states, weights=alphas, method="linear", dtype=how.dtype, **limits)
        made = propagated(start, states, list(tasks), alphas, shrink=how.shrink, progress=progress)
        for n, t in made.items():
            if t.dtype in MERGEABLE:
                made[n] = t.to(how.out_dtype or t.dtype)
                if not bool(made[n].isfinite().all()):
                    raise ModelError(
                        f"the merge of {n!r} does not fit into {made[n].dtype}: give a wider "
                        "out_dtype"
                    )
        return made
    given = one_each("precisions", precisions, count, None)
    numbers = one_each("n_data", n_data, count, None)
    densities = one_each("density", density, count, 1.0)
    parts = [
        OpenModel(
            _loaded(f"models[{t}]", m),
            None if p is None else precision_in_memory(f"precisions[{t}]", p, n),
            a,
            d,
            frozenset(n for n, _ in m.named_buffers()) if isinstance(m, nn.Module) else frozenset(),
        )
        for t, (m, p, a, n, d) in enumerate(
            zip(models, given, alphas, numbers, densities, strict=True)
        )
    ]
    plan = make_plan(
        how,
        None if base is None else _loaded("base", base),
        parts,
        base_precision=None
        if base_precision is None
        else precision_in_memory("base_precision", base_precision, None),
        max_memory=max_memory,
        threads=threads,
    )
    reference = plan.reference
    assert isinstance(reference, Loaded)
    sink = Memory(plan.items, {n: t.device for n, t in reference.tensors.items()})
    with bar(plan.bytes_read, "merging", progress, unit="B", unit_scale=True) as shown:
        tell(plan, stream(plan, sink, shown.update))
    return sink.tensors


SETTINGS = frozenset(f.name for f in fields(MergeSettings))
ARGUMENTS = SETTINGS.union(signature(merged).parameters) - {"settings"}
OF_PRECISIONS = {*CURVED, "base_precision", "delta", "trust"} - {"precisions"}
DEFAULTS = {f.name: f.default for f in fields(MergeSettings)} | {
    p.name: p.default for p in signature(merged).parameters.values()
}


def refuse_idle(rows: Sequence[Method], given: Mapping[str, Any]) -> None:
    """Raise :class:`InputError` where an argument that is not its default is for none of these, or
    is of precisions that are not there because ``tasks`` or nothing at all stands for them."""
    tasks = given.get("tasks") is not None
    bare = given.get("precisions") is None and (tasks or given.get("method") == "auto")
    idle = {n for n in OF_PRECISIONS if bare and not (tasks and n == "shrink")}
    for name, value in given.items():
        usual = DEFAULTS.get(name)
        there = name not in idle and any(row.takes(name) for row in rows)
        if there or value is usual or value == usual:
            continue
        others = [row.name for row in METHODS.values() if row.takes(name)]
        what, instead = some([row.name for row in rows]), some(others)
        if name in idle:
            what, instead = "a merge without precisions=", "precisions="
        raise InputError(f"{name}= has no effect on {what}: leave it out, or use {instead}")


def one_each(name: str, given: Any, count: int, default: Any) -> list[Any]:
    """One value per model."""
    if given is None:
        return [default] * count
    if name in ("weights", "density") and (callable(given) or isinstance(given, int | float)):
        return [given] * count
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise InputError(f"{name} must be a list with one entry per model, got {given!r:.60}")
    if len(given) != count:
        raise InputError(f"{name} must have one entry per model: got {len(given)} for {count}")
    return list(given)


def _loaded(name: str, given: Any) -> Source:
    return Loaded(name, given.state_dict() if isinstance(given, nn.Module) else given)


def propagated(
    start: State,
    models: Sequence[State],
    tasks: Sequence[Task],
    weights: Sequence[float],
    *,
    shrink: float | None,
    progress: bool | None,
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
        progress: of the layers.

    Raises:
        InputError: not one task per model, weights below 0.
        ModelError: two tasks run other layers.

    Source: Nguyen et al., "RegMean++: enhancing effectiveness and generalization of regression mean
    for model merging", 2025.
    """
    if len(tasks) != len(models):
        raise InputError(f"{len(tasks)} tasks for {len(models)} models: give one each")
    if min(weights) < 0 or not sum(weights) > 0:
        raise InputError(f"propagated statistics need weights of at least 0, got {list(weights)}")
    orders = [_at(task, m, RunOrder()) for task, m in zip(tasks, models, strict=True)]
    repeated = {key for order in orders for key in order.repeated}
    groups, noise = _groups(orders, repeated), 0.0
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
            noise = max(noise, *(sums.noise(key, whole=True) for key in keys))
            moments.append(
                {
                    key: Moments(
                        a.cpu(),
                        1 - sums.noise(key) if shrink is None else shrink,
                        sums.looked_up(joint),
                    )
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
    if noise > NOISE:
        warnings.warn(
            f"of so few examples {noise:.0%} of a layer's moments is chance: take more",
            UserWarning,
            stacklevel=2,
        )
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
