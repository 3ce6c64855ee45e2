"""From curvature to precision: how many examples, which prior, and how they enter S."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from blr_analysis.checks import some, whole
from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.posterior.capture.readers import State
from blr_analysis.posterior.checks import n_data_of
from blr_analysis.posterior.prior import Given, Prior

SCALINGS = ("sqrt", "squared", "ess")


@dataclass(frozen=True)
class Told:
    """What the caller says of a training: see :func:`.from_optimizer`."""

    n_data: int | None
    prior_precision: Given | None
    scaling: str
    batch_size: int | None
    tokens: int | None
    bare: bool = False
    initial: Mapping[str, Tensor] | None = None

    @property
    def delta(self) -> Given | None:
        """δ of the files to merge may be left out."""
        return 0.0 if self.bare and self.prior_precision is None else self.prior_precision

    @property
    def counted(self) -> dict[str, int]:
        return {} if self.tokens is None else {"tokens": self.tokens}


@dataclass(frozen=True)
class Scale:
    """What turns an estimate (h or v̂) into the data's part of S, and the prior's part.

    Attributes:
        n_data: N.
        prior: δ by parameter name; None: nobody knows it.
        data_part: (estimate, group) → S − δ.
        definition: the formula, as text.
        record: the choices made, JSON-able.
    """

    n_data: int
    prior: dict[str, float] | None
    data_part: Callable[[Tensor, State], Tensor]
    definition: str
    record: dict[str, Any] = field(default_factory=dict)


def own_scale(groups: Mapping[str, State], told: Told) -> Scale:
    """For optimizers that learn a posterior: ess and weight_decay are in the groups.

    Args:
        groups: the optimizer's group by parameter name.
    """
    _check_scaling(told.scaling, told.batch_size)
    if told.scaling == "squared":
        raise InputError(
            "scaling='squared' is for second moments, not for a learned precision: leave it out"
        )
    sizes = sorted({float(group["ess"]) for group in groups.values()})
    n = _check_ess(sizes, told)
    prior = {name: float(g["ess"]) * float(g["weight_decay"]) for name, g in groups.items()}
    if told.delta is not None:
        given = _by_name(told.delta, groups)
        wrong = [
            name for name in groups if not math.isclose(given[name], prior[name], rel_tol=1e-6)
        ]
        if wrong:
            raise OptimizerError(
                f"prior_precision={given[wrong[0]]:g} contradicts the optimizer's "
                f"{prior[wrong[0]]:g} for {some(wrong)}: leave it out"
            )
    return Scale(
        n_data=n,
        prior=prior,
        data_part=lambda hess, group: hess * float(group["ess"]),
        definition="S = ess*(h + weight_decay)",
        record={"scaling": "ess", "ess": sizes, **told.counted},
    )


def given_scale(groups: Mapping[str, State], told: Told) -> Scale:
    """For second moments: N and the choice of the formula are the caller's, δ where it is known.

    An L2 penalty ``weight_decay`` on the mean loss is δ = N · weight_decay.
    """
    _check_scaling(told.scaling, told.batch_size)
    if told.scaling == "ess":
        raise InputError("scaling='ess' is for IVON, VOGN and their like: pass 'sqrt' or 'squared'")
    if told.n_data is None:
        raise OptimizerError(
            "n_data is missing: S = N*sqrt(v_hat) + delta needs it, pass n_data=len(dataset)"
        )
    n = n_data_of(told.n_data)
    terms = float(n if told.tokens is None else told.tokens)  # of the loss, which is their mean
    root = told.scaling == "sqrt"
    factor = terms if root else terms * float(told.batch_size or 1)
    return Scale(
        n_data=n,
        prior=_trained_with(groups, terms) if told.delta is None else _by_name(told.delta, groups),
        data_part=lambda v, _: factor * (v.sqrt() if root else v),
        definition=f"S = {'N*sqrt(v_hat)' if root else 'N*B*v_hat'} + delta",
        record={
            "scaling": told.scaling,
            "batch_size": told.batch_size,
            "bias_corrected": True,
            **told.counted,
        },
    )


def _trained_with(groups: Mapping[str, State], terms: float) -> dict[str, float] | None:
    """δ of the L2 penalty that all parameters were trained with; None where they were not."""
    prior = {name: terms * float(g.get("weight_decay", 0.0)) for name, g in groups.items()}
    return prior if all(map(is_penalty, groups.values())) and all(prior.values()) else None


def is_penalty(group: State) -> bool:
    """Whether an optimizer's weight decay is an L2 penalty of the loss: not AdamW's, and not where
    a saved state does not say which of the two it is."""
    if "algorithm" in group:
        return group["algorithm"] != "AdamW"
    return not group.get("decoupled_weight_decay", "betas" in group)


def _check_scaling(scaling: str, batch_size: object) -> None:
    if scaling not in SCALINGS:
        raise InputError(f"scaling must be one of {SCALINGS}, not {scaling!r}.")
    if scaling == "squared":
        size = whole(batch_size)
        if size is None or size < 1:
            raise InputError(
                f"scaling='squared' needs batch_size, the examples of one step, not {batch_size!r}"
            )
    elif batch_size is not None:
        raise InputError(f"batch_size is used with scaling='squared' only, not {scaling!r}.")


def _check_ess(sizes: Sequence[float], told: Told) -> int:
    n_data = None if told.n_data is None else n_data_of(told.n_data)
    scaling, tokens = told.scaling, told.tokens
    if not all(math.isfinite(ess) and ess > 0 for ess in sizes):
        raise OptimizerError(f"the optimizer's ess must be positive and finite, not {sizes}.")
    if tokens is not None and scaling != "ess":
        if n_data is None:
            raise OptimizerError("n_data, the number of sequences, is missing beside tokens=")
        if not all(math.isclose(ess, tokens, rel_tol=1e-6) for ess in sizes):
            raise OptimizerError(
                f"tokens={tokens} is inconsistent with the optimizer's ess={sizes}"
            )
        return n_data
    n = n_data or max(1, round(sizes[0]))
    if scaling == "ess" or all(math.isclose(ess, n, rel_tol=1e-6) for ess in sizes):
        return n
    if n_data is None:
        raise OptimizerError(
            f"n_data is missing: the optimizer's ess ({sizes}) is no number of examples. Pass "
            "n_data=len(dataset) and scaling='ess'."
        )
    raise OptimizerError(
        f"n_data={n_data} is inconsistent with the optimizer's ess={sizes}: leave n_data out, or "
        f"pass tokens={round(sizes[0])}, or scaling='ess' if tempered"
    )


def _by_name(given: Given, names: Iterable[str]) -> dict[str, float]:
    return Prior.read(given, dict.fromkeys(names, ())).numbers(names)
