"""bSAM: sharpness-aware minimisation as a relaxation of Bayes, with a variance that it learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.expectations import adversary
from blr_analysis.learning_rule.optim.blocks import Buffers
from blr_analysis.learning_rule.optim.draws import Draw, state_dtype
from blr_analysis.learning_rule.optim.row_optimizer import RowOptimizer
from blr_analysis.learning_rule.table import ROWS


class AdversaryDraw(Draw):
    """The weights m + radius·g/s, for gradients g taken at a sample before."""

    gradients: Mapping[Tensor, Tensor]

    def fill(
        self,
        groups: Any,
        state: Mapping[Tensor, Mapping[str, Any]],
        buffers: Buffers,
        generator: torch.Generator | None,
    ) -> None:
        for group in groups:
            for param in group["params"]:
                if not param.requires_grad:
                    continue
                dtype = state_dtype(param)
                hess = state[param]["hess"] if param in state else group["hess_init"]
                gradient = self.gradients.get(param)
                if gradient is None:
                    gradient = torch.zeros_like(param, dtype=dtype)
                shift = adversary(
                    torch.zeros_like(gradient),
                    gradient,
                    hess + group["weight_decay"],
                    group["radius"],
                )
                self.params.append(param)
                self.methods.append(group["hess_approx"])
                self.noises.append(shift)
                self.given[param] = gradient.abs()
        self.means = [p.detach().clone() for p in self.params]


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
        hess_init: ``hess`` before the first step, so that s starts at hess_init + weight_decay.
        beta1: decay of the momentum.
        beta2: decay of s.
        weight_decay: δ, the prior precision divided by ess.
        radius: how far the adversary goes (ρ).
        damping: γ.
        mc_samples: pairs of gradients per ``step(closure)``.
        sync: as in IVON.
        generator: as in IVON.

    Raises:
        InputError: a setting or parameter is out of range.
        OptimizerError: as IVON; a step or a sample without its adversary; under a ``GradScaler``,
            whose scale the adversary would need to know: train in bfloat16 or float32.

    Source: Möllenhoff & Khan, "SAM as an Optimal Relaxation of Bayes", ICLR 2023, Algorithm 1.
    SAM (Foret et al., ICLR 2021) without its normalisation of g is the limit of zero variance.
    """

    _two_looks = True

    def __init__(
        self,
        params: Any,
        lr: float,
        ess: float,
        hess_init: float = 1.0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        weight_decay: float = 1e-4,
        radius: float = 0.05,
        damping: float = 0.1,
        mc_samples: int = 1,
        *,
        sync: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(
            params,
            ROWS["bSAM"],
            lr,
            ess,
            weight_decay=weight_decay,
            hess_init=hess_init,
            beta1=beta1,
            beta2=beta2,
            radius=radius,
            damping=damping,
            mc_samples=mc_samples,
            sync=sync,
            generator=generator,
        )

    def _begin_fresh(self) -> None:
        super()._begin_fresh()
        self._sampled: dict[Tensor, Tensor] | None = None

    @contextmanager
    def adversarial_params(self) -> Iterator[None]:
        """The model at the adversary of the sample before; its gradients move the mean.

        The mean comes back bit for bit after it, also when the body raises.

        Raises:
            OptimizerError: there was no ``sampled_params(train=True)`` before it.
        """
        draw = self._draw_adversary()
        try:
            yield
            self._finish(draw)
        except BaseException:
            self._abandon(draw)
            raise

    def _draw_adversary(self, adoptable: bool = False) -> Draw:
        if self._open is not None:
            raise OptimizerError("adversarial_params() inside sampled_params(): leave it first")
        if self._sampled is None:
            raise OptimizerError(
                "adversarial_params() without a sample: first run the forward and backward pass "
                "of the same minibatch inside `with optimizer.sampled_params(train=True):`"
            )
        draw = AdversaryDraw(True, adoptable)
        draw.gradients, self._sampled = self._sampled, None
        return self._begin(draw)

    def _new_draw(self, train: bool, adoptable: bool) -> Draw:
        if train and self._sampled is not None:
            self._sampled = None
            raise OptimizerError(
                "two samples without an adversary between them: after "
                "`with optimizer.sampled_params(train=True):` comes "
                "`with optimizer.adversarial_params():`; the first sample is dropped"
            )
        return super()._new_draw(train, adoptable)

    def _finish(self, draw: Draw) -> None:
        if not draw.train or draw.closed or isinstance(draw, AdversaryDraw):
            super()._finish(draw)
            return
        with torch.inference_mode(False), torch.no_grad():
            self._restore(draw)
            self._sampled = {
                p: p.grad.detach().to(state_dtype(p), copy=True)
                for p in draw.params
                if p.grad is not None
            }
            self._drop(draw)
        if not self._sampled:
            self._sampled = None
            raise OptimizerError(
                "no parameter has a gradient at the end of sampled_params(train=True); call "
                "loss.backward() inside the context, or use sampled_params() to evaluate"
            )

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        losses = []
        for _ in range(self.mc_samples):
            for look in (lambda: self._draw(True, adoptable=True), self._adopted):
                draw = look()
                try:
                    with torch.enable_grad():
                        losses.append(closure())
                    self._finish(draw)
                except BaseException:
                    self._abandon(draw)
                    raise
        kept = losses[::2]  # at the samples, as with the other rows
        return None if kept[0] is None else sum(kept) / len(kept)

    def _adopted(self) -> Draw:
        return self._draw_adversary(adoptable=True)

    def _step(self) -> None:
        if getattr(self, "found_inf", None) is not None:
            raise OptimizerError(
                "bSAM under a GradScaler: its adversary would need the gradient's true size. Train "
                "in bfloat16 or float32, which need no scaler"
            )
        if self._sampled is not None:
            self._sampled = None
            raise OptimizerError(
                "step() after a sample without its adversary: run the same minibatch once more "
                "inside `with optimizer.adversarial_params():`"
            )
        super()._step()

    def drop_draws(self) -> None:
        """As :meth:`IVON.drop_draws`, a sample that has no adversary yet included."""
        super().drop_draws()
        self._sampled = None

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`IVON.state_dict`; not between a sample and its adversary."""
        if self._sampled is not None:
            raise OptimizerError("state_dict() between a sample and its adversary: step() first")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As :meth:`IVON.load_state_dict`."""
        super().load_state_dict(state_dict)
        self._sampled = None
