"""State dicts in memory merged by a named method, and nothing written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import some
from blr_analysis.errors import InputError
from blr_analysis.files import Loaded, Source
from blr_analysis.merging.at_weights import state_of
from blr_analysis.merging.fates import OpenModel
from blr_analysis.merging.job import MergeSettings, Weight
from blr_analysis.merging.matching import MERGEABLE
from blr_analysis.merging.methods import CURVED, METHODS, Method
from blr_analysis.merging.plan import MAX_MEMORY, MergePlan, make_plan
from blr_analysis.merging.precisions import precision_in_memory
from blr_analysis.merging.propagation import check_propagates, in_dtypes, propagated
from blr_analysis.merging.stream import Memory, Outcome, stream
from blr_analysis.progress import bar
from blr_analysis.task import unwrapped


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
        check_propagates(how.method, precisions, alphas)
        states = [state_of(m, f"models[{t}]") for t, m in enumerate(models)]
        alphas = [float(a) for a in alphas]
        limits: Any = {"max_memory": max_memory, "threads": threads, "progress": False}
        start = merged(base, states, weights=alphas, method="linear", dtype=how.dtype, **limits)
        made = propagated(start, states, list(tasks), alphas, shrink=how.shrink, progress=progress)
        wanted = {n: how.out_dtype or t.dtype for n, t in made.items() if t.dtype in MERGEABLE}
        return in_dtypes(made, wanted)
    given = one_each("precisions", precisions, count, None)
    numbers = one_each("n_data", n_data, count, None)
    densities = one_each("density", density, count, 1.0)
    parts = [
        OpenModel(
            _loaded(f"models[{t}]", m),
            None if p is None else precision_in_memory(f"precisions[{t}]", p, n),
            a,
            d,
            frozenset(n for n, _ in unwrapped(m).named_buffers())
            if isinstance(m, nn.Module)
            else frozenset(),
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
    if bare and not tasks:
        idle.add("weights")  # of "auto", which then tries its own alone
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
    return Loaded(name, unwrapped(given).state_dict() if isinstance(given, nn.Module) else given)
