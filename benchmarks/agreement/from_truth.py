"""Cases from the retrainings that :mod:`benchmarks.truth` keeps outside the repository."""

from __future__ import annotations

import torch

from benchmarks.agreement.cases import Case, LeftOut, Removed, Subsets, small
from benchmarks.truth.objective import cut
from benchmarks.truth.retrain import Truth, available

CHECKPOINTS = 5  # trained from other first weights, where they lead elsewhere


def names() -> list[str]:
    """Cases with at least one kind of retraining on disk; "small" if there are none."""
    return [name for name, counts in available().items() if any(counts.values())] or ["small"]


def load(name: str, checkpoints: int = CHECKPOINTS) -> Case:
    """Model, data and retrainings of a case, as far as they have been computed; or "small"."""
    if name == "small":
        return small()
    found = Truth(name)
    recipe = found.recipe
    thetas = [found.theta]
    if len(recipe.widths) != 2:  # a linear model has one optimum
        thetas += [found.seeded(k) for k in range(1, checkpoints)]
    return Case(
        name,
        list(recipe.widths),
        recipe.likelihood,
        recipe.delta,
        *found.data,
        checkpoints=[cut(recipe.build(), theta) for theta in thetas],
        subsets=subsets(found),
        left_out=left_out(found),
        removed=removed(found),
    )


def subsets(found: Truth) -> Subsets | None:
    """Random halves from fresh weights, and again from others."""
    first = found.retrained("A")
    second = found.retrained("B")
    if first is None:
        return None
    both = min(len(first), len(second or first))
    again = None if second is None else second.test_losses[:both]
    return Subsets(first.kept[:both], first.test_losses[:both], again)


def left_out(found: Truth) -> LeftOut | None:
    one = found.retrained("loo")
    if one is None:
        return None
    indices = torch.cat(one.removed)
    return LeftOut(indices, one.left_out_losses - found.base.tensors["train_losses"][indices])


def removed(found: Truth) -> Removed | None:
    one = found.retrained("class")
    if one is None:
        return None
    before = found.base.tensors["test_losses"]
    passes = float(one.evaluations.double().mean())
    return Removed(one.names, one.removed, one.test_losses, before, passes)
