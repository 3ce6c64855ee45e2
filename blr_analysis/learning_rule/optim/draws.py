"""One draw of the weights: show the loss others than the mean, put it back bit for bit."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blr_analysis.learning_rule.optim.blocks import PIECE, Buffers, for_blocks, group_by

GIVEN = ("ggn", "abs", "hutchinson")
"""Methods whose curvature estimate is not made of gradient and noise, but comes with the draw."""


def state_dtype(param: Tensor) -> torch.dtype:
    """Precision, momentum and noise are float32 where the weights are float16 or bfloat16.

    A step moves the precision by some 1e-5 of itself, which half precision cannot represent.

        >>> state_dtype(torch.zeros(1, dtype=torch.bfloat16)), state_dtype(torch.zeros(1).double())
        (torch.float32, torch.float64)
    """
    return torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype


Group = Mapping[str, Any]
Look = Callable[[Tensor, Group, torch.Generator | None], tuple[Tensor, Tensor | None]]
"""(θ, group, generator) → what the loss sees, and the factor of its gradient (None: 1)."""


@dataclass
class Draw:
    """The weights that the loss sees, and what undoes them.

    With ``noisy`` they are θ = m + ε, ε ~ N(0, 1/S), S = ess·(hess + weight_decay); ``look`` makes
    other weights of these; with neither they are the mean itself.

    ``train`` says whether the gradients there belong to the next step. ``adoptable`` marks the draw
    that ``step(closure)`` makes before it calls the closure: a context that the closure opens takes
    that draw instead of making its own. The loss was divided by ``divided_by``. ``given`` holds
    curvature estimates that are not made of gradient and noise. ``taken``: a parameter has left it.
    """

    train: bool
    adoptable: bool = False
    noisy: bool = True
    look: Look | None = None
    given: dict[Tensor, Tensor] = field(default_factory=dict)
    divided_by: float = 1.0
    closed: bool = False
    taken: bool = False
    generator: torch.Generator | None = None
    params: list[Tensor] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    noises: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    factors: dict[Tensor, Tensor] = field(default_factory=dict)
    noise_buffers: list[Tensor] = field(default_factory=list)
    mean_buffers: list[Tensor] = field(default_factory=list)

    def fill(
        self,
        groups: Iterable[Group],
        state: Mapping[Tensor, Mapping[str, Any]],
        buffers: Buffers,
        generator: torch.Generator | None,
    ) -> None:
        """Draw the noise and remember the means; nothing is perturbed yet."""
        self.generator = generator
        for group in groups:
            params = [p for p in group["params"] if p.requires_grad]
            if self.noisy:
                alike = group_by(params, lambda p: (p.device, state_dtype(p))).values()
                for some in alike:
                    flats, noises = buffers.take(some, state_dtype(some[0]))
                    self.noise_buffers += flats
                    _fill_normal(flats[0], noises, some, group, state, generator)
                    self.noises += noises
                params = [p for some in alike for p in some]
            self.params += params
            self.groups += [group] * len(params)
        if self.noisy or self.look is not None:
            self._remember(buffers)

    def _remember(self, buffers: Buffers) -> None:
        means: dict[Tensor, Tensor] = {}
        for params in group_by(self.params, lambda p: (p.device, p.dtype)).values():
            flats, views = buffers.take(params, params[0].dtype)
            self.mean_buffers += flats
            for_blocks(torch._foreach_copy_, [views, params])
            means.update(zip(params, views, strict=True))
        self.means = [means[p] for p in self.params]

    def evidence(self) -> list[tuple[Tensor, str, Tensor | None]]:
        """Parameter, method, and what the curvature estimate needs beside the gradient."""
        noises = dict(zip(self.params, self.noises, strict=False))
        evidence = []
        for param, group in zip(self.params, self.groups, strict=True):
            method = group["hess_approx"]
            source = self.given.get(param) if method in GIVEN else None
            evidence.append((param, method, noises[param] if method == "price" else source))
        return evidence

    def take(self, param: Tensor) -> Draw:
        """The draw of one parameter, which is at its mean again and belongs to this one no more."""
        place = next(k for k, p in enumerate(self.params) if p is param)
        own = Draw(True, noisy=self.noisy, look=self.look, divided_by=self.divided_by)
        for name in ("params", "groups", "noises", "means"):
            if held := getattr(self, name):
                setattr(own, name, [held.pop(place)])
        if param in self.factors:
            own.factors[param] = self.factors.pop(param)
        if own.means:
            param.copy_(own.means[0])
        own.carry_gradients()
        self.taken = True
        return own

    @property
    def numel(self) -> int:
        """Weights drawn."""
        return sum(noise.numel() for noise in self.noise_buffers)

    def perturb(self) -> None:
        """m → m + ε, in place, rounded once to the dtype of the weights; then what a look makes."""
        if self.noisy:
            _on_each_device(torch._foreach_add_, self.params, self.noises)
        if self.look is None:
            return
        for param, group in zip(self.params, self.groups, strict=True):
            seen, factor = self.look(param, group, self.generator)
            param.copy_(seen)
            if factor is not None:
                self.factors[param] = factor

    def restore(self, buffers: Buffers) -> None:
        """Put the means back; once more does no harm, when an interrupt came in between."""
        if self.closed:
            return
        if self.means:
            _on_each_device(torch._foreach_copy_, self.params, self.means)
        self.closed = True
        freed, self.mean_buffers, self.means = self.mean_buffers, [], []
        buffers.give(freed)

    def carry_gradients(self) -> None:
        """From the weights that the loss saw to θ; the squares g_i² of examples as well."""
        for param, factor in self.factors.items():
            if param.grad is not None and param.grad.layout is torch.strided:
                param.grad.mul_(factor)
            if param in self.given:
                self.given[param] = self.given[param] * factor
        if self.divided_by != 1:
            for param in self.params:
                if param.grad is not None:
                    param.grad.mul_(self.divided_by)


def _on_each_device(
    rule: Callable[..., object], targets: list[Tensor], sources: list[Tensor]
) -> None:
    pairs = zip(targets, sources, strict=True)
    for alike in group_by(pairs, lambda pair: pair[0].device).values():
        for_blocks(rule, [*zip(*alike, strict=True)])


def _fill_normal(
    flat: Tensor,
    noises: list[Tensor],
    params: list[Tensor],
    group: Group,
    state: Mapping[Tensor, Mapping[str, Any]],
    generator: torch.Generator | None,
) -> None:
    """ε ~ N(0, 1 / (ess·(hess + weight_decay))) into ``noises``, the views of ``flat``.

    torch draws on one thread. Large noise on a CPU is therefore drawn in streams, one for each
    piece of memory, whose seeds the generator gives: the same for any number of threads.
    """
    std, decay = group["ess"] ** -0.5, group["weight_decay"]
    seed = None
    if flat.device.type == "cpu" and flat.numel() > PIECE:
        where = "cpu" if generator is None else generator.device
        seed = int(torch.randint(2**32, (), generator=generator, device=where))
    elif generator is None or generator.device == flat.device:
        flat.normal_(0.0, std, generator=generator)
    else:  # one generator for parameters on several devices
        there = torch.empty(flat.shape, dtype=flat.dtype, device=generator.device)
        flat.copy_(there.normal_(0.0, std, generator=generator))

    def scale(noise: list[Tensor], hess: list[Tensor]) -> None:
        if seed is not None:
            stream = torch.Generator()
            for piece in noise:  # a CPU generator takes 32 bits of a seed
                stream.manual_seed((seed + piece.storage_offset()) % 2**32)
                piece.normal_(0.0, std, generator=stream)
        root = torch._foreach_add(hess, decay)
        torch._foreach_rsqrt_(root)  # torch would split a square root over its threads
        torch._foreach_mul_(noise, root)

    first = torch.full((), float(group["hess_init"]), dtype=flat.dtype, device=flat.device)
    # before its first step a parameter has the precision it was given
    hess = [held["hess"] if (held := state.get(p)) else first.expand(p.shape) for p in params]
    for_blocks(scale, [noises, hess])
