"""Off the minimum the errors of classes are averaged over the training's time."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.backprop.engine import QUIET, chunks
from blr_analysis.sensitivity.influence import averaged
from blr_analysis.sensitivity.influence.averaged import averaged_errors, training_errors
from blr_analysis.sensitivity.tokens import token_influence

WORDS = 5


def test_along_its_only_parameter_gradient_flow_goes_straight() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(30, 1, generator=g, dtype=torch.float64)
    y = (x + torch.randn(30, 1, generator=g, dtype=torch.float64) > 0).double()
    theta, errors = torch.zeros((), dtype=torch.float64), []
    for _ in range(4000):
        errors.append(torch.sigmoid(theta * x) - y)
        theta = theta - 1e-4 * (x * errors[-1]).sum()
    model = nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(float(theta))
    task = blr.Task(model, (x, y), likelihood=nn.BCEWithLogitsLoss(reduction="sum"))
    q = blr.fit_laplace(task, progress=False)
    cotangent = averaged_errors(task, q)
    assert cotangent is not None
    found = torch.cat([cotangent(task, chunk) for chunk in chunks(task, q.mean, QUIET, columns=1)])
    known = torch.stack(errors).mean(0)
    assert float((found - known).norm() / known.norm()) < 1e-3
    assert float((found - errors[-1]).norm() / known.norm()) > 0.1
    squared = blr.Task(model, (x, y), likelihood=nn.MSELoss())
    assert training_errors(squared, blr.fit_laplace(squared, progress=False)) is None


class Bigrams(nn.Module):
    """The logits of the next word are a row of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.table(words)


@pytest.fixture(scope="module")
def texts() -> tuple[nn.Module, Tensor, Tensor]:
    """Trained for a few steps from weights of 0; some targets do not count."""
    g = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (32, 7), generator=g)
    following = ((words + torch.randint(2, words.shape, generator=g)) % WORDS).long()
    following[::3, 4:] = -100
    model = Bigrams().double()
    model.table.weight.data.zero_()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    for _ in range(12):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words).flatten(0, 1), following.flatten()).backward()
        optimizer.step()
    return model.eval(), words, following


def by_hand(weights: Tensor, words: Tensor, targets: Tensor) -> Tensor:
    """Σ over tokens of the table's gradient ``[N, WORDS, WORDS]``, with ē by the midpoint rule."""
    outputs, counted = weights[words], (targets >= 0)[..., None]
    hot = nn.functional.one_hot(targets.clamp_min(0), WORDS).double()
    mean, time = torch.zeros_like(outputs), 0.0
    for share in (torch.arange(400) + 0.5) / 400:
        errors = ((share * outputs).softmax(-1) - hot) * counted
        speed = -float((errors * outputs).sum())
        mean, time = mean + errors / speed, time + 1 / speed
    gradients = torch.zeros(len(words), WORDS, WORDS, dtype=torch.float64)
    for row, text in enumerate(words):
        gradients[row].index_add_(0, text, (mean / time)[row])
    return gradients.flatten(1)


def test_of_tokens_and_in_an_index(
    texts: tuple[nn.Module, Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, *data = texts
    monkeypatch.setattr(averaged, "CACHED", 1)  # token by token
    task = blr.Task(model, (data[0], data[1]), likelihood="tokens")
    q = blr.fit_laplace(task, structure="diag", curvature="empirical_fisher", progress=False)
    weights = model.table.weight.detach()
    outputs = weights[data[0]]
    last = outputs.softmax(-1) - nn.functional.one_hot(data[1].clamp_min(0), WORDS).double()
    last = last * (data[1] >= 0)[..., None]
    asked = torch.zeros(32, WORDS, WORDS, dtype=torch.float64)
    for row, text in enumerate(data[0]):
        asked[row].index_add_(0, text, last[row])
    sigma = 1 / q.form.diagonal()["table.weight"].flatten()
    known = (by_hand(weights, *data) * sigma) @ asked.flatten(1).mT
    found = blr.influence(task, q, task, progress=False)
    assert "averaged" in found.note
    assert float((found.matrix - known).norm() / known.norm()) < 1e-3
    plain = blr.influence(task, q, task, solver="posterior", progress=False)
    assert float((plain.matrix - known).norm() / known.norm()) > 0.05
    index = blr.Index.build(task, q, tmp_path / "index", dtype="float64", progress=False)
    assert index.averaged and float(index.error.relative_rms) < 1e-6
    assert torch.allclose(index.influence(task), found.matrix, rtol=1e-6)
    sources = torch.tensor([[3, 5], [7, 0]])
    shares = token_influence(task, q, task, sources, averaged=True)
    each = pd.DataFrame(shares).groupby(["question", "example"])["influence"].sum()
    ones = [found.matrix[i, j] for j, row in enumerate(sources) for i in row.sort().values]
    total = torch.tensor(each.to_list(), dtype=torch.float64)
    assert torch.allclose(total, torch.stack(ones), rtol=1e-6)
    opened = blr.Index.open(tmp_path / "index", task=task)
    best = opened.top(task, 2, refine=4)
    largest = found.matrix.topk(2, dim=0).values  # which of equal ones, is left open
    assert torch.allclose(found.matrix.gather(0, best.helpful.mT), largest)
    named = blr.fit_laplace(
        task,
        structure="diag",
        curvature="empirical_fisher",
        prior_precision=float(q.prior_precision),
        progress=False,
    )
    assert not blr.Index.build(task, named, tmp_path / "named", progress=False).averaged
