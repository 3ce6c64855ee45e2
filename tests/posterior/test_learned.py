"""What IVON learned of the curvature, beside the same averages by hand: without its start, or by
squared gradients where it is too noisy."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import ivon
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from blr_analysis.errors import InitialPrecisionWarning, InputError, PosteriorError
from blr_analysis.learning_rule.optim import IVON, VOGN
from blr_analysis.posterior import Posterior
from blr_analysis.posterior.laplace import fit_laplace
from blr_analysis.task import Task

N = 96
BATCH = 8
DECAY = 0.02
STARTS = {0: 0.5, 2: 3.0}  # of the layers' groups
quiet = pytest.mark.filterwarnings("ignore::blr_analysis.errors.InitialPrecisionWarning")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def groups(model: nn.Sequential) -> list[dict[str, Any]]:
    return [
        {"params": list(model[layer].parameters()), "hess_init": start}
        for layer, start in STARTS.items()
    ]


class ByHand:
    """Averages of one parameter, of the draws and gradients that a training saw."""

    def __init__(self, start: float, beta2: float) -> None:
        self.start = start
        self.beta2 = beta2
        self.h: Any = start
        self.squares: Any = 0.0
        self.left = 1.0

    def add(self, noises: list[Tensor], gradients: list[Tensor]) -> None:
        rho = 1 - self.beta2
        precision = self.h + DECAY
        products = [e * g for e, g in zip(noises, gradients, strict=True)]
        estimate = N * precision * sum(products) / len(products)
        gap = estimate - self.h
        self.h = self.h + rho * gap + rho**2 * gap**2 / (2 * precision)
        mean = sum(gradients) / len(gradients)
        self.squares = self.beta2 * self.squares + rho * mean**2
        self.left *= self.beta2

    @property
    def without_start(self) -> Tensor:
        return (self.h - self.left * self.start) / (1 - self.left)

    @property
    def mean_of_squares(self) -> Tensor:
        return self.squares / (1 - self.left)


def train(
    model: nn.Sequential, optimizer: Any, averages: dict[str, ByHand], steps: int, draws: int
) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        noises: dict[str, list[Tensor]] = defaultdict(list)
        gradients: dict[str, list[Tensor]] = defaultdict(list)
        means = {name: p.detach().clone() for name, p in model.named_parameters()}
        for _ in range(draws):
            x = torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)
            y = torch.randint(2, (BATCH,), generator=generator)
            model.zero_grad()
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                loss = cross_entropy(model(x), y)
                for name, p in model.named_parameters():
                    noises[name].append(p.detach() - means[name])
                    gradients[name].append(torch.autograd.grad(loss, p, retain_graph=True)[0])
                loss.backward()
        optimizer.step()
        for name, average in averages.items():
            average.add(noises[name], gradients[name])


def averages_of(model: nn.Sequential, beta2: float) -> dict[str, ByHand]:
    return {n: ByHand(STARTS[int(n[0])], beta2) for n, _ in model.named_parameters()}


@quiet
@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("squares", [True, False])
def test_both_averages_are_those_of_a_plain_loop(squares: bool, draws: int) -> None:
    """Also resumed in the middle, and from a saved state."""
    settings = {"lr": 0.05, "ess": N, "beta2": 0.97, "weight_decay": DECAY, "squares": squares}
    model = network()
    optimizer = IVON(groups(model), batch_size=BATCH, **settings)
    averages = averages_of(model, 0.97)
    train(model, optimizer, averages, 20, draws)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = IVON(groups(model), batch_size=BATCH, **settings)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train(model, resumed, averages, 20, draws)
    q = Posterior.from_optimizer(resumed, model, n_data=N)
    assert q.record["squares_times"] == (BATCH if squares else None)
    for name, average in averages.items():
        hessian = average.without_start.clamp_min(0)
        if squares:
            hessian = BATCH * average.mean_of_squares
        expected = N * (hessian + DECAY)
        torch.testing.assert_close(q.precision(name), expected, rtol=1e-10, atol=1e-10)


@quiet
def test_a_quadratics_hessian_is_found_and_its_standard_error_is_right() -> None:
    """Of 400 weights for each curvature; the start is four times the largest."""
    curvatures = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    weights = nn.Parameter(torch.zeros(3, 400, dtype=torch.float64))
    model = nn.Module()
    model.weights = weights
    generator = torch.Generator().manual_seed(0)
    optimizer = IVON(
        [weights],
        lr=1e-6,
        ess=N,
        hess_init=8.0,
        beta2=0.99,
        weight_decay=DECAY,
        generator=generator,
    )
    spreads = []
    for _ in range(600):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            (0.5 * curvatures[:, None] * weights.square()).sum().backward()
        optimizer.step()
    q = Posterior.from_optimizer(optimizer, model)
    assert q.record["clear"] == 1.0
    assert q.record["squares_times"] is None
    actual = q.precision("weights") / N - DECAY
    for curvature, row in zip(curvatures.tolist(), actual, strict=True):
        error = curvature * math.sqrt(2 * 0.01 / 1.99)  # ĥ is curvature · a squared normal
        spreads.append(float(row.std()) / error)
        bias = 0.5 * 0.01 * curvature  # the retraction's, of every estimate's own noise
        assert float(row.mean()) == pytest.approx(curvature + bias, abs=5 * error / 20)
    assert spreads == pytest.approx([1.0] * 3, rel=0.2)


def noisy(**options: Any) -> tuple[nn.Sequential, IVON]:
    """A short training whose h is noise."""
    model = network()
    generator = torch.Generator().manual_seed(3)
    settings = {"lr": 0.05, "ess": N, "beta2": 0.99, "weight_decay": DECAY, "hess_init": 2.0}
    optimizer = IVON(model.parameters(), generator=generator, **{**settings, **options})
    train(model, optimizer, {}, 30, 1)
    return model, optimizer


def test_noise_is_replaced_by_squares_or_said_to_be_noise() -> None:
    model, optimizer = noisy(batch_size=BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = Posterior.from_optimizer(optimizer, model)
        doubled = Posterior.from_optimizer(optimizer, model, batch_size=2 * BATCH)
    assert q.record["clear"] < 0.5
    assert q.record["initial_share"] > 0.2
    assert "squared gradients" in q.note
    assert "squared gradients" in repr(q)
    for name in q.mean:
        data_part = q.precision(name) - N * DECAY
        torch.testing.assert_close(doubled.precision(name) - N * DECAY, 2 * data_part)
    model, optimizer = noisy(hess_init=200.0)
    exact = Posterior.from_optimizer(optimizer, model, batch_size=BATCH)
    with pytest.warns(InitialPrecisionWarning, match="pass batch_size="):
        guessed = Posterior.from_optimizer(optimizer, model)
    factor = guessed.record["squares_times"] / BATCH
    for name in q.mean:
        data_part = exact.precision(name) - N * DECAY
        torch.testing.assert_close(guessed.precision(name) - N * DECAY, factor * data_part)
    model, optimizer = noisy(squares=False)
    assert "squares" not in optimizer.state[model[0].weight]
    with pytest.warns(InitialPrecisionWarning, match="mostly noise"):
        q = Posterior.from_optimizer(optimizer, model)
    assert "squares=True" in q.note


def test_without_a_batch_size_the_squares_have_the_scale_of_the_hessian() -> None:
    """Linear regression with the noise that its loss assumes: squares are the Hessian's share."""
    torch.manual_seed(0)
    n = 800
    x = torch.randn(n, 40, dtype=torch.float64) * torch.linspace(0.3, 2, 40, dtype=torch.float64)
    y = x @ torch.randn(40, 1, dtype=torch.float64) + torch.randn(n, 1, dtype=torch.float64)
    model = nn.Linear(40, 1).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    task = Task(model, (x, y), likelihood="gaussian")
    truth = fit_laplace(task, structure="diag", prior_precision=1.0)
    generator = torch.Generator().manual_seed(0)
    optimizer = IVON(
        model.parameters(),
        lr=0.02,
        ess=n,
        weight_decay=1 / n,
        hess_init=10.0,
        beta2=0.99,
        generator=generator,
    )
    for _ in range(6):
        for batch in torch.randperm(n, generator=generator).split(16):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                (0.5 * mse_loss(model(x[batch]), y[batch])).backward()
            optimizer.step()
    q = Posterior.from_optimizer(optimizer, model)
    assert q.record["squares_times"] is not None
    ratio = q.precision("weight") / truth.precision("weight")
    assert float(ratio.median()) == pytest.approx(1, abs=0.25)


@quiet
def test_below_its_start_it_is_the_prior_alone_and_not_finite_is_refused() -> None:
    model, optimizer = noisy(squares=False)
    optimizer.state[model[0].weight]["hess"][0, 0] = -0.005
    q = Posterior.from_optimizer(optimizer, model)
    assert float(q.precision("0.weight")[0, 0]) == pytest.approx(N * DECAY)
    optimizer.state[model[0].weight]["hess"][0, 0] = math.nan
    with pytest.raises(PosteriorError, match="not finite in 1 of 12"):
        Posterior.from_optimizer(optimizer, model)
    model, optimizer = noisy(squares=False, weight_decay=0.0)
    optimizer.state[model[0].weight]["hess"][0, 0] = 0.001
    q = Posterior.from_optimizer(optimizer, model)
    assert float(q.precision("0.weight")[0, 0]) == pytest.approx(N * 2.0 * 0.99**30)


def test_a_start_that_nobody_can_take_off_is_said_to_be_there(tmp_path: Path) -> None:
    """ivon-opt's saved state counts no steps."""
    model = network()
    optimizer = ivon.IVON(model.parameters(), lr=0.1, ess=N, beta2=0.9, hess_init=0.5)
    train(model, optimizer, {}, 5, 1)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    with pytest.warns(InitialPrecisionWarning, match="live optimizer"):
        q = Posterior.from_checkpoint(tmp_path / "state.pt", model)
    assert q.record["initial_share"] is None
    vector = optimizer.param_groups[0]["hess"]
    flat = torch.cat([q.precision(n).flatten() for n in q.mean])
    torch.testing.assert_close(flat, N * (vector + optimizer.param_groups[0]["weight_decay"]))


def test_squares_can_be_the_estimate_itself() -> None:
    """``hess_approx="fisher"``: B·ḡ², of the mean gradient over the draws of a step."""
    model = network()
    settings = {"lr": 0.05, "ess": N, "beta2": 0.9, "weight_decay": DECAY, "hess_init": 0.1}
    optimizer = IVON(model.parameters(), hess_approx="fisher", batch_size=BATCH, **settings)
    hess = {n: torch.full_like(p, 0.1) for n, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        for _ in range(2):
            x = torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)
            y = torch.randint(2, (BATCH,), generator=generator)
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        for name, h in hess.items():
            gap = BATCH * gradients[name] ** 2 - h
            h += 0.1 * gap + 0.01 * gap**2 / (2 * (h + DECAY))
    q = Posterior.from_optimizer(optimizer, model)
    assert "squares" not in optimizer.state[model[0].weight]
    left = 0.9**40
    for name, h in hess.items():
        expected = N * ((h - left * 0.1) / (1 - left)).clamp_min(0) + N * DECAY
        torch.testing.assert_close(q.precision(name), expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(InputError, match="needs batch_size"):
        IVON(model.parameters(), hess_approx="fisher", **settings)


@quiet
def test_states_from_before_there_were_squares_can_be_loaded() -> None:
    model, optimizer = noisy()
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        del group["squares"], group["batch_size"]
    for entry in state["state"].values():
        del entry["squares"]
    optimizer.load_state_dict(state)
    train(model, optimizer, {}, 1, 1)
    assert "squares" not in optimizer.state[model[0].weight]
    assert Posterior.from_optimizer(optimizer, model).record["clear"] is None


def test_vogns_average_is_that_of_a_plain_loop() -> None:
    """Of every example's squared gradient at the drawn weights, without its start."""
    model = network()
    beta2 = 0.9
    start = 2.0
    steps = 20
    optimizer = VOGN(
        model.parameters(), 0.05, N, model=model, beta2=beta2, weight_decay=DECAY, hess_init=start
    )
    h = {name: torch.full_like(p, start) for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        x = torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)
        y = torch.randint(2, (BATCH,), generator=generator)
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            drawn = copy.deepcopy(model)
            cross_entropy(model(x), y).backward()
        optimizer.step()
        for i in range(BATCH):
            drawn.zero_grad()
            cross_entropy(drawn(x[i : i + 1]), y[i : i + 1]).backward()
            for name, p in drawn.named_parameters():
                assert p.grad is not None
                share = 1 / BATCH * (1 - beta2)
                h[name] = (beta2 if i == 0 else 1.0) * h[name] + share * p.grad**2
    q = Posterior.from_optimizer(optimizer, model)
    left = beta2**steps
    for name, average in h.items():
        expected = N * ((average - left * start) / (1 - left) + DECAY)
        torch.testing.assert_close(q.precision(name), expected, rtol=1e-10, atol=1e-10)
        with_start = N * (average + DECAY)
        torch.testing.assert_close(q.as_drawn.precision(name), with_start, rtol=1e-10, atol=1e-10)
