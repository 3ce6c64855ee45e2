"""The Fisher of a model on disk, written beside it for merging: ``blr-analysis fisher``."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.adapters import TENSORS, is_adapter
from blr_analysis.backprop.engine import n_outputs
from blr_analysis.checks import one_of, path_of, positive_int
from blr_analysis.errors import InputError
from blr_analysis.files import Folder, Unfinished, fingerprint, held, storage
from blr_analysis.huggingface.data import class_indices, label_column, places_of, read_rows
from blr_analysis.huggingface.file_layout import FileLayout, file_layout
from blr_analysis.huggingface.models import Pretrained, load_model, load_tuned
from blr_analysis.huggingface.questions import Tokens, read_length, read_tokens
from blr_analysis.posterior import (
    FACTORED,
    Forecast,
    Posterior,
    check_dtype,
    fit_at_weights,
    take_off,
    write_factors,
    write_precision,
)
from blr_analysis.task import Task

CURVATURES = {"mc": "mc_fisher", "emp": "empirical_fisher", "ggn": "ggn"}
FOLDER = "precision"  # of a model's folder, where its precision is written
TINY = 1e-30  # prior precision of the fit; it is taken off, so that the data's part remains
DEFINITION = (
    "g_i the gradient of example i's loss, -log p(y_i|x_i), of a text the sum over its tokens; "
    "summed over n_data examples (published merging scripts average: divide by n_data to compare)"
)
# The ends of the files with unfinished sums, by what is summed: the inputs of layers, their
# Kronecker factors, squared gradients. A fit sums inputs or values, so that both share a file.
UNFINISHED = {
    "inputs": "unfinished",
    "factors": "factors.unfinished",
    "values": "unfinished",
}


@dataclass(frozen=True)
class FisherResult:
    """A precision that :func:`fisher` has written.

    Attributes:
        folder: the precision folder (or file).
        kind: as in the record: "fisher_mc", "fisher_emp", "ggn" or "gram".
        tensors: the number of tensors with a precision.
        parameters: the number of entries of these tensors.
        n_data: N, the examples that the sum stands for.
        examples: the number of examples that the sum was computed from.
        truncated: the number of these examples that were cut to ``max_length``.
        max_length: tokens that were read of a text at most.
        zeros: the share of entries that are exactly 0 (embeddings of words that do not occur).
        seconds: how long the whole run took.
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

    This is a SUM over all N examples. It holds the data's part alone (prior precision 0), and its
    record holds ``n_data`` = N. Published merging scripts AVERAGE over the examples; divide by N to
    compare. The loss of a language model's example is the sum over its tokens.

    Args:
        model: a folder with a sequence classifier or a causal language model, in safetensors; or
            with an adapter of one. The precision of an adapter is that of the weights which it
            changes, with the adapter added, by the base's names: a merge takes it so.
        data: .jsonl, .csv, .tsv, .parquet or .txt; see
            :func:`~blr_analysis.huggingface.data.read_rows`. A language model also reads prompts
            with answers, or messages. Their answers alone count, as in ``index`` and ``audit``.
        base: the folder of an adapter's base, unless the adapter's configuration names it.
        kind: "mc", the Fisher with labels drawn from the model (the file needs none); "emp", the
            empirical Fisher; "ggn", exact over the classes (not for language models).
        structure: "diag"; "kron", layers' Kronecker factors; or "gram", the second moments of
            layers' inputs by forward passes alone, whatever ``kind`` is.
        samples: K labels per example for "mc".
        text, label: columns of the file; ``text`` two for pairs; None: by their usual names.
        task: "classification" or "causal_lm"; None: what the model's config says.
        examples: use M random examples of the N, and scale the sum by N/M.
        max_length: tokens read of a text; default: what the model reads, at most 512.
        seed: draws the examples and the labels.
        out: where to write; default ``model/precision``.
        force: replace a precision that is already there.
        device: where to compute.
        memory_budget: bytes to work in. The model and the sum come on top; so do, for a moment,
            some 13 bytes per parameter: the gradients of three examples are checked against
            autograd's.
        dtype: torch.bfloat16 to store half the bytes; default float32.

    Returns:
        Where the precision was written, and what it was computed from.

    Raises:
        InputError: arguments that do not fit each other, or transformers is missing.
        DataError: the file, its columns or its labels.
        ModelError: no model that can be read; see
            :func:`~blr_analysis.huggingface.models.load_model`.
        StorageError: files that are missing or damaged; ``out`` is there and ``force`` was not
            given. Nothing is written unless all of it is.

    Every minute the sums are saved in ``OUT.unfinished``. A run that was interrupted goes on there
    when the same call is made again, and comes to the same bits. (Several ranks start again.)

    Source: Daheim et al. (2024), *Model Merging by Uncertainty-Based Gradient Matching*, eq. 12.

    Example:
        >>> fisher("no-model", "no-data.csv")
        Traceback (most recent call last):
            ...
        blr_analysis.errors.StorageError: there is no folder 'no-model' with ...
    """
    started = time.monotonic()
    settings = FisherSettings(
        kind=kind,
        structure=structure,
        samples=samples,
        text=text,
        label=label,
        examples=examples,
        max_length=max_length,
        seed=seed,
        dtype=dtype,
    )
    folder = Path(path_of(model)).expanduser()
    target = folder / FOLDER if out is None else Path(path_of(out)).expanduser()
    tuned = _TunedModel.open(folder, base=base, task=task, device=device)
    names = {}
    if structure != "diag":
        names = tuned.layout.one_name_each("structure='diag' can be written")
    with _reserved(target, force=force):
        rows = settings.read(tuned.loaded, data)
        sums = _unfinished_sums(target, tuned, rows.tokens, settings, memory_budget, device)
        q = settings.fit(rows.tokens.task(tuned.loaded, memory_budget=memory_budget), sums)
        scale = rows.n_data / len(rows.tokens)
        values = _data_part(q, tuned.layout, scale)
        record = _record(settings, tuned, rows, q, Path(path_of(data)).name)
        if ranks.first() and values is not None:
            write_precision(target, values, dtype=dtype, kind=q.record["kind"], **record)
        elif ranks.first():
            write_factors(target, q, names=names, scale=scale, **record)
        for unfinished in sums.values():
            unfinished.remove()
    tensors = list((values or q.form.tensors()).values())
    return _result(target, q, tensors, rows, seconds=time.monotonic() - started)


def _result(
    target: Path, q: Posterior, tensors: Sequence[Tensor], rows: FisherRows, *, seconds: float
) -> FisherResult:
    """The facts of a precision that was written."""
    size = sum(tensor.numel() for tensor in tensors)
    n_zeros = sum(int((tensor == 0).sum()) for tensor in tensors)
    return FisherResult(
        folder=target,
        kind=str(q.record["kind"]),
        tensors=len(tensors),
        parameters=size,
        n_data=rows.n_data,
        examples=len(rows.tokens),
        truncated=rows.tokens.cut,
        max_length=rows.tokens.max_length,
        zeros=n_zeros / size,
        seconds=seconds,
    )


@contextmanager
def _reserved(target: Path, *, force: bool) -> Iterator[None]:
    """No other run writes the target meanwhile. The first rank alone writes, so it alone checks.

    Raises:
        StorageError: the target is there and ``force`` is False, or another run writes it.
    """
    if not ranks.first():
        yield
        return
    with held(storage.check_target(target, force=force)):
        yield


@dataclass(frozen=True)
class _TunedModel:
    """A fine-tuned model, or an adapter with its base.

    Attributes:
        folder: the folder that the user named.
        loaded: the model, with an adapter added to its base.
        layout: where the model's parameters stand in the files of its folder.
    """

    folder: Path
    loaded: Pretrained
    layout: FileLayout

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        base: str | os.PathLike[str] | None,
        task: str | None,
        device: str | torch.device,
    ) -> _TunedModel:
        """The model of a folder, on a device."""
        loaded = load_tuned(folder, base=base, task=task, device=device)
        layout = file_layout(loaded.model, loaded.specs, loaded.folder)
        return cls(folder, loaded, layout)

    @property
    def is_adapter(self) -> bool:
        """Whether the folder holds an adapter."""
        return is_adapter(self.folder)

    @property
    def weight_files(self) -> list[Path]:
        """The folder of the model's weights and, behind it, the file of an adapter."""
        files = [self.loaded.folder]
        if self.is_adapter:
            files.append(self.folder / TENSORS)
        return files


class FisherRows(NamedTuple):
    """The examples of a Fisher.

    Attributes:
        tokens: the examples that are used, shortest first, so that padding is small.
        n_data: the number of rows of the file.
        columns: the columns that were read.
    """

    tokens: Tokens
    n_data: int
    columns: tuple[str, ...]


@dataclass(frozen=True)
class FisherSettings:
    """The settings of :func:`fisher` that say what is read and computed."""

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

    def read(self, loaded: Pretrained, data: Any) -> FisherRows:
        """The rows of a data file that the Fisher is computed from.

        Raises:
            InputError: settings that do not suit the model, or more examples than the file has.
            DataError: the file, its columns or its labels.
        """
        is_causal = loaded.task == "causal_lm"
        length = read_length(loaded, self.max_length)
        if is_causal and self.label is not None:
            raise InputError("a language model has no label column: its labels are the tokens")
        if is_causal and self.kind == "ggn":
            raise InputError("kind='ggn' takes every token's vocabulary: use kind='mc'")
        table, place = read_rows(data)
        n_data = len(table)
        if self.examples is not None:
            if positive_int("examples", self.examples) > n_data:
                raise InputError(f"examples={self.examples}, but {str(data)!r} holds {n_data}")
            order = torch.randperm(n_data, generator=torch.Generator().manual_seed(self.seed))
            table = table.iloc[order[: self.examples].sort().values.tolist()]
        labels = None
        label_columns: tuple[str, ...] = ()
        needs_labels = self.kind == "emp" or self.label is not None
        if needs_labels and not is_causal:
            name = label_column(table, place, self.label)
            labels = _classes_of(loaded, table, name, place)
            label_columns = (name,)
        texts = read_tokens(loaded, table, place, self.text, length, labels)
        shortest_first = sorted(texts.tokens.rows, key=lambda row: len(row["input_ids"]))
        tokens = replace(texts.tokens, rows=shortest_first, mark=None)
        return FisherRows(tokens, n_data, texts.columns + label_columns)

    def fit(self, task: Task, sums: dict[str, Unfinished]) -> Posterior:
        """The posterior whose data part is the Fisher.

        Args:
            sums: where unfinished sums are saved. Several ranks save none.
        """
        is_gram = self.structure == "gram"
        return fit_at_weights(
            task,
            structure=self.structure,
            prior_precision=None if is_gram else TINY,
            curvature="ggn" if is_gram else CURVATURES[self.kind],
            samples=self.samples,
            seed=self.seed,
            unfinished=sums if ranks.count() == 1 else None,
        )


def _classes_of(loaded: Pretrained, table: Any, column: str, place: str) -> list[int]:
    """The class of every row, by the names that the model's configuration gives to classes."""
    config: Any = loaded.model.config
    class_names = {str(name): int(index) for name, index in (config.label2id or {}).items()}
    labels = table[column].tolist()
    return class_indices(labels, places_of(table, place), class_names, config.num_labels)


def _data_part(q: Posterior, layout: FileLayout, scale: float) -> dict[str, Tensor] | None:
    """The precision of every weight without the prior's, times ``scale``, by the files' names.

    None where the posterior has factors of layers instead of a number for each weight.
    """
    precisions = q.form.per_weight
    if precisions is None:
        return None
    scaled = {}
    for name, precision in precisions.items():
        without_prior = take_off(precision.clone(), TINY, precision.dtype)
        scaled[name] = without_prior.mul_(scale).cpu()
    return layout.tensors(scaled)


def _record(
    settings: FisherSettings, tuned: _TunedModel, rows: FisherRows, q: Posterior, file_name: str
) -> dict[str, Any]:
    """What the record of a precision says: how it was computed, and of what."""
    return {
        "definition": f"{q.record['definition']}; {DEFINITION}",
        "n_data": rows.n_data,
        "model": tuned.weight_files[-1],
        "samples": settings.samples if settings.kind == "mc" else None,
        "examples": len(rows.tokens),
        "seed": settings.seed,
        "max_length": rows.tokens.max_length,
        "truncated": rows.tokens.cut,
        "data": file_name,
        "columns": list(rows.columns),
        "likelihood": tuned.loaded.likelihood,
        "source": "fisher",
        "frozen": tuned.layout.frozen,
        "tied": tuned.layout.tied,
        "noise": q.record.get("noise"),
        "adapter": tuned.is_adapter,
    }


def _unfinished_sums(
    target: Path,
    tuned: _TunedModel,
    tokens: Tokens,
    settings: FisherSettings,
    memory_budget: int | None,
    device: str | torch.device,
) -> dict[str, Unfinished]:
    """Where the sums of a run are saved meanwhile, by what is summed (:data:`UNFINISHED`).

    A later run goes on from these files where model, data and settings are the same.
    """
    computed_by = (
        tuned.loaded.task,
        settings.kind,
        settings.structure,
        settings.samples,
        settings.seed,
        memory_budget,
        str(device),
    )
    weights = [fingerprint(Folder.open(place)) for place in tuned.weight_files]
    run = (weights, computed_by, torch.__version__, tokens.rows)
    digest = hashlib.sha256(repr(run).encode()).hexdigest()
    return {
        summed: Unfinished(target.with_name(f"{target.name}.{end}"), digest)
        for summed, end in UNFINISHED.items()
    }


def text_tasks(
    model: str | os.PathLike[str], files: Sequence[Path], *, labelled: bool
) -> list[Task]:
    """A task of one model for each file of texts.

    Args:
        labelled: whether a classifier's files have labels, which the tasks then hold.

    Raises:
        DataError, ModelError, StorageError: as :func:`fisher`.
    """
    loaded = load_model(model, dtype="float32")
    settings = FisherSettings(kind="emp" if labelled else "mc")
    return [settings.read(loaded, file).tokens.task(loaded) for file in files]


def fisher_cost(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    task: str | None = None,
    device: str | torch.device = "cpu",
    **settings: Any,
) -> Forecast:
    """What :func:`fisher` would cost; nothing is written.

    An example takes a forward pass, and a backward pass, twice as long, for every label that is
    drawn. Kind "ggn" takes a backward pass for every class but one, structure "gram" takes none.

    Args:
        settings: those of :class:`FisherSettings`.
    """
    chosen = FisherSettings(**settings)
    started = time.monotonic()
    loaded = load_tuned(model, base=base, task=task, device=device)
    text_task = chosen.read(loaded, data).tokens.task(loaded)
    seconds_of_loading = time.monotonic() - started
    n_parameters = sum(p.numel() for p in text_task.parameters().values())
    n_backward = _backward_passes(chosen, loaded, text_task)
    # In units of a forward and a backward pass, of which the forward pass is a third.
    examples_run = round(text_task.n_data * (1 + 2 * n_backward) / 3)
    if chosen.structure == "kron":
        examples_run *= 2  # one sweep for the factors, one for their eigenvalues
    disk = n_parameters * (chosen.dtype or torch.float32).itemsize
    cost = Forecast.of(
        text_task, examples_run, disk=disk, structure=chosen.structure, summed=text_task.n_data
    )
    return replace(cost, seconds=seconds_of_loading + cost.seconds)


def _backward_passes(settings: FisherSettings, loaded: Pretrained, task: Task) -> int:
    """Backward passes that each example takes."""
    if settings.structure == "gram":
        return 0
    if settings.kind != "ggn":
        return settings.samples
    outputs = n_outputs(task, task.parameters())
    return outputs - 1 if loaded.likelihood == "categorical" else outputs
