"""The Fisher of a model on disk, written beside it for merging: ``blr-analysis fisher``."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blr_analysis import ranks
from blr_analysis.backprop.engine import n_outputs
from blr_analysis.checks import one_of, path_of, positive_int
from blr_analysis.errors import InputError
from blr_analysis.files import Folder, Unfinished, fingerprint, held, storage
from blr_analysis.huggingface.data import Texts, class_indices, places_of, read_rows, read_texts
from blr_analysis.huggingface.diagonals import check_kind, fisher_diagonal
from blr_analysis.huggingface.models import (
    Pretrained,
    checkpoint_names,
    load_model,
    load_tuned,
    read_config,
)
from blr_analysis.huggingface.questions import answer_columns, read_tokens
from blr_analysis.huggingface.tokens import Tokens, encode, read_length
from blr_analysis.merging.lora import TENSORS, is_adapter
from blr_analysis.posterior import (
    FACTORED,
    Forecast,
    Stage,
    check_dtype,
    fit_kept,
    write_factors,
    write_precision,
)
from blr_analysis.posterior.capture import tied_names
from blr_analysis.task import Task

KINDS = {
    "mc": "fisher_mc",
    "emp": "fisher_emp",
    "ggn": "ggn",
    "squared_minibatch": "squared_minibatch",
}
LABELLED = ("fisher_emp", "squared_minibatch")  # the others draw or need no labels
FOLDER = "precision"
TINY = 1e-12  # δ of factors, whose data part alone is asked for


@dataclass(frozen=True)
class FisherResult:
    """What was computed, and where it lies.

    Attributes:
        folder: the precision folder (or file).
        kind: as in the record: "fisher_mc", "fisher_emp", "ggn" or "squared_minibatch".
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
    batch_size: int | None = None,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    device: str | torch.device = "cpu",
    memory_budget: int | None = None,
    dtype: torch.dtype | None = None,
    progress: bool | None = None,
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
            :func:`~blr_analysis.huggingface.data.read_texts`. Of a language model also prompts with
            answers, or messages, whose answers alone count, as ``index`` and ``audit`` read them.
        base: where an adapter's base is, unless its configuration names a folder here.
        kind: "mc", the Fisher with labels drawn from the model (the file needs none); "emp", the
            empirical Fisher; "ggn", exact over the classes (not for language models);
            "squared_minibatch", the squared gradient of the mean loss of ``batch_size`` examples,
            as published scripts compute it, whose expectation is NOT the Fisher.
        structure: "diag"; "kron", layers' Kronecker factors; or "gram", the second moments of
            layers' inputs by forward passes alone, whatever ``kind`` is.
        samples: K labels per example for "mc".
        text, label: columns of the file; ``text`` two for pairs; None: by their usual names.
        task: "classification" or "causal_lm"; None: what the model's config says.
        examples: use M random examples of the N, and scale the sum by N/M.
        max_length: tokens read of a text; default: what the model reads, at most 512.
        batch_size: B of "squared_minibatch", and of it alone.
        seed: of what is drawn: examples, labels, batches.
        out: where to write; default ``model/precision``.
        force: replace a precision that is already there.
        device, memory_budget: where to work, and in how many bytes (default 256 MiB). On top come
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
    ended, goes on there and comes to the same bits. (Not "squared_minibatch", nor on several
    ranks.)

    Source: Daheim et al. (2024), *Model Merging by Uncertainty-Based Gradient Matching*, eq. 12.

    Example:
        >>> fisher("no-model", "no-data.csv")
        Traceback (most recent call last):
            ...
        blr_analysis.errors.StorageError: there is no folder 'no-model': ...
    """
    started = time.monotonic()
    kind = _asked(kind, structure, samples, dtype)
    place = Path(path_of(model)).expanduser()
    target = place / FOLDER if out is None else Path(path_of(out)).expanduser()
    adapter = is_adapter(place)
    if not adapter:
        read_config(place)
    leads = ranks.first()
    with held(storage.check_target(target, force=force)) if leads else nullcontext():
        loaded = load_tuned(place, base=base, task=task, device=device)
        check_kind(kind, loaded.task == "causal_lm", batch_size)
        names = checkpoint_names(loaded)
        encoded, texts = _read(loaded, data, kind, text, label, examples, max_length, seed)
        n, own_task = len(texts), encoded.task(loaded)
        own_task.memory_budget, own_task.progress = memory_budget, progress
        about = definition(kind, samples, batch_size, loaded.task)
        how = (loaded.task, kind, structure, samples, seed, memory_budget, str(device))
        weights = [loaded.folder, *([place / TENSORS] if adapter else [])]
        kept = _unfinished(target, weights, encoded, how)
        alone = ranks.count() == 1
        more: dict[str, Any] = {"adapter": True} if adapter else {}
        if structure == "diag":
            diagonal = fisher_diagonal(
                own_task,
                kind=kind,
                samples=samples,
                seed=seed,
                batch_size=batch_size,
                memory_budget=memory_budget,
                lengths=encoded.lengths,
                kept=kept["values"] if alone else None,
                progress=progress,
            )
            tensors = {names[name]: s.mul_(n / len(encoded)) for name, s in diagonal.items()}
            write = partial(write_precision, target, tensors, dtype=dtype, kind=kind)
        else:
            curvature = {"fisher_mc": "mc_fisher", "fisher_emp": "empirical_fisher"}.get(kind, kind)
            q = fit_kept(
                own_task,
                structure=structure,
                prior_precision=None if structure == "gram" else TINY,
                curvature="ggn" if structure == "gram" else curvature,
                samples=samples,
                seed=seed,
                kept=kept if alone else None,
            )
            kind, about = str(q.record["kind"]), str(q.record["definition"])
            more |= {k: v for k, v in q.record.items() if k == "noise"}
            tensors = q.form.tensors()
            write = partial(write_factors, target, q, names=names, scale=n / len(encoded))
        write = write if leads else dict
        write(
            definition=about,
            n_data=n,
            model=weights[-1],
            batch_size=batch_size,
            samples=samples if kind == "fisher_mc" else None,
            examples=len(encoded),
            seed=seed,
            max_length=encoded.max_length,
            truncated=encoded.cut,
            data=texts.path.name,
            columns=list(texts.columns),
            likelihood=loaded.likelihood,
            source="fisher",
            frozen=[names[n] for n, p in loaded.model.named_parameters() if not p.requires_grad],
            tied=_tied(loaded, names),
            **more,
        )
        for sums in kept.values():
            sums.remove()
    size = sum(t.numel() for t in tensors.values())
    zeros = sum(int((t == 0).sum()) for t in tensors.values())
    return FisherResult(
        folder=target,
        kind=kind,
        tensors=len(tensors),
        parameters=size,
        n_data=n,
        examples=len(encoded),
        truncated=encoded.cut,
        max_length=read_length(loaded, max_length),
        zeros=zeros / size,
        seconds=time.monotonic() - started,
    )


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
    loaded = load_model(Path(path_of(model)).expanduser(), task=None, device="cpu")
    kind = "fisher_emp" if labelled else "fisher_mc"
    read = (_read(loaded, data, kind, None, None, None, None, 0)[0] for data in files)
    return [encoded.task(loaded) for encoded in read]


def _asked(kind: str, structure: str, samples: int, dtype: Any) -> str:
    """The kind's full name, of settings that go together."""
    kind = one_of("kind", kind, (*KINDS, *KINDS.values()))
    kind = KINDS.get(kind, kind)
    one_of("structure", structure, ("diag", *FACTORED))
    positive_int("samples", samples)
    check_dtype(dtype)
    if structure != "diag" and (dtype is not None or kind == "squared_minibatch"):
        raise InputError(
            f"structure={structure!r} is kept in float32, and of no squared_minibatch: leave them"
        )
    if samples > 1 and kind != "fisher_mc":
        raise InputError("samples belongs to kind='mc', whose labels are drawn")
    return kind


def fisher_cost(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    kind: str = "mc",
    structure: str = "diag",
    samples: int = 1,
    batch_size: int | None = None,
    text: str | Sequence[str] | None = None,
    task: str | None = None,
    examples: int | None = None,
    max_length: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> Forecast:
    """What :func:`fisher` would cost; nothing is written. An example takes a forward pass, and for
    every label that is drawn ("ggn": for every label but one) a backward pass, twice as long."""
    kind = _asked(kind, structure, samples, dtype)
    loaded = load_tuned(model, base=base, task=task, device=device)
    check_kind(kind, loaded.task == "causal_lm", batch_size)
    encoded, _ = _read(loaded, data, "fisher_mc", text, None, examples, max_length, 0)
    ours = encoded.task(loaded)
    size = sum(p.numel() for p in ours.parameters().values())
    exact = n_outputs(ours, ours.parameters()) - (loaded.likelihood == "categorical")
    backward = 0 if structure == "gram" else exact if kind == "ggn" else samples
    run = round(len(encoded) * (1 + 2 * backward) / 3)
    stages = [Stage("precision", run)]
    if structure == "kron":
        stages.append(Stage("eigenvalues", run, rotated=True))
    itemsize = torch.float32.itemsize if dtype is None else dtype.itemsize
    return Forecast.of(ours, stages, disk=size * itemsize, structure=structure)


def definition(kind: str, samples: int, batch_size: int | None, task: str) -> str:
    """What the numbers are, for the record: a formula, and how published scripts differ."""
    formula = {
        "fisher_mc": f"sum_i mean over {samples} sampled label(s) y_hat ~ p(y|x_i) of g_i(y_hat)^2",
        "fisher_emp": "sum_i g_i(y_i)^2",
        "ggn": "sum_i diag(J_i^T Lambda_i J_i)",
        "squared_minibatch": f"n_data / M * sum over M batches of {batch_size} examples of (mean "
        "over the batch of g_i(y_i))^2, which is not the Fisher: its expectation depends on the "
        "batch size",
    }[kind]
    loss = "sum over tokens of -log p" if task == "causal_lm" else "-log p(y_i|x_i)"
    return (
        f"{formula}; g_i the gradient of example i's loss, {loss}; summed over n_data examples "
        "(published merging scripts average: divide by n_data to compare)"
    )


def _read(
    loaded: Pretrained,
    data: str | os.PathLike[str],
    kind: str,
    text: str | Sequence[str] | None,
    label: str | None,
    examples: int | None,
    max_length: int | None,
    seed: int,
) -> tuple[Tokens, Texts]:
    """The examples that are used, and all that the file holds."""
    classifies = loaded.task == "classification"
    if label is not None and not classifies:
        raise InputError("a language model has no label column: its labels are the tokens")
    labelled = classifies and (kind in LABELLED or label is not None)
    table, where = (None, "") if classifies or text is not None else read_rows(data)
    answers = () if table is None else answer_columns(table)
    if table is not None and answers:
        values = zip(*(table[name].tolist() for name in answers), strict=True)
        places = places_of(table, where)
        texts = Texts(Path(path_of(data)).expanduser(), list(values), None, answers, places)
    else:
        texts = read_texts(data, text=text, label=label, labelled=labelled)
    labels = None
    if labelled:
        known = {str(k): int(v) for k, v in (loaded.config.label2id or {}).items()}
        labels = class_indices(texts, known, int(loaded.config.num_labels))
    chosen = None
    if examples is not None and positive_int("examples", examples) > len(texts):
        raise InputError(f"examples={examples}, but {str(data)!r} holds {len(texts)}")
    if examples is not None:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(texts), generator=generator)[:examples].sort()[0].tolist()
    if table is None or not answers:
        return encode(texts, loaded, labels, max_length=max_length, chosen=chosen), texts
    most = read_length(loaded, max_length)
    used = table if chosen is None else table.iloc[chosen]
    tokens = read_tokens(loaded, used, where, None, most)[1]
    tokens.rows.sort(key=lambda row: len(row["input_ids"]))
    return tokens, texts


def _tied(loaded: Pretrained, names: dict[str, str]) -> dict[str, list[str]]:
    """Every further name of a tied tensor, by its name in the files."""
    aliases: dict[str, list[str]] = {}
    for first, others in tied_names(loaded.model).items():
        stored = names[first]
        aliases[stored] = [n for n in (first, *others) if n != stored]
    return aliases
