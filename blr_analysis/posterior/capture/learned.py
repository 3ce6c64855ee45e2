r"""What the optimizers that learn a posterior know of the curvature, without their start.

IVON, VOGN, OGN, Vadam, Vprop and bSAM keep a running mean h of estimates ĥ, which starts at h₀ =
``hess_init``. After t steps β₂ᵗ of that start is left, and it leaves the mean as the start at zero
leaves Adam's moments:

    (h − β₂ᵗ h₀) / (1 − β₂ᵗ)                                                                    (1)

It may fall below 0, where the estimates do: there S is the prior's precision alone (without a
prior, that of the start that is left). IVON's retraction adds (1 − β₂)² (ĥ − h)² / (2 (h + δ)) to
h in every step. So of a start that is far above ĥ more than β₂ᵗ is left, and (1) is too large by

    b = h₀ · ((1 − ρ + ½ρ² h₀/(h₀ + δ))ᵗ − (1 − ρ)ᵗ) / (1 − β₂ᵗ),      ρ = 1 − β₂               (2)

**How noisy (1) is.** IVON's estimate of one step is ĥ = S·ε·ḡ, S = ess·(h + δ), with ε ~ N(0, 1/S)
and ḡ the gradient of a minibatch's mean loss at m + ε: ḡ = ḡ₀ + Hε, of which ḡ₀ does not depend on
this ε. So E[ĥ] = H and Var[ĥ] = S·E[ḡ₀²] + 2H² = S·E[ḡ²] + H², and the mean with weights
(1 − β₂) β₂ᵏ / (1 − β₂ᵗ) has the standard error

    σ = √( (S·E[ḡ²] + H²) · (1 − β₂)(1 + β₂ᵗ) / ((1 + β₂)(1 − β₂ᵗ)) )                          (3)

per weight, in the units of h. Where S is ess·H, the data's own, E[ḡ²] = H/B and 1 − β₂ = c / steps,
this is H·√(c / (2·epochs)), H² apart; a narrower q, with S above ess·H, is noisier by
√(S / (ess·H)).
Several draws in a step divide E[ḡ²] where their minibatches differ; where it is one minibatch, (3)
is too large by the root of their number.

**The mean of squared gradients** v = mean of ḡ², with the same weights, is kept beside h. Its
relative error is √(2 · (1 − β₂)(1 + β₂ᵗ) / ((1 + β₂)(1 − β₂ᵗ))), whatever the width of q. For
minibatches of B examples E[B·ḡ²] = F + (B − 1)·E[g]², F the mean squared gradient of an example
(the Fisher diagonal of the labels as they are), and the last term is small near stationarity. So
where fewer than half of the weights have an (1) above b + 2σ, the precision is

    S = ess·(B·v + δ),      B the batch size; where nobody gave it, Σ((1) − b) / Σv              (4)

over all weights, less the retraction's ½ρ·ess·v of every estimate's own noise: single entries of h
are noise there, but not their sum. Where the sum is no more than twice its own standard error, it
is noise too: twice that error takes its place, an upper bound, and a warning asks for B.

**Draws.** Training draws weights by the h that has its start. Where the data say nothing, S is the
prior's alone, far wider than any network was trained to bear. So β₂ᵗ and S₀ = ess·(h₀ + δ) are kept
as the posterior's ``start``; predictions and analyses of a task take (1 − β₂ᵗ) S + β₂ᵗ S₀.

Sources: Shen et al., ICML 2024 (IVON); Kingma & Ba, ICLR 2015 (the start); Khan & Rue, Eqs. 11
and 45 (Price's theorem, the squares).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from blr_analysis.checks import positive_int
from blr_analysis.half import working
from blr_analysis.posterior.capture.readers import (
    Slot,
    has_weight_of_start,
    steps,
    weight_of_start,
)
from blr_analysis.posterior.facts import Numbers

NOISY = 2.0
"""Standard errors: an entry of h that is less above 0 is taken for noise."""
MOST_BELOW_ZERO = 0.1
"""Where no standard error is known: the largest share of entries below 0 of an h that is no noise.
(Entries that are two standard errors above 0 fall below it once in 44 times.)"""
LARGE_SHARE = 0.2
"""The share of h that its start may have without a word."""
HESS = "S = ess*((h - beta2^t*hess_init)/(1 - beta2^t) + weight_decay)"
HESS_WITH_START = "S = ess*(h + weight_decay)"
SQUARES = "S = ess*(B*mean of squared gradients + weight_decay)"


@dataclass(frozen=True)
class Curvature:
    """The diagonal Hessian of the mean loss, by parameter name, and how it was found.

    Attributes:
        hessian: never below 0, float32 or wider.
        definition: of S, as text.
        clear: the share of the entries of h that are above two standard errors; None where the
            standard error is not known.
        batch_size: the factor B of the squares; None of h itself.
        below_zero: the share of the entries of h that were below 0 without their start.
        is_noise: whether this is an h that is mostly noise, or squares of which the scale is.
        start: β₂ᵗ and ess·(h₀ + δ) by name; None where they are not known, or δ differs by weight.
    """

    hessian: Mapping[str, Tensor]
    definition: str
    clear: float | None = None
    batch_size: float | None = None
    below_zero: float = 0.0
    is_noise: bool = False
    start: Numbers | None = None

    def record(self, initial_share: float | None) -> dict[str, Any]:
        """What a posterior's record says of it."""
        return {
            "definition": self.definition,
            "initial_share": initial_share,
            "clear": self.clear,
            "squares_times": self.batch_size,
            "below_zero": self.below_zero,
            "caveat": self.caveat(initial_share),
            "start": self.start,
            "is_doubtful": self.is_noise or self.definition == HESS_WITH_START,
        }

    def caveat(self, initial_share: float | None) -> str:
        """What to know and to do about it, in one line; "" if nothing."""
        if self.definition == HESS_WITH_START:
            return (
                "hess still contains its start, because its steps were not counted: capture "
                "from the live optimizer"
            )
        if self.is_noise and self.batch_size is not None:
            return (
                "hess is only noise: the precision comes from squared gradients, and its scale "
                "is a guess; pass batch_size="
            )
        if self.is_noise:
            return (
                "hess is mostly noise, or its start: train with squares=True and batch_size=, with "
                "more epochs, or with more draws"
            )
        is_mostly_start = initial_share is not None and initial_share >= LARGE_SHARE
        if not is_mostly_start:
            return ""
        share = f"{initial_share:.0%} of hess is its start"
        if self.batch_size is not None:
            return f"{share} and the rest is too noisy: the precision comes from squared gradients"
        return (
            f"{share}, which was subtracted; pass steps= and train for more epochs to leave "
            "less of it"
        )


def curvature_of(
    slots: Sequence[Slot],
    hessian: Mapping[str, Tensor],
    *,
    is_ivon: bool,
    batch_size: int | None = None,
) -> Curvature:
    """What the optimizer learned: (1), or (4) where (1) is too noisy.

    Args:
        slots: the parameters that have learned.
        hessian: (1) by name.
        is_ivon: whether h was moved by IVON's retraction, by noise times gradient if not said
            otherwise.
        batch_size: B as the caller gave it; None: the group's own, or by the sum.
    """
    counted = all(has_weight_of_start(slot.state, slot.group) for slot in slots)
    if not counted:
        return Curvature(dict(hessian), HESS_WITH_START)
    below_zero = _share(hessian[slot.name] < 0 for slot in slots)
    start = None
    if not any("prior_precision" in slot.state for slot in slots):
        start = {slot.name: _start_of(slot) for slot in slots}
    has_squares = is_ivon and all("squares" in slot.state for slot in slots)
    clear = _clear_share(slots, hessian) if has_squares else None
    if clear is not None:
        is_noise = clear < 0.5
    else:
        is_noise = is_ivon and _looks_like_noise(slots, hessian, below_zero)
    if not (is_noise and has_squares):
        at_least_zero = {slot.name: _floored(hessian[slot.name], slot) for slot in slots}
        return Curvature(
            at_least_zero, HESS, clear, below_zero=below_zero, is_noise=is_noise, start=start
        )
    factor = _factor_of_squares(slots, hessian, batch_size)
    squares = {slot.name: factor.value * squares_of(slot) for slot in slots}
    return Curvature(
        squares, SQUARES, clear, factor.value, below_zero, is_noise=factor.is_guess, start=start
    )


def _looks_like_noise(
    slots: Sequence[Slot], hessian: Mapping[str, Tensor], below_zero: float
) -> bool:
    """Where no squares tell the standard error: many entries below 0, or a sum that is mostly what
    the retraction left of the start."""
    is_by_price = all(slot.group.get("hess_approx", "price") == "price" for slot in slots)
    of_start = sum(excess_of_start(slot) * hessian[slot.name].numel() for slot in slots)
    total = sum(float(hessian[slot.name].double().sum()) for slot in slots)
    return (is_by_price and below_zero > MOST_BELOW_ZERO) or of_start > 0.5 * total


def decay_of(slot: Slot) -> float | Tensor:
    """δ/ess: ``weight_decay``, or where the prior is an earlier posterior one for each weight."""
    precision = slot.state.get("prior_precision")
    if precision is None:
        return float(slot.group["weight_decay"])
    return precision.detach().to(slot.value.device) / float(slot.group["ess"])


def _start_of(slot: Slot) -> list[float]:
    """β₂ᵗ and S₀ = ess · (h₀ + δ)."""
    group = slot.group
    precision = float(group["ess"]) * (float(group["hess_init"]) + float(group["weight_decay"]))
    return [weight_of_start(slot.state, group), precision]


def squares_of(slot: Slot) -> Tensor:
    """v, the mean of ḡ² without the bias of its start at 0, in float32 at least."""
    squares = slot.state["squares"]
    wide = squares.detach().to(slot.value.device, working(squares.dtype))
    return wide / (1 - weight_of_start(slot.state, slot.group))


def variance_of(slot: Slot, hessian: Tensor, squares: Tensor) -> Tensor:
    """σ² of (3), by entry."""
    beta2 = float(slot.group["beta2"])
    weight = weight_of_start(slot.state, slot.group)
    sum_of_squared_weights = (1 - beta2) * (1 + weight) / ((1 + beta2) * (1 - weight))
    hess = slot.state["hess"].detach().to(squares)
    precision = float(slot.group["ess"]) * (hess + decay_of(slot))
    return sum_of_squared_weights * (precision * squares + hessian.square())


def excess_of_start(slot: Slot) -> float:
    """b of (2): what the retraction leaves of the start beside β₂ᵗ of it."""
    weight = weight_of_start(slot.state, slot.group)
    rho = 1 - float(slot.group["beta2"])
    start = float(slot.group["hess_init"])
    decay = float(slot.group.get("prior_decay", slot.group["weight_decay"]))
    share_of_hess = start / (start + decay)
    kept_a_step = 1 - rho + 0.5 * rho**2 * share_of_hess
    kept = kept_a_step ** steps(slot.state, slot.group)
    return start * (kept - weight) / (1 - weight)


def _sum_of_hess(slot: Slot, hessian: Tensor, squares: Tensor) -> float:
    """Σ of h over the entries of a parameter, without what the retraction added."""
    rho = 1 - float(slot.group["beta2"])
    of_noise = 0.5 * rho * float(slot.group["ess"]) * float(squares.double().sum())
    of_start = excess_of_start(slot) * hessian.numel()
    return float(hessian.double().sum()) - of_start - of_noise


def _clear_share(slots: Sequence[Slot], hessian: Mapping[str, Tensor]) -> float:
    """Of the entries that ever had a gradient, how many are above b and two standard errors."""
    n_clear = 0
    n_with_gradient = 0
    for slot in slots:
        squares = squares_of(slot)
        estimates = hessian[slot.name]
        error = variance_of(slot, estimates, squares).sqrt()
        is_clear = estimates > excess_of_start(slot) + NOISY * error
        had_gradient = squares > 0
        n_clear += int((is_clear & had_gradient).sum())
        n_with_gradient += int(had_gradient.sum())
    return n_clear / n_with_gradient if n_with_gradient else 1.0


@dataclass(frozen=True)
class Factor:
    """What the squares are multiplied by.

    Attributes:
        value: B.
        is_guess: whether it is an upper bound, as the sum of h is noise.
    """

    value: float
    is_guess: bool = False


def _factor_of_squares(
    slots: Sequence[Slot], hessian: Mapping[str, Tensor], batch_size: int | None
) -> Factor:
    """B; where nobody gave it, the one by which the sums of h and of the squares agree."""
    if batch_size is not None:
        return Factor(float(positive_int("batch_size", batch_size)))
    own_sizes = [slot.group.get("batch_size") for slot in slots]
    own_size = own_sizes[0]
    if own_size is not None and len(set(own_sizes)) == 1:
        return Factor(float(own_size))
    squares = {slot.name: squares_of(slot) for slot in slots}
    sums = [_sum_of_hess(slot, hessian[slot.name], squares[slot.name]) for slot in slots]
    variance = 0.0
    for slot in slots:
        by_entry = variance_of(slot, hessian[slot.name], squares[slot.name])
        variance += float(by_entry.double().sum())
    bound = NOISY * math.sqrt(variance)
    total = sum(sums)
    sum_of_squares = sum(float(v.double().sum()) for v in squares.values())
    return Factor(max(total, bound) / sum_of_squares, is_guess=total <= bound)


def _floored(hessian: Tensor, slot: Slot) -> Tensor:
    """At least 0; where there is no prior, at least what is left of the start, so that S is
    positive."""
    has_prior = "prior_precision" in slot.state or float(slot.group["weight_decay"]) > 0
    if has_prior:
        return hessian.clamp(min=0.0)
    weight = weight_of_start(slot.state, slot.group)
    return hessian.clamp(min=weight * float(slot.group["hess_init"]))


def _share(masks: Any) -> float:
    """Of the entries that are true."""
    n_true = 0
    n_entries = 0
    for mask in masks:
        n_true += int(mask.sum())
        n_entries += mask.numel()
    return n_true / n_entries
