"""What several processes refuse together, an index that one of them looks at late, and how the
death of one ends the others, for ``test_ranks``: by ``torchrun``."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from models import mlp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import blr_analysis as blr
from blr_analysis import ranks
from blr_analysis.errors import BLRError
from blr_analysis.posterior import KroneckerRecorder
from blr_analysis.sensitivity.index import build, stored

N = 23  # neither two nor four divide it
LATE = 0.5  # seconds
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
    """The messages for a recorder of a sharded model, for too few examples, for fewer examples
    than on other ranks, and for other data than theirs."""
    model = fully_shard(mlp())
    messages = []
    calls: list[Any] = [lambda: KroneckerRecorder(model)]
    for task in (network(1), network(N - ranks.rank()), network(seed=ranks.rank())):
        calls.append(partial(blr.fit_laplace, task, structure="diag", prior_precision=1.0))
    for call in calls:
        try:
            call()
        except BLRError as error:
            messages.append(str(error))
    return messages


def looks_late(folder: Path) -> Tensor:
    """Self-influence of an index whose second rank looks for missing files after a while, in which
    the first could have written some."""
    missing = stored.Store.missing

    def later(store: stored.Store) -> list[str]:
        if ranks.rank() == 1:
            time.sleep(LATE)
        return missing(store)

    q = blr.Posterior.load(folder / "q.safetensors")
    with mock.patch.object(stored.Store, "missing", later):
        index = blr.Index.build(network(), q, folder / "late", dtype="float64")
    return index.self_influence


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
        actual = {"refusals": refusals(), "late": looks_late(place)}
        torch.save(actual, place / f"rank{ranks.rank()}.pt")
        dies(place)
