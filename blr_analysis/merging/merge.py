"""Merging fine-tuned models by their uncertainty: state dicts in memory, or folders, streamed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from blr_analysis.errors import InputError
from blr_analysis.merging.auto import BASE, Choice, by_precisions, chosen
from blr_analysis.merging.folders import SHARD, collect, execute
from blr_analysis.merging.job import Job, Weight, job_of, refuse_idle
from blr_analysis.merging.methods import Method, method_of, widest
from blr_analysis.merging.plan import MAX_MEMORY, make_plan
from blr_analysis.merging.sources import open_model
from blr_analysis.merging.tensor_plans import number
from blr_analysis.task import Task

State = Mapping[str, torch.Tensor]
# Arguments that bound the work and change no number, with their defaults.
LIMITS: dict[str, Any] = {
    "max_memory": MAX_MEMORY,
    "threads": None,
    "max_shard_bytes": SHARD,
    "progress": None,
}


class Merged(dict[str, torch.Tensor]):
    """A merged state dict, with the choice of "auto" that led to it."""

    choice: Choice


def merge(
    base: State | nn.Module | str | os.PathLike[str] | None,
    models: Sequence[State | nn.Module | str | os.PathLike[str]],
    *,
    method: str | None = None,
    precisions: Sequence[Any] | None = None,
    weights: Sequence[Weight] | Weight | None = None,
    base_precision: Any = None,
    delta: float = 0.0,
    tasks: Sequence[Task] | None = None,
    validate: Any = None,
    out: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Any:
    """Merge fine-tuned models with their base, each weight by how sure each model is of it.

        θ = θ_0 + Σ_t α_t H̄⁻¹ (H_0 + H_t) (θ_t − θ_0),      H̄ = H_0 + Σ_t α_t H_t

    The formula holds entry by entry. H_0 is ``base_precision`` plus δ. Task arithmetic, θ_0 + Σ_t
    α_t (θ_t − θ_0), replaces it for entries with H̄ ≤ 0, or with less of H̄ than a tenth of H_0 +
    Σ_t abs(α_t) H_t (because of negative α_t).

    The default is different if there are precisions, but no H_0 and no ``method``: the average
    (Σ_t α_t H_t)⁻¹ Σ_t α_t H_t θ_t with balanced precisions H_t / mean(H_t) + d 1, the mean over
    each layer or tensor. d is 10 for "gram" and 3 for others, and "kron" is averaged over the
    outputs. This default follows the precisions only as far as they can be trusted, and is close
    to a plain average elsewhere (``python -m benchmarks.merging.contest``). Layers whose "gram"
    comes from fewer examples than inputs are averaged. ``damping=0`` takes precisions without d,
    ``method="fisher"`` takes them as they are. See :mod:`blr_analysis.merging.auto`.

    Args:
        base: θ_0: a state dict, a model, or a folder; None for "linear" and "fisher".
        models: θ_t: the same, or the folder of a LoRA adapter of the base.
        method: "gradient_matching" (the formula above as it stands), "fisher", "task_arithmetic",
            "linear", "ties" (weighed by precisions: "fisher_ties"), "dare_linear", "dare_ties",
            "slerp", "multislerp", "karcher", "model_stock", or another name in
            :data:`blr_analysis.merging.methods.METHODS`. "auto" chooses among the first four, and
            α, shrink, power and damping, by the losses on ``validate``, or else on half of
            ``tasks``. Without both it is the default, and without precisions the average, see
            :mod:`blr_analysis.merging.auto`. None: the average by balanced precisions, or
            "gradient_matching" where H_0 is given or a weight is negative.
        precisions: H_t, the precision of each task's data, a SUM over its examples: tensors by
            name; a :class:`~blr_analysis.Posterior` of structure "diag", "gram" or "kron", whose
            prior is taken off; or the folder or file of one. Precisions with factors are solved
            layer by layer, see :mod:`blr_analysis.merging.layers`. Those of "kron" are damped by
            their mean; ``damping=0`` gives the optimum of all tasks where losses are quadratic.
            ``missing_precision`` says what stands for None, or for a None in the list.
        weights: α_t: numbers, or functions of the tensor's name; one for all, or one per model;
            1 if None. Negative ones remove a task.
        base_precision: H_0 without δ, given like one of ``precisions``.
        delta: δ, added to every entry of H_0.
        tasks: the data of each model, instead of ``precisions``, for method "fisher" or "auto".
            Precisions of structure "gram" are then measured during the merge: every layer's inputs
            come from the layers merged before it (RegMean++,
            ``blr_analysis.merging.propagation``).
        validate: tasks with data that no model was trained on, for method "auto".
        out: the folder to write, new or empty; None: the result is returned in memory.
        settings: further settings. Most are fields of :class:`blr_analysis.merging.Job`:
            ``missing_precision``, ``normalize``, ``dtype``, ``out_dtype``, ``shrink``, ``power``,
            ``damping``, ``trust``, ``scale``, ``seed``, ``rescale``. ``density`` is, for TIES and
            DARE, the share of each θ_t − θ_0 that stays, given like ``weights``. ``n_data`` is the
            number of examples of each task whose precision is an average: one number for all
            tasks, or a list; 1 for a file of sums. ``max_memory`` is the most bytes of buffers,
            on top of what Python and torch take. There are also ``threads``,
            ``max_shard_bytes`` and ``progress``.

    Returns:
        A state dict, with the names, shapes and devices of the base; with ``out`` a
        :class:`~blr_analysis.merging.MergeReport`. After method "auto" both have ``choice``: the
        merges that were tried, and the one that was chosen.

    Raises:
        InputError, ModelError, PosteriorError, StorageError: see
            :func:`~blr_analysis.merging.plan.make_plan`; no half-written folder is left behind. An
            argument is refused if it has no effect: on this method, or without precisions.

    Source: Daheim et al., "Model merging by uncertainty-based gradient matching", ICLR 2024.

    Example:
        >>> base = {"w": torch.zeros(2)}
        >>> models = [{"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([3.0, 3.0])}]
        >>> sure = [{"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([1.0, 1.0])}]
        >>> merge(base, models, precisions=sure, method="gradient_matching")["w"]
        tensor([1.5000, 2.0000])
        >>> merge(base, models, precisions=sure)["w"]
        tensor([1.9412, 2.0667])
    """
    if isinstance(models, str | bytes | os.PathLike | Mapping | nn.Module):
        raise InputError("models must be a list of models, got a single one")
    if not isinstance(models, Iterable):
        raise InputError(f"models must be a list of models, got {models!r:.60}")
    limits = {name: settings.pop(name, default) for name, default in LIMITS.items()}
    arguments: dict[str, Any] = {
        "precisions": precisions,
        "weights": weights,
        "base_precision": base_precision,
        "delta": delta,
        "tasks": tasks,
        "validate": validate,
        **settings,
    }
    job, choice = _job_and_choice(base, models, method, arguments)
    if choice is not None and choice.name == BASE:
        warnings.warn("no merge is better than the base: the result is the base", stacklevel=2)
    plan = make_plan(job, max_memory=limits["max_memory"], threads=limits["threads"])
    for note in plan.notes:
        warnings.warn(note, UserWarning, stacklevel=2)
    progress = limits["progress"]
    if out is not None:
        report = execute(plan, out, max_shard_bytes=limits["max_shard_bytes"], progress=progress)
        return replace(report, choice=choice)
    state = collect(plan, progress)
    if choice is None:
        return state
    merged = Merged(state)
    merged.choice = choice
    return merged


def _job_and_choice(
    base: Any, models: Sequence[Any], method: str | None, arguments: Mapping[str, Any]
) -> tuple[Job, Choice | None]:
    """The merge that the arguments describe, and the choice of "auto", which is None otherwise."""
    takes_default = method is None and _is_average(arguments)
    row = _row(method, base, takes_default=takes_default)
    refuse_idle([row], arguments, row.name if method is None else method)
    job = job_of(base, models, row.name, **arguments)
    if method == "auto":
        return chosen(job, arguments["validate"])
    if takes_default and _has_negative_weights(job):
        return replace(job, method="gradient_matching"), None
    if takes_default:
        return by_precisions(job), None
    return job, None


def _is_average(arguments: Mapping[str, Any]) -> bool:
    """Whether precisions are given, and no argument asks for H_0."""
    has_start = arguments["base_precision"] is not None or arguments["delta"] != 0
    has_precisions = arguments["precisions"] is not None
    return has_precisions and not has_start


def _has_negative_weights(job: Job) -> bool:
    """Whether a weight is negative, for some tensor if it depends on the tensor's name."""
    weights = [member.weight for member in job.members]
    if not any(map(callable, weights)):
        return any(number(weight, "a model", "weight") < 0 for weight in weights)
    base = None if job.base is None else open_model(job.base, "base")
    names = open_model(job.members[0].model, "models[0]", base).specs
    return any(number(weight, name, "weight") < 0 for weight in weights for name in names)


def _row(method: str | None, base: Any, *, takes_default: bool) -> Method:
    """The row of the registry that the arguments are checked by."""
    if method == "auto":
        return widest(based=base is not None)
    if method is not None:
        return method_of(method)
    return method_of("fisher" if takes_default else "gradient_matching")
