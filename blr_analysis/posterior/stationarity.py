"""Is the model at the minimum of the loss that the task names? Analyses of single examples need it.

    F(θ) = Σ_i ℓ_i(θ) + ½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀),     g = ∇F(m)
    decrement  ½ gᵀ Σ g                how much F falls in a Newton step from m, in nats
    pull       1/N Σ_i ½ g_iᵀ Σ g_i    how much one example pulls at the model, on average

Leaving out a group of examples moves the model by the group's pull, and further training moves it
by the decrement. The two can be told apart where the pull is ten times the decrement. Examples that
pull independently of each other add up: n of them pull n times as much as one.

Far from a minimum F is no parabola, and the decrement can exceed F(m) itself, the most that any
step gains where losses are at least 0.

A fit measures both numbers and stores them in its posterior. Where there was no fit, the first
analysis measures them and stores them beside the posterior, which is not changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch

from blr_analysis.backprop.engine import Chunk, chunks
from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.backprop.tree import add, dot, norm
from blr_analysis.data import Examples
from blr_analysis.posterior.minimum import Stationarity
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.recognition import differs, fingerprint
from blr_analysis.posterior.structures import Tree
from blr_analysis.task import Task

EXAMPLES = 256  # whose gradients are computed one by one
SEQUENCES = 64  # the same, of sequences


@dataclass(frozen=True)
class Measurement:
    """How far a posterior is from the minimum on these examples.

    Attributes:
        stationarity: decrement, pull and the like.
        saturated: the share of predictions that are exactly 0 or 1.
        examples: the data that they were measured on.
    """

    stationarity: Stationarity
    saturated: float
    examples: ReferenceType[Examples]


_MEASURED: WeakKeyDictionary[Posterior, Measurement] = WeakKeyDictionary()


@torch.inference_mode(False)  # also where the caller switched it on
def stationarity(task: Task, posterior: Posterior) -> Stationarity:
    """Whether a posterior's mean minimises the task's loss and its prior.

    Unless the fit measured it on this loss and these data, this takes one forward and backward pass
    over the data, and the gradients of up to 256 single examples.

    Raises:
        PosteriorError, ModelError, DataError: as :func:`blr_analysis.sensitivity`.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 2), torch.randn(60)
        >>> task = blr.Task(torch.nn.Linear(2, 1), (X, y), likelihood="gaussian")
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
        >>> stationarity(task, q).at_minimum
        False
    """
    on_task = posterior.on(task).as_drawn
    if on_task.stationarity is not None and _is_fitted_to(on_task, task):
        return on_task.stationarity
    return _measured_once(task, posterior, on_task).stationarity


def with_stationarity(
    task: Task, posterior: Posterior, on_task: Posterior | None = None
) -> Posterior:
    """The posterior on the task's device with its stationarity on this task's loss and data.

    Args:
        on_task: the posterior on the task's device; None: it is moved there.
    """
    q = posterior.on(task) if on_task is None else on_task
    if q.stationarity is not None and _is_fitted_to(q, task):
        return q
    measurement = _measured_once(task, posterior, q)
    return q.changed(stationarity=measurement.stationarity, saturated=measurement.saturated)


def _is_fitted_to(q: Posterior, task: Task) -> bool:
    """Whether a posterior's stationarity was measured on this loss and these data."""
    if q.stationarity is None or q.fingerprint is None:
        return False
    if q.stationarity.likelihood != task.likelihood.recorded:
        return False
    return not differs(q.fingerprint, fingerprint(task, q.mean), strictly=True)


def _measured_once(task: Task, posterior: Posterior, on_task: Posterior) -> Measurement:
    """The posterior's measurement on this task: an earlier one, or a new one that is stored."""
    measurement = _MEASURED.get(posterior)
    if measurement is None or not _was_made_on(task, measurement):
        gradient, _ = loss_and_gradient(task, on_task.mean)
        measurement = measured(task, on_task, gradient)
        _MEASURED[posterior] = measurement
    return measurement


def _was_made_on(task: Task, measurement: Measurement) -> bool:
    """Whether a measurement is of the task's loss and examples."""
    same_loss = measurement.stationarity.likelihood == task.likelihood.recorded
    return same_loss and measurement.examples() is task.examples


def measured(task: Task, q: Posterior, gradient: Tree) -> Measurement:
    """How far the posterior's mean is from the minimum.

    Args:
        q: the posterior on the task's device.
        gradient: Σ_i ∇ℓ_i at the posterior's mean.
    """
    pull_of_prior = q.prior.times(q.prior.gap(q.mean))
    g = add(gradient, 1.0, pull_of_prior)
    sum_of_norms = norm(gradient) + norm(pull_of_prior)
    residual = norm(g) / sum_of_norms if sum_of_norms > 0 else 0.0
    singles = _single_examples(task, q)
    objective = None
    if task.likelihood.is_classification:
        objective = task.n_data * singles.loss + 0.5 * dot(q.prior.gap(q.mean), pull_of_prior)
    numbers = Stationarity(
        residual=residual,
        decrement=gain(q, g),
        pull=singles.pull,
        n_data=task.n_data,
        likelihood=task.likelihood.recorded,
        objective=objective,
    )
    return Measurement(numbers, singles.saturated, ref(task.examples))


def n_single_gradients(task: Task) -> int:
    """The number of examples whose gradients are computed one by one."""
    limit = SEQUENCES if task.likelihood.is_sequence else EXAMPLES
    return min(task.n_data, limit)


@dataclass(frozen=True)
class SingleExamples:
    """Means over a random sample of the examples.

    Attributes:
        pull: ½ g_iᵀ Σ g_i.
        loss: ℓ_i.
        saturated: 1 for a saturated example, 0 for another.
    """

    pull: float
    loss: float
    saturated: float


def _single_examples(task: Task, q: Posterior) -> SingleExamples:
    """The pull, the loss and the saturation of a random sample."""
    order = torch.randperm(task.n_data, generator=torch.Generator().manual_seed(0))
    sample = order[: n_single_gradients(task)].sort().values
    pull = 0.0
    loss = 0.0
    n_saturated = 0
    sweep = chunks(
        task.quiet,
        q.mean,
        columns=1,
        indices=sample,
        label="distance from the minimum",
        in_order=False,
    )
    for chunk in sweep:
        error = chunk.likelihood.error(chunk.outputs, chunk.targets)
        terms = chunk.terms(error.unsqueeze(1), last=True)
        pull += 0.5 * float(q.form.gram(terms).double().sum())
        loss += float(chunk.likelihood.nll(chunk.outputs, chunk.targets).double().sum())
        n_saturated += _count_of_saturated(chunk)
    n = len(sample)
    return SingleExamples(pull / n, loss / n, n_saturated / n)


def _count_of_saturated(chunk: Chunk) -> int:
    """How many examples are saturated: each of their probabilities is 0 or 1.

    The diagonal of their output Hessian, p (1 − p), is 0 up to the rounding of float64.
    """
    if chunk.likelihood.is_sequence or not chunk.likelihood.is_classification:
        return 0
    likelihood = chunk.likelihood.plain
    outputs = chunk.outputs.double()
    parts = likelihood.hessian_parts(outputs, chunk.targets)
    if parts is None:
        diagonal = likelihood.hessian(outputs, chunk.targets).diagonal(dim1=1, dim2=2)
    else:
        s, v = parts  # Λ = diag(s) − v vᵀ
        diagonal = s - v.square()
    return int((diagonal.amax(1) < torch.finfo(torch.float64).eps).sum())


def gain(q: Posterior, g: Tree) -> float:
    """½ gᵀ Σ g in nats, summed in float64: the loss gained by the Newton step −Σ g."""
    return 0.5 * dot(g, q.form.solve(g))
