"""Where the loss is looked at: what stands for E_q[·] in the rule.

Table 1 calls the delta method E_q[f(θ)] ≈ f(E_q[θ]); without it there are draws, nodes of a
quadrature, relaxed draws of discrete weights, or an adversary near the mean. A :class:`Look` is
the name that a row gives to its choice; the functions take expectations of any ``f`` of θ (its
gradient, its Hessian, a tuple of both) under a posterior.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor
from torch.utils._pytree import tree_map

from blr_analysis.checks import one_of, positive_int
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian, FullGaussian

Value = TypeVar("Value")
LOOKS = ("quadrature", "samples", "mean")
MOST_NODES = 370  # whose Gauss–Hermite weights are still numbers


@dataclass(frozen=True)
class Look:
    """Where an algorithm evaluates the loss.

    Attributes:
        name: as the table says it.
        noisy: at random places, so that weights are perturbed while gradients are taken.
    """

    name: str
    noisy: bool = False


EXACTLY = Look("in closed form")
AT_MEAN = Look("at the mean (delta method)")
AT_MODE_OF_PARAMETERS = Look("in closed form over z, at the mode of θ (delta method)")
AT_SAMPLES = Look("at samples of q", noisy=True)
AT_ADVERSARY = Look("at samples of q, then at their adversary near the mean", noisy=True)
AT_DROPPED_OUT_MEAN = Look("at the mean, units dropped out", noisy=True)
AT_SIGN = Look("at the sign of the mean (delta method, zero temperature)")
AT_RELAXED_SAMPLES = Look("at relaxed samples of q", noisy=True)
BY_NODES = Look("by quadrature or samples", noisy=True)


def at_mean(q: ExponentialFamily, f: Callable[[Any], Value]) -> Value:
    """E_q[f(θ)] ≈ f(E_q[θ]), the delta method (Khan & Rue, Eq. 7); exact where f is linear.

    Raises:
        InputError: θ has no mean, such as the number of a class.

    >>> q = DiagonalGaussian(torch.tensor([2.0]), torch.tensor([1.0]))
    >>> at_mean(q, torch.square)
    tensor([4.])
    """
    return f(q.expected_point())


def at_samples(
    q: ExponentialFamily,
    f: Callable[[Any], Value],
    n: int = 1,
    *,
    generator: torch.Generator | None = None,
) -> Value:
    """The mean of f over ``n`` draws of q; tensors in tuples, lists or dictionaries alike.

    Raises:
        InputError: ``n`` is no positive integer.

    >>> q = DiagonalGaussian(torch.tensor([2.0]), torch.tensor([1.0]))
    >>> draws = at_samples(q, torch.square, 20000, generator=torch.Generator().manual_seed(0))
    >>> abs(draws - 5).item() < 0.1
    True
    """
    draws = q.sample(positive_int("n", n), generator=generator)
    values = [f(tree_map(lambda t, i=i: t[i], draws)) for i in range(n)]
    return _average(values, [1 / n] * n)


def by_quadrature(q: DiagonalGaussian, f: Callable[[Tensor], Value], nodes: int = 20) -> Value:
    """E_q[f(θ)] by Gauss–Hermite quadrature; exact for polynomials of degree 2·nodes − 1.

    For one weight, or for a function that treats each weight by itself: ``f`` is called with
    every weight at the k-th node of its own marginal. Of smooth functions of one number however
    wide q is, ``inference.scalar_likelihoods.expected`` is the expectation.

    Raises:
        InputError: q is no Gaussian with one variance for each weight.

    >>> q = DiagonalGaussian(torch.tensor([2.0]), torch.tensor([1.0]))
    >>> by_quadrature(q, torch.square)
    tensor([5.0000])
    """
    if not isinstance(q, DiagonalGaussian):
        raise InputError(f"quadrature needs a DiagonalGaussian, not a {type(q).__name__}")
    points, shares = places(q, "quadrature", positive_int("nodes", nodes))
    return _average([f(point) for point in points], shares.tolist())


def places(
    q: FullGaussian | DiagonalGaussian,
    look: str,
    n: int = 20,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Where a look evaluates the loss under a Gaussian, and what each place counts.

    Args:
        q: the Gaussian, with copies or without.
        look: ``"mean"``; ``"samples"``, at least n of them in pairs m ± ε; or ``"quadrature"``, n
            nodes of Gauss–Hermite for each variable's marginal.
        n: draws or nodes.
        generator: of the draws.

    Returns:
        Places ``[S, ..., P]`` and weights ``[S]`` of sum 1: E_q[f] ≈ Σ_s w_s f(θ_s).

    Raises:
        InputError: another look, no positive n, more than 370 nodes, or a quadrature for several
            variables that are not independent.

    >>> places(DiagonalGaussian(torch.tensor([2.0]), torch.tensor([4.0])), "quadrature", 2)
    (tensor([[1.5000],
            [2.5000]]), tensor([0.5000, 0.5000]))
    """
    one_of("look", look, LOOKS)
    positive_int("samples", n)
    if look == "mean":
        return q.mean.unsqueeze(0), q.mean.new_ones(1)
    if look == "samples":
        half = q.sample(-(-n // 2), generator=generator)
        both = torch.cat([half, 2 * q.mean - half])
        return both, both.new_full((len(both),), 1 / len(both))
    check_nodes(n, q.mean.shape[-1] if isinstance(q, FullGaussian) else 1)
    nodes, shares = (torch.as_tensor(x).to(q.mean) for x in hermegauss(n))
    std = q.precision.rsqrt().reshape(q.mean.shape)
    return q.mean + nodes.view(-1, *[1] * q.mean.ndim) * std, shares / shares.sum()


def check_nodes(nodes: int, variables: int = 1) -> None:
    """Raise :class:`InputError` unless Gauss–Hermite can have so many nodes, in one variable."""
    if nodes > MOST_NODES:
        raise InputError(f"quadrature takes at most {MOST_NODES} nodes, got {nodes}")
    if variables != 1:
        raise InputError(
            f"quadrature is for one variable; take look='samples' for {variables} of them"
        )


def adversary(mean: Tensor, gradient: Tensor, precision: Tensor, radius: float) -> Tensor:
    """m + radius·g/s: where the loss rises fastest, measured by the posterior's own precision.

    SAM's neighbour where s = 1, up to SAM's normalisation of the gradient (Möllenhoff & Khan,
    ICLR 2023, Algorithm 1).
    """
    return mean + radius * gradient / precision


def _average(values: list[Value], weights: list[float]) -> Value:
    scaled = [tree_map(lambda t, w=w: t * w, v) for v, w in zip(values, weights, strict=True)]
    first, *rest = scaled
    for value in rest:
        first = tree_map(torch.add, first, value)
    return first
