"""A plan of folders carried out: streamed, written as a whole, reported."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blr_analysis.checks import positive_int
from blr_analysis.files import Shards, check_free, check_room, drafted
from blr_analysis.files.headers import read_json
from blr_analysis.merging.fates import COPIED
from blr_analysis.merging.layers import Solved
from blr_analysis.merging.plan import SHARD, MergePlan, fit_config, reference_folder
from blr_analysis.merging.stream import Outcome, Sink, stream
from blr_analysis.progress import bar
from blr_analysis.views import Tabular

# What tells a model how to run, or its user what it is allowed to do.
CONFIG = (
    "config.json",
    "generation_config.json",
    "configuration_*.py",
    "modeling_*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenization_*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)

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
    fill: Callable[[MergePlan, Sink, Callable[[int], object]], Outcome] = stream,
) -> MergeReport:
    """Carry out a plan of folders: read and write piece by piece, and place the result as a whole.

    Args:
        plan: of :func:`blr_analysis.merging.plan.plan_folders`.
        out: a folder that is new or empty.
        max_shard_bytes: the length of a shard, at most (a larger tensor has its own).
        documents: texts by file name to be saved beside the weights, made from the report.
        progress: a progress bar with the throughput.
        fill: what reads, merges and writes the tensors.

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
            met = fill(plan, shards, shown.update)
        change = partial(fit_config, plan)
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


def copy_files(
    reference: Path,
    tokenizer: Path,
    target: Path,
    dtype: torch.dtype | None,
    change: Callable[[dict[str, Any]], object] | None = None,
) -> dict[str, str]:
    """Copy configuration, tokenizer and chat template; the fate of every file comes back.

    Weights, indices of weights, cards, optimizer states and whatever else a folder holds stay
    where they are. ``dtype``, where given, is written into the copied configuration.
    """
    fates: dict[str, str] = {}
    for folder, patterns in ((reference, CONFIG), (tokenizer, TOKENIZER)):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if any(fnmatch(path.name, p) for p in patterns):
                copy = shutil.copytree if path.is_dir() else shutil.copyfile  # which follow links
                copy(path, target / path.name)
                fates[path.name] = f"copied from {str(folder)!r}"
            elif folder == reference and not any(fnmatch(path.name, p) for p in TOKENIZER):
                fates.setdefault(path.name, "left where it is")
    config = target / "config.json"
    if config.is_file() and (dtype is not None or change is not None):
        document = read_json(config)
        if dtype is not None:
            key = "torch_dtype" if "torch_dtype" in document else "dtype"
            document[key] = str(dtype).removeprefix("torch.")
        if change is not None:
            change(document)
        config.write_text(
            json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    return fates


def write_union(tokenizer: Mapping[str, Any], target: Path) -> None:
    """Put ``tokenizer.json`` of several models in place of the copied one."""
    for name in ("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "added_tokens.json"):
        (target / name).unlink(missing_ok=True)
    text = json.dumps(tokenizer, ensure_ascii=False)
    (target / "tokenizer.json").write_text(text, encoding="utf-8")
    config = target / "tokenizer_config.json"
    document = read_json(config) if config.is_file() else {}
    if "added_tokens_decoder" in document:
        known = {
            str(t["id"]): {k: v for k, v in t.items() if k != "id"}
            for t in tokenizer["added_tokens"]
        }
        document["added_tokens_decoder"] = {**known, **document["added_tokens_decoder"]}
        config.write_text(json.dumps(document, indent=2, ensure_ascii=False), encoding="utf-8")
