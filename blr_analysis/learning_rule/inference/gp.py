"""Gaussian processes with any likelihood of one number, f ~ GP(0, k) (K&R, section 5.4).

The process at the examples is written in whitened coordinates,

    f = Φ v,   Φ = U Λ^½,   K = U Λ Uᵀ,   v ~ N(0, I),

so that it is regression on Φ under a standard Gaussian prior, for any kernel, of full rank or not
and with no jitter. The rule's sites stay in the space of functions: one Gaussian message to each
f_i, and q(f) = N(f | 0, K) Π_i exp(a_i f_i − ½ b_i f_i²) up to a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.inference.cvi import Expectation
from blr_analysis.learning_rule.inference.factors import real
from blr_analysis.learning_rule.inference.kernels import (
    Kernel,
    check_pairwise,
    covariances,
    rbf,
)
from blr_analysis.learning_rule.inference.latent_fit import (
    Features,
    LatentFitted,
    checked_pair,
    fit_latent,
)
from blr_analysis.learning_rule.inference.scalar_likelihoods import (
    ScalarLikelihood,
    scalar_likelihood,
)
from blr_analysis.likelihoods import Likelihood

CHUNK = 256


@dataclass(frozen=True)
class GaussianProcess:
    """Gaussian-process classification (or counts), q(f) a full Gaussian over the N examples.

    Attributes:
        kernel: (x, z) → covariances ``[N, M]``: :func:`rbf`, :func:`linear_kernel` or another,
            its parameters bound by ``functools.partial``.
        likelihood: ``"bernoulli"`` (logistic link), ``"probit"``, ``"poisson"``, ``"gaussian"``,
            a likelihood object, or a function (y, f) → log p(y|f).

    Raises:
        InputError: an unknown likelihood, or a kernel that is no function.

    Example:
        >>> from functools import partial
        >>> x = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
        >>> y = torch.tensor([0.0, 1.0, 1.0])
        >>> fitted = GaussianProcess(partial(rbf, variance=4.0), "probit").fit((x, y))
        >>> fitted.predict(x)
        tensor([0.2864, 0.7603, 0.8560], dtype=torch.float64)
    """

    kernel: Kernel = rbf
    likelihood: str | Likelihood | ScalarLikelihood | Callable[[Tensor, Tensor], Tensor] = (
        "bernoulli"
    )

    def __post_init__(self) -> None:
        if not callable(self.kernel):
            raise InputError(f"kernel must be a function (x, z) -> [N, M], got {self.kernel!r}")
        scalar_likelihood(self.likelihood)

    def fit(
        self,
        data: tuple[Tensor, Tensor],
        *,
        rho: float = 1.0,
        halving: bool = True,
        tol: float = 1e-10,
        max_iter: int = 500,
        expectation: Expectation | None = None,
        progress: bool | None = None,
    ) -> LatentFitted:
        """The Gaussian q(f) that maximises the ELBO; O(N³) time for each step, O(N²) memory.

        Args:
            data: (x ``[N, D]``, y ``[N]``); the dtype of x, single or double, is that of the
                computation (double is wise, and taken for all others).
            rho: see :meth:`GeneralizedLinear.fit
                <blr_analysis.learning_rule.inference.generalized_linear.GeneralizedLinear.fit>`;
                so for ``halving``, ``tol``, ``max_iter``, ``expectation`` and ``progress``.

        Returns:
            The posterior of the whitened v; :meth:`LatentFitted.latent` gives f at any inputs,
            :meth:`LatentFitted.predict` its probabilities, :func:`function_values` q(f) whole.

        Raises:
            DataError: examples that are misshapen, not finite, or outside the support.
            InputError: the kernel's matrix is misshapen, zero or not positive semi-definite, the
                kernel, the likelihood or the expectation mixes examples, settings out of range, or
                no step improves the ELBO.
        """
        likelihood = scalar_likelihood(self.likelihood)
        given: Any = data[0] if isinstance(data, tuple | list) and len(data) else None
        device = given.device if isinstance(given, Tensor) else None
        single = isinstance(given, Tensor) and given.dtype == torch.float32
        like = torch.zeros((), dtype=torch.float32 if single else torch.float64, device=device)
        x, y = checked_pair(data, like, likelihood)
        features = whitened(self.kernel, x)
        size = features(x[:1])[0].shape[-1]
        prior = FullGaussian(x.new_zeros(size), torch.eye(size, dtype=x.dtype, device=x.device))
        return fit_latent(
            prior,
            features,
            likelihood,
            (x, y),
            rho=rho,
            halving=halving,
            tol=tol,
            max_iter=max_iter,
            expectation=expectation,
            progress=progress,
        )


def whitened(kernel: Kernel, x: Tensor) -> Features:
    """Φ(z) = k(z, x) U Λ^{−½} with k(x, x) = U Λ Uᵀ, and k(z, z) − Φ(z) Φ(z)ᵀ's diagonal.

    Directions whose eigenvalue is 0 to rounding are left out: f does not vary along them.

    Raises:
        InputError: the matrix has another shape, is not finite, symmetric and positive
            semi-definite, or is zero; or its entries are not functions of two examples each.
    """
    matrix = covariances(kernel, x, x)
    if not bool(matrix.any()):
        raise InputError("the kernel is zero at all examples, so that f would be 0: give another")
    check_pairwise(kernel, x, matrix)
    values, vectors = torch.linalg.eigh(matrix)
    noise = len(x) * torch.finfo(x.dtype).eps * values.abs().max()
    uneven = (matrix - matrix.mT).abs().max()
    if values[-1] <= 0 or bool(values[0] < -noise) or bool(uneven > noise):
        raise InputError(
            "the kernel's matrix is not symmetric and positive semi-definite (eigenvalues from "
            f"{float(values[0]):.3g} to {float(values[-1]):.3g}): choose another kernel"
        )
    kept = values > noise
    root = vectors[:, kept] / values[kept].sqrt()

    def features(z: Tensor) -> tuple[Tensor, Tensor]:
        z = real("x", z, x, 2)
        if z.shape[-1] != x.shape[-1]:
            raise InputError(f"inputs have {z.shape[-1]} columns, the examples {x.shape[-1]}")
        rows = covariances(kernel, z, x) @ root
        whole = torch.cat([covariances(kernel, p, p).diagonal() for p in z.split(CHUNK)])
        return rows, (whole - rows.square().sum(-1)).clamp(min=0)

    return features


def function_values(fitted: LatentFitted) -> tuple[Tensor, Tensor]:
    """Mean ``[N]`` and covariance ``[N, N]`` of f at the examples under q.

    >>> fitted = GaussianProcess().fit((torch.zeros(1, 1).double(), torch.ones(1)))
    >>> mean, covariance = function_values(fitted)
    >>> mean.shape, covariance.shape
    (torch.Size([1]), torch.Size([1, 1]))
    """
    design, q = fitted.problem.design, fitted.q
    return design @ q.mean, design @ q.covariance @ design.mT


def best_kernel(
    kernels: Sequence[Kernel], data: tuple[Tensor, Tensor], likelihood: Any = "bernoulli"
) -> tuple[Kernel, list[float]]:
    """The kernel with the highest ELBO, a bound on the log evidence, and the ELBO of each.

    Raises:
        InputError: no kernels, or what :meth:`GaussianProcess.fit` raises.

    >>> from blr_analysis.learning_rule.inference.kernels import linear_kernel
    >>> x = torch.linspace(-3, 3, 12, dtype=torch.float64).unsqueeze(-1)
    >>> best, elbos = best_kernel([linear_kernel, rbf], (x, (x[:, 0].abs() < 1.5).double()))
    >>> best is rbf, elbos[1] > elbos[0]
    (True, True)
    """
    if not isinstance(kernels, Sequence) or not len(kernels):
        raise InputError("give at least one kernel to choose from")
    bounds = [GaussianProcess(k, likelihood).fit(data, progress=False).history[-1] for k in kernels]
    return kernels[max(range(len(kernels)), key=bounds.__getitem__)], bounds
