"""The diagonal of a minibatch's Hessian, from the graph that a backward pass leaves behind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.families.drawing import uniform
from blr_analysis.learning_rule.optim.draws import state_dtype


class HessianDiagonal:
    """z ∘ (∇²ℓ z) for one draw of signs z: unbiased for the diagonal (Hutchinson).

    Of the gradients in ``p.grad``, made by ``loss.backward(create_graph=True)``; they are
    detached, so that the graph is freed (torch warns of a cycle that this breaks).
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator
        self._params: list[Tensor] = []

    def start(self, params: Sequence[Tensor]) -> None:
        """Gradients of ``params`` come next."""
        self._params = list(params)

    def stop(self) -> None:
        """Forget what was started, and free the graph."""
        for p in self._params:
            if p.grad is not None:
                p.grad = p.grad.detach()
        self._params = []

    def finish(self) -> dict[Tensor, Tensor]:
        """The estimates by parameter, 0 where the loss is linear.

        Raises:
            OptimizerError: the gradients have no graph.
        """
        params = [p for p in self._params if p.grad is not None]
        grads = [p.grad for p in params if p.grad is not None]
        if params and not any(g.requires_grad for g in grads):
            raise OptimizerError(
                "the Hessian's diagonal needs loss.backward(create_graph=True), and zero_grad() "
                "before it"
            )
        z = [2 * (uniform(p, self._generator) < 0.5).to(p) - 1 for p in params]
        curved = [(g, s.to(g)) for g, s in zip(grads, z, strict=True) if g.requires_grad]
        self.stop()
        if not curved:
            return {}
        with torch.enable_grad():
            bends = torch.autograd.grad(
                [g for g, _ in curved], params, [s for _, s in curved], materialize_grads=True
            )
        return {p: (s * b).to(state_dtype(p)) for p, s, b in zip(params, z, bends, strict=True)}
