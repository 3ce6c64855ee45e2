"""Rows of the table that learn a diagonal Gaussian, with the settings that they are used with."""

from __future__ import annotations

from typing import Any

from torch import nn

from blr_analysis.learning_rule.optim.row_optimizer import RowOptimizer
from blr_analysis.learning_rule.optim.settings import groups_of
from blr_analysis.learning_rule.optim.weight_prior import WeightPrior
from blr_analysis.posterior.posterior import Posterior


class VOGN(RowOptimizer):
    r"""Variational online Gauss–Newton: q(θ) = N(m, 1/S), its precision from every example.

    With S = ess·(h + δ), δ = weight_decay, and the gradients g_i of the losses of the B examples
    of a minibatch, at weights drawn from q:

        h ← β₂ h + (1 − β₂) (1/B) Σ_i g_i²
        u ← β₁ u + (1 − β₁) (1/B) Σ_i g_i
        m ← m − lr · (u / (1 − β₁ᵗ) + δ m) / (h + δ)

    The g_i are read from the model's own forward and backward pass: nothing changes in the model
    or in the training loop, which is IVON's.

        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> x, y = torch.randn(50, 3), torch.randn(50, 1)
        >>> optimizer = VOGN(model.parameters(), lr=0.1, ess=50, model=model)
        >>> for _ in range(5):
        ...     with optimizer.sampled_params(train=True):     # weights drawn from q
        ...         optimizer.zero_grad()
        ...         nn.functional.mse_loss(model(x), y).backward()
        ...     optimizer.step()                               # weights are the mean again
        >>> optimizer.state[model[0].weight]["hess"].shape
        torch.Size([8, 3])

    Linear, convolution, embedding and normalisation layers (not BatchNorm in training mode, which
    mixes examples) have rules; any other layer that takes the examples along its first dimension
    is differentiated by itself with ``torch.func``. The gradients are checked against ``p.grad``,
    and a layer that cannot be read is refused by name. Call the model once in each context; for
    several minibatches use several contexts, with ``divided_by``. ``GradScaler`` works as with
    IVON. With ``DistributedDataParallel`` gradients are averaged before they can be read: use
    the bare model and ``sync=True``.

    Σ_i g_i² is the Gauss–Newton approximation of Khan & Rue (Eq. 45), that of the labels as they
    are. Where the model's noise is that of the data, its expectation is that of the Hessian. In
    linear regression with noise σ² and residuals r_i it is Σ x_i² r_i² / σ⁴ in the place of
    Σ x_i² / σ²: some per cent off with hundreds of examples, and too small where the model fits
    them too well.

    Args:
        params: parameters, named parameters or groups, all of them ``model``'s.
        lr: step size of the mean.
        ess: N, the number of training examples.
        model: the module that is called in training, with the examples along dimension 0.
        settings: ``hess_init`` (1), ``beta1`` (0.9), ``beta2`` (0.999), ``weight_decay`` (1e-4),
            ``mc_samples``, ``loss_reduction``, ``sync`` and ``generator``, as for
            :class:`RowOptimizer`.
        prior: the posterior of earlier data in the place of ``weight_decay``, as for :class:`IVON`;
            the names are ``model``'s.

    Raises:
        InputError: a setting or parameter is out of range; ``weight_decay`` beside ``prior``.
        OptimizerError: as IVON; and a layer whose per-example gradients cannot be read.

    Source: Khan et al., ICML 2018; Osawa et al., NeurIPS 2019; Khan & Rue, Eqs. 45 and 46.
    """

    _algorithm = "VOGN"

    def __init__(
        self,
        params: Any,
        lr: float,
        ess: float,
        *,
        model: nn.Module,
        prior: Posterior | None = None,
        **settings: Any,
    ) -> None:
        weight_decay = 1e-4
        if prior is not None:
            params = groups_of(params)
            settings["earlier"] = WeightPrior.read(prior, params, model)
            weight_decay = 0.0
        settings = {"hess_init": 1.0, "weight_decay": weight_decay, **settings}
        super().__init__(params, self._algorithm, lr, ess, model=model, **settings)


class OGN(VOGN):
    r"""Online Gauss–Newton: :class:`VOGN` with its gradients taken at the mean.

    The contexts of ``sampled_params(train=True)`` perturb nothing; ``sampled_params()`` draws from
    the posterior N(m, 1/S), an online Laplace approximation.

        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = OGN(model.parameters(), lr=0.1, ess=50, model=model)
        >>> with optimizer.sampled_params(train=True):
        ...     model(torch.ones(2, 3)).square().mean().backward()
        >>> optimizer.step()

    Source: Khan & Rue, Eqs. 44 and 45; Osawa et al., NeurIPS 2019, App. C.
    """

    _algorithm = "OGN"


class Vadam(RowOptimizer):
    r"""Adam with perturbed weights: q(θ) = N(m, 1/(N s + λ)), λ = ess·weight_decay, N = ess.

    With s in ``state[p]["hess"]`` and g the minibatch gradient at weights drawn from q:

        u ← γ₁ u + (1 − γ₁) (g + λ m / N),      s ← γ₂ s + (1 − γ₂) g²
        m ← m − lr · (u / (1 − γ₁ᵗ)) / ( √(s / (1 − γ₂ᵗ)) + λ/N )

    g² is the square of a mean over the minibatch, so that s falls short of the Gauss–Newton
    diagonal the more, the larger the minibatch (Khan et al., Theorem 1): prefer :class:`VOGN` or
    :class:`IVON` where the variance matters. Noise that is too wide for a deep network to train is
    narrowed by an ``ess`` above N, a tempered posterior (``Posterior.from_optimizer`` takes it
    with ``scaling="ess"``). At ``hess_init = 0``, as in the paper, the weights are drawn from the
    prior at first; above it, s does not start at 0 and is not divided by 1 − γ₂ᵗ.

        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = Vadam(model.parameters(), lr=0.01, ess=50, weight_decay=1 / 50)
        >>> with optimizer.sampled_params(train=True):
        ...     model(torch.ones(2, 3)).square().mean().backward()
        >>> optimizer.step()

    Settings (``beta1``, …), errors and behaviour as :class:`IVON`'s of the same names, with
    ``hess_init`` 0 and ``beta2`` 0.999.

    Source: Khan et al., "Fast and Scalable Bayesian Deep Learning by Weight-Perturbation in Adam",
    ICML 2018, Figure 1.
    """

    _algorithm = "Vadam"

    def __init__(self, params: Any, lr: float, ess: float, **settings: Any) -> None:
        super().__init__(params, self._algorithm, lr, ess, **{"weight_decay": 1e-4, **settings})


class Vprop(Vadam):
    r"""RMSprop with perturbed weights, in :class:`Vadam`'s scale but without its momentum.

        s ← β₂ s + (1 − β₂) g²,      m ← m − lr · (g + δ m) / √(s + δ),      S = ess·(s + δ)

    with δ = weight_decay. At ``ess = 1`` and a loss that is a sum this is the form of Khan et al.
    (2017), S = s + λ. ``beta1`` has no effect.

        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = Vprop(model.parameters(), lr=0.01, ess=50, weight_decay=1 / 50)
        >>> with optimizer.sampled_params(train=True):
        ...     model(torch.ones(2, 3)).square().mean().backward()
        >>> optimizer.step()

    Source: Khan et al., "Vprop: Variational Inference using RMSprop", 2017.
    """

    _algorithm = "Vprop"
