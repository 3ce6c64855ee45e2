"""A plan carried out: into memory, or as a folder that is written as a whole and reported."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr_analysis.adapters import Untied, is_adapter
from blr_analysis.files import Loaded, Shards, drafted
from blr_analysis.files.checksums import checksum_of_file
from blr_analysis.files.headers import read_json, record_text
from blr_analysis.files.placing import check_free, check_room
from blr_analysis.merging.job import Job
from blr_analysis.merging.layers import Solved
from blr_analysis.merging.merge_plan import MergePlan
from blr_analysis.merging.piece import Sink
from blr_analysis.merging.propagation import stream_propagated
from blr_analysis.merging.sources import is_place
from blr_analysis.merging.stream import Memory, Outcome, stream
from blr_analysis.progress import bar

SHARD = 5_000_000_000  # bytes of a file of weights, unless the user asks for others
RECORD = "merge_files.json"  # the checksums of all files of a merge by recipe
FORMAT = {"format": "blr_analysis.merge", "version": 1}
# Files that configure a model, and licences.
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
class MergeReport:
    """The report of a merge that was written to a folder.

    Attributes:
        folder: the merged model.
        plan: the plan that was carried out.
        fallback: by tensor, the number of entries without a precision, where task arithmetic
            stands.
        files: what became of every file beside the weights.
        shards: the files with weights.
        seconds: how long it took.
        solves: by layer that was merged as one matrix, how its equation was solved.
        choice: the merges that "auto" has tried, and its choice.
    """

    folder: Path
    plan: MergePlan
    fallback: Mapping[str, int]
    files: Mapping[str, str]
    shards: tuple[str, ...]
    seconds: float
    solves: Mapping[str, Solved] = field(default_factory=dict)
    choice: Any = None

    @property
    def fallback_total(self) -> int:
        """The number of entries of all tensors where task arithmetic stands."""
        return sum(self.fallback.values())


def fill(plan: MergePlan, sink: Sink, progress: bool | None) -> Outcome:
    """Merge every tensor into a sink, with a bar of the bytes read."""
    merge_all = stream_propagated if plan.job.propagates else stream
    with bar(plan.bytes_read, "merging", progress, unit="B", unit_scale=True) as shown:
        return merge_all(plan, sink, shown.update)


@torch.no_grad()
@torch.inference_mode(False)
def collect(plan: MergePlan, progress: bool | None = None) -> dict[str, Tensor]:
    """Carry out a plan into memory: a state dict on the devices of the base."""
    devices = {tensor.name: torch.device("cpu") for tensor in plan.tensors}
    if isinstance(plan.reference, Loaded):
        devices |= {name: tensor.device for name, tensor in plan.reference.detached.items()}
    sink = Memory(plan.tensors, devices)
    fill(plan, sink, progress)
    return sink.tensors


@torch.no_grad()
@torch.inference_mode(False)
def execute(
    plan: MergePlan,
    out: str | os.PathLike[str],
    *,
    max_shard_bytes: int = SHARD,
    documents: Documents | None = None,
    replaces: bool = False,
    progress: bool | None = None,
) -> MergeReport:
    """Carry out a plan: read and write piece by piece, and place the result as a whole.

    Args:
        plan: of :func:`blr_analysis.merging.plan.make_plan`.
        out: a folder that is new or empty, or that the result replaces.
        max_shard_bytes: the largest size of a shard (a larger tensor has its own).
        documents: a function of the report that returns texts by file name. They are saved beside
            the weights, and so are the checksums of all files (``merge_files.json``).
        replaces: whether a folder that is there stays until the result is complete, and then goes.
        progress: whether a bar shows the throughput.

    Raises:
        StorageError: ``out`` is not empty, the disk is full, a file changed or cannot be read.
        ModelError, PosteriorError: a model holds NaN or inf, or a precision negative numbers too.
            Nothing is left behind.
    """
    started = time.perf_counter()
    target = Path(out).expanduser()
    if not replaces:
        check_free(target)
    check_room(target, plan.bytes_written)
    with drafted(target) as draft:
        draft.mkdir()
        shards = Shards(
            draft,
            {tensor.name: tensor.spec for tensor in plan.tensors},
            max_shard_bytes,
            counts=documents is not None,
        )
        outcome = fill(plan, shards, progress)
        files = _copy_files(plan, draft)
        report = MergeReport(
            folder=target,
            plan=plan,
            fallback=dict(outcome.fallback),
            files=files,
            shards=tuple(shards.names),
            seconds=time.perf_counter() - started,
            solves=dict(outcome.solves),
        )
        if documents is not None:
            for name, text in documents(report).items():
                (draft / name).write_text(text, encoding="utf-8")
            _write_record(draft, shards.checksums)
        if not replaces:
            check_free(target)
    return report


def _write_record(folder: Path, checksums_of_shards: Mapping[str, str]) -> None:
    """Write the checksums of all files of a merge, which ``blr-analysis verify`` reads."""
    checksums = dict(checksums_of_shards)
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and name not in checksums:
            checksums[name] = checksum_of_file(file)
    (folder / RECORD).write_text(record_text(FORMAT, checksums), encoding="utf-8")


def reference_folder(job: Job) -> Path | None:
    """The folder whose configuration is copied to the result; None: no model is a folder."""
    if is_place(job.base):
        return Path(job.base).expanduser()
    for member in job.members:
        if is_place(member.model) and not is_adapter(member.model):
            return Path(member.model).expanduser()
    return None


def _copy_files(plan: MergePlan, target: Path) -> dict[str, str]:
    """Copy configuration, tokenizer and chat template to the result.

    Weights, indices of weights, cards, optimizer states and all other files are not copied. The
    dtype and the number of tokens are written into the copied configuration, where they change.

    Returns:
        By the name of every file, what became of it.
    """
    fates: dict[str, str] = {}
    reference = reference_folder(plan.job)
    for path in _files_of(reference):
        if not _is_one_of(path, TOKENIZER):
            fates[path.name] = "left where it is"
    for folder, patterns in ((reference, CONFIG), (plan.tokens.folder, TOKENIZER)):
        for path in _files_of(folder):
            if _is_one_of(path, patterns):
                copy = shutil.copytree if path.is_dir() else shutil.copyfile  # both follow links
                copy(path, target / path.name)
                fates[path.name] = f"copied from {str(folder)!r}"
    if (target / "config.json").is_file():
        _adapt_config(plan, target / "config.json")
    return fates


def _files_of(folder: Path | None) -> list[Path]:
    """The files and folders in a folder, by name; empty where there is no folder."""
    if folder is None or not folder.is_dir():
        return []
    return sorted(folder.iterdir())


def _is_one_of(path: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in patterns)


def _adapt_config(plan: MergePlan, config: Path) -> None:
    """Write the dtype and the number of tokens of the result into its configuration."""
    dtype = plan.job.out_dtype
    rows = plan.tokens.rows
    is_untied = isinstance(plan.reference, Untied)
    if dtype is None and rows is None and not is_untied:
        return
    document = read_json(config)
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in document else "dtype"
        document[key] = str(dtype).removeprefix("torch.")
    sections = (document, document.get("text_config") or {})
    for section in sections:
        if rows is not None and "vocab_size" in section:
            section["vocab_size"] = rows
        if is_untied:
            section["tie_word_embeddings"] = False
    text = json.dumps(document, indent=2, ensure_ascii=False)
    config.write_text(f"{text}\n", encoding="utf-8")
