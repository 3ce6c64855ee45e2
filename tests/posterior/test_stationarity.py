"""At the minimum or not: closed forms, converged and stopped models, another loss than named."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path

import pytest
import torch
from models import classes, minimised, randomised
from oracles import dense_jacobian, flatten
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import PosteriorWarning
from blr_analysis.posterior.facts import Calibration
from blr_analysis.posterior.minimum import Stationarity
from blr_analysis.posterior.stationarity import stationarity

DELTA = 2.0
FIFTEEN = torch.tensor([15.0, 1.0, 1.0], dtype=torch.float64)


def trained(
    seed: int, steps: int, weight: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> tuple[blr.Task, blr.Posterior]:
    """A logistic regression after so many L-BFGS steps on the (weighted) sum of losses."""
    data = classes(seed, dtype)
    weight = None if weight is None else weight.to(dtype)
    model = minimised(nn.Linear(4, 3).to(dtype), data, DELTA, weight=weight, steps=steps)
    task = blr.Task(model, data)
    return task, blr.fit_laplace(task, structure="full", prior_precision=DELTA)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(2))
def test_converged_stopped_and_of_another_loss(seed: int, dtype: torch.dtype) -> None:
    task, q = trained(seed, 200, dtype=dtype)
    converged = stationarity(task, q)
    assert converged.at_minimum
    assert converged.decrement < 1e-4
    assert converged.least_group == 1
    assert q.at_minimum
    assert q.note == ""
    assert "at its minimum" in repr(q)
    weighted = blr.Task(
        task.model, task.examples, likelihood=nn.CrossEntropyLoss(FIFTEEN.to(dtype))
    )
    assert not stationarity(weighted, q).at_minimum  # another loss is measured anew
    task, q = trained(seed, 2, dtype=dtype)
    early = stationarity(task, q)
    assert not early.at_minimum
    assert early.decrement > 10 * converged.decrement
    of_another_loss = stationarity(*trained(seed, 200, FIFTEEN, dtype))
    assert not of_another_loss.near
    assert "not at the minimum" in of_another_loss.verdict


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
def test_the_numbers_against_dense_algebra(structure: str) -> None:
    task, _ = trained(0, 3)
    start = {n: torch.full_like(p, 0.2) for n, p in task.parameters().items()}
    q = blr.fit_laplace(task, structure=structure, prior_precision=DELTA, initial=start)
    actual = stationarity(task, q)
    x, y = classes(0)
    error = torch.softmax(task.model(x).detach(), 1) - nn.functional.one_hot(y, 3)
    gradients = torch.einsum("nc,ncp->np", error, dense_jacobian(task, task.parameters()))
    pull = DELTA * (flatten(q.mean) - 0.2)
    scale = gradients.sum(0).norm() + pull.norm()
    g = gradients.sum(0) + pull
    assert actual.residual == pytest.approx(float(g.norm() / scale))

    def half_square(v: Tensor) -> float:
        parts = v.split([p.numel() for p in q.mean.values()])
        tree = {n: p.view_as(m) for (n, m), p in zip(q.mean.items(), parts, strict=True)}
        return 0.5 * float(v @ flatten(q.form.solve(tree)))

    assert actual.decrement == pytest.approx(half_square(g))
    assert actual.pull == pytest.approx(sum(map(half_square, gradients)) / len(gradients))
    assert actual.least_group == math.ceil(10 * actual.decrement / actual.pull)
    assert stationarity(task, q) == actual
    summed_loss = nn.functional.cross_entropy(task.model(x).detach(), y, reduction="sum")
    penalty = DELTA / 2 * (flatten(q.mean) - 0.2).square().sum()
    assert actual.objective == pytest.approx(float(summed_loss + penalty))


def test_a_step_gains_no_more_than_the_loss() -> None:
    """Wrong labels of a model that is sure: it is flat there, and the loss falls steeply."""
    x, y = classes(0)
    model = nn.Linear(4, 3).double()
    with torch.no_grad():
        model.weight.mul_(40)
    y = (model(x).argmax(1) + 1) % 3
    task = blr.Task(model, (x, y))
    far = stationarity(task, blr.fit_laplace(task, structure="full", prior_precision=0.01))
    assert far.decrement > float(nn.functional.cross_entropy(model(x), y, reduction="sum"))
    assert "too steeply to say what a step would gain" in far.verdict
    regression = blr.Task(nn.Linear(4, 1).double(), (x, x[:, :1]), likelihood="gaussian")
    assert stationarity(regression, blr.fit_laplace(regression)).objective is None


def test_the_smallest_group_that_is_told_apart() -> None:
    """Whose pull is ten times what a step would gain."""
    for decrement, pull, group in (
        (0.0, 0.0, 1),
        (1e-9, 1.0, 1),
        (2.0, 0.5, 40),
        (1.0, 0.0, math.inf),
    ):
        rest = Stationarity(0.1, decrement, pull, 80)
        assert rest.least_group == group
        assert (rest.at_minimum, rest.near) == (group == 1, group <= 40)
        assert ("at the minimum" in rest.verdict) == (rest.at_minimum or group > 80)
    assert not Stationarity(0.1, 2.05, 0.5, 80).near


def test_the_record_keeps_it(tmp_path: Path) -> None:
    task = blr.Task(nn.Linear(4, 3).double(), classes(0))
    q = blr.fit_laplace(task)
    assert q.stationarity is not None
    assert q.at_minimum is False
    assert "a guess" in q.note
    assert q.temperature == 0.15
    assert q.temperature_error is None
    chosen_by_hand = blr.fit_laplace(task, prior_precision=q.prior_precision)
    assert chosen_by_hand.stationarity is not None  # also where nothing was to be chosen
    assert chosen_by_hand.stationarity.decrement == pytest.approx(q.stationarity.decrement)
    q.save(tmp_path / "q.safetensors")
    loaded = blr.Posterior.load(tmp_path / "q.safetensors")
    assert loaded.stationarity == q.stationarity == stationarity(task, loaded)
    assert repr(loaded) == repr(q)
    assert "off its minimum, temperature=0.15" in repr(q)
    diag = blr.fit_laplace(task, structure="diag")
    assert diag.temperature == 1
    assert "only rankings" in diag.note
    measured = q.changed(calibration=Calibration(0.4, error=0.1))
    assert (measured.temperature, measured.temperature_error, measured.note) == (0.4, 0.1, "")


# A posterior warns of a model or of data that are not its own, and of nothing else.


def fitted(structure: str = "kron") -> tuple[blr.Task, blr.Posterior]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    task = blr.Task(model, classes(0, torch.float32))
    return task, blr.fit_laplace(task, structure=structure, prior_precision=1.0)


def others() -> dict[str, blr.Task]:
    """Tasks of the same shapes and the same N."""
    task, _ = fitted()
    x, y = classes(0, torch.float32)
    weights = randomised(copy.deepcopy(task.model)).float()
    body = nn.Sequential(task.model[0], nn.ReLU(), task.model[2])
    return {
        "weights": blr.Task(weights, (x, y)),
        "another model": blr.Task(body, (x, y)),
        "other inputs": blr.Task(task.model, (x.flip(0), y.flip(0))),
        "other targets": blr.Task(task.model, (x, (y + 1) % 3)),
    }


@pytest.mark.parametrize("word", ["weights", "another model", "other inputs", "other targets"])
def test_another_model_and_other_data_are_told_once(word: str, tmp_path: Path) -> None:
    _, q = fitted()
    q.save(tmp_path / "q")
    task = others()[word]
    of_hand = blr.Posterior(q.mean, q.form, prior_precision=1.0, n_data=q.n_data)
    blr.sensitivity(fitted()[0], of_hand)  # which knows what it met first
    for met in (q, blr.Posterior.load(tmp_path / "q"), of_hand):
        with pytest.warns(PosteriorWarning, match=word):
            blr.sensitivity(task, met)
        with warnings.catch_warnings():
            warnings.simplefilter("error", PosteriorWarning)
            blr.leave_one_out(task, met)


@pytest.mark.filterwarnings("error::blr_analysis.errors.PosteriorWarning")
def test_lawful_uses_are_not_told(tmp_path: Path) -> None:
    task, q = fitted()
    x, y = classes(0, torch.float32)
    blr.what_if(task, q, remove=[0, 3], relabel={1: 0}, solver="posterior")
    blr.influence(task, q, blr.Task(task.model, (-x, y)))
    wide = copy.deepcopy(task.model).double()
    blr.sensitivity(blr.Task(wide, (x.double(), y)), q)
    q.save(tmp_path / "q")
    blr.sensitivity(blr.Task(copy.deepcopy(task.model), (x, y)), blr.Posterior.load(tmp_path / "q"))
    half = task.subset(range(0, 40))
    blr.sensitivity(half, blr.fit_laplace(half, prior_precision=1.0))
    mended = y.clone()
    mended[:3] = (mended[:3] + 1) % 3  # a few labels mended
    blr.sensitivity(blr.Task(task.model, (x, mended)), q)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss()], ids=["MSE", "BCE"])
def test_a_mean_over_outputs_has_more_terms_than_examples(loss: nn.Module) -> None:
    n = 40
    c = 5
    w = 0.02
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    y = (x @ torch.randn(3, c, generator=generator) > 0).float()
    for options, terms in (({}, n), ({"tokens": n * c}, n * c)):
        torch.manual_seed(0)
        model = nn.Linear(3, c)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=w)
        for _ in range(20):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
        q = blr.Posterior.from_optimizer(optimizer, model, n_data=n, **options)
        assert q.prior_precision == pytest.approx(terms * w)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            blr.sensitivity(blr.Task(model, (x, y), likelihood=loss), q)
        messages = [str(w.message) for w in caught if w.category is PosteriorWarning]
        asks_for_tokens = any(f"tokens={n * c}" in message for message in messages)
        assert asks_for_tokens is not bool(options)


def test_a_layer_that_was_frozen_at_the_fit_and_trained_since_is_named() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=g)
    y = torch.arange(40) % 3
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    model[0].requires_grad_(False)
    q = blr.fit_laplace(blr.Task(model, (x, y)), prior_precision=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blr.sensitivity(blr.Task(model, (x, y)), q)
    model[0].weight.data += 0.02 * torch.randn(5, 4, generator=g)
    with pytest.warns(PosteriorWarning, match="'0.weight' was frozen at the fit.*fit again"):
        blr.sensitivity(blr.Task(model, (x, y)), q)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_logits_that_were_scaled_are_said_to_be(likelihood: str) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=g)
    y = torch.arange(40) % 3 if likelihood == "categorical" else (x[:, :3] > 0).float()
    for scale, line in ((1.0, False), (1e4, True)):
        model = torch.nn.Linear(4, 3)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(scale)
        task = blr.Task(model, (x, y), likelihood=likelihood)
        q = blr.fit_laplace(task, prior_precision=1.0)
        for result in (blr.sensitivity(task, q), blr.leave_one_out(task, q)):
            assert ("are the logits scaled?" in result.note) == line
