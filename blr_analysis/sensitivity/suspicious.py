"""Which examples look wrong: mislabelled, unlike the others, or there twice.

    wrong label      mean_t ℓ_i(t)              over the checkpoints t of the run, unweighted
    P(y_i is wrong)  see :mod:`blr_analysis.sensitivity.wrong_labels`
    unfamiliarity    tr(Λ_i V_i)
    closeness        1 − d_i,nearest / d_i,10th,  d_ij² = 2 − 2 corr(δf_i, δf_j)
                     δf_i = J_i (θ_s − m),  θ_s ~ q,  s = 1 … S

Labels that are wrong are learned late, and what is learned by heart at the end was contradicted
before (Pleiss et al., 2020). δf_i is how
example i's outputs move when the weights move as the posterior lets them: the predictions of two
copies always move together. For many samples corr is tr(J_i Σ J_jᵀ) scaled to 1 for an example with
itself: likeness as the model sees it, for any kind of input, where pixels have a distance and
sentences have none. Of sequences δf_i is the change of the loss, one number for each θ_s.

A twin must be nearer than chance has it. Around an example of a cloud of any local dimension m the
log spacings of its neighbours' distances, k log(d_k+1 / d_k), are independent and exponential with
mean 1/m (Rényi, 1953; Levina & Bickel, 2004), so that m cancels in

    P(spacing k > t · mean of the n farther ones) = (1 + t/n)⁻ⁿ
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blr_analysis import checks
from blr_analysis.backprop.engine import chunks, predict
from blr_analysis.backprop.loss import evaluated
from blr_analysis.checks import instance, one_of, positive_int
from blr_analysis.errors import InputError
from blr_analysis.likelihoods import Bernoulli, Likelihood
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.predictive import scored_by
from blr_analysis.progress import track
from blr_analysis.sensitivity.leave_one_out import leave_one_out
from blr_analysis.sensitivity.results import PerExample
from blr_analysis.sensitivity.run import losses_at, mean_losses
from blr_analysis.sensitivity.scores import all_fitted
from blr_analysis.sensitivity.sequences import drawn_errors, trace
from blr_analysis.sensitivity.wrong_labels import chance_of_wrong_labels
from blr_analysis.task import Task
from blr_analysis.views import Plottable

KINDS = ("label", "unfamiliar", "duplicate")
NONE = "none"
CLOSE = 0.5  # a twin at less than half the distance of the tenth neighbour
OWN_SEED = 73_019  # added to the user's, which their data may have been drawn from
STEP = 0.05  # of a posterior standard deviation: δf by a difference, close to linear
WIDTH = 512  # numbers by which an example is known, at most
NEIGHBOURS = 10
AROUND = 33  # neighbours that tell how far apart examples are here
ALIKE = 4  # copies of an example, at most, that must stand out from its other neighbours
CHANCE = 0.01  # of a false twin anywhere in the data, where nearness is chance
BLOCK = 2**23  # numbers of the matrix of pairs that are held at a time


@dataclass(frozen=True, kw_only=True)
class Suspicions(PerExample, Plottable):
    """What :func:`suspicious` gives; tensors on the CPU, in the order of the dataset.

    Of every score, larger is more suspicious.

    Attributes:
        losses: the mean unweighted loss over the run, ``[N]`` in nats; of sequences of a token.
        training: the unweighted loss at the end of the run, ``[N]``.
        left_out: the unweighted left-out loss, ``[N]``.
        wrong: P(y_i is wrong), ``[N]``, from the left-out predictions; where nothing measured their
            scale, from the mean of their logits and those of the checkpoints, which calls fewer.
            None for regression, sequences.
        proposed: the best other label of the left-out prediction among those that occur in the
            data, as the targets; None for regression, sequences.
        unfamiliarity: tr(Λ_i V_i), ``[N]``, how much of the model's freedom the example takes up
            (in parameters), whatever its label: the rise of its own loss without it that one
            expects of a label drawn from the model's own prediction. Of sequences estimated with
            four such draws.
        closeness: how much nearer its twin is than its tenth neighbour, ``[N]`` in 0 … 1; 1 is a
            copy. None where twins were not asked for.
        twin: index of the nearest other example, ``[N]``, or None.
        kind: "label" (more likely wrong than right), "unfamiliar", "duplicate" or "none": the fault
            that is suspected.
        order: indices: what most of the run or the left-out prediction contradicts, by its loss,
            then strangers, duplicates, and the rest.
        targets, predictions: None of sequences.
        table: one row per example, the most suspicious first.
    """

    training: Tensor
    left_out: Tensor
    wrong: Tensor | None
    proposed: Tensor | None
    unfamiliarity: Tensor
    closeness: Tensor | None
    twin: Tensor | None
    kind: list[str]
    order: Tensor
    targets: Tensor | None
    predictions: Tensor | None
    likelihood: Likelihood

    def __repr__(self) -> str:
        counts = [f"{self.kind.count(kind)} {kind}" for kind in KINDS]
        if self.precision is not None:
            counts[0] += f" ({self.precision:.0%} of them wrong)"
        text = ", ".join(counts)
        return f"Suspicions(N={len(self)}: {text}; see .table, .plot(){self._noted})"

    @property
    def precision(self) -> float | None:
        """The share that is expected to be wrong of the labels that are called so, the mean of
        ``wrong``; None where none is, and for regression and sequences."""
        called = torch.tensor([kind == KINDS[0] for kind in self.kind])
        if self.wrong is None or not bool(called.any()):
            return None
        return float(self.wrong[called].mean())

    def score(self, kind: str) -> Tensor:
        """The score behind a kind of fault, ``[N]``.

        Raises:
            InputError: an unknown kind, or twins that were not asked for.
        """
        one_of("kind", kind, KINDS)
        scores = (self.losses, self.unfamiliarity, self.closeness)
        if (score := scores[KINDS.index(kind)]) is None:
            raise InputError("no twins were looked for; call suspicious(..., duplicates=True)")
        return score


@torch.inference_mode(False)  # also where the caller switched it on
def suspicious(
    task: Task,
    posterior: Posterior | Sequence[Posterior],
    *,
    duplicates: bool = True,
    share: float = 0.05,
    samples: int = 32,
    seed: int = 0,
) -> Suspicions:
    """Rank the training examples by how wrong they look, and say in which way.

    Costs what :func:`blr_analysis.sensitivity` costs for every posterior and, for duplicates,
    ``samples`` forward passes and a comparison of all pairs (N² · 512 operations at most, in
    blocks).

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data; with checkpoints it finds more of the labels that were
            learned by heart. Or a list of those of several runs.
        duplicates: whether to look for twins.
        share: which part of the examples to call strangers, at most, and duplicates, which must
            have a closeness above ½ that chance does not explain; of regression and sequences also
            the part whose loss is suspected. Labels of classes are called wrong where they are
            more likely wrong than right, however many they are.
        samples: directions in which the weights are moved to find twins.
        seed: of those directions.

    Raises:
        InputError: no posterior, a share that is not between 0 and 1, fewer than one sample, fewer
            than three examples to find twins among.
        PosteriorError, ModelError, DataError: as :func:`blr_analysis.sensitivity`.

    Source: left-out predictions, Nickl et al., NeurIPS 2023, Eq. 12; margins averaged over
    training, Pleiss et al., "Identifying mislabeled data using the area under the margin
    ranking", NeurIPS 2020.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        >>> y = (X[:, 0] > 0).long(); y[7] = 1 - y[7]
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.LBFGS(model.parameters(), max_iter=50)
        >>> def loss():
        ...     optimizer.zero_grad()
        ...     nll = torch.nn.functional.cross_entropy(model(X), y, reduction="sum")
        ...     total = nll + sum(0.5 * p.square().sum() for p in model.parameters())
        ...     total.backward()
        ...     return total
        >>> _ = optimizer.step(loss)
        >>> task = blr.Task(model, (X, y))
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
        >>> wrong = suspicious(task, q)
        >>> int(wrong.order[0]), wrong.kind[7], int(wrong.proposed[7]) == 1 - int(y[7])
        (7, 'label', True)
    """
    instance("duplicates", duplicates, bool, "True or False")
    checks.share("share", share)
    positive_int("samples", samples)
    loo = leave_one_out(task, posterior)
    how = {"duplicates": duplicates, "share": share, "samples": samples, "seed": seed}
    return suspicions_of(task, posterior, loo, **how)


def suspicions_of(
    task: Task,
    posterior: Posterior | Sequence[Posterior],
    loo: Any,
    *,
    duplicates: bool = True,
    share: float = 0.05,
    samples: int = 32,
    seed: int = 0,
) -> Suspicions:
    """The same from left-out predictions that are there already."""
    several = all_fitted(task, posterior)
    where, q = several[-1]
    losses = torch.stack([mean_losses(task, p) for _, p in several]).mean(0)
    training = losses_at(task, {**q.mean, **q.buffers})
    closeness, twin, distinct = None, None, None
    if duplicates:
        closeness, twin, told = twins(where, q, samples=samples, seed=seed)
        distinct = closeness.where(told, 0)
    wrong = proposed = targets = predictions = None
    if task.likelihood.is_sequence:
        losses, training = losses / loo.tokens, training / loo.tokens
        left_out, unfamiliarity = loo.losses / loo.tokens, _unfamiliar_sequences(where, q)
    else:
        targets, predictions, unfamiliarity = loo.targets, loo.predictions_before, loo.unfamiliarity
        left_out = scored_by(task.likelihood).nll(loo.logits, targets)
        _, proposed = best_label(task.likelihood.plain, loo.logits, targets)
    if task.likelihood.is_classification and not task.likelihood.is_sequence:
        contradicted, wrong = _against_the_label(task, q, loo.logits, loo.targets)
        called = contradicted & (wrong > 0.5)
    else:
        called = contradicted = _first(losses, share)
    kind, order = judged(losses, contradicted, unfamiliarity, distinct, share, called)
    return Suspicions(
        losses=losses,
        training=training,
        left_out=left_out,
        wrong=wrong,
        proposed=proposed,
        targets=targets,
        predictions=predictions,
        unfamiliarity=unfamiliarity,
        closeness=closeness,
        twin=twin,
        kind=kind,
        order=order,
        likelihood=task.likelihood,
        metadata=task.metadata,
        note=q.note,
    )


def _against_the_label(
    task: Task, q: Posterior, left_out: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Where the left-out prediction, or those of most of the run, have another label; and
    P(y_i is wrong)."""
    plain = task.likelihood.plain
    run = [predict(task.holding(p.buffers), p.mean)[0] for p in q.run]
    votes = torch.stack([best_label(plain, f, targets)[0] > 0 for f in run])
    most = votes.double().mean(0) > 0.5
    contradicted = most | (best_label(plain, left_out, targets)[0] > 0)
    scale_is_known = q.at_minimum or "calibration" in q.record
    seen_least = left_out if scale_is_known else torch.stack([*run[:-1], left_out]).mean(0)
    return contradicted, chance_of_wrong_labels(plain, seen_least, targets)


def _first(score: Tensor, share: float) -> Tensor:
    """Which examples are in the first part of a ranking, ``[N]``."""
    found = torch.zeros(len(score), dtype=torch.bool)
    found[score.argsort(descending=True, stable=True)[: round(share * len(score))]] = True
    return found


def _unfamiliar_sequences(task: Task, q: Posterior) -> Tensor:
    """E_ŷ ĝᵀ Σ ĝ = tr ΛV, estimated."""
    swept = chunks(task, q.mean, columns=1, label="unfamiliarity")
    return torch.cat([trace(q, chunk, drawn_errors)[0].cpu() for chunk in swept])


def relabelling(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """ℓ(y) − ℓ(c) for every other label c, ``[N, C]``: −inf at y itself, 0 of examples that do
    not count; of Bernoulli what flipping each output would gain."""
    if isinstance(likelihood.kind, Bernoulli):
        return outputs * (1 - 2 * targets)
    ignored = likelihood.correct(outputs, targets).isnan()[:, None]  # type: ignore[union-attr]
    targets = targets[:, None] if targets.ndim == 1 else targets.argmax(-1, keepdim=True)
    own = targets.masked_fill(ignored, 0)
    gains = (outputs - outputs.gather(1, own)).scatter(1, own, -torch.inf)
    return gains.masked_fill(ignored, 0.0)


def best_label(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the best other label gains, ``[N]``, and which that is, as the targets; None where there
    are no labels. Labels that no example has are no choice."""
    if not likelihood.is_classification:
        return torch.zeros(len(outputs)), None
    gains = relabelling(likelihood, outputs, y)
    ignored = (gains == 0).all(-1)
    if isinstance(likelihood.kind, Bernoulli):
        both = (y > 0.5).any(0) & (y <= 0.5).any(0)  # ways in which an output is labelled
        gains = gains.masked_fill(~both, -torch.inf)
        gain = gains.amax(-1)
        least = -torch.inf if gains.shape[1] == 1 else 0.0  # a single label has one other
        return gain, torch.where(gains > least, 1 - y, y)
    gains = gains.masked_fill(~_occurring(y, outputs.shape[1], ignored), -torch.inf)
    gain, proposed = gains.max(-1)
    if y.ndim == 2:
        return gain, torch.where(gain.isfinite(), proposed, y.argmax(-1))
    return gain, torch.where(ignored | gain.isinf(), y, proposed)


def _occurring(y: Tensor, classes: int, ignored: Tensor) -> Tensor:
    """Which classes some example has, ``[C]``."""
    if y.ndim == 2:
        return (y > 0).any(0)
    return torch.bincount(y[~ignored], minlength=classes) > 0


def judged(
    losses: Tensor,
    contradicted: Tensor,
    unfamiliarity: Tensor,
    closeness: Tensor | None,
    share: float,
    called: Tensor,
) -> tuple[list[str], Tensor]:
    """The kind of every example, and all of them in order: the contradicted by their loss, then
    strangers, then duplicates, each the first ``share`` of its ranking, then the rest by loss.
    Those that are ``called`` have a wrong label; other contradicted ones may have another fault."""
    twins = torch.zeros_like(contradicted)
    if closeness is not None:
        twins = (closeness > CLOSE) & _first(closeness, share)
    strange = _first(unfamiliarity, share)
    kind = torch.full((len(losses),), len(KINDS))
    place = kind.clone()
    scores = losses.clone()
    groups = ((2, twins, closeness), (1, strange, unfamiliarity), (0, contradicted, losses))
    for group, chosen, score in groups:
        place[chosen] = group
        kind[called if group == 0 else chosen] = group
        if score is not None:
            scores[chosen] = score[chosen].to(scores)
    by_score = scores.argsort(descending=True, stable=True)
    order = by_score[place[by_score].argsort(stable=True)]
    return [(*KINDS, NONE)[k] for k in kind.tolist()], order


def twins(
    task: Task, q: Posterior, *, samples: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Closeness and index of every example's nearest other, and whether chance fails to explain it,
    ``[N]`` each.

    Closeness 1 − d_nearest / d_10th (the farthest where there are fewer) is 1 for copies and
    0 where the nearest is no nearer than the tenth. Examples that do not move at all have 0.
    """
    if task.n_data < 3:
        raise InputError(f"twins take 3 examples or more, got {task.n_data}; or duplicates=False")
    moves, rounding = responses(task, q, samples=samples, seed=seed)
    return nearest(F.normalize(moves, dim=1), rounding, progress=task.progress)


def responses(task: Task, q: Posterior, *, samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """δf_i of every example, ``[N, S·C]``, with many outputs random mixtures of them, of sequences
    δℓ_i; and the distance, relative to ‖δf_i‖, that rounding leaves between two copies, ``[N]``."""
    generator = torch.Generator().manual_seed(seed + OWN_SEED)

    def seen(params: Mapping[str, Tensor]) -> Tensor:
        if task.likelihood.is_sequence:
            return evaluated(task, params)[0].losses.unsqueeze(1)
        return predict(task, params)[0]

    before = seen(q.mean)
    c = before.shape[1]
    kept = max(1, min(c, WIDTH // samples))
    parts = []
    for _ in track(range(samples), total=samples, label="twins", show=task.progress):
        drawn = q.sample(generator=generator)
        near = {name: m + STEP * (drawn[name] - m) for name, m in q.mean.items()}
        moved = (seen(near) - before) / STEP
        if kept < c:
            mix = torch.randn(c, kept, generator=generator, dtype=torch.float64)
            moved = moved @ mix.to(moved.dtype)
        parts.append(moved)
    moves = torch.cat(parts, 1)
    error = torch.finfo(before.dtype).eps * before.norm(dim=1) * (samples * kept / c) ** 0.5 / STEP
    return moves, 4 * error / moves.norm(dim=1).clamp_min(torch.finfo(before.dtype).tiny)


def nearest(
    unit: Tensor, rounding: Tensor, *, progress: bool | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Closeness, nearest other row, and whether chance fails to explain it, of unit vectors
    ``[N, D]``; distances below ``rounding`` count as nothing."""
    n = len(unit)
    size = max(1, BLOCK // n)
    k = min(AROUND, n - 1)
    closeness, twin = torch.empty(n, dtype=unit.dtype), torch.empty(n, dtype=torch.long)
    told = torch.zeros(n, dtype=torch.bool)
    starts = range(0, n, size)
    for start in track(starts, total=len(starts), label="pairs", show=progress):
        rows = torch.arange(start, min(start + size, n))
        likeness = unit[rows] @ unit.T
        likeness[rows - start, rows] = -torch.inf
        top, index = likeness.topk(k, dim=1)
        gap = (2 - 2 * top).clamp_min(0).sqrt()
        # of near ones the difference itself: 2 − 2 corr is all rounding there
        for near in (top > 1 - 1e-3).nonzero().split(BLOCK // unit.shape[1]):
            i, j = near.unbind(1)
            gap[i, j] = torch.linalg.vector_norm(unit[rows[i]] - unit[index[i, j]], dim=1)
        gap[gap < rounding[rows, None]] = 0
        gap, order = gap.sort(1)
        far = gap[:, min(NEIGHBOURS, k) - 1]
        close = torch.where(far > 0, 1 - gap[:, 0] / far, (gap[:, 0] == 0).to(unit.dtype))
        still = torch.linalg.vector_norm(unit[rows], dim=1) == 0
        closeness[rows] = torch.where(still, 0, close)
        twin[rows] = index.gather(1, order[:, :1])[:, 0]
        told[rows] = (gap[:, 0] == 0) | (by_chance(gap) < CHANCE / n)
    return closeness, twin, told


def by_chance(gap: Tensor) -> Tensor:
    """How likely nearest neighbours would stand out so by chance, from sorted distances
    ``[B, K]``: the least of the probabilities for the first few spacings, times their number."""
    logs = gap.double().clamp_min(torch.finfo(torch.float64).tiny).log()
    spacing = logs.diff(dim=1) * torch.arange(1, gap.shape[1])
    least = torch.ones(len(gap), dtype=torch.float64)
    tried = min(ALIKE, spacing.shape[1] - 1)
    for k in range(tried):
        others = spacing[:, k + 1 :]
        times = spacing[:, k] / others.sum(1).clamp_min(torch.finfo(torch.float64).tiny)
        least = torch.minimum(least, (1 + times) ** -float(others.shape[1]))
    return tried * least
