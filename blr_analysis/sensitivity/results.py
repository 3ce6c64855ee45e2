"""What results have in common, whatever they are about: one row per example, losses in nats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from blr_analysis.likelihoods import Likelihood
from blr_analysis.views import Plottable, Tabular


@dataclass(frozen=True, kw_only=True)
class Noted:
    """A result whose ``note`` says in a line why not to trust it; "" where nothing speaks against
    it. The line stands in its repr."""

    note: str = ""

    @property
    def _noted(self) -> str:
        return f"; {self.note}" if self.note else ""


@dataclass(frozen=True, kw_only=True)
class PerExample(Noted, Tabular):
    """One row per example (or sequence), in the order of the dataset; tensors on the CPU."""

    losses: Tensor
    metadata: Mapping[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.losses)


@dataclass(frozen=True, kw_only=True)
class NetworkScores(PerExample, Plottable):
    """How much each example shapes a network, whatever its outputs: ``self_influence``."""

    self_influence: Tensor
    likelihood: Likelihood


@dataclass(frozen=True, kw_only=True)
class LeftOut(PerExample):
    """Each example's loss without it, ``losses``, and with it, ``losses_before``."""

    losses_before: Tensor

    @property
    def _counted(self) -> Tensor:
        return self.losses

    @property
    def nll(self) -> float:
        """The mean loss of the examples that count: the estimate of the loss on new data."""
        return float(self._counted.double().mean())
