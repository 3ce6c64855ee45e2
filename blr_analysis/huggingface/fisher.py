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
from blr_analysis.backprop.engine import n_outputs
from blr_analysis.checks import one_of, path_of, positive_int
from blr_analysis.errors import InputError
from blr_analysis.files import Folder, Unfinished, fingerprint, held, storage
from blr_analysis.huggingface.data import class_indices, label_column, places_of, read_rows
from blr_analysis.huggingface.models import (
    Pretrained,
    checkpoint_names,
    load_model,
    load_tuned,
    read_config,
)
from blr_analysis.huggingface.questions import read_tokens
from blr_analysis.huggingface.tokens import Tokens, read_length
from blr_analysis.merging.lora import TENSORS, is_adapter
from blr_analysis.posterior import (
    FACTORED,
    Forecast,
    Posterior,
    check_dtype,
    fit_kept,
    take_off,
    write_factors,
    write_precision,
)
from blr_analysis.posterior.capture import tied_names
from blr_analysis.task import Task

CURVATURES = {"mc": "mc_fisher", "emp": "empirical_fisher", "ggn": "ggn"}
FOLDER = "precision"
TINY = 1e-30  # δ of what is fitted, whose data part alone is asked for


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
    max_length: int
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
        blr_analysis.errors.StorageError: there is no folder 'no-model': ...
    """
    started = time.monotonic()
    curvature = _asked(kind, structure, samples, dtype)
    place = Path(path_of(model)).expanduser()
    target = place / FOLDER if out is None else Path(path_of(out)).expanduser()
    adapter = is_adapter(place)
    if not adapter:
        read_config(place)
    leads = ranks.first()
    with held(storage.check_target(target, force=force)) if leads else nullcontext():
        loaded = load_tuned(place, base=base, task=task, device=device)
        names = checkpoint_names(loaded)
        most = read_length(loaded, max_length)
        encoded, n, columns = _read(loaded, data, kind, text, label, examples, most, seed)
        how = (loaded.task, kind, structure, samples, seed, memory_budget, str(device))
        weights = [loaded.folder, *([place / TENSORS] if adapter else [])]
        kept = _unfinished(target, weights, encoded, how)
        q = fit_kept(
            encoded.task(loaded, memory_budget=memory_budget),
            structure=structure,
            prior_precision=None if structure == "gram" else TINY,
            curvature="ggn" if structure == "gram" else curvature,
            samples=samples,
            seed=seed,
            kept=kept if ranks.count() == 1 else None,
        )
        about: dict[str, Any] = {
            "definition": _definition(q, loaded),
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
            "frozen": [names[n] for n, p in loaded.model.named_parameters() if not p.requires_grad],
            "tied": _tied(loaded, names),
            **({"noise": q.record["noise"]} if "noise" in q.record else {}),
            **({"adapter": True} if adapter else {}),
        }
        tensors = _written(target, q, names, n / len(encoded), dtype, about, write=leads)
        for sums in kept.values():
            sums.remove()
    size = sum(t.numel() for t in tensors)
    return FisherResult(
        folder=target,
        kind=str(q.record["kind"]),
        tensors=len(tensors),
        parameters=size,
        n_data=n,
        examples=len(encoded),
        truncated=encoded.cut,
        max_length=most,
        zeros=sum(int((t == 0).sum()) for t in tensors) / size,
        seconds=time.monotonic() - started,
    )


def _written(
    target: Path,
    q: Posterior,
    names: dict[str, str],
    scale: float,
    dtype: torch.dtype | None,
    about: dict[str, Any],
    *,
    write: bool,
) -> list[torch.Tensor]:
    """The tensors of the data's part, and written by the names of the files."""
    if (values := q.form.per_weight) is None:
        if write:
            write_factors(target, q, names=names, scale=scale, **about)
        return list(q.form.tensors().values())
    parts = {n: take_off(s.clone(), TINY, s.dtype).mul_(scale).cpu() for n, s in values.items()}
    if write:
        stored = {names[n]: t for n, t in parts.items()}
        write_precision(target, stored, dtype=dtype, kind=str(q.record["kind"]), **about)
    return list(parts.values())


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
    loaded = load_model(model)
    kind, most = "emp" if labelled else "mc", read_length(loaded, None)
    read = (_read(loaded, data, kind, None, None, None, most, 0)[0] for data in files)
    return [encoded.task(loaded) for encoded in read]


def _asked(kind: str, structure: str, samples: int, dtype: Any) -> str:
    """The kind as a curvature, of settings that go together."""
    one_of("kind", kind, tuple(CURVATURES))
    one_of("structure", structure, ("diag", *FACTORED))
    positive_int("samples", samples)
    check_dtype(dtype)
    if structure != "diag" and dtype is not None:
        raise InputError(f"structure={structure!r} is kept in float32: leave dtype out")
    if samples > 1 and kind != "mc":
        raise InputError("samples belongs to kind='mc', whose labels are drawn")
    return CURVATURES[kind]


def fisher_cost(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    kind: str = "mc",
    structure: str = "diag",
    samples: int = 1,
    text: str | Sequence[str] | None = None,
    task: str | None = None,
    examples: int | None = None,
    max_length: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> Forecast:
    """What :func:`fisher` would cost; nothing is written. An example takes a forward pass, and for
    every label that is drawn ("ggn": for every label but one) a backward pass, twice as long."""
    _asked(kind, structure, samples, dtype)
    loaded = load_tuned(model, base=base, task=task, device=device)
    most = read_length(loaded, max_length)
    unlabelled = "mc" if kind == "emp" else kind
    encoded, _, _ = _read(loaded, data, unlabelled, text, None, examples, most, 0)
    ours = encoded.task(loaded)
    size = sum(p.numel() for p in ours.parameters().values())
    exact = n_outputs(ours, ours.parameters()) - (loaded.likelihood == "categorical")
    backward = 0 if structure == "gram" else exact if kind == "ggn" else samples
    run = round(len(encoded) * (1 + 2 * backward) / 3)
    run *= 2 if structure == "kron" else 1
    itemsize = torch.float32.itemsize if dtype is None else dtype.itemsize
    return Forecast.of(ours, run, disk=size * itemsize, structure=structure)


def _definition(q: Posterior, loaded: Pretrained) -> str:
    """What the numbers are, for the record: a formula, and how published scripts differ."""
    loss = "sum over tokens of -log p" if loaded.task == "causal_lm" else "-log p(y_i|x_i)"
    return (
        f"{q.record['definition']}; g_i the gradient of example i's loss, {loss}; without "
        "prior_precision; summed over n_data examples (published merging scripts average: divide "
        "by n_data to compare)"
    )


def _read(
    loaded: Pretrained,
    data: str | os.PathLike[str],
    kind: str,
    text: str | Sequence[str] | None,
    label: str | None,
    examples: int | None,
    most: int,
    seed: int,
) -> tuple[Tokens, int, tuple[str, ...]]:
    """The examples that are used, sorted so that neighbours are padded little; how many there are;
    and the columns that are read."""
    causal = loaded.task == "causal_lm"
    if causal and label is not None:
        raise InputError("a language model has no label column: its labels are the tokens")
    if causal and kind == "ggn":
        raise InputError("kind='ggn' takes every token's vocabulary: use kind='mc'")
    table, where = read_rows(data)
    n = len(table)
    if examples is not None and positive_int("examples", examples) > n:
        raise InputError(f"examples={examples}, but {str(data)!r} holds {n}")
    if examples is not None:
        generator = torch.Generator().manual_seed(seed)
        table = table.iloc[torch.randperm(n, generator=generator)[:examples].sort()[0].tolist()]
    labels, named = None, ()
    if not causal and (kind == "emp" or label is not None):
        named = (label_column(table, where, label),)
        known = {str(k): int(v) for k, v in (loaded.config.label2id or {}).items()}
        classes = int(loaded.config.num_labels)
        labels = class_indices(table[named[0]].tolist(), places_of(table, where), known, classes)
    columns, tokens, _ = read_tokens(loaded, table, where, text, most, labels)
    tokens.rows.sort(key=lambda row: len(row["input_ids"]))
    return tokens, n, columns + named


def _tied(loaded: Pretrained, names: dict[str, str]) -> dict[str, list[str]]:
    """Every further name of a tied tensor, by its name in the files."""
    aliases: dict[str, list[str]] = {}
    for first, others in tied_names(loaded.model).items():
        stored = names[first]
        aliases[stored] = [n for n in (first, *others) if n != stored]
    return aliases
