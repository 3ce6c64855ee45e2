"""What makes a mean, a prior precision and a number of examples acceptable; else, what to do."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import PosteriorError

Shapes = Mapping[str, tuple[int, ...]]


def check_prior(prior: Any, shapes: Shapes, *, positive: bool = False) -> None:
    """Raise :class:`PosteriorError` unless δ is finite, ≥ 0 (``positive``: > 0), and fits."""
    if isinstance(prior, Mapping) and set(prior) != set(shapes):
        absent, strange = sorted(set(shapes) - set(prior)), sorted(set(prior) - set(shapes))
        raise PosteriorError(
            "prior_precision must have one entry per parameter: missing "
            f"{absent[:8] or 'none'}, unknown {strange[:8] or 'none'}"
        )
    for name, value in prior.items() if isinstance(prior, Mapping) else [("", prior)]:
        where = f" of {name!r}" if name else ""
        try:
            delta = torch.as_tensor(value, dtype=torch.float64)
            torch.empty(shapes.get(name, ()), device="meta").copy_(delta.to("meta"))
        except (TypeError, ValueError, RuntimeError) as error:
            raise PosteriorError(
                f"prior_precision{where} must be a number, or one number or tensor per parameter "
                f"name, got {value!r}"
            ) from error
        high = delta > 0 if positive else delta >= 0
        if not bool((torch.isfinite(delta) & high).all()):
            raise PosteriorError(
                f"prior_precision{where} must be finite and {'above' if positive else 'at least'} "
                f"0, got {value!r}"
            )


def real_tensors(name: str, tree: Any) -> dict[str, Tensor]:
    """Detached floating-point tensors by name, or :class:`PosteriorError`."""
    if not isinstance(tree, Mapping) or not all(isinstance(t, Tensor) for t in tree.values()):
        raise PosteriorError(
            f"{name} must be a dict of tensors by parameter name, got {type(tree).__name__}"
        )
    for key, tensor in tree.items():
        if not tensor.is_floating_point():
            raise PosteriorError(f"the {name} of {key!r} must hold real numbers, is {tensor.dtype}")
    return {n: t.detach() for n, t in tree.items()}


def count_of(n_data: Any) -> int:
    """N as a whole number, at least 0, or :class:`PosteriorError`."""
    try:
        count = -1 if isinstance(n_data, bool) else operator.index(n_data)
    except TypeError:
        count = -1
    if count < 0:
        raise PosteriorError(f"n_data must be the number of training examples, got {n_data!r}")
    return count


def differences(mine: Shapes, theirs: Shapes, who: tuple[str, str], most: int = 8) -> str:
    """The names and shapes in which two sets of parameters differ, for messages."""
    lines = [
        f"{n}: {mine.get(n, 'absent')} in the {who[0]}, {theirs.get(n, 'absent')} in the {who[1]}"
        for n in {**mine, **theirs}
        if mine.get(n) != theirs.get(n)
    ]
    more = f"; and {len(lines) - most} more" if len(lines) > most else ""
    return "; ".join(lines[:most]) + more
