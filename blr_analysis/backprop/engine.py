"""Chunks of a dataset with everything per-example that the analyses ask for.

:func:`chunks` is the loop that every analysis shares. It runs a chunk at the posterior's mean; the
analysis then asks for gradients of as many output directions (columns) as it needs.
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
from blr_analysis.backprop.layout import probe_indices
from blr_analysis.backprop.plan import Plan, plan_for
from blr_analysis.backprop.record import Recording, examples_per_pass, record
from blr_analysis.backprop.terms import Term, pieces
from blr_analysis.errors import InputError
from blr_analysis.files import Unfinished
from blr_analysis.likelihoods import Likelihood
from blr_analysis.progress import track
from blr_analysis.task import Task

# The working memory, where the user names no bound. It is raised above its least, so that several
# examples fit in, as far as one of two bounds allows, whichever is larger. On a CPU more tokens
# than these together take memory and no less time.
MIN_BYTES_ON_CPU = 56 * 2**20
MIN_BYTES_ON_GPU = 2**30
EXAMPLES_IN_MEMORY = 8.5
TOKENS_ON_CPU = 800
MOST_TOGETHER = 64  # texts in a batch, however short they are
MAX_BYTES = 2**30
MAX_MODEL_COPIES = 4  # times the bytes of the model's parameters, frozen ones too


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
    _bytes_for_parts: int  # of working memory in :meth:`parts`

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of these examples, with their weights."""
        return self._task.likelihood.at(self.indices)

    @property
    def head(self) -> str | None:
        """The weight of the linear layer that gives these outputs, where one does."""
        return self._plan.head_of(self._recording)

    def terms(self, cotangents: Tensor, *, last: bool = False) -> list[Term]:
        """G_ik = J_iᵀ c_ik for cotangents ``[B, K, C]``: K backward passes, factored per layer.

        For sequences the cotangents are ``[B, K, T, C]``: J_i has a row for every output of every
        token. ``last`` frees the chunk's graph, after which no more gradients can be computed.
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
        """:meth:`jacobian_terms` of some examples at a time, with the slice of these examples.

        A part has so few examples that their C × C matrices fit into memory.
        """
        terms = self.jacobian_terms()
        numbers = gram_floats((term.cost() for term in terms), self.outputs.shape[-1])
        bytes_per_example = self.outputs.element_size() * numbers
        start = 0
        for piece in pieces(terms, int(self._bytes_for_parts // bytes_per_example)):
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
    unfinished: Unfinished | None = None,
    divided: bool = False,
    in_order: bool = True,
) -> Iterator[Chunk]:
    """Run the dataset (or ``indices`` of it) in chunks at ``params``.

    Args:
        size: examples per chunk at most: a batch of longer texts than the plan's probe is divided;
            None: exactly the task's ``chunk_size``, or as many as its memory holds.
        columns: gradients asked of each example at most; None: one per output. It sets the
            chunk size together with the memory budget.
        by_parts: whether all C gradients are read by :meth:`Chunk.parts`, for which a quarter of
            the memory budget is set aside.
        unfinished: sums of an earlier run that was interrupted; the chunks that they contain are
            left out.
        divided: whether the ranks take turns, chunk by chunk of what one process would visit.
        in_order: whether the examples come in the order of ``indices``; else texts of similar
            lengths come together, which are padded less.

    Raises:
        ModelError: see :func:`blr_analysis.backprop.plan.plan_for`.
    """
    if task.device.type == "cpu":
        _keep_freed_memory()
    params = task.cast(params)
    plan = plan_for(task, params)
    order = torch.arange(task.n_data) if indices is None else indices
    columns = plan.outputs if columns is None else columns
    bytes_for_graph, bytes_for_parts = _shares_of_memory(task, params, plan, columns, by_parts)
    exact_size = None if size else task.chunk_size
    fitting_size = plan.chunk_size(
        columns, bytes_for_graph, _itemsize(params), len(order), by_parts=by_parts
    )
    is_sized = size is not None or exact_size is not None
    lengths = None if in_order or is_sized else task.examples.lengths(order)
    if lengths is None:
        batches = order.split(size or exact_size or fitting_size)
    else:
        probe = task.examples.lengths(probe_indices(task.n_data)[0])
        assert probe is not None
        batches = batches_by_length(order, lengths, fitting_size, int(probe.max()))
    if divided:
        batches = batches[ranks.rank() :: ranks.count()]
    shown = track(batches, total=len(batches), label=label, show=task.progress)
    start = time.perf_counter()
    for number, (chosen, batch) in enumerate(_fitted(task, plan, shown, exact=bool(exact_size))):
        # The number of passes that are done rises when the first one is added to the sums.
        is_done = unfinished is not None and number < unfinished.done
        if not is_done:
            yield _recorded(task, params, plan, chosen, batch, bytes_for_parts)
        del batch  # before the next one is fetched
    plan.without_rule.warn(time.perf_counter() - start)


def batches_by_length(
    order: Tensor, lengths: Tensor, size: int, usual_length: int
) -> tuple[Tensor, ...]:
    """Batches of examples of similar lengths, the shortest first.

    Those of the usual length have ``size`` examples. Of shorter ones a batch has as many as have
    the same tokens; of longer ones so many fewer that attention, whose memory grows with the square
    of the length, takes no more of it.

    >>> batches_by_length(torch.arange(6), torch.tensor([9, 2, 4, 2, 4, 2]), 2, 4)
    (tensor([1, 3, 5]), tensor([2, 4]), tensor([0]))
    """

    def room(length: int) -> float:
        ratio = usual_length / max(1, length)
        return size * ratio if ratio > 1 else size * ratio**2

    rising = lengths.argsort(stable=True)
    sorted_lengths = lengths[rising].tolist()
    sizes: list[int] = []
    count = 0
    for length in sorted_lengths:
        if count and count + 1 > min(MOST_TOGETHER, room(length)):
            sizes.append(count)
            count = 0
        count += 1
    return order[rising].split([*sizes, count])


def _recorded(
    task: Task,
    params: Mapping[str, Tensor],
    plan: Plan,
    indices: Tensor,
    batch: Any,
    bytes_for_parts: int,
) -> Chunk:
    """The chunk of these examples, after their forward pass."""
    recording = record(
        task, params, batch, plan.units, size=len(indices), indices=indices, shared=plan.shared
    )
    return Chunk(
        indices=indices,
        outputs=recording.outputs.detach(),
        targets=recording.targets,
        _task=task,
        _params=params,
        _plan=plan,
        _recording=recording,
        _bytes_for_parts=bytes_for_parts,
    )


def _shares_of_memory(
    task: Task, params: Mapping[str, Tensor], plan: Plan, columns: int, by_parts: bool
) -> tuple[int, int]:
    """Bytes of working memory for a chunk's graph and for what its parts compute.

    If ``by_parts``, the parts have a quarter of the memory; else both have all of it.
    """
    budget = _budget(task, params, plan, columns, by_parts)
    if not by_parts:
        return budget, budget
    for_parts = budget // 4
    return budget - for_parts, for_parts


def _itemsize(params: Mapping[str, Tensor]) -> int:
    return next(iter(params.values())).element_size()


def _budget(
    task: Task, params: Mapping[str, Tensor], plan: Plan, columns: int, by_parts: bool
) -> int:
    """Bytes of working memory: the user's bound, or what suits the model."""
    if task.memory_budget is not None:
        return task.memory_budget
    least = MIN_BYTES_ON_CPU if task.device.type == "cpu" else MIN_BYTES_ON_GPU
    bytes_per_example = _itemsize(params) * plan.floats(columns, by_parts=by_parts)
    return default_memory(task, least, bytes_per_example * examples_in_memory(task, plan))


def examples_in_memory(task: Task, plan: Plan) -> float:
    """How many examples should fit into the working memory where the user names no bound."""
    if task.device.type != "cpu":
        return EXAMPLES_IN_MEMORY
    enough = math.ceil(TOKENS_ON_CPU / plan.tokens) + 0.5
    return min(EXAMPLES_IN_MEMORY, enough)


def default_memory(task: Task, least: int, bytes_wanted: float) -> int:
    """Bytes of working memory where the user names no bound: at least ``least``."""
    model_bytes = sum(p.nbytes for p in task.model.parameters())
    max_bytes = max(MAX_BYTES, MAX_MODEL_COPIES * model_bytes)
    return max(least, min(int(bytes_wanted), max_bytes))


def _fitted(
    task: Task, plan: Plan, pieces: Iterable[Tensor], *, exact: bool
) -> Iterator[tuple[Tensor, Any]]:
    """The batches of these indices; a batch of longer examples than the plan's probe is divided.

    A padded batch is as long as its longest sequence, and attention may take memory that grows with
    the square of that length. ``exact``: no batch is divided.
    """
    for indices in pieces:
        batch = task.fetch(indices)
        probe_numbers = max(1.0, len(indices) * plan.numbers)
        relative_length = batch_numbers(batch) / probe_numbers
        if exact or relative_length <= 1 or len(indices) == 1:
            yield indices, batch
        else:
            del batch
            for part in indices.split(max(1, int(len(indices) / relative_length**2))):
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
