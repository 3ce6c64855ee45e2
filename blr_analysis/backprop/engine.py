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
from blr_analysis.backprop.record import Recording, fetched, record, together
from blr_analysis.backprop.terms import Term, pieces
from blr_analysis.errors import InputError
from blr_analysis.files import Unfinished
from blr_analysis.likelihoods import Likelihood
from blr_analysis.progress import track
from blr_analysis.task import Task

DEFAULT_MEMORY = 56 * 2**20  # bytes of working memory where the user names no bound
TOGETHER = 8.5  # examples that it should hold
MOST = 2**30  # unless that takes more than this, or
SHARE = 4  # times what the parameters take


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
        where = self._task, self._params, self._recording, self.indices
        return self._plan.terms(*where, columns, last=last)

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
        """:meth:`jacobian_terms` of some examples at a time, and which of them they are: so many
        that few of their C × C matrices are held."""
        terms, c = self.jacobian_terms(), self.outputs.shape[-1]
        one = self.outputs.element_size() * gram_floats((t.cost() for t in terms), c)
        start = 0
        for some in pieces(terms, int(self._room // one)):
            rows = slice(start, start + some[0].n_examples)
            yield rows, some
            start = rows.stop


def chunks(
    task: Task,
    params: Mapping[str, Tensor],
    *,
    size: int | None = None,
    columns: int | None = None,
    by_parts: bool = False,
    indices: Tensor | None = None,
    label: str = "examples",
    kept: Unfinished | None = None,
    divided: bool = False,
) -> Iterator[Chunk]:
    """Run the dataset (or ``indices`` of it) in chunks at ``params``.

    Args:
        size: examples per chunk; None: the task's batch size, or as many as its memory holds.
        columns: gradients asked of each example at most; None: one per output. It sets the
            chunk size together with the memory budget.
        by_parts: whether all C gradients are read by :meth:`Chunk.parts`, in a quarter of it.
        kept: chunks that it has done are left out.
        divided: whether the ranks take turns, chunk by chunk of what one process would visit.

    Raises:
        ModelError: see :func:`blr_analysis.backprop.plan.plan_for`.
    """
    if task.device.type == "cpu":
        _keep_freed_memory()
    params = task.cast(params)
    plan = plan_for(task, params)
    order = torch.arange(task.n_data) if indices is None else indices
    itemsize = next(iter(params.values())).element_size()
    asked = plan.outputs if columns is None else columns
    least = DEFAULT_MEMORY if task.device.type == "cpu" else MOST
    one = itemsize * plan.floats(asked, by_parts=by_parts)
    budget = task.memory_budget or default_memory(params, least, one)
    room = budget // 4 if by_parts else budget
    exact = size or task.chunk_size
    fits = plan.chunk_size(asked, budget - by_parts * room, itemsize, len(order), by_parts=by_parts)
    pieces = order.split(exact or fits)
    pieces = pieces[ranks.rank() :: ranks.count()] if divided else pieces
    shown = track(pieces, total=len(pieces), label=label, show=task.progress)
    start = time.perf_counter()
    for number, (chosen, batch) in enumerate(_fitted(task, plan, shown, exact=bool(exact))):
        if kept is not None and number < kept.done:
            continue
        recording = record(
            task, params, batch, plan.units, size=len(chosen), indices=chosen, shared=plan.shared
        )
        f, y = recording.outputs.detach(), recording.targets
        yield Chunk(chosen, f, y, task, params, plan, recording, room)
        del recording, batch, f, y
    plan.without_rule.warn(time.perf_counter() - start)


def default_memory(params: Mapping[str, Tensor], least: int, one: float) -> int:
    """Bytes of working memory where nobody names a bound and ``one`` example needs so many."""
    most = max(MOST, SHARE * sum(p.nbytes for p in params.values()))
    return max(least, min(int(TOGETHER * one), most))


def _fitted(
    task: Task, plan: Plan, pieces: Iterable[Tensor], *, exact: bool
) -> Iterator[tuple[Tensor, Any]]:
    """The batches of these pieces; one whose examples are longer than the plan's is divided.

    A padded batch is as long as its longest sequence, and attention may take the square of it.
    """
    for chosen in pieces:
        batch = fetched(task, chosen)
        longer = batch_numbers(batch) / max(1.0, len(chosen) * plan.numbers)
        if exact or longer <= 1 or len(chosen) == 1:
            yield chosen, batch
        else:
            del batch
            for part in chosen.split(max(1, int(len(chosen) / longer**2))):
                yield part, fetched(task, part)


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
    rows, size = [], together(task, params, torch.arange(task.n_data))
    with torch.no_grad(), task.evaluation():
        for indices, batch in task.batches(size):
            rows.append([t.cpu() for t in task.run(batch, params, indices)])
    outputs, targets = map(torch.cat, zip(*rows, strict=True))
    return outputs, targets
