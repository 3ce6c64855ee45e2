"""Is the model at the minimum of the loss that the task names? Everything else assumes it.

    F(θ) = Σ_i ℓ_i(θ) + ½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀),     g = ∇F(m)
    decrement  ½ gᵀ Σ g                what a Newton step from m would gain, in nats
    pull       1/N Σ_i ½ g_iᵀ Σ g_i    what one example pulls at the model with, on average
    batch      N Σ_i ‖g_i‖² / ‖g‖²     of a block: minibatches below this size do not see its g

A group is told from the training that goes on where its pull is ten times the decrement; n examples
that pull independently of each other have n times one example's.

Source: McCandlish et al., "An empirical model of large-batch training", 2018 (the noise scale).
"""

from __future__ import annotations

import math
from dataclasses import asdict
from weakref import WeakKeyDictionary

import torch

from blr_analysis.backprop.engine import QUIET, chunks
from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.backprop.tree import dot, norm
from blr_analysis.posterior.fingerprint import fingerprint, recorded
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.minimum import DRIFT, Stationarity
from blr_analysis.posterior.structures import Tree
from blr_analysis.task import Task

SAMPLE = 256  # examples whose own gradients are taken


_SEEN: WeakKeyDictionary[Posterior, tuple[Task, Stationarity]] = WeakKeyDictionary()


@torch.inference_mode(False)  # also where the caller switched it on
def stationarity(task: Task, posterior: Posterior) -> Stationarity:
    """Whether a posterior's mean minimises the task's loss and its prior; kept with the posterior.

    One forward and backward pass over the data, and the gradients of up to 256 examples.

    Raises:
        PosteriorError, ModelError, DataError: as :func:`blr_analysis.sensitivity`.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 2), torch.randn(60)
        >>> task = blr.Task(torch.nn.Linear(2, 1), (X, y), likelihood="gaussian")
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0, progress=False)
        >>> stationarity(task, q).at_minimum
        False
    """
    seen = _SEEN.get(posterior)
    if seen is not None and seen[0] is task:
        return seen[1]
    q = posterior.on(task)
    kept = posterior.stationarity
    if kept is None or kept.likelihood != task.likelihood.recorded or not recorded(task, q):
        kept = measured(task, q, loss_and_gradient(task, q.mean)[0])
    _SEEN[posterior] = (task, kept)
    return kept


def measured(task: Task, q: Posterior, slope: Tree) -> Stationarity:
    """The same from Σ_i ∇ℓ_i, written into the posterior's record."""
    pull = q.prior.times(q.prior.gap(q.mean))
    g = {n: s + pull[n] for n, s in slope.items()}
    decrement = _gain(q, g)
    order = torch.randperm(task.n_data, generator=torch.Generator().manual_seed(0))
    chosen = order[:SAMPLE].sort().values
    single, noise = 0.0, dict.fromkeys(q.mean, 0.0)
    for chunk in chunks(task, q.mean, QUIET, columns=1, indices=chosen):
        error = chunk.likelihood.error(chunk.outputs, chunk.targets)
        terms = chunk.terms(error.unsqueeze(1), last=True)
        single += 0.5 * float(q.form.gram(terms).double().sum())
        for term in terms:
            for name, squares in term.square_sum().items():
                noise[name] += float(squares.double().sum())
    times = task.n_data / len(chosen)
    blocks = {
        n: {"gradient": math.sqrt(_square(x)), "noise": math.sqrt(times * noise[n])}
        for n, x in g.items()
    }
    size = norm(slope) + norm(pull)
    residual = norm(g) / size if size > 0 else 0.0
    said = task.likelihood.recorded
    kept = Stationarity(residual, decrement, single / len(chosen), task.n_data, blocks, said)
    q.record["stationarity"] = asdict(kept)
    q.record.setdefault("fingerprint", fingerprint(task, q.mean))
    return kept


def caveat_of(posterior: Posterior) -> str:
    """What its record says against it, where stationarity was measured; "" where it was not."""
    kept = posterior.stationarity
    return "" if kept is None else kept.caveat


def drifts(task: Task, q: Posterior, gradient: Tree) -> bool:
    """Whether a change that pulls with this gradient is lost in the training that goes on."""
    return stationarity(task, q).decrement > DRIFT * _gain(q, gradient)


def _gain(q: Posterior, g: Tree) -> float:
    """½ gᵀ Σ g, summed in float64."""
    return 0.5 * dot(g, q.form.solve(g))


def _square(x: torch.Tensor) -> float:
    return float(x.double().square().sum())
