"""The posterior of earlier data as the prior of IVON and VOGN: ridge regression, and the formulas
written out."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from optimizer_makers import BATCH, N, X, Y, network
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import InitialPrecisionWarning
from blr_analysis.learning_rule.optim import OGN

KINDS = {"IVON": blr.IVON, "VOGN": blr.VOGN, "OGN": OGN}
TYPE = {"dtype": torch.float64}
BETA1 = 0.8
BETA2 = 0.9
START = 0.7


def a_posterior(model: nn.Module, seed: int = 5) -> blr.Posterior:
    """Any mean and precision."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    mean = {n: torch.randn(s, generator=generator, **TYPE) for n, s in shapes.items()}
    noise = {n: torch.rand(s, generator=generator, **TYPE) for n, s in shapes.items()}
    precision = {n: 1 + 20 * t for n, t in noise.items()}
    return blr.Posterior(mean, precision, prior_precision=1.0, n_data=30)


def make(name: str, model: nn.Module, seed: int = 3, **options: Any) -> Any:
    settings = {"lr": 0.1, "ess": N, "beta2": BETA2, "hess_init": START, **options}
    if name == "IVON":
        settings.setdefault("squares", False)
    else:
        settings["model"] = model
    generator = torch.Generator().manual_seed(seed)
    return KINDS[name](model.named_parameters(), generator=generator, **settings)


def minibatch(t: int) -> tuple[Tensor, Tensor]:
    rows = slice(BATCH * t % N, BATCH * t % N + BATCH)
    return X[rows].double(), Y[rows]


def train(model: nn.Module, optimizer: Any, start: int, stop: int) -> None:
    for t in range(start, stop):
        x, y = minibatch(t)
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def flat(tree: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tree.values()])


def gradients(model: nn.Module, theta: Tensor, t: int) -> Tensor:
    """The gradient of each example of a minibatch, ``[BATCH, P]``."""
    probe = copy.deepcopy(model)
    nn.utils.vector_to_parameters(theta, probe.parameters())
    rows = []
    for x, y in zip(*minibatch(t), strict=True):
        loss = nn.functional.cross_entropy(probe(x[None]), y[None])
        gradient = torch.autograd.grad(loss, probe.parameters())
        rows.append(torch.cat([g.flatten() for g in gradient]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["IVON", "VOGN"])
def test_ten_steps_written_out(name: str) -> None:
    model = network()
    prior = a_posterior(model)
    if name == "IVON":
        optimizer = make(name, model, prior=prior, beta1=BETA1, rescale_lr=False)
    else:
        optimizer = make(name, model, prior=prior, beta1=BETA1)
    m = flat(dict(model.named_parameters())).clone()
    m0 = flat(dict(prior.mean))
    delta = flat(prior.form.diagonal()) / N
    h = torch.full_like(m, START)
    u = torch.zeros_like(m)
    generator = torch.Generator().manual_seed(3)
    for t in range(10):
        draw = torch.empty_like(m).normal_(0.0, N**-0.5, generator=generator)
        noise = draw / (h + delta).sqrt()
        rows = gradients(model, m + noise, t)
        g = rows.mean(0)
        if name == "IVON":
            gap = N * (h + delta) * noise * g - h
            retraction = (1 - BETA2) ** 2 * gap**2 / (2 * (h + delta))
        else:
            gap = rows.square().mean(0) - h
            retraction = 0.0
        h = h + (1 - BETA2) * gap + retraction
        u = BETA1 * u + (1 - BETA1) * g
        unbiased = u / (1 - BETA1 ** (t + 1)) if optimizer.row.move.debias else u
        m = m - 0.1 * (unbiased + delta * (m - m0)) / (h + delta)
    train(model, optimizer, 0, 10)
    learned = {n: optimizer.state[p]["hess"] for n, p in model.named_parameters()}
    torch.testing.assert_close(flat(dict(model.named_parameters())), m, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(flat(learned), h, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", KINDS)
def test_around_0_with_one_precision_it_is_weight_decay(name: str) -> None:
    """With ``steps`` IVON's bound on a step depends on it too."""
    model = network()
    twin = copy.deepcopy(model)
    shapes = {n: p.shape for n, p in model.named_parameters()}
    zeros = {n: torch.zeros(s, **TYPE) for n, s in shapes.items()}
    constant = {n: torch.full(s, 3.0, **TYPE) for n, s in shapes.items()}
    prior = blr.Posterior(zeros, constant, prior_precision=3.0, n_data=1)
    options: dict[str, Any] = {}
    if name == "IVON":
        options = {"squares": True, "steps": 8}
    by_posterior = make(name, model, prior=prior, **options)
    by_decay = make(name, twin, weight_decay=3.0 / N, **options)
    train(model, by_posterior, 0, 8)
    train(twin, by_decay, 0, 8)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)
        hess = by_decay.state[q]["hess"]
        torch.testing.assert_close(by_posterior.state[p]["hess"], hess, rtol=1e-12, atol=1e-13)


def two_batches() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The columns of the first are orthogonal: its posterior is diagonal."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 4, generator=generator, **TYPE)
    noise = torch.randn(50, generator=generator, **TYPE)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0], **TYPE) + noise
    x1 = torch.linalg.qr(x[:20]).Q * torch.tensor([3.0, 4.0, 5.0, 6.0], **TYPE)
    return (x1, y[:20]), (x[20:], y[20:])


@pytest.mark.parametrize("name", KINDS)
def test_of_two_batches_it_learns_the_ridge_solution_of_both(name: str) -> None:
    """OGN takes its gradients at the mean and gets there to rounding. The others draw weights,
    whose noise averages out as 1/√t."""
    (x1, y1), (x2, y2) = two_batches()
    first = x1.T @ x1 + torch.eye(4, **TYPE)
    m1 = torch.linalg.solve(first, x1.T @ y1)
    precision = first + x2.T @ x2
    expected = torch.linalg.solve(precision, x1.T @ y1 + x2.T @ y2)
    model = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(m1)
    task = blr.Task(model, (x1, y1), likelihood="gaussian")
    prior = blr.fit_laplace(task, structure="full", prior_precision=1.0)
    optimizer = make(name, model, prior=prior, ess=30, beta1=0.0, beta2=0.99, hess_init=2.0)
    for t in range(300 if name == "OGN" else 600):
        optimizer.param_groups[0]["lr"] = 0.2 if name == "OGN" else 0.5 / (1 + t / 20)
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            (0.5 * (model(x2)[:, 0] - y2).square()).mean().backward()
        optimizer.step()
    actual = model.weight.detach()[0]
    deviation = precision.inverse().diagonal().sqrt()
    error = ((actual - expected) / deviation).abs().max()
    alone = torch.linalg.solve(x2.T @ x2 + torch.eye(4, **TYPE), x2.T @ y2)
    assert ((alone - expected) / deviation).abs().max() > 1
    assert error < (1e-9 if name == "OGN" else 0.2)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_captured_has_the_prior(name: str) -> None:
    model = network()
    prior = a_posterior(model)
    optimizer = make(name, model, prior=prior)
    train(model, optimizer, 0, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InitialPrecisionWarning)  # of six steps
        q = blr.Posterior.from_optimizer(optimizer, model)
    weight_of_start = BETA2**6
    for n, p in model.named_parameters():
        hess = optimizer.state[p]["hess"] - weight_of_start * START
        of_data = N * (hess / (1 - weight_of_start)).clamp(min=0.0)
        torch.testing.assert_close(q.precision(n), of_data + prior.precision(n), rtol=1e-9, atol=0)
    ones = {n: torch.ones_like(m) for n, m in q.mean.items()}
    torch.testing.assert_close(q.prior.times(ones), dict(prior.form.diagonal()))
    gap = {n: p.detach() - prior.mean[n] for n, p in model.named_parameters()}
    torch.testing.assert_close(q.prior.gap(q.mean), gap)
    again = blr.VOGN(model.parameters(), 0.1, N, model=model, prior=q)
    assert torch.equal(again.state[model[0].weight]["prior_mean"], model[0].weight)


@pytest.mark.parametrize("name", KINDS)
def test_a_state_goes_on_with_its_prior(name: str) -> None:
    model = network()
    optimizer = make(name, model, prior=a_posterior(model))
    train(model, optimizer, 0, 3)
    twin = copy.deepcopy(model)
    resumed = make(name, twin, prior=a_posterior(twin, seed=6))
    resumed.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 3, 6)
    train(twin, resumed, 3, 6)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
