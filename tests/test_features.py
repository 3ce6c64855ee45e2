"""A linear head on frozen features, and tables for other people's tools."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import blr_analysis as blr
from blr_analysis.errors import InputError, ModelError

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
