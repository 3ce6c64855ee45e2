"""What a run will cost, before it: passes counted, three chunks of the data timed, nothing written.

    seconds ≈ plan + Σ_stages examples · seconds per example + Σ_factors n³ · seconds of an eigh

Peak memory is that of the process after the three chunks, and what the posterior adds to it.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from blr_analysis.backprop.engine import QUIET, chunks
from blr_analysis.backprop.matrices import Basis
from blr_analysis.backprop.plan import plan_for
from blr_analysis.backprop.terms import Term
from blr_analysis.posterior.laplace import sampled_examples, vocabulary_of
from blr_analysis.posterior.precision_files import FACTORED
from blr_analysis.posterior.stationarity import SAMPLE
from blr_analysis.task import Task

CHUNKS = 3
TRIAL = 512  # rows of the matrix whose eigenvectors are timed


@dataclass(frozen=True)
class Stage:
    """A sweep over some examples, ``gradients`` backward passes of each.

    Attributes:
        rotated: whether every gradient is turned into the posterior's basis.
        memory: bytes that it holds, beside the posterior and a chunk.
    """

    name: str
    examples: int
    gradients: float = 1.0
    rotated: bool = False
    memory: int = 0


@dataclass(frozen=True)
class Forecast:
    """What a run will cost.

    Attributes:
        passes: over the data: examples that are run, over N.
        seconds, memory, disk: of the whole run; bytes.
    """

    passes: float
    seconds: float
    memory: int
    disk: int

    @classmethod
    def of(
        cls, task: Task, stages: Sequence[Stage], *, disk: int = 0, structure: str = ""
    ) -> Forecast:
        """The cost of these sweeps; the plan and three chunks are run to find out. ``structure``:
        with factors, which are written beside ``disk``."""
        params = task.parameters()
        turned = structure == "gram" or any(stage.rotated for stage in stages)
        seen = _seen(task, params, rotated=turned)
        outputs, inputs = seen.sides[::2], seen.sides[1::2]
        spared = 0  # numbers: all rows of a "gram" have the same
        if structure == "gram":
            spared = sum(i * (o - 1) for i, o in zip(inputs, outputs, strict=True))
            seen.sides = inputs
        seconds = seen.plan
        for stage in stages:
            each = seen.gradient + (seen.rotation if stage.rotated else 0.0)
            seconds += stage.examples * stage.gradients * each
        itemsize = next(iter(params.values())).element_size()
        held = 2 * sum(p.numel() for p in params.values()) * itemsize
        held += max((stage.memory for stage in stages), default=0)
        if seen.sides:
            seconds += _eigh_seconds() * sum((s / TRIAL) ** 3 for s in seen.sides)
            held += itemsize * sum(s * s for s in seen.sides)
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        if structure in FACTORED:
            disk += itemsize * (sum(s * s for s in seen.sides) - spared)
        passes = sum(stage.examples for stage in stages) / task.n_data
        return cls(passes, seconds, peak + held, disk)


@dataclass
class Timings:
    """What the three chunks showed: seconds per example, and the sides of the layers' factors."""

    plan: float = 0.0
    gradient: float = 0.0
    rotation: float = 0.0
    sides: tuple[int, ...] = ()


def fit_stages(task: Task, structure: str, *, found: bool = False) -> list[Stage]:
    """The sweeps of :func:`blr_analysis.fit_laplace`; ``found``: of one that finds δ."""
    n = task.n_data
    few = sampled_examples(task)
    kron = [
        Stage("Kronecker factors", n if few is None else len(few)),
        Stage("eigenvalues", n, rotated=True),
    ]
    own = kron if structure == "kron" else [Stage("precision", n)]
    if not found:
        return own
    single = Stage("gradients of some", min(n, SAMPLE))
    before = kron if structure != "kron" else []
    size = sum(p.nbytes for p in task.parameters().values())  # it, θ̂ − θ₀, both in the basis
    return [*before, *own, Stage("gradient of the loss", n, memory=4 * size), single]


def _seen(task: Task, params: dict[str, Tensor], *, rotated: bool) -> Timings:
    seen = Timings()
    start = perf_counter()
    plan_for(task, params)
    seen.plan = perf_counter() - start
    vocabulary = vocabulary_of(task, params)
    sums = {n: torch.zeros_like(p) for n, p in params.items()}
    examples, start = 0, perf_counter()
    for k, chunk in enumerate(chunks(task, params, QUIET, columns=1)):
        error = chunk.likelihood.error(chunk.outputs, chunk.targets)
        terms = chunk.terms(error.unsqueeze(1), last=True)
        for term in terms:
            term.add_square_sum(sums)
        examples += len(chunk.indices)
        if rotated and k == 0:
            before = perf_counter()
            sides = [side for term in terms for side in _turned(term, vocabulary)]
            spent = perf_counter() - before
            seen.sides, seen.rotation = tuple(sides), spent / len(chunk.indices)
            start += spent
        if k + 1 == CHUNKS:
            break
    seen.gradient = (perf_counter() - start) / examples
    return seen


def _turned(term: Term, vocabulary: int) -> tuple[int, ...]:
    """Turn a layer's gradients as its Kronecker basis will; the sides of its factors."""
    factors = term.factors(vocabulary=vocabulary)
    if factors is None:
        return ()
    joint, *pair = factors
    right, left = (torch.eye(m.shape[-1]).to(m).expand_as(m).contiguous() for m in pair)
    sums = {joint.key: left.new_zeros(len(left), left.shape[-1], right.shape[-1])}
    unit = Basis(joint.weight, joint.bias, joint.layout, right, left)
    term.rotated(unit).add_square_sum(sums)
    return (left.shape[-1], right.shape[-1])


def _eigh_seconds() -> float:
    matrix = torch.eye(TRIAL, dtype=torch.float64)
    matrix += torch.ones_like(matrix) / TRIAL + torch.arange(TRIAL).diag() / TRIAL
    start = perf_counter()
    torch.linalg.eigh(matrix)
    return perf_counter() - start
