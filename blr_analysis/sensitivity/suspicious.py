"""Which examples look wrong: mislabelled, unlike the others, or there twice.

    wrong label      mean_t ℓ_i(t)      over the checkpoints t of the run, unweighted
    P(y_i is wrong)  see :mod:`blr_analysis.sensitivity.wrong_labels`
    unfamiliarity    tr(Λ_i V_i)
    duplicate        closeness of the nearest other example (:mod:`blr_analysis.sensitivity.twins`)

Labels that are wrong are learned late, and what is learned by heart at the end was contradicted
before (Pleiss et al., 2020).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blr_analysis import checks
from blr_analysis.checks import at_least, instance, positive_int
from blr_analysis.errors import InputError
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.sensitivity.results import FAULTS, NO_FAULT, LeaveOneOut, Suspicions
from blr_analysis.sensitivity.subjects import Subject, subject_of
from blr_analysis.sensitivity.subjects.contract import Suspects, first_by
from blr_analysis.sensitivity.twins import nearest
from blr_analysis.task import Task

CLOSE = 0.5  # a twin at less than half the distance of the tenth neighbour
LIKELY = 0.5  # more likely wrong than right
UNLIKELY = 0.01  # wrong for at most one label in a hundred


@torch.inference_mode(False)  # also where the caller switched it on
def suspicious(
    task: Task,
    posterior: Posterior | Sequence[Posterior] | None = None,
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
    at_least(0, "seed", seed)
    subject = subject_of(task, posterior)
    left_out = subject.left_out()
    return suspicions_of(
        subject, left_out, duplicates=duplicates, share=share, samples=samples, seed=seed
    )


def suspicions_of(
    subject: Subject,
    left_out: LeaveOneOut,
    *,
    duplicates: bool = True,
    share: float = 0.05,
    samples: int = 32,
    seed: int = 0,
) -> Suspicions:
    """The same from left-out predictions that are there already."""
    suspects = subject.suspects(left_out, share)
    closeness = twin = distinct = None
    if duplicates and subject.n < 3:
        raise InputError(f"twins take 3 examples or more, got {subject.n}; or duplicates=False")
    responses = subject.responses(samples, seed) if duplicates else None
    if responses is not None:
        closeness, twin, stands_out = nearest(*responses, progress=subject.progress)
        distinct = closeness.where(stands_out, 0)
    kind, order = judged(suspects, distinct, share)
    notes = [subject.note, none_called(suspects, kind)]
    return Suspicions(
        losses=suspects.losses,
        training=suspects.training,
        left_out=suspects.left_out,
        wrong=suspects.wrong,
        proposed=suspects.proposed,
        targets=suspects.targets,
        predictions=suspects.predictions,
        unfamiliarity=suspects.unfamiliarity,
        closeness=closeness,
        twin=twin,
        kind=kind,
        order=order,
        likelihood=subject.likelihood,
        metadata=subject.metadata,
        note="; ".join(filter(None, notes)),
    )


def none_called(suspects: Suspects, kind: Sequence[str]) -> str:
    """Why no label is called wrong though the model contradicts some, in one line; "" elsewhere."""
    if suspects.wrong is None or "label" in kind:
        return ""
    contradicted = int(suspects.contradicted.sum())
    if not contradicted:
        return ""
    likeliest = float(suspects.wrong.max())
    if likeliest == 0:
        reason = "left-out predictions explain labels no better than the classes' shares do"
    elif likeliest < UNLIKELY:
        reason = "the run's predictions explain all labels as they are (learned by heart?)"
    else:
        reason = "none is more likely wrong than right"
    return f"no label is called wrong ({contradicted} contradicted): {reason}; read the ranking"


def judged(suspects: Suspects, closeness: Tensor | None, share: float) -> tuple[list[str], Tensor]:
    """The kind of every example, and all of them in order: the contradicted by their loss, then
    strangers, then duplicates, each the first ``share`` of its ranking, then the rest by loss.

    A contradicted example has a wrong label where that is more likely than not; else it may have
    another fault.
    """
    losses, contradicted = suspects.losses, suspects.contradicted
    fault = torch.full((len(losses),), len(FAULTS))
    place = fault.clone()  # in the order: the worst kind first
    scores = losses.clone()
    if closeness is not None:
        twins = (closeness > CLOSE) & first_by(closeness, share)
        fault[twins] = place[twins] = FAULTS.index("duplicate")
        scores[twins] = closeness[twins].to(scores)
    if suspects.unfamiliarity is not None:
        strangers = first_by(suspects.unfamiliarity, share)
        fault[strangers] = place[strangers] = FAULTS.index("unfamiliar")
        scores[strangers] = suspects.unfamiliarity[strangers].to(scores)
    wrong = contradicted
    if suspects.wrong is not None:
        wrong = contradicted & (suspects.wrong > LIKELY)
    fault[wrong] = place[contradicted] = FAULTS.index("label")
    scores[contradicted] = losses[contradicted]
    by_score = scores.argsort(descending=True, stable=True)
    order = by_score[place[by_score].argsort(stable=True)]
    names = (*FAULTS, NO_FAULT)
    return [names[k] for k in fault.tolist()], order
