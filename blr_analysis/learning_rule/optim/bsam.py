"""bSAM: sharpness-aware minimisation as a relaxation of Bayes, with a variance that it learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import OptimizerError
from blr_analysis.half import working
from blr_analysis.learning_rule.optim.draws import Context, Draw, Group, Seen
from blr_analysis.learning_rule.optim.per_example import NO_GRADIENT, NoGradient
from blr_analysis.learning_rule.optim.row_optimizer import RowOptimizer
from blr_analysis.learning_rule.table import ROWS

NO_ADVERSARY = "run the same minibatch once more inside `with optimizer.adversarial_params():`"


class BSAM(RowOptimizer):
    r"""SAM that learns its own radii: q(θ) = N(m, 1/S), S = ess·s, s = hess + weight_decay.

    Each step takes two gradients of the same minibatch: g at weights drawn from q, and g_a at the
    adversary a = m + radius·g/s. With δ = weight_decay:

        u ← β₁ u + (1 − β₁) (g_a + δ m)
        s ← β₂ s + (1 − β₂) ( √s · |g| + δ + damping )
        m ← m − lr · u / s

        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 1)
        >>> x, y = torch.randn(50, 3), torch.randn(50, 1)
        >>> optimizer = BSAM(model.parameters(), lr=0.1, ess=50)
        >>> for _ in range(5):
        ...     with optimizer.sampled_params(train=True):     # weights drawn from q
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...     with optimizer.adversarial_params():           # weights at their adversary
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...     optimizer.step()                               # weights are the mean again

    ``step(closure)`` does the same with a closure that clears the gradients, computes the loss,
    calls ``backward`` and returns the loss. Several such pairs before a ``step`` are averaged.

    Args:
        params: parameters, named parameters or groups.
        lr: step size of the mean (α).
        ess: N, the number of training examples; S = N·s.
        settings: ``hess_init`` (1, so that s starts at 1 + weight_decay), ``beta1`` (0.9),
            ``beta2`` (0.999), ``weight_decay`` (δ, 1e-4), ``radius`` (how far the adversary goes,
            0.05), ``damping`` (γ, 0.1), ``mc_samples`` (pairs of gradients per ``step(closure)``),
            ``sync`` and ``generator``, as for :class:`RowOptimizer`.

    Raises:
        InputError: a setting or parameter is out of range.
        OptimizerError: as IVON; a step or a sample without its adversary; under a ``GradScaler``,
            whose scale the adversary would need to know: train in bfloat16 or float32.

    Source: Möllenhoff & Khan, "SAM as an Optimal Relaxation of Bayes", ICLR 2023, Algorithm 1.
    SAM (Foret et al., ICLR 2021) without its normalisation of g is the limit of zero variance.
    """

    _takes_scaler = False

    def __init__(self, params: Any, lr: float, ess: float, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "hess_init": 1.0,
            "weight_decay": 1e-4,
            "radius": 0.05,
            "damping": 0.1,
        }
        self._set_up(ROWS["bSAM"], params, lr=lr, ess=ess, **defaults | settings)

    def adversarial_params(self, *, divided_by: float = 1.0) -> Context:
        """The model at the adversary of the sample before; its gradients move the mean.

        The mean comes back bit for bit after it, also when the body raises. ``divided_by`` as in
        :meth:`sampled_params`.

        Raises:
            OptimizerError: there was no ``sampled_params(train=True)`` before it.
        """
        return self._context_of(self._adversary(), divided_by)

    def _adversary(self, adoptable: bool = False) -> Draw:
        """A draw of the adversary of the sample before, which is used up."""
        self._refuse_inside("adversarial_params()")
        if self._sampled is None:
            raise OptimizerError("adversarial_params() without a sample: draw one before it")
        gradients = self._sampled
        self._sampled = None
        sizes: dict[Tensor, Tensor] = {}

        def look(mean: Tensor, group: Group, _: torch.Generator | None) -> Seen:
            gradient = gradients.get(mean, torch.zeros_like(mean, dtype=working(mean.dtype)))
            sizes[mean] = gradient.abs()
            hess = self.state.get(mean, {}).get("hess", group["hess_init"])
            return mean + group["radius"] * gradient / (hess + group["weight_decay"]), None

        return Draw(train=True, look=look, adoptable=adoptable, estimates=sizes)

    def _draw(self, train: bool, adoptable: bool = False) -> Draw:
        if train and self._open is None:
            self._refuse_sample("two samples without an adversary between them")
        return super()._draw(train, adoptable)

    def _gather(self, draw: Draw) -> None:
        if draw.look is not None:  # the adversary
            super()._gather(draw)
            return
        grads = {p: p.grad.detach() for p in draw.groups if p.grad is not None}
        if not grads:
            raise NoGradient(NO_GRADIENT)
        self._sampled = {p: g.to(working(p.dtype), copy=True) for p, g in grads.items()}
        self._gathered.drop(draw)

    def _loss_at(self, draw: Draw, closure: Callable[[], Any]) -> Any:
        loss = super()._loss_at(draw, closure)  # at the sample, as with the other rows
        super()._loss_at(self._adversary(adoptable=True), closure)
        return loss

    def _refuse_sample(self, mistake: str) -> None:
        """Raise :class:`OptimizerError` where a sample still waits for its adversary."""
        if self._sampled is not None:
            self._sampled = None
            raise OptimizerError(f"{mistake}; it is dropped: {NO_ADVERSARY}")

    def _check_draws(self) -> None:
        self._refuse_sample("step() after a sample without its adversary")
        super()._check_draws()

    def _forget_draws(self) -> None:
        super()._forget_draws()
        self._sampled: dict[Tensor, Tensor] | None = None  # gradients at the sample
