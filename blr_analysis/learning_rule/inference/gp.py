"""Gaussian processes with any likelihood of one number, f ~ GP(0, k) (K&R, section 5.4).

The process at the examples is written in whitened coordinates v,

    f = Φ v,   Φ = U Λ^½,   K = U Λ Uᵀ,   v ~ N(0, I).

It is then a regression on Φ with a standard Gaussian prior. The kernel's matrix K may have any
rank; nothing is added to its diagonal. The rule's sites are Gaussian messages to the f_i, so that
q(f) = N(f | 0, K) Π_i exp(a_i f_i − ½ b_i f_i²) up to a constant.

A sparse process has M inducing inputs z. It is f = Φ v + e, with Φ from k(z, z) and a residual e
that z does not explain; the variance of e enters E_q[log p(y_i|f_i)] (Titsias, 2009; Hensman et
al., 2015). The rule is the same. A step takes of the order of N M² operations, and B M² on a
minibatch of B examples (Hensman et al., 2013).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import instance
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.inference.conjugate import columns, real
from blr_analysis.learning_rule.inference.cvi import LatentFitted, LatentModel
from blr_analysis.learning_rule.inference.fitted import answer
from blr_analysis.learning_rule.inference.latent_problem import Features, Problem
from blr_analysis.learning_rule.inference.scalar_likelihoods import (
    AnyLikelihood,
    scalar_likelihood,
)

CHUNK = 256  # inputs whose covariances with each other are computed at a time
Kernel = Callable[[Tensor, Tensor], Tensor]
"""(x ``[N, D]``, z ``[M, D]``) → the covariances of f(x) and f(z) ``[N, M]``."""


def rbf(
    x: Tensor, z: Tensor, *, lengthscale: float | Tensor = 1.0, variance: float = 1.0
) -> Tensor:
    """v exp(−½ Σ_d (x_d − z_d)² / ℓ_d²), the squared exponential kernel, ``[N, M]``.

    Args:
        x: ``[N, D]``.
        z: ``[M, D]``.
        lengthscale: ℓ, one number or one for each dimension ``[D]``.
        variance: v, the prior variance of f.

    >>> rbf(torch.zeros(1, 2), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    tensor([[1.0000, 0.3679]])
    """
    offsets = (x / lengthscale).unsqueeze(-2) - (z / lengthscale).unsqueeze(-3)
    return variance * torch.exp(-0.5 * offsets.square().sum(-1))


def covariances(kernel: Kernel, x: Tensor, z: Tensor) -> Tensor:
    """k(x, z) ``[N, M]``; an InputError where the user's kernel gives no finite matrix."""
    contract = "the kernel must give a finite matrix [N, M] from x [N, D] and z [M, D]"
    shape = torch.Size([len(x), len(z)])
    matrix = answer(contract, shape, kernel, x, z).to(x)
    if not bool(torch.isfinite(matrix).all()):
        raise InputError(f"{contract}; it gave NaN or infinite entries")
    return matrix


@dataclass(frozen=True)
class GaussianProcess(LatentModel):
    """Gaussian-process classification (or counts), q(f) a full Gaussian over the N examples.

    Attributes:
        kernel: (x, z) → covariances ``[N, M]``: :func:`rbf` or another function;
            ``functools.partial`` sets its parameters.
        likelihood: ``"bernoulli"`` (logistic link), ``"probit"``, ``"poisson"``, ``"gaussian"``,
            a likelihood object, or a function (y, f) → log p(y|f).
        inducing: the inducing inputs z ``[M, D]`` of a sparse process; None takes the examples.

    Raises:
        InputError: the likelihood is unknown, the kernel is no function, or the inducing inputs
            are no tensor.

    Example:
        >>> from functools import partial
        >>> x = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
        >>> y = torch.tensor([0.0, 1.0, 1.0])
        >>> fitted = GaussianProcess(partial(rbf, variance=4.0), "probit").fit((x, y))
        >>> fitted.predict(x)
        tensor([0.2864, 0.7603, 0.8560], dtype=torch.float64)

        A sparse process, fitted on minibatches with a falling ρ_t:

        >>> x = torch.linspace(-3, 3, 200, dtype=torch.float64).unsqueeze(1)
        >>> sparse = GaussianProcess(inducing=x[::20])
        >>> fitted = sparse.fit(
        ...     (x, (x[:, 0] > 0).double()),
        ...     rho=lambda t: (t + 10) ** -0.7,
        ...     batch=50,
        ...     generator=torch.Generator().manual_seed(0),
        ...     max_iter=200,
        ...     progress=False,
        ... )
        >>> fitted.predict(torch.tensor([[-2.0], [2.0]], dtype=torch.float64)).round(decimals=1)
        tensor([0., 1.], dtype=torch.float64)
    """

    kernel: Kernel = rbf
    likelihood: AnyLikelihood = "bernoulli"
    inducing: Tensor | None = None

    def __post_init__(self) -> None:
        if not callable(self.kernel):
            raise InputError(f"kernel must be a function (x, z) -> [N, M], got {self.kernel!r}")
        scalar_likelihood(self.likelihood)
        if self.inducing is not None:
            instance("inducing", self.inducing, Tensor, "a matrix [M, D] or None")

    def problem(self, data: Any) -> Problem[FullGaussian]:
        inputs = data[0] if isinstance(data, tuple | list) and data else None
        like = torch.zeros((), dtype=torch.float64, device=getattr(inputs, "device", None))
        x = real("x", inputs, like, ndim=2)
        if self.inducing is None:
            centres = x
        else:
            centres = columns(self.inducing, x, x.shape[-1])
        features = whitened(self.kernel, centres)
        first_row, _ = features(x[:1])
        rank = first_row.shape[-1]
        prior = FullGaussian(x.new_zeros(rank), torch.eye(rank).to(x))
        return Problem(prior, scalar_likelihood(self.likelihood), features)


def whitened(kernel: Kernel, x: Tensor) -> Features:
    """The function z → Φ(z) and the variance that Φ(z) does not explain, from centres x.

        Φ(z) = k(z, x) U Λ^{−½}   ``[M, rank]``,      k(x, x) = U Λ Uᵀ
        diag(k(z, z) − Φ(z) Φ(z)ᵀ)   ``[M]``

    Directions whose eigenvalue is 0 to rounding are left out: f does not vary along them.

    Raises:
        InputError: the matrix k(x, x) has another shape, or is not finite, symmetric and positive
            semi-definite.
    """
    matrix = covariances(kernel, x, x)
    eigenvalues, eigenvectors = torch.linalg.eigh(matrix)  # in ascending order
    rounding = len(x) * torch.finfo(x.dtype).eps * eigenvalues.abs().max()
    asymmetry = (matrix - matrix.mT).abs().max()
    is_semi_definite = bool(eigenvalues[-1] > 0) and bool(eigenvalues[0] >= -rounding)
    if bool(asymmetry > rounding) or not is_semi_definite:
        raise InputError("the kernel's matrix is not symmetric and positive semi-definite")
    varies = eigenvalues > rounding
    whitening = eigenvectors[:, varies] / eigenvalues[varies].sqrt()

    def features(z: Tensor) -> tuple[Tensor, Tensor]:
        z = columns(z, x, x.shape[-1])
        design = covariances(kernel, z, x) @ whitening
        chunks = z.split(CHUNK)
        variance = torch.cat([covariances(kernel, chunk, chunk).diagonal() for chunk in chunks])
        unexplained = variance - design.square().sum(-1)
        return design, unexplained.clamp(min=0)

    return features


def function_values(fitted: LatentFitted) -> tuple[Tensor, Tensor]:
    """Mean ``[N]`` and covariance ``[N, N]`` of f at the examples under q.

    >>> fitted = GaussianProcess().fit((torch.zeros(1, 1).double(), torch.ones(1)))
    >>> mean, covariance = function_values(fitted)
    >>> mean.shape, covariance.shape
    (torch.Size([1]), torch.Size([1, 1]))
    """
    design = fitted.model.design
    mean = design @ fitted.q.mean
    return mean, design @ fitted.q.covariance @ design.mT
