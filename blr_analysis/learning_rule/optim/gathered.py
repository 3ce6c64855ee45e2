"""The gradients and curvatures of all draws since the last step.

After one draw nothing is copied: the gradient is ``p.grad`` itself, and the noise stays until the
step multiplies the two. What happens to ``p.grad`` in between (``GradScaler.unscale_``,
``clip_grad_norm_``) therefore acts on the curvature estimate noise·gradient as well.

From the second draw on there are means with memory of their own, and ``p.grad`` has a copy of the
mean gradient. Where that copy is changed before the step, the mean gradient becomes the copy, and
the curvature is scaled: by the ratio of the norms of that parameter's gradient after and before,
to the power in which the estimate depends on the gradient (:data:`DEGREES`). An estimate that comes
with the draw (:data:`WITH_DRAW`) has memory of its own from the first draw on.
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
"""Methods whose curvature estimate comes with the draw, not from gradient and noise."""
DEGREES = {"price": 1, "abs": 1, "gradsq": 2, "ggn": 2, "none": 2}
"""The power of the gradient's scale in the curvature estimate, by method."""
POWER_OF_LARGEST = 0.3
"""A gradient's norm stays below the largest number to this power (4e11 in single precision), so
that curvature estimates, which are squared and multiplied by ess, do not overflow."""
SUMMATION_ERROR = 1e-6
"""Two norms that differ by less, relatively, may be of one gradient, summed in another order."""


class Gathered:
    """Gradients and curvatures, by parameter.

    Attributes:
        method: how the curvature is estimated: "price", "gradsq", "ggn", "abs" or "none".
        count: the number of draws.
        averaged: whether gradients and curvatures are means with memory of their own.
        grads: the mean gradients; after one draw ``p.grad`` itself.
        sources: the mean curvatures; after one draw its noise, or the estimate that came with it.
    """

    def __init__(self, method: str) -> None:
        self.method = method
        self.count = 0
        self.averaged = False
        self.grads: Tensors = {}
        self.sources: Tensors = {}
        self._versions: list[int] = []  # of the gradients of one draw

    def begin(self) -> None:
        """Called before another draw: ``p.grad``, which has the mean so far, is cleared."""
        if self.count == 1 and self._zeroed_in_place():
            raise OptimizerError("gradients were zeroed in place: zero_grad(set_to_none=True)")
        self.settle()
        for param in self.grads:
            param.grad = None

    def _zeroed_in_place(self) -> bool:
        """Whether every gradient of the single draw was written to, and is 0 now."""
        versions = zip(self.grads.values(), self._versions, strict=False)
        return all(g._version != version and not g.any() for g, version in versions)

    def settle(self, one_too: bool = True) -> None:
        """Carry over what the user did to ``p.grad``.

        A gradient that the user put in its place is taken, unless it is 0. ``one_too``: whether a
        single draw becomes a mean with memory of its own.
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
        """Carry changes of the copies ``shown``, which stand in ``p.grad``, over to the means.

        Values are compared: torch does not count ``unscale_`` and ``p.grad.data`` as writes.
        """
        by_kind = group_by(shown, lambda p: (p.device, p.dtype))
        for (_, dtype), params in by_kind.items():
            means = [self.grads[p].to(dtype) for p in params]
            before = torch._foreach_norm(means, 2, working(dtype))
            now = torch._foreach_norm([shown[p] for p in params], 2, working(dtype))
            ratios = (torch.stack(now) / torch.stack(before)).tolist()
            for param, ratio in zip(params, ratios, strict=True):
                if 0 < ratio < math.inf and abs(ratio - 1) >= SUMMATION_ERROR:
                    self.grads[param].copy_(shown[param])
                    self._scale_curvature(param, ratio)

    def _scale_curvature(self, param: Tensor, factor: float) -> None:
        """Scale a curvature to that of a gradient that is ``factor`` times as long."""
        if param in self.sources:
            self.sources[param].mul_(factor ** DEGREES[self.method])

    def _curvatures(self, grads: Tensors, sources: Tensors) -> Tensors:
        """The curvature estimates of one draw, from its gradients and its noise."""
        if self.method == "gradsq":
            return {p: g * g for p, g in grads.items()}
        if self.method == "price":
            return {p: g * sources[p] for p, g in grads.items()}
        return sources

    def add(self, draw: Draw) -> None:
        """Add a draw, whose gradients are now in ``p.grad``.

        Raises:
            NoGradient: no parameter has a gradient.
            OptimizerError: a gradient is sparse.
        """
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
        """Move one mean toward the new value, which is 0 where ``new`` lacks the parameter."""
        if param not in means:
            return
        mean = means[param]
        value = new[param] if param in new else torch.zeros_like(mean)
        mean.lerp_(value, 1 / (self.count + 1))

    def add_zeros(self, param: Tensor) -> None:
        """Begin the means of a parameter that had no gradient so far, at 0."""
        if param not in self.grads:
            self.grads[param] = torch.zeros_like(param, dtype=working(param.dtype))
            if self.method != "none":
                self.sources[param] = torch.zeros_like(self.grads[param])

    def show(self) -> None:
        """Copy the mean gradient into ``p.grad``, for ``unscale_`` and ``clip_grad_norm_``."""
        for param, grad in self.grads.items():
            if param.grad is None:
                param.grad = torch.empty_like(param)
            if param.grad is not grad:
                param.grad.detach().copy_(grad)

    def drop(self, draw: Draw) -> None:
        """Forget the gradients of ``draw``: ``p.grad`` becomes the mean of the earlier draws."""
        if draw.train:
            for param in draw.groups:
                param.grad = None
            self.show()

    def check(self, inverse_scale: float) -> None:
        """Refuse a gradient that is not finite, or larger than :data:`POWER_OF_LARGEST` allows."""
        by_kind = group_by(self.grads, lambda p: (p.device, p.dtype))
        for (_, dtype), params in by_kind.items():
            wide = working(dtype)
            grads = [self.grads[p].detach() for p in params]
            norms = torch.stack(torch._foreach_norm(grads, 2, wide)) * inverse_scale
            largest = torch.finfo(wide).max ** POWER_OF_LARGEST
            is_usable = (norms < largest).tolist()
            if not all(is_usable):
                shape = tuple(params[is_usable.index(False)].shape)
                raise OptimizerError(
                    f"the gradient of shape {shape} holds NaN or inf, or may overflow: lower lr, "
                    "or clip"
                )

    def average_over_ranks(self, params: Sequence[Tensor], inverse_scale: float) -> None:
        """Average gradients and curvatures, which are means over the draws, over the processes.

        ``params`` are the same on every process. Where a parameter has a gradient on some processes
        only, it counts as 0 on the others. ``inverse_scale`` undoes the loss scale of the process.
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
    """The mean of each number over the processes."""
    sums = torch.tensor(numbers, dtype=torch.float64, device=device)
    ranks.total([sums])
    return (sums / ranks.count()).tolist()
