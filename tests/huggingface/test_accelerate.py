"""The recipe for accelerate: the loop of docs/training.md takes the steps of a plain one."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from optimizers import ROWS, make
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import blr_analysis as blr

N = 24
X, Y = torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(row: str, count: int) -> tuple[nn.Module, blr.Posterior | None]:
    """As docs/training.md says."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=count)
    model = network()
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, make(row, model, N), loader)
    own = optimizer.optimizer
    for x, y in loader:
        with accelerator.accumulate(model):
            with own.sampled_params(train=True, divided_by=count):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
            if row == "BSAM":
                with own.adversarial_params(divided_by=count):
                    accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    learned = row in ("IVON", "VOGN", "OGN", "Vadam", "Vprop")
    bare = accelerator.unwrap_model(model)
    return bare, blr.Posterior.from_optimizer(own, bare) if learned else None


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("row", ROWS)
def test_the_steps_of_a_plain_loop(row: str, count: int) -> None:
    found, posterior = train(row, count)
    model = network()
    optimizer = make(row, model, N)
    for batch in torch.arange(N).split(4 * count):
        for part in batch.split(4):
            with optimizer.sampled_params(train=True):
                nn.functional.cross_entropy(model(X[part]), Y[part]).backward()
            if row == "BSAM":
                with optimizer.adversarial_params():
                    nn.functional.cross_entropy(model(X[part]), Y[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for p, q in zip(found.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    if posterior is not None:
        assert posterior.n_data == N
