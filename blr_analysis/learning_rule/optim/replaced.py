"""Rows whose loss sees other weights than those that the optimizer moves.

Straight-through estimation shows the loss the signs of real numbers, BayesBiNN relaxed signs,
dropout the weights of the units that are kept. What they share is here: weights w made of the
parameters θ for the time of a context, a factor that turns the gradient at w into that of θ, and
everything else as in :class:`~blr_analysis.learning_rule.optim.RowOptimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.optim.draws import Draw
from blr_analysis.learning_rule.optim.row_optimizer import RowOptimizer

Group = Mapping[str, Any]
Look = Callable[[Tensor, Group, torch.Generator | None], tuple[Tensor, Tensor | None]]
"""(θ, group, generator) → what the loss sees, and the factor of its gradient (None: 1)."""


@dataclass
class Replaced(Draw):
    """The weights that ``look`` makes of θ; of θ + noise with ``noisy``."""

    look: Look | None = None
    noisy: bool = False
    factors: dict[Tensor, Tensor] = field(default_factory=dict)
    settings: dict[Tensor, Group] = field(default_factory=dict)
    generator: torch.Generator | None = None

    def fill(self, groups: Any, state: Any, buffers: Any, generator: Any) -> None:
        self.generator = generator
        self.settings = {p: group for group in groups for p in group["params"] if p.requires_grad}
        if self.noisy:
            super().fill(groups, state, buffers, generator)
            return
        self.params = list(self.settings)
        self.methods = [group["hess_approx"] for group in self.settings.values()]
        self.means = [p.detach().clone() for p in self.params]

    def perturb(self) -> None:
        if self.noisy:
            super().perturb()
        assert self.look is not None
        for param in self.params:
            seen, factor = self.look(param.detach(), self.settings[param], self.generator)
            param.copy_(seen)
            if factor is not None:
                self.factors[param] = factor

    def carry_gradients(self) -> None:
        """From the weights that the loss saw to θ; the squares g_i² of examples as well."""
        for param, factor in self.factors.items():
            if param.grad is not None and param.grad.layout is torch.strided:
                param.grad.mul_(factor)
            if param in self.given:
                self.given[param] = self.given[param] * factor


class ReplacingOptimizer(RowOptimizer):
    """A row under another look; derived classes say which.

    They write :meth:`_look` for training, :meth:`_sample` for draws of the posterior, and
    :meth:`_check` for the settings in ``_extra`` that every group has.
    """

    def __init__(self, params: Any, row: Any, lr: float, extra: Group, **settings: Any) -> None:
        self._extra = dict(extra)
        super().__init__(params, row, lr, **settings)

    def _look(
        self, theta: Tensor, group: Group, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def _sample(
        self, theta: Tensor, group: Group, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def _check(self, group: Group) -> None:
        """Raise :class:`InputError` for a group of parameters that cannot be used."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, with every setting and parameter checked (:class:`InputError`)."""
        if isinstance(param_group, dict) and not isinstance(param_group.get("params"), set):
            params = param_group["params"]
            params = [params] if isinstance(params, Tensor) else list(params)
            param_group = {**self._extra, **param_group, "params": params}
            held = [p[1] if isinstance(p, tuple) else p for p in params]
            self._check({**self.defaults, **param_group, "params": held})
        super().add_param_group(param_group)

    def _new_draw(self, train: bool, adoptable: bool) -> Draw:
        if train:
            return Replaced(True, adoptable, look=self._look, noisy=self._trains_with_noise)
        return Replaced(False, look=self._sample, noisy=self._samples_with_noise)

    @property
    def _trains_with_noise(self) -> bool:
        """Whether the row's own Gaussian noise is added in training."""
        return False

    @property
    def _samples_with_noise(self) -> bool:
        """Whether it is when weights are drawn from the posterior."""
        return False

    @contextmanager
    def _shown(self, look: Look) -> Iterator[None]:
        """The model with the weights that ``look`` makes; θ again after it."""
        if self._open is not None:
            raise OptimizerError("leave the first context before the weights are replaced again")
        draw = self._begin(Replaced(False, look=look))
        try:
            yield
            self._finish(draw)
        except BaseException:
            self._abandon(draw)
            raise

    def _restore(self, draw: Draw) -> None:
        super()._restore(draw)
        if draw.train and isinstance(draw, Replaced):
            draw.carry_gradients()

    def _step(self) -> None:
        if not self._gathered.count:
            raise OptimizerError(
                f"step() without a draw: {self.row.algorithm} takes its gradients at other weights "
                "than the parameters. Run forward and backward pass inside "
                "`with optimizer.sampled_params(train=True):`, or pass a closure"
            )
        super()._step()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_extra": self._extra}
