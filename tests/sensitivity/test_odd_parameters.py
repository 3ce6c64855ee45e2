"""Parameters without dimensions, parameters in another order in memory, and single precision."""

from __future__ import annotations

import pytest
import torch
from oracles import fit_at_rest, relative
from oracles_retraining import flat, trained
from parts import normal
from sklearn.datasets import load_digits
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.posterior.structures import Diagonal
from blr_analysis.sensitivity.curvature import Precision, cg

QUIET = {}


class Tempered(nn.Module):
    """A learned temperature, a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


@pytest.fixture
def tempered() -> blr.Task:
    return blr.Task(Tempered().double(), (normal(20, 4), torch.arange(20) % 3))


@pytest.mark.parametrize("structure", ["diag", "kron", "lowrank", "full"])
def test_a_parameter_without_dimensions(tempered: blr.Task, structure: str) -> None:
    q = fit_at_rest(tempered, structure=structure, prior_precision=1.0, **QUIET)
    influence = blr.influence(tempered, q, tempered, **QUIET)
    scores = blr.sensitivity(tempered, q, **QUIET)
    assert relative(torch.as_tensor(influence.diagonal()), scores.self_influence) < 1e-9
    assert blr.calibrate(tempered, q, 8, **QUIET).record["calibration"]["scale"] > 0
    result = blr.what_if(tempered, q, remove=[0, 1, 2], solver="cg", steps=1, **QUIET)
    assert result.moves[-1].objective < result.moves[0].objective
    assert result.parameters["scale"].shape == ()


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_the_hessian_of_a_parameter_without_dimensions(structure: str) -> None:
    model, x = Tempered().double(), normal(20, 4)
    with torch.no_grad():
        outputs, features = model(x), model.layer(x)
    task = blr.Task(model, (x, outputs), likelihood="gaussian")
    q = fit_at_rest(task, structure=structure, curvature="exact", prior_precision=2.0, **QUIET)
    assert relative(q.precision("scale"), 2 + features.square().sum()) < 1e-9


def test_a_weight_that_lies_in_memory_by_columns() -> None:
    x, y = normal(20, 5), torch.arange(20) % 3
    model = nn.Linear(5, 3).double()
    model.weight = nn.Parameter(model.weight.detach().T.contiguous().T)
    assert not model.weight.is_contiguous()
    found = []
    for m in (model, nn.Linear(5, 3).double()):
        m.load_state_dict(model.state_dict())
        task = blr.Task(m, (x, y))
        q = fit_at_rest(task, structure="lowrank", prior_precision=1.0, **QUIET)
        found.append((q.variance("weight"), q.precision("weight")))
    for one, two in zip(*found, strict=True):
        assert relative(one, two) < 1e-9


@pytest.mark.parametrize("variance", [1.0, 2500.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_descents_go_as_far_as_the_precision_allows(variance: float, dtype: torch.dtype) -> None:
    """Also where the objective is large beside what a removal changes of it."""
    x, y = normal(120, 4), 50 * normal(120, seed=1) + 150
    likelihood = blr.Gaussian(variance)
    model = trained("gaussian", x, y / variance**0.5, 1.0)
    z = torch.cat([x, torch.ones(120, 1).double()], 1)
    theta = torch.linalg.solve(z.T @ z / variance + torch.eye(5).double(), z.T @ y / variance)
    with torch.no_grad():
        model.weight.copy_(theta[None, :-1])
        model.bias.copy_(theta[-1:])
    task = blr.Task(model.to(dtype), (x.to(dtype), y.to(dtype)), likelihood=likelihood)
    q = fit_at_rest(task, structure="diag", prior_precision=1.0, **QUIET)
    result = blr.what_if(task, q, remove=range(40), solver="cg", steps="converge", **QUIET)
    kept = z[40:]
    truth = torch.linalg.solve(
        kept.T @ kept / variance + torch.eye(5).double(), kept.T @ y[40:] / variance
    )
    change = relative(flat(result.parameters)[0].double() - theta, truth - theta)
    assert change < (1e-5 if dtype == torch.float64 else 2e-2)
    full = fit_at_rest(task, structure="full", prior_precision=1.0, **QUIET)
    exact = blr.leave_one_out(task, full, **QUIET)
    fine = blr.leave_one_out(task, full, refine=5, **QUIET)
    torch.testing.assert_close(
        fine.losses - fine.losses_before,
        exact.losses - exact.losses_before,
        rtol=2e-2,
        atol=1e-4 * float(exact.losses.max()),
    )


def test_scores_of_another_posterior_are_refused(tempered: blr.Task) -> None:
    one, two = (
        fit_at_rest(tempered, structure=s, prior_precision=1.0, **QUIET) for s in ("diag", "full")
    )
    scores = blr.sensitivity(tempered, one, **QUIET)
    assert blr.leave_one_out(tempered, one, scores=scores, **QUIET).nll > 0
    with pytest.raises(InputError, match="scores are those of another posterior"):
        blr.leave_one_out(tempered, two, scores=scores, **QUIET)


# Preconditioned conjugate gradients against dense solves in float64.


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
    q = fit_at_rest(task, structure="full", prior_precision=1.0)
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
        fit_at_rest(task, structure=s, prior_precision=1.0) for s in ("diag", structure)
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
