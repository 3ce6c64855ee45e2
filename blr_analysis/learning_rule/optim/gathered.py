"""The gradients and curvatures of all draws since the last step.

After one draw nothing is copied: the gradient is ``p.grad`` itself, and the noise is kept until the
step multiplies the two. So whatever happens to ``p.grad`` in between (``GradScaler.unscale_``,
``clip_grad_norm_``) holds for the curvature estimate noise·gradient as well. From the second draw
on there are means with memory of their own, and ``p.grad`` shows a copy of the mean gradient. A
change of that copy before the step is carried over: the gradient as it stands, the curvature by the
factor by which the norm of that parameter's gradient changed, to the power in which the estimate
depends on the gradient (:data:`DEGREES`). An estimate that comes with the draw (:data:`WITH_DRAW`)
has memory of its own from the first draw on.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.errors import OptimizerError
from blr_analysis.half import working
from blr_analysis.learning_rule.optim.blocks import group_by
from blr_analysis.learning_rule.optim.draws import Draw, Tensors
from blr_analysis.learning_rule.optim.per_example import NO_GRADIENT, NoGradient

WITH_DRAW = ("ggn", "abs")
"""Methods whose curvature estimate is not made of gradient and noise, but comes with the draw."""
DEGREES = {"price": 1, "abs": 1, "gradsq": 2, "ggn": 2, "none": 2}
"""By method: the power of the gradient's scale in the curvature estimate."""
ROOM = 0.3
"""A gradient's norm stays below the largest number to this power (4e11 in single precision), so
that curvature estimates, which are squared and multiplied by ess, do not overflow."""
SUMMATION = 1e-6
"""Relative: norms of one gradient that differ by less differ by the order of summation."""


class Gathered:
    """Gradients and curvatures, by parameter.

    Attributes:
        method: what the curvature is made of: "price", "gradsq", "ggn", "abs" or "none".
        count: of draws.
        averaged: whether these are means with memory of their own.
        grads: of one draw ``p.grad`` itself.
        sources: of one draw the noise, or what came with it; else the mean curvature.
    """

    def __init__(self, method: str) -> None:
        self.method = method
        self.count = 0
        self.averaged = False
        self.grads: Tensors = {}
        self.sources: Tensors = {}
        self._versions: list[int] = []  # of the gradients of one draw

    def begin(self) -> None:
        """Before another draw: ``p.grad``, which shows the earlier ones, is cleared."""
        if self.count == 1 and self._zeroed_in_place():
            raise OptimizerError("gradients were zeroed in place: zero_grad(set_to_none=True)")
        self.settle()
        for param in self.grads:
            param.grad = None

    def _zeroed_in_place(self) -> bool:
        """Whether every gradient of the one draw was written to, and is 0 now."""
        versions = zip(self.grads.values(), self._versions, strict=False)
        return all(g._version != version and not g.any() for g, version in versions)

    def settle(self, one_too: bool = True) -> None:
        """Carry over what was done to ``p.grad``: gradients that someone put in its place, zeros
        excepted, hold as well. With ``one_too`` a single draw becomes a mean of its own memory.
        """
        shown = {p: p.grad.detach() for p in self.grads if p.grad is not None}
        if self.averaged:
            self._carry_over(shown)
            return
        for param, grad in shown.items():
            if param.grad is not self.grads[param] and bool(grad.any()):
                self.grads[param] = grad
        if one_too:
            self.grads = {p: g.to(working(p.dtype), copy=True) for p, g in self.grads.items()}
            self.sources = self._curvatures(self.grads, self.sources)
            self.averaged = bool(self.grads)

    def _carry_over(self, shown: Tensors) -> None:
        """From the copies that ``p.grad`` shows to the means.

        Values are compared because ``unscale_`` and ``p.grad.data`` do not count as writing.
        """
        for (_, dtype), params in group_by(shown, lambda p: (p.device, p.dtype)).items():
            means = [self.grads[p].to(dtype) for p in params]
            before = torch._foreach_norm(means, 2, working(dtype))
            now = torch._foreach_norm([shown[p] for p in params], 2, working(dtype))
            ratios = (torch.stack(now) / torch.stack(before)).tolist()
            for param, ratio in zip(params, ratios, strict=True):
                if 0 < ratio < math.inf and abs(ratio - 1) >= SUMMATION:
                    self.grads[param].copy_(shown[param])
                    self._scale_curvature(param, ratio)

    def _scale_curvature(self, param: Tensor, factor: float) -> None:
        """As it depends on a gradient that is ``factor`` times as long."""
        if param in self.sources:
            self.sources[param].mul_(factor ** DEGREES[self.method])

    def _curvatures(self, grads: Tensors, sources: Tensors) -> Tensors:
        """The estimates of one draw."""
        if self.method == "gradsq":
            return {p: g * g for p, g in grads.items()}
        if self.method == "price":
            return {p: g * sources[p] for p, g in grads.items()}
        return sources

    def add(self, draw: Draw) -> None:
        """The gradients now in ``p.grad`` are those at ``draw``."""
        grads = {p: p.grad for p in draw.groups if p.grad is not None}
        if not grads:
            raise NoGradient(NO_GRADIENT)
        if any(g.layout is not torch.strided for g in grads.values()):
            raise OptimizerError("a gradient is sparse: build the layer with sparse=False")
        sources = draw.noises if self.method == "price" else draw.estimates
        if self.count:
            self._average(grads, sources)
        else:
            self.grads = grads
            self.sources = {p: sources[p] for p in grads if p in sources}
            self._versions = [g._version for g in grads.values()]
            if self.method in WITH_DRAW:
                self.settle()
        self.count += 1

    def _average(self, grads: Tensors, sources: Tensors) -> None:
        """mean ← mean + (new − mean)/k; a parameter without a gradient contributes zeros."""
        new_grads = {p: g.detach().to(working(p.dtype)) for p, g in grads.items()}
        new_curvatures = self._curvatures(new_grads, sources)
        for param in {**grads, **self.grads}:
            self.add_zeros(param)
            self._move_mean(self.grads, new_grads, param)
            self._move_mean(self.sources, new_curvatures, param)
        self.show()

    def _move_mean(self, means: Tensors, new: Tensors, param: Tensor) -> None:
        if param not in means:
            return
        mean = means[param]
        value = new[param] if param in new else torch.zeros_like(mean)
        mean.lerp_(value, 1 / (self.count + 1))

    def add_zeros(self, param: Tensor) -> None:
        """For a parameter that had no gradient so far."""
        if param not in self.grads:
            self.grads[param] = torch.zeros_like(param, dtype=working(param.dtype))
            if self.method != "none":
                self.sources[param] = torch.zeros_like(self.grads[param])

    def show(self) -> None:
        """Let ``p.grad`` hold the mean gradient, for ``unscale_`` and ``clip_grad_norm_``."""
        for param, grad in self.grads.items():
            if param.grad is None:
                param.grad = torch.empty_like(param)
            if param.grad is not grad:
                param.grad.detach().copy_(grad)

    def drop(self, draw: Draw) -> None:
        """The body of ``draw`` failed: the gradients go back to those of the earlier draws."""
        if draw.train:
            for param in draw.groups:
                param.grad = None
            self.show()

    def check(self, inverse_scale: float) -> None:
        """Refuse a gradient that is not finite, or larger than :data:`ROOM` allows."""
        for (_, dtype), params in group_by(self.grads, lambda p: (p.device, p.dtype)).items():
            wide = working(dtype)
            grads = [self.grads[p].detach() for p in params]
            norms = torch.stack(torch._foreach_norm(grads, 2, wide)) * inverse_scale
            usable = (norms < torch.finfo(wide).max ** ROOM).tolist()
            if not all(usable):
                shape = tuple(params[usable.index(False)].shape)
                raise OptimizerError(
                    f"the gradient of shape {shape} holds NaN or inf, or may overflow: lower lr, "
                    "or clip"
                )

    def average_over_ranks(self, params: Sequence[Tensor], inverse_scale: float) -> None:
        """Mean gradient and curvature over the processes, once averaged over the draws.

        ``params`` are the same on every process. One that has a gradient on some processes only
        counts as zero on the others.
        """
        shares = mean_over_ranks([p in self.grads for p in params], params[0].device)
        reduced: list[Tensor] = []
        for param in compress(params, shares):
            self.add_zeros(param)
            self.grads[param].mul_(inverse_scale)
            self._scale_curvature(param, inverse_scale)
            reduced.append(self.grads[param])
            if param in self.sources:
                reduced.append(self.sources[param])
        ranks.total(reduced)
        torch._foreach_div_(reduced, ranks.count())


def mean_over_ranks(numbers: Sequence[float], device: torch.device) -> list[float]:
    """The processes' mean of each number."""
    sums = torch.tensor(numbers, dtype=torch.float64, device=device)
    ranks.total([sums])
    return (sums / ranks.count()).tolist()
