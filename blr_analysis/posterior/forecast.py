"""What a run will cost, before it: passes counted, three chunks of the data timed, nothing written.

    seconds ≈ plan + Σ_stages examples · gradients · seconds per gradient

Peak memory is that of the process after the three chunks, and what the posterior adds to it.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from blr_analysis.backprop.engine import chunks
from blr_analysis.backprop.matrices import Joint
from blr_analysis.backprop.plan import plan_for
from blr_analysis.backprop.terms import Term
from blr_analysis.posterior.fit import sampled_examples, vocabulary_of
from blr_analysis.posterior.precision_files import FACTORED
from blr_analysis.posterior.stationarity import SAMPLE
from blr_analysis.task import Task

CHUNKS = 3
TURNED = 2.0  # times a gradient's seconds, where it is turned into a Kronecker basis


@dataclass(frozen=True)
class Stage:
    """A sweep over some examples, ``gradients`` backward passes of each.

    Attributes:
        rotated: whether every gradient is turned into the posterior's basis.
    """

    name: str
    examples: int
    gradients: float = 1.0
    rotated: bool = False


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
        start = perf_counter()
        plan_for(task, params)
        seconds = perf_counter() - start
        each, layers = _seen(task, structure)
        for stage in stages:
            turned = TURNED if stage.rotated else 1.0
            seconds += stage.examples * stage.gradients * turned * each
        itemsize = next(iter(params.values())).element_size()
        factors = {False: 0, True: 0}  # numbers, of the layers' inputs alone and with the outputs'
        for joint in layers:
            g, o, i = joint.layout.groups, joint.layout.rows, joint.layout.columns
            i += joint.bias is not None
            factors[False] += g * (i * i - i * (o - 1))  # rows of a "gram" are alike
            factors[True] += g * (i * i + o * o)
        if structure in FACTORED:
            disk += itemsize * factors[structure == "kron"]
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        held = itemsize * (2 * sum(p.numel() for p in params.values()) + max(0, factors[True]))
        passes = sum(stage.examples for stage in stages) / task.n_data
        return cls(passes, seconds, peak + held, disk)


def fit_stages(task: Task, structure: str, *, found: bool = False) -> list[Stage]:
    """The sweeps of :func:`blr_analysis.fit_laplace`; ``found``: of one that finds δ."""
    n, few = task.n_data, sampled_examples(task)
    kron = [
        Stage("Kronecker factors", n if few is None else len(few)),
        Stage("eigenvalues", n, rotated=True),
    ]
    own = kron if structure == "kron" else [Stage("precision", n)]
    if not found:
        return own
    before = [] if structure == "kron" else kron
    single = Stage("gradients of some", min(n, SAMPLE))
    return [*before, *own, Stage("gradient of the loss", n), single]


def _seen(task: Task, structure: str) -> tuple[float, list[Joint]]:
    """Seconds of a gradient, and the layers that have factors."""
    params, layers = task.parameters(), dict[str, Joint]()
    vocabulary = vocabulary_of(task, params)
    sums = {n: torch.zeros_like(p) for n, p in params.items()}
    terms: list[Term] = []
    examples, start = 0, perf_counter()
    for k, chunk in enumerate(chunks(task.quiet, params, columns=1), 1):
        error = chunk.likelihood.error(chunk.outputs, chunk.targets)
        terms = chunk.terms(error.unsqueeze(1), last=True)
        for term in terms:
            term.add_square_sum(sums)
        examples += len(chunk.indices)
        if k == CHUNKS:
            break
    seconds = (perf_counter() - start) / examples
    for term in terms if structure in FACTORED else ():
        if (factors := term.factors(vocabulary=vocabulary)) is not None:
            layers[factors[0].key] = factors[0]
    return seconds, list(layers.values())
