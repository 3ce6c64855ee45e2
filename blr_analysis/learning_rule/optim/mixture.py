"""Several networks in one posterior: a mixture of Gaussians, with an optimizer for each component.

    q(θ) = 1/K Σ_k q_k(θ),   q_k = N(m_k, 1/S_k)

The entropy of the mixture is not the sum of its components' entropies. At a draw of component k the
rule needs ∇ℓ̄ + ∇log q (Khan & Rue, Eqs. 29, 30); the component's own optimizer has ∇ℓ̄ + ∇log q_k.
The difference is the gradient of one more term of the loss, :meth:`Mixture.overlap`:

    (log q(θ) − log q_k(θ)) / ess

Its gradient is Σ_j r_j(θ) [S_k(θ − m_k) − S_j(θ − m_j)] / ess with the responsibilities r. It
pushes apart components that overlap. Price's estimate gives the term's Hessian. Components far from
each other have r_k = 1 and learn as if alone: the limit is a deep ensemble.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.half import working
from blr_analysis.learning_rule.optim.draws import Tensors
from blr_analysis.learning_rule.optim.ivon import IVON


class Mixture:
    r"""K networks, each learning with an IVON of its own, in one posterior.

    Train every network with its own optimizer and add ``overlap(k)`` to the loss of the k-th:

        >>> _ = torch.manual_seed(0)
        >>> from torch import nn
        >>> models = [nn.Linear(2, 1) for _ in range(3)]
        >>> optimizers = [IVON(m.parameters(), lr=0.1, ess=20) for m in models]
        >>> mixture = Mixture(optimizers)
        >>> x, y = torch.randn(20, 2), torch.randn(20, 1)
        >>> for _ in range(5):
        ...     for k, (model, optimizer) in enumerate(zip(models, optimizers)):
        ...         with optimizer.sampled_params(train=True):
        ...             optimizer.zero_grad()
        ...             loss = nn.functional.mse_loss(model(x), y) + mixture.overlap(k)
        ...             loss.backward()
        ...         optimizer.step()

    Then ``[Posterior.from_optimizer(o, m) for o, m in zip(optimizers, models)]`` is the mixture for
    ``predict``, ``sensitivity``, ``influence`` and ``what_if``, which average over a list.

    Args:
        optimizers: one for each network, all of the same shapes in the same order, with the same
            ``ess`` and no parameter shared.

    Raises:
        InputError: fewer than two optimizers, one that is no IVON, or networks of other shapes.
    """

    def __init__(self, optimizers: Sequence[IVON]) -> None:
        self.optimizers = list(optimizers)
        if len(self.optimizers) < 2:
            raise InputError("a mixture has two or more optimizers")
        if not all(_takes_price(optimizer) for optimizer in self.optimizers):
            raise InputError('the components of a mixture are IVON with hess_approx="price"')
        networks = [optimizer._trained() for optimizer in self.optimizers]
        shapes_and_ess = {
            tuple((param.shape, float(group["ess"])) for param, group in network.items())
            for network in networks
        }
        if len(shapes_and_ess) > 1:
            raise InputError("the networks of a mixture need the same shapes and the same ess")
        parameters = [param for network in networks for param in network]
        if len({*parameters}) < len(parameters):
            raise InputError("two optimizers hold the same parameter: copy the network")

    def overlap(self, k: int) -> Tensor:
        """(log q(θ) − log q_k(θ)) / ess at the weights that component k has now, as a loss.

        Inside ``optimizers[k].sampled_params(train=True)`` these weights are a draw of q_k. Where
        the other components are far, the term is log(1/K) / ess and its gradient 0.
        """
        component = self.optimizers[k]
        weights = list(component._trained())
        log_densities = torch.stack(
            [_log_density(optimizer, weights) for optimizer in self.optimizers]
        )
        log_q = torch.logsumexp(log_densities, 0) - math.log(len(log_densities))
        ess = float(component.param_groups[0]["ess"])
        return (log_q - log_densities[k]) / ess


def _takes_price(optimizer: object) -> bool:
    """Whether this is an IVON whose Hessian is Price's."""
    return isinstance(optimizer, IVON) and optimizer.param_groups[0]["hess_approx"] == "price"


def _log_density(optimizer: IVON, weights: list[Tensor]) -> Tensor:
    """log q_j at these weights, up to a constant that all components share."""
    terms: list[Tensor] = []
    for theta, (mean, precision) in zip(weights, _gaussians(optimizer), strict=True):
        distance = theta.to(precision) - mean.to(precision)
        terms.append(0.5 * (precision.log() - precision * distance.square()).sum())
    return torch.stack([term.to(terms[0]) for term in terms]).sum()


def _gaussians(optimizer: IVON) -> list[tuple[Tensor, Tensor]]:
    """Mean and precision of every parameter, also inside the context of a draw."""
    means: Tensors = {}
    if optimizer._open is not None:
        means = optimizer._open.means
    gaussians = []
    for param, group in optimizer._trained().items():
        dtype = working(param.dtype)
        initial_hess = torch.full_like(param, group["hess_init"], dtype=dtype).detach()
        hess = optimizer.state.get(param, {}).get("hess", initial_hess)
        precision = group["ess"] * (hess + optimizer._decay_of(param, group))
        mean = means.get(param, param).detach()
        gaussians.append((mean, precision))
    return gaussians
