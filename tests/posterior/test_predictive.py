"""Predictions averaged over a posterior, against integrals and scores done by other means."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from contracts import fitted
from models import Graph, mlp, seeded
from snapshots import untouched
from torch import Tensor, nn
from torch.distributions import Normal, Poisson
from torch.utils.data import TensorDataset

import blr_analysis as blr
from blr_analysis.errors import InputError

N = 40


def data(seed: int = 0, n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def task_of(examples: Any = None, **options: Any) -> blr.Task:
    examples = data() if examples is None else examples
    return blr.Task(mlp(), examples, batch_size=16, **options)


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


def without_source(q: blr.Posterior) -> blr.Posterior:
    """The same posterior, which does not say where it came from."""
    return blr.Posterior(q.mean, q.form, prior_precision=q.prior, n_data=q.n_data)


@pytest.mark.parametrize("is_linearised", [True, False], ids=["fitted", "of unknown source"])
@pytest.mark.parametrize("structure", ["diag", "kron", "lowrank", "full"])
@pytest.mark.filterwarnings("ignore:rank")
def test_an_average_over_the_draws_that_sample_gives(structure: str, is_linearised: bool) -> None:
    """A fitted posterior draws networks that are linear around its mean, by forward derivatives."""
    task = task_of()
    task.model.train()
    before = torch.get_rng_state()
    q = fitted(task, structure, 5 if structure == "lowrank" else None)
    if not is_linearised:
        q = without_source(q)
    with torch.inference_mode(), untouched(task.model):
        predictive = q.predict(task, draws=3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)
    generator = torch.Generator().manual_seed(1)
    probs = torch.zeros(N, 3, dtype=torch.float64)
    x, y = data()

    def logits_at(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(task.model, weights, (x,))

    for _ in range(3):
        weights = q.sample(generator=generator)
        if is_linearised:
            moves = {name: weights[name] - m for name, m in q.mean.items()}
            at_mean_and_step: Any = torch.func.jvp(logits_at, (q.mean,), (moves,))
            logits = at_mean_and_step[0] + q.temperature**0.5 * at_mean_and_step[1]
        else:
            logits = logits_at(weights)
        probs += logits.detach().softmax(-1) / 3
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if is_linearised else {"rtol": 1e-7, "atol": 1e-7}
    torch.testing.assert_close(predictive.mean, probs, **tolerance)
    losses = nn.functional.nll_loss(probs.log(), y, reduction="none")
    torch.testing.assert_close(predictive.losses, losses, **tolerance)
    assert predictive.nll == pytest.approx(float(losses.mean()), rel=1e-4)
    right = probs.argmax(1) == y
    assert predictive.accuracy == pytest.approx(right.double().mean().item())
    ece = error_of_calibration(probs.max(1).values, right)
    assert predictive.calibration_error == pytest.approx(ece, rel=1e-4)
    assert f"nll={predictive.nll:.4g}" in repr(predictive)
    assert "draws=3" in repr(predictive)


@pytest.mark.parametrize("delta", [1e-4, 1.0, 1e4])
def test_linearised_however_far_the_draws_are(delta: float) -> None:
    """In float32 a network is linearised as by forward derivatives in float64."""
    x, y = data()
    with seeded(0):
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    task = blr.Task(model, (x.float(), y), progress=False)
    q = blr.fit_laplace(task, structure="diag", prior_precision=delta)
    predictive = q.predict(task, draws=3, generator=torch.Generator().manual_seed(1))
    draws = torch.Generator().manual_seed(1)
    exact = copy.deepcopy(model).double()
    mean = {name: m.double() for name, m in q.mean.items()}
    probs = torch.zeros(N, 3, dtype=torch.float64)
    for _ in range(3):
        weights = q.sample(generator=draws)
        moves = {name: weights[name].double() - m for name, m in mean.items()}
        logits_and_step: Any = torch.func.jvp(
            lambda p: torch.func.functional_call(exact, p, (x,)), (mean,), (moves,)
        )
        logits, step = logits_and_step
        probs += (logits + q.temperature**0.5 * step).softmax(-1) / 3
    torch.testing.assert_close(predictive.mean.double(), probs, rtol=0, atol=0.01)


@pytest.mark.parametrize(
    ("loss", "head"),
    [
        (nn.BCELoss(), nn.Sigmoid()),
        (nn.PoissonNLLLoss(log_input=False), nn.Softplus()),
        (lambda f, y: (f - y * f.log()).sum(-1), nn.Softplus()),
    ],
    ids=["probabilities", "rates", "rates in a function"],
)
def test_outputs_with_bounds_keep_them_or_the_loss_is_refused(loss: Any, head: nn.Module) -> None:
    x, _ = data()
    y = (x[:, :1] > 0).double()
    with seeded(0):
        model = nn.Sequential(nn.Linear(4, 1), head).double()
    task = blr.Task(model, (x, y), likelihood=loss, progress=False)
    q = blr.fit_laplace(task, structure="diag", prior_precision=1e-2)
    if isinstance(loss, nn.Module):
        predictive = q.predict(task)
        assert bool(predictive.losses.isfinite().all())
        assert float(predictive.mean.min()) >= 0
    else:
        with pytest.raises(InputError, match="linearised"):
            q.predict(task)


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
    predictive = q.predict(task, draws=800, generator=torch.Generator().manual_seed(0))
    variance = 0.3 + x.square() @ (1 / precision).squeeze(0)
    exact_mean = x @ mean.squeeze(0)
    exact_losses = -Normal(exact_mean, variance.sqrt()).log_prob(y)
    torch.testing.assert_close(predictive.losses, exact_losses, rtol=0, atol=0.1)
    torch.testing.assert_close(predictive.mean.squeeze(1), exact_mean, rtol=0, atol=0.1)
    assert predictive.accuracy is None
    assert predictive.calibration_error is None


def test_losses_are_minus_log_densities_or_say_what_they_are() -> None:
    x = torch.linspace(-1, 1, 9).double()[:, None]
    y = torch.arange(9.0).double()[:, None]
    free = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def mean_and_variance(m: Any, x: Tensor) -> Tensor:
        return torch.cat((m.free + x, torch.full_like(x, 2.0)), -1)

    density = Graph(mean_and_variance, free=free)
    rate = nn.Linear(1, 1).double()
    normal_losses = -Normal(x, 2**0.5).log_prob(y)
    poisson_losses = -Poisson(rate(x).exp()).log_prob(y)
    cases: list[tuple[nn.Module, Any, Tensor | None, str]] = [
        (density, nn.GaussianNLLLoss(), normal_losses, "nll="),
        (density, nn.GaussianNLLLoss(full=True), normal_losses, "nll="),
        (rate, nn.PoissonNLLLoss(), poisson_losses, "nll="),
        (rate, nn.MSELoss(), (rate(x) - y) ** 2, "squared error="),
        (rate, nn.HuberLoss(), None, "Huber"),
    ]
    for model, loss, truth, word in cases:
        task = blr.Task(model, (x, y), likelihood=loss)
        q = blr.fit_laplace(task, structure="diag", prior_precision=1.0)
        predictive = q.predict(task, draws=0)
        assert word in repr(predictive)
        assert ("nll=" in repr(predictive)) is (word == "nll=")
        if truth is not None:
            torch.testing.assert_close(predictive.losses, truth.detach().flatten())


def test_several_labels_are_right_together() -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = (x + 0.8 * x.flip(0) > 0).float()
    task = blr.Task(nn.Linear(3, 3), (x, y), likelihood="bernoulli")
    predictive = unit(task.model, 40).predict(task, draws=0)
    p = task.model(x).sigmoid().detach()
    is_right = (p > 0.5) == (y > 0)
    share_of_right_rows = float(is_right.all(1).float().mean())
    assert predictive.accuracy == pytest.approx(share_of_right_rows)
    confidence = torch.maximum(p, 1 - p).flatten().double()
    ece = error_of_calibration(confidence, is_right.flatten())
    assert predictive.calibration_error == pytest.approx(ece)


def test_how_a_model_was_trained_is_no_part_of_what_it_predicts() -> None:
    weights = torch.tensor([1.0, 5.0, 9.0])
    loss = nn.CrossEntropyLoss(weight=weights, label_smoothing=0.2)
    q = fitted(task_of(), "diag", None)
    plain = q.predict(task_of(), 0)
    weighted = q.predict(task_of(likelihood=loss), 0)
    assert weighted.nll == pytest.approx(plain.nll)


@pytest.mark.parametrize("probabilities", [False, True])
def test_ignored_targets_do_not_count(probabilities: bool) -> None:
    x, y = data()
    ignored = y.clone()
    ignored[: N // 2] = -100
    loss = nn.CrossEntropyLoss(ignore_index=-100)
    q = fitted(task_of(), "diag", None)
    counted = q.predict(task_of((x, ignored), likelihood=loss), 0)
    targets = y[N // 2 :]
    if probabilities:
        targets = nn.functional.one_hot(targets, 3).double()
    half = q.predict(task_of((x[N // 2 :], targets)), 0)
    assert counted.nll == pytest.approx(half.nll)
    assert counted.accuracy == half.accuracy
    assert counted.calibration_error == pytest.approx(half.calibration_error)


def test_tokens_each_have_a_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).double()
    ids = torch.randint(7, (5, 6))
    y = torch.randint(7, (5, 6))
    y[0, 3:] = -100
    q = unit(model, 5)
    task = blr.Task(model, (ids, y), likelihood="tokens")
    predictive = q.predict(task, 2, generator=torch.Generator().manual_seed(0))
    probs = drawn(q, model, ids, 2).softmax(-1).mean(0)
    labels = y.flatten()
    losses = nn.functional.nll_loss(probs.log().flatten(0, 1), labels, reduction="none")
    torch.testing.assert_close(predictive.losses, losses[labels != -100])
    assert predictive.mean is None
    assert len(predictive.losses) == 27


def hand_made(probs: Tensor, labels: Tensor) -> dict[str, Any]:
    """Of probabilities ``[K, M, C]`` by their definitions."""
    mean = probs.mean(0)
    entropies = -(probs * probs.log()).sum(-1)
    entropy = -(mean * mean.log()).sum(-1)
    shares = nn.functional.one_hot(labels, mean.shape[-1])
    return {
        "variance": probs.var(0, correction=0),
        "entropy": entropy,
        "information": entropy - entropies.mean(0),
        "brier": float((mean - shares).square().sum(-1).mean()),
        "accuracy": float((mean.argmax(-1) == labels).double().mean()),
    }


def check_scores(predictive: Any, probs: Tensor, labels: Tensor) -> None:
    for name, expected in hand_made(probs, labels).items():
        torch.testing.assert_close(getattr(predictive, name), expected, msg=name)
    confidence, answer = probs.mean(0).max(-1)
    ece = error_of_calibration(confidence, answer == labels)
    assert predictive.calibration_error == pytest.approx(ece)


def drawn(q: blr.Posterior, model: nn.Module, x: Tensor, draws: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    outputs = [
        torch.func.functional_call(model, q.sample(generator=generator), (x,)).detach()
        for _ in range(draws)
    ]
    return torch.stack(outputs)


def test_how_sure_an_answer_is_by_definition() -> None:
    """And the same without labels, where no score that needs them is made up."""
    x, y = data()
    task = task_of()
    q = without_source(fitted(task, "diag", None))
    generator = torch.Generator().manual_seed(0)
    predictive = q.predict(task, 6, generator=generator)
    check_scores(predictive, drawn(q, task.model, x, 6).softmax(-1), y)
    forms: list[Any] = [x, x.numpy(), TensorDataset(x), [{"input": row} for row in x], list(x)]
    for form in forms:
        bare = blr.Task(task.model, form, batch_size=16)
        alone = q.predict(bare, 6, generator=torch.Generator().manual_seed(0))
        assert len(alone) == N
        assert "no labels" in repr(alone)
        for name in ("nll", "accuracy", "brier", "calibration_error", "losses", "targets"):
            assert getattr(alone, name) is None, name
        for name in ("mean", "variance", "entropy", "information"):
            torch.testing.assert_close(getattr(alone, name), getattr(predictive, name))
        assert "loss" not in alone.table
        with pytest.raises(blr.errors.BLRError, match="label"):
            blr.sensitivity(bare, q)


def test_a_single_network_has_no_spread() -> None:
    task = task_of()
    predictive = fitted(task, "diag", None).predict(task, 0)
    assert predictive.variance is None
    assert predictive.information is None
    assert predictive.entropy is not None


def test_entropies_of_a_normal() -> None:
    """½ log 2πe (v + σ²) and ½ log (1 + v/σ²)."""
    x = torch.randn(7, 3, dtype=torch.float64)
    model = nn.Linear(3, 2).double()
    q = unit(model, 7)
    y = torch.randn(7, 2, dtype=torch.float64)
    noise = torch.tensor([0.3, 2.0], dtype=torch.float64)
    task = blr.Task(model, (x, y), likelihood=blr.Gaussian(noise.tolist()))
    predictive = q.predict(task, 5, generator=torch.Generator().manual_seed(0))
    v = drawn(q, model, x, 5).var(0, correction=0)
    torch.testing.assert_close(predictive.variance, v)
    torch.testing.assert_close(predictive.entropy, Normal(0, (v + noise).sqrt()).entropy().sum(-1))
    torch.testing.assert_close(predictive.information, 0.5 * (1 + v / noise).log().sum(-1))
    assert predictive.brier is None
    square = q.predict(blr.Task(model, (x, y), likelihood=nn.MSELoss()), 5)
    assert square.entropy is None
    assert square.information is None
    assert square.variance is not None


IMAGES = {"categorical": "categorical", "module": nn.CrossEntropyLoss(), "tokens": "tokens"}


@pytest.mark.parametrize("likelihood", IMAGES.values(), ids=IMAGES)
def test_pixels_as_the_loss_of_torch_takes_them(likelihood: Any) -> None:
    """[B, C, H, W], in predictions, losses and gradients."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)]
    model = nn.Sequential(*layers).double()
    x = torch.randn(5, 1, 4, 6).double()
    y = torch.randint(3, (5, 4, 6))
    y[0, :2] = -100
    counts = (y != -100).flatten()
    task = blr.Task(model, (x, y), likelihood=likelihood, batch_size=2)
    q = unit(model, 5)
    predictive = q.predict(task, 3, generator=torch.Generator().manual_seed(0))
    probs = drawn(q, model, x, 3).softmax(2).movedim(2, -1)  # [draw, image, row, column, class]
    check_scores(predictive, probs.flatten(1, 3)[:, counts], y.flatten()[counts])
    assert torch.equal(predictive.example, torch.arange(5).repeat_interleave(24)[counts])
    unlabelled = blr.Task(model, x, likelihood=likelihood)
    bare = q.predict(unlabelled, 3, generator=torch.Generator().manual_seed(0))
    assert bare.nll is None
    mean = probs.flatten(1, 3).mean(0)
    torch.testing.assert_close(bare.entropy, -(mean * mean.log()).sum(-1))
    assert set(blr.acquire(unlabelled, q, 2).tolist()) < set(range(5))
    fit = blr.fit_laplace(task, structure="diag", prior_precision=1.0)
    scores = blr.sensitivity(task, fit)
    losses = nn.functional.cross_entropy(model(x), y, reduction="none").sum((1, 2))
    torch.testing.assert_close(scores.losses, losses.detach())


def test_the_picture_of_reliability() -> None:
    task = task_of()
    predictive = fitted(task, "diag", None).predict(task, 3)
    axes = predictive.plot()
    points = axes.collections[0].get_offsets()
    bins = predictive.reliability()
    assert bins is not None
    torch.testing.assert_close(torch.as_tensor(points[:, 1].data), bins.accuracy)
    with pytest.raises(blr.errors.InputError, match="with labels"):
        fitted(task, "diag", None).predict(blr.Task(task.model, data()[0])).plot()
