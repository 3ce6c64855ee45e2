"""Going on to new data: exact where the curvature is diagonal and quadratic."""

from __future__ import annotations

import pytest
import torch

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.sensitivity import adapt

DELTA, NOISE = 0.5, 0.7


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row sees one weight, so that the precision is diagonal."""
    g = torch.Generator().manual_seed(seed)
    x = torch.eye(4).double()[torch.randint(4, (12,), generator=g)]
    return x, torch.randn(12, 1, generator=g).double()


def ridge(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    precision = x.mT @ x / NOISE + DELTA * torch.eye(4).double()
    return torch.linalg.solve(precision, x.mT @ y / NOISE).mT, precision.diagonal()


@pytest.mark.parametrize("targets", ["labels", "predictions"])
def test_twice_new_data_is_all_data_at_once(targets: str) -> None:
    parts = [data(seed) for seed in range(3)]
    model = torch.nn.Linear(4, 1, bias=False).double()
    model.weight.data = ridge(*parts[0])[0]
    likelihood = blr.Gaussian(NOISE)
    task = blr.Task(model, parts[0], likelihood=likelihood)
    q = blr.fit_laplace(task, structure="diag", prior_precision=DELTA, progress=False)
    for part in parts[1:]:
        new = blr.Task(model, part, likelihood=likelihood)
        step = adapt(task, q, new, memory=3, targets=targets, progress=False)
        task, q = step.task, step.posterior
        assert task.n_data == 15 and len(step.memory) == 3
    x, y = (torch.cat(column) for column in zip(*parts, strict=True))
    mean, precision = ridge(x, y)
    torch.testing.assert_close(q.mean["weight"], mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(q.precision("weight")[0], precision, rtol=1e-6, atol=1e-6)
    assert torch.equal(model.weight, ridge(*parts[0])[0])


@pytest.mark.parametrize("structure", ["kron", "lowrank"])
def test_out_of_other_structures_the_memory_is_taken_whole(structure: str) -> None:
    """S is exact here, so that S − S_M is: its mean, and its diagonal, go on."""
    g = torch.Generator().manual_seed(0)
    x, new = torch.randn(2, 30, 3, generator=g).double().unbind()
    y = torch.randn(30, 1, generator=g).double()
    model = torch.nn.Linear(3, 1, bias=False).double()
    S = x.mT @ x + DELTA * torch.eye(3)
    model.weight.data = torch.linalg.solve(S, x.mT @ y).mT
    task, more = (blr.Task(model, (part, y), likelihood="gaussian") for part in (x, new))
    q = blr.fit_laplace(task, structure=structure, prior_precision=DELTA, progress=False)
    step = adapt(task, q, more, memory=5, progress=False)
    kept, told = x[step.memory], y[step.memory]
    cavity = S - kept.mT @ kept
    around, D = torch.linalg.solve(cavity, x.mT @ y - kept.mT @ told), cavity.diagonal().diag()
    expected = D + kept.mT @ kept + new.mT @ new
    mean = torch.linalg.solve(expected, D @ around + kept.mT @ told + new.mT @ y)
    torch.testing.assert_close(step.posterior.precision("weight")[0], expected.diagonal())
    torch.testing.assert_close(step.posterior.mean["weight"], mean.mT, rtol=1e-3, atol=1e-4)
    assert not step.caveat


def test_a_memory_that_kron_holds_too_little_of_is_taken_roughly() -> None:
    """Two outputs share one factor, so that S − S_M is not positive: said."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(24, 3, generator=g).double() * torch.linspace(0.1, 9, 24)[:, None]
    task = blr.Task(torch.nn.Linear(3, 3).double(), (x, torch.arange(24) % 3))
    q = blr.fit_laplace(task, structure="kron", prior_precision=1e-3, progress=False)
    assert "kron" in repr(adapt(task, q, task, memory=22, progress=False))


def test_a_memory_is_part_of_the_data() -> None:
    model = torch.nn.Linear(4, 1, bias=False).double()
    task = blr.Task(model, data(0), likelihood="gaussian")
    q = blr.fit_laplace(task, structure="diag", prior_precision=DELTA, progress=False)
    for memory in (0, 12):
        with pytest.raises(InputError, match="memory"):
            adapt(task, q, task, memory=memory)


def test_a_memory_of_predictions_holds_functions_and_the_rest_weights() -> None:
    """Σ_M CE(p_old, f) + Σ_new ℓ + ½ (θ − θ_old)ᵀ S (θ − θ_old), S without M, by L-BFGS."""
    g = torch.Generator().manual_seed(0)
    x, new = torch.randn(2, 30, 2, generator=g).double().unbind()
    model = torch.nn.Linear(2, 2, bias=False).double()
    model.weight.data = torch.randn(2, 2, generator=g).double()
    task = blr.Task(model, (x, (x[:, 0] > 0).long()))
    q = blr.fit_laplace(task, structure="diag", prior_precision=DELTA, progress=False)
    wrong = (new[:, 0] < 0).long()
    step = adapt(
        task, q, blr.Task(model, (new, wrong)), memory=8, targets="predictions", progress=False
    )
    old, rest = model.weight.detach(), torch.ones(30).bool()
    rest[step.memory] = False
    p = (x @ old.T).softmax(1)
    spread = (p * (1 - p))[rest].T @ x[rest].square() + DELTA
    theta = old.clone().requires_grad_()
    lbfgs = torch.optim.LBFGS([theta], max_iter=200, tolerance_change=1e-14)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        said = -(p * (x @ theta.T).log_softmax(1))[~rest].sum()
        learned = torch.nn.functional.cross_entropy(new @ theta.T, wrong, reduction="sum")
        loss = said + learned + 0.5 * (spread * (theta - old).square()).sum()
        loss.backward()
        return loss

    lbfgs.step(closure)
    found = step.posterior.mean["weight"]
    assert float((theta - old).norm()) > 0.5
    torch.testing.assert_close(found, theta.detach(), rtol=1e-3, atol=1e-3)
