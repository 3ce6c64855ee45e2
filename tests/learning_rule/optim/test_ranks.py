"""With ``sync=True`` several processes average what each of them has gathered."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from optimizer_makers import X, Y, make, network, state_of
from torch import Tensor, nn

from blr_analysis.learning_rule.optim import IVON

WORLD = 2


def draws(ranks: list[int], sync: bool, hess_approx: str) -> dict[str, Tensor]:
    """IVON: the draws of ``ranks`` one after the other; with ``sync`` one of them per process."""
    params = [nn.Parameter(torch.ones(5)) for _ in range(3)]
    optimizer = IVON(params, lr=0.1, ess=10, beta2=0.9, sync=sync, hess_approx=hess_approx)
    generators = {rank: torch.Generator().manual_seed(rank) for rank in ranks}
    for step in range(3):
        for rank in ranks:
            optimizer.generator = generators[rank]
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                params[0].grad = torch.linspace(rank, step - 1, 5)
                if rank == 1:  # a gradient on one process only; params[2] never has one
                    params[1].grad = torch.linspace(step + 1, -1, 5)
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    for rank in ranks:  # inf on one process: all skip
        with optimizer.sampled_params(train=True):
            params[0].grad = torch.full((5,), torch.inf if rank == 1 else 1.0)
    scaler.step(optimizer)
    actual = {f"weight {i}": p.detach() for i, p in enumerate(params)}
    for i in (0, 1):
        for name in ("hess", "momentum"):
            actual[f"{name} {i}"] = optimizer.state[params[i]][name]
    assert params[2] not in optimizer.state
    return actual


def parts(ranks: list[int], sync: bool, name: str) -> dict[str, Tensor]:
    """Halves of a minibatch in one context each, or one half per process."""
    model = network()
    optimizer = make(name, model, sync=sync)
    generators = {rank: torch.Generator().manual_seed(rank) for rank in ranks}
    for _ in range(3):
        for rank in ranks:
            optimizer.generator = generators[rank]
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(X[rank::2].double()), Y[rank::2]).backward()
        optimizer.step()
    return {str(k): tensor for k, tensor in enumerate(state_of(model, optimizer))}


CASES: dict[str, Callable[[list[int], bool], dict[str, Tensor]]] = {
    "IVON, price": partial(draws, hess_approx="price"),
    "IVON, gradsq": partial(draws, hess_approx="gradsq"),
    "OGN": partial(parts, name="OGN"),
    "Adam": partial(parts, name="Adam"),
}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)
    torch.save({name: case([rank], True) for name, case in CASES.items()}, f"{folder}/{rank}.pt")
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_two_processes_are_one_with_both_their_shares(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")  # it imports once for all processes
    context.set_forkserver_preload(["torch._dynamo", "blr_analysis.learning_rule.optim"])
    processes = [context.Process(target=work, args=(rank, str(tmp_path))) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    for name, case in CASES.items():
        expected = case([0, 1], False)
        for rank in range(WORLD):
            actual = torch.load(tmp_path / f"{rank}.pt", weights_only=True)[name]
            for key, tensor in expected.items():
                double = tensor.dtype == torch.float64
                rtol = 1e-9 if double else 1e-6
                atol = 1e-12 if double else 1e-7
                torch.testing.assert_close(actual[key], tensor, rtol=rtol, atol=atol)


def test_sync_alone_does_nothing() -> None:
    """Without a process group a script with ``sync=True`` runs as without it."""
    synced = draws([0, 1], True, "price")
    alone = draws([0, 1], False, "price")
    assert all(torch.equal(synced[name], alone[name]) for name in synced)
