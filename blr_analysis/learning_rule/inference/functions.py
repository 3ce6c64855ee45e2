"""The rule on a function: a Gaussian, or a mixture of them, over the arguments of a loss.

    m ← m − ρ S⁻¹ E_q[∇ℓ],      S ← (1 − ρ) S + ρ E_q[∇²ℓ]          (Khan & Rue, Eq. 12)

minimises E_q[ℓ] − T·H(q) for the loss ℓ/T. Where ℓ curves downwards S could leave the positive
matrices; the step ρ G, G = E_q[∇²ℓ] − S, is then taken on their manifold (Lin et al., ICML 2020):

    S ← S + ρ G + ½ ρ² G S⁻¹ G
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad_and_value, hessian, vmap

from blr_analysis.checks import instance, one_of, positive_int, positive_number, tolerance
from blr_analysis.errors import BLRError, InputError
from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.inference.fitted import Fitted, until_flat
from blr_analysis.learning_rule.inference.scalar_likelihoods import MOST_NODES
from blr_analysis.learning_rule.rule import check_rho
from blr_analysis.progress import track

Loss = Callable[[Tensor], Tensor]
LOOKS = ("quadrature", "samples", "mean")


@dataclass(frozen=True)
class VariationalNewton:
    """Variational online Newton on a loss of few variables.

    With ``look="mean"`` (the delta method) and ρ = 1 it is Newton's method; with an expectation
    it prefers minima that stay low all around (K&R, Fig. 1).

    Args:
        look: "quadrature" (Gauss–Hermite, one variable only), "samples" or "mean".
        samples: draws per step, taken in pairs m ± ε; or the nodes of the quadrature.
        rho: ρ in (0, 1].
        temperature: T; smaller ones give narrower posteriors.
        max_iter, tol: stop after so many steps, or when the objective moves less than that; with
            samples it never stands still, and all steps are made.

    Raises:
        InputError: settings out of range.

    Example:
        >>> start = FullGaussian(torch.zeros(1), torch.eye(1))
        >>> rule = VariationalNewton(look="mean", rho=1.0)
        >>> rule.fit(lambda t: 2 * (t[0] - 3) ** 2, start, progress=False).q
        FullGaussian(mean=tensor([3.]), precision=tensor([[4.]]))
    """

    look: str = "quadrature"
    samples: int = 20
    rho: float = 0.1
    temperature: float = 1.0
    max_iter: int = 1000
    tol: float = 1e-10

    def __post_init__(self) -> None:
        one_of("look", self.look, LOOKS)
        positive_int("samples", self.samples)
        positive_int("max_iter", self.max_iter)
        check_rho(self.rho)
        positive_number("temperature", self.temperature)
        tolerance("tol", self.tol)
        if self.look == "quadrature" and self.samples > MOST_NODES:
            raise InputError(f"quadrature takes at most {MOST_NODES} nodes, got {self.samples}")

    def fit(
        self,
        loss: Loss,
        start: FullGaussian,
        *,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Fitted[FullGaussian]:
        """Run the rule from ``start``; ``history`` is E_q[ℓ]/T − H(q) before each step, in nats.

        Args:
            loss: ℓ, from a vector ``[P]`` to a number, by torch operations.
            start: q before the first step.
            generator: of the draws, for "samples".
            progress: a progress bar.

        Raises:
            InputError: a loss that is no number, or not finite where it is looked at; a start
                with copies, or of several variables for a quadrature.
        """
        instance("start", start, FullGaussian, "a FullGaussian")
        if start.mean.ndim != 1:
            raise InputError(
                f"start must be one Gaussian, got copies {list(start.mean.shape[:-1])}"
            )
        if self.look == "quadrature" and start.mean.shape[-1] != 1:
            raise InputError(
                "quadrature is for one variable; take look='samples' for "
                f"{start.mean.shape[-1]} of them"
            )
        q = start

        def steps() -> Iterator[float]:
            nonlocal q
            for _ in track(range(self.max_iter), label="variational Newton", show=progress):
                offsets, shares = self._places(q, generator)
                values, gradients, hessians = derivatives(loss, q.mean + offsets)
                mean = (shares[:, None] * gradients).sum(0) / self.temperature
                curved = (shares[:, None, None] * hessians).sum(0) / self.temperature
                objective = (shares * values).sum() / self.temperature - q.entropy()
                q = newton_step(q, mean, curved - q.precision, self.rho)
                yield float(objective)

        if self.look == "samples":  # whose objective never stands still
            history, converged = list(steps()), True
        else:
            history, converged = until_flat(steps(), tol=self.tol)
        return Fitted(q, history, "E_q[loss]/T − entropy", converged=converged)

    def _places(self, q: FullGaussian, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Offsets from the mean ``[S, P]``, and what each counts."""
        if self.look == "mean":
            return torch.zeros_like(q.mean).unsqueeze(0), q.mean.new_ones(1)
        if self.look == "quadrature":
            from numpy.polynomial.hermite_e import hermegauss

            nodes, shares = (torch.as_tensor(x).to(q.mean) for x in hermegauss(self.samples))
            return nodes.unsqueeze(-1) / q.precision[0].sqrt(), shares / shares.sum()
        half = q.sample(-(-self.samples // 2), generator=generator) - q.mean
        both = torch.cat([half, -half])
        return both, both.new_full((len(both),), 1 / len(both))


def derivatives(loss: Loss, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ℓ, ∇ℓ and ∇²ℓ at points ``[S, P]``: ``[S]``, ``[S, P]``, ``[S, P, P]``.

    Raises:
        InputError: ℓ is no number, not finite there, or taken out of torch.

    Example:
        >>> derivatives(lambda t: t[0] ** 3, torch.tensor([[1.0], [2.0]]))
        (tensor([1., 8.]), tensor([[ 3.],
                [12.]]), tensor([[[ 6.]],
        <BLANKLINE>
                [[12.]]]))
    """
    try:
        gradients, values = vmap(grad_and_value(loss))(points)
        hessians = vmap(hessian(loss))(points)
    except BLRError:
        raise
    except Exception as error:
        raise InputError(
            "loss must take a vector and return one number, by torch operations that torch.func "
            f"can differentiate: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
    every = torch.cat([values.unsqueeze(1), gradients, hessians.flatten(1)], 1)
    finite = every.isfinite().all(1)
    if not bool(finite.all()):
        place = points[int((~finite).nonzero()[0])].tolist()
        raise InputError(
            f"the loss or its derivatives are not finite at {place}, which was looked at: begin "
            "elsewhere, with a larger precision, or take a smaller rho"
        )
    if not bool(gradients.any()) and bool((values != values[0]).any()):
        raise InputError(
            "the loss differs from point to point, but its derivatives are all 0: it is taken out "
            "of torch (detach), or a step function"
        )
    return values, gradients, hessians


def newton_step(q: FullGaussian, gradient: Tensor, change: Tensor, rho: float) -> FullGaussian:
    """S ← S + ρ G + ½ ρ² G S⁻¹ G, m ← m − ρ S⁻¹ g; leading dimensions are copies.

    The last term is left out at ρ = 1, where the rule forgets S, unless S would not be positive.
    """
    precision = q.precision + rho * change
    if rho < 1 or bool((torch.linalg.cholesky_ex(precision)[1] != 0).any()):
        precision = precision + 0.5 * rho**2 * change @ torch.linalg.solve(q.precision, change)
    precision = 0.5 * (precision + precision.mT)
    step = torch.linalg.solve(precision, gradient.unsqueeze(-1)).squeeze(-1)
    return FullGaussian(q.mean - rho * step, precision)
