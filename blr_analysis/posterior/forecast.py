"""A forecast of what a run needs: passes over the data, memory, disk and time.

The forecast runs one chunk of the data, which shows the layers, and times a few examples. It writes
nothing. The memory is the peak of this process after the chunk, plus the posterior.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunk, chunks, n_outputs
from blr_analysis.backprop.inputs import InputMoments, Times, swept
from blr_analysis.backprop.matrices import Joint
from blr_analysis.data.examples import evenly_spread
from blr_analysis.models import n_parameters
from blr_analysis.posterior.fit import random_sequences, sampled_examples, vocabulary_of
from blr_analysis.posterior.precision_files import FACTORED
from blr_analysis.posterior.reach import share_in_words
from blr_analysis.posterior.stationarity import n_single_gradients
from blr_analysis.posterior.structures.kronecker import is_too_large
from blr_analysis.ranks import gathered_piece
from blr_analysis.task import Task

EXAMPLES_TIMED = 32
SIZE_TIMED = 768  # of a matrix whose eigenvectors are timed
COPIES = 3  # matrices that LAPACK takes beside the one whose eigenvectors it computes
FLOAT64_BYTES = 8
MINIBATCH_TIMED = 128  # where few examples take no longer than a call does
MOMENT = 0.01  # seconds
MANY_OUTPUTS = 100  # where an example has more outputs, a single backward pass is timed


@dataclass(frozen=True)
class Forecast:
    """What a run will need.

    Attributes:
        passes: the passes over the data: the number of examples that are run, divided by N.
        memory: the peak of the run, in bytes.
        disk: what the run writes, in bytes.
        seconds: extrapolated from a few examples; wrong by a factor of two on a busy machine.
        coverage: how many parameters train, and of how many, in words.
    """

    passes: float
    memory: int
    disk: int
    seconds: float
    coverage: str

    @classmethod
    def of(
        cls,
        task: Task,
        swept: int,
        *,
        trained: int = 0,
        disk: int = 0,
        structure: str = "",
        summed: int = 0,
    ) -> Forecast:
        """The forecast for all sweeps and trainings of a run.

        Args:
            task: the model and its data.
            swept: the number of examples that all sweeps run.
            trained: the number of examples that all trainings take.
            disk: bytes that are written in addition to the posterior's factors.
            structure: the posterior's structure; "kron" and "gram" have factors.
            summed: the number of examples whose factors are summed.
        """
        params = task.parameters()
        itemsize = next(iter(params.values())).element_size()
        chunk = next(iter(chunks(task.quiet, params, columns=1)))
        n_trained = sum(p.numel() for p in params.values())
        layers: list[Joint] = []
        if structure in FACTORED:
            if structure == "gram":
                seen = _layers_with_inputs(task, params)
                layers = list(seen.joints.values())
                numbers = [numbers_of_gram(joint, joint.key in seen.counts) for joint in layers]
            else:
                layers = _layers_with_factors(task, params, chunk)
                numbers = [numbers_of_factors(joint) for joint in layers]
            disk += itemsize * sum(numbers)
        memory = peak_memory(task.device) + bytes_of_fit(structure, layers, n_trained, itemsize)
        seconds_per_example = sweep_seconds(task, params)
        seconds = swept * seconds_per_example
        if layers:
            seconds += summed * seconds_per_example * _work_of_sums(structure, layers)
            seconds += _seconds_of_eigenvectors(structure, layers, next(iter(params.values())))
        if trained:
            seconds += trained * step_seconds(task)
        coverage = share_in_words(n_trained, n_parameters(task.model))
        return cls((swept + trained) / task.n_data, memory, disk, seconds, coverage)


class _SeenLayers(InputMoments):
    """The layers that passes run through, without the sums of their inputs.

    Attributes:
        joints: the layers' matrices, by their names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.joints: dict[str, Joint] = {}

    def add(self, joint: Joint, rows: Tensor, times: Times, tensor: Tensor) -> None:
        self.joints[joint.key] = joint


def _layers_with_inputs(task: Task, params: dict[str, Tensor]) -> _SeenLayers:
    """The model's weight matrices of which "gram" sums the inputs, tied tables among them."""
    indices = evenly_spread(task.n_data, EXAMPLES_TIMED)
    return swept(task.subset(indices).quiet, params, _SeenLayers())


def _layers_with_factors(task: Task, params: dict[str, Tensor], chunk: Chunk) -> list[Joint]:
    """The model's weight matrices that get Kronecker factors, each once."""
    vocabulary = vocabulary_of(task, params)
    error = chunk.likelihood.error(chunk.outputs, chunk.targets)
    layers = {}
    for term in chunk.terms(error.unsqueeze(1), last=True):
        factors = None if is_too_large(term) else term.factors(vocabulary=vocabulary)
        if factors is not None:
            joint = factors[0]
            layers[joint.key] = joint
    return list(layers.values())


def bytes_of_fit(structure: str, layers: Sequence[Joint], n_trained: int, itemsize: int) -> int:
    """Bytes of a fitted posterior, and of what is in memory beside it at the end of the fit.

    "gram" sums the inputs of all layers in float64. Both structures turn a layer's sums into
    eigenvectors with room for :data:`COPIES` matrices of its size.
    """
    if structure not in FACTORED:
        return 2 * n_trained * itemsize  # a mean and a diagonal precision
    largest = max((size for joint in layers for size in _sizes(structure, joint)), default=0)
    if structure == "kron":
        numbers = 2 * n_trained + sum(map(numbers_of_factors, layers))
        return itemsize * (numbers + COPIES * largest**2)
    n_sums = sum(joint.layout.groups * _inputs_of(joint) ** 2 for joint in layers)
    n_joint = sum(joint.layout.groups * joint.layout.rows * _inputs_of(joint) for joint in layers)
    n_diagonal = max(0, n_trained - n_joint)
    in_double = FLOAT64_BYTES * (n_sums + COPIES * largest**2)
    return in_double + itemsize * (n_sums + n_trained + n_diagonal)


def _sizes(structure: str, joint: Joint) -> list[int]:
    """The numbers of rows of a weight matrix's factors."""
    inputs = _inputs_of(joint)
    return [inputs, joint.layout.rows] if structure == "kron" else [inputs]


def _work_of_sums(structure: str, layers: Sequence[Joint]) -> float:
    """The work of the sums of an example's factors, in units of its forward and backward pass.

    For each input position, the passes multiply a weight matrix [O, I] by two vectors. "gram" adds
    up products of inputs, in float64, which takes twice as long. "kron" adds up products of inputs
    and of output gradients in the first sweep. In the second it turns both into the eigenvectors
    and adds up the squares of the gradients.
    """
    passes = 0
    sums = 0
    for joint in layers:
        inputs = _inputs_of(joint)
        outputs = joint.layout.rows
        passes += 2 * inputs * outputs
        if structure == "gram":
            sums += 2 * inputs**2
        else:
            sums += 2 * (inputs**2 + outputs**2) + inputs * outputs
    return sums / passes


def _seconds_of_eigenvectors(structure: str, layers: Sequence[Joint], like: Tensor) -> float:
    """Seconds for the eigenvectors of all factors, which grow with the cube of their size."""
    dtype = like.dtype if structure == "kron" else torch.float64
    sizes = [size for joint in layers for size in _sizes(structure, joint) * joint.layout.groups]
    size = min(max(sizes), SIZE_TIMED)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(size, size, generator=generator).to(like.device, dtype)
    matrix = matrix @ matrix.mT
    torch.linalg.eigh(matrix[:2, :2])  # the first call loads LAPACK
    wait_for(like.device)
    started = time.perf_counter()
    torch.linalg.eigh(matrix)
    wait_for(like.device)
    elapsed = time.perf_counter() - started
    return elapsed * sum((n / size) ** 3 for n in sizes)


def numbers_of_factors(joint: Joint) -> int:
    """How many numbers the factors A and G of one weight matrix have."""
    inputs = _inputs_of(joint)
    return joint.layout.groups * (inputs**2 + joint.layout.rows**2)


def numbers_of_gram(joint: Joint, is_table: bool) -> int:
    """How many numbers "gram" has more than a diagonal precision, for one weight matrix.

    It stores A, and one row of eigenvalues in place of all rows of the diagonal; of a head that is
    the table of an embedding as well, also how often each row was looked up.
    """
    inputs = _inputs_of(joint)
    rows_saved = joint.layout.rows - 1
    look_ups = joint.layout.rows if is_table else 0
    return joint.layout.groups * (inputs**2 - inputs * rows_saved) + look_ups


def _inputs_of(joint: Joint) -> int:
    """The number of inputs of one weight matrix; a bias counts as an input that is always 1."""
    has_bias = joint.bias is not None
    return joint.layout.columns + has_bias


def peak_memory(device: torch.device) -> int:
    """The most memory that this process has had so far on the device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    bytes_per_unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_per_unit


def sweep_seconds(task: Task, params: Mapping[str, Tensor]) -> float:
    """Seconds for an example in a sweep: a forward pass, and a backward pass for each output.

    Sequences, and examples with many outputs, have one backward pass.
    """
    count = n_outputs(task, params)
    has_few_outputs = count <= MANY_OUTPUTS and not task.likelihood.is_sequence
    columns = count if has_few_outputs else 1

    def sweep(indices: Tensor) -> None:
        for chunk in chunks(task.quiet, params, columns=columns, indices=indices, in_order=False):
            if has_few_outputs:
                chunk.jacobian_terms()
            else:
                error = chunk.likelihood.error(chunk.outputs, chunk.targets)
                chunk.terms(error.unsqueeze(1), last=True)

    return _timed(task, sweep)


def step_seconds(task: Task) -> float:
    """Seconds for an example in a training, with frozen layers computed anew."""
    trainable = {n: p for n, p in task.model.named_parameters() if p.requires_grad}
    leaves = {n: gathered_piece(p).detach().clone().requires_grad_() for n, p in trainable.items()}

    def step(indices: Tensor) -> None:
        with torch.enable_grad(), task.evaluation(), task.frozen.off():
            outputs, targets = task.run(task.fetch(indices), leaves, indices)
            loss = task.likelihood.at(indices).nll(outputs, targets).sum()
            torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)

    return _timed(task, step)


def _timed(task: Task, run: Callable[[Tensor], None]) -> float:
    """Seconds for an example, measured on examples spread evenly over the data.

    If a few take next to no time, that is the time of a call, which a minibatch takes once too:
    then so many examples as in a minibatch are measured.
    """
    indices = evenly_spread(task.n_data, EXAMPLES_TIMED)
    seconds = _seconds_of(task, run, indices)
    if seconds < MOMENT:
        indices = evenly_spread(task.n_data, MINIBATCH_TIMED)
        seconds = _seconds_of(task, run, indices)
    return seconds / len(indices)


def _seconds_of(task: Task, run: Callable[[Tensor], None], indices: Tensor) -> float:
    """Seconds for these examples; the first time is slower, and not measured."""
    run(indices)
    wait_for(task.device)
    started = time.perf_counter()
    run(indices)
    wait_for(task.device)
    return time.perf_counter() - started


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fit_examples(
    task: Task, structure: str, *, chooses_prior: bool = False, sampled: bool = False
) -> int:
    """The number of examples that :func:`blr_analysis.fit_laplace` runs.

    Args:
        structure: the posterior's structure.
        chooses_prior: whether the fit chooses δ, for which it needs a Kronecker fit.
        sampled: whether the curvature is that of a sample, where the examples are sequences.
    """
    of_directions = sampled_examples(task)
    n_for_directions = task.n_data if of_directions is None else len(of_directions)
    of_fit = random_sequences(task) if sampled else None
    n_for_fit = task.n_data if of_fit is None else len(of_fit)
    kronecker_fit = n_for_fit + n_for_directions
    fit = kronecker_fit if structure == "kron" else n_for_fit
    if not chooses_prior:
        return fit
    distance_from_minimum = n_for_fit + n_single_gradients(task)
    if structure == "kron":
        return fit + distance_from_minimum
    return fit + kronecker_fit + distance_from_minimum
