"""How far a posterior is from the two conditions of the rule: the numbers, and their verdicts."""

from __future__ import annotations

import math
from dataclasses import dataclass

DRIFT = 0.1  # of a change's pull: further training that gains more hides the change
LARGEST_MISMATCH = 0.1  # of a precision that counts as the expected Hessian


@dataclass(frozen=True)
class PrecisionMatch:
    """How far S is from the expected Hessian (Khan & Rue, Eq. 26), estimated with a few probes.

    Attributes:
        mismatch: the relative difference of the data's part of S, in the posterior's own norm; 0
            where S is the expected Hessian. See :mod:`blr_analysis.posterior.optimality`.
        ratio: tr(S⁻¹ E[H]) / tr(S⁻¹ S), both without the prior; above 1 where S is too small.
        probes: the number of random vectors.
        draws: the number of draws of the weights; 0: the Hessian at the mean.
    """

    mismatch: float
    ratio: float
    probes: int
    draws: int = 0

    @property
    def holds(self) -> bool:
        """Whether S is the expected Hessian, up to a tenth."""
        return self.mismatch <= LARGEST_MISMATCH

    @property
    def verdict(self) -> str:
        """Whether S matches, in one line."""
        if self.holds:
            return "precision = E[Hessian]"
        return f"precision off E[Hessian] by {self.mismatch:.0%}"


@dataclass(frozen=True)
class Stationarity:
    """How far a model is from the minimum of its own objective.

    Attributes:
        residual: ‖g‖ / (‖Σ_i ∇ℓ_i‖ + ‖δ (m − θ₀)‖), 0 at a minimum.
        decrement: ½ gᵀ Σ g in nats, see :mod:`blr_analysis.posterior.stationarity`.
        pull: that of one example on average, in nats, see there.
        n_data: N.
        likelihood: the loss of the objective.
        objective: F(m) in nats, the most that a step can gain, as a sample of the examples tells;
            None where the loss has no least value of 0, or was not measured.
    """

    residual: float
    decrement: float
    pull: float
    n_data: int
    likelihood: str = ""
    objective: float | None = None

    @property
    def gain_is_possible(self) -> bool:
        """Whether a step can gain the decrement: no step gains more than the whole objective."""
        return self.objective is None or self.decrement <= self.objective

    @property
    def least_group(self) -> float:
        """The size of the smallest group whose removal can be told from further training."""
        if self.decrement == 0:
            return 1
        if self.pull <= 0:
            return math.inf
        size = self.decrement / (DRIFT * self.pull)
        if not math.isfinite(size):
            return size
        return max(1, math.ceil(size))

    @property
    def at_minimum(self) -> bool:
        """Whether the removal of a single example can be told from further training."""
        return self.least_group <= 1

    @property
    def near(self) -> bool:
        """Whether the removal of half of the data can be told from further training."""
        return self.at_minimum or self.least_group <= self.n_data / 2

    @property
    def verdict(self) -> str:
        """Whether single examples and groups are as predicted, in one line."""
        gain = "it falls too steeply to say what a step would gain"
        if self.gain_is_possible:
            gain = f"a step would gain {self.decrement:.2g} nats"
        if self.at_minimum:
            return f"at the minimum of this loss ({gain})"
        single = "single examples: ranking only"
        if self.near:
            groups = f"groups from {self.least_group:,.0f} examples: as predicted"
            return f"near the minimum of this loss ({gain}): {single}; {groups}"
        return f"not at the minimum of this loss ({gain}): {single}; groups: ranking only"

    def __repr__(self) -> str:
        return f"Stationarity({self.verdict})"
