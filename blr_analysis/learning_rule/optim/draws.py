"""A draw: weights that the loss sees in the place of the mean, and how the mean comes back.

The weights are θ = m + ε with ε ~ N(0, 1/S), S = ess·(hess + weight_decay), or what a row's look
makes of them (a mask, a sign, an adversary). The mean comes back bit for bit.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blr_analysis.learning_rule.optim.blocks import PIECE, Scratch, for_blocks, group_by

SEEDS = 2**32
"""A CPU generator takes 32 bits of a seed."""

Group = Mapping[str, Any]
"""The settings of a group of parameters."""
Tensors = dict[Tensor, Tensor]
"""Tensors by parameter."""
Seen = tuple[Tensor, Tensor | None]
"""The weights that the loss sees in the place of θ, and the factor of their gradient (None: 1)."""
Look = Callable[[Tensor, Group, torch.Generator | None], Seen]
"""From a parameter θ, its settings and a generator to what the loss sees."""
Context = AbstractContextManager[None]


def fill_normal(
    flat: Tensor,
    noises: list[Tensor],
    hess: list[Tensor],
    group: Group,
    generator: torch.Generator | None,
) -> None:
    """Draw ε ~ N(0, 1 / (ess·(hess + weight_decay))) into ``noises``, the views of ``flat``.

    torch draws on one thread. Large noise on a CPU is therefore drawn in streams, one for each
    piece of memory. The generator gives their seeds, so that the noise does not depend on the
    number of threads.
    """
    std = group["ess"] ** -0.5
    decay = group["weight_decay"]
    in_streams = flat.device.type == "cpu" and flat.numel() > PIECE
    seed = 0
    if in_streams:
        device = "cpu" if generator is None else generator.device
        seed = int(torch.randint(SEEDS, (), generator=generator, device=device))
    elif generator is None or generator.device == flat.device:
        flat.normal_(0.0, std, generator=generator)
    else:  # one generator for parameters on several devices
        noise = torch.empty(flat.shape, dtype=flat.dtype, device=generator.device)
        flat.copy_(noise.normal_(0.0, std, generator=generator))

    def scale(noises: list[Tensor], hess: list[Tensor]) -> None:
        if in_streams:
            stream = torch.Generator()
            for piece in noises:
                stream.manual_seed((seed + int(piece.storage_offset())) % SEEDS)
                piece.normal_(0.0, std, generator=stream)
        root = torch._foreach_add(hess, decay)
        torch._foreach_rsqrt_(root)  # torch would split a square root over its threads
        torch._foreach_mul_(noises, root)

    for_blocks(scale, [noises, hess])


@dataclass
class Draw:
    """The weights that the loss sees, and what undoes them.

    They are a draw of q if the draw is ``noisy``, else the mean. A ``look`` changes them further.

    Attributes:
        train: whether the gradients at these weights belong to the next step.
        noisy: whether ε is added to the mean.
        look: what makes the weights that the loss sees; None: nothing.
        adoptable: marks the draw that ``step(closure)`` makes before it calls the closure: a
            context that the closure opens takes that draw instead of making its own.
        divided_by: what the loss was divided by.
        groups: the settings of each parameter.
        noises: ε of each parameter.
        means: m of each parameter, while its weights are others.
        factors: what the gradient is multiplied with, for parameters whose look has a factor.
        estimates: curvature estimates that are not computed from gradient and noise.
    """

    train: bool
    noisy: bool = False
    look: Look | None = None
    adoptable: bool = False
    divided_by: float = 1.0
    groups: dict[Tensor, Group] = field(default_factory=dict)
    noises: Tensors = field(default_factory=dict)
    means: Tensors = field(default_factory=dict)
    factors: Tensors = field(default_factory=dict)
    estimates: Tensors = field(default_factory=dict)

    def perturb(self, scratch: Scratch, generator: torch.Generator | None) -> None:
        """Store the means and put the weights of the draw in their place.

        ε is added in place and rounded once to the dtype of the weights; the look comes after it.
        """
        if self.noisy or self.look is not None:
            self._store_means(scratch)
        for_blocks(torch._foreach_add_, [[*self.noises], [*self.noises.values()]])
        if self.look is None:
            return
        for param, group in self.groups.items():
            weights, factor = self.look(param, group, generator)
            param.copy_(weights)
            if factor is not None:
                self.factors[param] = factor

    def _store_means(self, scratch: Scratch) -> None:
        for params in group_by(self.groups, lambda p: (p.device, p.dtype)).values():
            _, means = scratch.take("mean", params, params[0].dtype)
            for_blocks(torch._foreach_copy_, [means, params])
            self.means.update(zip(params, means, strict=True))

    def restore(self) -> None:
        """Put the means back; a second call, after an interrupt in between, does no harm."""
        for_blocks(torch._foreach_copy_, [[*self.means], [*self.means.values()]])
        self.means = {}

    def carry_gradients(self) -> None:
        """Turn the gradients at the draw's weights into those of the whole loss at θ.

        They are multiplied by the look's factor, and by what the loss was divided by. The factor
        multiplies curvature estimates as well.
        """
        for param in self.groups:
            factor = self.factors.get(param)
            if factor is not None and param in self.estimates:
                self.estimates[param] = self.estimates[param] * factor
            grad = param.grad
            if grad is None or grad.layout is not torch.strided:
                continue
            if factor is not None:
                grad.mul_(factor)
            if self.divided_by != 1:
                grad.mul_(self.divided_by)
