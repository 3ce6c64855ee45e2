"""What people have at hand becomes a task: tables, datasets, dicts of logits, wrapped models."""

from __future__ import annotations

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
    posteriors = [blr.fit_laplace(t, prior_precision=1.0, progress=False) for t in (task, other)]
    ours, theirs = (
        blr.sensitivity(t, q, progress=False)
        for t, q in zip((task, other), posteriors, strict=True)
    )
    torch.testing.assert_close(ours.deviation, theirs.deviation)
    assert torch.equal(ours.targets, theirs.targets)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def test_a_dataframe_with_a_target(model: nn.Module) -> None:
    frame = pd.DataFrame(X.numpy(), columns=["a", "b", "c"])
    frame["source"], frame["animal"] = ["web", "book"] * 12, np.array(["cat", "dog"])[Y]
    task = blr.Task(model, frame, target="animal")
    same(task, blr.Task(model, (X, Y)))
    assert task.metadata == {"source": ["web", "book"] * 12}
    real = blr.Task(nn.Linear(2, 1), frame[["a", "b", "c"]], target="c", likelihood="gaussian")
    assert torch.equal(real.fetch(torch.arange(24))[1], X[:, 2])


class Dictionary(nn.Module):
    """As Hugging Face models answer where ``return_dict`` is a plain dict."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.inner(x)}


def test_logits_in_a_dict(model: nn.Module) -> None:
    same(blr.Task(Dictionary(model), (X, Y)), blr.Task(model, (X, Y)))


def test_datasets(model: nn.Module) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {"x": X.tolist(), "label": Y.tolist(), "text": [f"example {i}" for i in range(24)]}
    data = datasets.DatasetDict({"train": datasets.Dataset.from_dict(columns)})
    task = blr.Task(Dictionary(model), data["train"])
    same(task, blr.Task(model, (X, Y)))
    assert task.metadata["text"][3] == "example 3"
    named = data["train"].rename_column("label", "animal")
    same(blr.Task(Dictionary(model), named, target="animal"), blr.Task(model, (X, Y)))
    with pytest.raises(DataError, match="'train'"):
        blr.Task(model, data)


def test_models_that_are_wrapped(model: nn.Module) -> None:
    compiled = torch.compile(model)
    assert blr.Task(compiled, (X, Y)).model is model
    assert blr.Task(nn.DataParallel(model), (X, Y)).model is model
    optimizer = torch.optim.Adam(compiled.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), Y).backward()
        optimizer.step()
    posterior = blr.Posterior.from_optimizer(optimizer, compiled, n_data=24, prior_precision=1.0)
    assert set(posterior.mean) == {"weight", "bias"}
    assert len(blr.sensitivity(blr.Task(compiled, (X, Y)), posterior, progress=False)) == 24


@pytest.mark.parametrize(
    ("data", "options", "error", "word"),
    [
        (pd.DataFrame({"a": [1.0], "y": [1]}), {}, DataError, "target="),
        (pd.DataFrame({"a": [1.0], "y": [1]}), {"target": "z"}, InputError, "columns: a, y"),
        (pd.DataFrame({"a": ["x"], "y": [1]}), {"target": "y"}, DataError, "of numbers"),
        ((X, Y), {"target": "y"}, InputError, "no column"),
    ],
)
def test_what_cannot_be_read(
    model: nn.Module, data: object, options: dict, error: type, word: str
) -> None:
    with pytest.raises(error, match=word):
        blr.Task(model, data, **options)
