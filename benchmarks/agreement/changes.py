"""Our leave-one-out and class-removal estimates of a case: one function per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import blr_analysis as blr
from benchmarks.agreement.cases import Case
from benchmarks.agreement.influences import FULL

REFINED = 48  # examples left out by a descent, 12 passes over the data each


def structures(case: Case) -> list[str]:
    """What is worth its time."""
    return [s for s in case.structures if s != "full" or case.size <= FULL]


def left_out(case: Case) -> dict[str, Callable[[], Tensor]]:
    """Name → rise of each examined example's own loss ``[L]``."""
    assert case.left_out is not None
    chosen = case.left_out.indices

    def estimate(structure: str, correction: str, scaled: bool = False, refine: int = 0) -> Tensor:
        task = case.task()
        q = case.fit(structure)
        if scaled:
            q = blr.calibrate(task, q)
        found = blr.leave_one_out(task, q, correction=correction, refine=refine)
        return (found.losses - found.losses_before)[chosen]

    found: dict[str, Callable[[], Tensor]] = {}
    for structure in structures(case):
        for correction in ("first_order", "cavity"):
            name = f"{structure}, {correction.replace('_', ' ')}"
            found[name] = lambda a=structure, b=correction: estimate(a, b)
        # of the correction that "auto" stands for
        usual = "cavity" if structure in ("lowrank", "full") else "first_order"
        name = f"{structure}, {usual.replace('_', ' ')}, refine={REFINED}"
        found[name] = lambda a=structure, b=usual: estimate(a, b, refine=REFINED)
        name = f"{structure}, {usual.replace('_', ' ')}, calibrated"
        found[name] = lambda a=structure, b=usual: estimate(a, b, True)
    return found


def removals(case: Case) -> dict[str, Callable[[], tuple[Tensor, float | None]]]:
    """Name → rise of the mean test loss by each removal ``[G]``, and the passes over the data."""
    assert case.removed is not None
    truth = case.removed

    def estimate(structure: str, **options: Any) -> tuple[Tensor, float | None]:
        task = case.task()
        tests = case.test_task(task)
        q = case.fit(structure)
        rises = []
        passes = []
        for group in truth.indices:
            found = blr.what_if(task, q, remove=group, evaluate=tests, **options)
            rises.append(found.nll - found.before.nll)
            passes.append(found.passes)
        return torch.tensor(rises), sum(passes) / len(passes)

    found: dict[str, Callable[[], tuple[Tensor, float | None]]] = {
        f"{s}, solver posterior": lambda s=s: estimate(s, solver="posterior")
        for s in structures(case)
    }
    tenth = max(2, round(truth.passes / 10))
    for structure in [s for s in ("kron", "lowrank", "diag") if s in structures(case)]:
        for words, passes in (("a tenth of retraining's passes", tenth), ("60 passes", 60)):
            name = f"{structure}, solver cg, {words}"
            found[name] = lambda s=structure, k=passes: estimate(s, solver="cg", passes=k)
    return found
