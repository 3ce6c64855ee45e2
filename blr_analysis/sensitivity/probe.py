"""A probe of a few examples that stands for the whole data: how it is drawn, what it says."""

from __future__ import annotations

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunking, chunks
from blr_analysis.errors import PosteriorError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.sensitivity.corrections import bound_of, check_finite, left_out_by
from blr_analysis.task import Task

UNIFORM = 0.1  # of the chances are shared out equally, whatever the estimate says


def draw(rise: Tensor, count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Examples at random, and w_i = 1/π_i: the chances π_i grow with the estimated rise.

    A tenth of the chances is shared out equally. Systematic sampling in a random order: the
    chances are exact, and no example comes twice.
    """
    size = rise.clamp_min(0)
    if not float(size.sum()) > 0:
        raise PosteriorError(
            "no example's loss would rise without it: all prediction errors are 0, and nothing "
            "tells the posterior's scale"
        )
    size = (1 - UNIFORM) * size / size.sum() + UNIFORM / len(size)
    chance = _chances(size, count)
    source = torch.Generator().manual_seed(0) if generator is None else generator
    order = torch.randperm(len(size), generator=source, device=source.device).cpu()
    start = torch.rand(1, generator=source, device=source.device, dtype=torch.float64).cpu()
    steps = (chance[order].cumsum(0) + start).floor()
    steps[-1] = max(float(steps[-1]), float(count))  # rounding
    hit = torch.diff(steps, prepend=torch.zeros(1, dtype=torch.float64)) >= 1
    chosen = order[hit].sort().values
    return chosen, 1 / chance[chosen]


def _chances(size: Tensor, count: int) -> Tensor:
    """π_i = min(1, c · size_i) with Σ π_i = count."""
    sure = torch.zeros_like(size, dtype=torch.bool)
    for _ in range(len(size)):
        left = count - int(sure.sum())
        rest = size[~sure].sum()
        chance = torch.where(sure, 1.0, left * size / rest if left else torch.zeros_like(size))
        over = (chance >= 1) & ~sure
        if not bool(over.any()):
            return chance
        sure |= over
    return torch.ones_like(size)


class Estimate:
    """r_i(τ) of the probe, ``[K]`` in float64."""

    def __init__(
        self, task: Task, q: Posterior, chosen: Tensor, word: str, chunking: Chunking
    ) -> None:
        parts = []
        for chunk in chunks(task, q.mean, chunking, indices=chosen):
            v = q.form.gram(chunk.jacobian_terms())
            check_finite(v)
            parts.append(tuple(t.cpu() for t in (chunk.outputs, chunk.targets, v)))
        f, y, v = (torch.cat(p) for p in zip(*parts, strict=True))
        self._likelihood = task.likelihood.at(chosen)
        self._outputs, self._variance = f.double(), v.double()
        self._targets = y.double() if y.is_floating_point() else y
        self._word, self._bound = word, bound_of(q)
        self._before = self._likelihood.nll(self._outputs, self._targets)

    def rise(self, outputs: Tensor) -> Tensor:
        """The loss at these outputs over the one before, in nats."""
        return self._likelihood.nll(outputs.double(), self._targets) - self._before

    def __call__(self, scale: float) -> Tensor:
        v = scale * self._variance
        after, _, _ = left_out_by(
            self._word, self._outputs, self._targets, v, self._likelihood, self._bound
        )
        return self.rise(after)
