"""IVON with ``sync=True``: several processes average what each of them has gathered."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from blr_analysis.learning_rule.optim import IVON

WORLD = 2


def gradient(rank: int, step: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(size, generator=generator)


def train(ranks: list[int], sync: bool, hess_approx: str) -> dict[str, torch.Tensor]:
    """The draws of ``ranks`` one after the other; with ``sync`` one of them per process."""
    params = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
    optimizer = IVON(params, lr=0.1, ess=10, beta2=0.9, sync=sync, hess_approx=hess_approx)
    generators = {rank: torch.Generator().manual_seed(rank) for rank in ranks}
    for step in range(3):
        for rank in ranks:
            optimizer.generator = generators[rank]
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                params[0].grad = gradient(rank, step, 5)
                if rank == 1:  # a gradient on one process only; params[2] never has one
                    params[1].grad = gradient(rank, step, 5)
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    for rank in ranks:  # inf on one process: all skip
        with optimizer.sampled_params(train=True):
            params[0].grad = torch.full((5,), torch.inf if rank == 1 else 1.0)
    scaler.step(optimizer)
    found = {f"weight {i}": p.detach() for i, p in enumerate(params)}
    for i in (0, 1):
        found |= {f"{name} {i}": optimizer.state[params[i]][name] for name in ("hess", "momentum")}
    assert params[2] not in optimizer.state
    return found


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD
    )
    found: dict[str, Any] = {name: train([rank], True, name) for name in ("price", "gradsq")}
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_processes_average_their_draws(tmp_path: Path) -> None:
    """Two processes with one draw each = one process with two draws."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, str(tmp_path))) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for method in ("price", "gradsq"):
        expected = train([0, 1], False, method)
        for rank in range(WORLD):
            found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)[method]
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)


def test_sync_alone_does_nothing() -> None:
    """Without a process group a script with ``sync=True`` runs as without it."""
    one, other = train([0, 1], True, "price"), train([0, 1], False, "price")
    assert all(torch.equal(one[name], other[name]) for name in one)
