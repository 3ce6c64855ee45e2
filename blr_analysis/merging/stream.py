"""Carrying a plan out: pieces of tensors through threads, from the sources into a sink."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blr_analysis.files import Scratch
from blr_analysis.merging.entry_pieces import EntryMerger
from blr_analysis.merging.layer_pieces import LayerMerger
from blr_analysis.merging.layers import Solved
from blr_analysis.merging.merge_plan import MergePlan, TensorPlan
from blr_analysis.merging.piece import MergedPiece, Piece, Sink


class Memory:
    """Whole tensors in memory; a sink like :class:`blr_analysis.files.Shards`."""

    def __init__(self, tensors: Sequence[TensorPlan], devices: Mapping[str, torch.device]) -> None:
        self.tensors = {
            tensor.name: torch.empty(
                tensor.spec.shape, dtype=tensor.spec.dtype, device=devices[tensor.name]
            )
            for tensor in tensors
        }

    def put(self, name: str, start: int, values: Tensor) -> None:
        self.tensors[name].view(-1)[start : start + len(values)] = values


@dataclass
class Outcome:
    """What a merge reports beside its result.

    Attributes:
        fallback: by tensor, the number of entries without a precision, where task arithmetic
            stands.
        solves: by layer, how its equation was solved.
    """

    fallback: Counter[str] = field(default_factory=Counter)
    solves: dict[str, Solved] = field(default_factory=dict)


def stream(plan: MergePlan, sink: Sink, report_progress: Callable[[int], object]) -> Outcome:
    """Merge every tensor of the plan; the result does not depend on threads or piece lengths.

    Args:
        plan: what to do.
        sink: where the result goes.
        report_progress: called with the bytes read, after every piece.

    Returns:
        The entries without a precision, and how the layers were solved.

    Raises:
        ModelError: NaN or inf in a model or in the result.
        PosteriorError: NaN, inf or negative numbers in a precision.
        StorageError: a file that cannot be read or written.
    """
    outcome = Outcome()
    thread_local = threading.local()

    def merge_piece(piece: Piece) -> MergedPiece:
        if not hasattr(thread_local, "worker"):
            thread_local.worker = _Worker(plan, sink)  # each thread has its own buffers
        return thread_local.worker.merge_piece(piece)

    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)  # the pool's threads are parallel enough
    pool = ThreadPoolExecutor(plan.workers)
    # A thread of its own would take other memory than this one frees.
    map_pieces = pool.map if plan.workers > 1 else map
    try:
        for piece in map_pieces(merge_piece, _pieces(plan)):
            if piece.undefined_entries:
                outcome.fallback[piece.tensor] += piece.undefined_entries
            if piece.solution is not None:
                outcome.solves[piece.layer] = piece.solution
            report_progress(piece.bytes_read)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads_before)
    return outcome


def _pieces(plan: MergePlan) -> Iterator[Piece]:
    """The pieces of all tensors. The weight of a solved layer stands for all its tensors."""
    for tensor in plan.tensors:
        is_solved_with_its_weight = tensor.layer not in ("", tensor.name)
        if is_solved_with_its_weight:
            continue
        size = tensor.spec.numel
        step = max(size, 1) if plan.passes(tensor) > 1 else plan.step(tensor)
        for start in range(0, size, step):
            yield Piece(tensor, start, min(start + step, size))


class _Worker:
    """Merges pieces in one thread, in buffers that are used again."""

    def __init__(self, plan: MergePlan, sink: Sink) -> None:
        scratch = Scratch()
        self.plan = plan
        self.layers = LayerMerger(plan, sink, scratch)
        self.entries = EntryMerger(plan, sink, scratch)

    def merge_piece(self, piece: Piece) -> MergedPiece:
        """Merge a piece and write it into the sink."""
        tensor = piece.tensor
        entries = piece.stop - piece.start
        bytes_read = self.plan.bytes_of(tensor) * entries // max(tensor.spec.numel, 1)
        if not tensor.layer:
            undefined = self.entries.merge(piece)
            return MergedPiece(tensor.name, "", bytes_read, undefined)
        solution = self.layers.merge(tensor.layer)
        return MergedPiece(tensor.name, tensor.layer, bytes_read, solution.undefined, solution)
