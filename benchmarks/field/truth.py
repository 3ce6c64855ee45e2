"""Retrainings by the case's own recipe, kept on disk: what is there is not trained again."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.field.cases import CASES, Case, Data, test_losses, train
from benchmarks.peers.problem import build
from benchmarks.truth import store

HALVES, SINGLES = 32, 48
# How many of each kind.
SEEDS = {"models": 5, "groups": 5, "relabelled": 5, "halves": 3, "singles": 5}


def relabelled(data: Data) -> list[dict[int, Tensor]]:
    """A tenth of every group with another target: the next label, or one unit more."""
    generator = torch.Generator().manual_seed(11)
    number = data.y.is_floating_point()
    other = data.y + 1 if number else (data.y + 1) % (int(data.y.max()) + 1)
    changes = []
    for group in data.groups.unique():
        members = (data.groups == group).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator)
        chosen = members[order[: math.ceil(len(members) / 10)]]
        changes.append({int(i): other[i] for i in chosen})
    return changes


def halves(count: int) -> Tensor:
    """Which examples each random half keeps, bool ``[32, N]``."""
    generator = torch.Generator().manual_seed(7)
    return torch.stack(
        [torch.randperm(count, generator=generator).argsort() < count // 2 for _ in range(HALVES)]
    )


def singles(count: int) -> Tensor:
    """Which examples are left out one at a time, ``[48]``."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(13))[:SINGLES]


def retrained(case: Case, data: Data, kind: str, seed: int) -> list[nn.Module]:
    """Every model of a kind."""
    if kind == "singles":
        left = singles(len(data.x))
        return [train(case, data.x, data.y, seed, without=i) for i in left]
    return [train(case, x, y, seed) for x, y in changed(data, kind)]


def asked(data: Data, kind: str) -> tuple[Tensor, Tensor]:
    """Where losses are measured: the test examples, and behind them those that are left out."""
    if kind != "singles":
        return data.test_x, data.test_y
    left = singles(len(data.x))
    return torch.cat([data.test_x, data.x[left]]), torch.cat([data.test_y, data.y[left]])


def changed(data: Data, kind: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The training data of every retraining of a kind."""
    if kind == "models":
        yield data.x, data.y
    elif kind == "groups":
        for group in data.groups.unique():
            yield data.x[data.groups != group], data.y[data.groups != group]
    elif kind == "halves":
        for kept in halves(len(data.x)):
            yield data.x[kept], data.y[kept]
    else:
        for change in relabelled(data):
            y = data.y.clone()
            for i, target in change.items():
                y[i] = target
            yield data.x, y


@dataclass(frozen=True)
class Truth:
    """What retraining gave; losses are those of the test examples.

    Attributes:
        recipe: the hash of all that decides it.
        models: trained on everything, one per seed.
        losses: kind → ``[seeds, changes, M]``; of "singles" ``[seeds, 48, M + 48]``, those of the
            examples that are left out behind.
        seconds: processor time of one training, the median.
    """

    case: Case
    data: Data
    recipe: str
    models: list[nn.Module]
    losses: dict[str, Tensor]
    seconds: float


def place(folder: Path, name: str) -> Path:
    """Where a case is kept."""
    return folder / name.replace(", ", "_").replace(" ", "_")


def of(name: str, folder: Path, seeds: int = 5, kinds: Iterable[str] = SEEDS) -> Truth:
    """A case's truth, from ``folder`` as far as it is there and of the same recipe."""
    case, data = CASES[name], CASES[name].data()
    described = asdict(case) | {"data": case.data.__name__, "halves": HALVES}
    recipe = _hashed(described)
    found: dict[str, list[store.Stored]] = {kind: [] for kind in kinds}
    where = {kind: asked(data, kind) for kind in found}
    for kind, seed in ((k, s) for k in found for s in range(min(seeds, SEEDS[k]))):
        path = place(folder, name) / f"{kind}-{seed}.safetensors"
        made = _hashed(described | {"singles": SINGLES}) if kind == "singles" else recipe
        kept = store.read(path, made)
        if kept is None:
            began = time.process_time()
            models, (x, y) = retrained(case, data, kind, seed), where[kind]
            taken = (time.process_time() - began) / len(models)
            with torch.no_grad():
                outputs = torch.stack([model(x) for model in models])
            tensors = {"outputs": outputs} | (models[0].state_dict() if kind == "models" else {})
            kept = store.Stored(tensors, {"hash": made, "seconds": taken, **described})
            store.write(path, kept.tensors, kept.record)
            loss = test_losses(outputs, y).mean(1)
            print(
                f"{name}: {kind} {seed}, {taken:.2f} s each, test loss {loss.min():.3f} … "
                f"{loss.max():.3f}",
                file=sys.stderr,
                flush=True,
            )
        found[kind].append(kept)
    models = []
    for kept in found["models"]:
        models.append(build(case.network).eval())
        models[-1].load_state_dict({n: t for n, t in kept.tensors.items() if n != "outputs"})
    losses = {
        kind: test_losses(torch.stack([k.tensors["outputs"] for k in some]), where[kind][1])
        for kind, some in found.items()
    }
    seconds = [float(k.record["seconds"]) for k in found["models"]]
    return Truth(case, data, recipe, models, losses, statistics.median(seconds))


def _hashed(described: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
