"""Validation by retraining: the score against a plain loop, its range and ceiling by simulation."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from models import normal
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.utils.data import default_collate

import blr_analysis as blr
from blr_analysis.errors import InputError, StorageError
from blr_analysis.sensitivity.agreement import agreement_of, agreement_of_seeds, ceiling_of
from blr_analysis.sensitivity.halves import FIRST_SEED

N = 12
M = 6
HALVES = 5
SEEDS = 2
EPOCHS = 6
LR = 0.5
CLASSES = torch.arange(N + M) % 3
WORDS = (torch.arange(6 * (N + M)).view(N + M, 6) * 5).remainder(7).remainder(5)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def language_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Linear(4, 5)).double()


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """As users write it in their loop."""
    if y.ndim == 2:
        return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten())
    return F.cross_entropy(model(x), y)


def test_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """In nats per example: of texts the sum over their tokens."""
    with torch.no_grad():
        if y.ndim == 2:
            losses = F.cross_entropy(model(x)[:, :-1].mT, y[:, 1:], reduction="none")
            return losses.sum(1)
        return F.cross_entropy(model(x), y, reduction="none")


test_losses.__test__ = False  # type: ignore[attr-defined]


@dataclass
class Case:
    build: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    likelihood: str
    own_training: bool = False

    def plain(self, x: Tensor, y: Tensor, seed: int) -> nn.Module:
        """A loop of gradient descent on all data at once; of a user's own the seed draws noise."""
        model = self.build()
        if self.own_training:
            torch.manual_seed(seed)
            for parameter in model.parameters():
                parameter.data += 0.3 * torch.randn_like(parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            mean_loss(model, x, y).backward()
            optimizer.step()
        return model

    @property
    def recipe(self) -> blr.Recipe:
        if self.own_training:
            return blr.Recipe(
                train=lambda data, seed: self.plain(*default_collate(list(data)), seed)
            )
        initial = self.build().state_dict()
        return blr.Recipe("sgd", lr=LR, epochs=EPOCHS, batch_size=N, initial=initial)

    def task(self, recipe: blr.Recipe | None = None) -> blr.Task:
        data = (self.x[:N], self.y[:N])
        return blr.Task(
            self.build(),
            data,
            likelihood=self.likelihood,
            recipe=recipe or self.recipe,
            progress=False,
        )

    @property
    def test(self) -> blr.Task:
        data = (self.x[N:], self.y[N:])
        return blr.Task(self.build(), data, likelihood=self.likelihood)


def counted_recipe(case: Case, counts: list[int]) -> blr.Recipe:
    """A training of one's own that notes each of its calls."""

    def train(data: Any, seed: int) -> nn.Module:
        counts.append(seed)
        return case.plain(*default_collate(list(data)), seed)

    return blr.Recipe(train=train)


CASES = {
    "network": Case(network, normal(N + M, 4), CLASSES, "categorical"),
    "own training": Case(network, normal(N + M, 4), CLASSES, "categorical", own_training=True),
    "language model": Case(language_model, WORDS, WORDS, "causal_lm"),
}
CASE = CASES["network"]
LIKE: Any = (normal(N, M, seed=9), normal(M, N))


@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_a_plain_loop(name: str) -> None:
    case = CASES[name]
    q = blr.fit_laplace(case.task(), structure="diag", prior_precision=1.0)
    task = case.task()
    result = blr.validate(task, q, case.test, scores={"noise": LIKE[0]}, halves=HALVES, seeds=SEEDS)
    losses = torch.empty(HALVES, SEEDS, M, dtype=torch.float64)
    for k, half in enumerate(result.halves):
        assert int(half.sum()) == N // 2
        for seed in range(SEEDS):
            x = case.x[:N][half]
            y = case.y[:N][half]
            model = case.plain(x, y, FIRST_SEED + seed)
            losses[k, seed] = test_losses(model, case.x[N:], case.y[N:])
    torch.testing.assert_close(result.losses, losses)
    matrices = {"influence": blr.influence(task, q, case.test).matrix, "noise": LIKE[0]}
    for method, matrix in matrices.items():
        foretold = [-matrix[half].sum(0) for half in result.halves]
        by_test = [
            spearmanr([row[j] for row in foretold], losses.mean(1)[:, j]).statistic
            for j in range(M)
        ]
        assert result.score(method).by_test.tolist() == pytest.approx(by_test)
        assert result.score(method).value == pytest.approx(float(np.mean(by_test)))
    seeds = [spearmanr(losses[:, 0, j], losses[:, 1, j]).statistic for j in range(M)]
    assert result.seeds_agree is not None
    assert result.seeds_agree.value == pytest.approx(float(np.mean(seeds)))
    assert result.against("noise", LIKE[0]).value == result.score("noise").value


def test_a_constant_foretells_nothing_and_a_constant_loss_does_not_count() -> None:
    halves = torch.rand(6, N, generator=torch.Generator().manual_seed(1)) < 0.5
    losses = normal(6, 1, M)
    losses[:, :, 0] = 2.0
    nothing = agreement_of("nothing", torch.zeros(N, M), halves, losses)
    assert nothing.by_test.isnan().tolist() == [True] + [False] * (M - 1)
    assert (nothing.value, nothing.error) == (0.0, 0.0)
    constant = agreement_of("nothing", LIKE[0], halves, torch.ones_like(losses))
    assert np.isnan(constant.value)


def drawn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def simulated(generator: torch.Generator, effects: Tensor, n_halves: int) -> tuple[Tensor, Tensor]:
    """Random halves, and losses with these effects and with noise of two seeds."""
    halves = drawn(generator, n_halves, len(effects)) < 0
    noise = 4 * drawn(generator, n_halves, 2, effects.shape[1])
    return halves, noise - (halves.double() @ effects).unsqueeze(1)


def test_the_ceiling_is_the_score_of_the_exact_effects() -> None:
    """In the mean over simulated studies, within three standard errors."""
    generator = torch.Generator().manual_seed(0)
    gaps = []
    for _ in range(40):
        effects = drawn(generator, 30, 8)
        halves, losses = simulated(generator, effects, 20)
        ceiling = ceiling_of(agreement_of_seeds(losses).value, seeds=2)
        gaps.append(agreement_of("exact", effects, halves, losses).value - ceiling)
    spread = float(np.std(gaps, ddof=1))
    assert abs(float(np.mean(gaps))) < 3 * spread / len(gaps) ** 0.5


def test_the_range_holds_the_score_of_many_halves_in_four_of_five() -> None:
    """The binomial spread of 60 studies around 48 is 3.1; the range may be a little wide."""
    generator = torch.Generator().manual_seed(0)
    effects = drawn(generator, 30, 8)
    scores = effects + 0.7 * drawn(generator, 30, 8)
    halves, losses = simulated(generator, effects, 1000)
    foretold = -(halves.double() @ scores)
    mean_losses = losses.mean(1)
    correlations = [spearmanr(foretold[:, j], mean_losses[:, j]).statistic for j in range(8)]
    truth = np.mean(correlations)
    inside = 0
    for _ in range(60):
        study = agreement_of("study", scores, *simulated(generator, effects, 20))
        inside += study.low <= truth <= study.high
    assert 40 < inside < 58


def test_scores_are_read_from_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", LIKE[0].numpy())
    frame = pd.DataFrame(LIKE[0].numpy(), columns=[str(j) for j in range(M)])
    frame.to_parquet(tmp_path / "b.parquet")
    frame.set_index(pd.Index(range(N, 0, -1), name="row")).to_parquet(tmp_path / "d.parquet")
    files = {name: tmp_path / name for name in ("a.npy", "d.parquet")}
    files |= {"b": str(tmp_path / "b.parquet"), "c": LIKE[0], "frame": frame}
    result = blr.validate(CASE.task(), None, CASE.test, scores=files, halves=4, seeds=1)
    assert len({result.score(name).value for name in files}) == 1


def test_retrainings_are_kept(tmp_path: Path) -> None:
    counts: list[int] = []
    task = CASE.task(counted_recipe(CASE, counts))
    scores = {"c": LIKE[0]}
    keep = tmp_path / "halves.safetensors"
    first = blr.validate(task, None, CASE.test, scores=scores, halves=4, seeds=1, keep=keep)
    assert np.isnan(first.ceiling)
    assert "single seed" in first.note
    assert len(counts) == 4
    again = blr.validate(task, None, CASE.test, scores=scores, halves=4, seeds=1, keep=keep)
    assert len(counts) == 4
    assert torch.equal(again.losses, first.losses)
    larger = blr.validate(task, None, CASE.test, scores=scores, halves=6, seeds=2, keep=keep)
    assert len(counts) == 12
    assert torch.equal(larger.losses[:4, :1], first.losses)
    fewer = blr.validate(task, None, CASE.test, scores=scores, halves=5, seeds=2, keep=keep)
    assert len(counts) == 12
    assert torch.equal(fewer.losses, larger.losses[:5])
    fresh = blr.validate(task, None, CASE.test, scores=scores, halves=6, seeds=2)
    torch.testing.assert_close(larger.losses, fresh.losses)
    mismatches = {
        "another recipe": (CASE.task(), CASE.test),
        "other test data": (task, CASE.task()),
    }
    for word, (other_task, test) in mismatches.items():
        matrix = torch.ones(N, test.n_data)
        with pytest.raises(StorageError, match=word):
            blr.validate(other_task, None, test, scores={"c": matrix}, halves=4, keep=keep)


def test_short_retrainings_and_noise_are_noted() -> None:
    scores = {"noise": LIKE[0]}
    result = blr.validate(CASE.task(), None, CASE.test, scores=scores, halves=4, passes=2)
    assert f"retrained for 2 of {EPOCHS} epochs" in result.note
    assert result.epochs == 2
    fresh = torch.Generator().manual_seed(0)

    def noise(data: Any, seed: int) -> nn.Module:
        model = network()
        for parameter in model.parameters():
            parameter.data = drawn(fresh, *parameter.shape)
        return model

    task = CASE.task(blr.Recipe(train=noise))
    noisy = blr.validate(task, None, CASE.test, scores=scores, halves=8)
    assert "do not agree beyond chance" in noisy.note
    assert noisy.ceiling_range[0] == 0.0
    task = CASE.task(blr.Recipe(train=lambda data, seed: network()))
    alike = blr.validate(task, None, CASE.test, scores=scores, halves=8)
    assert "the same losses" in alike.note
    assert np.isnan(alike.table["score"]).all()


def test_the_cost_is_said_before_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    messages = []

    def train(data: Any, seed: int) -> nn.Module:
        messages.append(capsys.readouterr().err)
        return network()

    task = CASE.task(blr.Recipe(train=train))
    task.progress = None
    blr.validate(task, None, CASE.test, scores={"noise": LIKE[0]}, halves=4)
    assert messages[0].startswith("8 retrainings on half of the data")
    counted = CASE.task()
    counted.progress = None
    blr.validate(counted, None, CASE.test, scores={"noise": LIKE[0]}, halves=4)
    assert "8 retrainings on half of the data" in capsys.readouterr().err


BARE = blr.Task(network(), (CASE.x[:N], CASE.y[:N]), progress=False)
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no recipe": (BARE, {}, "give Task(recipe=)"),
    "no task": (network(), {}, "task must be"),
    "no test data": (CASE, {"test_task": None}, "test_task must be"),
    "nothing to compare": (CASE, {"scores": None}, "nothing to compare"),
    "few halves": (CASE, {"halves": 3}, "at least 4"),
    "no seeds": (CASE, {"seeds": 0}, "seeds"),
    "no passes": (CASE, {"passes": 0}, "passes"),
    "passes of a train=": (CASES["own training"], {"passes": 2}, "leave passes= out"),
    "no mapping": (CASE, {"scores": LIKE[0]}, "a dict such as"),
    "transposed": (CASE, {"scores": {"a": LIKE[1]}}, "transpose them"),
    "another shape": (CASE, {"scores": {"a": LIKE[0][:5]}}, "one row for each training example"),
    "NaN": (CASE, {"scores": {"a": LIKE[0] / 0 * 0}}, "NaN or infinite"),
    "words": (CASE, {"scores": {"a": [["b"]]}}, "no matrix of numbers"),
    "another file": (CASE, {"scores": {"a": "a.csv"}}, ".npy or .parquet"),
    "no file": (CASE, {"scores": {"a": "gone.npy"}}, "cannot be read as npy"),
    "our name": (CASE, {"scores": {"influence": LIKE[0]}}, "rename your scores"),
    "another kind of keep": (CASE, {"keep": "a.pt"}, "a .safetensors file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    subject, changes, word = REFUSED[name]
    task = subject.task() if isinstance(subject, Case) else subject
    arguments: dict[str, Any] = {"test_task": CASE.test, "scores": {"noise": LIKE[0]}} | changes
    test = arguments.pop("test_task")
    with pytest.raises((InputError, StorageError), match=re.escape(word)) as caught:
        blr.validate(task, None, test, **arguments)
    assert "\n" not in str(caught.value)


def test_a_file_that_holds_no_retrainings_is_refused(tmp_path: Path) -> None:
    damaged = tmp_path / "h.safetensors"
    damaged.write_bytes(b"words")
    with pytest.raises(StorageError, match="no retrained halves"):
        blr.validate(
            CASE.task(), None, CASE.test, scores={"noise": LIKE[0]}, halves=4, keep=damaged
        )


def test_table_and_picture() -> None:
    scores = {"noise": LIKE[0], "less": -LIKE[0]}
    result = blr.validate(CASE.task(), None, CASE.test, scores=scores, halves=6)
    table = result.table
    assert table["method"].tolist() == [m.name for m in result.agreements] + ["ceiling"]
    assert table["score"].tolist()[:2] == sorted(table["score"][:2], reverse=True)
    assert table["score"].tolist()[2] == result.ceiling
    bars: Any = result.plot().patches
    assert [bar.get_width() for bar in bars[:2]] == table["score"].tolist()[:2]
    assert "noise" in repr(result)
    assert "6 halves × 2 seeds" in repr(result)
