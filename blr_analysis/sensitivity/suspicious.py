"""Which examples look wrong: mislabelled, unlike the others, or duplicates.

    wrong label      mean_t ℓ_i(t)      over the checkpoints t of the run, unweighted
    P(y_i is wrong)  see :mod:`blr_analysis.sensitivity.wrong_labels`
    unfamiliarity    tr(Λ_i V_i)
    duplicate        closeness of the nearest other example (:mod:`blr_analysis.sensitivity.twins`)

Of the texts of a causal language model, mean_t ℓ_i(t) less what a guess by the words' frequencies
loses at text i: shuffled words are no better predicted than that, however frequent they are.

Wrong labels are learned late: a model that has memorised one at the end contradicted it earlier in
its training (Pleiss et al., 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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

FAULT_NAMES = (*FAULTS, NO_FAULT)  # the most suspicious first
CLOSE = 0.5  # closeness of a duplicate: nearer than half the distance of the tenth neighbour
LIKELY = 0.5  # probability above which a label is called wrong


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

    It takes the time of :func:`blr_analysis.sensitivity` for every posterior. Duplicates take
    another ``samples`` forward passes, and a comparison of all pairs of examples (at most N² · 512
    operations, in blocks).

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data; or a list of the posteriors of several runs. With
            checkpoints it finds more of the wrong labels that the model has memorised.
        duplicates: whether to look for duplicates.
        share: at most this share of the examples is called unfamiliar, and at most this share
            duplicates (which also need a closeness above ½ that chance does not explain). For
            regression and sequences it is also the share whose labels are called wrong, by their
            loss. Labels of classes are called wrong if that is more likely than not.
        samples: the number of draws of the weights that find duplicates.
        seed: of those draws.

    Raises:
        InputError: there is no posterior, the share is not between 0 and 1, there are no samples,
            or there are fewer than three examples to find duplicates among.
        PosteriorError, ModelError, DataError: the errors of :func:`blr_analysis.sensitivity`.

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
    """The suspicions of :func:`suspicious`, from left-out predictions that exist already."""
    suspects = subject.suspects(left_out, share)
    twins = _twins_of(subject, samples, seed) if duplicates else NO_TWINS
    kind, order = judged(suspects, twins.beyond_chance, share)
    no_label_called = none_called(suspects, kind)
    notes = [subject.note, no_label_called]
    return Suspicions(
        losses=suspects.losses,
        guess=suspects.guess,
        training=suspects.training,
        left_out=suspects.left_out,
        wrong=suspects.wrong,
        proposed=suspects.proposed,
        targets=suspects.targets,
        predictions=suspects.predictions,
        unfamiliarity=suspects.unfamiliarity,
        closeness=twins.closeness,
        twin=twins.twin,
        kind=kind,
        order=order,
        likelihood=subject.likelihood,
        metadata=subject.metadata,
        no_label_called=no_label_called,
        note="; ".join(filter(None, notes)),
    )


class Twins(NamedTuple):
    """The nearest other example of each, ``[N]`` each; None where they were not computed.

    Attributes:
        twin: its index.
        closeness: how near it is, from 0 to 1.
        beyond_chance: the closeness, or 0 where chance explains it.
    """

    twin: Tensor | None
    closeness: Tensor | None
    beyond_chance: Tensor | None


NO_TWINS = Twins(None, None, None)


def _twins_of(subject: Subject, samples: int, seed: int) -> Twins:
    """The twins of a subject's examples; none of a model without weights."""
    if subject.n < 3:
        raise InputError(f"twins take 3 examples or more, got {subject.n}; or duplicates=False")
    measured = subject.responses(samples, seed)
    if measured is None:
        return NO_TWINS
    responses, rounding = measured
    closeness, twin, stands_out = nearest(responses, rounding, progress=subject.progress)
    return Twins(twin, closeness, closeness.where(stands_out, 0))


def none_called(suspects: Suspects, kind: Sequence[str]) -> str:
    """One line on why no label is called wrong although the model contradicts some.

    It is "" if some label is called wrong, or none is contradicted.
    """
    if suspects.wrong is None or "label" in kind:
        return ""
    contradicted = int(suspects.contradicted.sum())
    if contradicted == 0:
        return ""
    if float(suspects.wrong.max()) == 0:
        reason = (
            "the model's own errors explain them as well as wrong labels do (a weak model, or "
            "labels learned by heart?)"
        )
    else:
        reason = "none is more likely wrong than right"
    return f"no label is called wrong ({contradicted} contradicted): {reason}; read the ranking"


def judged(suspects: Suspects, closeness: Tensor | None, share: float) -> tuple[list[str], Tensor]:
    """The suspected fault of every example, and all examples in the order of suspicion.

    The order has four groups: contradicted labels by their loss (texts by what it is above that of
    a guess by frequency), unfamiliar examples by their
    unfamiliarity, duplicates by their closeness, and the rest by loss. A contradicted label is
    called wrong if that is more likely than not; otherwise the example may have another fault.

    Args:
        suspects: the measures.
        closeness: of the nearest other example beyond chance; None: duplicates were not sought.
        share: the share of unfamiliar examples, and at most that of duplicates.

    Returns:
        A name of FAULTS or NO_FAULT for every example, and indices ``[N]``.
    """
    losses = suspects.losses if suspects.guess is None else suspects.losses - suspects.guess
    contradicted = suspects.contradicted
    fault = torch.full((len(losses),), FAULT_NAMES.index(NO_FAULT))
    group = fault.clone()  # which of the four groups of the order an example is in
    score = losses.clone()  # its rank within the group
    if closeness is not None:
        is_duplicate = (closeness > CLOSE) & first_by(closeness, share)
        fault[is_duplicate] = FAULT_NAMES.index("duplicate")
        group[is_duplicate] = FAULT_NAMES.index("duplicate")
        score[is_duplicate] = closeness[is_duplicate].to(score)
    if suspects.unfamiliarity is not None:
        is_unfamiliar = first_by(suspects.unfamiliarity, share)
        fault[is_unfamiliar] = FAULT_NAMES.index("unfamiliar")
        group[is_unfamiliar] = FAULT_NAMES.index("unfamiliar")
        score[is_unfamiliar] = suspects.unfamiliarity[is_unfamiliar].to(score)
    is_wrong = contradicted
    if suspects.wrong is not None:
        is_wrong = contradicted & (suspects.wrong > LIKELY)
    fault[is_wrong] = FAULT_NAMES.index("label")
    group[contradicted] = FAULT_NAMES.index("label")
    score[contradicted] = losses[contradicted]
    by_score = score.argsort(descending=True, stable=True)
    order = by_score[group[by_score].argsort(stable=True)]
    return [FAULT_NAMES[k] for k in fault.tolist()], order
