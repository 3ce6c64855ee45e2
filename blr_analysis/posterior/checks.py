"""What makes a mean and a number of examples acceptable; else, what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from blr_analysis.checks import whole
from blr_analysis.errors import PosteriorError
from blr_analysis.posterior.prior import Shapes

MOST = 8  # names that a message lists


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


def n_data_of(n_data: Any, *, least: int = 1) -> int:
    """N, the number of examples, or :class:`PosteriorError`."""
    n = whole(n_data)
    if n is None or n < least:
        raise PosteriorError(f"n_data must be a positive whole number of examples, got {n_data!r}")
    return n


def differences(mine: Shapes, theirs: Shapes, who: tuple[str, str]) -> str:
    """The names and shapes in which two sets of parameters differ, for messages."""
    lines = [
        f"{n}: {mine.get(n, 'absent')} in the {who[0]}, {theirs.get(n, 'absent')} in the {who[1]}"
        for n in {**mine, **theirs}
        if mine.get(n) != theirs.get(n)
    ]
    more = f"; and {len(lines) - MOST} more" if len(lines) > MOST else ""
    return "; ".join(lines[:MOST]) + more
