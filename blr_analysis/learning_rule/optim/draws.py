"""One draw of the weights: perturb them with posterior noise, put them back bit for bit."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blr_analysis.learning_rule.optim.blocks import Buffers, for_blocks, group_by

GIVEN = ("ggn", "abs")
"""Methods whose curvature estimate is not made of gradient and noise, but comes with the draw."""


def state_dtype(param: Tensor) -> torch.dtype:
    """Precision, momentum and noise are float32 where the weights are float16 or bfloat16.

    A step moves the precision by some 1e-5 of itself, which half precision cannot represent.

        >>> state_dtype(torch.zeros(1, dtype=torch.bfloat16)), state_dtype(torch.zeros(1).double())
        (torch.float32, torch.float64)
    """
    return torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype


@dataclass
class Draw:
    """Weights θ = m + ε with ε ~ N(0, 1/S), S = ess·(hess + weight_decay), and what undoes them.

    ``train`` says whether the gradients at θ belong to the next step. ``adoptable`` marks the draw
    that ``step(closure)`` makes before it calls the closure: a context that the closure opens takes
    that draw instead of making its own.
    """

    train: bool
    adoptable: bool = False
    closed: bool = False
    params: list[Tensor] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    noises: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    noise_buffers: list[Tensor] = field(default_factory=list)
    mean_buffers: list[Tensor] = field(default_factory=list)
    given: dict[Tensor, Tensor] = field(default_factory=dict)

    def fill(
        self,
        groups: Iterable[Mapping[str, Any]],
        state: Mapping[Tensor, Mapping[str, Any]],
        buffers: Buffers,
        generator: torch.Generator | None,
    ) -> None:
        """Draw the noise and remember the means; nothing is perturbed yet."""
        for group in groups:
            trainable = [p for p in group["params"] if p.requires_grad]
            for params in group_by(trainable, lambda p: (p.device, state_dtype(p))).values():
                flats, noises = buffers.take(params, state_dtype(params[0]))
                self.noise_buffers += flats
                _fill_normal(flats[0], group["ess"] ** -0.5, generator)
                _divide_by_root_hess(noises, params, group, state)
                self.params += params
                self.noises += noises
                self.methods += [group["hess_approx"]] * len(params)
        means: dict[Tensor, Tensor] = {}
        for params in group_by(self.params, lambda p: (p.device, p.dtype)).values():
            flats, views = buffers.take(params, params[0].dtype)
            self.mean_buffers += flats
            for_blocks(torch._foreach_copy_, [views, params])
            means.update(zip(params, views, strict=True))
        self.means = [means[p] for p in self.params]

    def sources(self) -> list[Tensor | None]:
        """Of every parameter, what its curvature estimate needs beside the gradient."""
        noises = dict(zip(self.params, self.noises, strict=False))
        return [
            noises[p] if method == "price" else self.given.get(p) if method in GIVEN else None
            for p, method in zip(self.params, self.methods, strict=True)
        ]

    @property
    def numel(self) -> int:
        """Weights drawn."""
        return sum(noise.numel() for noise in self.noise_buffers)

    def perturb(self) -> None:
        """m → m + ε, in place, rounded once to the dtype of the weights."""
        _on_each_device(torch._foreach_add_, self.params, self.noises)

    def restore(self, buffers: Buffers) -> None:
        """Put the means back; once more does no harm, when an interrupt came in between."""
        if self.closed:
            return
        _on_each_device(torch._foreach_copy_, self.params, self.means)
        self.closed = True
        freed, self.mean_buffers, self.means = self.mean_buffers, [], []
        buffers.give(freed)


def _on_each_device(
    rule: Callable[..., object], targets: list[Tensor], sources: list[Tensor]
) -> None:
    pairs = zip(targets, sources, strict=True)
    for alike in group_by(pairs, lambda pair: pair[0].device).values():
        for_blocks(rule, [*zip(*alike, strict=True)])


def _fill_normal(flat: Tensor, std: float, generator: torch.Generator | None) -> None:
    if generator is None or generator.device == flat.device:
        flat.normal_(0.0, std, generator=generator)
    else:  # one generator for parameters on several devices
        there = torch.empty(flat.shape, dtype=flat.dtype, device=generator.device)
        flat.copy_(there.normal_(0.0, std, generator=generator))


def _divide_by_root_hess(
    noises: list[Tensor],
    params: list[Tensor],
    group: Mapping[str, Any],
    state: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Divide ``noises`` by √(hess + weight_decay), in place."""
    decay = group["weight_decay"]
    known = [(n, state[p]["hess"]) for n, p in zip(noises, params, strict=True) if p in state]
    fresh = [n for n, p in zip(noises, params, strict=True) if p not in state]
    if fresh:  # before its first step a parameter has the precision it was given
        torch._foreach_div_(fresh, math.sqrt(group["hess_init"] + decay))

    def divide(noise: list[Tensor], hess: list[Tensor]) -> None:
        root = torch._foreach_add(hess, decay)
        torch._foreach_sqrt_(root)
        torch._foreach_div_(noise, root)

    for_blocks(divide, [[n for n, _ in known], [h for _, h in known]])
