"""What several processes compute together, for ``test_ranks``: by ``torchrun`` or alone."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from matplotlib.figure import Figure
from models import mlp
from tiny_lm import sequences, task_of, tiny_lm
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard

import blr_analysis as blr
from blr_analysis import ranks
from blr_analysis.backprop.hessian import Hessian
from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.cli import main
from blr_analysis.errors import BLRError
from blr_analysis.files import storage
from blr_analysis.posterior import KroneckerRecorder, write_captured
from blr_analysis.posterior.capture import from_optimizer
from blr_analysis.ranks import whole
from blr_analysis.sensitivity.index import build, stored

checkpoint: Any = dcp  # whose names torch does not declare
N = 23  # which neither two nor four divide
stored.SHARD = 5  # of which two ranks share the last


def network(n: int = N, seed: int = 0) -> blr.Task:
    """A small classifier in double precision."""
    source = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 4, dtype=torch.float64, generator=source)
    y = torch.arange(n) % 3
    model = mlp().double()
    model = nn.parallel.DistributedDataParallel(model) if ranks.count() > 1 else model
    return blr.Task(model, (X, y), batch_size=4)


def answers(folder: Path) -> dict[str, Any]:
    """Everything that is shared out, on a classifier and on a language model."""
    task = network()
    actual: dict[str, Any] = {}
    qs: dict[str, blr.Posterior] = {}
    for structure in ("diag", "kron", "lowrank", "full", "gram"):
        more: dict[str, Any] = {"rank": 6} if structure == "lowrank" else {}
        more |= {} if structure == "gram" else {"prior_precision": 2.0}
        qs[structure] = blr.fit_laplace(task, structure=structure, **more)
        actual[f"fit {structure}"] = qs[structure].form.diagonal()
    exact = blr.fit_laplace(task, structure="diag", curvature="mc_fisher")
    actual["mc_fisher, prior"] = [exact.form.diagonal(), exact.prior_precision]
    q = qs["kron"]
    params = dict(q.mean)
    some = (None, torch.tensor([3, 1, 7]), torch.tensor([3]))
    actual["losses"] = [loss_and_gradient(task, params, chosen) for chosen in some]
    actual["product"] = Hessian(task, params).product({n: m[None] for n, m in params.items()})
    scores = blr.sensitivity(task, q)
    actual["sensitivity"] = [scores.error, scores.variance, scores.outputs, scores.targets]
    actual["self-influence"] = blr.sensitivity(task, q, variance=False).self_influence
    loo = blr.leave_one_out(task, q, refine=1)
    actual["leave one out"] = [loo.logits, loo.losses, loo.leverage]
    test = task.subset(range(3))
    several = [qs["diag"], q]
    actual["influence"] = torch.as_tensor(blr.influence(task, q, test))
    actual["normalized"] = torch.as_tensor(blr.influence(task, q, test, normalize="cosine"))
    actual["several"] = torch.as_tensor(blr.influence(task, several, test))
    best = blr.influence(task, q, test, k=9)
    actual["top"] = [best.helpful, best.harmful, best.helpful_values, best.harmful_values]
    index = blr.Index.build(task, q, folder / "index", dtype="float64", rank=43)
    actual["index"] = [index.influence(test), index.self_influence]
    words = task_of(tiny_lm(tied=True), sequences(9))
    p = blr.fit_laplace(words, structure="kron", curvature="mc_fisher", prior_precision=1.0)
    actual["words"] = p.form.diagonal()
    seen = blr.sensitivity(words, p)
    actual["words' scores"] = [seen.losses, seen.self_influence, seen.tokens]
    actual["words' loss"] = blr.leave_one_out(words, p).losses
    actual["words' influence"] = torch.as_tensor(blr.influence(words, p, words.subset([1])))
    return actual


def of_pieces(folder: Path) -> dict[str, Any]:
    """What comes of models that ``fully_shard`` divides, and of an optimizer that trained one."""
    model = mlp().double()
    X, y = network().dataset[:]
    for part in (model[0], model) if ranks.count() > 1 else ():
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    known: dict[str, Any] = {"n_data": N, "prior_precision": 2.0}
    with torch.no_grad():
        model(X)  # after which the outermost weights stay whole
    q = blr.Posterior.from_optimizer(optimizer, model, **known)
    captured = from_optimizer(optimizer, model, bare=True, gather=False, **known)
    write_captured(folder / "pieces", captured, dtype=None)
    loaded = {n: torch.zeros_like(h) for n, h in captured.precision.items()}
    checkpoint.load(loaded, storage_reader=checkpoint.HuggingFaceStorageReader(folder / "pieces"))
    actual: dict[str, Any] = {"captured": [q.mean, q.form.diagonal()]}
    actual["read"] = storage.read(folder / "pieces")[0]
    actual["loaded"] = {n: whole(h) for n, h in loaded.items()}
    actual["after"] = model(X).detach()
    return actual


def refusals() -> list[str]:
    """What is said of a sharded model, by recorders and a task, of too few examples, fewer than
    elsewhere, and of other data."""
    model = fully_shard(mlp())
    words = []
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
            words.append(str(error))
    return words


def commands(folder: Path, model: Path, data: Path) -> list[int]:
    """The exit codes of the commands that ranks share."""
    asked = (str(model), str(data))
    fit = ("--fit", "diag", "--prior-precision", "1")
    with mock.patch.object(Figure, "savefig", lambda _, path, **__: Path(path).write_bytes(b"")):
        return [
            main(["fisher", *asked, "--out", str(folder / "p")]),
            main(["index", *asked, *fit, "--out", str(folder / "i"), "--rank", "100"]),
            main(["audit", *asked, *fit, "--out", str(folder / "a")]),
        ]


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
    place, *texts = map(Path, sys.argv[1:])
    with ranks.opened():
        actual = {"answers": answers(place) | of_pieces(place)}
        if texts:
            actual["refusals"] = refusals()
            actual["codes"] = commands(place, *texts)
        torch.save(actual, place / f"rank{ranks.rank()}.pt")
        if texts:
            dies(place)
