"""What people have at hand becomes a task: tables, datasets, dicts of logits, wrapped models."""

from __future__ import annotations

import copy
import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import blr_analysis as blr
from blr_analysis.errors import DataError, InputError

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 2


def same(task: blr.Task, other: blr.Task) -> None:
    """Both answer alike, example by example."""
    posteriors = [blr.fit_laplace(t, prior_precision=1.0) for t in (task, other)]
    ours, theirs = (blr.sensitivity(t, q) for t, q in zip((task, other), posteriors, strict=True))
    torch.testing.assert_close(ours.deviation, theirs.deviation)
    assert torch.equal(ours.targets, theirs.targets)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


CODES = torch.arange(24) % 3
FRAME = pd.DataFrame(X.numpy(), columns=["a", "b", "c"]).assign(
    label=np.array(["cat", "dog", "owl"])[CODES], source="web"
)


def of(frame: pd.DataFrame, model: nn.Module) -> blr.Task:
    return blr.Task(model, frame, target="label")


ASKED = {
    "what_if": lambda task, q, test, at: blr.what_if(task, q, remove=[0], evaluate=test),
    "add": lambda task, q, test, at: blr.what_if(task, q, add=test),
    "influence": lambda task, q, test, at: blr.influence(task, q, test),
    "report": lambda task, q, test, at: blr.report(task, q, at / "report.html", test=test),
    "monitor": lambda task, q, test, at: blr.Monitor(task, test=test),
    "index": lambda task, q, test, at: blr.Index.build(task, q, at / "index").top(test, 1),
}


@pytest.mark.parametrize("ask", ASKED)
@pytest.mark.parametrize(
    ("other", "word"),
    [
        (FRAME[FRAME.label != "cat"], "Categorical"),
        (FRAME.assign(label=np.arange(24) % 3), "Categorical"),
        (FRAME[["c", "a", "b", "label"]], "order"),
    ],
)
def test_frames_that_are_coded_differently_are_refused_together(
    other: pd.DataFrame, word: str, ask: str, tmp_path: Path
) -> None:
    model = nn.Linear(3, 3)
    task = of(FRAME, model)
    q = blr.fit_laplace(task, prior_precision=1.0)
    for test in (of(other, model), of(other, copy.copy(model)).subset([1, 0])):
        with pytest.raises(InputError, match=word):
            ASKED[ask](task, q, test, tmp_path)


def test_a_categorical_is_coded_by_its_own_categories() -> None:
    model = nn.Linear(3, 3)
    frame = FRAME.astype({"label": pd.CategoricalDtype(["owl", "dog", "cat"])})
    task = of(frame, model)
    assert torch.equal(task.dataset.tensors[1], 2 - CODES)
    q = blr.fit_laplace(task, prior_precision=1.0)
    told = blr.what_if(task, q, remove=[0], evaluate=of(frame[frame.label != "cat"], model))
    rows = CODES != 0
    expected = nn.functional.cross_entropy(model(X[rows]), (2 - CODES)[rows])
    assert told.before.nll == pytest.approx(expected.item(), rel=1e-5)


NUMBERS = [0, 1, 10, 2] * 6


@pytest.mark.parametrize(
    "labels",
    [pd.array(NUMBERS, dtype="Int64"), np.array(NUMBERS, dtype=object), [False, True] * 12],
    ids=["nullable", "objects", "booleans"],
)
def test_columns_of_numbers_stay_themselves(labels: Any, model: nn.Module) -> None:
    _, y = of(FRAME.assign(label=labels), nn.Linear(3, 11)).dataset.tensors
    assert y.tolist() == list(labels)
    task = of(FRAME.astype({"b": object}), model)
    assert torch.equal(task.dataset.tensors[0], X) and list(task.metadata) == ["source"]
    real = blr.Task(nn.Linear(2, 1), FRAME[["a", "b", "c"]], target="c", likelihood="gaussian")
    assert torch.equal(real.fetch(torch.arange(24))[1], X[:, 2])


def test_masks_and_weights_have_the_index_of_the_frame(model: nn.Module) -> None:
    shuffled = FRAME.set_index(FRAME.index + 5).sample(frac=1, random_state=0)
    cats = of(shuffled, nn.Linear(3, 3)).subset(shuffled.sort_index().label == "cat")
    assert {int(y) for _, y in cats.dataset} == {0} and cats.n_data == 8
    ambiguous = of(FRAME.sample(frac=1, random_state=0), nn.Linear(3, 3))
    with pytest.raises(InputError, match="to_numpy"):
        ambiguous.subset(FRAME.label == "cat")
    weights = pd.Series(np.arange(24.0), index=np.arange(24) * 3 + 7)
    f = torch.ones(24, 2)
    one, other = (
        blr.Task(model, (X, Y), weights=w).likelihood.nll(f, Y) for w in (weights, range(24))
    )
    assert torch.equal(one, other)
    with pytest.raises(InputError, match="row labels"):
        blr.Task(model, shuffled, target="label", weights=weights)


class Dictionary(nn.Module):
    """As Hugging Face models answer where ``return_dict`` is a plain dict."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.inner(x)}


def test_datasets_and_logits_in_a_dict(model: nn.Module) -> None:
    datasets = pytest.importorskip("datasets")
    wrapped, plain = Dictionary(model), blr.Task(model, (X, Y))
    same(blr.Task(wrapped, (X, Y)), plain)
    columns = {"x": X.tolist(), "label": Y.tolist(), "text": [f"example {i}" for i in range(24)]}
    data = datasets.Dataset.from_dict(columns)
    task = blr.Task(wrapped, data)
    same(task, plain)
    assert task.metadata["text"][3] == "example 3"
    same(blr.Task(wrapped, data.rename_column("label", "animal"), target="animal"), plain)
    with pytest.raises(DataError, match="one split"):
        blr.Task(model, datasets.DatasetDict({"train": data}))
    spelled = data.remove_columns("label").add_column("kind", ["ab"[k] for k in Y])
    coded = blr.Task(wrapped, spelled, target="kind")
    same(coded, plain)
    assert coded.examples.classes == ("a", "b") and list(coded.metadata) == ["text"]
    aside = {"labels": [0] * 24, "none": [None] * 24, "tags": [["a"], ["a", "b"]] * 12}
    aside |= {"when": [datetime.datetime(2020, 1, 1)] * 24}
    task = blr.Task(wrapped, datasets.Dataset.from_dict({**columns, **aside}), target="label")
    same(task, plain)
    assert set(task.metadata) == {"text", *aside}
    tasks = [
        blr.Task(wrapped, data.cast_column("label", datasets.ClassLabel(names=names)))
        for names in (["cat", "dog"], ["dog", "cat"])
    ]
    with pytest.raises(InputError, match="Categorical"):
        tasks[0].with_model(tasks[1])


@pytest.mark.slow
def test_models_that_are_wrapped(model: nn.Module) -> None:
    compiled = torch.compile(model)
    assert blr.Task(compiled, (X, Y)).model is model
    assert blr.Task(nn.DataParallel(model), (X, Y)).model is model
    optimizer = torch.optim.Adam(compiled.parameters(), lr=0.1)
    nn.functional.cross_entropy(model(X), Y).backward()
    optimizer.step()
    posterior = blr.Posterior.from_optimizer(optimizer, compiled, n_data=24, prior_precision=1.0)
    assert set(posterior.mean) == {"weight", "bias"}
    assert len(blr.sensitivity(blr.Task(compiled, (X, Y)), posterior)) == 24


@pytest.mark.parametrize(
    ("data", "options", "error", "word"),
    [
        (pd.DataFrame({"a": [1.0], "y": [1]}), {}, DataError, "target="),
        (pd.DataFrame({"a": [1.0], "y": [1]}), {"target": "z"}, InputError, "for 'a', 'y'"),
        (pd.DataFrame({"a": ["x"], "y": [1]}), {"target": "y"}, DataError, "of numbers"),
        ((X, Y), {"target": "y"}, InputError, "no column"),
        (FRAME.assign(label=[None] + ["a"] * 23), {"target": "label"}, DataError, "row 0 "),
        (FRAME.assign(label=[0] * 23 + [np.nan]), {"target": "label"}, DataError, "row 23 "),
        (FRAME.rename(columns={"b": "a"}), {"target": "label"}, InputError, "called 'a'"),
        (FRAME.rename(columns={"b": "label"}), {"target": "label"}, InputError, "'label'"),
        (FRAME[:0], {"target": "label"}, DataError, "no examples"),
    ],
)
def test_what_cannot_be_read(
    model: nn.Module, data: object, options: dict, error: type, word: str
) -> None:
    with pytest.raises(error, match=word):
        blr.Task(model, data, **options)
