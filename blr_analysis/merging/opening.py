"""From the description of a merge of folders to a plan: every folder opened and compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from blr_analysis.errors import InputError, ModelError
from blr_analysis.files import Folder, Source, read_config
from blr_analysis.merging.fates import Part
from blr_analysis.merging.job import Job
from blr_analysis.merging.lora import is_adapter, open_adapter
from blr_analysis.merging.methods import method_of
from blr_analysis.merging.plan import MAX_MEMORY, Plan, make_plan
from blr_analysis.merging.precisions import open_precision

# What changes a model's outputs and not the shapes of its weights.
SAME = (
    "num_attention_heads",
    "num_key_value_heads",
    "n_head",
    "hidden_act",
    "activation_function",
    "rope_theta",
    "rope_scaling",
)


def plan(job: Job, *, max_memory: int = MAX_MEMORY, threads: int | None = None) -> Plan:
    """Open and check everything that a merge of folders needs; nothing is written.

    Args:
        job: what to merge with what.
        max_memory: bytes of buffers, at most; Python and torch themselves (some 0.2 GB) come on
            top of that.
        threads: None: one per core, up to 8.

    Raises:
        InputError: settings or weights that make no sense, adapters without a base.
        ModelError: models that do not fit together, or one that equals its base.
        PosteriorError: precisions that do not fit their model, or are missing.
        StorageError: folders or files that are missing, truncated or foreign.
    """
    method = method_of(job.method)
    base = None if job.base is None else Folder.open(job.base)
    parts = []
    for member in job.members:
        precision = None
        if method.uses_precisions and member.precision is not None:
            precision = open_precision(member.precision, member.n_data)
        parts.append(Part(_open(member.model, base), precision, member.weight))
    first = None
    if method.uses_base_precision and job.base_precision is not None:
        first = open_precision(job.base_precision)
    _compare_configs(job)
    found = make_plan(
        method,
        base,
        parts,
        base_precision=first,
        delta=job.delta,
        missing_precision=job.missing_precision,
        normalize=job.normalize,
        dtype=job.dtype,
        out_dtype=job.out_dtype,
        max_memory=max_memory,
        threads=threads,
    )
    return replace(found, job=job)


def reference_folder(job: Job) -> Path:
    """The folder whose configuration and other files the result takes over."""
    if job.base is not None:
        return job.base
    plain = [m.model for m in job.members if not is_adapter(m.model)]
    return plain[0]


def _open(model: Path, base: Source | None) -> Source:
    if not is_adapter(model):
        return Folder.open(model)
    if base is None:
        raise InputError(
            f"{str(model)!r} is an adapter: name the base model that it was trained on"
        )
    return open_adapter(model, base, dtype=torch.float32)


def _compare_configs(job: Job) -> None:
    folders = [m.model for m in job.members if not is_adapter(m.model)]
    if job.base is not None:
        folders.insert(0, job.base)
    kinds: dict[str, Path] = {}
    first: tuple[Path, Mapping[str, Any]] | None = None
    for folder in folders:
        config = read_config(folder)
        if config.get("quantization_config"):
            raise ModelError(
                f"{str(folder)!r} is quantised (its config.json has a quantization_config): merge "
                "the models as they were before, then quantise the result"
            )
        if config:
            first = first or (folder, config)
            odd = [k for k in SAME if first[1].get(k) != config.get(k)]
            if odd and first[1].get("model_type") == config.get("model_type"):
                raise ModelError(
                    f"{str(folder)!r} computes otherwise than {str(first[0])!r} with the same "
                    f"weights: in config.json {odd[0]} is {config.get(odd[0])!r} and "
                    f"{first[1].get(odd[0])!r}"
                )
        if "model_type" in config:
            kinds.setdefault(str(config["model_type"]), folder)
    if len(kinds) > 1:
        listed = ", ".join(f"{str(folder)!r} ({kind})" for kind, folder in kinds.items())
        raise ModelError(f"the models are of different architectures: {listed}")
