"""What several processes compute together, for ``test_ranks``: by ``torchrun``, forked or alone."""

from __future__ import annotations

import os
import signal
import sys
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
from blr_analysis.backprop.inputs import input_moments
from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.backprop.products import Curvature
from blr_analysis.cli import main
from blr_analysis.errors import InputError, ModelError
from blr_analysis.files import storage
from blr_analysis.posterior import KroneckerRecorder, write_captured
from blr_analysis.posterior.capture import from_optimizer
from blr_analysis.ranks import whole
from blr_analysis.sensitivity.influence import index as indexing

checkpoint: Any = dcp  # whose names torch does not declare
N = 23  # which neither two nor four divide
indexing.SHARD = 5  # of which two ranks share the last


def network(n: int = N, seed: int = 0) -> blr.Task:
    """A small classifier in double precision."""
    source = torch.Generator().manual_seed(seed)
    X, y = torch.randn(n, 4, dtype=torch.float64, generator=source), torch.arange(n) % 3
    model = mlp().double()
    model = nn.parallel.DistributedDataParallel(model) if ranks.count() > 1 else model
    return blr.Task(model, (X, y), batch_size=4)


def answers(folder: Path) -> dict[str, Any]:
    """Everything that is shared out, on a classifier and on a language model."""
    task = network()
    found: dict[str, Any] = {}
    qs: dict[str, blr.Posterior] = {}
    for structure in ("diag", "kron", "lowrank", "full"):
        more: dict[str, Any] = {"rank": 6} if structure == "lowrank" else {}
        q = blr.fit_laplace(task, structure=structure, prior_precision=2.0, **more)
        qs[structure], v = q, {n: m.sin() for n, m in q.mean.items()}
        found[f"fit {structure}"] = q.form.times(v)
    gram = blr.fit_laplace(task, structure="gram")
    found["gram"] = gram.form.diagonal()
    exact = blr.fit_laplace(task, structure="diag", curvature="mc_fisher")
    found["mc_fisher, prior"] = [exact.form.diagonal(), exact.prior_precision]
    q = qs["kron"]
    params = dict(q.mean)
    found["moments"] = [m for _, m in input_moments(task, params).moments.values()]
    found["loss"] = loss_and_gradient(task, params)
    found["two losses"] = loss_and_gradient(task, params, torch.tensor([3, 1, 7]))
    found["one loss"] = loss_and_gradient(task, params, torch.tensor([3]))
    curvature = Curvature(task, params)
    found["product"] = [curvature.product(params), curvature.passes]
    scores = blr.sensitivity(task, q)
    found["sensitivity"] = [scores.error, scores.variance, scores.outputs, scores.targets]
    found["self-influence"] = blr.sensitivity(task, q, variance=False).self_influence
    loo = blr.leave_one_out(task, q, refine=1)
    found["leave one out"] = [loo.logits, loo.losses, loo.leverage]
    test = task.subset(range(3))
    found["influence"] = torch.as_tensor(blr.influence(task, q, test))
    found["normalized"] = torch.as_tensor(blr.influence(task, q, test, normalize="cosine"))
    best = blr.influence(task, q, test, k=9)
    found["top"] = [best.helpful, best.harmful, best.helpful_values, best.harmful_values]
    found["several"] = torch.as_tensor(blr.influence(task, [qs["diag"], q], test))
    index = blr.Index.build(task, q, folder / "index", dtype="float64", rank=43)
    found["index"] = [index.influence(test), index.self_influence]
    words = task_of(tiny_lm(tied=True), sequences(9))
    p = blr.fit_laplace(words, structure="kron", curvature="mc_fisher", prior_precision=1.0)
    found["words"] = p.form.diagonal()
    seen = blr.sensitivity(words, p)
    found["words' scores"] = [seen.losses, seen.self_influence, seen.tokens]
    found["words' loss"] = blr.leave_one_out(words, p).losses
    found["words' influence"] = torch.as_tensor(blr.influence(words, p, words.subset([1])))
    return found


def sharded(model: nn.Module, *parts: nn.Module) -> nn.Module:
    """The model, divided where there is somebody to divide it with."""
    for part in (*parts, model) if ranks.count() > 1 else ():
        fully_shard(part)
    return model


def of_pieces(folder: Path) -> dict[str, Any]:
    """What comes of models that ``fully_shard`` divides, and of an optimizer that trained one."""
    model, data = mlp().double(), network().dataset
    model = sharded(model, model[0])
    optimizer, (X, y) = torch.optim.AdamW(model.parameters(), lr=0.01), data[:]
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
    found: dict[str, Any] = {"captured": [q.mean, q.form.diagonal()]}
    found["read"] = storage.read(folder / "pieces")[0]
    found["loaded"] = {n: whole(h) for n, h in loaded.items()}
    task = blr.Task(model, data)
    found["of captured"] = blr.sensitivity(task, q).variance
    q = blr.fit_laplace(task, structure="kron", prior_precision=2.0)
    found["fit"] = [q.mean, q.form.diagonal()]
    found["loo"] = blr.leave_one_out(task, q, refine=1).losses
    found["influence"] = torch.as_tensor(blr.influence(task, q, task.subset(range(3))))
    moved = blr.what_if(task, q, remove=[0], evaluate=task, solver="posterior")
    found["applied"] = [whole(p).detach() for p in moved.apply(model).parameters()]
    words = sharded(tiny_lm(tied=True))
    with torch.no_grad():
        words(sequences(9)[0].unsqueeze(0))
    words = task_of(words, sequences(9))
    p = blr.fit_laplace(words, curvature="empirical_fisher", prior_precision=1.0)
    found["words"] = [p.form.diagonal(), blr.sensitivity(words, p).self_influence]
    found["after"] = model(X).detach()
    return found


def refusals() -> list[str]:
    """What is said by recorders of a sharded model, of one on one rank, too few examples, fewer
    than elsewhere, and other data."""
    words = []
    try:
        KroneckerRecorder(fully_shard(mlp()))
    except ModelError as error:
        words.append(str(error))
    with ranks.alone():
        try:
            blr.Task(fully_shard(mlp()), (torch.zeros(2, 4), torch.zeros(2).long()))
        except ModelError as error:
            words.append(str(error))
    for task in (network(1), network(N - ranks.rank()), network(seed=ranks.rank())):
        try:
            blr.fit_laplace(task, structure="diag", prior_precision=1.0)
        except InputError as error:
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
    write, files = indexing._write_shard, []

    def written(*args: Any) -> None:
        files.append(args[-1])
        if ranks.rank() == 1 and len(files) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*args)

    indexing._write_shard = written
    q = blr.Posterior.load(folder / "q.safetensors")
    blr.Index.build(network(), q, folder / "begun")


def as_rank(rank: int, count: int, port: int, folder: Path) -> None:
    """One of so many processes that were forked, as torchrun starts them."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": count}
    where |= {"RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in where.items()})
    torch.set_num_threads(1)
    with ranks.opened():
        torch.save({"answers": answers(folder) | of_pieces(folder)}, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, *more = map(Path, sys.argv[1:])
    with ranks.opened():
        found = {"answers": answers(place) | of_pieces(place)}
        found["refusals"] = refusals()
        found["codes"] = commands(place, *more)
        torch.save(found, place / f"rank{ranks.rank()}.pt")
        dies(place)
