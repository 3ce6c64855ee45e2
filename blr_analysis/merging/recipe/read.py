"""What to merge with what, as YAML: a recipe becomes a :class:`~blr_analysis.merging.job.Job`.

A recipe is written as for mergekit, whose ``linear`` and ``task_arithmetic`` recipes mean the
same here. Different on purpose: relative paths start at the recipe's folder; models are read from
this machine only; arithmetic is in float32 (or float64) where mergekit computes in ``dtype``,
which names what is written unless ``out_dtype`` does; what mergekit drops or overlooks silently
(unknown keys, a model named twice) is an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from blr_analysis.checks import path_of
from blr_analysis.errors import InputError, StorageError
from blr_analysis.merging.job import Job, Member
from blr_analysis.merging.recipe.chat_templates import template_of
from blr_analysis.merging.recipe.located import MOST_CHARACTERS, read_yaml
from blr_analysis.merging.recipe.members import (
    base_of,
    check_vocabularies,
    check_whole,
    listed,
    method_of,
)
from blr_analysis.merging.recipe.reading import Reading, Way, first, levels
from blr_analysis.merging.recipe.schema import RecipeText, check
from blr_analysis.merging.recipe.weights import base_precision_of, members


@dataclass(frozen=True)
class Recipe:
    """A recipe that has been read and checked.

    Attributes:
        path: its file.
        text: what the file says.
        job: what it means.
        chat_template: what the result gets as ``chat_template.jinja``; None: the tokenizer's own.
        notes: what the user should know and is no error, with line numbers.
    """

    path: Path
    text: str
    job: Job
    chat_template: str | None
    notes: tuple[str, ...]


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Read a recipe and find everything that it names; no weights are read.

    ::

        merge_method: gradient_matching      # fisher | task_arithmetic | linear
        base_model: ./base
        base_precision: ./base/precision     # left out: the folder of this name, if there is one
        models:
          - model: ./ft1                     # a folder, or org/model in the Hugging Face cache
            precision: ./ft1/precision       # left out: the folder of this name, if there is one
            parameters: {weight: 1.0}        # a number, [0.2, 0.8] over the layers, or rules
                                             # [{filter: mlp, value: 0.5}, {value: 1.0}]
        parameters: {delta: 1.0e-8, missing_precision: error}     # error | base | zero
        dtype: float32
        out_dtype: bfloat16                  # left out: dtype; both left out: as in the base
        tokenizer_source: base

    Raises:
        StorageError: the file cannot be read.
        InputError: it is no such recipe; every message names file, line and column, the key, what
            was expected, and the nearest valid key.

    Example:
        >>> import tempfile, torch
        >>> from safetensors.torch import save_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in "ab":
        ...         save_file({"w": torch.ones(2)}, f"{folder}/{name}.safetensors")
        ...     with open(f"{folder}/recipe.yml", "w") as file:
        ...         _ = file.write("merge_method: linear\\nmodels:\\n- model: a.safetensors\\n"
        ...                        "- model: b.safetensors\\nparameters: {weight: 2}\\n")
        ...     recipe = read_recipe(f"{folder}/recipe.yml")
        >>> recipe.job.method, [member.weight for member in recipe.job.members]
        ('linear', [2.0, 2.0])
    """
    place = Path(path_of(path)).expanduser()
    text = _read(place)
    found = read_yaml(text, place.name)
    recipe = check(found)
    reading = Reading(found, Path(os.path.abspath(place)).parent)
    for key in ("name", "model_name"):
        if getattr(recipe, key) is not None:
            reading.note((key,), f"{key} has no effect, here as in mergekit: name the folder")
    method = method_of(recipe, reading)
    base = base_of(recipe, method, reading)
    taking_part = listed(recipe, method, base, reading)
    check_whole(taking_part, base, reading)
    check_vocabularies(taking_part, base, reading)
    merged, normalize = members(recipe, method, base, taking_part, reading)
    parameters = levels(recipe)
    delta = first(parameters, "delta", 0.0)
    tokenizer = _tokenizer(recipe, base, reading)
    dtype, out_dtype = _dtypes(recipe, reading)
    job = Job(
        method=method.name,
        members=merged,
        base=base,
        base_precision=base_precision_of(recipe, method, base, reading),
        delta=float(delta) if method.uses_base_precision else 0.0,  # type: ignore[arg-type]
        missing_precision=str(first(parameters, "missing_precision", "error")),
        normalize=normalize,
        dtype=dtype,
        out_dtype=out_dtype,
        tokenizer_source=tokenizer,
    )
    template = _chat_template(recipe, all_models(base, merged), reading)
    return Recipe(place, text, job, template, tuple(reading.notes))


def _read(place: Path) -> str:
    try:
        with open(place, "rb") as file:
            raw = file.read(4 * MOST_CHARACTERS + 1)
    except (OSError, ValueError) as fault:
        reason = getattr(fault, "strerror", None) or str(fault)
        raise StorageError(f"the recipe {str(place)!r} cannot be read: {reason}.") from fault
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        line = raw.count(b"\n", 0, fault.start) + 1
        raise InputError(
            f"{place.name}, line {line}: a byte that is no UTF-8; a recipe is a YAML text."
        ) from fault


def all_models(base: Path | None, merged: tuple[Member, ...]) -> list[Path]:
    """All models that a merge reads, the base first, each once."""
    return list(dict.fromkeys([*([base] if base else []), *(member.model for member in merged)]))


def _dtypes(recipe: RecipeText, reading: Reading) -> tuple[torch.dtype, torch.dtype | None]:
    """In what the formula is computed, and what is written."""
    dtype, out_dtype = recipe.dtype, recipe.out_dtype or recipe.dtype
    if dtype in ("bfloat16", "float16"):
        reading.note(("dtype",), f"computed in float32, rounded once to {out_dtype}")
    exact = torch.float64 if dtype == "float64" else torch.float32
    return exact, None if out_dtype is None else getattr(torch, out_dtype)


def _tokenizer(recipe: RecipeText, base: Path | None, reading: Reading) -> str | Path:
    way: Way = ("tokenizer_source",)
    text = recipe.tokenizer_source
    if recipe.tokenizer is not None:
        if text is not None:
            raise reading.wrong(("tokenizer",), "tokenizer beside tokenizer_source: one of them")
        for key in ("tokens", "pad_to_multiple_of"):
            if getattr(recipe.tokenizer, key) is not None:
                raise reading.wrong(
                    ("tokenizer", key),
                    f"tokenizer.{key} builds another vocabulary: here, a tokenizer is copied",
                )
        text, way = recipe.tokenizer.source, ("tokenizer", "source")
    if text == "union":
        raise reading.wrong(
            way,
            "'union' builds a vocabulary of all models: here, a tokenizer is copied, and models "
            "with other vocabularies are refused; write base, or the model whose tokenizer to take",
        )
    if text is None or text == "base":
        if text == "base" and base is None:
            raise reading.wrong(way, "'base', but the recipe has no base_model")
        return "base"
    return reading.place(way, text.removeprefix("model:"), base)


def _chat_template(recipe: RecipeText, models: list[Path], reading: Reading) -> str | None:
    if recipe.chat_template is None:
        return None
    try:
        return template_of(recipe.chat_template, reading.folder, models)
    except InputError as fault:
        raise reading.wrong(("chat_template",), fault) from fault
