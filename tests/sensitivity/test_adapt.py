"""Going on to new data: exact where the curvature is diagonal and quadratic."""

from __future__ import annotations

import pytest
import torch

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.sensitivity import adapt

DELTA, NOISE = 0.5, 0.7


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row sees one weight, so that the precision is diagonal."""
    g = torch.Generator().manual_seed(seed)
    x = torch.eye(4).double()[torch.randint(4, (12,), generator=g)]
    return x, torch.randn(12, 1, generator=g).double()


def ridge(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    precision = x.mT @ x / NOISE + DELTA * torch.eye(4).double()
    return torch.linalg.solve(precision, x.mT @ y / NOISE).mT, precision.diagonal()


def test_twice_new_data_is_all_data_at_once() -> None:
    parts = [data(seed) for seed in range(3)]
    model = torch.nn.Linear(4, 1, bias=False).double()
    model.weight.data = ridge(*parts[0])[0]
    likelihood = blr.Gaussian(NOISE)
    task = blr.Task(model, parts[0], likelihood=likelihood)
    q = blr.fit_laplace(task, structure="diag", prior_precision=DELTA, progress=False)
    for part in parts[1:]:
        new = blr.Task(model, part, likelihood=likelihood)
        step = adapt(task, q, new, memory=3, progress=False)
        task, q = step.task, step.posterior
        assert task.n_data == 15 and len(step.memory) == 3
    x, y = (torch.cat(column) for column in zip(*parts, strict=True))
    mean, precision = ridge(x, y)
    torch.testing.assert_close(q.mean["weight"], mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(q.precision("weight")[0], precision, rtol=1e-6, atol=1e-6)
    assert torch.equal(model.weight, ridge(*parts[0])[0])


def test_a_memory_is_part_of_the_data() -> None:
    model = torch.nn.Linear(4, 1, bias=False).double()
    task = blr.Task(model, data(0), likelihood="gaussian")
    q = blr.fit_laplace(task, structure="diag", prior_precision=DELTA, progress=False)
    for memory in (0, 12):
        with pytest.raises(InputError, match="memory"):
            adapt(task, q, task, memory=memory)
