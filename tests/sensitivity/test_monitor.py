"""The monitor says what the analyses say, changes nothing, and loses nothing."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from models import mlp
from oracles import fit_at_rest
from snapshots import untouched
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import DataError, InputError, ModelError, PosteriorError

N = 30
C = 3
NAN = float("nan")
MEASURES = ("deviation", "self_influence", "leverage", "loss", "left_out_loss")


def data(n: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    return x, (x @ torch.randn(4, C, generator=g, dtype=torch.float64)).argmax(1)


def task_of(**options: Any) -> blr.Task:
    return blr.Task(mlp(outputs=C), data(), **options)


def fitted(task: blr.Task, structure: str = "diag", delta: float = 1.0) -> blr.Posterior:
    return fit_at_rest(task, structure=structure, prior_precision=delta)


@cache
def one_task() -> blr.Task:
    """The task for tests that only read."""
    return task_of()


@cache
def posterior(epoch: int) -> blr.Posterior:
    """One for each epoch; it fits every ``task_of()``, whose weights are always the same."""
    return fitted(one_task(), delta=4.0 / epoch)


def watched(task: blr.Task, epochs: int = 3, **options: Any) -> blr.Monitor:
    """A monitor that has seen posteriors of different prior precisions."""
    monitor = blr.Monitor(task, **options)
    for epoch in range(1, epochs + 1):
        monitor(posterior(epoch), epoch)
    return monitor


# What it says is what the analyses say.


@pytest.mark.parametrize("correction", ["auto", "cavity", "first_order"])
@pytest.mark.parametrize("structure", ["kron", "full", "off the minimum"])
def test_a_row_is_what_the_analyses_find(structure: str, correction: str) -> None:
    """Also with a temperature, and errors at .7 of the logits."""
    task = one_task()
    test = blr.Task(task.model, data(20, seed=1))
    off = structure == "off the minimum"
    q = blr.fit_laplace(task, prior_precision=1.0) if off else fitted(task, structure)
    assert q.at_minimum != off
    monitor = blr.Monitor(task, test=test, keep=MEASURES, correction=correction)
    row = monitor(q, 1)
    loo = blr.leave_one_out(task, q, correction=correction)
    scores = blr.sensitivity(task, q)
    assert row["loo_nll"] == pytest.approx(loo.nll, rel=1e-12)
    assert row["loo_accuracy"] == loo.accuracy
    assert row["train_nll"] == pytest.approx(float(scores.losses.mean()), rel=1e-12)
    assert row["max_leverage"] == pytest.approx(float(loo.leverage.max()), rel=1e-12)
    assert row["mean_deviation"] == pytest.approx(float(loo.deviation.mean()), rel=1e-12)
    f = task.model(test.dataset.tensors[0]).detach()
    assert row["test_nll"] == pytest.approx(float(F.cross_entropy(f, test.dataset.tensors[1])))
    hits = (f.argmax(1) == test.dataset.tensors[1]).double().mean()
    assert row["test_accuracy"] == pytest.approx(float(hits))
    actual = loo.deviation, scores.self_influence, loo.leverage, scores.losses, loo.losses
    for name, expected in zip(MEASURES, actual, strict=True):
        torch.testing.assert_close(
            monitor.history(name), expected.float()[None], rtol=1e-5, atol=1e-7
        )
    assert q.note in repr(monitor)
    assert bool(q.note) == off


def test_many_outputs_are_watched_to_first_order() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=g, dtype=torch.float64)
    y = torch.randint(300, (12,), generator=g)
    task = blr.Task(nn.Linear(3, 300).double(), (x, y))
    q = fitted(task, delta=5.0)
    monitor = blr.Monitor(task)
    row = monitor(q, 1)
    scores = blr.sensitivity(task, q)
    assert scores.variance is None
    expected = float((scores.losses + scores.self_influence).mean())
    assert row["loo_nll"] == pytest.approx(expected, rel=1e-12)
    assert row["train_accuracy"] == float((scores.predictions == y).double().mean())
    assert all(math.isnan(row[k]) for k in ("loo_accuracy", "mean_deviation", "max_leverage"))


def test_watched_examples_are_those_asked_for() -> None:
    task = one_task()
    q = fitted(task, "full")
    monitor = blr.Monitor(task, examples=[7, 2, 11])
    row = monitor(q, 1)
    loo = blr.leave_one_out(task, q)
    assert monitor.indices.tolist() == [2, 7, 11]
    assert row["loo_nll"] == pytest.approx(float(loo.losses[[2, 7, 11]].mean()), rel=1e-12)


def test_a_number_of_examples_is_drawn_once_by_its_seed() -> None:
    task = one_task()
    state = torch.get_rng_state()
    first = blr.Monitor(task, examples=8, seed=0).indices
    second = blr.Monitor(task, examples=8, seed=0).indices
    another_seed = blr.Monitor(task, examples=8, seed=1).indices
    assert torch.equal(first, second)
    assert not torch.equal(first, another_seed)
    assert len(first) == 8
    assert first.tolist() == sorted(set(first.tolist()))
    assert torch.equal(torch.get_rng_state(), state)


# It changes nothing.


class Net(nn.Module):
    """BatchNorm and dropout, which behave otherwise in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(6, C)
        self.last.eval()  # a mode of its own

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


def trained(watch: bool) -> tuple[nn.Module, dict]:
    torch.manual_seed(0)
    x, y = data()
    x = x.float()
    model = Net()
    optimizer = blr.IVON(model.parameters(), lr=0.1, ess=N, weight_decay=1 / N)
    monitor = blr.Monitor(blr.Task(model, (x, y)), every=2, test=blr.Task(model, (x, y)))
    for epoch in range(1, 7):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if watch:
            with torch.no_grad():
                monitor(blr.Posterior.from_optimizer(optimizer, model), epoch)
    return model, optimizer.state_dict()


def test_a_watched_run_takes_the_same_steps() -> None:
    plain, before = trained(False)
    watched_model, after = trained(True)
    watched_state = watched_model.state_dict()
    assert list(watched_state) == list(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(watched_state[name], tensor), name
    assert [m.training for m in watched_model.modules()] == [m.training for m in plain.modules()]
    assert watched_model.training
    assert watched_model.norm.training
    assert not watched_model.last.training
    for a, b in zip(plain.parameters(), watched_model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert str(before) == str(after)


def test_only_due_epochs_are_recorded_and_paid_for() -> None:
    task = task_of()
    q = fitted(task)
    modes_of_calls = []

    def make() -> blr.Posterior:
        modes_of_calls.append(task.model.training)
        return q

    task.model.train()
    monitor = blr.Monitor(task, every=3)
    rows = [monitor(make, epoch) for epoch in range(8)]
    recorded = [epoch for epoch, row in enumerate(rows) if row is not None]
    assert recorded == [0, 3, 6]
    assert modes_of_calls == [False] * 3  # in eval mode, so that a Laplace fit can follow training
    assert monitor.epochs == [0, 3, 6]
    assert len(monitor) == 3
    assert [monitor.due(epoch) for epoch in (8, 9)] == [False, True]
    assert monitor.rows[1] == rows[3]
    assert monitor.rows[1] is not rows[3]
    assert monitor.seconds == sum(monitor.table.seconds) > 0


def test_the_best_epoch_has_the_smallest_estimate() -> None:
    monitor = blr.Monitor(one_task())
    with pytest.raises(InputError, match="no epoch"):
        _ = monitor.best_epoch
    for epoch, nll in ((2, 0.7), (4, 0.5), (6, NAN), (8, 0.6)):
        monitor.rows.append({"epoch": epoch, "loo_nll": nll})
    assert monitor.best_epoch == 4


# Bad input; nothing recorded is lost.


@cache
def bad_calls() -> dict:
    task = task_of()
    q = fitted(task)
    nan = fitted(task)
    far = fitted(task)
    nan.mean["0.weight"].fill_(NAN)
    far.form = far.form.with_values({n: v * NAN for n, v in far.form.values.items()})
    wide = blr.Task(mlp(hidden=6, outputs=C), data())
    return {
        "back": (q, 1, InputError, "does not follow epoch 2"),
        "fraction": (q, 2.5, InputError, "whole number"),
        "other model": (fitted(wide), 4, PosteriorError, "another model"),
        "nan mean": (nan, 4, PosteriorError, "NaN or inf"),
        "nan precision": (far, 4, ModelError, "variance"),
        "function of nothing": (lambda: None, 4, InputError, "posterior must be"),
        "failing function": (lambda: 1 / 0, 4, ZeroDivisionError, "division"),
    }


@pytest.mark.parametrize("case", bad_calls())
def test_what_was_recorded_survives_a_bad_call(case: str) -> None:
    source, epoch, kind, words = bad_calls()[case]
    task = one_task()
    monitor = watched(task, epochs=2)
    rows = str(monitor.rows)
    deviations_before = monitor.deviations
    with untouched(task.model), pytest.raises(kind, match=words):
        monitor(source, epoch)
    assert str(monitor.rows) == rows
    assert torch.equal(monitor.deviations, deviations_before)
    assert monitor(posterior(1), 4) is not None  # and the run goes on
    assert monitor.epochs == [1, 2, 4]


REFUSED: list[tuple[Any, type, str]] = [
    (lambda t: blr.Monitor(t, every=0), InputError, "every"),
    (lambda t: blr.Monitor(t, examples=0), InputError, "examples"),
    (lambda t: blr.Monitor(t, examples=N + 1), InputError, "only 30"),
    (lambda t: blr.Monitor(t, keep=("shoes",)), InputError, "keep must be one of"),
    (lambda t: blr.Monitor(t, correction="both"), InputError, "correction"),
    (lambda t: blr.Monitor(t, test=data()), InputError, "test must be"),
    (
        lambda t: blr.Monitor(t, test=blr.Task(t.model, (data()[0], data()[1] + 1))),
        DataError,
        r"test task.*0 … 2.*found 3",
    ),
    (
        lambda t: blr.Monitor(t, test=blr.Task(mlp(outputs=5), data())),
        PosteriorError,
        "another model",
    ),
    (lambda t: blr.Monitor(t).plot(), InputError, "nothing yet"),
    (lambda t: watched(t).plot(kind="pie"), InputError, "kind"),
    (lambda t: watched(t).plot(measure="shoes"), InputError, "measure"),
    (lambda t: watched(t, keep=("leverage",)).deviations, InputError, "measure must be one of"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_refused(case: int) -> None:
    call, kind, words = REFUSED[case]
    with pytest.raises(kind, match=words):
        call(one_task())


# The run so far, in place of a guess.


def steps(model: nn.Module, x: Tensor, y: Tensor, count: int = 6) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(count):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("source", ["none", "fit", "resumed"])
def test_of_a_fit_the_run_so_far_gives_scale_and_errors(source: str) -> None:
    """f + V ē with δ = (L₀ − L) / ‖θ − θ₀‖², by hand; a failed epoch counts for nothing."""
    x, y = data()
    task = task_of()
    model = task.model
    first = [p.detach().clone() for p in model.parameters()]
    loss_before = float(F.cross_entropy(model(x), y, reduction="sum"))
    monitor = blr.Monitor(task, keep=MEASURES)
    errors: list[Tensor] = []
    for epoch in range(1, 4):
        steps(model, x, y)
        f = model(x).detach()
        errors.append(f.softmax(1) - F.one_hot(y, C))
        loss = float(F.cross_entropy(f, y, reduction="sum"))
        moved = sum(
            float((p - w).square().sum()) for p, w in zip(model.parameters(), first, strict=True)
        )
        q = blr.fit_laplace(task, prior_precision=(loss_before - loss) / moved)
        v = blr.sensitivity(task, q).variance / q.temperature
        left_out = f + (v @ torch.stack(errors).mean(0).unsqueeze(-1)).squeeze(-1)
        if source == "resumed" and epoch == 3:
            state = monitor.state_dict()
            monitor = blr.Monitor(task, keep=MEASURES)
            monitor.load_state_dict(state)
        row = monitor(None if source != "fit" else lambda: blr.fit_laplace(task), epoch)
        assert row is not None
        assert row["loo_nll"] == pytest.approx(float(F.cross_entropy(left_out, y)), rel=1e-6)
        with pytest.raises(InputError):
            monitor(None, epoch)
    assert "guess" not in repr(monitor)


def test_before_anything_is_learned_the_fit_is_taken_as_it_is() -> None:
    task = task_of()
    row = blr.Monitor(task)(None, 0)
    assert row is not None
    assert row["loo_nll"] == pytest.approx(blr.leave_one_out(task, blr.fit_laplace(task)).nll)


@pytest.mark.slow
def test_the_best_epoch_is_found_under_wrong_labels() -> None:
    """As the benchmark prints it, of a seed that had no part in choosing the formula."""
    from benchmarks.overfitting import best, correlation, watched

    actual = watched("SGD", 7, 20)
    assert correlation(actual["left out"], actual["test"]) > 0.9
    assert abs(best(actual["left out"]) - best(actual["test"])) <= 2


# Its state, tables and pictures.


@pytest.mark.parametrize("epochs", [0, 3])
def test_a_state_goes_on_where_it_was(epochs: int, tmp_path: Path) -> None:
    task = one_task()
    monitor = watched(task, epochs, keep=("deviation", "loss"))
    torch.save(monitor.state_dict(), tmp_path / "m.pt")
    resumed = blr.Monitor(task, keep=("deviation", "loss"))
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    state["rows"] = {n: torch.tensor(v, dtype=torch.double) for n, v in state["rows"].items()}
    resumed.load_state_dict(state)
    pd.testing.assert_frame_equal(resumed.table, monitor.table)
    for name in resumed.keep:
        assert torch.equal(resumed.history(name), monitor.history(name))
    assert resumed(posterior(1), 4)["epoch"] == 4
    assert resumed.deviations.shape == (epochs + 1, N)
    assert repr(monitor).split(";")[0] in repr(watched(task, epochs, keep=("loss",)))


def test_a_state_before_the_first_record_goes_on_from_the_first_weights_and_buffers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, C)).double()
    task = blr.Task(model, data())
    monitor = blr.Monitor(task)
    state = monitor.state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(model.train()(3 * data()[0]), data()[1]).backward()
        optimizer.step()
    resumed = blr.Monitor(task)
    resumed.load_state_dict(state)
    row = resumed(None, 1)
    assert row is not None
    assert row["loo_nll"] == monitor(None, 1)["loo_nll"]
    assert row["loo_nll"] != blr.Monitor(task)(None, 1)["loo_nll"]


def test_a_foreign_state_is_refused_and_nothing_is_lost() -> None:
    task = one_task()
    monitor = watched(task, examples=7)
    good = monitor.state_dict()
    for bad, words in (
        ({}, "no state"),
        ({**good, "rows": {}}, "no state"),
        ({**good, "n_data": 31}, "same task"),
        (watched(task, examples=8).state_dict(), "same task"),
        (watched(task, examples=7, keep=("loss",)).state_dict(), "keep="),
        ({**good, "kept": {k: v[:1] for k, v in good["kept"].items()}}, "keep="),
    ):
        with pytest.raises(InputError, match=words):
            monitor.load_state_dict(bad)
        assert monitor.epochs == [1, 2, 3]
        assert monitor.deviations.shape == (3, 7)


def test_the_pictures_show_the_rows() -> None:
    task = one_task()
    monitor = watched(task, test=blr.Task(task.model, data(9, 1)))
    curves = {line.get_label(): list(line.get_ydata()) for line in monitor.plot().lines}
    table = monitor.table
    assert table.epoch.tolist() == [1, 2, 3]
    assert curves == {
        "training data": table.train_nll.tolist(),
        "leave-one-out, from training data": table.loo_nll.tolist(),
        "test data": table.test_nll.tolist(),
    }
    assert len(watched(task).plot().lines) == 2  # nothing where there is no test task
    axes = Figure().subplots()
    assert monitor.plot(axes) is axes
    ax = monitor.plot(kind="sensitivities")
    highest = monitor.deviations[-1].argsort(descending=True)[:4].tolist()
    names = [f"example {i}" for i in highest]
    assert [line.get_label() for line in ax.lines] == ["median", *names]
