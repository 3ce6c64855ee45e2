"""What the tests of inference share: numbers in float64 and the plainest priors."""

from __future__ import annotations

import torch
from sklearn.datasets import load_iris
from torch import Tensor

from blr_analysis.learning_rule.families import Dirichlet, FullGaussian, NormalWishart

F64 = torch.float64
ONE = torch.ones((), dtype=F64)
M = torch.ones(1, 1, dtype=F64)
IRIS = torch.from_numpy(load_iris().data)


def draws(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def normal(size: int, precision: float = 1.0, copies: tuple[int, ...] = ()) -> FullGaussian:
    """N(0, I / precision)."""
    eye = torch.eye(size, dtype=F64).expand(*copies, size, size)
    return FullGaussian(torch.zeros(*copies, size, dtype=F64), precision * eye)


WISHART = NormalWishart(torch.zeros(2, dtype=F64), ONE, 4 * ONE, torch.eye(2, dtype=F64))
WEIGHTS = Dirichlet(torch.ones(2, dtype=F64))
