"""From a gradient in λ to one in μ: the natural gradient, F(λ)⁻¹ ∇_λ = ∇_μ, for any family.

F(λ) = ∇²A(λ) = ∂μ/∂λ is the Fisher information (Khan & Rue, section 2). It is computed by
differentiating a family's expectation parameters. The system is solved by least squares: a
symmetric matrix among the λ has every off-diagonal entry twice, which leaves F singular.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural


def natural_gradient(q: ExponentialFamily, gradient: Mapping[str, Tensor]) -> Natural:
    """∇_μ f = F(λ)⁻¹ ∇_λ f at a member without copies.

    Args:
        q: the member. For several copies the Fisher information is block-diagonal; they are solved
            as one system.
        gradient: ∇_λ f, statistic by statistic.

    Returns:
        ∇_μ f, as :func:`~blr_analysis.learning_rule.rule.blr_step` takes it.

    Example:
        >>> from blr_analysis.learning_rule.families import Gamma
        >>> q = Gamma(torch.tensor(3.0).double(), torch.tensor(2.0).double())
        >>> natural_gradient(q, {"log": torch.tensor(0.0), "linear": torch.tensor(1.0)})
        {'log': tensor(-10.8224, dtype=...), 'linear': tensor(8.5483, dtype=...)}
    """
    names = list(q.natural)
    fisher = fisher_information(q)
    column = _flat(gradient, names).to(fisher).unsqueeze(1)
    solution = torch.linalg.lstsq(fisher, column, driver="gelsd").solution.squeeze(1)
    return _unflat(solution, q.natural)


def fisher_information(q: ExponentialFamily) -> Tensor:
    """F(λ) = ∂μ/∂λ, with all entries of λ along one dimension.

    >>> from blr_analysis.learning_rule.families import Beta
    >>> fisher_information(Beta(torch.tensor(1.0), torch.tensor(1.0)))
    tensor([[ 1.0000, -0.6449],
            [-0.6449,  1.0000]])
    """
    natural = q.natural
    names = list(natural)

    def expectation(entries: Tensor) -> Tensor:
        member = q.with_natural(_unflat(entries, natural))
        return _flat(member.expectation, names)

    with torch.enable_grad():
        start = _flat(natural, names).detach()
        fisher: Any = torch.autograd.functional.jacobian(expectation, start)
    return fisher


def _flat(statistics: Mapping[str, Tensor], names: list[str]) -> Tensor:
    """All entries in one vector, in the order of the names."""
    return torch.cat([statistics[name].reshape(-1) for name in names])


def _unflat(entries: Tensor, like: Natural) -> Natural:
    """The inverse of :func:`_flat`, in the shapes of ``like``."""
    pieces = entries.split([value.numel() for value in like.values()])
    pairs = zip(like.items(), pieces, strict=True)
    return {name: piece.view_as(value) for (name, value), piece in pairs}
