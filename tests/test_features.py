"""A linear head on frozen features, and tables for other people's tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import blr_analysis as blr
from blr_analysis.errors import InputError, ModelError
from blr_analysis.tables import cleanlab_issues, viewer_table

N = 40
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0)).double()
Y = torch.arange(N) % 3


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Tanh())
        self.head = nn.Linear(4, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def test_the_head_on_its_features_is_the_model_with_the_rest_frozen() -> None:
    model = Network()
    model.embed.requires_grad_(False)
    metadata = {"source": [f"s{i % 2}" for i in range(N)]}
    whole = blr.Task(model, (X, Y), batch_size=7, metadata=metadata)
    head = whole.on_features()
    assert model.training
    assert head.metadata == whole.metadata
    tests = [blr.Task(model, (X[:6] + 0.1, Y[:6]))]
    tests.append(tests[0].on_features("head"))
    results = []
    for task, test in zip((whole, head), tests, strict=True):
        q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
        removed = blr.what_if(task, q, remove=[1, 2], evaluate=test, solver="posterior")
        scores = blr.sensitivity(task, q)
        influence = blr.influence(task, q, test)
        results.append((scores.deviation, influence[:], removed.nll))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


class Twisted(Network):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("model", "name", "error", "word"),
    [
        (Network(), "tail", InputError, "head"),
        (Twisted(), None, ModelError, "head"),
        (Network(), "embed.0", ModelError, "outputs"),
        (nn.Sequential(nn.Conv1d(1, 3, 5), nn.Flatten()).double(), None, InputError, "none"),
    ],
)
def test_heads_that_are_none(model: nn.Module, name: str, error: type, word: str) -> None:
    x = X[:, None] if isinstance(model, nn.Sequential) else X
    with pytest.raises(error, match=word):
        blr.Task(model, (x, Y)).on_features(name)


@pytest.fixture(scope="module")
def suspicions() -> Any:
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    x = X.clone()
    x[:, :3] += 3 * nn.functional.one_hot(Y, 3)
    x[1] = x[31]
    y = Y.clone()
    y[5] = (y[5] + 1) % 3
    task = blr.Task(model, (x, y), metadata={"source": ["web", "book"] * (N // 2)})
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        loss = loss + sum(p.square().sum() for p in model.parameters()) / 2
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
    return blr.suspicious(task, q)


def test_cleanlabs_columns(suspicions: Any) -> None:
    """Those that its own Datalab gives, and its scores' direction."""
    issues: Any = cleanlab_issues(suspicions)
    scores = issues[["label_score", "outlier_score", "near_duplicate_score"]]
    assert ((scores >= 0) & (scores <= 1)).all(axis=None)
    assert issues["label_score"].idxmin() == 5 and issues["is_label_issue"][5]
    assert issues["near_duplicate_score"].nsmallest(2).index.isin([1, 31]).all()
    assert issues["source"].tolist()[:2] == ["web", "book"]
    datalab = pytest.importorskip("cleanlab.datalab.datalab")
    data = {"label": Y.tolist()}
    lab = datalab.Datalab(data, label_name="label", verbosity=0)
    probabilities = torch.full((N, 3), 0.2).scatter(1, Y[:, None], 0.6).numpy()
    lab.find_issues(
        pred_probs=probabilities, features=X.numpy(), issue_types={"label": {}, "outlier": {}}
    )
    assert set(lab.get_issues()) <= set(issues)
    assert set(lab.get_issues("label")) <= set(issues)


def test_a_table_for_viewers(suspicions: Any, tmp_path: Path) -> None:
    names = ["cat", "dog", "owl"]
    table: Any = viewer_table(
        suspicions, filepath=[f"{i}.png" for i in range(N)], embedding=X, classes=names
    )
    table.to_parquet(tmp_path / "x.parquet")
    read: Any = pd.read_parquet(tmp_path / "x.parquet")
    assert read["index"].tolist() == list(range(N))
    assert read["filepath"][3] == "3.png" and read["source"][1] == "book"
    assert set(read["ground_truth"]) == set(names) and set(read["prediction"]) <= set(names)
    assert read["kind"][5] == "label"
    np.testing.assert_allclose(np.stack(read["embedding"].tolist()), X.float())
    data: Any = pytest.importorskip("datasets").Dataset.from_parquet(str(tmp_path / "x.parquet"))
    classes = data.class_encode_column("ground_truth").features["ground_truth"]  # for FiftyOne
    assert classes.names == names
    assert viewer_table(suspicions)["ground_truth"].tolist()[1] == "1"
    with pytest.raises(InputError, match="filepath has 2"):
        viewer_table(suspicions, filepath=["a", "b"])
    with pytest.raises(InputError, match="classes"):
        viewer_table(suspicions, classes=["cat"])
