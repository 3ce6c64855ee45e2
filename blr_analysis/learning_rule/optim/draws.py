"""A draw: other weights than the mean, which the loss sees, and the way back.

θ = m + ε with ε ~ N(0, 1/S), S = ess·(hess + weight_decay), or what a row's look makes of the
weights (a mask, a sign, an adversary). The mean comes back bit for bit.
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
"""By parameter."""
Seen = tuple[Tensor, Tensor | None]
"""What the loss sees in the place of θ, and the factor of its gradient (None: 1)."""
Look = Callable[[Tensor, Group, torch.Generator | None], Seen]
Context = AbstractContextManager[None]


def fill_normal(
    flat: Tensor,
    noises: list[Tensor],
    hess: list[Tensor],
    group: Group,
    generator: torch.Generator | None,
) -> None:
    """ε ~ N(0, 1 / (ess·(hess + weight_decay))) into ``noises``, the views of ``flat``.

    torch draws on one thread. Large noise on a CPU is therefore drawn in streams, one for each
    piece of memory, whose seeds the generator gives: the same for any number of threads.
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
    """The weights that the loss sees, and what undoes them; all by parameter.

    With ``noisy`` they are a draw of q; ``look`` makes other weights of these; with neither they
    are the mean itself.

    Attributes:
        train: whether the gradients there belong to the next step.
        adoptable: marks the draw that ``step(closure)`` makes before it calls the closure: a
            context that the closure opens takes that draw instead of making its own.
        divided_by: what the loss was divided by.
        groups: the settings of each parameter.
        noises: ε. ``means``: m, while the weights are others.
        factors: of the gradient, where the look has one.
        estimates: curvature that is not made of gradient and noise.
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
        """Keep the means; m → m + ε, in place, rounded once to the dtype of the weights; then what
        the look makes of that."""
        if self.noisy or self.look is not None:
            self._keep_means(scratch)
        for_blocks(torch._foreach_add_, [[*self.noises], [*self.noises.values()]])
        if self.look is None:
            return
        for param, group in self.groups.items():
            weights, factor = self.look(param, group, generator)
            param.copy_(weights)
            if factor is not None:
                self.factors[param] = factor

    def _keep_means(self, scratch: Scratch) -> None:
        for params in group_by(self.groups, lambda p: (p.device, p.dtype)).values():
            _, means = scratch.take("mean", params, params[0].dtype)
            for_blocks(torch._foreach_copy_, [means, params])
            self.means.update(zip(params, means, strict=True))

    def restore(self) -> None:
        """Put the means back; a second call, after an interrupt in between, does no harm."""
        for_blocks(torch._foreach_copy_, [[*self.means], [*self.means.values()]])
        self.means = {}

    def carry_gradients(self) -> None:
        """From the weights that the loss saw to θ, and from its part of the loss to the whole; the
        squares g_i² of examples as well."""
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
