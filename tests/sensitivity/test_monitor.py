"""The monitor says what the analyses say, changes nothing, and loses nothing."""

from __future__ import annotations

import math
import sys
from functools import cache

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

N, C = 30, 3
NAN = float("nan")


def data(n: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    return x, (x @ torch.randn(4, C, generator=g, dtype=torch.float64)).argmax(1)


def task_of(**options) -> blr.Task:
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


def watched(task: blr.Task, epochs: int = 3, **options) -> blr.Monitor:
    """A monitor that has seen posteriors of different prior precisions."""
    monitor = blr.Monitor(task, **options)
    for epoch in range(1, epochs + 1):
        monitor(posterior(epoch), epoch)
    return monitor


# What it says is what the analyses say.


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
@pytest.mark.parametrize("correction", ["auto", "cavity", "first_order"])
def test_a_row_is_what_the_analyses_find(structure: str, correction: str) -> None:
    task, keep = one_task(), ("deviation", "self_influence", "leverage", "loss", "left_out_loss")
    test = blr.Task(task.model, data(20, seed=1))
    q = fitted(task, structure)
    monitor = blr.Monitor(task, test=test, keep=keep, correction=correction)
    row = monitor(q, 1)
    assert row is not None
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
    found = {
        "deviation": loo.deviation,
        "self_influence": scores.self_influence,
        "leverage": loo.leverage,
        "loss": scores.losses,
        "left_out_loss": loo.losses,
    }
    for name, expected in found.items():
        torch.testing.assert_close(monitor.history(name), expected.float()[None], rtol=1e-5,
                                   atol=1e-7)  # fmt: skip
    assert torch.equal(monitor.deviations, monitor.history("deviation"))


def test_ridge_regression_is_press_at_every_epoch() -> None:
    x, _ = data()
    y = x.sum(1) + torch.sin(5 * x[:, 0])
    model = nn.Linear(4, 1, bias=False).double()
    task = blr.Task(model, (x, y), likelihood="gaussian")
    monitor = blr.Monitor(task)
    for epoch, delta in enumerate((10.0, 1.0, 0.1)):
        gram = x.T @ x + delta * torch.eye(4)
        model.weight.data = torch.linalg.solve(gram, x.T @ y)[None]
        row = monitor(fitted(task, "full", delta), epoch)
        assert row is not None
        hat = (x @ torch.linalg.inv(gram) * x).sum(1)
        press = float(((y - x @ model.weight.detach()[0]) / (1 - hat)).square().mean())
        assert row["loo_nll"] == pytest.approx(0.5 * press + 0.5 * math.log(2 * math.pi), rel=1e-9)
        assert math.isnan(row["loo_accuracy"]) and math.isnan(row["test_nll"])
    assert monitor.epochs == [0, 1, 2]


def test_the_posterior_s_mean_counts_and_not_the_model_s_weights() -> None:
    task, q = one_task(), posterior(1)
    row = blr.Monitor(task)(q, 1)
    other = blr.Task(mlp(outputs=C, seed=5), data())
    assert row is not None
    again = blr.Monitor(other)(q, 1)
    assert again is not None
    assert {**again, "seconds": 0} == pytest.approx({**row, "seconds": 0}, nan_ok=True)


def test_many_outputs_are_watched_to_first_order() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=g, dtype=torch.float64)
    y = torch.randint(300, (12,), generator=g)
    task = blr.Task(nn.Linear(3, 300).double(), (x, y))
    q = fitted(task, delta=5.0)
    monitor = blr.Monitor(task)
    row = monitor(q, 1)
    scores = blr.sensitivity(task, q, variance=False)
    assert row is not None
    expected = float((scores.losses + scores.self_influence).mean())
    assert row["loo_nll"] == pytest.approx(expected, rel=1e-12)
    assert row["train_accuracy"] == float((scores.predictions == y).double().mean())
    assert all(math.isnan(row[k]) for k in ("loo_accuracy", "mean_deviation", "max_leverage"))
    assert bool(monitor.deviations.isnan().all())


# A subset bounds the cost.


@pytest.mark.parametrize(
    ("examples", "indices"),
    [
        ([7, 2, 11], [2, 7, 11]),
        (torch.arange(N) % 10 == 4, [4, 14, 24]),
        (range(3), [0, 1, 2]),
    ],
)
def test_watched_examples_are_those_asked_for(examples, indices: list[int]) -> None:
    task = one_task()
    q = fitted(task, "full")
    monitor = blr.Monitor(task, examples=examples)
    row = monitor(q, 1)
    loo = blr.leave_one_out(task, q)
    assert row is not None
    assert monitor.indices.tolist() == indices
    assert row["loo_nll"] == pytest.approx(float(loo.losses[indices].mean()), rel=1e-12)
    torch.testing.assert_close(monitor.deviations[0].double(), loo.deviation[indices],
                               rtol=1e-5, atol=1e-7)  # fmt: skip


def test_a_number_of_examples_is_drawn_once_by_its_seed() -> None:
    task = one_task()
    state = torch.get_rng_state()
    first, second = blr.Monitor(task, examples=8), blr.Monitor(task, examples=8)
    other = blr.Monitor(task, examples=8, seed=1)
    assert torch.equal(first.indices, second.indices)
    assert not torch.equal(first.indices, other.indices)
    assert first.indices.tolist() == sorted(set(first.indices.tolist()))
    assert len(first.indices) == 8
    assert torch.equal(torch.get_rng_state(), state)
    assert blr.Monitor(task, examples=N).indices.tolist() == list(range(N))


# It changes nothing.


class Net(nn.Module):
    """BatchNorm and dropout, which behave otherwise in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(6, C)
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
    (plain, before), (seen, after) = trained(False), trained(True)
    for (name, a), b in zip(plain.state_dict().items(), seen.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert [m.training for m in seen.modules()] == [m.training for m in plain.modules()]
    assert seen.training and seen.norm.training and not seen.last.training
    for a, b in zip(plain.parameters(), seen.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.equal(a.grad, b.grad)
    assert str(before) == str(after)


def test_the_model_is_left_as_it_is_also_by_an_error() -> None:
    task = task_of()
    task.model.train()
    broken = blr.Task(task.model, (data()[0] * math.inf, data()[1]))
    q = fitted(task)
    with untouched(task.model):
        watched(task, test=blr.Task(task.model, data(9, 1)))
    with untouched(task.model), pytest.raises(DataError, match="NaN or inf"):
        blr.Monitor(broken)(q, 1)


# When it looks.


def test_only_due_epochs_are_recorded_and_paid_for() -> None:
    task = task_of()
    q, made = fitted(task), []

    def make() -> blr.Posterior:
        made.append(task.model.training)
        return q

    task.model.train()
    monitor = blr.Monitor(task, every=3)
    rows = [monitor(make, epoch) for epoch in range(8)]
    assert [row is not None for row in rows] == [epoch % 3 == 0 for epoch in range(8)]
    assert made == [False] * 3  # in eval mode, so that a Laplace fit can follow training
    assert monitor.epochs == [0, 3, 6] and len(monitor) == 3
    assert [monitor.due(epoch) for epoch in (8, 9)] == [False, True]
    assert monitor.rows[1] == rows[3] and monitor.rows[1] is not rows[3]


def test_the_seconds_count_the_making_of_the_posterior(monkeypatch) -> None:
    clock = [0.0]
    module = sys.modules["blr_analysis.sensitivity.monitor"]
    monkeypatch.setattr(module, "perf_counter", lambda: clock[0])
    task = one_task()
    q = posterior(1)

    def slow() -> blr.Posterior:
        clock[0] += 2.5
        return q

    monitor = blr.Monitor(task)
    monitor(slow, 1)
    monitor(q, 2)
    monitor(slow, 3)
    assert monitor.table.seconds.tolist() == [2.5, 0.0, 2.5]
    assert monitor.seconds == 5.0


def test_the_best_epoch_has_the_smallest_estimate() -> None:
    task = one_task()
    monitor = blr.Monitor(task)
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
    nan.mean["0.weight"].fill_(NAN)
    far = fitted(task)
    far.form = far.form.with_values({n: v * NAN for n, v in far.form.values.items()})
    small = blr.Task(mlp(outputs=C), data(10))
    return {
        "repeated": (q, 2, InputError, "does not follow epoch 2"),
        "back": (q, 1, InputError, "does not follow epoch 2"),
        "fraction": (q, 2.5, InputError, "whole number"),
        "negative": (q, -1, InputError, "whole number"),
        "true": (q, True, InputError, "whole number"),
        "other model": (fitted(blr.Task(mlp(hidden=6, outputs=C), data())), 4, PosteriorError,
                        "another model"),
        "other data": (fitted(small), 4, PosteriorError, "n_data=10"),
        "nan mean": (nan, 4, PosteriorError, "NaN or inf"),
        "nan precision": (far, 4, ModelError, "variance"),
        "optimizer": (torch.optim.SGD(task.model.parameters()), 4, InputError, "posterior must be"),
        "nothing": (None, 4, InputError, "posterior must be"),
        "function of nothing": (lambda: None, 4, InputError, "posterior must be"),
    }  # fmt: skip


@pytest.mark.parametrize("case", bad_calls())
def test_what_was_recorded_survives_a_bad_call(case: str) -> None:
    source, epoch, kind, words = bad_calls()[case]
    task = one_task()
    monitor = watched(task, epochs=2)
    rows, seen = str(monitor.rows), monitor.deviations
    with pytest.raises(kind, match=words):
        monitor(source, epoch)
    assert str(monitor.rows) == rows
    assert torch.equal(monitor.deviations, seen)
    assert monitor(posterior(1), 4) is not None  # and the run goes on
    assert monitor.epochs == [1, 2, 4]


def test_an_epoch_that_failed_can_be_tried_again() -> None:
    task = one_task()
    monitor = blr.Monitor(task)
    with pytest.raises(ZeroDivisionError):
        monitor(lambda: 1 / 0, 1)
    assert monitor(posterior(1), 1) is not None


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"every": 0}, InputError, "every"),
        ({"examples": 0}, InputError, "examples"),
        ({"examples": N + 1}, InputError, "only 30"),
        ({"examples": [1, 1]}, InputError, "more than once"),
        ({"examples": []}, InputError, "no example"),
        ({"keep": ("deviation", "shoes")}, InputError, "keep must be one of"),
        ({"correction": "both"}, InputError, "correction"),
        ({"test": data()}, InputError, "test must be"),
    ],
)
def test_bad_options(options: dict, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        blr.Monitor(one_task(), **options)


def test_a_test_task_that_does_not_fit_is_refused_before_training() -> None:
    task = one_task()
    x, y = data(12, 1)
    with pytest.raises(DataError, match=r"test task.*0 … 2.*found 3"):
        blr.Monitor(task, test=blr.Task(task.model, (x, y + 1)))
    with pytest.raises(PosteriorError, match="another model"):
        blr.Monitor(task, test=blr.Task(mlp(outputs=5), (x, y)))
    with pytest.raises(InputError, match="likelihood"):
        blr.Monitor(task, test=blr.Task(task.model, (x, x[:, :C]), likelihood="gaussian"))
    with pytest.raises(InputError, match="task must be"):
        blr.Monitor(task.model)
    same = blr.Monitor(task, test=blr.Task(mlp(outputs=C, seed=3), (x, y)))  # run under the model
    row = same(posterior(1), 1)
    assert row is not None
    assert row["test_nll"] == pytest.approx(float(F.cross_entropy(task.model(x).detach(), y)))


def test_what_is_not_kept_is_not_there() -> None:
    monitor = watched(one_task(), keep=("leverage",))
    assert monitor.history("leverage").shape == (3, N)
    with pytest.raises(InputError, match="measure must be one of 'leverage'"):
        _ = monitor.deviations
    assert blr.Monitor(one_task(), keep="loss").keep == ("loss",)
    bare = watched(one_task(), keep=())
    assert len(bare.table) == 3
    with pytest.raises(InputError, match="keep="):
        bare.plot(kind="sensitivities")


# Saved and continued.


def test_a_resumed_run_has_the_same_table(tmp_path) -> None:
    task = one_task()
    whole = watched(task, epochs=4, examples=7)
    half = watched(task, epochs=2, examples=7)
    torch.save(half.state_dict(), tmp_path / "monitor.pt")
    resumed = blr.Monitor(task, examples=7)
    resumed.load_state_dict(torch.load(tmp_path / "monitor.pt", weights_only=True))
    assert repr(resumed) == repr(half)
    with pytest.raises(InputError, match="does not follow epoch 2"):
        resumed(posterior(1), 2)
    for epoch in (3, 4):
        resumed(posterior(epoch), epoch)
    drop = "seconds"
    pd.testing.assert_frame_equal(resumed.table.drop(columns=drop), whole.table.drop(columns=drop))
    assert torch.equal(resumed.deviations, whole.deviations)
    assert torch.equal(resumed.history("self_influence"), whole.history("self_influence"))
    half(posterior(1), 3)  # the saved state is a copy
    assert len(resumed) == 4


def test_a_monitor_without_records_is_saved_and_resumed(tmp_path) -> None:
    task = one_task()
    monitor = blr.Monitor(task, every=5)
    monitor(posterior(1), 3)  # seen, not recorded
    torch.save(monitor.state_dict(), tmp_path / "m.pt")
    resumed = blr.Monitor(task, every=5)
    resumed.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    assert len(resumed) == 0 and resumed.deviations.shape == (0, N)
    assert list(resumed.table) == list(watched(task).table) and len(resumed.table) == 0
    with pytest.raises(InputError, match="does not follow epoch 3"):
        resumed(posterior(1), 3)


def test_a_foreign_state_is_refused_and_nothing_is_lost() -> None:
    task = one_task()
    monitor = watched(task, examples=7)
    good = monitor.state_dict()
    assert isinstance(good["rows"], dict)
    for bad, words in (
        ({}, "no state"),
        (None, "no state"),
        ({**good, "rows": {}}, "no state"),
        ({**good, "n_data": 31}, "same task"),
        (watched(task, examples=7, seed=1).state_dict(), "same task"),
        (watched(task, examples=8).state_dict(), "same task"),
        (watched(task, examples=7, keep=("loss",)).state_dict(), "keep="),
        ({**good, "kept": {k: v[:1] for k, v in good["kept"].items()}}, "keep="),
    ):
        with pytest.raises(InputError, match=words):
            monitor.load_state_dict(bad)
        assert monitor.epochs == [1, 2, 3] and monitor.deviations.shape == (3, 7)


# Tables and pictures.


def test_the_table_is_saved_and_grows(tmp_path) -> None:
    task = one_task()
    monitor = watched(task)
    assert monitor.table.epoch.tolist() == [1, 2, 3]
    monitor.table.to_csv(tmp_path / "monitor.csv", index=False)
    read = pd.read_csv(tmp_path / "monitor.csv")
    pd.testing.assert_frame_equal(read, monitor.table)
    monitor(posterior(1), 9)
    assert len(monitor.table) == 4


def test_the_generalisation_picture_shows_the_rows() -> None:
    task = one_task()
    monitor = watched(task, test=blr.Task(task.model, data(9, 1)))
    ax = monitor.plot()
    curves = {line.get_label(): list(line.get_ydata()) for line in ax.lines}
    table = monitor.table
    assert curves == {
        "training data": table.train_nll.tolist(),
        "leave-one-out, from training data": table.loo_nll.tolist(),
        "test data": table.test_nll.tolist(),
    }
    assert list(ax.lines[0].get_xdata()) == [1, 2, 3]
    accuracy = monitor.plot(measure="accuracy")
    assert list(accuracy.lines[1].get_ydata()) == table.loo_accuracy.tolist()
    assert len(watched(task).plot().lines) == 2  # nothing where there is no test task
    given = Figure().subplots()
    assert monitor.plot(given) is given
    monitor.rows[1]["loo_nll"] = math.inf
    assert math.isnan(monitor.plot().lines[1].get_ydata()[1])  # a gap


def test_the_sensitivities_picture_shows_the_quantiles_and_the_highest() -> None:
    task = one_task()
    monitor = watched(task)
    ax = monitor.plot(kind="sensitivities", top=2, labels={i: f"no{i}" for i in range(N)})
    found = monitor.deviations
    first, second = found[-1].argsort(descending=True)[:2].tolist()
    curves = {line.get_label(): torch.as_tensor(line.get_ydata()) for line in ax.lines}
    assert list(curves) == ["median", f"{first}: no{first}", f"{second}: no{second}"]
    drawn = found.double()
    if ax.get_yscale() == "linear":
        torch.testing.assert_close(curves["median"].double(), drawn.quantile(0.5, dim=1))
        torch.testing.assert_close(curves[f"{first}: no{first}"].double(), drawn[:, first])
    assert len(ax.collections) == 2
    other = monitor.plot(kind="sensitivities", measure="self_influence")
    assert "self-influence" in other.get_ylabel()


def test_bad_pictures() -> None:
    monitor = watched(one_task())
    for options, words in (
        ({"kind": "pie"}, "kind"),
        ({"measure": "shoes"}, "measure"),
        ({"kind": "sensitivities", "measure": "loss"}, "measure must be one of"),
        ({"kind": "sensitivities", "labels": {}}, "labels"),
        ({"measure": "accuracy", "ax": 3}, "ax must be"),
    ):
        with pytest.raises(InputError, match=words):
            monitor.plot(**options)
    with pytest.raises(InputError, match="nothing yet"):
        blr.Monitor(one_task()).plot()
