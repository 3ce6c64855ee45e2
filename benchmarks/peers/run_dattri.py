"""dattri: influence functions with an explicit Hessian, conjugate gradients, EK-FAC; TRAK."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dattri.algorithm.influence_function import (
    IFAttributorCG,
    IFAttributorEKFAC,
    IFAttributorExplicit,
)
from dattri.task import AttributionTask
from problem import Method, Problem, main
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

LARGEST = 3000  # parameters of an explicit Hessian
ROOM = 10**8  # numbers


def methods(folder: Path) -> dict[str, Method]:
    problem = Problem(folder, torch.float64)
    model = problem.model()
    size = sum(p.numel() for p in model.parameters())

    def mean(losses: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
        def of(params: dict[str, Tensor], batch: Any) -> Tensor:
            x, y = batch
            if x.ndim == problem.x.ndim - 1:  # inside its vmap an example has no batch dimension
                x, y = x[None], y[None]
            return losses(functional_call(model, params, (x,)), y).mean()

        return of

    def scores(kind: Any, **options: Any) -> Tensor:
        task = AttributionTask(
            loss_func=mean(problem.losses),
            target_func=mean(problem.losses),
            model=model,
            checkpoints=[{n: w for n, w in problem.weights[0].items()}],
        )
        attributor = kind(task=task, device="cpu", **options)
        train = TensorDataset(problem.x, problem.y)
        whole = DataLoader(train, batch_size=problem.n)
        parts = DataLoader(train, batch_size=256)
        # The explicit Hessian is computed anew for every test batch; conjugate gradients
        # multiply all of a batch with the Hessian at once, in N times their memory.
        at_once = max(1, min(100, ROOM // (problem.n * size)))
        if kind is IFAttributorExplicit:
            at_once = len(problem.x_test)
        test = DataLoader(TensorDataset(problem.x_test, problem.y_test), batch_size=at_once)
        attributor.cache(whole)
        return attributor.attribute(parts, test) / problem.n  # its curvature is a mean

    damping = problem.delta / problem.n
    found: dict[str, Method] = {}
    if size <= LARGEST:
        found["dattri explicit Hessian"] = lambda: scores(
            IFAttributorExplicit, regularization=damping
        )
    found["dattri CG, 10 iterations"] = lambda: scores(
        IFAttributorCG, max_iter=10, regularization=damping
    )
    if not any(isinstance(m, nn.Conv2d) for m in model.modules()):  # it knows linear layers only
        for d in problem.dampings:
            name = "dattri EK-FAC" if d == problem.delta else f"dattri EK-FAC, damping {d:g}/N"
            found[name] = lambda d=d: scores(IFAttributorEKFAC, damping=d / problem.n)
    return found


if __name__ == "__main__":
    main(methods)
