"""Chunks of a dataset with everything per-example that the analyses ask for.

The loop that every analysis shares: run a chunk at the posterior's mean, then ask for the
gradients of as many output directions (columns) as needed, in factored form.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.cost import batch_numbers, gram_floats
from blr_analysis.backprop.plan import Plan, plan_for
from blr_analysis.backprop.record import Recording, examples_per_pass, record
from blr_analysis.backprop.terms import Term, pieces
from blr_analysis.errors import InputError
from blr_analysis.files import Unfinished
from blr_analysis.likelihoods import Likelihood
from blr_analysis.progress import track
from blr_analysis.task import Task

DEFAULT_MEMORY = 56 * 2**20  # bytes of working memory where the user names no bound
TOGETHER = 8.5  # examples that the working memory should hold
MAX_DEFAULT_MEMORY = 2**30  # bytes of working memory for these, where the user names no bound,
SHARE = 4  # or so many times the bytes of the parameters, if that is more


@dataclass(frozen=True)
class Chunk:
    """Some examples: their indices, outputs ``[B, C]``, targets, and gradients on demand.

    Of sequences the outputs are ``[B, T, C]``, with a T that may differ between chunks.
    """

    indices: Tensor
    outputs: Tensor
    targets: Tensor
    _task: Task
    _params: Mapping[str, Tensor]
    _plan: Plan
    _recording: Recording
    _room: int  # bytes for what is made of the gradients of some examples at a time

    @property
    def likelihood(self) -> Likelihood:
        """That of these examples, with their weights."""
        return self._task.likelihood.at(self.indices)

    @property
    def head(self) -> str | None:
        """The weight of the linear layer that gives these outputs, where one does."""
        return self._plan.head_of(self._recording)

    def terms(self, cotangents: Tensor, *, last: bool = False) -> list[Term]:
        """G_ik = J_iᵀ c_ik for cotangents ``[B, K, C]``: K backward passes, factored per layer.

        Of sequences ``[B, K, T, C]``, where J_i has a row for every output of every token.
        ``last``: no more will be asked of this chunk, and its graph is freed.
        """
        columns = list(cotangents.detach().unbind(1))
        return self._plan.terms(
            self._task, self._params, self._recording, self.indices, columns, last=last
        )

    def jacobian_terms(self) -> list[Term]:
        """The C rows of J_i: one column per output."""
        if self.outputs.ndim > 2:
            raise InputError(
                f"a sequence's {math.prod(self.outputs.shape[1:]):,} outputs are too many; ask "
                "for one gradient per sequence"
            )
        b, c = self.outputs.shape
        eye = torch.eye(c, dtype=self.outputs.dtype, device=self.outputs.device)
        return self.terms(eye.expand(b, c, c))

    def parts(self) -> Iterator[tuple[slice, list[Term]]]:
        """:meth:`jacobian_terms` of some examples at a time, and which examples these are: so few
        that their C × C matrices fit into memory."""
        terms = self.jacobian_terms()
        numbers = gram_floats((term.cost() for term in terms), self.outputs.shape[-1])
        bytes_per_example = self.outputs.element_size() * numbers
        start = 0
        for piece in pieces(terms, int(self._room // bytes_per_example)):
            rows = slice(start, start + piece[0].n_examples)
            yield rows, piece
            start = rows.stop


def chunks(
    task: Task,
    params: Mapping[str, Tensor],
    *,
    size: int | None = None,
    columns: int | None = None,
    by_parts: bool = False,
    indices: Tensor | None = None,
    label: str = "reading examples",
    kept: Unfinished | None = None,
    divided: bool = False,
) -> Iterator[Chunk]:
    """Run the dataset (or ``indices`` of it) in chunks at ``params``.

    Args:
        size: examples per chunk; None: the task's batch size, or as many as its memory holds.
        columns: gradients asked of each example at most; None: one per output. It sets the
            chunk size together with the memory budget.
        by_parts: whether all C gradients are read by :meth:`Chunk.parts`, for which a quarter of
            the memory budget is set aside.
        kept: results of an earlier run that was cut short; chunks that it has done are left out.
        divided: whether the ranks take turns, chunk by chunk of what one process would visit.

    Raises:
        ModelError: see :func:`blr_analysis.backprop.plan.plan_for`.
    """
    if task.device.type == "cpu":
        _keep_freed_memory()
    params = task.cast(params)
    plan = plan_for(task, params)
    order = torch.arange(task.n_data) if indices is None else indices
    columns = plan.outputs if columns is None else columns
    budget = _budget(task, params, plan, columns, by_parts)
    room = budget // 4 if by_parts else budget
    exact_size = size or task.chunk_size
    for_graph = budget - room if by_parts else budget
    fitting_size = plan.chunk_size(
        columns, for_graph, _itemsize(params), len(order), by_parts=by_parts
    )
    batches = order.split(exact_size or fitting_size)
    if divided:
        batches = batches[ranks.rank() :: ranks.count()]
    shown = track(batches, total=len(batches), label=label, show=task.progress)
    start = time.perf_counter()
    for number, (chosen, batch) in enumerate(_fitted(task, plan, shown, exact=bool(exact_size))):
        if kept is not None and number < kept.done:
            continue
        recording = record(
            task, params, batch, plan.units, size=len(chosen), indices=chosen, shared=plan.shared
        )
        outputs = recording.outputs.detach()
        yield Chunk(chosen, outputs, recording.targets, task, params, plan, recording, room)
        del recording, batch, outputs
    plan.without_rule.warn(time.perf_counter() - start)


def _itemsize(params: Mapping[str, Tensor]) -> int:
    return next(iter(params.values())).element_size()


def _budget(
    task: Task, params: Mapping[str, Tensor], plan: Plan, columns: int, by_parts: bool
) -> int:
    """Bytes of working memory: the user's bound, or what suits the model."""
    if task.memory_budget is not None:
        return task.memory_budget
    least = DEFAULT_MEMORY if task.device.type == "cpu" else MAX_DEFAULT_MEMORY
    bytes_per_example = _itemsize(params) * plan.floats(columns, by_parts=by_parts)
    return default_memory(params, least, bytes_per_example)


def default_memory(params: Mapping[str, Tensor], least: int, bytes_per_example: float) -> int:
    """Bytes of working memory where nobody names a bound."""
    most = max(MAX_DEFAULT_MEMORY, SHARE * sum(p.nbytes for p in params.values()))
    return max(least, min(int(TOGETHER * bytes_per_example), most))


def _fitted(
    task: Task, plan: Plan, pieces: Iterable[Tensor], *, exact: bool
) -> Iterator[tuple[Tensor, Any]]:
    """The batches of these pieces; one whose examples are longer than the plan's is divided.

    A padded batch is as long as its longest sequence, and attention may take the square of it.
    """
    for indices in pieces:
        batch = task.fetch(indices)
        length = batch_numbers(batch) / max(1.0, len(indices) * plan.numbers)
        if exact or length <= 1 or len(indices) == 1:
            yield indices, batch
        else:
            del batch
            for part in indices.split(max(1, int(len(indices) / length**2))):
                yield part, task.fetch(part)


@cache
def _keep_freed_memory() -> None:
    """Ask glibc, once, to keep what a chunk frees for the next one, instead of giving it back.

    glibc learns from the largest block that it ever had to map: freeing one of 31 MiB (never
    touched, so that it costs nothing) lets it hold 62 MiB of freed memory. Without this, every
    chunk's working memory is faulted in afresh, which takes as long as the arithmetic.
    """
    _ = bytes(31 * 2**20)


def n_outputs(task: Task, params: Mapping[str, Tensor]) -> int:
    """C, the number of outputs of one example."""
    return plan_for(task, params).outputs


def predict(task: Task, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs ``[N, C]`` and targets of the whole task at these parameters, on the CPU.

    Raises:
        InputError: the examples are sequences, whose outputs are too many to be held.
    """
    if task.likelihood.is_sequence:
        raise InputError(
            "the outputs of sequences are too many to hold; ask for losses (sensitivity, what_if)"
        )
    size = examples_per_pass(task, params, torch.arange(task.n_data))
    outputs: list[Tensor] = []
    targets: list[Tensor] = []
    with torch.no_grad(), task.evaluation():
        for indices, batch in task.batches(size):
            batch_outputs, batch_targets = task.run(batch, params, indices)
            outputs.append(batch_outputs.cpu())
            targets.append(batch_targets.cpu())
    return torch.cat(outputs), torch.cat(targets)
