"""What a run will take, before it begins; nothing is written.

Passes over the data are counted. One chunk is run to see the layers, and a few examples to time
them. Peak memory is that of the process after the chunk, and what the posterior adds to it.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunk, chunks
from blr_analysis.backprop.matrices import Joint
from blr_analysis.posterior.fit import sampled_examples, vocabulary_of
from blr_analysis.posterior.precision_files import FACTORED
from blr_analysis.posterior.stationarity import n_single_gradients
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
        """For sweeps and trainings together.

        Args:
            task: the model and its data.
            swept: examples that sweeps run, in all.
            trained: examples that trainings take, one after the other.
            disk: bytes that are written beside the factors of the posterior.
            structure: of the posterior; the factors of "kron" and "gram" are counted.
        """
        params = task.parameters()
        itemsize = next(iter(params.values())).element_size()
        chunk = next(iter(chunks(task.quiet, params, columns=1)))
        numbers_in_memory = 2 * sum(p.numel() for p in params.values())
        if structure in FACTORED:
            layers = _layers_with_factors(task, params, chunk)
            numbers_in_memory += sum(map(_numbers_of_factors, layers))
            count = _numbers_of_factors if structure == "kron" else _numbers_of_gram
            disk += itemsize * sum(map(count, layers))
        memory = _peak_memory() + itemsize * numbers_in_memory
        seconds = swept * sweep_seconds(task, params) + trained * step_seconds(task)
        return cls((swept + trained) / task.n_data, memory, disk, seconds)


def _layers_with_factors(task: Task, params: dict[str, Tensor], chunk: Chunk) -> list[Joint]:
    """The matrices of the model that get Kronecker factors, each once."""
    vocabulary = vocabulary_of(task, params)
    error = chunk.likelihood.error(chunk.outputs, chunk.targets)
    layers = {}
    for term in chunk.terms(error.unsqueeze(1), last=True):
        factors = term.factors(vocabulary=vocabulary)
        if factors is not None:
            joint = factors[0]
            layers[joint.key] = joint
    return list(layers.values())


def _numbers_of_factors(joint: Joint) -> int:
    """A and G of one matrix."""
    inputs = joint.layout.columns + (joint.bias is not None)
    return joint.layout.groups * (inputs**2 + joint.layout.rows**2)


def _numbers_of_gram(joint: Joint) -> int:
    """A of one matrix, less the rows of a diagonal precision that one row of "gram" stands for."""
    inputs = joint.layout.columns + (joint.bias is not None)
    return joint.layout.groups * (inputs**2 - inputs * (joint.layout.rows - 1))


def _peak_memory() -> int:
    """The most bytes that this process had so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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
    """What an example takes in a training, in which frozen layers run anew."""
    trainable = {n: p for n, p in task.model.named_parameters() if p.requires_grad}
    leaves = {n: p.detach().clone().requires_grad_() for n, p in trainable.items()}

    def step(indices: Tensor) -> None:
        with torch.enable_grad(), task.evaluation(), task.frozen.off():
            outputs, targets = task.run(task.fetch(indices), leaves, indices)
            loss = task.likelihood.at(indices).nll(outputs, targets).sum()
            torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)

    return _timed(task, step)


def _timed(task: Task, run: Callable[[Tensor], None]) -> float:
    """Seconds for an example: of examples from all over the data, run for the second time."""
    n = task.n_data
    indices = torch.linspace(0, n - 1, min(n, TIMED), dtype=torch.float64).long()
    run(indices)
    _wait_for(task.device)
    started = time.perf_counter()
    run(indices)
    _wait_for(task.device)
    return (time.perf_counter() - started) / len(indices)


def _wait_for(device: torch.device) -> None:
    """Until a GPU has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fit_examples(task: Task, structure: str, *, found: bool = False) -> int:
    """The examples that :func:`blr_analysis.fit_laplace` runs; ``found``: where it finds δ."""
    n = task.n_data
    sample = sampled_examples(task)
    for_kron = n + (n if sample is None else len(sample))
    if structure == "kron":
        for_the_fit = for_kron
        for_the_prior = n + n_single_gradients(task)
    else:
        for_the_fit = n
        for_the_prior = for_kron + n + n_single_gradients(task)  # by a Kronecker fit
    return for_the_fit + for_the_prior if found else for_the_fit
