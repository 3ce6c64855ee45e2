"""The rule on a function: a Gaussian, or a mixture of them, over the arguments of a loss.

    m ← m − ρ S⁻¹ E_q[∇ℓ],      S ← (1 − ρ) S + ρ E_q[∇²ℓ]          (Khan & Rue, Eq. 12)

minimises E_q[ℓ] − T·H(q) for the loss ℓ/T. Where ℓ curves downwards S could leave the positive
matrices; the step ρ G, G = E_q[∇²ℓ] − S, is then taken on their manifold (Lin et al., ICML 2020):

    S ← S + ρ G + ½ ρ² G S⁻¹ G
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import vmap

from blr_analysis.checks import instance, one_of, positive_int, positive_number, share, tolerance
from blr_analysis.errors import BLRError, InputError
from blr_analysis.learning_rule.curvature import ESTIMATES, exact
from blr_analysis.learning_rule.expectations import LOOKS, check_nodes, places
from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.inference.fitted import Fitted, until_flat
from blr_analysis.progress import track

Loss = Callable[[Tensor], Tensor]
Second = Callable[[Loss, Tensor], tuple[Tensor, Tensor]]
"""(ℓ, places ``[S, P]``) → gradients ``[S, P]`` and Hessians ``[S, P, P]``, or their diagonals."""


@dataclass(frozen=True)
class VariationalNewton:
    """Variational online Newton on a loss of few variables.

    With ``look="mean"`` (the delta method) and ρ = 1 it is Newton's method; with an expectation
    it prefers minima that stay low all around (K&R, Fig. 1). With ``curvature="gauss_newton"`` it
    is OGN (at the mean) or VOGN (at samples) with a full covariance.

    Args:
        look: "quadrature" (Gauss–Hermite, one variable only), "samples" or "mean".
        samples: draws per step, taken in pairs m ± ε; or the nodes of the quadrature.
        rho: ρ in (0, 1].
        temperature: T; smaller ones give narrower posteriors.
        max_iter, tol: stop after so many steps, or when the objective moves less than that; what
            is random never stands still, and all steps are made.
        curvature: what the Hessian is taken to be (:mod:`~blr_analysis.learning_rule.curvature`):
            "exact", "reparameterised" (gradients only, not at the mean), "hutchinson" (the
            diagonal), and for a loss of every example "gauss_newton", Σ g_i g_iᵀ, or
            "squared_gradient", the diagonal of (Σ g_i)(Σ g_i)ᵀ.

    Raises:
        InputError: settings out of range, or that do not go together.

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
    curvature: str = "exact"

    def __post_init__(self) -> None:
        one_of("look", self.look, LOOKS)
        one_of("curvature", self.curvature, tuple(ESTIMATES))
        positive_int("samples", self.samples)
        positive_int("max_iter", self.max_iter)
        share("rho", self.rho)
        positive_number("temperature", self.temperature)
        tolerance("tol", self.tol)
        if self.look == "quadrature":
            check_nodes(self.samples)
        if self.look == "mean" and self.curvature == "reparameterised":
            raise InputError(
                "curvature='reparameterised' looks around the mean: take look='samples'"
            )

    def fit(
        self,
        loss: Loss,
        start: FullGaussian,
        *,
        prior: FullGaussian | None = None,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Fitted[FullGaussian]:
        """Run the rule from ``start``; ``history`` is E_q[ℓ]/T − H(q) before each step, in nats.

        Args:
            loss: ℓ, from a vector ``[P]`` to a number, or to one number for each example ``[N]``,
                which are summed; by torch operations.
            start: q before the first step.
            prior: p(θ), whose −log p(θ) is added in closed form, so that no estimate of curvature
                takes it for data; ``history`` is then E_q[ℓ]/T + KL(q ‖ prior).
            generator: of the draws, for "samples" and "hutchinson".
            progress: a progress bar.

        Raises:
            InputError: a loss that is no such number, or not finite where it is looked at; a start
                or prior with copies, or of several variables for a quadrature; a curvature that
                needs the loss of every example.
        """
        for name, q in {"start": start, **({} if prior is None else {"prior": prior})}.items():
            instance(name, q, FullGaussian, "a FullGaussian")
            if q.mean.ndim != 1:
                copies = list(q.mean.shape[:-1])
                raise InputError(f"{name} must be one Gaussian, got copies {copies}")
        if self.look == "quadrature":
            check_nodes(self.samples, len(start.mean))
        if self.curvature == "gauss_newton" and not _values(loss, start.mean, examples=True).ndim:
            raise InputError(
                "curvature='gauss_newton' needs a loss that returns one number per example, [N]"
            )
        q = start

        def steps() -> Iterator[float]:
            nonlocal q
            for _ in track(range(self.max_iter), label="variational Newton", show=progress):
                q, objective = self._step(loss, q, prior, generator)
                yield float(objective)

        if self.look == "samples" or self.curvature == "hutchinson":
            history, converged = list(steps()), True
        else:
            history, converged = until_flat(steps(), tol=self.tol)
        wanted = "− entropy" if prior is None else "+ KL(q ‖ prior)"
        return Fitted(q, history, f"E_q[loss]/T {wanted}", converged=converged)

    def _step(
        self,
        loss: Loss,
        q: FullGaussian,
        prior: FullGaussian | None,
        generator: torch.Generator | None,
    ) -> tuple[FullGaussian, Tensor]:
        """The next q, and the objective at this one."""
        points, shares = places(q, self.look, self.samples, generator=generator)
        estimate = ESTIMATES[self.curvature]
        values, gradients, hessians = derivatives(
            loss, points, lambda losses, at: estimate(losses, at, q, generator)
        )
        mean = (shares[:, None] * gradients).sum(0) / self.temperature
        curved = (shares[:, None, None] * hessians).sum(0) / self.temperature
        objective = (shares * values).sum() / self.temperature
        if prior is None:
            objective = objective - q.entropy()
        else:
            objective = objective + q.kl(prior)
            mean = mean + prior.precision @ (q.mean - prior.mean)
            curved = curved + prior.precision
        return newton_step(q, mean, curved - q.precision, self.rho), objective


def derivatives(
    loss: Loss, points: Tensor, second: Second | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """ℓ, ∇ℓ and ∇²ℓ at points ``[S, P]``: ``[S]``, ``[S, P]``, ``[S, P, P]``.

    Args:
        loss: θ ``[P]`` → a number; with ``second``, or one for each example ``[N]``, to be summed.
        points: where.
        second: how gradients and Hessians are found; exactly if None.

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
        values = vmap(lambda t: _values(loss, t, examples=second is not None).sum())(points)
        if second is None:
            gradients, hessians = vmap(partial(exact, loss))(points)
        else:
            gradients, hessians = second(loss, points)
    except BLRError:
        raise
    except Exception as error:
        raise InputError(
            "loss must take a vector and return one number, differentiable by torch.func: "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
    if hessians.ndim == 2:
        hessians = torch.diag_embed(hessians)
    every = torch.cat([values.unsqueeze(1), gradients, hessians.flatten(1)], 1)
    finite = every.isfinite().all(1)
    if not bool(finite.all()):
        place = points[int((~finite).nonzero()[0])].tolist()
        raise InputError(
            f"the loss or its derivatives are not finite at {place}: begin elsewhere, or lower rho"
        )
    if not bool(gradients.any()) and bool((values != values[0]).any()):
        raise InputError("the loss varies, but its derivatives are all 0: is it a step function?")
    return values, gradients, hessians


def _values(loss: Loss, place: Tensor, *, examples: bool) -> Tensor:
    """ℓ at a place: a number, or with ``examples`` one for each of them."""
    value = loss(place)
    if not isinstance(value, Tensor) or value.ndim > examples:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        wanted = "return one number" + ", or one for each example [N]" * examples
        raise InputError(f"loss must take a vector and {wanted}, got {got}")
    return value


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
