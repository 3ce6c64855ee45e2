"""A plan of folders carried out: streamed, written as a whole, reported."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blr_analysis.checks import positive_int
from blr_analysis.files import Shards, check_free, check_room, drafted
from blr_analysis.merging.fates import COPIED
from blr_analysis.merging.files import copy_files, write_union
from blr_analysis.merging.layers import Solved
from blr_analysis.merging.plan import SHARD, MergePlan, fit_config, reference_folder
from blr_analysis.merging.stream import stream
from blr_analysis.progress import bar
from blr_analysis.views import Tabular

Documents = Callable[["MergeReport"], Mapping[str, str]]


@dataclass(frozen=True)
class MergeReport(Tabular):
    """What a merge of folders did; ``table`` shows every tensor's fate.

    Attributes:
        folder: the merged model.
        plan: what was done.
        fallback: by tensor, the entries without a precision, where task arithmetic stands.
        files: the fate of every file beside the weights.
        shards: the files with weights.
        seconds: that it took.
        choice: of method "auto".
        solves: by layer merged as one matrix, the residual and iterations of its equation.
        gap_ratios: by model, what its diagonal precision says that it loses, as a part of what it
            loses in the plain average, by the first entries of every tensor; empty without.
    """

    folder: Path
    plan: MergePlan
    fallback: Mapping[str, int]
    files: Mapping[str, str]
    shards: tuple[str, ...]
    seconds: float
    solves: Mapping[str, Solved] = field(default_factory=dict)
    choice: Any = None
    gap_ratios: tuple[float, ...] = ()

    @property
    def bytes_read(self) -> int:
        """Bytes of weights and precisions that were read."""
        return self.plan.bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes of tensors that were written."""
        return self.plan.bytes_written

    @property
    def remarks(self) -> list[str]:
        """What else is to be said, a sentence each."""
        return []

    @property
    def merged(self) -> int:
        """The number of tensors that were merged, running statistics (averaged) among them."""
        return sum(item.fate != COPIED for item in self.plan.items)

    @property
    def copied(self) -> int:
        """The number of tensors that were copied, all models agreeing in them."""
        return len(self.plan.items) - self.merged

    @property
    def fallback_total(self) -> int:
        """All entries where task arithmetic stands."""
        return sum(self.fallback.values())


@torch.no_grad()
def execute(
    plan: MergePlan,
    out: str | os.PathLike[str],
    *,
    max_shard_bytes: int = SHARD,
    documents: Documents | None = None,
    progress: bool | None = None,
) -> MergeReport:
    """Carry out a plan of folders: read and write piece by piece, and place the result as a whole.

    Args:
        plan: of :func:`blr_analysis.merging.plan.plan_folders`.
        out: a folder that is new or empty.
        max_shard_bytes: the length of a shard, at most (a larger tensor has its own).
        documents: texts by file name to be saved beside the weights, made from the report.
        progress: a progress bar with the throughput.

    Raises:
        StorageError: ``out`` is not empty, the disk is full, a file changed or cannot be read.
        ModelError, PosteriorError: NaN, inf, or negative precisions were met on the way. Nothing
            is left behind.
    """
    started = time.perf_counter()
    positive_int("max_shard_bytes", max_shard_bytes)
    target = Path(out).expanduser()
    check_free(target)
    check_room(target, plan.bytes_written)
    reference = reference_folder(plan.job)
    source = plan.job.tokenizer_source
    tokenizer = reference if source == "base" else Path(source)
    with drafted(target) as draft:
        draft.mkdir()
        shards = Shards(draft, {item.name: item.spec for item in plan.items}, max_shard_bytes)
        shards.begin()
        with bar(plan.bytes_read, "merging", progress, unit="B", unit_scale=True) as shown:
            met = stream(plan, shards, shown.update)
        change = partial(fit_config, plan, reference)
        files = copy_files(reference, tokenizer, draft, plan.job.out_dtype, change)
        if plan.job.vocabulary is not None and plan.job.vocabulary.tokenizer is not None:
            write_union(plan.job.vocabulary.tokenizer, draft)
        seconds = time.perf_counter() - started
        fallback, solves = dict(met.fallback), dict(met.solves)
        names = tuple(shards.names)
        report = MergeReport(
            target, plan, fallback, files, names, seconds, solves, gap_ratios=met.lost
        )
        if documents is not None:
            for name, text in documents(report).items():
                (draft / name).write_text(text, encoding="utf-8")
        check_free(target)
    return report
