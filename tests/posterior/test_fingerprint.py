"""A posterior warns of a model or of data that are not its own, and of nothing else."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from models import classes
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import PosteriorWarning
from blr_analysis.posterior.stationarity import recognise


class Net(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.one, self.two, self.act = nn.Linear(4, 8), nn.Linear(8, 3), act

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.act(self.one(x)))


def fitted(structure: str = "kron") -> tuple[blr.Task, blr.Posterior]:
    torch.manual_seed(0)
    task = blr.Task(Net(nn.Tanh()), classes(0, torch.float32))
    return task, blr.fit_laplace(task, structure=structure, prior_precision=1.0, progress=False)


def others() -> dict[str, blr.Task]:
    """Tasks of the same shapes and the same N."""
    task, _ = fitted()
    (x, y), weights = classes(0, torch.float32), copy.deepcopy(task.model)
    with torch.no_grad():
        for p in weights.parameters():
            p.normal_()
    body = Net(nn.ReLU())
    body.load_state_dict(task.model.state_dict())
    order = torch.randperm(len(x))
    return {
        "weights": blr.Task(weights, (x, y)),
        "another model": blr.Task(body, (x, y)),
        "other inputs": blr.Task(task.model, (x[order], y[order])),
        "other targets": blr.Task(task.model, (x, (y + 1) % 3)),
    }


@pytest.mark.parametrize("word", ["weights", "another model", "other inputs", "other targets"])
def test_another_model_and_other_data_are_told_once(word: str, tmp_path: Path) -> None:
    _, q = fitted()
    q.save(tmp_path / "q")
    task = others()[word]
    for met in (q, blr.Posterior.load(tmp_path / "q")):
        with pytest.warns(PosteriorWarning, match=word):
            blr.sensitivity(task, met, progress=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error", PosteriorWarning)
            blr.leave_one_out(task, met, progress=False)


def test_a_captured_posterior_knows_what_it_met_first() -> None:
    task, fit = fitted("diag")
    precision = {n: fit.precision(n) for n in fit.mean}
    q = blr.Posterior(fit.mean, precision, prior_precision=1.0, n_data=task.n_data)
    blr.sensitivity(task, q, progress=False)
    with pytest.warns(PosteriorWarning, match="other targets"):
        blr.sensitivity(others()["other targets"], q, progress=False)


@pytest.mark.filterwarnings("error::blr_analysis.errors.PosteriorWarning")
def test_lawful_uses_are_not_told(tmp_path: Path) -> None:
    task, q = fitted()
    x, y = classes(0, torch.float32)
    blr.what_if(task, q, remove=[0, 3], relabel={1: 0}, progress=False)
    blr.what_if(task, q, remove=y == 0, evaluate=blr.Task(task.model, (x[:9], y[:9])))
    blr.influence(task, q, blr.Task(task.model, (-x, y)), progress=False)
    wide = copy.deepcopy(task.model).double()
    blr.sensitivity(blr.Task(wide, (x.double(), y)), q, progress=False)
    blr.calibrate(task, q, 8, progress=False)
    q.save(tmp_path / "q")
    blr.sensitivity(blr.Task(copy.deepcopy(task.model), (x, y)), blr.Posterior.load(tmp_path / "q"))
    half = task.subset(range(0, 40))
    blr.sensitivity(half, blr.fit_laplace(half, prior_precision=1.0, progress=False))
    weights = {n: p + 0.5 for n, p in task.parameters().items()}  # an earlier checkpoint
    early = blr.Posterior(
        weights, {n: torch.full_like(p, 2.0) for n, p in weights.items()},
        prior_precision=1.0, n_data=task.n_data,
    )  # fmt: skip
    blr.sensitivity(task, [early, q], progress=False)
    some = y.clone()
    some[:3] = (some[:3] + 1) % 3  # a few labels mended
    blr.sensitivity(blr.Task(task.model, (x, some)), q, progress=False)


def test_it_costs_one_pass_of_eight_examples() -> None:
    task, q = fitted()
    seen: list[int] = []
    other = blr.Task(task.model, classes(0, torch.float32))
    other.model.register_forward_hook(lambda _, args, out: seen.append(len(out)))
    recognise(other, q, q, own_weights=True)
    assert sum(seen) == 8


@pytest.mark.parametrize("optimizer", ["adam", "ivon"])
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss()], ids=["MSE", "BCE"])
def test_a_mean_over_outputs_has_more_terms_than_examples(loss: nn.Module, optimizer: str) -> None:
    n, c, w = 40, 5, 0.02
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    y = (x @ torch.randn(3, c, generator=generator) > 0).float()

    def captured(terms: int, **said: int) -> tuple[blr.Posterior, list[str]]:
        torch.manual_seed(0)
        model = nn.Linear(3, c)
        if optimizer == "adam":
            made = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=w)
        else:
            made = blr.IVON(model.parameters(), lr=0.1, ess=terms, weight_decay=w)
        for _ in range(20):
            made.zero_grad()
            with made.sampled_params(train=True) if optimizer == "ivon" else torch.enable_grad():
                loss(model(x), y).backward()
            made.step()
        q = blr.Posterior.from_optimizer(made, model, n_data=n, **said)
        task = blr.Task(model, (x, y), likelihood=loss)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            blr.sensitivity(task, q, progress=False)
        return q, [str(t.message) for t in told if t.category is PosteriorWarning]

    q, told = captured(n)
    assert q.prior_precision == pytest.approx(n * w) and any(f"tokens={n * c}" in s for s in told)
    q, told = captured(n * c, tokens=n * c)
    assert q.prior_precision == pytest.approx(n * c * w) and not told
