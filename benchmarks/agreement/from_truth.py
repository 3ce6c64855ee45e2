"""Cases from the retrainings that :mod:`benchmarks.truth` keeps outside the repository."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks import truth
from benchmarks.agreement.cases import Case, LeftOut, Removed, State, Subsets, small
from benchmarks.peers.problem import build
from benchmarks.truth import retrain, store
from benchmarks.truth.results import Retrained
from blr_analysis.errors import DataError

SEED = 500  # of the first model trained from other first weights
CHECKPOINTS = 5  # trained from other first weights, where they lead elsewhere


def names() -> list[str]:
    """Cases with at least one kind of retraining on disk; "small" if there are none."""
    return [name for name, counts in truth.available().items() if any(counts.values())] or ["small"]


def load(name: str, checkpoints: int = CHECKPOINTS) -> Case:
    """Model, data and retrainings of a case, as far as they have been computed; or "small"."""
    if name == "small":
        return small()
    found = truth.load(name)
    recipe = found.recipe
    kind: dict[str, Any] = {"kind": "lenet"}
    if recipe.widths:
        kind = {"kind": "mlp", "widths": list(recipe.widths)}
    thetas = [found.theta]
    if len(recipe.widths) != 2:  # a linear model has one optimum
        thetas += [seeded(name, k) for k in range(1, checkpoints)]
    return Case(
        name,
        kind,
        recipe.likelihood,
        recipe.delta,
        *found.train,
        *found.test,
        checkpoints=[state(kind, theta) for theta in thetas],
        noise=recipe.noise,
        subsets=subsets(found),
        left_out=left_out(found),
        removed=removed(found),
    )


def state(architecture: dict[str, Any], theta: Tensor) -> State:
    """A flat vector, in the order of the parameters, as a state dict."""
    parameters = dict(build(architecture).named_parameters())
    parts = theta.split([p.numel() for p in parameters.values()])
    return {n: part.view_as(p) for (n, p), part in zip(parameters.items(), parts, strict=True)}


def seeded(name: str, which: int) -> Tensor:
    """The weights that training on all data reaches from other first weights, ``[P]``; kept."""
    recipe = truth.CASES[name]
    path = store.folder(name) / "checkpoints" / f"{which}.safetensors"
    kept = store.read(path, recipe.hash)
    if kept is None:
        x, y = truth.load(name).train
        start = retrain.fresh(recipe, SEED + which)
        minimum, _ = retrain.descend(recipe, x, y, start, retrain.FRESH)
        kept = store.Stored({"theta": minimum.theta}, {"hash": recipe.hash})
        store.write(path, kept.tensors, kept.record)
    return kept.tensors["theta"]


def retrained(found: truth.Truth, kind: str, start: str = "") -> Retrained | None:
    """Retrainings of a kind; None where there are none yet."""
    try:
        return found.subsets(start) if kind == "subset" else found.retrained(kind)
    except DataError:
        return None


def subsets(found: truth.Truth) -> Subsets | None:
    """Random halves from fresh weights (warm ones where there are no others) and again."""
    first, second = retrained(found, "subset", "A"), retrained(found, "subset", "B")
    if first is None:
        first = retrained(found, "subset", "warm")
    if first is None:
        return None
    again = None
    if second is not None:
        # only the halves that both have, in one order
        both = min(len(first), len(second))
        if not bool((first.kept[:both] == second.kept[:both]).all()):
            raise ValueError("the two sets of retrainings do not have the same halves")
        again = second.test_losses[:both]
        return Subsets(first.kept[:both], first.test_losses[:both], again)
    return Subsets(first.kept, first.test_losses)


def left_out(found: truth.Truth) -> LeftOut | None:
    one = retrained(found, "loo")
    if one is None:
        return None
    indices = torch.cat(one.removed)
    return LeftOut(indices, one.left_out_losses - found.train_losses[indices])


def removed(found: truth.Truth) -> Removed | None:
    one = retrained(found, "class")
    if one is None:
        return None
    return Removed(
        one.notes,
        one.removed,
        one.test_losses,
        found.test_losses,
        float(one.evaluations.double().mean()),
    )
