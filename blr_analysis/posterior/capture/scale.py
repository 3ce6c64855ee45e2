"""How an optimizer's estimate becomes a precision: the number of examples, the formula, the prior.

IVON and its kin    S = ess · (h + weight_decay); the optimizer's groups have ess and weight_decay
second moments      S = N √v̂ + δ, or N B v̂ + δ; the caller says N, the formula, B and δ
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from blr_analysis.checks import one_of, positive_int
from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.posterior.capture.readers import State
from blr_analysis.posterior.prior import Given, Prior, n_data_of

AGREEMENT = 1e-6  # by so much, relatively, a user's number may differ from the optimizer's


@dataclass(frozen=True)
class TrainingFacts:
    """What the caller says of a training: the arguments of :func:`.from_optimizer`.

    ``bare`` leaves a prior that the optimizer does not know out of S, for files to merge with.
    """

    n_data: int | None = None
    prior_precision: Given | None = None
    initial: Mapping[str, Tensor] | None = None
    scaling: str = "sqrt"
    batch_size: int | None = None
    tokens: int | None = None
    bare: bool = False


@dataclass(frozen=True)
class Scale:
    """How an estimate of the optimizer (h or v̂) becomes S.

    Attributes:
        n_data: N.
        prior: δ by parameter name; None where it is unknown.
        data_part: a function of an estimate and its parameter's group that returns S − δ.
        definition: the formula of S, as text.
        record: the choices that were made, JSON-able.
    """

    n_data: int
    prior: dict[str, float] | None
    data_part: Callable[[Tensor, State], Tensor]
    definition: str
    record: dict[str, Any]


def scale_of_hess(groups: Mapping[str, State], facts: TrainingFacts) -> Scale:
    """The scale of h, for an optimizer that learns a posterior: S = ess · (h + weight_decay).

    Args:
        groups: the optimizer's group by parameter name.
        facts: what the caller says; it must agree with the groups. ``scaling="ess"`` says that ess
            is not the number of terms of the loss: the posterior is tempered. (``"sqrt"`` is the
            default, which says nothing about these optimizers.)

    Raises:
        OptimizerError: ess is unusable, or the caller contradicts the groups.
    """
    one_of("scaling", facts.scaling, ("sqrt", "ess"))
    if facts.initial is not None:
        raise OptimizerError("this optimizer learned with its prior around 0: leave initial out")
    ess_values = sorted({float(group["ess"]) for group in groups.values()})
    if not all(math.isfinite(ess) and ess > 0 for ess in ess_values):
        raise OptimizerError(f"the optimizer's ess must be positive and finite, not {ess_values}")
    prior = {name: float(g["ess"]) * float(g["weight_decay"]) for name, g in groups.items()}
    _check_prior(prior, facts)
    tokens = _token_count(facts)
    if facts.n_data is None:
        n_data = max(1, round(ess_values[0]))
    else:
        n_data = n_data_of(facts.n_data)
    is_tempered = facts.scaling == "ess"
    if not is_tempered:
        _check_ess(ess_values, n_data, tokens, facts)
    return Scale(
        n_data=n_data,
        prior=prior,
        data_part=lambda hess, group: hess * float(group["ess"]),
        definition="S = ess*(h + weight_decay)",
        record={"scaling": "ess", "ess": ess_values, **tokens},
    )


def _check_prior(prior: Mapping[str, float], facts: TrainingFacts) -> None:
    """Raise :class:`OptimizerError` where the caller's δ is not the optimizer's."""
    if facts.prior_precision is None:
        return
    for name, delta in _by_name(facts, prior).items():
        if not math.isclose(delta, prior[name], rel_tol=AGREEMENT):
            raise OptimizerError(
                f"prior_precision={delta:g} contradicts the optimizer's {prior[name]:g} for "
                f"{name!r}: leave it out"
            )


def _check_ess(
    ess_values: Sequence[float], n_data: int, tokens: Mapping[str, int], facts: TrainingFacts
) -> None:
    """Raise :class:`OptimizerError` where ``ess`` is not the number of terms of the loss."""
    n_terms = tokens.get("tokens", n_data)
    if facts.n_data is None and (tokens or len(ess_values) > 1):
        raise OptimizerError(
            f"n_data is missing: the optimizer's ess={ess_values} is no number of examples; pass "
            "it beside tokens=, or with scaling='ess'"
        )
    if not all(math.isclose(ess, n_terms, rel_tol=AGREEMENT) for ess in ess_values):
        raise OptimizerError(
            f"{n_terms} is inconsistent with the optimizer's ess={ess_values}: leave n_data out, "
            f"pass tokens={ess_values[0]:.0f}, or scaling='ess' (tempered)"
        )


def scale_of_second_moments(groups: Mapping[str, State], facts: TrainingFacts) -> Scale:
    """The scale of v̂: the caller says N and the formula, and may say δ.

    Otherwise δ is that of the training's L2 penalty: N · ``weight_decay``, for a mean loss.
    """
    takes_root = one_of("scaling", facts.scaling, ("sqrt", "squared")) == "sqrt"
    if takes_root and facts.batch_size is not None:
        raise InputError("batch_size is used with scaling='squared' only: leave it out")
    if facts.n_data is None:
        raise OptimizerError("n_data is missing: pass n_data=len(dataset)")
    n_data = n_data_of(facts.n_data)
    tokens = _token_count(facts)
    n_terms = float(tokens.get("tokens", n_data))  # the loss is a mean over so many terms
    batch_size = 0 if takes_root else positive_int("batch_size", facts.batch_size)

    def root(v: Tensor, group: State) -> Tensor:
        return n_terms * v.sqrt()

    def squared(v: Tensor, group: State) -> Tensor:
        return n_terms * batch_size * v

    return Scale(
        n_data=n_data,
        prior=_prior_of_groups(groups, n_terms, facts),
        data_part=root if takes_root else squared,
        definition="S = N*sqrt(v_hat) + delta" if takes_root else "S = N*B*v_hat + delta",
        record={
            "scaling": facts.scaling,
            "batch_size": facts.batch_size,
            "bias_corrected": True,
            **tokens,
        },
    )


def _prior_of_groups(
    groups: Mapping[str, State], n_terms: float, facts: TrainingFacts
) -> dict[str, float] | None:
    """δ by name: the caller's, or the L2 penalty of the training; None without either.

    A penalty counts only where every parameter has one.
    """
    if facts.prior_precision is not None:
        return _by_name(facts, groups)
    decays = {name: float(g.get("weight_decay", 0.0)) for name, g in groups.items()}
    all_decay = all(decay != 0 for decay in decays.values())
    are_penalties = all(is_penalty(group) for group in groups.values())
    if not (all_decay and are_penalties):
        return None
    return {name: n_terms * decay for name, decay in decays.items()}


def _token_count(facts: TrainingFacts) -> dict[str, int]:
    """T as an entry of the record, where the caller gave it; else nothing."""
    if facts.tokens is None:
        return {}
    return {"tokens": positive_int("tokens", facts.tokens)}


def is_penalty(group: State) -> bool:
    """Whether an optimizer's weight decay is an L2 penalty of the loss.

    That of AdamW is not. Where a saved state does not say which of the two it is, the answer is no.
    """
    if "algorithm" in group:
        return group["algorithm"] != "AdamW"
    return not group.get("decoupled_weight_decay", "betas" in group)


def _by_name(facts: TrainingFacts, names: Mapping[str, Any]) -> dict[str, float]:
    """The caller's δ for each of these names."""
    return Prior.read(facts.prior_precision, dict.fromkeys(names, ())).numbers(names)
