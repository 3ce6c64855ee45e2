"""Predictions averaged over a posterior, against integrals and scores done by other means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contracts import fitted
from models import Graph, mlp, seeded
from snapshots import untouched
from torch import Tensor, nn
from torch.distributions import Normal, Poisson

import blr_analysis as blr

N = 40


def data(seed: int = 0, n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def task_of(given: Any = None, **how: Any) -> blr.Task:
    return blr.Task(mlp(), data() if given is None else given, **{"batch_size": 16, **how})


def unit(model: nn.Module, n: int) -> blr.Posterior:
    """A posterior of precision 1 around a model's weights."""
    mean = {name: p.detach() for name, p in model.named_parameters()}
    ones = {name: torch.ones_like(p) for name, p in mean.items()}
    return blr.Posterior(mean, ones, prior_precision=1.0, n_data=n)


def error_of_calibration(confidence: Tensor, right: Tensor) -> float:
    """By hand, over 15 equal bins."""
    total = 0.0
    for k in range(15):
        inside = (confidence > k / 15) & (confidence <= (k + 1) / 15)
        if inside.any():
            gap = right[inside].double().mean() - confidence[inside].mean()
            total += float(inside.double().mean() * gap.abs())
    return total


@pytest.mark.parametrize("structure", ["diag", "kron", "lowrank", "full"])
@pytest.mark.filterwarnings("ignore:rank")
def test_an_average_over_the_draws_that_sample_gives(structure: str) -> None:
    task = task_of()
    task.model.train()
    before = torch.get_rng_state()
    q = fitted(task, structure, 5 if structure == "lowrank" else None)
    with torch.inference_mode(), untouched(task.model):
        found = q.predict(task, draws=3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)
    generator = torch.Generator().manual_seed(1)
    probs, y = torch.zeros(N, 3, dtype=torch.float64), data()[1]
    for _ in range(3):
        draw = q.sample(generator=generator)
        probs += torch.func.functional_call(task.model, draw, (data()[0],)).softmax(-1) / 3
    probs = probs.detach()
    torch.testing.assert_close(found.mean, probs)
    torch.testing.assert_close(found.losses, -probs.gather(1, y[:, None]).squeeze(1).log())
    assert found.nll == pytest.approx(nn.functional.nll_loss(probs.log(), y).item())
    right = probs.argmax(1) == y
    assert found.accuracy == pytest.approx(right.double().mean().item())
    ece = error_of_calibration(probs.max(1).values, right)
    assert found.calibration_error == pytest.approx(ece)
    assert f"nll={found.nll:.4g}" in repr(found) and "draws=3" in repr(found)


def test_linear_regression_in_closed_form() -> None:
    """y ~ N(x m, σ² + x Σ xᵀ), approached by many draws."""
    x = torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=torch.float64)
    y = torch.tensor([0.5, -1.0], dtype=torch.float64)
    with seeded(0):
        model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    precision = torch.tensor([[4.0, 10.0]], dtype=torch.float64)
    mean = model.weight.detach().clone()
    q = blr.Posterior({"weight": mean}, {"weight": precision}, prior_precision=1.0, n_data=2)
    task = blr.Task(model, (x, y), likelihood=blr.Gaussian(variance=0.3), progress=False)
    found = q.predict(task, draws=800, generator=torch.Generator().manual_seed(0))
    spread = (0.3 + x.square() @ (1 / precision).mT).sqrt().squeeze(1)
    exact = -Normal(x @ mean.squeeze(0), spread).log_prob(y)
    torch.testing.assert_close(found.losses, exact, rtol=0, atol=0.1)
    torch.testing.assert_close(found.mean.squeeze(1), x @ mean.squeeze(0), rtol=0, atol=0.1)
    assert found.accuracy is found.calibration_error is None


def test_losses_are_minus_log_densities_or_say_what_they_are() -> None:
    x, y = torch.linspace(-1, 1, 9).double()[:, None], torch.arange(9.0).double()[:, None]
    free = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    mean = Graph(lambda m, x: torch.cat((m.free + x, torch.full_like(x, 2.0)), -1), free=free)
    rate = nn.Linear(1, 1).double()
    cases: list[tuple[nn.Module, Any, Tensor | None, str]] = [
        (mean, nn.GaussianNLLLoss(), -Normal(x, 2**0.5).log_prob(y), "nll="),
        (mean, nn.GaussianNLLLoss(full=True), -Normal(x, 2**0.5).log_prob(y), "nll="),
        (rate, nn.PoissonNLLLoss(), -Poisson(rate(x).exp()).log_prob(y), "nll="),
        (rate, nn.MSELoss(), (rate(x) - y) ** 2, "squared error="),
        (rate, nn.HuberLoss(), None, "Huber"),
    ]
    for model, loss, truth, word in cases:
        task = blr.Task(model, (x, y), likelihood=loss)
        told = blr.fit_laplace(task, structure="diag", prior_precision=1.0).predict(task, draws=0)
        assert word in repr(told) and ("nll=" in repr(told)) is (word == "nll=")
        if truth is not None:
            torch.testing.assert_close(told.losses, truth.detach().flatten())


def test_several_labels_are_right_together() -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = (x + 0.8 * x.flip(0) > 0).float()
    task = blr.Task(nn.Linear(3, 3), (x, y), likelihood="bernoulli")
    told = unit(task.model, 40).predict(task, draws=0)
    p = task.model(x).sigmoid().detach()
    assert told.accuracy == pytest.approx(((p > 0.5) == (y > 0)).all(1).float().mean().item())
    confidence = torch.maximum(p, 1 - p).flatten().double()
    ece = error_of_calibration(confidence, ((p > 0.5) == (y > 0)).flatten())
    assert told.calibration_error == pytest.approx(ece)


def test_how_a_model_was_trained_is_no_part_of_what_it_predicts() -> None:
    weights = torch.tensor([1.0, 5.0, 9.0])
    loss = nn.CrossEntropyLoss(weight=weights, label_smoothing=0.2)
    q = fitted(task_of(), "diag", None)
    plain, weighted = (q.predict(task_of(**how), 0).nll for how in ({}, {"likelihood": loss}))
    assert weighted == pytest.approx(plain)


@pytest.mark.parametrize("probabilities", [False, True])
def test_ignored_targets_do_not_count(probabilities: bool) -> None:
    x, y = data()
    ignored = y.clone()
    ignored[: N // 2] = -100
    loss = nn.CrossEntropyLoss(ignore_index=-100)
    q = fitted(task_of(), "diag", None)
    some = q.predict(task_of((x, ignored), likelihood=loss), 0)
    rest = y[N // 2 :]
    rest = nn.functional.one_hot(rest, 3).double() if probabilities else rest
    half = q.predict(task_of((x[N // 2 :], rest)), 0)
    assert some.nll == pytest.approx(half.nll) and some.accuracy == half.accuracy
    assert some.calibration_error == pytest.approx(half.calibration_error)


def test_tokens_each_have_a_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).double()
    ids, y = torch.randint(7, (5, 6)), torch.randint(7, (5, 6))
    y[0, 3:] = -100
    q, task = unit(model, 5), blr.Task(model, (ids, y), likelihood="tokens")
    found = q.predict(task, 2, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    draws = [q.sample(generator=generator) for _ in range(2)]
    probs = sum(torch.func.functional_call(model, d, (ids,)).softmax(-1) / 2 for d in draws)
    expected = nn.functional.nll_loss(probs.log().flatten(0, 1), y.flatten(), reduction="none")
    torch.testing.assert_close(found.losses, expected[y.flatten() != -100].detach())
    assert found.mean is None and len(found.losses) == 27
