"""What each training example's prediction would have been without it.

    first order   f_i^{\\i} = f_i + τ V_i ē_i
    cavity        f_i^{\\i} = f_i + (I − τ V_i Λ_i)⁻¹ τ V_i ē_i

ē_i is averaged over the posterior's run, τ its temperature. At a minimum, where
ē_i is the error and τ is 1, structures that hold the whole curvature take the cavity form: it takes
the example's own share out of the posterior as well. For linear regression it is Cook's formula,
and the mean squared error is PRESS, exactly. Averaged over the data the left-out losses estimate
the loss on new data from the training data alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.engine import chunks
from blr_analysis.backprop.loss import Evaluation
from blr_analysis.backprop.record import shared
from blr_analysis.checks import at_least, one_of
from blr_analysis.errors import InputError
from blr_analysis.likelihoods import Gaussian, Likelihood
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.sensitivity.corrections import (
    HIGH,
    WORDS,
    bound_of,
    left_out_by,
    prediction_variances,
    taken,
)
from blr_analysis.sensitivity.removal import PASSES, descended_removals
from blr_analysis.sensitivity.results import LeftOut
from blr_analysis.sensitivity.run import mean_errors
from blr_analysis.sensitivity.scores import all_fitted
from blr_analysis.sensitivity.sequences import sequence_leave_one_out
from blr_analysis.sensitivity.sites import site_leave_one_out, sum_of_sites
from blr_analysis.task import Task

BELOW_CHANCE = "below chance with leverages of 1 or more, no estimate: calibrate, or refine="
CORRECTIONS = ("auto", "cavity", "first_order")


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
        unfamiliarity: tr(Λ_i V_i), ``[N]``, of the model's freedom what the example takes up.
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
    unfamiliarity: Tensor
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

    @property
    def is_below_chance(self) -> bool:
        """Whether the left-out predictions suit their own targets less than those of other
        examples do, with leverages of 1 or more: moves that are too long, and no estimate."""
        if not bool((self.leverage >= 1).any()):
            return False
        return agreement_beyond_chance(self._evaluation, self.predictions, self.targets) < 0

    def __repr__(self) -> str:
        counts = {word: self.correction.count(word) for word in WORDS}
        rare = "".join(f"{w} for {counts[w]}, " for w in ("bounded", "descent") if counts[w])
        right = "" if self.accuracy is None else f", accuracy={self.accuracy:.4f}"
        estimate = f"nll={self.nll:.4f}{right}"
        if self.is_below_chance:
            estimate = "no estimate"
        return (
            f"LeaveOneOut({estimate}, N={len(self)}, "
            f"cavity for {counts['cavity']} of {len(self)}, {rare}"
            f"leverage of 1 or more for {int((self.leverage >= 1).sum())}{self._noted})"
        )


@torch.inference_mode(False)  # also where the caller switched it on
def leave_one_out(
    task: Task,
    posterior: Posterior | Sequence[Posterior] = None,  # type: ignore[assignment]
    *,
    correction: str = "auto",
    refine: int | None = None,
) -> LeaveOneOut | Any:  # of sequences and of sums of sites their own
    """Every example's prediction as if the model had been trained without it.

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data. A fitted probabilistic model of
            :mod:`blr_analysis.learning_rule.inference` keeps its data and stands alone,
            ``leave_one_out(fitted)`` or ``leave_one_out(None, fitted)``: its sites are subtracted.
            A list of those of several runs: the mean of their moves, from the last one's outputs.
        correction: "first_order", "cavity", or "auto": at a minimum the cavity for structures that
            bear it ("full", "lowrank"), else first order. Where the leverage is too close to 1 for
            the cavity, the row is "bounded"; the table's ``correction`` column says so.
        refine: how many examples, those whose loss is estimated to change most, are left out by
            quasi-Newton moves on the others and a real forward pass instead, some 12 passes over
            the data each: rows "descent". For a model at the minimum of its own objective.

    Returns:
        The left-out predictions; of sequences (likelihood "tokens", "causal_lm")
        :class:`~blr_analysis.sensitivity.sequences.SequenceLeaveOneOut`, to first order; of a sum
        of sites :class:`~blr_analysis.sensitivity.sites.SiteLeaveOneOut`.

    Raises:
        InputError: an unknown correction, the cavity or refinement of sequences, ``refine`` out of
            range or of several posteriors.
        PosteriorError, ModelError, DataError: as :func:`blr_analysis.sensitivity`.

    Source: Nickl et al., NeurIPS 2023, Eq. 12 (first order); Cook, 1977 (cavity). Beyond
    the bound see :mod:`blr_analysis.sensitivity.corrections`.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X = torch.randn(40, 2, dtype=torch.float64); y = X.sum(1)
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> model.weight.data = torch.linalg.solve(X.T @ X + torch.eye(2), X.T @ y)[None]
        >>> task = blr.Task(model, (X, y), likelihood="gaussian")
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
        >>> loo = leave_one_out(task, q)
        >>> hat = (X @ torch.linalg.inv(X.T @ X + torch.eye(2)) @ X.T).diagonal()
        >>> press = ((y - X @ model.weight[0]) / (1 - hat)).square().mean().item()
        >>> abs(loo.mse / press - 1) < 1e-9
        True
    """
    one_of("correction", correction, CORRECTIONS)
    if (sites := sum_of_sites(task, posterior)) is not None:
        return site_leave_one_out(sites, correction=correction, scores=None, refine=refine)
    several = all_fitted(task, posterior)
    where, q = several[-1]
    if refine is not None and at_least(0, "refine", refine) > task.n_data:
        raise InputError(f"refine must be at most {task.n_data} examples, got {refine!r}")
    if refine and (len(several) > 1 or task.likelihood.is_sequence):
        raise InputError("refine= takes one posterior, and no sequences; use refine=0")
    if task.likelihood.is_sequence:
        return sequence_leave_one_out(several, correction)
    found = [left_out(at, p, correction) for at, p in several]
    before, targets, _, levers, used, unfamiliarity, _ = found[-1]
    likelihood = task.likelihood
    after = likelihood.moved(before, torch.stack([move for _, _, move, *_ in found]).mean(0))
    if refine:
        change = (likelihood.nll(after, targets) - likelihood.nll(before, targets)).abs()
        rows = change.argsort(descending=True, stable=True)[:refine].sort().values
        alone = descended_removals(where, q, rows, passes=PASSES)
        done = rows[~alone.lost]
        after[done] = torch.cat(alone.outputs)[~alone.lost]
        used[done] = WORDS.index("descent")
        if len(done) < refine:
            warnings.warn(
                f"{refine - len(done)} of {refine} examples keep their estimate: each pulls at the "
                "model less than the training that is left to do; train on to the minimum",
                RuntimeWarning,
                stacklevel=3,
            )
    steep = int(((levers > HIGH) & (used != WORDS.index("descent"))).sum())
    curved = q.at_minimum and not isinstance(likelihood.kind, Gaussian)
    rough = f"{steep} losses are rough, of leverage above {HIGH}: refine= solves them"
    found_loo = LeaveOneOut(
        logits=after,
        losses=likelihood.nll(after, targets),
        losses_before=likelihood.nll(before, targets),
        predictions=likelihood.prediction(after),
        predictions_before=likelihood.prediction(before),
        targets=targets,
        deviation=likelihood.distance(before, after),
        leverage=levers,
        unfamiliarity=unfamiliarity,
        correction=[WORDS[k] for k in used.tolist()],
        likelihood=likelihood,
        metadata=task.metadata,
        note="; ".join(filter(None, [q.note, rough if steep and curved else ""])),
    )
    if not found_loo.is_below_chance:
        return found_loo
    return replace(found_loo, note="; ".join(filter(None, [BELOW_CHANCE, q.note])))


def agreement_beyond_chance(found: Evaluation, predictions: Tensor, targets: Tensor) -> float:
    """How much more often predictions agree with their own targets than with those of others;
    of regression their covariance with the targets, which is 0 of shuffled ones."""
    if found.correct is None:
        pairs = [t.double().reshape(len(t), -1) for t in (predictions, targets)]
        if pairs[0].shape != pairs[1].shape:
            return 0.0
        centred = [t - t.mean(0) for t in pairs]
        return float((centred[0] * centred[1]).sum())
    is_shares = targets.ndim == 2 and targets.shape[1] > 1 and predictions.ndim == 1
    if is_shares:
        targets = targets.argmax(1)
    counts = ~found.correct.isnan()
    answers = predictions.long().reshape(len(predictions), -1)[counts]
    truth = targets.long().reshape(len(targets), -1)[counts]
    chances = []
    for said, true in zip(answers.unbind(1), truth.unbind(1), strict=True):
        shares = [torch.bincount(t, minlength=int(truth.max()) + 1) / len(t) for t in (said, true)]
        size = min(len(share) for share in shares)
        chances.append((shares[0][:size] * shares[1][:size]).sum())
    return float((answers == truth).double().mean() - torch.stack(chances).mean())


def left_out(
    task: Task, q: Posterior, correction: str, indices: Tensor | None = None
) -> list[Tensor]:
    """f_i, y_i, f_i^{\\i} − f_i, leverages, places in WORDS, tr Λ_i V_i and ē_iᵀ τV_i ē_i of all
    examples or of these, on the CPU."""
    own = shared(task, q.mean) if indices is None else indices
    word, errors = taken(q, correction), mean_errors(task, q)
    parts: list[tuple[Tensor, ...]] = []
    for chunk in chunks(task, q.mean, by_parts=True, indices=own, label="leave one out"):
        error = errors(task, chunk)
        for rows, v in prediction_variances(q, chunk):
            likelihood = task.likelihood.at(chunk.indices[rows])
            f, y, e = chunk.outputs[rows], chunk.targets[rows], error[rows]
            taken_up = (likelihood.hessian(f, y) * v).sum((1, 2))
            found = left_out_by(word, f, y, e, v.mul_(q.temperature), likelihood, bound_of(q))
            influence = torch.einsum("nc,ncd,nd->n", e, v, e)
            parts.append(tuple(t.cpu() for t in (f, y, *found, taken_up, influence)))
    joined = [torch.cat(part) for part in zip(*parts, strict=True)]
    if indices is not None or len(own) == task.n_data:
        return joined
    return [ranks.gathered(t, own, task.n_data) for t in joined]
