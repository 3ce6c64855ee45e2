"""laplace-torch as a source of covariance: ∇ℓ_jᵀ Σ ∇ℓ_i with its Σ, full and Kronecker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from laplace import Laplace
from laplace.curvature import CurvlinopsGGN
from problem import Method, Problem, main
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

LARGEST = 3000  # parameters of a full covariance


def methods(folder: Path) -> dict[str, Method]:
    problem = Problem(folder)
    size = sum(p.numel() for p in problem.model().parameters())

    def gradients(model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
        params = {n: p.detach() for n, p in model.named_parameters()}

        def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return problem.losses(functional_call(model, params, (x[None],)), y[None]).sum()

        found = vmap(grad(loss), (None, 0, 0))(params, x, y)
        return torch.cat([found[n].flatten(1) for n in params], 1)

    def fitted(structure: str) -> Any:
        model = problem.model()
        kind = "regression" if problem.likelihood == "gaussian" else "classification"
        laplace = Laplace(
            model,
            kind,
            subset_of_weights="all",
            hessian_structure=structure,
            backend=CurvlinopsGGN,
            prior_precision=problem.delta,
        )
        laplace.fit(DataLoader(TensorDataset(problem.x, problem.y), batch_size=256))
        return laplace

    def scores(structure: str) -> Tensor:
        laplace = fitted(structure)
        model = problem.model()
        test = gradients(model, problem.x_test, problem.y_test)
        if structure == "full":
            held = laplace.posterior_covariance @ test.T
        else:
            held = laplace.posterior_precision.bmm(test[:, None], exponent=-1).squeeze(1).T
        parts = zip(problem.x.split(100), problem.y.split(100), strict=True)
        return torch.cat([gradients(model, x, y) @ held for x, y in parts])

    if problem.likelihood == "bernoulli":
        return {}  # its classification is a softmax of two or more outputs
    rows: dict[str, Method] = {"laplace-torch covariance, kron": lambda: scores("kron")}
    if size <= LARGEST:
        rows["laplace-torch covariance, full"] = lambda: scores("full")
    return rows


if __name__ == "__main__":
    main(methods)
