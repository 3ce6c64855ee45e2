"""Factors recorded under DistributedDataParallel: each process records its own examples, and the
mean over the processes is what one process records of all of them."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import mlp, normal
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import blr_analysis as blr

WORLD = 2
N = 24
X = normal(N, 4)
Y = torch.arange(N) % 3
STEPS = 8


def recorded(model: nn.Module, whole: nn.Module, rows: slice) -> dict[str, Tensor]:
    """What a training at a rate of 0 shows: factors and the mean gradient do not hang on the
    labels that were drawn, but for G."""
    checkpoints = blr.Checkpoints(model, steps=STEPS, structure="kron")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(whole(X[rows]), Y[rows]).backward()
        optimizer.step()
        checkpoints.step()
    assert checkpoints.posterior(n_data=N, prior_precision=1.0).structure == "kron"
    assert checkpoints.recordings is not None
    recorder = checkpoints.recordings.recorder
    assert recorder.gradient is not None
    inputs = {f"A of {key}": pair[0] for key, pair in recorder.factors.items()}
    return inputs | {f"gradient of {name}": g for name, g in recorder.gradient.items()}


def network() -> nn.Module:
    torch.manual_seed(0)
    return mlp().train()


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)
    model = network()
    of_rank = slice(rank * N // WORLD, (rank + 1) * N // WORLD)
    tensors = recorded(model, DistributedDataParallel(model), of_rank)
    torch.save(tensors, f"{folder}/{rank}.pt")
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_the_mean_over_processes_is_what_one_process_records(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")  # which imports for all of them
    context.set_forkserver_preload(["torch._dynamo", "blr_analysis"])
    processes = [context.Process(target=work, args=(rank, str(tmp_path))) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    model = network()
    expected = recorded(model, model, slice(None))
    by_rank = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]
    assert by_rank[0].keys() == expected.keys()
    for key, tensor in expected.items():
        mean = sum(tensors[key] for tensors in by_rank) / WORLD
        torch.testing.assert_close(mean, tensor, rtol=1e-9, atol=1e-12)
