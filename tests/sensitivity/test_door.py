"""What the door to the analyses measures of a posterior is kept beside it: the posterior itself, of
a fit or captured from an optimizer, leaves every analysis as it came."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshots import same
from torch import nn

import blr_analysis as blr
from blr_analysis.audit.findings import investigate
from blr_analysis.audit.sections import trust
from blr_analysis.posterior.stationarity import stationarity
from blr_analysis.sensitivity.door import checked_posterior

N = 20
RECIPE = blr.Recipe("adam", lr=1e-2, epochs=2, batch_size=10)


def data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, 3, generator=generator), torch.arange(N) % 2


def captured() -> tuple[blr.Task, blr.Posterior]:
    """A posterior that has seen no data: nothing is measured of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    x, y = data()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    task = blr.Task(model.eval(), (x, y), recipe=RECIPE, progress=False)
    return task, blr.Posterior.from_optimizer(optimizer, model, n_data=N)


def fitted() -> tuple[blr.Task, blr.Posterior]:
    task, _ = captured()
    return task, blr.fit_laplace(task, prior_precision=1.0)


def snapshot(q: blr.Posterior) -> dict[str, Any]:
    """Every attribute of a posterior, and the tensors of its precision."""
    tensors = {f"form of {name}": t.clone() for name, t in q.form.tensors().items()}
    tensors |= {f"mean of {name}": m.clone() for name, m in q.mean.items()}
    identities = {f"identity of {name}": id(value) for name, value in vars(q).items()}
    facts = set(vars(q)) - {"mean", "form", "prior", "buffers", "earlier"}
    values = {name: copy.deepcopy(vars(q)[name]) for name in facts}
    return tensors | identities | values | {"record": dict(q.record)}


def indexed(task: blr.Task, q: blr.Posterior, test: blr.Task, place: Path) -> None:
    blr.Index.build(task, q, place / "index", rank=4)
    blr.Index.open(place / "index", task=task).influence(test)


def monitored(task: blr.Task, q: blr.Posterior, test: blr.Task, place: Path) -> None:
    blr.Monitor(task, test=test)(q, 1)


def audited(task: blr.Task, q: blr.Posterior, test: blr.Task, place: Path) -> None:
    trust(task, q, investigate(task, q, test=test, by=None))


ANALYSES: dict[str, Callable[[blr.Task, blr.Posterior, blr.Task, Path], Any]] = {
    "stationarity": lambda task, q, test, place: stationarity(task, q),
    "sensitivity": lambda task, q, test, place: blr.sensitivity(task, q),
    "leave_one_out": lambda task, q, test, place: blr.leave_one_out(task, q, refine=1),
    "influence": lambda task, q, test, place: blr.influence(task, q, test),
    "suspicious": lambda task, q, test, place: blr.suspicious(task, q),
    "one step": lambda task, q, test, place: blr.what_if(task, q, remove=[0], solver="posterior"),
    "a descent": lambda task, q, test, place: blr.what_if(task, q, remove=[0], solver="cg"),
    "trainings": lambda task, q, test, place: blr.what_if(task, q, remove=[0], solver="replay"),
    "what_if_each": lambda task, q, test, place: blr.what_if_each(task, q, evaluate=test),
    "calibrate": lambda task, q, test, place: blr.calibrate(task, q),
    "predict": lambda task, q, test, place: q.predict(test, draws=2),
    "index": indexed,
    "monitor": monitored,
    "audit": audited,
}


@pytest.mark.filterwarnings(
    "ignore::blr_analysis.errors.PosteriorWarning", "ignore::RuntimeWarning"
)
@pytest.mark.parametrize("make_problem", [captured, fitted])
@pytest.mark.parametrize("analysis", ANALYSES)
def test_a_posterior_leaves_an_analysis_as_it_came(
    analysis: str, make_problem: Callable[[], tuple[blr.Task, blr.Posterior]], tmp_path: Path
) -> None:
    task, q = make_problem()
    before = snapshot(q)
    ANALYSES[analysis](task, q, blr.Task(task.model, data(1), progress=False), tmp_path)
    after = snapshot(q)
    assert before.keys() == after.keys()
    assert [name for name in before if not same(before[name], after[name])] == []


def test_what_the_fit_did_not_measure_is_measured_once() -> None:
    """And it is the same as in a fit; other data are measured by themselves."""
    task, q = captured()
    assert q.at_minimum is None
    checked = checked_posterior(task, q)
    assert checked.stationarity == stationarity(task, q)
    assert checked_posterior(task, q).stationarity is checked.stationarity
    fit = blr.fit_laplace(task, structure="diag", prior_precision=q.prior_precision)
    assert fit.stationarity is not None
    measured = stationarity(task, fit.changed(stationarity=None))
    assert measured.decrement == pytest.approx(fit.stationarity.decrement, rel=1e-4)
    assert measured.pull == pytest.approx(fit.stationarity.pull, rel=1e-4)
    fresh_data = blr.Task(task.model, data(1), progress=False)
    assert stationarity(fresh_data, q) != checked.stationarity
    assert stationarity(task, q) == checked.stationarity


def learned_by_vogn() -> tuple[blr.Task, blr.Posterior, dict[str, torch.Tensor]]:
    """A task, what was learned, and the precision that weights were drawn with, read off h."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x, y = data()
    x = x.double()
    optimizer = blr.VOGN(
        model.parameters(), lr=0.1, ess=N, model=model, beta2=0.9, weight_decay=0.05, hess_init=2.0
    )
    for _ in range(5):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    task = blr.Task(model, (x, y), progress=False)
    drawn_with = {
        name: N * (optimizer.state[p]["hess"] + 0.05) for name, p in model.named_parameters()
    }
    return task, blr.Posterior.from_optimizer(optimizer, model), drawn_with


ANSWERS: dict[str, Callable[[blr.Task, blr.Posterior], Any]] = {
    "sensitivity": lambda task, q: blr.sensitivity(task, q).variance,
    "leave_one_out": lambda task, q: blr.leave_one_out(task, q).losses,
    "influence": lambda task, q: blr.influence(task, q, task),
    "what_if": lambda task, q: torch.tensor(
        blr.what_if(task, q, remove=[1, 4], evaluate=task, solver="posterior").nll
    ),
    "suspicious": lambda task, q: torch.tensor(
        blr.suspicious(task, q).table["left_out_loss"].to_numpy().copy()
    ),
    "monitor": lambda task, q: torch.tensor(blr.Monitor(task)(q, 1)["loo_nll"]),
    "acquire": lambda task, q: blr.acquire(task, q, 5),
    "predict": lambda task, q: q.predict(task, generator=torch.Generator().manual_seed(0)).mean,
}


@pytest.mark.parametrize("analysis", ANSWERS)
def test_what_an_optimizer_learned_is_asked_as_weights_were_drawn_from_it(analysis: str) -> None:
    task, q, drawn_with = learned_by_vogn()
    drawn = blr.Posterior(q.mean, drawn_with, prior_precision=1.0, n_data=N)
    answer = ANSWERS[analysis]
    torch.testing.assert_close(answer(task, q), answer(task, drawn))
    torch.testing.assert_close(answer(task, q.as_drawn), answer(task, drawn))
    ranked = {name: q.precision(name) for name in q.mean}
    assert all(bool((ranked[name] < drawn_with[name]).all()) for name in ranked)
    assert "the optimizer started with" in q.as_drawn.note
    assert q.as_drawn.as_drawn.start is None
