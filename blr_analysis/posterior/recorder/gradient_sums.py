"""The gradient of an example, added up over the passes with drawn labels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.half import working
from blr_analysis.posterior.recorder.second_pass import SecondPass


class GradientSums:
    """Σ over recorded passes of an example's mean gradient, by hooks on the parameters.

    Args:
        parameters: of the model, by name.
        second_pass: whose gradients are not added.

    Attributes:
        sums: by parameter.
        scale: from a parameter's gradient to that of an example; None: gradients are left alone.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], second_pass: SecondPass) -> None:
        self._parameters = parameters
        self._second_pass = second_pass
        self.sums: dict[str, Tensor] = {}
        self.scale: float | None = None
        self._handles: list[Any] = []

    def watch(self, is_watched: bool) -> None:
        """Put hooks on the parameters, or remove them: they cost time in passes that are not
        recorded."""
        if is_watched and not self._handles:
            for name, parameter in self._parameters.items():
                self._handles.append(parameter.register_hook(partial(self._add, name)))
        while self._handles and not is_watched:
            self._handles.pop().remove()

    def _add(self, name: str, gradient: Tensor) -> None:
        if self.scale is None or self._second_pass.is_running:
            return
        gradient = gradient.detach()
        if name not in self.sums:
            wide = working(gradient.dtype)
            self.sums[name] = torch.zeros_like(gradient, dtype=wide)
        self.sums[name].add_(gradient, alpha=self.scale)

    def mean(self, recorded: int) -> dict[str, Tensor] | None:
        """The mean over so many passes; None where some parameter was not recorded."""
        if self.sums.keys() != self._parameters.keys():
            return None
        return {name: self.sums[name] / recorded for name in self._parameters}
