"""Preconditioned conjugate gradients against dense solves in float64."""

from __future__ import annotations

import pytest
import torch
from oracles import relative
from parts import normal
from sklearn.datasets import load_digits
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.posterior.structures import Diagonal
from blr_analysis.sensitivity.curvature import Precision, cg


def spd(n: int, seed: int = 0) -> Tensor:
    a = normal(n, n, seed=seed)
    return a @ a.T + torch.eye(n, dtype=a.dtype)


def times(matrix: Tensor):
    return lambda v: {"w": v["w"] @ matrix}


def digits_task(n: int = 300) -> blr.Task:
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels[:n]) / 16, torch.tensor(labels[:n])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10)).double()
    fit = torch.optim.LBFGS(model.parameters(), max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        fit.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        loss = loss + 0.5 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    fit.step(closure)
    return blr.Task(model, (x, y))


def test_solves_the_dense_system() -> None:
    matrix, b = spd(20), normal(20, seed=3)
    found = cg(times(matrix), {"w": b}, tolerance=1e-12)
    assert bool(found.converged)
    assert relative(found.x["w"], torch.linalg.solve(matrix, b)) < 1e-10
    assert found.iterations == len(found.history)
    assert found.history[-1] == pytest.approx(float(found.residual))


def test_several_systems_are_those_of_separate_runs() -> None:
    matrix, b = spd(12), normal(3, 2, 12, seed=3)
    b[0, 0] = 0
    inverse = Diagonal({"w": matrix.diagonal()})
    settings = dict(preconditioner=inverse, tolerance=1e-9)
    found = cg(times(matrix), {"w": b}, batch_dims=2, **settings)
    assert found.converged.shape == (3, 2)
    assert bool(found.converged.all())
    assert not bool(found.x["w"][0, 0].any())
    for i in range(3):
        for j in range(2):
            alone = cg(times(matrix), {"w": b[i, j]}, **settings)
            assert alone.iterations <= found.iterations
            assert relative(found.x["w"][i, j], alone.x["w"]) < 1e-10 or not bool(b[i, j].any())


def test_the_exact_inverse_as_preconditioner_takes_one_iteration() -> None:
    task = digits_task()
    q = blr.fit_laplace(task, structure="full", prior_precision=1.0, progress=False)
    exact = Precision(task, q.mean, 1.0)
    b = {n: normal(*m.shape, seed=i) for i, (n, m) in enumerate(q.mean.items())}
    found = cg(exact.times, b, preconditioner=q, tolerance=1e-8, progress=False)
    assert (found.iterations, bool(found.converged)) == (1, True)
    expected = q.covariance_product(b)
    for name, x in found.x.items():
        assert relative(x, expected[name]) < 1e-9


@pytest.mark.parametrize(("structure", "tolerance"), [("kron", 0.1), ("lowrank", 1e-6)])
def test_the_posterior_saves_iterations(structure: str, tolerance: float) -> None:
    """Kronecker factors are good for a rough answer, an exact sketch for an exact one."""
    task = digits_task()
    diag, learned = (
        blr.fit_laplace(task, structure=s, prior_precision=1.0, progress=False)
        for s in ("diag", structure)
    )
    exact = Precision(task, diag.mean, 1.0)
    b = {n: normal(4, *m.shape, seed=i) for i, (n, m) in enumerate(diag.mean.items())}
    taken, solutions = [], []
    for preconditioner in (learned, diag, None):
        found = cg(
            exact.times, b, preconditioner=preconditioner, batch_dims=1, tolerance=tolerance,
            max_iterations=1000, progress=False,
        )  # fmt: skip
        assert bool(found.converged.all())
        taken.append(found.iterations)
        solutions.append(found.x)
    assert 2 * taken[0] < min(taken[1:])
    if tolerance < 1e-3:
        for other in solutions[1:]:
            for name, x in other.items():
                assert relative(x, solutions[0][name]) < 1e-4


def test_negative_curvature_stops_and_is_marked() -> None:
    matrix = torch.diag(torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64))
    b = torch.tensor([[0.1, 5.0, 0.1], [1.0, 0.0, 1.0]], dtype=torch.float64)
    found = cg(times(matrix), {"w": b}, batch_dims=1)
    assert found.indefinite.tolist() == [True, False]
    assert found.converged.tolist() == [False, True]
    assert not bool(found.x["w"][0].any())
    assert relative(found.x["w"][1], torch.tensor([1.0, 0.0, 0.5]).double()) < 1e-12


def test_bad_input_is_named() -> None:
    operator, b = times(spd(3)), {"w": normal(3)}
    with pytest.raises(InputError, match="tolerance must be positive"):
        cg(operator, b, tolerance=0)
    with pytest.raises(InputError, match="max_iterations must be a positive integer"):
        cg(operator, b, max_iterations=0)
    with pytest.raises(InputError, match="NaN or inf"):
        cg(operator, {"w": torch.full((3,), torch.nan)})
    with pytest.raises(InputError, match="no parameter"):
        cg(operator, {})
    with pytest.raises(InputError, match="preconditioner must be a posterior"):
        cg(operator, b, preconditioner=3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="leading dimensions"):
        cg(operator, {"w": normal(2, 3), "v": normal(3, 3)}, batch_dims=1)
    with pytest.raises(PosteriorError, match="preconditioner is not positive definite"):
        cg(operator, b, preconditioner=lambda v: {"w": -v["w"]})
    with pytest.raises(PosteriorError, match="NaN or inf"):
        cg(lambda v: {"w": v["w"] * torch.inf}, b)
