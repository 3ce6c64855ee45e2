"""A forecast's time is that of a few examples, by how many are run."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import blr_analysis as blr
from blr_analysis.posterior import Forecast, forecast


@pytest.mark.parametrize("n", [8, 64])
def test_the_time_is_that_of_few_examples_times_those_that_are_run(
    monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """By a clock that moves on by a second whenever it is read."""
    ticks = count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(forecast, "time", clock)
    task = blr.Task(nn.Linear(2, 3), (torch.randn(n, 2), torch.randint(3, (n,))))
    cost = Forecast.of(task, 2 * n, trained=3 * n)
    assert cost.passes == 5
    assert cost.seconds == pytest.approx(5 * n / min(n, forecast.EXAMPLES_TIMED))


@pytest.mark.parametrize(("structure", "sizes"), [("gram", [3, 5]), ("kron", [3, 4, 5, 3])])
def test_eigenvectors_take_the_cube_of_the_factors_sizes(
    monkeypatch: pytest.MonkeyPatch, structure: str, sizes: list[int]
) -> None:
    """By a clock in which the decomposition of a matrix of the largest size takes a second."""
    monkeypatch.setattr(forecast, "time", SimpleNamespace(perf_counter=count(0.0).__next__))
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3))
    task = blr.Task(model, (torch.randn(8, 2), torch.randint(3, (8,))))
    cost = Forecast.of(task, 0, structure=structure)
    assert cost.seconds == pytest.approx(sum((size / 5) ** 3 for size in sizes))
