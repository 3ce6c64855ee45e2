"""The recipe for accelerate: the loop of docs/training.md takes the steps of a plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from optimizers import ROWS, float16_on_a_cpu, make
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import blr_analysis as blr

N = 24
X, Y = torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


Run = tuple[Accelerator, nn.Module, Any, DataLoader[Any]]


def prepared(row: str, count: int, shuffle: bool = False, half: Any = None) -> Run:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=count)
    if half is not None:
        float16_on_a_cpu(accelerator, half)
    model = network()
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=shuffle)
    return accelerator, *accelerator.prepare(model, make(row, model, N), loader)


def train(run: Run, row: str, count: int) -> None:
    """An epoch, as docs/training.md says."""
    accelerator, model, optimizer, loader = run
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


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("row", ROWS)
def test_the_steps_of_a_plain_loop(row: str, count: int) -> None:
    run = prepared(row, count)
    train(run, row, count)
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
    bare = run[0].unwrap_model(run[1])
    for p, q in zip(bare.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    if row in ("IVON", "VOGN", "OGN", "Vadam", "Vprop"):
        assert blr.Posterior.from_optimizer(run[2].optimizer, bare).n_data == N


@pytest.mark.parametrize("row", [row for row in ROWS if row != "BSAM"])
def test_float16_with_a_loss_scale(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        run = prepared(row, 2, half=patch)
        train(run, row, 2)
    whole = prepared(row, 2)
    train(whole, row, 2)
    start = network()
    for p, q, before in zip(
        run[1].parameters(), whole[1].parameters(), start.parameters(), strict=True
    ):
        torch.testing.assert_close(p, q, rtol=0.05, atol=0.02)
        assert not torch.equal(p, before)


@pytest.mark.parametrize("row", ROWS)
def test_a_state_that_is_loaded_goes_on_to_the_bit(tmp_path: Path, row: str) -> None:
    whole, again = prepared(row, 2, shuffle=True), prepared(row, 2, shuffle=True)
    train(whole, row, 2)
    whole[0].save_state(str(tmp_path))
    half = [p.detach().clone() for p in whole[1].parameters()]
    train(whole, row, 2)
    torch.manual_seed(1)
    again[0].load_state(str(tmp_path))
    train(again, row, 2)
    for p, q, before in zip(whole[1].parameters(), again[1].parameters(), half, strict=True):
        assert torch.equal(p, q) and not torch.equal(p, before)
    theirs = again[2].state_dict()["state"]
    for index, state in whole[2].state_dict()["state"].items():
        for name, value in state.items():
            same = torch.equal(value, theirs[index][name]) if torch.is_tensor(value) else None
            assert same or value == theirs[index][name], name
