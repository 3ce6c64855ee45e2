"""What an example shaped while the model trained: its errors, averaged over the training's time.

Where curvature is so small that nothing was forgotten, an example's share in θ̂ is not its last
gradient but −∫ J_iᵀ e_i dt. Of classes, whose curvature falls as they are learned, the errors are
therefore averaged. Let the outputs go straight from f⁰ at θ₀, the prior's mean, to f: gradient flow
along θ₀ + s (θ̂ − θ₀) has ds/dt ∝ −Σ_i (f_i − f⁰_i)·e_i(s), the slope of the loss, so that

    ē_i = ∫₀¹ e_i(s) dt/ds ds / ∫₀¹ dt/ds ds,    e_i(s) the error at f⁰_i + s (f_i − f⁰_i)

What was learned by heart has an error again; at a minimum along the line ē is the error there.
Squared errors, whose curvature stays, are best as they are.

Source: Bae et al., "Training data attribution via approximate unrolling", NeurIPS 2024, where
gradients are averaged over segments of training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from blr_analysis.backprop.engine import Chunk
from blr_analysis.backprop.terms import slices
from blr_analysis.errors import BLRError
from blr_analysis.likelihoods import Bernoulli
from blr_analysis.likelihoods.categorical import Classes
from blr_analysis.posterior import Stage
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.stationarity import stationarity
from blr_analysis.posterior.structures import Tree
from blr_analysis.progress import track
from blr_analysis.sensitivity.corrections import at_weights
from blr_analysis.task import Task

AVERAGED = "of errors averaged over training"
POINTS = 16  # of Gauss and Legendre, on the line from the first outputs to the last
CACHED = 2**18  # numbers of outputs that are taken at once
SAMPLE = {True: 32, False: 1024}  # sequences, or examples, that tell the training's time


@dataclass(frozen=True)
class Averaged:
    """ē of a chunk, a cotangent.

    Attributes:
        start: θ₀.
        steps: s, and the share of the training's time that is spent there.
    """

    start: Tree
    steps: tuple[tuple[float, float], ...]

    def __call__(self, task: Task, chunk: Chunk) -> Tensor:
        return self.errors(task, chunk.indices, chunk.outputs, chunk.targets)

    def errors(self, task: Task, indices: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """ē of these examples, whose outputs and targets these are."""
        last, likelihood = outputs.detach(), task.likelihood.at(indices)
        with torch.no_grad(), task.evaluation():
            first, _ = task.run(task.fetch(indices), self.start, indices)
        if last.ndim > 2:  # sequences, which a chunk may have padded further
            first = pad(first, (0, 0, 0, last.shape[1] - first.shape[1]))
        mean, way = torch.zeros_like(last), last - first
        for part in _parts(last):
            for share, weight in self.steps:
                if weight:
                    errors = likelihood.error(first[part] + share * way[part], targets[part])
                    mean[part].add_(errors, alpha=weight)
        return mean


def training_errors(task: Task, q: Posterior, *, progress: bool | None = None) -> Averaged | None:
    """ē_i, of classifiers that were stopped off the minimum and whose δ was found by
    :func:`blr_analysis.fit_laplace`; None else."""
    about = q.record
    ours = about.get("source") == "laplace" and "prior_choice" in about and "expected" not in about
    if not ours or not isinstance(task.likelihood.kind, Classes | Bernoulli):
        return None
    if not at_weights(task, q) or stationarity(task, q).near:
        return None
    return averaged_errors(task, q, progress=progress)


def averaged_errors(task: Task, q: Posterior, *, progress: bool | None = None) -> Averaged | None:
    """ē_i; None where training gained nothing, or the model breaks down at θ₀."""
    start = q.prior.start(q.mean)
    nodes, weights = np.polynomial.legendre.leggauss(POINTS)
    shares, slopes = (nodes + 1) / 2, torch.zeros(POINTS, dtype=torch.float64)
    some = torch.linspace(0, task.n_data - 1, _sampled(task), dtype=torch.float64).round().long()
    try:
        with torch.no_grad(), task.evaluation():
            batches = some.split(task.batch_size)
            label = "training's time"
            for chosen in track(batches, total=len(batches), label=label, show=progress):
                batch, likelihood = task.fetch(chosen), task.likelihood.at(chosen)
                (first, y), (last, _) = (task.run(batch, w, chosen) for w in (start, q.mean))
                for part in _parts(last):
                    begun, way = first[part], last[part] - first[part]
                    for k, share in enumerate(shares):
                        errors = likelihood.error(begun + float(share) * way, y[part])
                        slopes[k] -= float(torch.linalg.vecdot(errors, way).double().sum())
    except BLRError:
        return None
    behind = (slopes <= 0).cumsum(0) > 0  # a minimum along the line: training does not go there
    time = torch.where(behind, 0.0, torch.from_numpy(weights) / slopes)
    if not bool(torch.isfinite(time).all()) or not float(time.sum()) > 0:
        return None
    return Averaged(start, tuple(zip(shares.tolist(), (time / time.sum()).tolist(), strict=True)))


def averaging_stages(task: Task) -> list[Stage]:
    """What they cost where they are taken, in forward passes, which are thirds of gradients."""
    if not isinstance(task.likelihood.kind, Classes | Bernoulli):
        return []
    return [
        Stage("training's time", _sampled(task), 2 / 3),
        Stage("first outputs", task.n_data, 1 / 3),
    ]


def _sampled(task: Task) -> int:
    return min(task.n_data, SAMPLE[task.likelihood.is_sequence])


def _parts(outputs: Tensor) -> Iterator[tuple[slice, ...]]:
    """Some positions of sequences at a time, whose numbers stay in the cache at all POINTS."""
    if outputs.ndim < 3:
        yield (slice(None),)
        return
    for some in slices(outputs.shape[1], CACHED // outputs[:, 0].numel()):
        yield slice(None), some
