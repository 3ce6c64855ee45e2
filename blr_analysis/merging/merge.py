"""Merging fine-tuned models by their uncertainty: state dicts in memory, or folders, streamed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import at_least
from blr_analysis.errors import InputError
from blr_analysis.merging.auto import COMMON, Merged, chosen
from blr_analysis.merging.folders import MergeReport, execute
from blr_analysis.merging.in_memory import ARGUMENTS, SETTINGS, merged, one_each, refuse_idle
from blr_analysis.merging.job import Job, Member, Weight
from blr_analysis.merging.methods import method_of, widest
from blr_analysis.merging.plan import MAX_MEMORY, SHARD, MergePlan, plan_folders
from blr_analysis.merging.propagation import PropagatedJob, check_propagates, stream_propagated
from blr_analysis.merging.stream import WORSE, Outcome, stream
from blr_analysis.task import Task

State = Mapping[str, Tensor]
KEPT = (  # of the arguments, by a merge whose method was chosen
    *("base", "models", "out_dtype", "out", "rank", "max_memory", "max_shard_bytes", "threads"),
    *("progress", *COMMON),
)


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
    shrink: float | None = None,
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

    entry by entry; where H̄ ≤ 0, or α_t < 0 leave less of it than a tenth of H_0 + Σ_t abs(α_t) H_t,
    task arithmetic θ_0 + Σ_t α_t (θ_t − θ_0). H_0 is ``base_precision`` plus δ.

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
            "karcher", "model_stock", or "auto", which chooses among the
            first four, α, shrink and power: by ``validate``, by ``tasks``, or by the gap that the
            precisions predict, see :mod:`blr_analysis.merging.auto`.
        n_data: the number of examples of each task, where its precision is an average over them.
        missing_precision: what stands for a precision that is not there: "error" refuses,
            "base" takes H_0 + δ, "zero" takes 0.
        normalize: divide the weights by their sum; None: as the method does ("linear" divides).
        dtype: of the arithmetic, float32 or float64.
        out_dtype: of the result; None: each tensor as in the base.
        shrink: of precisions with factors, the factor of their off-diagonals; RegMean: 0.9. None:
            1; with ``tasks``, and where each model's moments of a layer ("gram") are of fewer rows
            than inputs and there is no H_0, 1 less the part of them that is chance, as measured.
        power: of "kron" A ⊗ G, the power of G, 0 to 1; of diagonals that of every number, which
            0.5 puts half way, in logarithms, between the average and the Fisher average; with 1 and
            no H_0 a merge can end below the average.
        damping: d of H + d mean(H) 1, layer by layer; None: 1 for "kron", 0 for "gram". With 0,
            what no precision decides stays at the average (with a base, at task arithmetic).
        trust: take precisions that were recorded for other weights than the model's.
        density: of "ties", "fisher_ties", "dare_linear" and "dare_ties", the share of each
            θ_t − θ_0 that stays, above 0; given like ``weights``.
        scale: λ, what their step is multiplied by, and that of "task_arithmetic"; a number or a
            function of the name.
        rescale: what "dare_linear" and "dare_ties" leave by chance is divided by its share.
        seed: of that chance; the same seed leaves the same entries, whatever the shards.
        tasks: the data of each model, instead of ``precisions``: those of structure "gram", with
            every layer's inputs taken after the layers below it were merged (RegMean++,
            :func:`blr_analysis.merging.propagation.propagated`); method "fisher" or "auto".
        validate: tasks with data that no model was trained on, for method "auto".
        criterion: what "auto" goes by there: mean "nll" or "accuracy" of the tasks.
        out: with folders: the folder to write, new or empty.
        rank: with folders of LoRA adapters alone: write an adapter of this rank, or below 1 of the
            ranks that keep this share of every step (:mod:`blr_analysis.merging.lora.adapters`).
        max_memory: bytes of buffers at most, on top of what Python and torch take.
        max_shard_bytes, threads, progress: with folders, see
            :func:`~blr_analysis.merging.folders.execute`.

    Returns:
        A state dict, with the names, shapes and devices of the base; with folders, a
        :class:`MergeReport`. Of method "auto" both have ``choice``: what was tried and taken.

    Raises:
        InputError, ModelError, PosteriorError, StorageError: see
            :func:`~blr_analysis.merging.plan.plan_folders`; nothing half-written is left behind.
            An argument that has no effect on the method is refused, and what is said of precisions
            where there are none.

    Source: Daheim et al., "Model merging by uncertainty-based gradient matching", ICLR 2024.

    Example:
        >>> base = {"w": torch.zeros(2)}
        >>> models = [{"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([3.0, 3.0])}]
        >>> sure = [{"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([1.0, 1.0])}]
        >>> merge(base, models, precisions=sure)["w"]
        tensor([1.5000, 2.0000])
    """
    given = dict(locals())
    if isinstance(models, str | bytes | os.PathLike | Mapping | nn.Module):
        raise InputError("models must be a list of models, got a single one")
    try:
        models = given["models"] = list(models)
    except TypeError as error:
        raise InputError(f"models must be a list of models, got {models!r:.60}") from error
    at_least(0, "seed", seed)
    auto = method == "auto"
    if not auto and (validate is not None or criterion != "nll"):
        raise InputError('validate= and criterion= are for method="auto"')
    refuse_idle([widest(based=base is not None) if auto else method_of(method)], given)
    every = models if base is None else [*models, base]
    on_disk = [isinstance(m, str | os.PathLike) for m in every]
    in_memory = not any(on_disk) or (tasks is not None and out is None)
    if in_memory and (out is not None or rank is not None):
        raise InputError("out= and rank= are for folders; a merge in memory is returned")
    if auto:
        return _by_choice(given)
    if tasks is None and any(on_disk) and not all(on_disk):
        raise InputError("give all models as folders, or all of them as state dicts")
    if in_memory:
        return merged(**{k: v for k, v in given.items() if k in ARGUMENTS}, tell=_warn)
    if out is None:
        raise InputError("folders are merged into a folder: name it with out=")
    count = len(models)
    each = zip(
        models,
        one_each("precisions", precisions, count, None),
        one_each("weights", weights, count, 1.0),
        one_each("n_data", n_data, count, None),
        one_each("density", density, count, 1.0),
        strict=True,
    )
    kind, fill = Job, stream
    if tasks is not None:
        check_propagates(method, precisions, one_each("weights", weights, count, 1.0))
        if rank is not None:
            raise InputError("tasks= merge whole models: leave rank= out")
        fill = partial(stream_propagated, tasks=list(tasks), progress=progress)
        kind = PropagatedJob
    job = kind(
        **{k: v for k, v in given.items() if k in SETTINGS},
        members=tuple(
            Member(_folder("models", m), _path("precisions", p), a, n, d) for m, p, a, n, d in each
        ),
        base=_path("base", base),
        base_precision=_path("base_precision", base_precision),
    )
    if rank is not None:
        from blr_analysis.merging.lora.adapters import plan_adapters, write_adapter

        return write_adapter(plan_adapters(job, rank, max_memory=max_memory, threads=threads), out)
    plan = plan_folders(job, max_memory=max_memory, threads=threads)
    return execute(plan, out, max_shard_bytes=max_shard_bytes, progress=progress, fill=fill)


def _warn(plan: MergePlan, met: Outcome) -> None:
    said = plan.of_few
    mean = sum(met.lost) / max(len(met.lost), 1)
    if mean > WORSE:
        said.append(
            f"by their precisions the models lose {mean:.2g} times what they lose in the plain "
            'average: take method="linear", smaller weights or "auto"'
        )
    for sentence in said:
        warnings.warn(sentence, UserWarning, stacklevel=8)  # two decorators each


def _by_choice(given: dict[str, Any]) -> Any:
    """The merge by the best of :func:`blr_analysis.merging.auto.candidates`."""
    choice = chosen(**{k: v for k, v in given.items() if k != "method"})
    result = merge(**{k: given[k] for k in KEPT}, **choice.settings)
    if isinstance(result, MergeReport):
        return replace(result, choice=choice)
    made = Merged(result)
    made.choice = choice
    return made


def _path(name: str, given: Any) -> Path | None:
    return None if given is None else _folder(name, given)


def _folder(name: str, given: Any) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise InputError(
            f"{name} must be folder names where the models are, got {type(given).__name__}"
        )
    return Path(given).expanduser()
