"""What a run will take, before it: passes over the data counted, one chunk of them run to see the
layers, a few examples run to time them, nothing written.

Peak memory is that of the process after the chunk, and what the posterior adds to it.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.backprop.engine import chunks
from blr_analysis.posterior.fit import sampled_examples, vocabulary_of
from blr_analysis.posterior.precision_files import FACTORED
from blr_analysis.posterior.stationarity import SAMPLE
from blr_analysis.task import Task

TIMED = 32  # examples that are run to time them
MOST_COLUMNS = 100  # outputs of an example, each of which is timed


@dataclass(frozen=True)
class Forecast:
    """What a run will take.

    Attributes:
        passes: over the data: examples that are run, over N.
        memory, disk: of the whole run; bytes.
        seconds: by the time that a few examples took, twice as long or half as long where the
            machine has other work.
    """

    passes: float
    memory: int
    disk: int
    seconds: float

    @classmethod
    def of(
        cls, task: Task, swept: int, *, trained: int = 0, disk: int = 0, structure: str = ""
    ) -> Forecast:
        """For sweeps over so many examples in all.

        Args:
            trained: examples that trainings take, one after the other.
            structure: with factors, which are written beside ``disk``.
        """
        params, factors = task.parameters(), {False: 0, True: 0}
        vocabulary, layers = vocabulary_of(task, params), {}
        chunk = next(iter(chunks(task.quiet, params, columns=1)))
        error = chunk.likelihood.error(chunk.outputs, chunk.targets)
        for term in chunk.terms(error.unsqueeze(1), last=True) if structure in FACTORED else ():
            if (found := term.factors(vocabulary=vocabulary)) is not None:
                layers[found[0].key] = found[0]
        for joint in layers.values():  # numbers, of the inputs alone and with the outputs'
            g, o, i = joint.layout.groups, joint.layout.rows, joint.layout.columns
            i += joint.bias is not None
            factors[False] += g * (i * i - i * (o - 1))  # rows of a "gram" are alike
            factors[True] += g * (i * i + o * o)
        itemsize = next(iter(params.values())).element_size()
        if structure in FACTORED:
            disk += itemsize * factors[structure == "kron"]
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        held = itemsize * (2 * sum(p.numel() for p in params.values()) + factors[True])
        seconds = swept * sweep_seconds(task, params) + trained * step_seconds(task)
        return cls((swept + trained) / task.n_data, peak + held, disk, seconds)


def sweep_seconds(task: Task, params: Mapping[str, Tensor]) -> float:
    """What an example takes in a sweep: a forward pass, and a backward pass for each output; of
    sequences and of many outputs one."""

    def sweep(indices: Tensor) -> None:
        chunk = next(iter(chunks(task.quiet, params, size=len(indices), indices=indices)))
        if chunk.outputs.ndim == 2 and chunk.outputs.shape[1] <= MOST_COLUMNS:
            chunk.jacobian_terms()
        else:
            error = chunk.likelihood.error(chunk.outputs, chunk.targets)
            chunk.terms(error.unsqueeze(1), last=True)

    return _timed(task, sweep)


def step_seconds(task: Task) -> float:
    """What an example takes in a training."""
    trainable = {n: p for n, p in task.model.named_parameters() if p.requires_grad}
    leaves = {n: p.detach().clone().requires_grad_() for n, p in trainable.items()}

    def step(indices: Tensor) -> None:
        with torch.enable_grad(), task.evaluation():
            outputs, targets = task.run(task.fetch(indices), leaves, indices)
            loss = task.likelihood.at(indices).nll(outputs, targets).sum()
            torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)

    return _timed(task, step)


def _timed(task: Task, run: Callable[[Tensor], None]) -> float:
    """Seconds for an example, of examples from all over the data, the second time they are run."""
    few = torch.linspace(0, task.n_data - 1, min(task.n_data, TIMED), dtype=torch.float64).long()
    run(few)
    if task.device.type == "cuda":
        torch.cuda.synchronize(task.device)
    started = time.perf_counter()
    run(few)
    if task.device.type == "cuda":
        torch.cuda.synchronize(task.device)
    return (time.perf_counter() - started) / len(few)


def fit_examples(task: Task, structure: str, *, found: bool = False) -> int:
    """The examples that :func:`blr_analysis.fit_laplace` runs; ``found``: where it finds δ."""
    n, few = task.n_data, sampled_examples(task)
    kron = n + (n if few is None else len(few))
    own = kron if structure == "kron" else n
    if not found:
        return own
    return own + (0 if structure == "kron" else kron) + n + min(n, SAMPLE)
