"""pydvl: influence functions with an explicit Hessian or Gauss-Newton, CG, EK-FAC, Nyström."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from problem import Method, Problem, main
from pydvl.influence import InfluenceMode
from pydvl.influence.torch import (
    CgInfluence,
    DirectInfluence,
    EkfacInfluence,
    NystroemSketchInfluence,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

LARGEST = 3000  # parameters of an explicit Hessian


def methods(folder: Path) -> dict[str, Method]:
    exact = Problem(folder, torch.float64)
    single = Problem(folder)
    size = sum(p.numel() for p in exact.model().parameters())
    damping = exact.delta / exact.n

    def scores(kind: Any, problem: Problem, **options: Any) -> Tensor:
        def loss(outputs: Tensor, y: Tensor) -> Tensor:
            return problem.losses(outputs, y).mean()

        model = problem.model()
        if kind is EkfacInfluence:
            influence = kind(model, **options)
        else:
            influence = kind(model, loss, **options)
        influence = influence.fit(DataLoader(TensorDataset(problem.x, problem.y), batch_size=256))
        found = influence.influences(
            problem.x_test, problem.y_test, problem.x, problem.y, mode=InfluenceMode.Up
        )
        return found.T / problem.n  # its curvature is a mean over the examples

    rows: dict[str, Method] = {}
    if size <= LARGEST:
        rows["pydvl direct"] = lambda: scores(DirectInfluence, exact, regularization=damping)
    rows["pydvl CG"] = lambda: scores(
        CgInfluence, exact, regularization=damping, solve_simultaneously=True, maxiter=50
    )
    rows["pydvl Nyström, rank 200"] = lambda: scores(
        NystroemSketchInfluence, exact, regularization=damping, rank=min(200, size // 2)
    )
    layers = [m for m in exact.model().modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    if exact.likelihood == "categorical" and all(isinstance(m, nn.Linear) for m in layers):
        rows["pydvl EK-FAC"] = lambda: scores(
            EkfacInfluence, single, update_diagonal=True, hessian_regularization=damping
        )
    return rows


if __name__ == "__main__":
    main(methods)
