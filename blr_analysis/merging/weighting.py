"""How much of each task? What the method asks for; and precisions as diagonals, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from blr_analysis.checks import positive_int, some
from blr_analysis.errors import InputError
from blr_analysis.merging.at_weights import State, state_of
from blr_analysis.merging.methods import method_of
from blr_analysis.posterior import Posterior


def default_weights(method: str, n_models: int) -> list[float]:
    """α_t before anything is known of the tasks: what the method's own derivation asks for.

    ``gradient_matching`` and ``fisher``: 1 each. Their H_t are SUMS over the examples of a task,
    so α_t = 1 lets every example of every task count once: the objective is that of training on
    all data together, and for quadratic losses the merge is its optimum. α_t ≠ 1 answers another
    question: a task that counts α_t times, or (α_t = −1) one that is taken out.

    ``task_arithmetic`` and ``linear``: 1/T each. Without precisions nothing says where the tasks
    agree. If they all ask for the same change, Σ_t (θ_t − θ_0) overshoots T times and 1/T is
    exact; if each changes weights of its own, 1 is exact. 1/T never leaves the convex hull of
    the models; with precisions, gradient matching finds the place between the two.

    Args:
        method: a name of :data:`blr_analysis.merging.methods.METHODS`.
        n_models: T, how many fine-tuned models are merged.

    Raises:
        InputError: an unknown method, or T below 1.

    Example:
        >>> default_weights("gradient_matching", 4), default_weights("task_arithmetic", 4)
        ([1.0, 1.0, 1.0, 1.0], [0.25, 0.25, 0.25, 0.25])
    """
    count = positive_int("n_models", n_models)
    return [1.0 if method_of(method).uses_precisions else 1 / count] * count


def data_precision(precision: Any, name: str) -> State:
    """The diagonal H by parameter name, without the prior's share, checked.

    Raises:
        InputError: neither tensors by name nor a posterior; NaN, inf or negative entries.
    """
    if isinstance(precision, Posterior):
        prior = precision.prior
        data_part = {n: (precision.precision(n) - prior.of(n)).clamp_min(0) for n in precision.mean}
    else:
        data_part = state_of(precision, name)
    for n, h in data_part.items():
        if not h.is_floating_point() or not bool((torch.isfinite(h) & (h >= 0)).all()):
            raise InputError(
                f"{name}: the precision of {n!r} must be finite and at least 0 everywhere"
            )
    return data_part


def in_order(given: Any, names: Sequence[str], what: str = "precisions") -> list[Any]:
    """One entry per name, of a list in their order or a dict by them.

    Raises:
        InputError: another number of them, or other names.
    """
    if isinstance(given, Mapping):
        named = {str(n): entry for n, entry in given.items()}
        if set(named) != set(names):
            raise InputError(
                f"{what} are of {some(sorted(named))}, wanted of {some(sorted(names))}: "
                "use the same names"
            )
        return [named[n] for n in names]
    if isinstance(given, (list, tuple)) and len(given) == len(names):
        return list(given)
    got = f"{len(given)}" if isinstance(given, (list, tuple)) else repr(given)
    raise InputError(f"{what} must hold one for each of {len(names)}, got {got:.80}")


def matched_precisions(precisions: Any, names: Sequence[str]) -> dict[str, State]:
    """H_t as tensors, by the names of the models; see :func:`in_order`, :func:`data_precision`."""
    given = zip(names, in_order(precisions, names), strict=True)
    return {n: data_precision(p, f"precisions[{n!r}]") for n, p in given}
