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

ADVICE = (
    "Supported: IVON (blr_analysis and ivon-opt), VOGN, OGN, Vadam, Vprop, BSAM, torch's Adam, "
    "AdamW, NAdam, RAdam, RMSprop and Adagrad. For a model trained with anything else, "
    "blr_analysis.fit_laplace fits a posterior after training."
)


@dataclass(frozen=True)
class Reader:
    """How one optimizer's state is read.

    Attributes:
        kind: recorded in the posterior, e.g. ``"adam_v"``.
        key: the entry of the parameter's state that holds h or v.
        estimate: (state, group) → h or v̂, shaped as the parameter.
        scaled: the optimizer learns a posterior and its groups hold ``ess`` and ``weight_decay``.
        settings: the groups' settings that the record keeps.
    """

    kind: str
    key: str
    estimate: Callable[[State, State], Tensor]
    settings: tuple[str, ...]
    scaled: bool = False

    def has_learned(self, state: State, group: State) -> bool:
        """Whether this parameter was ever updated from a gradient."""
        return isinstance(state.get(self.key), Tensor) and steps(state, group) != 0


def steps(state: State, group: State) -> float | None:
    """The number of steps taken, counted per parameter or per group; None where nobody counts."""
    count = state.get("step", group.get("step"))
    return None if count is None else float(count)


def _counted(state: State, group: State) -> float:
    count = steps(state, group)
    if count is None:
        raise OptimizerError(
            f"the optimizer's state (entries {sorted(state)}) counts no steps, which its bias "
            f"correction needs. {ADVICE}"
        )
    return count


def _adam(state: State, group: State) -> Tensor:
    return state["exp_avg_sq"] / (1 - float(group["betas"][1]) ** _counted(state, group))


def _rmsprop(state: State, group: State) -> Tensor:
    return state["square_avg"] / (1 - float(group["alpha"]) ** _counted(state, group))


def _adagrad(state: State, group: State) -> Tensor:
    start = float(group.get("initial_accumulator_value", 0.0))
    return (state["sum"] - start) / _counted(state, group)


def _second_moment(state: State, group: State) -> Tensor:
    start = 0.0 if group["hess_init"] else float(group["beta2"]) ** _counted(state, group)
    return state["hess"] / (1 - start)


def _summed(state: State, group: State) -> Tensor:
    return (state["hess"] - float(group["hess_init"])) / _counted(state, group)


LEARNED = ("ess", "weight_decay", "hess_init", "beta1", "beta2", "betas", "radius", "damping")
IVON = Reader("ivon", "hess", lambda state, _: state["hess"], LEARNED, scaled=True)
ADAM = Reader("adam_v", "exp_avg_sq", _adam, ("betas", "weight_decay", "amsgrad"))
RMSPROP = Reader("rmsprop_v", "square_avg", _rmsprop, ("alpha", "centered", "weight_decay"))
ADAGRAD = Reader("adagrad_v", "sum", _adagrad, ("initial_accumulator_value", "weight_decay"))

READERS: dict[str, Reader] = {
    "IVON": IVON,
    "Adam": ADAM,
    "AdamW": ADAM,
    "NAdam": ADAM,
    "RAdam": ADAM,
    "RMSprop": RMSPROP,
    "Adagrad": ADAGRAD,
}
"""By the optimizer's class name, or that of one of its base classes."""

ROWS: dict[str, Reader] = {
    "IVON": IVON,
    "VOGN": replace(IVON, kind="vogn"),
    "OGN": replace(IVON, kind="ogn"),
    "Vadam": replace(IVON, kind="vadam"),
    "Vprop": replace(IVON, kind="vprop"),
    "bSAM": replace(IVON, kind="bsam"),
    "Adam": Reader("adam_v", "hess", _second_moment, ("beta1", "beta2", "weight_decay")),
    "AdamW": Reader("adam_v", "hess", _second_moment, ("beta1", "beta2", "weight_decay")),
    "diagonal Newton": replace(IVON, kind="diagonal_newton"),
    "AdaGrad": Reader("adagrad_v", "hess", _summed, ("hess_init", "weight_decay")),
    "AdaDelta": Reader("adadelta_v", "hess", _second_moment, ("beta2", "weight_decay")),
    "RMSprop": Reader("rmsprop_v", "hess", _second_moment, ("beta2", "weight_decay")),
}
"""By the row of the Bayesian learning rule that an optimizer's groups say they run."""


def reader_of(optimizer: torch.optim.Optimizer) -> Reader:
    """The row for a live optimizer.

    Raises:
        OptimizerError: the optimizer keeps no precision, or none that is known here.
    """
    if isinstance(optimizer, torch.optim.SGD):
        raise OptimizerError(f"SGD keeps no precision, at most a momentum. {ADVICE}")
    if (reader := _reader_of_row(optimizer.param_groups)) is not None:
        return reader
    for base in type(optimizer).__mro__:
        if base.__name__ in READERS:
            reader = READERS[base.__name__]
            break
    else:
        raise OptimizerError(f"no precision can be read from {type(optimizer).__name__}. {ADVICE}")
    entries = sorted(
        {key for state in optimizer.state.values() if is_state(state) for key in state}
    )
    if entries and reader.key not in entries:
        said = f"the state of this {type(optimizer).__name__} has the entries {entries}"
        raise OptimizerError(f"{said} and not {reader.key!r}. {ADVICE}")
    return reader


def _reader_of_row(groups: Sequence[State]) -> Reader | None:
    """The row that the groups name; None where they name none."""
    names = {str(group["algorithm"]) for group in groups if "algorithm" in group}
    if not names:
        return None
    other = sorted(names - set(ROWS))
    if other and other[0].startswith(("STE", "BayesBiNN")):
        raise OptimizerError(
            f"{other[0]} learns weights of ±1, no Gaussian: draw networks with "
            "`optimizer.sampled_params()`, or freeze these weights and call fit_laplace."
        )
    if other and other[0].startswith("dropout"):
        raise OptimizerError(
            f"{other[0]} learns a spike and slab, no Gaussian: draw with "
            "`optimizer.sampled_params()`, or call fit_laplace on `optimizer.mean_params()`."
        )
    if len(names) > 1 or other:
        raise OptimizerError(f"{', '.join(sorted(names))} keeps no diagonal precision. {ADVICE}")
    return ROWS[names.pop()]


def reader_of_saved(states: Iterable[State], groups: Sequence[State]) -> Reader:
    """The row for a saved state, which does not name its optimizer: by the entries it holds.

    Raises:
        OptimizerError: the state is empty, or its entries are of no known optimizer.
    """
    entries = {key for state in states if is_state(state) for key in state}
    options = {key for group in groups for key in group}
    if entries and (reader := _reader_of_row(groups)) is not None:
        return reader
    if "hess" in entries | options and {"ess", "weight_decay"} <= options:
        return IVON
    if "exp_avg_sq" in entries and "betas" in options:
        return ADAM
    if "square_avg" in entries and "alpha" in options:
        return RMSPROP
    if "sum" in entries and "lr_decay" in options:
        return ADAGRAD
    if "nesterov" in options:
        raise OptimizerError(f"this is a saved SGD, which keeps no precision. {ADVICE}")
    if not entries:
        raise OptimizerError("the saved optimizer holds no state: save it after training.")
    raise OptimizerError(
        f"the saved optimizer (state: {sorted(entries)}; settings: {sorted(options)}) holds no "
        f"known second moment. {ADVICE}"
    )


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
        if group["hess"].numel() != sum(numels):
            raise OptimizerError(
                f"group {k}'s Hessian has {group['hess'].numel()} entries, but its parameters "
                f"{[tuple(size) for size in sizes]} have {sum(numels)}."
            )
        pieces = zip(torch.split(group["hess"], numels), sizes, strict=True)
        result.append(
            [{"hess": piece.view(size), "step": step} if touched else {} for piece, size in pieces]
        )
    return result
