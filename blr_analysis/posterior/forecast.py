"""What a run will take, before it: passes over the data counted, one chunk of them run to see the
layers, nothing written.

Peak memory is that of the process after the chunk, and what the posterior adds to it.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

from blr_analysis.backprop.engine import chunks
from blr_analysis.posterior.fit import sampled_examples, vocabulary_of
from blr_analysis.posterior.precision_files import FACTORED
from blr_analysis.posterior.stationarity import SAMPLE
from blr_analysis.task import Task


@dataclass(frozen=True)
class Forecast:
    """What a run will take.

    Attributes:
        passes: over the data: examples that are run, over N.
        memory, disk: of the whole run; bytes.
    """

    passes: float
    memory: int
    disk: int

    @classmethod
    def of(cls, task: Task, examples: int, *, disk: int = 0, structure: str = "") -> Forecast:
        """For sweeps over so many examples in all. ``structure``: with factors, which are written
        beside ``disk``."""
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
        return cls(examples / task.n_data, peak + held, disk)


def fit_examples(task: Task, structure: str, *, found: bool = False) -> int:
    """The examples that :func:`blr_analysis.fit_laplace` runs; ``found``: where it finds δ."""
    n, few = task.n_data, sampled_examples(task)
    kron = n + (n if few is None else len(few))
    own = kron if structure == "kron" else n
    if not found:
        return own
    return own + (0 if structure == "kron" else kron) + n + min(n, SAMPLE)
