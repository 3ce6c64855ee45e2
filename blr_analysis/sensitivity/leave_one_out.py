"""What each training example's prediction would have been without it.

    first order   f_i^{\\i} = f_i + V_i e_i
    cavity        f_i^{\\i} = f_i + (I − V_i Λ_i)⁻¹ V_i e_i

The cavity form takes the example's own share out of the posterior as well; for linear regression
it is Cook's formula and the mean squared error is PRESS, exactly. Averaged over the data the
left-out losses estimate the loss on new data from the training data alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.engine import QUIET, Chunking, chunks
from blr_analysis.backprop.loss import Evaluation
from blr_analysis.backprop.record import shared
from blr_analysis.checks import at_least, instance, one_of
from blr_analysis.errors import InputError
from blr_analysis.likelihoods import Bernoulli, Gaussian, Likelihood, Poisson
from blr_analysis.likelihoods.categorical import Classes
from blr_analysis.likelihoods.variances import MeanAndVariance
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.prior import scale_of
from blr_analysis.posterior.stationarity import caveat_of, stationarity
from blr_analysis.sensitivity.corrections import (
    HIGH,
    WORDS,
    bound_of,
    exactly,
    left_out_by,
    prediction_variance,
    prediction_variances,
    taken,
)
from blr_analysis.sensitivity.removal import PASSES, UNTIL_REST, descended_removals
from blr_analysis.sensitivity.results import LeftOut
from blr_analysis.sensitivity.scores import Scores, fitted
from blr_analysis.sensitivity.sequences import sequence_leave_one_out
from blr_analysis.sensitivity.sites import site_leave_one_out, sum_of_sites
from blr_analysis.task import Task

CORRECTIONS = ("auto", "cavity", "first_order")
MOST = 64  # examples that are refined unasked
WORK = 2e10  # multiplications that they may take, some seconds
# Where an example's outputs move by m nats, linearising is off by some m/5 of what its loss changes
# by: examples are refined until the rest of Σ m |change| is below this part of Σ |change|.
MOVED = 0.1
LOOKS = 16  # examples that tell a linear model
ROWS = 4096  # of ready scores at a time
Known = tuple[Tensor, Tensor, Tensor, Likelihood]


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut(LeftOut):
    """What :func:`leave_one_out` gives; tensors on the CPU, in the order of the dataset.

    Attributes:
        logits: f_i^{\\i}, ``[N, C]`` (means or log-rates for regression).
        losses: ℓ(y_i, f_i^{\\i}) in nats, ``[N]``; larger is worse.
        nll: their mean over the examples that count: the estimate of the loss on new data. With
            class weights or weights of examples that of w_i ℓ_i, divided by their number and not
            by Σ w_i as torch does: neither torch's weighted mean nor the plain loss.
        accuracy: of the left-out predictions; None for regression.
        deviation: how far each prediction moves, as in :class:`Scores`.
        leverage: the largest eigenvalue of V_i Λ_i, ``[N]``; near or above 1 the posterior's
            structure overstates V_i and no cavity exists.
        correction: "first_order", "cavity", "bounded" where the cavity was asked for and the
            leverage is too close to 1 or above it, or "descent" where the example was refined;
            one word for each example.
        mse: mean squared left-out error (Gaussian likelihood only, else None).
    """

    logits: Tensor
    predictions: Tensor
    predictions_before: Tensor
    targets: Tensor
    deviation: Tensor
    leverage: Tensor
    correction: list[str]
    likelihood: Likelihood

    @property
    def _evaluation(self) -> Evaluation:
        return Evaluation(self.losses, self.likelihood.correct(self.logits, self.targets))

    @property
    def _counted(self) -> Tensor:
        return self._evaluation.counted

    @property
    def accuracy(self) -> float | None:
        return self._evaluation.accuracy

    @property
    def mse(self) -> float | None:
        if not isinstance(self.likelihood.kind, Gaussian):
            return None
        return float((self.logits - self.targets).double().square().mean())

    def __repr__(self) -> str:
        counts = {word: self.correction.count(word) for word in WORDS}
        rare = "".join(f"{w} for {counts[w]}, " for w in ("bounded", "descent") if counts[w])
        right = "" if self.accuracy is None else f", accuracy={self.accuracy:.4f}"
        return (
            f"LeaveOneOut(nll={self.nll:.4f}{right}, N={len(self)}, "
            f"cavity for {counts['cavity']} of {len(self)}, {rare}"
            f"leverage of 1 or more for {int((self.leverage >= 1).sum())}{self._noted})"
        )


@torch.inference_mode(False)  # also where the caller switched it on
def leave_one_out(
    task: Task,
    posterior: Posterior = None,  # type: ignore[assignment]
    *,
    correction: str = "auto",
    scores: Any = None,
    refine: int | None = None,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    progress: bool | None = None,
) -> LeaveOneOut | Any:  # of sequences and of sums of sites their own
    """Every example's prediction as if the model had been trained without it.

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data. A fitted probabilistic model of
            :mod:`blr_analysis.learning_rule.inference` keeps its data and stands alone,
            ``leave_one_out(fitted)`` or ``leave_one_out(None, fitted)``: its sites are subtracted.
        correction: "first_order", "cavity", or "auto": what the posterior was calibrated for
            (:func:`blr_analysis.calibrate`); else the cavity for structures that can bear it
            ("full", "lowrank"), first order for those that overstate V_i ("diag", "kron"). First
            order is far too low at leverages above 0.5: where there are any, of a Laplace
            posterior at the model's minimum, the cavity of the whole Gauss–Newton matrix is taken
            instead, if it costs seconds (up to 4,096 parameters, or N·C of 1,500); ``note`` says
            that it was, or that it would be needed. Where the leverage is too close to 1 for the
            cavity (0.999, of a fit of the whole matrix in float64 1 − 1e-6, or 0.9 for "diag" and
            "kron"), the row is "bounded"; the table's ``correction`` column says so.
        scores: what ``sensitivity(task, posterior)`` gave for the same posterior, with its
            variance (of sequences with or without); V_i is then not computed again.
        refine: how many examples, those whose loss is estimated to change most, are left out by
            quasi-Newton moves on the others and a real forward pass instead, some 12 passes over
            the data each: rows "descent". For a model at the minimum of its own objective;
            examples of another keep their estimate. Calibrate the posterior first, so that the
            rows that are refined and those that are not are of one scale. None refines, with
            ``correction="auto"`` and the structure "full", the examples of leverages above 0.5,
            where a linearisation is rough, and of classes, counts and learned variances at a
            minimum those whose outputs it moves far, up to where the rest hardly changes the total
            (at most 64 in all, and seconds; ``note`` says what is left); a linear model of a
            Gaussian likelihood has no need of it.
        chunk_size, memory_budget: see :func:`blr_analysis.sensitivity`.

    Returns:
        The left-out predictions; of sequences (likelihood "tokens", "causal_lm")
        :class:`~blr_analysis.sensitivity.sequences.SequenceLeaveOneOut`, to first order; of a sum
        of sites :class:`~blr_analysis.sensitivity.sites.SiteLeaveOneOut`.

    Raises:
        InputError: an unknown correction, the cavity or refinement of sequences, scores of other
            data or without a variance, ``refine`` out of range.
        PosteriorError, ModelError, DataError: as :func:`blr_analysis.sensitivity`.

    Source: Nickl et al., NeurIPS 2023, Eq. 12 (first order); Cook, 1977 (cavity). Beyond
    the bound see :mod:`blr_analysis.sensitivity.corrections`.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X = torch.randn(40, 2, dtype=torch.float64); y = X.sum(1)
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> model.weight.data = torch.linalg.solve(X.T @ X + torch.eye(2), X.T @ y)[None]
        >>> task = blr.Task(model, (X, y), likelihood="gaussian")
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0, progress=False)
        >>> loo = leave_one_out(task, q, progress=False)
        >>> hat = (X @ torch.linalg.inv(X.T @ X + torch.eye(2)) @ X.T).diagonal()
        >>> press = ((y - X @ model.weight[0]) / (1 - hat)).square().mean().item()
        >>> abs(loo.mse / press - 1) < 1e-9
        True
    """
    one_of("correction", correction, CORRECTIONS)
    if (sites := sum_of_sites(task, posterior)) is not None:
        return site_leave_one_out(sites, correction=correction, scores=scores, refine=refine)
    q = fitted(task, posterior)
    chunking = Chunking(chunk_size, memory_budget, progress)
    if refine is not None and at_least(0, "refine", refine) > task.n_data:
        raise InputError(f"refine must be at most {task.n_data} examples, got {refine!r}")
    if task.likelihood.is_sequence:
        if refine:
            raise InputError("refine= leaves single examples out, not sequences; use refine=0")
        return sequence_leave_one_out(task, q, correction, chunking, scores)
    likelihood, approximate = task.likelihood, ""
    before, targets, after, levers, used = _moved(task, q, correction, chunking, scores)
    apart = levers / scale_of(q.record)  # a scale for all hides the few where first order fails
    high = int((apart > HIGH).sum()) if correction == "auto" else 0
    if high and (exact := exactly(task, q, chunking)) is not None:
        approximate = f"of the whole curvature: {high} leverages under {q.structure} above {HIGH}"
        q = exact
        before, targets, after, levers, used = _moved(task, q, correction, chunking)
    change = (likelihood.nll(after, targets) - likelihood.nll(before, targets)).abs()
    far = torch.zeros_like(levers, dtype=torch.bool)
    linearised = used != WORDS.index("first_order")
    curves = isinstance(likelihood.kind, Classes | Bernoulli | Poisson | MeanAndVariance)
    looked = curves and bool(linearised.any()) and stationarity(task, q).near
    if looked:
        far = _far(change, likelihood.length(before, after)) & linearised
    if refine is None:
        whole = q.structure == "full" or bool(approximate)
        gaussian = isinstance(likelihood.kind, Gaussian)  # of a linear model the cavity is exact
        curved = whole and not (gaussian and high > 0 and _affine(task, q))
        unasked = torch.zeros_like(far)
        if correction == "auto" and curved:
            unasked = _too_high(used, levers)
            room = max(0, _affordable(task, q) - int(unasked.sum()))
            some = change.masked_fill(~far | unasked, -1.0).argsort(descending=True)[:room]
            unasked[some[(far & ~unasked)[some]]] = True
        change = change.masked_fill(~unasked, -1.0)
        wanted = min(MOST, int(unasked.sum()))
    else:
        wanted = refine
    passes = PASSES if refine else UNTIL_REST
    if wanted:
        rows = change.argsort(descending=True, stable=True)[:wanted].sort().values
        alone = descended_removals(task, q, rows, passes=passes, progress=progress)
        done = rows[~alone.indefinite]
        after[done] = torch.cat(alone.outputs)[~alone.indefinite]
        if refine and len(done) < refine:
            said = f"{refine - len(done)} of {refine} examples keep their estimate"
            near = stationarity(task, q).near
            said += (
                ": their pull is too small to be told from what is left of its training"
                if near
                else ": the model is too far from its minimum for a descent"
            )
            warnings.warn(said, RuntimeWarning, stacklevel=3)
        used[done] = WORDS.index("descent")
    return LeaveOneOut(
        logits=after,
        losses=likelihood.nll(after, targets),
        losses_before=likelihood.nll(before, targets),
        predictions=likelihood.prediction(after),
        predictions_before=likelihood.prediction(before),
        targets=targets,
        deviation=likelihood.distance(before, after),
        leverage=levers,
        correction=[WORDS[k] for k in used.tolist()],
        likelihood=likelihood,
        metadata=task.metadata,
        note="; ".join(
            filter(
                None,
                (
                    caveat_of(q),
                    "" if looked else _averaged(task, q),
                    approximate,
                    _rough(q, used, levers, far),
                ),
            )
        ),
    )


def _far(change: Tensor, moved: Tensor) -> Tensor:
    """Which examples' outputs, logits, log-rates or log-variances, move so far without them that
    linearising mistakes the total, ``[N]``."""
    far = torch.zeros(len(change), dtype=torch.bool)
    order = (rough := change * moved).argsort(stable=True)
    least = rough[order].cumsum(0) <= MOVED * change.sum()
    far[order[~least]] = True
    return far


def _affordable(task: Task, q: Posterior) -> int:
    """How many examples may be left out unasked."""
    size = sum(m.numel() for m in q.mean.values())
    return min(MOST, int(WORK / (6 * UNTIL_REST * task.n_data * size)))


def _affine(task: Task, q: Posterior) -> bool:
    """Whether outputs are affine in the weights, as far as some examples along the mean's ray
    tell."""
    some = torch.arange(min(task.n_data, LOOKS))
    with torch.no_grad(), task.evaluation():
        x = task.fetch(some)
        near, middle, far = (
            task.run(x, {n: size * m for n, m in q.mean.items()}, some)[0]
            for size in (1.0, 1.25, 1.5)
        )
    return torch.allclose(far - middle, middle - near, rtol=1e-3, atol=1e-3 * float(far.std()))


def _averaged(task: Task, q: Posterior) -> str:
    """What to do where the posterior holds the mean of a Hessian that is another everywhere."""
    if not task.likelihood.kind.averaged or q.record.get("kind") == "hessian":
        return ""
    return "of a mean Hessian, mostly low in total: structure='full' at a minimum, or refine="


def _too_high(used: Tensor, levers: Tensor) -> Tensor:
    """Which examples shape their own prediction too much for a cavity, ``[N]``."""
    cavity = (used == WORDS.index("cavity")) | (used == WORDS.index("bounded"))
    return cavity & (levers > HIGH)


def _rough(q: Posterior, used: Tensor, levers: Tensor, far: Tensor) -> str:
    """What to do about them."""
    count = int(((used == WORDS.index("first_order")) & (levers > HIGH)).sum())
    elsewhere = q.stationarity is not None and not q.stationarity.near
    if count and not elsewhere and "calibration" not in q.record:
        return (
            f"{count} leverages above {HIGH}, where first order is far off: "
            "structure='full' or 'lowrank', or calibrate"
        )
    high, done = _too_high(used, levers), used == WORDS.index("descent")
    rest = high | (far & ~done)
    if not bool(rest.any()):
        return ""
    said = f"{int(high.sum())} leverages above {HIGH}" if bool(high.any()) else ""
    if bool((rest & ~high).any()):
        said += " and " * bool(said) + f"{int((rest & ~high).sum())} that move far"
    return f"{said}, rough one by one: refine={int((rest | done).sum())}"


def _moved(
    task: Task, q: Posterior, correction: str, chunking: Chunking, scores: Any = None
) -> Iterator[Tensor]:
    """f_i, y_i, f_i^{\\i}, leverages and places in WORDS of all examples, on the CPU."""
    word, own = taken(q, correction), torch.arange(task.n_data)
    if scores is None:
        own = shared(task, q.mean)
        known = _computed(task, q, chunking, own)
    else:
        known = _ready(task, q, scores)
    parts = [(f, y, *left_out_by(word, f, y, v, at, bound_of(q))) for f, y, v, at in known]
    joined = (torch.cat([t.cpu() for t in part]) for part in zip(*parts, strict=True))
    if len(own) == task.n_data:
        return joined
    return (ranks.gathered(t, own, task.n_data) for t in joined)


def _computed(task: Task, q: Posterior, chunking: Chunking, own: Tensor) -> Iterator[Known]:
    """f, y, V and likelihood of these examples, some at a time."""
    swept = chunks(task, q.mean, chunking, by_parts=True, indices=own, label="leave one out")
    for chunk in swept:
        for rows, v in prediction_variances(q, chunk):
            likelihood = task.likelihood.at(chunk.indices[rows])
            yield chunk.outputs[rows], chunk.targets[rows], v, likelihood


def _ready(task: Task, q: Posterior, scores: Scores) -> Iterator[Known]:
    """The same from scores."""
    instance("scores", scores, Scores, "what blr_analysis.sensitivity(task, posterior) returns")
    if scores.variance is None:
        raise InputError("the scores hold no prediction variance; compute them with variance=True")
    if len(scores) != task.n_data:
        raise InputError(f"scores of {len(scores)} examples for a task of {task.n_data}")
    first = next(iter(chunks(task, q.mean, QUIET, indices=torch.tensor([0]))))
    own = prediction_variance(q, first)[0].cpu()
    if not torch.allclose(own, scores.variance[0].to(own), rtol=1e-2, atol=1e-12):
        raise InputError("the scores are those of another posterior; leave scores= out")
    parts = (scores.outputs, scores.targets, scores.variance)
    likelihoods = (task.likelihood.at(i) for i in torch.arange(len(scores)).split(ROWS))
    return zip(*(t.split(ROWS) for t in parts), likelihoods, strict=True)
