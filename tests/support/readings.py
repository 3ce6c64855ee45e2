"""The engine's view of a case: its task, its Jacobians, and how its parameters are read."""

from __future__ import annotations

from functools import cache

import torch
from models import Case, seeded
from oracles import dense_ggn, dense_jacobian
from torch import Tensor
from zoo import CASES

from blr_analysis.backprop.engine import chunks
from blr_analysis.backprop.plan import plan_for
from blr_analysis.task import Task

EXACT = 1e-10  # relative, in float64


def task_of(case: Case, likelihood: str | None = None) -> Task:
    """A task on a case's inputs with targets that go with its outputs."""
    run = case.forward or (lambda model, batch: (model(batch[0]), batch[1]))
    with torch.no_grad():
        outputs = run(case.model, (case.inputs.clone(), None))[0]
    n = len(outputs)
    width = outputs[0].numel()
    kind = likelihood or ("categorical" if width > 1 else "gaussian")
    spread = torch.linspace(-1, 1, n, dtype=outputs.dtype).unsqueeze(1).expand(n, width)
    targets = torch.arange(n) % width if kind == "categorical" else spread
    return Task(case.model, (case.inputs, targets), likelihood=kind, forward=case.forward)


@cache
def example(name: str) -> tuple[Task, Tensor, Tensor]:
    """A case's task, brute-force Jacobians and dense GGN, taken once."""
    with seeded(0):
        task = task_of(CASES[name]())
    jacobian = dense_jacobian(task, task.parameters())
    return task, jacobian, dense_ggn(task, jacobian)


def jacobian_of(task: Task, chunk_size: int | None, indices: Tensor | None = None) -> Tensor:
    """The engine's Jacobians, ``[n, C, P]``."""
    params = task.parameters()
    parts = []
    for chunk in chunks(task, params, size=chunk_size, indices=indices):
        b, c = chunk.outputs.shape
        actual = {n: g for term in chunk.jacobian_terms() for n, g in term.jacobian().items()}
        columns = [
            actual[n].reshape(b, c, -1) if n in actual else p.new_zeros(b, c, p.numel())
            for n, p in params.items()
        ]
        parts.append(torch.cat(columns, dim=2))
    return torch.cat(parts)


def ways(task: Task) -> dict[str, str]:
    """Parameter → how its gradients are read."""
    plan = plan_for(task, task.parameters())
    way_of: dict[str, str] = {}
    for unit in plan.units:
        way = unit.rule.__name__ if unit.rule else unit.path
        way_of |= dict.fromkeys(unit.names.values(), way)
    return way_of | dict.fromkeys(plan.whole_model, "whole model")
