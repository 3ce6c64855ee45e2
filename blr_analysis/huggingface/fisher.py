"""The Fisher of a model on disk, written beside it for merging: ``blr-analysis fisher``."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blr_analysis import ranks
from blr_analysis.adapters import TENSORS, is_adapter
from blr_analysis.backprop.engine import n_outputs
from blr_analysis.checks import one_of, path_of, positive_int
from blr_analysis.errors import InputError
from blr_analysis.files import Folder, Unfinished, fingerprint, held, storage
from blr_analysis.huggingface.data import class_indices, label_column, places_of, read_rows
from blr_analysis.huggingface.file_layout import file_layout
from blr_analysis.huggingface.models import Pretrained, load_model, load_tuned
from blr_analysis.huggingface.questions import Tokens, read_length, read_tokens
from blr_analysis.posterior import (
    FACTORED,
    Forecast,
    check_dtype,
    fit_kept,
    take_off,
    write_factors,
    write_precision,
)
from blr_analysis.task import Task

CURVATURES = {"mc": "mc_fisher", "emp": "empirical_fisher", "ggn": "ggn"}
FOLDER = "precision"
TINY = 1e-30  # δ of what is fitted, whose data part alone is asked for
DEFINITION = (
    "g_i the gradient of example i's loss, -log p(y_i|x_i), of a text the sum over its tokens; "
    "summed over n_data examples (published merging scripts average: divide by n_data to compare)"
)


@dataclass(frozen=True)
class FisherResult:
    """What was computed, and where it lies.

    Attributes:
        folder: the precision folder (or file).
        kind: as in the record: "fisher_mc", "fisher_emp", "ggn" or "gram".
        tensors: how many tensors have a precision.
        parameters: how many numbers these are.
        n_data: N, the examples that the sum stands for.
        examples: how many of them were used.
        truncated: how many of those were longer than was read.
        max_length: tokens that were read of a text at most.
        zeros: the share of numbers that are exactly 0 (embeddings of words that do not occur).
        seconds: of the whole run.
    """

    folder: Path
    kind: str
    tensors: int
    parameters: int
    n_data: int
    examples: int
    truncated: int
    max_length: int | None
    zeros: float
    seconds: float


def fisher(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    kind: str = "mc",
    structure: str = "diag",
    samples: int = 1,
    text: str | Sequence[str] | None = None,
    label: str | None = None,
    task: str | None = None,
    examples: int | None = None,
    max_length: int | None = None,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    device: str | torch.device = "cpu",
    memory_budget: int | None = None,
    dtype: torch.dtype | None = None,
) -> FisherResult:
    """The precision of a fine-tuned model from its data, as ``MODEL/precision``.

        S = Σ_i (1/K) Σ_k g_i(ŷ_ik)²,  ŷ_ik ~ p(y | x_i)        (kind="mc", the Fisher)

    A SUM over all N examples, the data's part alone (prior precision 0), with ``n_data`` = N in
    its record. Published merging scripts AVERAGE over the examples; divide by N to compare. Of
    language models the loss of an example is the sum over its tokens.

    Args:
        model: a folder with a sequence classifier or a causal language model, in safetensors; or
            with an adapter of one: the precision is then of the weights that the adapter changes,
            with it added, by the base's names, as a merge takes it.
        data: .jsonl, .csv, .tsv, .parquet or .txt; see
            :func:`~blr_analysis.huggingface.data.read_rows`. Of a language model also prompts with
            answers, or messages, whose answers alone count, as ``index`` and ``audit`` read them.
        base: where an adapter's base is, unless its configuration names a folder here.
        kind: "mc", the Fisher with labels drawn from the model (the file needs none); "emp", the
            empirical Fisher; "ggn", exact over the classes (not for language models).
        structure: "diag"; "kron", layers' Kronecker factors; or "gram", the second moments of
            layers' inputs by forward passes alone, whatever ``kind`` is.
        samples: K labels per example for "mc".
        text, label: columns of the file; ``text`` two for pairs; None: by their usual names.
        task: "classification" or "causal_lm"; None: what the model's config says.
        examples: use M random examples of the N, and scale the sum by N/M.
        max_length: tokens read of a text; default: what the model reads, at most 512.
        seed: of what is drawn: examples, labels.
        out: where to write; default ``model/precision``.
        force: replace a precision that is already there.
        device, memory_budget: where to work, and in how many bytes. On top come
            the model, the sum, and once, when the gradients of three examples are checked against
            autograd's, some 13 bytes per parameter.
        dtype: torch.bfloat16 to store half the bytes; default float32.

    Raises:
        InputError: arguments that do not fit each other, or transformers is missing.
        DataError: the file, its columns or its labels.
        ModelError: no model that can be read; see
            :func:`~blr_analysis.huggingface.models.load_model`.
        StorageError: files that are missing or damaged; ``out`` is there and ``force`` was not
            given. Nothing is written unless all of it is.

    Every minute the sums are kept in ``OUT.unfinished``: the same call, made again after it was
    ended, goes on there and comes to the same bits. (Not on several ranks.)

    Source: Daheim et al. (2024), *Model Merging by Uncertainty-Based Gradient Matching*, eq. 12.

    Example:
        >>> fisher("no-model", "no-data.csv")
        Traceback (most recent call last):
            ...
        blr_analysis.errors.StorageError: there is no folder 'no-model' with ...
    """
    started = time.monotonic()
    asked = Asked(kind, structure, samples, text, label, examples, max_length, seed, dtype)
    place = Path(path_of(model)).expanduser()
    target = place / FOLDER if out is None else Path(path_of(out)).expanduser()
    adapter, leads = is_adapter(place), ranks.first()
    loaded = load_tuned(place, base=base, task=task, device=device)
    layout = file_layout(loaded.model, loaded.specs, loaded.folder)
    names = layout.one_name_each("structure='diag' can be written") if structure != "diag" else {}
    with held(storage.check_target(target, force=force)) if leads else nullcontext():
        encoded, n, columns = asked.read(loaded, data)
        how = (loaded.task, kind, structure, samples, seed, memory_budget, str(device))
        weights = [loaded.folder, *([place / TENSORS] if adapter else [])]
        kept = _unfinished(target, weights, encoded, how)
        q = fit_kept(
            encoded.task(loaded, memory_budget=memory_budget),
            structure=structure,
            prior_precision=None if structure == "gram" else TINY,
            curvature="ggn" if structure == "gram" else CURVATURES[kind],
            samples=samples,
            seed=seed,
            kept=kept if ranks.count() == 1 else None,
        )
        about: dict[str, Any] = {
            "definition": f"{q.record['definition']}; {DEFINITION}",
            "n_data": n,
            "model": weights[-1],
            "samples": samples if kind == "mc" else None,
            "examples": len(encoded),
            "seed": seed,
            "max_length": encoded.max_length,
            "truncated": encoded.cut,
            "data": Path(path_of(data)).name,
            "columns": list(columns),
            "likelihood": loaded.likelihood,
            "source": "fisher",
            "frozen": layout.frozen,
            "tied": layout.tied,
            "noise": q.record.get("noise"),
            "adapter": adapter,
        }
        parts, scale = q.form.per_weight, n / len(encoded)
        if parts is not None:
            cut = {k: take_off(s.clone(), TINY, s.dtype) for k, s in parts.items()}
            parts = layout.tensors({k: s.mul_(scale).cpu() for k, s in cut.items()})
        if leads and parts is not None:
            write_precision(target, parts, dtype=dtype, kind=q.record["kind"], **about)
        elif leads:
            write_factors(target, q, names=names, scale=scale, **about)
        for sums in kept.values():
            sums.remove()
    tensors = (parts or q.form.tensors()).values()
    size = sum(t.numel() for t in tensors)
    zeros = sum(int((t == 0).sum()) for t in tensors) / size
    return FisherResult(
        folder=target,
        kind=str(q.record["kind"]),
        tensors=len(tensors),
        parameters=size,
        n_data=n,
        examples=len(encoded),
        truncated=encoded.cut,
        max_length=encoded.max_length,
        zeros=zeros,
        seconds=time.monotonic() - started,
    )


@dataclass(frozen=True)
class Asked:
    """What :func:`fisher` is asked for, of settings that go together."""

    kind: str = "mc"
    structure: str = "diag"
    samples: int = 1
    text: str | Sequence[str] | None = None
    label: str | None = None
    examples: int | None = None
    max_length: int | None = None
    seed: int = 0
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        one_of("kind", self.kind, tuple(CURVATURES))
        one_of("structure", self.structure, ("diag", *FACTORED))
        check_dtype(self.dtype)
        if self.structure != "diag" and self.dtype is not None:
            raise InputError(f"structure={self.structure!r} is kept in float32: leave dtype out")
        if positive_int("samples", self.samples) > 1 and self.kind != "mc":
            raise InputError("samples belongs to kind='mc', whose labels are drawn")

    def read(self, loaded: Pretrained, data: Any) -> tuple[Tokens, int, tuple[str, ...]]:
        """The examples that are used, sorted so that neighbours are padded little; how many there
        are; and the columns that are read."""
        causal, most = loaded.task == "causal_lm", read_length(loaded, self.max_length)
        if causal and self.label is not None:
            raise InputError("a language model has no label column: its labels are the tokens")
        if causal and self.kind == "ggn":
            raise InputError("kind='ggn' takes every token's vocabulary: use kind='mc'")
        table, where = read_rows(data)
        n = len(table)
        if self.examples is not None:
            if positive_int("examples", self.examples) > n:
                raise InputError(f"examples={self.examples}, but {str(data)!r} holds {n}")
            order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed))
            table = table.iloc[order[: self.examples].sort()[0].tolist()]
        labels, named = None, ()
        if not causal and (self.kind == "emp" or self.label is not None):
            config: Any = loaded.model.config
            named = (label_column(table, where, self.label),)
            known = {str(k): int(v) for k, v in (config.label2id or {}).items()}
            given, places = table[named[0]].tolist(), places_of(table, where)
            labels = class_indices(given, places, known, config.num_labels)
        columns, tokens, _ = read_tokens(loaded, table, where, self.text, most, labels)
        tokens.rows.sort(key=lambda row: len(row["input_ids"]))
        return tokens, n, columns + named


def _unfinished(
    target: Path, weights: Sequence[Path], encoded: Tokens, how: tuple[Any, ...]
) -> dict[str, Unfinished]:
    """Where the sums of a run that was ended lie, if model, data and settings are the same, by
    what is summed: layers' inputs, their factors, squared gradients."""
    model = [fingerprint(Folder.open(place)) for place in weights]
    said = (model, how, torch.__version__, encoded.rows)
    digest = hashlib.sha256(repr(said).encode()).hexdigest()
    ends = {"inputs": "unfinished", "factors": "factors.unfinished", "values": "unfinished"}
    return {k: Unfinished(target.with_name(f"{target.name}.{e}"), digest) for k, e in ends.items()}


def text_tasks(
    model: str | os.PathLike[str], files: Sequence[Path], *, labelled: bool
) -> list[Task]:
    """Files of texts, of classifiers ``labelled`` or not, as tasks of one model in a folder.

    Raises:
        DataError, ModelError, StorageError: as :func:`fisher`.
    """
    loaded, asked = load_model(model, dtype="float32"), Asked("emp" if labelled else "mc")
    return [asked.read(loaded, data)[0].task(loaded) for data in files]


def fisher_cost(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    task: str | None = None,
    device: str | torch.device = "cpu",
    **how: Any,
) -> Forecast:
    """What :func:`fisher` would cost; nothing is written. An example takes a forward pass, and for
    every label that is drawn ("ggn": for every label but one) a backward pass, twice as long.

    Args:
        how: the settings of :func:`fisher` that say what is read and computed.
    """
    asked = Asked(**how)
    loaded = load_tuned(model, base=base, task=task, device=device)
    ours = asked.read(loaded, data)[0].task(loaded)
    size = sum(p.numel() for p in ours.parameters().values())
    exact = n_outputs(ours, ours.parameters()) - (loaded.likelihood == "categorical")
    backward = exact if asked.kind == "ggn" else asked.samples
    if asked.structure == "gram":
        backward = 0
    run = round(ours.n_data * (1 + 2 * backward) / 3)
    run *= 2 if asked.structure == "kron" else 1
    disk = size * (asked.dtype or torch.float32).itemsize
    return Forecast.of(ours, run, disk=disk, structure=asked.structure)
