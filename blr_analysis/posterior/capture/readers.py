"""What each optimizer's state says about curvature: one row per optimizer.

Two families. Optimizers that learn a posterior (IVON, VOGN, OGN, Vadam, Vprop, bSAM) keep a
Hessian estimate h and know their own scale: S = ess·(h + weight_decay). Optimizers that only
keep a second moment v of the minibatch-mean gradients (Adam and its relatives) are read as v̂,
corrected for the bias of its start at zero; the caller supplies the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import OptimizerError

State = Mapping[str, Any]

ADVICE = "fit_laplace fits a posterior after any training"


def steps(state: State, group: State) -> float | None:
    """The number of steps taken, counted per parameter or per group; None where nobody counts."""
    count = state.get("step", group.get("step"))
    return None if count is None else float(count)


def _counted(state: State, group: State) -> float:
    count = steps(state, group)
    if count is None:
        said = f"the optimizer's state (entries {sorted(state)}) counts no steps"
        raise OptimizerError(f"{said}: {ADVICE}")
    return count


def _mean(key: str, beta: Callable[[State], float]) -> Callable[[State, State], Tensor]:
    """A running mean that started at 0, without the bias of that."""
    return lambda state, group: state[key] / (1 - float(beta(group)) ** _counted(state, group))


def _sum(key: str, start: str) -> Callable[[State, State], Tensor]:
    """A sum of squares, as their mean."""
    return lambda state, group: (state[key] - float(group.get(start, 0.0))) / _counted(state, group)


@dataclass(frozen=True)
class Reader:
    """How one optimizer's state is read.

    Attributes:
        kind: recorded in the posterior, e.g. ``"adam_v"``.
        key: the entry of the parameter's state that holds h or v.
        estimate: (state, group) → h or v̂, shaped as the parameter.
        classes: names of the optimizers, or of their base classes.
        option: of a group, by which a saved state, which does not name its optimizer, is known.
        scaled: the optimizer learns a posterior and its groups hold ``ess`` and ``weight_decay``.
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


IVON = Reader("ivon", "hess", lambda state, _: state["hess"], ("IVON",), "ess", True)
READERS = (
    IVON,
    Reader(
        "adam_v",
        "exp_avg_sq",
        _mean("exp_avg_sq", lambda group: group["betas"][1]),
        ("Adam", "AdamW", "NAdam", "RAdam"),
        "betas",
    ),
    Reader(
        "rmsprop_v",
        "square_avg",
        _mean("square_avg", lambda group: group["alpha"]),
        ("RMSprop",),
        "alpha",
    ),
    Reader(
        "adagrad_v",
        "sum",
        _sum("sum", "initial_accumulator_value"),
        ("Adagrad",),
        "lr_decay",
    ),
)
SECOND = Reader(
    "adam_v",
    "hess",
    _mean("hess", lambda group: 0.0 if group["hess_init"] else group["beta2"]),
)
ROWS: dict[str, Reader] = {
    **{row: replace(IVON, kind=row.lower()) for row in ("IVON", "VOGN", "OGN", "Vadam", "Vprop")},
    "bSAM": replace(IVON, kind="bsam"),
    "diagonal Newton": replace(IVON, kind="diagonal_newton"),
    "Adam": SECOND,
    "AdamW": SECOND,
    "AdaDelta": replace(SECOND, kind="adadelta_v"),
    "RMSprop": replace(SECOND, kind="rmsprop_v"),
    "AdaGrad": Reader("adagrad_v", "hess", _sum("hess", "hess_init")),
}
"""By the row of the Bayesian learning rule that an optimizer's groups say they run."""


def reader_of(optimizer: torch.optim.Optimizer) -> Reader:
    """The row for a live optimizer.

    Raises:
        OptimizerError: the optimizer keeps no precision, or none that is known here.
    """
    return reader_of_saved(optimizer.state.values(), optimizer.param_groups, type(optimizer))


def reader_of_saved(
    states: Iterable[State], groups: Sequence[State], kind: type | None = None
) -> Reader:
    """The row for a saved state, which does not name its optimizer: by the entries it holds.

    Raises:
        OptimizerError: the state is empty, or its entries are of no known optimizer.
    """
    entries = {key for state in states if is_state(state) for key in state}
    options = {key for group in groups for key in group}
    if (entries or kind) and (reader := _of_row(groups)) is not None:
        return reader
    bases = {base.__name__ for base in (kind.__mro__ if kind else ())}
    for reader in READERS:
        known = bases & set(reader.classes) if kind else reader.option in options
        held = entries | options if reader.scaled else entries  # ivon-opt's h is in its groups
        if known and (reader.key in held or (kind and not entries)):
            return reader
    if not entries and not kind and "nesterov" not in options:
        raise OptimizerError("the saved optimizer holds no state: save it after training.")
    if "nesterov" in options:
        raise OptimizerError(f"SGD keeps no precision: {ADVICE}")
    said = f"{kind.__name__ if kind else 'the saved optimizer'} (state: {sorted(entries)})"
    raise OptimizerError(f"no precision can be read from {said}: {ADVICE}")


def _of_row(groups: Sequence[State]) -> Reader | None:
    """The row that the groups name; None where they name none."""
    names = {str(group["algorithm"]) for group in groups if "algorithm" in group}
    if len(names) == 1 and (reader := ROWS.get(next(iter(names)))) is not None:
        return reader
    if names:
        said = f"{', '.join(sorted(names))} keeps no diagonal precision"
        raise OptimizerError(f"{said}: draw from sampled_params(), or {ADVICE}")
    return None


def is_state(state: object) -> bool:
    """Whether an entry of an optimizer's ``state`` belongs to a parameter."""
    return isinstance(state, Mapping)


def split_flat(
    groups: Sequence[State], shapes: Sequence[Sequence[torch.Size]], step: int | None = None
) -> list[list[dict[str, Any]]] | None:
    """States per parameter from ``ivon-opt``'s flat vectors per group; None for other layouts.

    ``ivon-opt`` keeps one ``hess`` and one ``momentum`` vector in each group: that group's
    parameters one after the other, the frozen ones included, counted from the start of the
    group. Vectors that no step has changed give empty states. Its state dict does not say how many
    steps were taken, the live optimizer (``step``) does.

    Raises:
        OptimizerError: a vector's length is not that of the group's parameters.
    """
    if not any(isinstance(group.get("hess"), Tensor) for group in groups):
        return None
    touched = any(
        bool((group["momentum"] != 0).any()) or bool((group["hess"] != group["hess_init"]).any())
        for group in groups
    )
    result = []
    for k, (group, sizes) in enumerate(zip(groups, shapes, strict=True)):
        numels = [size.numel() for size in sizes]
        if (held := group["hess"].numel()) != sum(numels):
            said = f"group {k}'s Hessian has {held} entries, its parameters {sum(numels)}"
            raise OptimizerError(f"{said}: it was saved for another model")
        pieces = zip(torch.split(group["hess"], numels), sizes, strict=True)
        result.append(
            [{"hess": piece.view(size), "step": step} if touched else {} for piece, size in pieces]
        )
    return result
