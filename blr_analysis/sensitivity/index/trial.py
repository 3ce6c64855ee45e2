"""What an index will take: an index of a few examples is computed and timed, and not written."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from blr_analysis.backprop.engine import chunks
from blr_analysis.data.examples import evenly_spread
from blr_analysis.posterior import Forecast
from blr_analysis.posterior.forecast import peak_memory, wait_for
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.progress import profiled
from blr_analysis.sensitivity.index.build import (
    fingerprint,
    measured_error,
    of_one_checkpoint,
    probe,
)
from blr_analysis.sensitivity.index.projection import DTYPES, Projection, records_of
from blr_analysis.sensitivity.index.sketch import Sketch
from blr_analysis.sensitivity.index.stored import SHARD
from blr_analysis.sensitivity.influence.blocks import loss_terms, physical_memory
from blr_analysis.sensitivity.training_errors import mean_errors
from blr_analysis.task import Task

EXAMPLES = 32  # of the trial, at least
COPIES = 3  # times that a build reads or writes all of its posterior

Fit = Callable[[Task], Posterior]


def build_forecast(
    task: Task,
    rank: int,
    fit: Fit,
    fitted_examples: Callable[[Task], int],
    *,
    structure: str,
    dtype: str = "int8",
) -> Forecast:
    """What the fit of a posterior and the build of an index take.

    Both are done for :data:`EXAMPLES` examples, spread evenly over the data, or for as many as a
    sweep computes together, if these are more. The time of the trial's sweeps is multiplied by how
    many more examples all sweeps visit; that of the rest (eigenvectors, reading and writing the
    posterior) stays as it is. The memory is the peak of this process.

    Where the posterior's factors do not fit into the memory there is no trial, and the time is that
    of the sweeps alone.

    Args:
        fit: fits the posterior, or reads it.
        fitted_examples: how many examples the fit to a task visits; 0 where one is read.
        structure: of the posterior that is fitted; "" where one is read.
    """
    n_fitted = fitted_examples(task)
    n_measured = measured_examples(task.n_data)
    n_swept = n_fitted + n_measured + task.n_data
    parameters = task.parameters().values()
    numbers = min(rank, sum(p.numel() for p in parameters))
    stored = task.n_data * numbers * DTYPES[dtype].itemsize
    without_trial = Forecast.of(task, n_swept, disk=stored, structure=structure)
    if without_trial.memory > memory_of(task.device):
        return without_trial

    n_trial = max(EXAMPLES, _size_of_first_chunk(task))
    trial_task = task.subset(evenly_spread(task.n_data, n_trial)).quiet
    q, seconds_of_sweeps, seconds_of_the_rest = _timed_fit(trial_task, fit)
    seconds = seconds_of_sweeps * n_fitted / max(1, fitted_examples(trial_task))
    seconds += seconds_of_the_rest * (1 + len(task.checkpoints))
    projection = Projection(trial_task, Sketch.of(q, rank), mean_errors(trial_task, q))
    seconds += _seconds_of_build(projection, DTYPES[dtype], task.n_data, n_measured)
    further_rows = max(0, min(SHARD, task.n_data) - trial_task.n_data)  # of the first file
    return Forecast(
        passes=n_swept / task.n_data,
        memory=peak_memory(task.device) + further_rows * _bytes_of_a_row(projection),
        disk=stored + _bytes_of(q),
        seconds=seconds,
        coverage=q.coverage,
    )


def _seconds_of_build(
    projection: Projection, dtype: torch.dtype, n_data: int, n_measured: int
) -> float:
    """What the build of an index of ``n_data`` examples takes, by that of the trial's examples.

    Args:
        n_measured: how many examples run where the error is measured.
    """
    task = projection.task
    to_write = _seconds(task, lambda: records_of(projection.whole(), dtype))
    to_measure = _seconds(task, lambda: measured_error(projection, dtype))
    with_posterior = _seconds(task, lambda: fingerprint(projection.sketch.posterior))
    share_to_measure = n_measured / measured_examples(task.n_data)
    return to_write * n_data / task.n_data + to_measure * share_to_measure + COPIES * with_posterior


def _bytes_of_a_row(projection: Projection) -> int:
    """What the numbers of an example take in memory before they are rounded."""
    some_weight = next(iter(projection.sketch.posterior.mean.values()))
    return projection.sketch.size * some_weight.itemsize


def _bytes_of(q: Posterior) -> int:
    """The size of a posterior's file."""
    tensors = [*q.form.tensors().values(), *q.mean.values()]
    return sum(tensor.nbytes for tensor in tensors)


def memory_of(device: torch.device) -> int:
    """The memory of a device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return physical_memory()


def measured_examples(n_data: int) -> int:
    """How many examples run where the error of an index is measured."""
    rows, columns = probe(n_data)
    return len(rows) + len(columns)


def _size_of_first_chunk(task: Task) -> int:
    """How many examples a sweep computes together.

    The first chunk of a process is slower than all others, and is not timed.
    """
    chunk = next(iter(chunks(task.quiet, task.parameters(), columns=1)))
    loss_terms(task, chunk)
    return len(chunk.indices)


def _timed_fit(task: Task, fit: Fit) -> tuple[Posterior, float, float]:
    """The posterior, the seconds of the fit's sweeps over examples, and those of the rest."""
    with profiled() as sweeps:
        start = time.perf_counter()
        q = of_one_checkpoint(fit(task))
        wait_for(task.device)
        total = time.perf_counter() - start
    seconds_of_sweeps = sum(sweeps.values())
    return q, seconds_of_sweeps, total - seconds_of_sweeps


def _seconds(task: Task, run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    wait_for(task.device)
    return time.perf_counter() - start
