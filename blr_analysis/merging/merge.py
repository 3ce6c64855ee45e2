"""Merging fine-tuned models by their uncertainty: state dicts in memory, or folders, streamed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from blr_analysis.checks import at_least, positive_int
from blr_analysis.errors import InputError
from blr_analysis.files import Loaded, Shards, Source, check_free, check_room, drafted
from blr_analysis.merging.fates import MERGED, OpenModel
from blr_analysis.merging.files import copy_files, write_union
from blr_analysis.merging.job import Job, Member, MergeSettings, Weight
from blr_analysis.merging.layers import Solved
from blr_analysis.merging.plan import (
    MAX_MEMORY,
    SHARD,
    MergePlan,
    fit_config,
    make_plan,
    plan_folders,
    reference_folder,
)
from blr_analysis.merging.precisions import precision_in_memory
from blr_analysis.merging.stream import Memory, stream
from blr_analysis.task import Task
from blr_analysis.views import Tabular

State = Mapping[str, Tensor]
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
    def bytes_read(self) -> int:
        """Bytes of weights and precisions that were read."""
        return self.plan.bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes of tensors that were written."""
        return self.plan.bytes_written

    @property
    def merged(self) -> int:
        """The number of tensors that were merged."""
        return sum(item.fate == MERGED for item in self.plan.items)

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
    assert plan.job is not None
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
        with _bar(plan.bytes_read, progress) as bar:
            met = stream(plan, shards, bar.update)
        change = partial(fit_config, plan, reference)
        files = copy_files(reference, tokenizer, draft, plan.job.out_dtype, change)
        if plan.job.vocabulary is not None and plan.job.vocabulary.tokenizer is not None:
            write_union(plan.job.vocabulary.tokenizer, draft)
        seconds = time.perf_counter() - started
        fallback, solves = dict(met.fallback), dict(met.solves)
        names = tuple(shards.names)
        report = MergeReport(target, plan, fallback, files, names, seconds, solves)
        if documents is not None:
            for name, text in documents(report).items():
                (draft / name).write_text(text, encoding="utf-8")
        check_free(target)
    return report


@torch.no_grad()
@torch.inference_mode(False)  # also where the caller switched it on
def merge(
    base: State | nn.Module | str | os.PathLike[str] | None,
    models: Sequence[State | nn.Module | str | os.PathLike[str]],
    *,
    precisions: Sequence[Any] | None = None,
    weights: Sequence[Weight] | Weight | None = None,
    base_precision: Any = None,
    delta: float = 0.0,
    method: str = "gradient_matching",
    n_data: Sequence[int | None] | None = None,
    missing_precision: str = "error",
    normalize: bool | None = None,
    dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
    shrink: float = 1.0,
    power: float = 1.0,
    damping: float | None = None,
    trust: bool = False,
    density: Sequence[Weight] | Weight = 1.0,
    scale: Weight = 1.0,
    rescale: bool = True,
    seed: int = 0,
    tasks: Sequence[Task] | None = None,
    validate: Any = None,
    criterion: str = "nll",
    out: str | os.PathLike[str] | None = None,
    rank: float | None = None,
    max_memory: int = MAX_MEMORY,
    max_shard_bytes: int = SHARD,
    threads: int | None = None,
    progress: bool | None = None,
) -> Any:
    """Merge fine-tuned models with their base, each weight as far as each model is sure of it.

        θ = θ_0 + Σ_t α_t H̄⁻¹ (H_0 + H_t) (θ_t − θ_0),      H̄ = H_0 + Σ_t α_t H_t

    entry by entry; where H̄ ≤ 0, task arithmetic θ_0 + Σ_t α_t (θ_t − θ_0). H_0 is
    ``base_precision`` plus δ.

    Args:
        base: θ_0: a state dict, a model, or a folder; None for "linear" and "fisher".
        models: θ_t: of the same kind. A folder may be a LoRA adapter of the base.
        precisions: H_t, the precision of each task's data, a SUM over its examples: tensors by
            name; a :class:`~blr_analysis.Posterior` of structure "diag", "gram" or "kron", whose
            prior is taken off; with folders, precision folders. Those with factors are solved layer
            by layer, see :mod:`blr_analysis.merging.layers`. None, or None for one model: see
            ``missing_precision``.
        weights: α_t: numbers, or functions of the tensor's name; one for all, or one per model;
            1 if None. Negative ones remove a task.
        base_precision: H_0 without δ, given like one of ``precisions``.
        delta: δ, added to every entry of H_0.
        method: "gradient_matching", "fisher", "task_arithmetic", "linear", "ties" (also weighed by
            precisions: "fisher_ties"), "dare_linear", "dare_ties", "slerp", "multislerp",
            "karcher", "model_stock", "passthrough" (a copy), or "auto", which chooses among the
            first four, α, shrink and power: by ``validate``, or by the gap that the precisions
            predict, see :mod:`blr_analysis.merging.auto`.
        n_data: the number of examples of each task, where its precision is an average over them.
        missing_precision: what stands for a precision that is not there: "error" refuses,
            "base" takes H_0 + δ, "zero" takes 0.
        normalize: divide the weights by their sum; None: as the method does ("linear" divides).
        dtype: of the arithmetic, float32 or float64.
        out_dtype: of the result; None: each tensor as in the base.
        shrink: of precisions with factors, the factor of their off-diagonals; RegMean: 0.9.
        power: of "kron" A ⊗ G, the power of G, 0 to 1.
        damping: d of H + d mean(H) 1, layer by layer; None: 1 for "kron", 0 for "gram".
        trust: take precisions that were recorded for other weights than the model's.
        density: of "ties", "fisher_ties", "dare_linear" and "dare_ties", the share of each
            θ_t − θ_0 that stays; given like ``weights``.
        scale: λ, what their step is multiplied by; a number or a function of the name.
        rescale: what "dare_linear" and "dare_ties" leave by chance is divided by its share.
        seed: of that chance; the same seed leaves the same entries, whatever the shards.
        tasks: the data of each model, instead of ``precisions``: those of structure "gram", with
            every layer's inputs taken after the layers below it were merged (RegMean++, see
            :mod:`blr_analysis.merging.propagated`); for models in memory, method "fisher" or
            "auto".
        validate: tasks with data that no model was trained on, for method "auto".
        criterion: what "auto" goes by there: mean "nll" or "accuracy" of the tasks.
        out: with folders: the folder to write, new or empty.
        rank: with folders of LoRA adapters alone: write an adapter of this rank, or below 1 of the
            ranks that keep this share of every step (:mod:`blr_analysis.merging.lora.adapters`).
        max_memory: bytes of buffers at most, on top of what Python and torch take.
        max_shard_bytes, threads, progress: with folders, see
            :func:`~blr_analysis.merging.merge.execute`.

    Returns:
        A state dict, with the names, shapes and devices of the base; with folders, a
        :class:`MergeReport`. Of method "auto" both have ``choice``: what was tried and taken.

    Raises:
        InputError, ModelError, PosteriorError, StorageError: see
            :func:`~blr_analysis.merging.plan.plan_folders`; nothing half-written is left behind.

    Source: Daheim et al., "Model merging by uncertainty-based gradient matching", ICLR 2024.

    Example:
        >>> base = {"w": torch.zeros(2)}
        >>> models = [{"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([3.0, 3.0])}]
        >>> sure = [{"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([1.0, 1.0])}]
        >>> merge(base, models, precisions=sure)["w"]
        tensor([1.5000, 2.0000])
    """
    if isinstance(models, str | bytes | os.PathLike | Mapping | nn.Module):
        raise InputError("models must be a list of models, got a single one")
    try:
        models = list(models)
    except TypeError as error:
        raise InputError(f"models must be a list of models, got {models!r:.60}") from error
    every = models if base is None else [*models, base]
    if method == "auto":
        from blr_analysis.merging.auto import merged_by_choice

        given = dict(locals())
        return merged_by_choice(**{k: given[k] for k in signature(merge).parameters})
    if tasks is not None:
        return _propagated(base, models, weights, method, precisions, tasks, shrink, progress)
    on_disk = [isinstance(m, str | os.PathLike) for m in every]
    if any(on_disk) and not all(on_disk):
        raise InputError("give all models as folders, or all of them as state dicts")
    count = len(models)
    alphas = _each("weights", weights, count, 1.0)
    given = _each("precisions", precisions, count, None)
    numbers = _each("n_data", n_data, count, None)
    densities = _each("density", density, count, 1.0)
    settings = MergeSettings(
        method, delta, missing_precision, normalize, dtype, out_dtype, shrink, power, damping,
        trust, scale, at_least(0, "seed", seed), rescale,
    )  # fmt: skip
    if on_disk and all(on_disk):
        if out is None:
            raise InputError("folders are merged into a folder: name it with out=")
        job = Job(
            **vars(settings),
            members=tuple(
                Member(_folder("models", m), _path("precisions", p), a, n, d)
                for m, p, a, n, d in zip(models, given, alphas, numbers, densities, strict=True)
            ),
            base=_path("base", base),
            base_precision=_path("base_precision", base_precision),
        )
        if rank is not None:
            from blr_analysis.merging.lora.adapters import merge_adapters

            return merge_adapters(job, out, rank=rank, max_memory=max_memory, threads=threads)
        plan = plan_folders(job, max_memory=max_memory, threads=threads)
        return execute(plan, out, max_shard_bytes=max_shard_bytes, progress=progress)
    if out is not None or rank is not None:
        raise InputError("out= and rank= are for folders; a merge in memory is returned")
    parts = [
        OpenModel(
            _loaded(f"models[{t}]", m),
            None if p is None else precision_in_memory(f"precisions[{t}]", p, n),
            a,
            d,
        )
        for t, (m, p, a, n, d) in enumerate(
            zip(models, given, alphas, numbers, densities, strict=True)
        )
    ]
    plan = make_plan(
        settings,
        None if base is None else _loaded("base", base),
        parts,
        base_precision=None
        if base_precision is None
        else precision_in_memory("base_precision", base_precision, None),
        max_memory=max_memory,
        threads=threads,
    )
    reference = plan.reference
    assert isinstance(reference, Loaded)
    sink = Memory(plan.items, {n: t.device for n, t in reference.tensors.items()})
    with _bar(plan.bytes_read, progress) as bar:
        stream(plan, sink, bar.update)
    return sink.tensors


def _propagated(
    base: Any, models: list[Any], weights: Any, method: str, precisions: Any, tasks: Any,
    shrink: float, progress: bool | None,
) -> dict[str, Tensor]:  # fmt: skip
    from blr_analysis.merging.at_weights import state_of
    from blr_analysis.merging.propagated import propagated

    if method != "fisher" or precisions is not None:
        raise InputError('tasks= stands for precisions, with method="fisher"')
    states = [state_of(m, f"models[{t}]") for t, m in enumerate(models)]
    alphas = [float(a) for a in _each("weights", weights, len(states), 1.0)]
    start = merge(base, states, weights=alphas, method="linear", progress=False)
    return propagated(start, states, list(tasks), alphas, shrink=shrink, progress=progress)


def _loaded(name: str, given: Any) -> Source:
    return Loaded(name, given.state_dict() if isinstance(given, nn.Module) else given)


def _each(name: str, given: Any, count: int, default: Any) -> list[Any]:
    """One value per model."""
    if given is None:
        return [default] * count
    if name in ("weights", "density") and (callable(given) or isinstance(given, int | float)):
        return [given] * count
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise InputError(f"{name} must be a list with one entry per model, got {given!r:.60}")
    if len(given) != count:
        raise InputError(f"{name} must have one entry per model: got {len(given)} for {count}")
    return list(given)


def _path(name: str, given: Any) -> Path | None:
    return None if given is None else _folder(name, given)


def _folder(name: str, given: Any) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise InputError(
            f"{name} must be folder names where the models are, got {type(given).__name__}"
        )
    return Path(given).expanduser()


def _bar(total: int, progress: bool | None) -> tqdm[Any]:
    return tqdm(
        total=total,
        desc="merging",
        unit="B",
        unit_scale=True,
        disable=None if progress is None else not progress,
        delay=0.0 if progress else 1.0,
        leave=False,
    )
