"""Which retrainings a case asks for; the same list on every run, the telling ones first."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.truth.recipes import Recipe

KINDS = ("class", "loo", "subset", "relabel")
STARTS = ("A", "B", "warm")  # of the subsets: two sets of first weights, and the trained ones


@dataclass(frozen=True)
class Job:
    """One retraining.

    Attributes:
        kind: "loo", "class", "subset" or "relabel".
        name: of its file.
        removed: the examples that are left out.
        relabelled: an example and its new target.
        seed: of the first weights; None starts from the trained ones.
        note: why it was chosen.
    """

    kind: str
    name: str
    removed: list[int] = field(default_factory=list)
    relabelled: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    note: str = ""


def jobs(
    kind: str, recipe: Recipe, y: Tensor, influence: Tensor, few: int | None = None
) -> list[Job]:
    """The retrainings of one kind (at most ``few`` of them)."""
    found = {"loo": _loo, "class": _classes, "subset": _subsets, "relabel": _relabel}[kind](
        recipe, y, influence
    )
    return found if few is None else found[:few]


def _order(recipe: Recipe, offset: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * (recipe.seed + 1) + offset)


def _loo(recipe: Recipe, y: Tensor, influence: Tensor) -> list[Job]:
    """Random examples and those of highest influence, in turn."""
    n_random, n_top = recipe.loo
    random = torch.randperm(len(y), generator=_order(recipe, 1))[:n_random].tolist()
    drawn = set(random)
    top = [i for i in influence.argsort(descending=True).tolist() if i not in drawn][:n_top]
    found = []
    for k in range(max(len(random), len(top))):
        found += [(i, "random") for i in random[k : k + 1]] + [(i, "top") for i in top[k : k + 1]]
    return [Job("loo", f"{i:06d}", [i], note=note) for i, note in found]


def _classes(recipe: Recipe, y: Tensor, influence: Tensor) -> list[Job]:
    if recipe.likelihood == "gaussian":
        return []
    return [
        Job("class", f"{int(c):03d}", (y == c).nonzero().flatten().tolist(), note=f"{int(c)}")
        for c in y.unique().tolist()
    ]


def _subsets(recipe: Recipe, y: Tensor, influence: Tensor) -> list[Job]:
    found = []
    for k, start in ((k, s) for k in range(recipe.subsets) for s in STARTS):
        order = torch.randperm(len(y), generator=_order(recipe, 100 + k))
        removed = order[len(y) // 2 :].sort().values.tolist()
        seed = None if start == "warm" else 10_000 * (1 + STARTS.index(start)) + k
        found.append(Job("subset", f"{start}-{k:03d}", removed, seed=seed, note=start))
    return found


def _relabel(recipe: Recipe, y: Tensor, influence: Tensor) -> list[Job]:
    """Random examples, each with the target of another one whose target differs."""
    generator = _order(recipe, 2)
    chosen = torch.randperm(len(y), generator=generator)[: recipe.relabel].tolist()
    found = []
    for i in chosen:
        others = y[y != y[i]]
        new = float(others[int(torch.randint(len(others), (1,), generator=generator))])
        found.append(Job("relabel", f"{i:06d}", relabelled={i: new}))
    return found
