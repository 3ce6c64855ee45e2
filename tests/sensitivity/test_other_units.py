"""Test data in other units, or labelled otherwise, are said to be so; a held-out split is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import blr_analysis as blr
from blr_analysis.audit import investigate
from blr_analysis.audit.sections import sections
from blr_analysis.sensitivity.other_units import unlike_training

Pair = tuple[Tensor, Tensor]
PIXELS, DIGITS = (torch.tensor(part) for part in load_digits(return_X_y=True))


def standardised(x: Tensor) -> Tensor:
    return ((x - 4.9) / 6).float()


def fitted(x: Tensor, y: Tensor, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(x.shape[1], outputs)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loss = mse_loss if y.is_floating_point() else cross_entropy
    for _ in range(60):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def digits() -> blr.Task:
    x = standardised(PIXELS[:200])
    y = DIGITS[:200]
    return blr.Task(fitted(x, y, 10), (x, y))


ANOTHER: dict[str, Callable[[Tensor, Tensor], Pair]] = {
    "raw": lambda x, y: (x.float(), y),
    "0 to 255": lambda x, y: (16 * x.float(), y),
    "0 to 1": lambda x, y: (x.float() / 16, y),
    "turned to −1 … 1": lambda x, y: (x.float() / 8 - 1, y),
    "standardised twice": lambda x, y: (standardised(standardised(x)), y),
    "labels from 1": lambda x, y: (standardised(x), (y + 1) % 10),
}
ALIKE: dict[str, Callable[[Tensor, Tensor], Pair]] = {
    "split": lambda x, y: (standardised(x), y),
    "one class": lambda x, y: (standardised(x[y == 3]), y[y == 3]),
    "one example": lambda x, y: (standardised(x[:1]), y[:1]),
    "turned images": lambda x, y: (
        standardised(x.view(-1, 8, 8).transpose(1, 2).reshape(-1, 64)[:40]),
        y[:40],
    ),
}


@pytest.mark.parametrize("source", ["fit", "file", "optimizer"])
def test_one_line_in_predictions(digits: blr.Task, source: str, tmp_path: Path) -> None:
    """Of a fit, of its file, and of a capture that was analysed with its data before."""
    q = blr.fit_laplace(digits, structure="diag", prior_precision=1.0)
    if source == "file":
        q.save(tmp_path / "q")
        q = blr.Posterior.load(tmp_path / "q")
    if source == "optimizer":
        q = blr.Posterior(
            q.mean, {n: q.precision(n) for n in q.mean}, prior_precision=1.0, n_data=digits.n_data
        )
        assert q.predict(digits, draws=0).note == ""
        blr.sensitivity(digits, q)
    for way, prepare in (ANOTHER | ALIKE).items():
        test = blr.Task(digits.model, prepare(PIXELS[200:300], DIGITS[200:300]))
        actual = q.predict(test, draws=2)
        is_in_other_units = way in ANOTHER and way != "labels from 1"  # inputs alone are compared
        assert ("other units" in actual.note) == is_in_other_units, way
        assert ("other units" in repr(actual)) == is_in_other_units, way


@pytest.mark.parametrize("way", [*ANOTHER, *list(ALIKE)[:3]])
def test_one_line_in_influence_and_what_if(digits: blr.Task, way: str) -> None:
    prepare = (ANOTHER | ALIKE)[way]
    test = blr.Task(digits.model, prepare(PIXELS[200:300], DIGITS[200:300]))
    q = blr.fit_laplace(digits, structure="diag", prior_precision=1.0)
    matrix = blr.influence(digits, q, test)
    result = blr.what_if(digits, q, remove=[3], evaluate=test, solver="posterior")
    notes = (matrix.note, repr(matrix), matrix.top(2).note, result.note, repr(result))
    for note in notes:
        assert ("other units" in note) == (way in ANOTHER)


def test_rows_that_are_predicted_worst_are_in_the_same_units(digits: blr.Task) -> None:
    """A few of them are not called otherwise; of many the line says that they may be chosen."""
    test = blr.Task(digits.model, (standardised(PIXELS[200:]), DIGITS[200:]))
    losses = cross_entropy(digits.model(test.dataset.tensors[0]), DIGITS[200:], reduction="none")
    worst = losses.argsort(descending=True)
    for count in (1, 5, 19):
        assert unlike_training(digits, test.subset(worst[:count]), digits.parameters()) == ""
    many = unlike_training(digits, test.subset(worst[:20]), digits.parameters())
    assert many.endswith("or rows chosen for their losses?")


def test_a_regression_in_other_units() -> None:
    x, y = (torch.tensor(part).float() for part in load_diabetes(return_X_y=True))
    x = x / x.std(0)
    y = ((y - y.mean()) / y.std())[:, None]
    task = blr.Task(fitted(x[:300], y[:300], 1), (x[:300], y[:300]), likelihood="gaussian")
    for pair, unlike in (
        ((x[300:], y[300:]), False),
        ((x[300:], 77 * y[300:] + 152), True),
        ((100 * x[300:], y[300:]), True),
    ):
        test = blr.Task(task.model, pair, likelihood="gaussian")
        assert bool(unlike_training(task, test, task.parameters())) == unlike


def test_the_line_stands_on_the_page(digits: blr.Task) -> None:
    q = blr.fit_laplace(digits, structure="diag", prior_precision=1.0)
    test = blr.Task(digits.model, (PIXELS[200:240].float(), DIGITS[200:240]))
    actual = investigate(digits, q, test=test, by=None)
    assert "other units" in " ".join(sections(actual)["trust"].notes)
