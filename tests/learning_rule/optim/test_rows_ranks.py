"""Rows with ``sync=True``: processes with half of a minibatch each are one with all of it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from blr_analysis.learning_rule.optim import OGN, RowOptimizer

WORLD = 2


def train(parts: list[int], sync: bool, name: str) -> dict[str, torch.Tensor]:
    """Both halves in one context, or one half per process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(12, 4).double(), torch.randint(3, (12,))
    if name == "OGN":
        optimizer: RowOptimizer = OGN(
            model.parameters(), lr=0.1, ess=12, beta2=0.9, sync=sync, model=model
        )
    else:
        optimizer = RowOptimizer(model.parameters(), name, lr=0.01, sync=sync)
    for _ in range(3):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            for part in parts:
                (F.cross_entropy(model(x[part::2]), y[part::2]) / len(parts)).backward()
        optimizer.step()
    state = {n: optimizer.state[p]["hess"] for n, p in model.named_parameters()}
    return {
        **{n: p.detach() for n, p in model.named_parameters()},
        **{f"h {n}": h for n, h in state.items()},
    }


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)
    found = {name: train([rank], True, name) for name in ("OGN", "Adam")}
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_processes_share_a_minibatch(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, str(tmp_path))) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for name in ("OGN", "Adam"):
        expected = train([0, 1], False, name)
        for rank in range(WORLD):
            found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)[name]
            for key, tensor in expected.items():
                torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-12)
