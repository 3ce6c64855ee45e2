"""One precision per weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.posterior.fit import Fit
from blr_analysis.posterior.prior import Given, Prior
from blr_analysis.posterior.structures.contract import Spectral, Tree, tree_of


@dataclass(frozen=True)
class Diagonal(Spectral):
    """One precision per weight."""

    values: dict[str, Tensor]
    kind = "diag"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:  # type: ignore[override]
        return {n: tuple(s.shape) for n, s in self.values.items()}

    @classmethod
    def fitted(cls, fit: Fit) -> tuple[Diagonal, dict[str, Any]]:
        nothing = {n: p.new_zeros(()).expand_as(p) for n, p in fit.params.items()}
        return cls(nothing).summed(fit), {}

    @classmethod
    def of_rows(cls, params: Tree, rows: Iterator[tuple[slice, Tensor]]) -> Diagonal:
        flat = torch.cat([block[:, at].diagonal() for at, block in rows])
        return cls(tree_of(flat, {n: p.shape for n, p in params.items()}))

    @classmethod
    def read(
        cls, tensors: Mapping[str, Tensor], record: Mapping[str, Any], names: Sequence[str]
    ) -> Diagonal:
        return cls({n: tensors[n] for n in names})

    def record(self) -> dict[str, Any]:
        return {}

    @property
    def per_weight(self) -> Tree:
        return self.values

    def prior_values(self, prior: Prior | Given) -> dict[str, float]:
        return Prior.of_any(prior).numbers(self.values)

    def diagonal(self, *, inverse: bool = False) -> Tree:
        return {n: 1 / s if inverse else s.clone() for n, s in self.values.items()}

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.values)

    def to(self, device: torch.device, dtype: torch.dtype) -> Diagonal:
        return Diagonal({n: s.to(device, dtype) for n, s in self.values.items()})
