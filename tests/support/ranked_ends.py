"""What several processes refuse together, and how the death of one ends the others, for
``test_ranks``: by ``torchrun``."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import mlp
from torch import nn
from torch.distributed.fsdp import fully_shard

import blr_analysis as blr
from blr_analysis import ranks
from blr_analysis.errors import BLRError
from blr_analysis.posterior import KroneckerRecorder
from blr_analysis.sensitivity.index import build, stored

N = 23  # neither two nor four divide it
SHARD = 5  # examples per file: two ranks share the last file


def network(n: int = N, seed: int = 0) -> blr.Task:
    """A small classifier in double precision."""
    source = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 4, dtype=torch.float64, generator=source)
    y = torch.arange(n) % 3
    model = mlp().double()
    model = nn.parallel.DistributedDataParallel(model) if ranks.count() > 1 else model
    return blr.Task(model, (X, y), batch_size=4)


def refusals() -> list[str]:
    """The messages for a sharded model (by a recorder and by a task), for too few examples, for
    fewer examples than on other ranks, and for other data than theirs."""
    model = fully_shard(mlp())
    messages = []
    calls: list[Any] = [
        lambda: KroneckerRecorder(model),
        lambda: blr.Task(model, (torch.zeros(2, 4), torch.zeros(2).long())),
    ]
    for task in (network(1), network(N - ranks.rank()), network(seed=ranks.rank())):
        calls.append(partial(blr.fit_laplace, task, structure="diag", prior_precision=1.0))
    for call in calls:
        try:
            call()
        except BLRError as error:
            messages.append(str(error))
    return messages


def dies(folder: Path) -> None:
    """A build whose second rank is killed at its second file."""
    write = build.write_shard
    files = []

    def written(*args: Any) -> None:
        files.append(args[-1])
        if ranks.rank() == 1 and len(files) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*args)

    build.write_shard = written
    q = blr.Posterior.load(folder / "q.safetensors")
    blr.Index.build(network(), q, folder / "begun")


if __name__ == "__main__":
    torch.set_num_threads(1)
    stored.SHARD = SHARD
    place = Path(sys.argv[1])
    with ranks.opened():
        torch.save(refusals(), place / f"rank{ranks.rank()}.pt")
        dies(place)
