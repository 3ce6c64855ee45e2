"""What each optimizer's state says about curvature: one row per optimizer.

There are two families. Optimizers that learn a posterior (IVON, VOGN, OGN, Vadam, Vprop, bSAM)
store a Hessian estimate h and its scale: S = ess·(h + weight_decay). Adam and its relatives store
only a second moment v of the minibatch-mean gradients. It is read as v̂, without the bias of its
start at zero, and the caller gives the scale. h is corrected for its start as well
(:mod:`blr_analysis.posterior.capture.learned`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from blr_analysis.errors import OptimizerError

State = Mapping[str, Any]

ADVICE = "fit_laplace fits a posterior after any training"


@dataclass(frozen=True)
class Slot:
    """One trainable parameter: its name, its value, and its state and group in the optimizer."""

    name: str
    value: Tensor
    state: State
    group: State


def steps(state: State, group: State) -> float:
    """How many steps the optimizer took, as the parameter's state or its group counts them.

    Raises:
        OptimizerError: neither counts steps.
    """
    count = state.get("step", group.get("step"))
    if count is None:
        entries = sorted(state)
        raise OptimizerError(f"the optimizer's state (entries {entries}) counts no steps: {ADVICE}")
    return float(count)


def beta2(group: State) -> float | None:
    """β₂, the weight of the old second moment in each step; None where the group has none."""
    factor = group.get("beta2", group.get("alpha"))
    if "betas" in group:
        factor = group["betas"][1]
    return None if factor is None else float(factor)


def is_flat(group: State) -> bool:
    """Whether a group holds one vector of all its parameters' h, as ivon-opt's IVON does."""
    vector = group.get("hess")
    return isinstance(vector, Tensor) and vector.ndim == 1


def split_flat(
    group: State, shapes: Sequence[torch.Size], taken_steps: float | None
) -> list[dict[str, Any]]:
    """The state of each parameter of a flat group.

    Args:
        group: a group for which :func:`is_flat` is true.
        shapes: the shapes of the parameters, in the group's order.
        taken_steps: how many steps the optimizer took; None where nobody counted (a saved state).

    Raises:
        OptimizerError: the vector is longer or shorter than the parameters.
    """
    vector = group["hess"]
    sizes = [shape.numel() for shape in shapes]
    if len(vector) != sum(sizes):
        raise OptimizerError(
            f"the optimizer's 'hess' has {len(vector)} numbers, its parameters {sum(sizes)}: "
            "pass the model that it trained"
        )
    if taken_steps is None:
        is_at_start = bool((vector == float(group["hess_init"])).all())
        taken_steps = 0.0 if is_at_start else nan
    parts = vector.split(sizes)
    return [
        {"hess": part.view(shape), "step": taken_steps}
        for part, shape in zip(parts, shapes, strict=True)
    ]


def _mean(key: str) -> Callable[[State, State], Tensor]:
    """A function that reads a running mean and takes off the bias of its start at 0."""

    def unbiased(state: State, group: State) -> Tensor:
        start_weight = (beta2(group) or 0.0) ** steps(state, group)
        return state[key] / (1 - start_weight)

    return unbiased


def _sum(key: str, start: str) -> Callable[[State, State], Tensor]:
    """A function that reads a sum of squares, which began at ``start``, as their mean."""

    def mean(state: State, group: State) -> Tensor:
        total = state[key] - float(group.get(start, 0.0))
        return total / steps(state, group)

    return mean


@dataclass(frozen=True)
class Reader:
    """How one optimizer's state is read.

    Attributes:
        kind: the kind of estimate that the posterior's record names, e.g. ``"adam_v"``.
        key: the entry of the parameter's state that holds h or v.
        estimate: a function (state, group) → h or v̂, shaped as the parameter.
        classes: the names of the optimizers, or of their base classes.
        option: an option of the optimizer's groups. A saved state does not name its optimizer and
            is recognised by this option.
        scaled: whether the optimizer learns a posterior, so that its groups hold ``ess`` and
            ``weight_decay``.
    """

    kind: str
    key: str
    estimate: Callable[[State, State], Tensor]
    classes: tuple[str, ...] = ()
    option: str = ""
    scaled: bool = False

    def has_learned(self, state: State, group: State) -> bool:
        """Whether this parameter was ever updated from a gradient."""
        return isinstance(state.get(self.key), Tensor) and steps(state, group) != 0


def weight_of_start(state: State, group: State) -> float:
    """β₂ᵗ, the weight that the start still has; NaN where nobody counted the steps."""
    factor = beta2(group)
    return nan if factor is None else factor ** steps(state, group)


def has_weight_of_start(state: State, group: State) -> bool:
    """Whether the start can be taken off h: its weight is known, and is not all of the weight."""
    weight = weight_of_start(state, group)
    return "hess_init" in group and not isnan(weight) and weight < 1


def _without_start(state: State, group: State) -> Tensor:
    """(h − β₂ᵗ h₀) / (1 − β₂ᵗ); h itself where that cannot be known."""
    hess = state["hess"]
    if not has_weight_of_start(state, group):
        return hess
    weight = weight_of_start(state, group)
    return (hess - weight * float(group["hess_init"])) / (1 - weight)


ADAMS = ("Adam", "AdamW", "NAdam", "RAdam")
IVON = Reader("ivon", "hess", _without_start, ("IVON",), "ess", True)
READERS = (
    IVON,
    Reader("adam_v", "exp_avg_sq", _mean("exp_avg_sq"), ADAMS, "betas"),
    Reader("rmsprop_v", "square_avg", _mean("square_avg"), ("RMSprop",), "alpha"),
    Reader("adagrad_v", "sum", _sum("sum", "initial_accumulator_value"), ("Adagrad",), "lr_decay"),
)


def _without_start_bias(state: State, group: State) -> Tensor:
    """A running mean, without the bias of its start where it started at 0."""
    started_at_zero = not group["hess_init"]
    return _mean("hess")(state, group) if started_at_zero else state["hess"]


SQUARED_GRADIENTS = Reader("adam_v", "hess", _without_start_bias)
ROWS: dict[str, Reader] = {
    **{row: replace(IVON, kind=row.lower()) for row in ("IVON", "VOGN", "OGN", "Vadam", "Vprop")},
    "bSAM": replace(IVON, kind="bsam"),
    "diagonal online Newton": replace(IVON, kind="diagonal_newton"),
    "Adam": SQUARED_GRADIENTS,
    "AdamW": SQUARED_GRADIENTS,
    "AdaDelta": replace(SQUARED_GRADIENTS, kind="adadelta_v"),
    "RMSprop": replace(SQUARED_GRADIENTS, kind="rmsprop_v"),
    "AdaGrad": Reader("adagrad_v", "hess", _sum("hess", "hess_init")),
}
"""The readers of this package's own optimizers, whose groups name the algorithm that they run."""


def reader_of(optimizer: Optimizer) -> Reader:
    """The reader for an optimizer that is in memory.

    Raises:
        OptimizerError: the optimizer stores no precision, or none that is known here.
    """
    return reader_of_saved(optimizer.state.values(), optimizer.param_groups, type(optimizer))


def reader_of_saved(
    states: Iterable[State], groups: Sequence[State], kind: type | None = None
) -> Reader:
    """The reader for the states and groups of an optimizer.

    Args:
        kind: the optimizer's class; None for a saved state, which does not name it and is
            recognised by the options of its groups.

    Raises:
        OptimizerError: the state is empty, or its entries are of no known optimizer.
    """
    entries = {key for state in states if isinstance(state, Mapping) for key in state}
    if any(map(is_flat, groups)):
        entries.add("hess")
    if entries or kind:
        row_reader = _reader_of_row(groups)
        if row_reader is not None:
            return row_reader
    options = {key for group in groups for key in group}
    classes: set[str] = set()
    if kind:
        classes = {base.__name__ for base in kind.__mro__}
    has_not_stepped = kind is not None and not entries
    for reader in READERS:
        matches = bool(classes & set(reader.classes)) if kind else reader.option in options
        if matches and (reader.key in entries or has_not_stepped):
            return reader
    is_sgd = "SGD" in classes if kind else "dampening" in options
    if is_sgd:
        raise OptimizerError(f"SGD keeps no precision: {ADVICE}")
    if not entries and not kind:
        raise OptimizerError("the saved optimizer holds no state: save it after training.")
    name = kind.__name__ if kind else "the saved optimizer"
    raise OptimizerError(
        f"no precision can be read from {name} (state: {sorted(entries)}): {ADVICE}"
    )


def _reader_of_row(groups: Sequence[State]) -> Reader | None:
    """The reader for the algorithm that the groups name; None where they name none.

    Raises:
        OptimizerError: the algorithm stores no diagonal precision.
    """
    names = {str(group["algorithm"]) for group in groups if "algorithm" in group}
    if len(names) == 1:
        reader = ROWS.get(next(iter(names)))
        if reader is not None:
            return reader
    if names:
        raise OptimizerError(
            f"{', '.join(sorted(names))} keeps no diagonal precision: draw from sampled_params(), "
            f"or {ADVICE}"
        )
    return None
