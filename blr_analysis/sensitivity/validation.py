"""What :func:`blr_analysis.validate` gives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from blr_analysis.checks import one_of
from blr_analysis.sensitivity.agreement import Agreement, agreement_of, ceiling_of
from blr_analysis.sensitivity.results import Noted
from blr_analysis.sensitivity.score_files import score_matrix
from blr_analysis.views import Plottable, Tabular

CEILING = "ceiling"  # its name in the table


@dataclass(frozen=True, kw_only=True)
class Validation(Noted, Tabular, Plottable):
    """Methods beside retraining on random halves.

    Attributes:
        agreements: the linear datamodeling score of each method, the best first.
        seeds_agree: the rank correlation of two seeds of retraining; None for a single seed.
        halves: which examples each half has, bool ``[K, N]``.
        losses: those of the test examples after each retraining, in nats, ``[K, S, M]``.
        epochs: those of a retraining; 0 for a ``train=``.
        table: one row for each method, and one for the ceiling.
    """

    agreements: tuple[Agreement, ...]
    seeds_agree: Agreement | None
    halves: Tensor
    losses: Tensor
    epochs: float

    @property
    def seeds(self) -> int:
        """Trainings of each half."""
        return self.losses.shape[1]

    @property
    def ceiling(self) -> float:
        """The score of a method that predicts all but the noise of the seeds; NaN for one seed."""
        if self.seeds_agree is None:
            return math.nan
        return ceiling_of(self.seeds_agree.value, self.seeds)

    @property
    def ceiling_range(self) -> tuple[float, float]:
        """A range that should hold the ceiling in four of five cases."""
        if self.seeds_agree is None:
            return math.nan, math.nan
        low = ceiling_of(self.seeds_agree.low, self.seeds)
        high = ceiling_of(self.seeds_agree.high, self.seeds)
        return low, high

    def score(self, name: str) -> Agreement:
        """The agreement of a method: ``.value``, ``.low``, ``.high``, ``.by_test``.

        Raises:
            InputError: no such method.
        """
        methods = {method.name: method for method in self.agreements}
        return methods[one_of("name", name, tuple(methods))]

    def against(self, name: str, matrix: Any) -> Agreement:
        """The agreement of another method with the same retrainings.

        Args:
            name: of the method.
            matrix: ``[N_train, N_test]``, or the file of one, as :func:`blr_analysis.validate`
                takes them.

        Raises:
            InputError: another shape, or entries that are not finite.
            StorageError: a file that cannot be read.
        """
        shape = (self.halves.shape[1], self.losses.shape[2])
        checked = score_matrix(name, matrix, shape)
        return agreement_of(name, checked, self.halves, self.losses)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each method, then that of the ceiling."""
        rows = [self._row(m.name, m.value, (m.low, m.high)) for m in self.agreements]
        return [*rows, self._row(CEILING, self.ceiling, self.ceiling_range)]

    def _row(self, name: str, value: float, ends: tuple[float, float]) -> dict[str, Any]:
        low, high = ends
        of_ceiling = value / self.ceiling if self.ceiling > 0 else math.nan
        return {"method": name, "score": value, "low": low, "high": high, "of_ceiling": of_ceiling}

    def __repr__(self) -> str:
        facts = [
            f"{method.name} {method.value:.3f} ({method.low:.2f} to {method.high:.2f})"
            for method in self.agreements
        ]
        if self.seeds_agree is not None:
            facts.append(f"ceiling {self.ceiling:.3f}")
        trainings = f"{len(self.halves)} halves × {self.seeds} seeds"
        return (
            f"Validation({', '.join(facts)}; {trainings}; see .table, .plot(){self._note_in_repr})"
        )
