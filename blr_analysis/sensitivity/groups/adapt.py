"""New data without the old: the posterior as prior, and a memory of the examples that shape it.

    λ^{\\M} = λ − Σ_{i∈M} λ̃_i,     θ ← argmin Σ_{i∈M} ℓ_i + Σ_{new} ℓ_j − log q^{\\M}(θ)

M are the k examples of largest deviation (memorable past; Pan et al., NeurIPS 2020; Daxberger et
al., 2023): their sites leave the posterior and they stay as data, so that nothing counts twice; all
others stay as the quadratic that their sites are. With ``targets="predictions"`` the memory holds
what the model said of it instead, and the quadratic is around the old weights (K-priors; Khan &
Swaroop, NeurIPS 2021): a term in the functions and one in the weights, each at rest at θ_old. It is
:func:`blr_analysis.what_if`, once to take M out and once to add what is new, and it is iterated:
what comes back is a task and its posterior.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, default_collate

from blr_analysis.backprop.engine import QUIET, chunks, predict
from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.backprop.products import Curvature
from blr_analysis.backprop.tree import add
from blr_analysis.checks import instance, one_of, positive_int
from blr_analysis.errors import InputError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.laplace import curvature_root, fit_laplace
from blr_analysis.posterior.prior import Prior
from blr_analysis.posterior.structures import Tree
from blr_analysis.sensitivity.curvature import cg
from blr_analysis.sensitivity.groups.what_if import what_if
from blr_analysis.sensitivity.minimise import on_a_copy, write
from blr_analysis.sensitivity.objective import with_labels
from blr_analysis.sensitivity.scores import sensitivity
from blr_analysis.task import Task


@dataclass(frozen=True)
class Adapted:
    """A model that went on to new data; give both to :func:`adapt` again.

    Attributes:
        task: a copy of the model at the new weights, with what is remembered and the new data.
        posterior: on those, its prior being what the other old examples said: δ is their diagonal
            precision, around the mean without the memory.
        memory: the examples of the earlier task that are remembered, by index ``[k]``.
        caveat: what is rough about it; empty where nothing is.
    """

    task: Task
    posterior: Posterior
    memory: Tensor
    caveat: str = ""

    def __repr__(self) -> str:
        new = self.task.n_data - len(self.memory)
        caveat = f"; {self.caveat}" * bool(self.caveat)
        return f"Adapted(memory={len(self.memory)}, new={new}{caveat})"


@torch.inference_mode(False)
def adapt(
    task: Task,
    posterior: Posterior,
    new: Task,
    *,
    memory: int = 20,
    targets: str = "labels",
    passes: int | None = None,
    progress: bool | None = None,
) -> Adapted:
    """Let a model learn new data with what its posterior knows of the old, and ``memory`` of them.

    The old data are needed once more, to choose the memory and take its sites out (one sweep);
    after that only the memory is. The precision carried on is the diagonal of S − S_M. Out of a
    "full" or "diag" posterior the memory is taken in its own structure, out of others whole, the
    mean by conjugate gradients; where S − S_M is not positive, since they are not exact, the
    memory's diagonal in their basis is taken, and ``caveat`` says so.

    Args:
        task: the model and the data that it learned last.
        posterior: learned on those.
        new: further data, of the same likelihood; its model is not used.
        memory: k, how many of ``task``'s examples are remembered, fewer than all.
        targets: of the memory while the new data are learned: its "labels", or the old model's
            "predictions".
        passes: over memory and new data, about; None: as in :func:`blr_analysis.what_if`.
        progress: None shows a bar on a terminal when the work is long.

    Raises:
        InputError: a memory below 1 or of all examples, new data of another likelihood.
        PosteriorError, ModelError, DataError: as :func:`blr_analysis.what_if`.

    Example:
        >>> import blr_analysis as blr
        >>> X = torch.randn(60, 2)
        >>> task, new = (blr.Task(torch.nn.Linear(2, 2), (x, (x[:, 0] > 0).long()))
        ...              for x in (X, X + 1))
        >>> q = blr.fit_laplace(task, structure="diag", prior_precision=1.0, progress=False)
        >>> first = adapt(task, q, new, memory=5, progress=False)
        >>> second = adapt(first.task, first.posterior, new, memory=5, progress=False)
        >>> second, second.posterior.structure
        (Adapted(memory=5, new=60), 'diag')
    """
    instance("new", new, Task, "a blr_analysis.Task with the new data")
    if positive_int("memory", memory) >= task.n_data:
        raise InputError(f"memory must be below the {task.n_data} examples, got {memory}")
    one_of("targets", targets, ("labels", "predictions"))
    scores = sensitivity(task, posterior, progress=progress)
    deviation = scores.self_influence if scores.deviation is None else scores.deviation
    kept = deviation.reshape(task.n_data, -1).abs().sum(1).topk(memory).indices
    own, rough = posterior.structure in ("diag", "full"), ""
    found = None if own else _without(task, posterior.on(task), kept)
    if found is None:
        cavity = what_if(
            task,
            posterior,
            remove=kept,
            solver="posterior",
            evaluate=task.subset(kept),
            progress=progress,
        ).posterior
        found = dict(cavity.mean), {n: cavity.precision(n) for n in cavity.mean}
        rough = "" if own else f"memory out of {posterior.structure}: rough"
    around, precision = found
    remembered = shown = task.subset(kept)
    if targets == "predictions":
        around = dict(posterior.mean)
        said = task.likelihood.mean(predict(remembered, posterior.mean, progress=progress)[0])
        shown = with_labels(remembered, dict(enumerate(said)))
    prior = Prior({**precision}, dict(around))
    start = fit_laplace(
        shown, structure="diag", prior_precision=prior, initial=around, progress=progress
    )
    moved = what_if(
        shown, start, add=new, solver="cg", passes=passes, evaluate=new, progress=progress
    )
    under = on_a_copy(task)
    write(under, moved.parameters)
    both = replace(
        task.examples,
        dataset=ConcatDataset([remembered.dataset, new.dataset]),
        collate=default_collate,
    )
    joint = Task(under.model, both, likelihood=task.likelihood, forward=task.forward)
    q = fit_laplace(
        joint, structure="diag", prior_precision=prior, initial=around, progress=progress
    )
    return Adapted(joint, q, kept, rough)


def _without(task: Task, q: Posterior, kept: Tensor) -> tuple[Tree, Tree] | None:
    """m + (S − S_M)⁻¹ Σ_{i∈M} J_iᵀ e_i and the diagonal of S − S_M, S_M whole; None where that is
    not positive."""
    share, slope = Curvature(task, q.mean, indices=kept), loss_and_gradient(task, q.mean, kept)[0]
    solved = cg(
        lambda v: add(q.precision_product(v), -1.0, share.product(v, progress=False)),
        slope,
        preconditioner=q,
        tolerance=10 * torch.finfo(next(iter(slope.values())).dtype).eps ** 0.75,
        progress=False,
    )
    precision = {n: q.precision(n).clone() for n in q.mean}
    for chunk in chunks(task, q.mean, QUIET, indices=kept):
        for term in chunk.terms(curvature_root(chunk)):
            for name, squares in term.square_sum().items():
                precision[name] -= squares
    positive = all(bool((p > 0).all()) for p in precision.values())
    if not positive or bool(solved.indefinite.any()) or not bool(solved.converged.all()):
        return None
    return add(dict(q.mean), 1.0, solved.x), precision
