"""Inputs to label next, against dense algebra and the posteriors that their labels would make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import InputError

DRAWS = 1000


def linear(n: int = 12) -> tuple[Tensor, blr.Posterior, nn.Linear]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=g, dtype=torch.float64)
    x[5] = 1.02 * x[2]  # tells the same
    model = nn.Linear(3, 1, bias=False).double()
    precision = {"weight": torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)}
    mean = {"weight": model.weight.detach()}
    return x, blr.Posterior(mean, precision, prior_precision=1.0, n_data=n), model


def expected(x: Tensor, q: blr.Posterior, k: int, noise: float) -> list[int]:
    """The largest predictive variance, and after each label S + x xᵀ / σ²."""
    s = torch.diag(q.precision("weight")[0])
    chosen: list[int] = []
    for _ in range(k):
        variance = (x @ torch.linalg.inv(s) * x).sum(1)
        variance[chosen] = -1
        chosen.append(int(variance.argmax()))
        s = s + x[chosen[-1], :, None] * x[chosen[-1]] / noise
    return chosen


@pytest.mark.parametrize("by", ["information", "variance"])
def test_linear_regression_by_dense_algebra(by: str) -> None:
    """Both orders are one of a single output, and the near copy is not taken next."""
    x, q, model = linear()
    pool = blr.Task(model, x, likelihood=blr.Gaussian(0.1))
    actual = blr.acquire(pool, q, 3, by=by, draws=DRAWS).tolist()
    assert actual == expected(x, q, 3, 0.1)
    assert not {2, 5} <= set(actual)


def test_labels_are_not_looked_at() -> None:
    x, q, model = linear()
    pool = blr.Task(model, x, likelihood=blr.Gaussian(0.1))
    labelled = blr.Task(model, (x, torch.zeros(12, 1).double()), likelihood=blr.Gaussian(0.1))
    actual = [blr.acquire(task, q, 5).tolist() for task in (pool, labelled)]
    assert actual[0] == actual[1]
    assert len(set(actual[0])) == 5


def test_what_is_only_noisy_is_not_asked_for() -> None:
    """Between two classes at 0 the answer is open and known to be so; far away nobody knows."""
    torch.manual_seed(0)
    x = torch.randn(400, 1) * 0.1
    model = nn.Linear(1, 2)
    task = blr.Task(model, (x, torch.arange(400) % 2))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
    pool = blr.Task(model, torch.tensor([[0.0], [0.1], [3.0], [-0.1]]))
    entropy = q.predict(pool, draws=0).entropy
    assert entropy is not None
    assert float(entropy.std()) < 1e-6
    for by in ("information", "variance"):
        assert blr.acquire(pool, q, 1, by=by).tolist() == [2]


@pytest.mark.parametrize("form", ["tokens", "pixels"])
@pytest.mark.parametrize("by", ["information", "variance"])
def test_of_sequences_and_images_the_sum(form: str, by: str) -> None:
    torch.manual_seed(0)
    if form == "tokens":
        model: nn.Module = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
        x = torch.randint(9, (6, 5))
    else:
        model = nn.Conv2d(1, 3, 3, padding=1)
        x = torch.randn(6, 1, 4, 4)
    mean = {name: p.detach() for name, p in model.named_parameters()}
    q = blr.Posterior(
        mean, {n: torch.ones_like(p) for n, p in mean.items()}, prior_precision=1.0, n_data=6
    )
    pool = blr.Task(model, x, likelihood="tokens")
    actual = q.predict(pool, 8, generator=torch.Generator().manual_seed(0))
    values = getattr(actual, by)
    totals = values.reshape(6, -1).sum(1)
    assert blr.acquire(pool, q, 2, by=by, draws=8).tolist() == totals.topk(2).indices.tolist()


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"k": 13}, "k=13, but there are 12"),
    ({"k": 0}, "k must be a positive integer"),
    ({"by": "entropy"}, "by must be one of"),
    ({"draws": 1}, "draws=1"),
    ({"seed": "a"}, "seed must be a whole number"),
    ({"draws": 2**27}, "fewer draws"),
    ({"task": nn.Linear(3, 1)}, "task must be"),
    ({"posterior": None}, "posterior must be"),
]


@pytest.mark.parametrize(("options", "word"), REFUSALS)
def test_refusals(options: dict[str, Any], word: str) -> None:
    x, q, model = linear()
    pool = blr.Task(model, x, likelihood="gaussian")
    arguments = {"task": pool, "posterior": q, "k": 2} | options
    with pytest.raises(InputError, match=word):
        blr.acquire(**arguments)
