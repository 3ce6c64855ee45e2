"""The scale of a posterior, checked against exact solves on a probe of examples.

    V ← τ V, that is S ← S / τ, with τ such that  Σ_i w_i r_i(τ) ψ(log r_i − log r_i(τ)) = 0

r_i(τ): what leave-one-out with τ V_i says that example i's own loss rises by without it.
r_i: the same by a descent on all other examples, or by an exact solve, the cavity with all other
examples' whole curvature (:mod:`blr_analysis.sensitivity.removal`). The sum stands for the
total over all N examples: the probe is drawn at random with chances π_i that grow with the
estimated rise, and w_i = 1/π_i (Horvitz & Thompson, 1952), so that the examples that make up the
total are in the probe. ψ(x) = min(½, max(−½, x)) (Huber, 1964) is a mean over the examples that
agree within a factor of 1.6 and a median over the others, such as those whose removal leads to
another optimum.

It repairs the scale of a structure, not its ranking.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunking, chunks
from blr_analysis.backprop.products import KINDS
from blr_analysis.checks import instance, one_of, positive_int
from blr_analysis.data import distinct_indices
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.posterior.gaussian import Posterior, made_of
from blr_analysis.posterior.prior import scale_of
from blr_analysis.posterior.stationarity import stationarity
from blr_analysis.sensitivity.corrections import (
    bound_of,
    left_out_by,
    prediction_variance,
    self_influence,
    taken,
)
from blr_analysis.sensitivity.leave_one_out import CORRECTIONS, leave_one_out
from blr_analysis.sensitivity.removal import (
    UNTIL_REST,
    Removals,
    descended_removals,
    exact_removals,
)
from blr_analysis.sensitivity.scores import Scores, fitted
from blr_analysis.task import Task

WAYS = ("auto", "descent", *KINDS)
UNIFORM = 0.1  # of the probe's chances are shared out equally, whatever the estimate says
AGREEING = 0.5  # |log ratio| up to which ψ is linear
WIDEST = 64.0  # |log τ| that is searched
HALVINGS = 70
NEARBY = 0.01  # in log τ: over which slopes are taken


@torch.inference_mode(False)  # also where the caller switched it on
def calibrate(
    task: Task,
    posterior: Posterior,
    probe: int = 32,
    *,
    correction: str = "auto",
    kind: str = "auto",
    indices: Any = None,
    generator: torch.Generator | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = 200,
    scores: Scores | None = None,
    memory_budget: int | None = None,
    progress: bool | None = None,
) -> Posterior:
    """The same posterior, its scale checked by exact solves on a random probe of examples.

    Costs one leave-one-out of the whole data (none with ``indices``, less with ``scores``) and, for
    each probe example, at most 40 passes over the data by descent, or two for each iteration of
    conjugate gradients, of which the posterior, as preconditioner, lets few suffice, or (of up
    to 4,096 parameters with few outputs) the exact Gauss–Newton matrix, built in one pass. A
    descent ends where 1e-4 of its first decrement is left (1e-6 without that matrix).

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data.
        probe: how many examples, at random; those with a larger estimated rise are likelier.
        correction: the leave-one-out that τ is for, see :func:`blr_analysis.leave_one_out`;
            it is kept, as what "auto" means for the calibrated posterior.
        kind: how the probe is left out. "descent": by quasi-Newton moves on the other examples,
            at most 40 passes each, with nothing linearised: the nearest to retraining, for a
            model at the minimum of its own objective. "ggn": by conjugate gradients with the
            Gauss–Newton matrix (always positive; it leaves a "full" posterior of it as it is).
            "hessian": the same with the loss's own curvature; at an optimum only, examples
            without which it is not positive are left out. "auto": "descent" where the model is
            at its minimum (checked by one pass), else "ggn"; the record says which.
        indices: examples to use as the probe instead, all with equal weight.
        generator: the source of the probe; None: the same probe each time.
        tolerance: relative residual of the conjugate gradients.
        max_iterations: of conjugate gradients at most; what has not converged by then is used
            as it is, warned of, and marked in the record.
        scores: what ``sensitivity(task, posterior)`` gave, with its variance.

    Returns:
        A posterior of the same structure with V ← τV (S ← S/τ; the prior within S is divided
        too, while ``prior_precision`` stays the objective's δ). Its ``record["calibration"]``,
        saved with it, holds

        * ``scale`` τ (of the posterior as it was first captured or fitted), and
          ``standard_error`` of log τ, from the choice of the probe;
        * ``spread``: half the width of the middle two thirds of log(exact / calibrated) over
          the probe: how far single examples are off, which no scale repairs;
        * ``total_error``: standard error of the calibrated total, relative to the total;
        * ``correction``, ``kind``;
        * ``unchecked``: None, or why the scale says nothing of retraining: off the minimum the
          exact curvature is compared with the posterior's alone;
        * by example ``probe`` (indices), ``weight`` w_i, ``exact`` r_i, ``estimated`` r_i(1),
          ``calibrated`` r_i(τ) in nats, ``residual``, ``converged``;
        * ``iterations``, ``passes`` over the data.

        :func:`blr_analysis.tables.calibration_table` puts the probe into a table.

    Raises:
        InputError: a probe of less than 1 or more than N examples, indices named twice, the cavity
            of sequences, whose r_i(τ) is τ g_iᵀ Σ g_i.
        PosteriorError: a probe that says nothing about the scale (no prediction error), or none
            of whose solves can be used.
        DataError, ModelError: NaN in the data or outputs, as :func:`blr_analysis.sensitivity`.

    Warns:
        RuntimeWarning: solves that did not converge, or that are left out of the fit because
            the curvature without the example is not positive.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 3), torch.randn(60)
        >>> task = blr.Task(torch.nn.Linear(3, 1), (X, y), likelihood="gaussian")
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0, progress=False)
        >>> wrong = blr.Posterior(q.mean, q.form.plus(q.form, 2.0), prior_precision=1.0, n_data=60)
        >>> better = calibrate(task, wrong, probe=16, progress=False)
        >>> round(better.record["calibration"]["scale"], 3)
        3.0
    """
    one_of("correction", correction, CORRECTIONS)
    one_of("kind", kind, WAYS)
    positive_int("probe", probe)
    if generator is not None:
        instance("generator", generator, torch.Generator, "a torch.Generator")
    q = fitted(task, posterior)
    chunking = Chunking(None, memory_budget, progress)
    sequential = task.likelihood.is_sequence
    word = taken(q, "first_order" if sequential and correction == "auto" else correction)
    if sequential and word == "cavity":
        raise InputError('sequences have no cavity; use correction="first_order"')
    if indices is None:
        if probe > task.n_data:
            raise InputError(f"probe={probe} of {task.n_data} examples; ask for as many at most")
        loo = leave_one_out(
            task,
            posterior,
            correction=word,
            scores=scores,
            memory_budget=memory_budget,
            progress=progress,
        )
        chosen, weight = draw((loo.losses - loo.losses_before).double(), probe, generator)
    else:
        chosen = torch.tensor(distinct_indices(indices, task.n_data, labels=task.examples.labels))
        weight = torch.full((len(chosen),), task.n_data / len(chosen), dtype=torch.float64)
    exact = None
    if kind in ("auto", "descent"):
        exact = descended_removals(task, q, chosen, passes=UNTIL_REST, progress=progress)
        if kind == "auto" and float(exact.indefinite.double().mean()) > 0.5:
            exact = None
        kind = "descent" if exact is not None else "ggn"
    if exact is None:
        exact = exact_removals(
            task,
            q,
            chosen,
            kind=kind,
            tolerance=tolerance,
            max_iterations=max_iterations,
            chunking=chunking,
        )
    kept = SequenceEstimate if sequential else Estimate
    estimate = kept(task, q, chosen, word, chunking.quiet)
    rise = estimate.rise(exact.outputs)
    usable = _usable(exact, rise, estimate(1.0))
    scale = matching(estimate, weight, rise, usable)
    unchecked = None
    if kind != "descent" and not (rest := stationarity(task, q)).near:
        unchecked = rest.verdict
    calibration = {
        "scale": scale * scale_of(q.record),
        "correction": word,
        "kind": kind,
        "unchecked": unchecked,
        **_errors(estimate, weight, rise, usable, scale),
        "probe": chosen.tolist(),
        "weight": weight.tolist(),
        "exact": [float(r) if ok else None for r, ok in zip(rise, usable, strict=True)],
        "estimated": estimate(1.0).tolist(),
        "calibrated": estimate(scale).tolist(),
        "residual": exact.residual.tolist(),
        "converged": exact.converged.tolist(),
        "iterations": exact.iterations,
        "passes": exact.passes,
    }
    scaled = posterior.form.zeros().plus(posterior.form, 1 / scale)
    return made_of(posterior, form=scaled, calibration=calibration)


def draw(rise: Tensor, count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Examples at random, and w_i = 1/π_i: the chances π_i grow with the estimated rise.

    A tenth of the chances is shared out equally. Systematic sampling in a random order: the
    chances are exact, and no example comes twice.
    """
    size = rise.clamp_min(0)
    if not float(size.sum()) > 0:
        raise PosteriorError("all prediction errors are 0: nothing tells the posterior's scale")
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
            known = (chunk.outputs, chunk.targets, prediction_variance(q, chunk))
            parts.append(tuple(t.cpu() for t in known))
        f, y, v = (torch.cat(p) for p in zip(*parts, strict=True))
        self._likelihood = task.likelihood.at(chosen)
        self._outputs, self._variance = f.double(), v.double()
        self._targets = y.double() if y.is_floating_point() else y
        self._word, self._bound = word, bound_of(q)
        self._before = self._likelihood.nll(self._outputs, self._targets)

    def rise(self, outputs: Sequence[Tensor]) -> Tensor:
        """The loss at these outputs over the one before, in nats."""
        f = torch.cat(list(outputs)).double()
        return self._likelihood.nll(f, self._targets) - self._before

    def __call__(self, scale: float) -> Tensor:
        v = scale * self._variance
        after, _, _ = left_out_by(
            self._word, self._outputs, self._targets, v, self._likelihood, self._bound
        )
        return self.rise([after])


class SequenceEstimate:
    """The same of sequences, r_i(τ) = τ g_iᵀ Σ g_i."""

    def __init__(
        self, task: Task, q: Posterior, chosen: Tensor, word: str, chunking: Chunking
    ) -> None:
        self._likelihood = task.likelihood
        swept = chunks(task, q.mean, Chunking(1, progress=False), columns=1, indices=chosen)
        self._targets, before, influence = [], [], []
        for chunk in swept:
            error = chunk.likelihood.error(chunk.outputs, chunk.targets)
            influence.append(self_influence(q, chunk, error).cpu().double())
            before.append(chunk.likelihood.nll(chunk.outputs.double(), chunk.targets).cpu())
            self._targets.append(chunk.targets.cpu())
        self._before, self._influence = torch.cat(before), torch.cat(influence)

    def rise(self, outputs: Sequence[Tensor]) -> Tensor:
        pairs = zip(outputs, self._targets, strict=True)
        return torch.cat([self._likelihood.nll(f.double(), y) for f, y in pairs]) - self._before

    def __call__(self, scale: float) -> Tensor:
        return scale * self._influence


Estimates = Estimate | SequenceEstimate


def matching(estimate: Estimates, weight: Tensor, rise: Tensor, usable: Tensor) -> float:
    """τ with Σ w_i r_i(τ) ψ(log r_i − log r_i(τ)) = 0, by bisection on log τ.

    Raises:
        PosteriorError: no such τ.
    """

    def gap(log: float) -> float:
        return float(_pulls(estimate, weight, rise, usable, math.exp(log)).sum())

    low, high = -1.0, 1.0
    while low > -WIDEST and gap(low) <= 0:
        low *= 2
    while high < WIDEST and gap(high) >= 0:
        high *= 2
    if gap(low) < 0 or gap(high) > 0:
        raise PosteriorError("no scale agrees with the exact solves: another model's posterior?")
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if gap(middle) > 0 else (low, middle)
    return math.exp((low + high) / 2)


def _pulls(
    estimate: Estimates, weight: Tensor, rise: Tensor, usable: Tensor, scale: float
) -> Tensor:
    """w_i r_i(τ) ψ(log r_i − log r_i(τ)) of the usable examples."""
    now = estimate(scale)[usable]
    apart = (rise[usable].log() - now.log()).clamp(-AGREEING, AGREEING)
    return weight[usable] * now * apart


def _usable(exact: Removals, rise: Tensor, estimated: Tensor) -> Tensor:
    """Which solves say something about the scale; warned of where they fall short.

    Raises:
        PosteriorError: none.
    """
    solved = torch.isfinite(rise) & ~exact.indefinite
    usable = solved & (rise > 0) & (estimated > 0)
    if not bool(usable.any()):
        raise PosteriorError(
            "no example of the probe tells the scale: no error, the curvature not positive, or "
            '(kind="descent") not at the minimum; take a larger probe or kind="ggn"'
        )
    if not bool(solved.all()):
        said = "the curvature without them is not positive, or the model not at the minimum"
        count = f"{int((~solved).sum())} of {len(usable)} probe examples are left out"
        warnings.warn(f"{count}: {said}", RuntimeWarning, stacklevel=4)
    short = usable & ~exact.converged
    if bool(short.any()):
        left = float(exact.residual[short].max())
        said = f"{int(short.sum())} of {len(usable)} exact solves did not converge (to {left:.1e})"
        warnings.warn(f"{said}; raise max_iterations", RuntimeWarning, stacklevel=4)
    return usable


def _errors(
    estimate: Estimates, weight: Tensor, rise: Tensor, usable: Tensor, scale: float
) -> dict[str, float | None]:
    """Spread of the single examples, standard errors of log τ and of the total."""
    k = int(usable.sum())
    if k < 2:
        return {"standard_error": None, "spread": None, "total_error": None}
    apart = (rise[usable] / estimate(scale)[usable]).log()
    low, high = torch.quantile(apart, torch.tensor([1 / 6, 5 / 6], dtype=apart.dtype)).tolist()
    up, down = scale * math.exp(NEARBY), scale * math.exp(-NEARBY)
    slope = (
        _pulls(estimate, weight, rise, usable, down).sum()
        - _pulls(estimate, weight, rise, usable, up).sum()
    ) / (2 * NEARBY)
    noise = (k / (k - 1) * _pulls(estimate, weight, rise, usable, scale).square().sum()).sqrt()
    error = float(noise / slope) if float(slope) > 0 else None
    total = [float((weight * estimate(t))[usable].sum()) for t in (down, up)]
    growth = (math.log(total[1]) - math.log(total[0])) / (2 * NEARBY)
    return {
        "standard_error": error,
        "spread": (high - low) / 2,
        "total_error": None if error is None else growth * error,
    }
