"""Groups taken out of models as people train them: replays, retraining, intervals, damped steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits, load_iris
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import blr_analysis as blr
from blr_analysis.backprop.loss import Evaluation, evaluated
from blr_analysis.errors import DataError, InputError, ModelError
from blr_analysis.sensitivity.groups.first_weights import first_weights
from blr_analysis.sensitivity.groups.perturbed import (
    ByClass,
    References,
    against,
    interval,
    supported,
)
from blr_analysis.sensitivity.groups.replay import Replay, ReplayRecipe, _minibatches
from blr_analysis.sensitivity.objective import changed
from blr_analysis.views import make_table

EPOCHS, BATCH = 12, 32


def digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return torch.tensor(x[order] / 16, dtype=torch.float32), torch.tensor(y[order])


X, Y = digits()
TRAIN, TEST = slice(0, 600), slice(600, 1200)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


adam = partial(torch.optim.AdamW, lr=5e-3)
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def trained(
    build: Callable[[], nn.Module],
    x: Tensor,
    y: Tensor,
    seed: int,
    make: Callable[..., torch.optim.Optimizer] = adam,
    *,
    epochs: int = EPOCHS,
    batch: int = BATCH,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
) -> nn.Module:
    """An ordinary loop: minibatches, a fixed number of epochs."""
    torch.manual_seed(seed)
    model = build()
    optimizer = make(model.parameters())
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            loss(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return model


def fit(x: Tensor, y: Tensor, seed: int, kind: str = "adam") -> nn.Module:
    return trained(network, x, y, seed, adam if kind == "adam" else sgd)


@cache
def problem(kind: str = "adam") -> tuple[blr.Task, blr.Posterior, blr.Task]:
    task = blr.Task(fit(X[TRAIN], Y[TRAIN], 0, kind), (X[TRAIN], Y[TRAIN]))
    q = blr.fit_laplace(task, structure="kron", prior_precision=1.0, progress=False)
    return task, q, blr.Task(task.model, (X[TEST], Y[TEST]))


@pytest.mark.slow
def test_classes_taken_out_of_a_model_stopped_early_come_near_retraining() -> None:
    covered = []
    for kind in ("adam", "sgd"):
        task, q, test = problem(kind)
        x, y = X[TRAIN], Y[TRAIN]
        runs = np.empty((10, 3))  # test loss without a class, by seed
        for c, seed in np.ndindex(runs.shape):
            model = fit(x[y != c], y[y != c], seed + 1, kind)
            runs[c, seed] = nn.functional.cross_entropy(model(X[TEST]), Y[TEST]).item()
        known = runs.mean(1)
        others = [np.delete(runs, k, axis=1).mean(1) for k in range(3)]
        ceiling = np.mean([np.corrcoef(runs[:, k], o)[0, 1] for k, o in enumerate(others)])
        table = blr.what_if_each(task, q, evaluate=test, progress=False)
        assert set(table.solver) == {"replay"} and (table.passes <= 6.5).all()
        predicted = table.nll_after.to_numpy()
        assert np.corrcoef(predicted, known)[0, 1] > min(0.7, ceiling - 0.05)
        error = np.mean(np.abs(predicted - known) / known)
        assert error < 0.2 and error < np.mean(np.abs(table.nll_before - known) / known) / 2
        covered.append(np.mean((table.nll_low <= known) & (known <= table.nll_high)))
    assert np.mean(covered) >= 0.75


def made_up() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(500, 12, generator=draw), torch.randn(12, 4, generator=draw)
    return x, (x @ w + 0.5 * torch.randn(500, 4, generator=draw)).argmax(1)


def flowers() -> tuple[Tensor, Tensor]:
    iris = load_iris()
    order = np.random.default_rng(0).permutation(150)
    x = torch.tensor(iris.data[order] - iris.data.mean(0), dtype=torch.float32)
    return x / x.std(0), torch.tensor(iris.target[order])


@pytest.mark.parametrize(
    ("data", "n", "build", "how", "labels", "most", "bounds"),
    [
        (
            made_up,
            300,
            lambda: nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 4)),
            dict(make=partial(torch.optim.AdamW, lr=3e-3), epochs=15, batch=32),
            (1, 3),
            30,
            (0.25, 0.35),
        ),
        (  # six passes over a hundred flowers are 17 steps
            flowers,
            105,
            lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)),
            dict(make=partial(torch.optim.SGD, lr=0.05, momentum=0.9), epochs=30, batch=16),
            (0, 1, 2),
            60,
            (0.3, 0.4),
        ),
    ],
)
def test_a_short_training_that_stays_far_from_the_model_is_made_longer(
    data, n: int, build, how: dict, labels: tuple[int, ...], most: int, bounds: tuple[float, float]
) -> None:
    """A single group of a small data set: six passes, most of them spent on finding the step size,
    see a third to a half of what retraining does."""
    x, y = data()
    new, y_new, x, y = x[n:], y[n:], x[:n], y[:n]
    task = blr.Task(trained(build, x, y, 0, **how), (x, y))
    q = blr.fit_laplace(task, progress=False)
    test = blr.Task(task.model, (new, y_new))
    gaps: dict[int | None, list[float]] = {None: [], 6: []}
    for label in labels:
        kept = y != label
        models = [trained(build, x[kept], y[kept], seed, **how) for seed in range(3)]
        truth = np.mean([nn.functional.cross_entropy(m(new), y_new).item() for m in models])
        for passes, gap in gaps.items():
            result = blr.what_if(
                task, q, remove=y == label, evaluate=test, passes=passes, progress=False
            )
            assert result.interval[0] >= 0
            assert result.passes <= (passes or most)
            gap.append(abs(result.nll / truth - 1))
    assert np.mean(gaps[None]) < bounds[0] < bounds[1] < np.mean(gaps[6]), gaps


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_the_weights_tell_which_steps_trained_them(kind: str) -> None:
    task, q, _ = problem(kind)
    result = blr.what_if(task, q, remove=Y[TRAIN] == 3, progress=False)
    record = result.posterior.record["replay"]
    assert record["family"] == min(record["unlike"], key=record["unlike"].get) == kind


def test_a_class_that_is_gone_is_not_predicted() -> None:
    task, q, test = problem()
    result = blr.what_if(task, q, remove=Y[TRAIN] == 3, evaluate=test, progress=False)
    gone = result.by_class.set_index("class").loc[3]
    assert gone.accuracy_before > 0.8 and gone.accuracy_after < 0.05
    low, high = result.interval
    assert low < result.nll < high and f"{low:.2f} to {high:.2f}" in repr(result)
    assert result.note == ""


def test_a_large_part_of_the_data_is_said_to_be_one() -> None:
    task, q, test = problem()
    result = blr.what_if(task, q, remove=Y[TRAIN] < 3, evaluate=test, progress=False)
    assert "large part" in result.note and result.note in repr(result)
    low, high = result.interval
    assert high - result.nll > result.nll - low


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_one_class_alone_is_said_to_be_alone_and_trained_for_as_many_epochs(
    likelihood: str,
) -> None:
    """What it says of the other grows for as long as it trains."""
    pair = (Y == 3) | (Y == 8)
    x, y = X[pair], (Y[pair] == 8).long()
    new, y_new, x, y = x[200:], y[200:], x[:200], y[:200]
    outputs = 2 if likelihood == "categorical" else 1

    def loss(f: Tensor, y: Tensor) -> Tensor:
        if outputs == 2:
            return nn.functional.cross_entropy(f, y)
        return nn.functional.binary_cross_entropy_with_logits(f, y[:, None].float())

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, outputs))

    how: Any = dict(make=partial(torch.optim.AdamW, lr=1e-3), epochs=15, loss=loss)

    def task_of(x: Tensor, y: Tensor, **columns: list[int]) -> blr.Task:
        labels = y if outputs == 2 else y[:, None].float()
        return blr.Task(model, (x, labels), likelihood=likelihood, metadata=columns)

    model = trained(build, x, y, 0, **how)
    task, test = task_of(x, y, source=[0, 1] * 100), task_of(new, y_new)
    q = blr.fit_laplace(task, prior_precision=1.0, progress=False)
    table = blr.what_if_each(task, q, evaluate=test, progress=False)
    assert all("one class" in note for note in table.note)
    if outputs == 1:  # where its weights do not tell which kind of steps trained it
        assert (table.nll_high > 4 * table.nll_after).all()
        return
    for gone, predicted in enumerate(table.nll_after):
        kept = y != gone
        models = [trained(build, x[kept], y[kept], seed, **how) for seed in range(3)]
        runs = [loss(m(new), y_new).item() for m in models]
        assert 0.5 < predicted / np.mean(runs) < 2  # with as many steps 2.3 times the truth
        assert table.nll_low[gone] < np.mean(runs) < table.nll_high[gone]
    result = blr.what_if(task, q, remove=y == 0, progress=False)
    assert result.note == table.note[0] and result.note in repr(result)
    both = blr.what_if_each(task, q, by="source", progress=False)
    assert not any("one class" in note for note in both.note)


def test_the_same_seed_gives_the_same_answer_and_nothing_of_the_model_moves() -> None:
    task, q, test = problem()
    before = {n: p.clone() for n, p in task.model.named_parameters()}
    state = torch.random.get_rng_state()
    settings = dict(remove=Y[TRAIN] == 3, evaluate=test, passes=3, progress=False)
    one, two = (blr.what_if(task, q, **settings) for _ in "ab")
    assert one.nll == two.nll and torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(p, before[n]) for n, p in task.model.named_parameters())


def test_new_labels_of_a_group_are_not_answered_by_a_step_for_each() -> None:
    task, q, test = problem()
    labels = {i: (int(Y[i]) + 1) % 10 for i in range(6)}  # 1 % of the data
    answer = blr.what_if(task, q, relabel=labels, evaluate=test, progress=False)
    assert answer.solver == "replay" and abs(answer.nll - answer.before.nll) < 0.1
    one = blr.what_if(task, q, relabel={0: labels[0]}, evaluate=test, progress=False)
    assert one.solver == "posterior"


def test_what_does_not_change_is_trained_alike() -> None:
    """A label that stays what it was changes nothing: the minibatches are the same ones."""
    task, q, test = problem()
    same = {i: int(Y[i]) for i in range(0, 60, 3)}
    answer = blr.what_if(task, q, relabel=same, evaluate=test, progress=False)
    assert answer.solver == "replay" and answer.nll == pytest.approx(answer.before.nll, abs=1e-4)
    assert "no change" in answer.note and answer.note in repr(answer)


def test_minibatches_keep_their_examples_when_others_leave_and_come() -> None:
    task = problem()[0]
    recipe = ReplayRecipe("adam", 0.1, 1, 64, 5, task.n_data)
    leaving = torch.arange(0, 600, 7)
    prior = blr.fit_laplace(task, structure="diag", prior_precision=1.0, progress=False).prior
    more = blr.Task(task.model, (X[600:650], Y[600:650]))
    data = changed(task, prior, leaving=leaving, added=more, labels={1: 3, 2: 3})
    whole = [(task, torch.arange(600), torch.arange(600))]
    parts = [(*part, at) for part, at in zip(data.parts, data.places, strict=True)]
    before, after = _minibatches(whole, recipe), _minibatches(parts, recipe)
    seen = []
    for _ in range(2 * (600 // 64)):
        kept = next(before)[0][1]
        now = torch.cat([at for *_, at in next(after)])
        seen += now[now >= 600].tolist()
        expected = kept[~torch.isin(kept, leaving)]
        assert sorted(now[now < 600].tolist()) == expected.tolist()
    assert len(set(seen)) > 40  # nearly all that came, in two rounds


def test_a_regression_is_not_told_more_than_the_first_weights_lose() -> None:
    x = torch.linspace(-2, 2, 300)[:, None]
    y = 4 * x.abs()
    model = trained(
        lambda: nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 1)),
        *(x, y, 0, partial(torch.optim.Adam, lr=1e-2)),
        epochs=40,
        loss=nn.functional.mse_loss,
    )
    task = blr.Task(model, (x, y), likelihood="gaussian")
    q = blr.fit_laplace(task, structure="diag", prior_precision=1.0, progress=False)
    settings = dict(remove=x[:, 0] > 0, solver="replay", passes=100, progress=False)
    answer = blr.what_if(task, q, **settings)
    assert "extrapolates" in answer.note and answer.interval[1] > 1.1 * answer.nll
    start = Evaluation(torch.tensor([1.0, 4.0]), None)
    before = Evaluation(torch.tensor([5.0, 0.1]), None)
    after = supported(Evaluation(torch.tensor([7.0, 3.0]), None), before, start)
    assert after.losses.tolist() == [5.0, 3.0]


def test_a_loss_of_classes_is_never_below_zero() -> None:
    """The difference of two replays can be."""
    hits = torch.ones(2)
    after = supported(Evaluation(torch.tensor([-0.3, 0.1]), hits), *[Evaluation(hits, hits)] * 2)
    assert after.nll == pytest.approx(0, abs=1e-7) and after.losses.diff().item() == pytest.approx(
        0.4
    )
    kept = Evaluation(torch.tensor([-0.1, 0.3]), hits)
    assert torch.equal(supported(kept, kept, kept).losses, kept.losses)


def test_a_list_of_posteriors_averages_their_changes() -> None:
    task, q, test = problem()
    other = blr.fit_laplace(task, structure="diag", prior_precision=1.0, progress=False)
    chosen = dict(evaluate=test, solver="posterior", progress=False)
    tables = [blr.what_if_each(task, p, **chosen) for p in (q, other)]
    both = blr.what_if_each(task, [q, other], **chosen)
    mean = (tables[0].nll_change + tables[1].nll_change) / 2
    assert np.allclose(both.nll_change, mean) and not np.allclose(both.nll_change, 0)
    settings = dict(remove=Y[TRAIN] == 3, evaluate=test, passes=3, progress=False)
    single, double = (blr.what_if(task, p, **settings) for p in (q, [q, q]))
    assert double.nll != single.nll and double.passes > single.passes  # of other first weights


class Bare(nn.Module):
    """A parameter that no layer can draw anew."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(64, 10), nn.Parameter(torch.full((10,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 10), nn.BatchNorm1d(10)).eval()


def test_what_cannot_be_drawn_begins_shuffled_and_says_so() -> None:
    """Of a removed class nearer to retraining than no change, within the range, not converged."""
    task = blr.Task(trained(Bare, X[TRAIN], Y[TRAIN], 0), (X[TRAIN], Y[TRAIN]))
    q = blr.fit_laplace(task, prior_precision=1.0, progress=False)
    kept, test = Y[TRAIN] != 3, blr.Task(task.model, (X[TEST], Y[TEST]))
    result = blr.what_if(task, q, remove=~kept, evaluate=test, progress=False)
    again = trained(Bare, X[TRAIN][kept], Y[TRAIN][kept], 1)
    truth = nn.functional.cross_entropy(again(X[TEST]), Y[TEST]).item()
    assert result.solver == "replay" and not result.converged and "shuffled" in repr(result)
    assert abs(result.nll - truth) < 0.5 * abs(result.before.nll - truth)
    low, high = result.interval
    assert low < truth < high


def test_a_training_that_cannot_be_replayed_is_not() -> None:
    torch.manual_seed(0)
    task = blr.Task(normed(), (X[TRAIN], Y[TRAIN]))
    q = blr.fit_laplace(task, structure="diag", prior_precision=1.0, progress=False)
    result = blr.what_if(task, q, remove=Y[TRAIN] == 3, progress=False)
    assert result.solver == "posterior" and result.note and result.note in repr(result)
    assert not result.converged and "not converged" in repr(result)
    whole = blr.what_if(task, q, remove=Y[TRAIN] == 3, solver="posterior", progress=False)
    most = 3 * max(float(result.before.losses.max()), np.log(10))  # of any example
    assert result.interval[1] >= float(whole.after.losses.clamp(max=most).mean()) - 1e-5
    gone = Y[TRAIN] == 3
    named = blr.what_if(task, q, remove=gone, solver="cg", passes=8, progress=False)
    assert named.interval[0] <= named.before.nll <= named.interval[1]  # most of it is training
    with pytest.raises(InputError, match="replay"):
        blr.what_if(task, q, remove=gone, solver="replay", progress=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_first_weights_are_those_of_a_new_model(dtype: torch.dtype) -> None:
    model = network().to(dtype)
    task = blr.Task(model, (X[TRAIN], Y[TRAIN]))
    drawn = first_weights(task, 7)
    again = network().to(dtype)
    torch.manual_seed(7)
    for module in again:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    for name, p in again.named_parameters():  # which optimizers move by less than half precision
        torch.testing.assert_close(drawn[name], p.float(), rtol=0, atol=0)


def test_retraining_is_the_mean_over_seeds_and_is_kept(tmp_path) -> None:
    task, q, test = problem()
    calls: list[tuple[int, int]] = []

    def train(data, seed: int) -> nn.Module:
        calls.append((len(data), seed))
        x, y = zip(*data, strict=True)
        return fit(torch.stack(x), torch.stack(y), seed)

    settings = dict(evaluate=test, solver="retrain", train=train, cache=tmp_path, progress=False)
    result = blr.what_if(task, q, remove=Y[TRAIN] == 3, seeds=2, **settings)
    kept = Y[TRAIN] != 3
    expected = [
        nn.functional.cross_entropy(
            fit(X[TRAIN][kept], Y[TRAIN][kept], seed)(X[TEST]), Y[TEST]
        ).item()
        for seed in (0, 1)
    ]
    assert result.nll == pytest.approx(np.mean(expected), rel=1e-5)
    assert calls == [(int(kept.sum()), 0), (int(kept.sum()), 1)]
    assert blr.what_if(task, q, remove=Y[TRAIN] == 3, seeds=2, **settings).nll == result.nll
    assert len(calls) == 2
    low, high = result.interval
    half = 3.0776835 * np.std(expected, ddof=1) * np.sqrt(1.5)
    assert (low, high) == pytest.approx((np.mean(expected) - half, np.mean(expected) + half), 1e-4)


class Counting:
    """The sum of the targets that a training is given, as its only weights."""

    rows = X[:8, :3], Y[:8] % 2

    def __init__(self, kind: str = "pairs") -> None:
        self.runs = 0
        items: dict[str, Any] = {
            "pairs": self.rows,
            "numbers": [(x, int(y)) for x, y in zip(*self.rows, strict=True)],
            "dicts": [{"x": x, "labels": y} for x, y in zip(*self.rows, strict=True)],
            "triples": TensorDataset(*self.rows, self.rows[1]),
            "turned": TensorDataset(*self.rows[::-1]),
        }
        forwards: dict[str, Any] = {
            "dicts": lambda model, batch: (model(batch["x"]), batch["labels"]),
            "triples": lambda model, batch: (model(batch[0]), batch[1]),
            "turned": lambda model, batch: (model(batch[1]), batch[0]),
        }
        self.task = blr.Task(nn.Linear(3, 2), items[kind], forward=forwards.get(kind))
        self.q = blr.fit_laplace(self.task, prior_precision=1.0, progress=False)

    def __call__(self, data: Any, seed: int) -> dict[str, Tensor]:
        self.runs += 1
        total = torch.zeros(2, 3)
        for batch in DataLoader(data, batch_size=3):
            x, y = (batch["x"], batch["labels"]) if isinstance(batch, dict) else batch
            total[0] += (x * y[:, None]).sum(0)
        return {"weight": total, "bias": torch.zeros(2)}

    def total(self, train: Any, **change: Any) -> Tensor:
        settings: dict[str, Any] = dict(solver="retrain", train=train, seeds=1, progress=False)
        return blr.what_if(self.task, self.q, **settings, **change).parameters["weight"][0]


@pytest.mark.parametrize("kind", ["pairs", "numbers", "dicts"])
def test_a_training_is_given_items_with_the_new_targets(kind: str) -> None:
    counting = Counting(kind)
    x, y = counting.rows
    new = y.clone()
    new[[1, 4]] = 1 - new[[1, 4]]
    labels = {i: int(new[i]) for i in (4, 1)}
    torch.testing.assert_close(counting.total(counting, relabel=labels), (x * new[:, None]).sum(0))


@pytest.mark.parametrize("kind", ["triples", "turned"])
def test_items_of_another_form_are_not_relabelled_for_a_training(kind: str) -> None:
    counting = Counting(kind)
    old = int(counting.rows[1][1])
    with pytest.raises(DataError, match="relabel="):
        counting.total(counting, relabel={1: old})


def test_a_kept_answer_is_that_of_the_same_question(tmp_path) -> None:
    """Neither of other targets or added examples between the first and the last one, nor of
    another training."""
    counting = Counting()
    other = [int(label) for label in 1 - counting.rows[1]]
    middle = torch.tensor([[0.0, 0.0, 0.0], [5.0, 5.0, 0.0], [0.0, 0.0, 0.0]])
    ones = torch.ones(3, dtype=torch.long)
    changes = [
        dict(relabel={1: other[1], 2: other[2], 3: other[3]}),
        dict(relabel={1: other[1], 2: 1 - other[2], 3: other[3]}),
        dict(add=blr.Task(counting.task.model, (middle, ones))),
        dict(add=blr.Task(counting.task.model, (-middle, ones))),
    ]
    scale = 1.0

    def train(data: Any, seed: int) -> dict[str, Tensor]:
        return {n: scale * p for n, p in counting(data, seed).items()}

    for change in changes:
        scale = 1.0
        kept = [counting.total(train, **change, cache=tmp_path) for _ in range(2)]
        truth = counting.total(counting, **change)
        scale = 2.0
        torch.testing.assert_close(kept, [truth, truth])
        again = counting.total(train, **change, cache=tmp_path)
        torch.testing.assert_close(again, 2 * truth)
    assert counting.runs == 3 * len(changes)


def test_a_few_retrained_groups_scale_the_others() -> None:
    task, q, test = problem()

    def train(data, seed: int) -> nn.Module:
        x, y = zip(*data, strict=True)
        return fit(torch.stack(x), torch.stack(y), seed)

    parts = blr.Task(task.model, (X[TRAIN], Y[TRAIN]), metadata={"part": (Y[TRAIN] // 2).tolist()})
    settings = dict(by="part", evaluate=test, progress=False)
    plain = blr.what_if_each(parts, q, **settings)
    table = blr.what_if_each(parts, q, train=train, retrain=2, **settings)
    true = table.solver == "retrain"
    assert true.sum() == 2 and (table.solver[~true] == "replay, calibrated").all()
    ratios = np.log(table.nll_change[true] / plain.nll_change[true])
    expected = np.exp(ratios.mean()) * plain.nll_change[~true]
    assert np.allclose(table.nll_change[~true], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (dict(solver="retrain"), "train="),
        (dict(train=lambda data, seed: network()), "retrain"),
        (dict(solver="retrain", train=lambda data, seed: 3), "state dict"),
        (dict(solver="retrain", train=lambda data, seed: nn.Linear(64, 10)), "another model"),
        (dict(solver="retrain", train=lambda data, seed: network(), seeds=0), "seeds"),
        (dict(solver="replay", steps=2), "steps"),
    ],
)
def test_bad_settings_are_named(settings, word: str) -> None:
    task = blr.Task(network(), (X[TRAIN], Y[TRAIN]))
    q = blr.fit_laplace(task, structure="diag", prior_precision=1.0, progress=False)
    with pytest.raises((InputError, ModelError), match=word):
        blr.what_if(task, q, remove=Y[TRAIN] == 3, progress=False, **settings)


def test_a_step_that_overshoots_is_shortened_unless_it_was_asked_for() -> None:
    torch.manual_seed(0)
    task = blr.Task(normed(), (X[TRAIN], Y[TRAIN]))
    q = blr.fit_laplace(task, structure="diag", prior_precision=1e-3, progress=False)
    chosen = dict(remove=(Y[TRAIN] < 5).nonzero().flatten().tolist(), progress=False)
    asked = blr.what_if(task, q, solver="posterior", **chosen)
    damped = blr.what_if(task, q, **chosen)

    def objective(weights: dict[str, Tensor]) -> float:
        f = torch.func.functional_call(task.model, weights, (X[TRAIN][Y[TRAIN] >= 5],))
        loss = nn.functional.cross_entropy(f, Y[TRAIN][Y[TRAIN] >= 5], reduction="sum")
        return float(loss + 0.5e-3 * sum(w.square().sum() for w in weights.values()))

    assert objective(asked.parameters) > objective(dict(q.mean))
    assert asked.damping == 1
    assert damped.damping < 1 and objective(damped.parameters) <= objective(dict(q.mean)) * 1.00001
    assert "damped" in repr(damped)


@pytest.mark.parametrize(
    ("likelihood", "times"), [("categorical", 3), ("bernoulli", 3), ("gaussian", 1)]
)
def test_ranges_reach_as_far_as_the_logits_do(likelihood: str, times: float) -> None:
    model = nn.Linear(4, 3)
    y = torch.arange(40) % 3
    task = blr.Task(
        model,
        (
            torch.randn(40, 4),
            y if likelihood == "categorical" else nn.functional.one_hot(y).float(),
        ),
        likelihood=likelihood,
    )
    reached = task.parameters()
    replay = Replay(reached, ReplayRecipe("sgd", 0.1, 9, 8, 0, 40), reached, 0.0, 0.0, {})
    before, _ = evaluated(task, reached, progress=False)
    own = {n: 3 * w for n, w in reached.items()}
    for weights, reach in ((own, times), (reached, 1), ({n: w / 3 for n, w in own.items()}, 1)):
        found = References(task, before, weights)._reach(replay)
        assert found == pytest.approx(np.log(reach), abs=1e-5)


def test_intervals_and_differences_follow_their_formulas() -> None:
    low, high = interval(1.0, 2.0, "cg")
    assert low == pytest.approx(2 - np.hypot(1 - np.exp(-0.15), 0.02))
    assert high == pytest.approx(2 + np.hypot(np.exp(0.15) - 1, 0.02))
    low, _ = interval(1.0, 2.0, "replay", 0.3)
    assert low == pytest.approx(2 - np.sqrt((1 - np.exp(-0.3)) ** 2 + 0.3**2))
    low, high = interval(2.0, 1.0, "replay", 0.3, np.log(2))  # half the data
    assert low == pytest.approx(1 - np.hypot(2 * np.exp(0.15) - 1, 0.3))
    assert high == pytest.approx(1 + np.hypot(1 - np.exp(-0.3), 0.3))
    assert interval(1.0, 2.0, "replay", reach=np.log(3)) == pytest.approx(  # the logits' spread
        (1 + np.exp(-0.3), 1 + 3)
    )
    before = Evaluation(torch.tensor([0.1, 0.3]), torch.tensor([True, True]))
    reference = Evaluation(torch.tensor([0.1, 0.3]), torch.tensor([True, False]))
    without = Evaluation(torch.tensor([0.2, 2.3]), torch.tensor([True, False]))
    after = against(without, reference, before)
    assert torch.allclose(after.losses, torch.tensor([0.2, 2.3]))
    behind = replace(before, losses=torch.tensor([0.0, 0.1]))
    change = against(without, reference, behind).losses - behind.losses
    assert torch.allclose(change, torch.tensor([0.1, 2.0]))
    below = against(reference, without, before)
    assert float(below.losses[1]) < 0
    table = ByClass(torch.tensor([0, 1]), before, below)
    assert make_table(table).nll_after.tolist()[1] == 0.0
    assert after.correct.tolist() == [True, False]  # the second loss rose by more than a nat


def test_the_range_of_new_labels_reaches_what_a_long_training_learns_by_heart() -> None:
    task, q, test = problem()
    labels = {i: (int(Y[i]) + 1) % 10 for i in range(60)}
    answer = blr.what_if(task, q, relabel=labels, evaluate=test, progress=False)
    change = answer.nll - answer.before.nll
    assert answer.solver == "replay" and change > 0
    assert answer.interval[1] >= answer.before.nll + 2 * change
