"""What several processes compute together, for ``test_ranks``: by ``torchrun`` or alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from matplotlib.figure import Figure
from models import mlp
from ranked_ends import SHARD, N, network
from tiny_lm import sequences, task_of, tiny_lm
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard

import blr_analysis as blr
from blr_analysis import ranks
from blr_analysis.backprop.hessian import Hessian
from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.cli import main
from blr_analysis.files import storage
from blr_analysis.posterior import write_captured
from blr_analysis.posterior.capture import from_optimizer
from blr_analysis.ranks import whole
from blr_analysis.sensitivity.index import stored

checkpoint: Any = dcp  # torch does not declare its names


def answers(folder: Path) -> dict[str, Any]:
    """Everything that is shared out, on a classifier and on a language model."""
    task = network()
    actual: dict[str, Any] = {}
    qs: dict[str, blr.Posterior] = {}
    for structure in ("diag", "kron", "lowrank", "full", "gram"):
        settings: dict[str, Any] = {"structure": structure}
        if structure == "lowrank":
            settings["rank"] = 6
        if structure != "gram":
            settings["prior_precision"] = 2.0
        qs[structure] = blr.fit_laplace(task, **settings)
        actual[f"fit {structure}"] = qs[structure].form.diagonal()
    exact = blr.fit_laplace(task, structure="diag", curvature="mc_fisher")
    actual["mc_fisher, prior"] = [exact.form.diagonal(), exact.prior_precision]
    q = qs["kron"]
    params = dict(q.mean)
    subsets = (None, torch.tensor([3, 1, 7]), torch.tensor([3]))
    actual["losses"] = [loss_and_gradient(task, params, subset) for subset in subsets]
    actual["product"] = Hessian(task, params).product({n: m[None] for n, m in params.items()})
    actual |= analyses(task, q, qs["diag"], folder)
    actual |= analyses_of_words()
    return actual


def analyses(
    task: blr.Task, q: blr.Posterior, second: blr.Posterior, folder: Path
) -> dict[str, Any]:
    """Scores, leave-one-out, influence (also of two posteriors) and an index of a classifier."""
    actual: dict[str, Any] = {}
    scores = blr.sensitivity(task, q)
    actual["sensitivity"] = [scores.error, scores.variance, scores.outputs, scores.targets]
    actual["self-influence"] = blr.sensitivity(task, q, variance=False).self_influence
    loo = blr.leave_one_out(task, q, refine=1)
    actual["leave one out"] = [loo.logits, loo.losses, loo.leverage]
    test = task.subset(range(3))
    actual["influence"] = torch.as_tensor(blr.influence(task, q, test))
    actual["normalized"] = torch.as_tensor(blr.influence(task, q, test, normalize="cosine"))
    actual["several"] = torch.as_tensor(blr.influence(task, [second, q], test))
    best = blr.influence(task, q, test, k=9)
    actual["top"] = [best.helpful, best.harmful, best.helpful_values, best.harmful_values]
    index = blr.Index.build(task, q, folder / "index", dtype="float64", rank=43)
    actual["index"] = [index.influence(test), index.self_influence]
    return actual


def analyses_of_words() -> dict[str, Any]:
    """A fit, scores, leave-one-out and influence of a language model."""
    actual: dict[str, Any] = {}
    words = task_of(tiny_lm(tied=True), sequences(9))
    q = blr.fit_laplace(words, structure="kron", curvature="mc_fisher", prior_precision=1.0)
    actual["words"] = q.form.diagonal()
    scores = blr.sensitivity(words, q)
    actual["words' scores"] = [scores.losses, scores.self_influence, scores.tokens]
    actual["words' loss"] = blr.leave_one_out(words, q).losses
    actual["words' influence"] = torch.as_tensor(blr.influence(words, q, words.subset([1])))
    return actual


def of_pieces(folder: Path) -> dict[str, Any]:
    """A posterior and its files from the optimizer of a model that ``fully_shard`` divides."""
    model = mlp().double()
    X, y = network().dataset[:]
    for part in (model[0], model) if ranks.count() > 1 else ():
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    settings: dict[str, Any] = {"n_data": N, "prior_precision": 2.0}
    with torch.no_grad():
        model(X)  # the outermost weights stay whole after it
    q = blr.Posterior.from_optimizer(optimizer, model, **settings)
    captured = from_optimizer(optimizer, model, bare=True, gather=False, **settings)
    write_captured(folder / "pieces", captured, dtype=None)
    loaded = {n: torch.zeros_like(h) for n, h in captured.precision.items()}
    checkpoint.load(loaded, storage_reader=checkpoint.HuggingFaceStorageReader(folder / "pieces"))
    actual: dict[str, Any] = {"captured": [q.mean, q.form.diagonal()]}
    actual["read"] = storage.read(folder / "pieces")[0]
    actual["loaded"] = {n: whole(h) for n, h in loaded.items()}
    actual["after"] = model(X).detach()
    return actual


def commands(folder: Path, model: Path, data: Path) -> list[int]:
    """The exit codes of the commands that ranks share."""
    inputs = (str(model), str(data))
    fit = ("--fit", "diag", "--prior-precision", "1")
    with mock.patch.object(Figure, "savefig", lambda _, path, **__: Path(path).write_bytes(b"")):
        return [
            main(["fisher", *inputs, "--out", str(folder / "p")]),
            main(["index", *inputs, *fit, "--out", str(folder / "i"), "--rank", "100"]),
            main(["audit", *inputs, *fit, "--out", str(folder / "a")]),
        ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    stored.SHARD = SHARD
    place, *texts = map(Path, sys.argv[1:])
    with ranks.opened():
        actual = {"answers": answers(place) | of_pieces(place)}
        if texts:
            actual["codes"] = commands(place, *texts)
        torch.save(actual, place / f"rank{ranks.rank()}.pt")
