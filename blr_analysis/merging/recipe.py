"""From a recipe to a :class:`~blr_analysis.merging.job.Job`: models are found, weights understood.

Recipes are written as for mergekit, whose ``linear`` and ``task_arithmetic`` recipes mean the same
here. Some things differ on purpose:

* relative paths start at the recipe's folder;
* models are read from this machine only; a name such as ``org/model`` is looked up in the Hugging
  Face cache;
* the arithmetic is in float32 (or float64), where mergekit computes in ``dtype``. Here ``dtype``
  names the dtype that is written, unless ``out_dtype`` does.

The keys of a recipe are in :mod:`blr_analysis.merging.recipe_text`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from blr_analysis.adapters import is_adapter
from blr_analysis.checks import install, path_of
from blr_analysis.errors import BLRError, InputError, told_as
from blr_analysis.files import Folder
from blr_analysis.merging.job import BREADCRUMBS_GAMMA, Job, Member
from blr_analysis.merging.layer_weights import LayerWeights, Rule, SliceWeights, depths
from blr_analysis.merging.methods import default_weights, method_of, widest
from blr_analysis.merging.recipe_text import (
    AUTO,
    Entry,
    OutAdapter,
    Parameters,
    RecipeText,
    parsed_recipe,
    read_text,
)
from blr_analysis.merging.slices import (
    Part,
    check_parts,
    check_ranges,
    entries_of_slice,
    parameters_of_slice,
)
from blr_analysis.merging.tensor_plans import DELLA_EPSILON

# Parameters of a recipe that are fields of a job under the same name.
SETTINGS = (
    "missing_precision",
    "normalize",
    "shrink",
    "power",
    "damping",
    "seed",
    "rescale",
    "select_topk",
    "r",
    "alpha",
)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Recipe:
    """A recipe that has been read and checked.

    Attributes:
        path: the recipe's file.
        text: the content of the file.
        job: the merge that it describes.
        notes: sentences for the user about settings without effect and defaults that were taken.
        auto: whether the method is still to be chosen (:mod:`blr_analysis.merging.auto`).
        out_adapter: how adapters are merged into an adapter; None: the result is a model.
    """

    path: Path
    text: str
    job: Job
    notes: tuple[str, ...]
    auto: bool = False
    out_adapter: OutAdapter | None = None


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Read a recipe and find the models and files that it names; no weights are read.

    ::

        merge_method: gradient_matching      # fisher | task_arithmetic | linear | auto
        base_model: ./base
        base_precision: ./base/precision     # left out: the folder of this name, if there is one
        models:
          - model: ./ft1                     # also a LoRA adapter, or org/name in the cache
            precision: ./ft1/precision       # left out: the folder of this name, if there is one
            data: ./train1.jsonl             # of fisher and auto, for all models, in the place of
                                             # precision: propagated statistics (RegMean++)
            parameters: {weight: 1.0}        # a number, [0.2, 0.8] over the layers, or rules
                                             # [{filter: mlp, value: 0.5}, {value: 1.0}]
        parameters: {delta: 1.0e-8, missing_precision: error}     # error | base | zero
                                             # with factors also shrink, power, damping
        dtype: float32
        out_dtype: bfloat16                  # left out: dtype; both left out: as in the base
        tokenizer_source: base

    Raises:
        StorageError: the file cannot be read.
        InputError: it is no such recipe, or names a model or file that does not exist.

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
    text = read_text(place)
    written = parsed_recipe(text, place.name)
    try:
        reader = _Reader(written, Path(os.path.abspath(place)).parent)
        job = reader.job()
    except BLRError as fault:
        raise type(fault)(f"{place.name}: {fault}") from fault
    return Recipe(
        path=place,
        text=text,
        job=job,
        notes=tuple(reader.notes),
        auto=reader.is_auto,
        out_adapter=written.out_adapter,
    )


class _Reader:
    """Turns the parts of one recipe into a job.

    Attributes:
        text: the recipe as it is written.
        folder: the recipe's folder, where relative paths start.
        notes: sentences for the user about settings without effect and defaults that were taken.
        is_auto: whether the method is still to be chosen. The recipe is then read as for the method
            with the most inputs.
        method: the method of the recipe.
        base: the folder of the base, or None.
        parts: the slices of the recipe; one of all layers where it lists models.
        entries: the models that are merged: by folder, what the recipe says about each.
        parameters: those of the whole recipe.
        spellings: the first path under which a folder was named, by the folder.
    """

    def __init__(self, text: RecipeText, folder: Path) -> None:
        self.text = text
        self.folder = folder
        self.notes: list[str] = []
        self.is_auto = text.merge_method == AUTO
        self.spellings: dict[Path, Path] = {}
        has_base = text.base_model is not None
        self.method = widest(based=has_base) if self.is_auto else method_of(text.merge_method)
        self.base: Path | None = None
        base_model = text.base_model or self._base_of_adapters()
        if base_model is not None:
            self.base = self._model(base_model)
        self.parts = self._parts()
        check_parts(self.parts, self.method)
        self.parameters = self.parts[0].parameters
        self.entries: dict[Path, Entry] = {}
        for part in self.parts:
            for model, entry in part.entries.items():
                self.entries.setdefault(model, entry)

    def _base_of_adapters(self) -> str | None:
        """MODEL, where the adapters are written MODEL+ADAPTER and have one and the same MODEL.

        None for a method whose formula changes with a base that the recipe may leave out.
        """
        if self.method.uses_base and not self.method.needs_base:
            return None
        models = {
            model.partition("+")[0]
            for model in self.text.all_models
            if "+" in model and self._existing(model) is None
        }
        if len(models) != 1:
            return None
        (model,) = models
        self.notes.append(f"base_model: taken from the adapters: {model}")
        return model

    def _parts(self) -> list[Part]:
        """The slices of the recipe; one of all layers where it lists models."""
        text = self.text
        if text.models is not None:
            return [self._part(None, text.models, text.parameters)]
        if text.slices is None:
            raise InputError("write models: or slices:")
        first_model = self._model(text.slices[0].sources[0].model)
        check_ranges(text.slices, depths(Folder.open(first_model).specs))
        return [
            self._part(
                range(*part.sources[0].layer_range),
                entries_of_slice(part),
                parameters_of_slice(text.parameters, part),
            )
            for part in text.slices
        ]

    def _part(self, layers: range | None, listed: Sequence[Entry], parameters: Parameters) -> Part:
        """Some layers of the merge, whose models have been found."""
        entries = self._entries(listed, has_weight_of_all=bool(parameters.weight))
        return Part(layers, entries, parameters)

    def job(self) -> Job:
        """The merge that the recipe describes."""
        self._note_parameters_without_effect()
        self._note_dtype()
        self._refuse_missing_weights()
        members = tuple(self._member(model, entry) for model, entry in self.entries.items())
        return Job(
            self.method.name,
            members,
            self.base,
            self._base_precision(),
            tokenizer_source=self._tokenizer_source(),
            **self._settings(),
        )

    def _settings(self) -> dict[str, Any]:
        """The fields of the job that the recipe sets, by name."""
        settings: dict[str, Any] = {name: getattr(self.parameters, name) for name in SETTINGS}
        if self.method.name == "nearswap":
            settings["t"] = self._number("t")
        if self.method.takes("delta"):
            settings["delta"] = self.parameters.delta
        if self.method.takes("scale"):
            settings["scale"] = self._by_layer("lambda_", None, 1.0)
        if self.text.dtype == "float64":
            settings["dtype"] = torch.float64
        out_dtype = self.text.out_dtype or self.text.dtype
        if out_dtype is not None:
            settings["out_dtype"] = getattr(torch, out_dtype)
        return {name: value for name, value in settings.items() if value is not None}

    def _number(self, name: str) -> float | None:
        """A parameter of the whole recipe, which is one number; None where it is not set."""
        value = self._by_layer(name, None, None)
        if callable(value):
            raise InputError(f"{name} of {self.method.name} must be one number")
        return value

    def _existing(self, text: str) -> Path | None:
        """The file or folder of this name, seen from the recipe's folder; None if there is none."""
        with told_as(InputError, f"{text!r:.80} names no file"):
            place = self.folder / Path(text).expanduser()
            return place if place.exists() else None

    def _model(self, text: str) -> Path:
        """The folder of a model, or of ADAPTER in ``MODEL+ADAPTER``, where MODEL is the base."""
        place = self._existing(text)
        model, plus, adapter = text.partition("+")
        if place is None and plus:
            is_of_base = self.base is not None and self._model(model).samefile(self.base)
            if not is_of_base:
                raise InputError(f"adapters are applied to base_model: write base_model: {model}")
            return self._model(adapter)
        place = place or _snapshot(text)
        if place is None:
            raise InputError(
                f"there is no {text!r} in the folder of the recipe or the hub's cache "
                "(`huggingface-cli download`)"
            )
        return place

    def _entries(self, listed: Sequence[Entry], *, has_weight_of_all: bool) -> dict[Path, Entry]:
        """The models that are merged, each once, by folder.

        The base is among them only where the method averages it like the others.

        Args:
            has_weight_of_all: whether the recipe has a weight for all models.
        """
        by_place: dict[Path, tuple[Path, Entry]] = {}
        for number, entry in enumerate(listed):
            model = self._model(entry.model)
            model = self.spellings.setdefault(model.resolve(), model)
            if model.resolve() in by_place:
                raise InputError(
                    f"models.{number}: {entry.model!r} is there twice: add up the weights"
                )
            if is_adapter(model) and self.base is None:
                raise InputError(f"{entry.model!r} is an adapter: name its base_model")
            by_place[model.resolve()] = model, entry
        if self.base is not None:
            by_place = self._with_base_in_place(
                by_place, self.base.resolve(), has_weight_of_all=has_weight_of_all
            )
        if not by_place:
            raise InputError("there is no model beside the base to merge")
        return dict(by_place.values())

    def _with_base_in_place(
        self, by_place: dict[Path, tuple[Path, Entry]], base: Path, *, has_weight_of_all: bool
    ) -> dict[Path, tuple[Path, Entry]]:
        """The models without the base, or with it where the method averages it like them."""
        base_is_listed = base in by_place
        averages_base = (
            self.method.name == "linear" and has_weight_of_all and self.text.base_model is not None
        )
        if base_is_listed and self.method.uses_base:  # it leaves no step θ_t − θ_0 to merge
            _, entry = by_place.pop(base)
            if self.method.uses_precisions and (entry.precision or entry.parameters.weight):
                raise InputError(f"models: {entry.model!r} is base_model itself: take it out")
        elif base_is_listed and self.method.name == "slerp":  # its arc starts at the base
            return {base: by_place.pop(base), **by_place}
        elif averages_base and not base_is_listed:
            self.notes.append("base_model is averaged in with the weight of all, as in mergekit")
            by_place[base] = base, Entry(model=str(base))
        return by_place

    def _member(self, model: Path, entry: Entry) -> Member:
        """A model of the merge with its weight, its precision or data, and its other parameters."""
        method = self.method
        key = self._key_of_weights
        # slerp's t is the weight of the model at its end; the base, at its start, has 1 − t.
        is_start = key == "t" and self.base is not None and model.samefile(self.base)
        weight = self._by_layer(key, model, self._default_weights(), complement=is_start)
        density = self._by_layer("density", model, 1.0) if method.thinned else 1.0
        epsilon = None
        if method.takes("epsilon"):
            epsilon = self._by_layer("epsilon", model, DELLA_EPSILON if method.thinned else None)
        gamma = BREADCRUMBS_GAMMA
        if method.takes("gamma"):
            gamma = self._by_layer("gamma", model, BREADCRUMBS_GAMMA)
        return Member(
            model,
            precision=self._precision(model, entry),
            weight=weight,
            n_data=entry.n_data,
            density=density,
            epsilon=epsilon,
            gamma=gamma,
            data=self._data(entry),
        )

    @property
    def _key_of_weights(self) -> str:
        """The parameter that says how much of each model is taken.

        Of slerp it is ``t``, unless all models have a weight and none has a ``t``.
        """
        if self.method.name != "slerp":
            return "weight"
        has_t = any(part.some_have("t") for part in self.parts)
        have_weights = all(part.all_have("weight") for part in self.parts)
        return "weight" if have_weights and not has_t else "t"

    def _default_weights(self) -> list[float]:
        """The weight of a model that has none, in each of the parts."""
        if self.method.normalize:
            return [1.0] * len(self.parts)
        name = self.method.name
        return [default_weights(name, len(part.entries))[0] for part in self.parts]

    def _refuse_missing_weights(self) -> None:
        """Raise where some models have a weight and others have none."""
        key = self._key_of_weights
        for part in self.parts:
            some_have_weights = part.some_have(key) and not self.method.uses_precisions
            is_needed = key == "t" or some_have_weights
            if is_needed and not part.all_have(key):
                entry = next(e for e in part.entries.values() if not part.rules(key, e))
                raise InputError(f"{entry.model!r} has no {key}, which {self.method.name} needs")

    def _by_layer(
        self, name: str, model: Path | None, default: Any, *, complement: bool = False
    ) -> Any:
        """A parameter of a model: one number, or a function of the tensor's name.

        Args:
            model: the model; None: the parameter of the whole recipe.
            default: returned where the recipe does not set it; a list has one for each part.
            complement: whether 1 − v stands for each value v.
        """
        defaults = default if isinstance(default, list) else [default] * len(self.parts)
        values = []
        for part, default_there in zip(self.parts, defaults, strict=True):
            entry = None if model is None else part.entries.get(model)
            is_absent = model is not None and entry is None
            if is_absent:
                values.append(0.0 if name == self._key_of_weights else default_there)
                continue
            rules = part.rules(name, entry)
            if complement:
                rules = tuple(
                    replace(rule, values=tuple(1 - v for v in rule.values)) for rule in rules
                )
            values.append(self._function_of(rules, default_there))
        is_one_number = not callable(values[0]) and all(value == values[0] for value in values)
        if len(values) == 1 or is_one_number:
            return values[0]
        layers = [part.layers for part in self.parts if part.layers is not None]
        return SliceWeights(tuple(zip(layers, values, strict=True)), self._depths)

    @cached_property
    def _names(self) -> Collection[str]:
        """The names of the model's tensors."""
        return Folder.open(self.base or next(iter(self.entries))).specs

    @cached_property
    def _depths(self) -> dict[str, int]:
        """The number of layers of each stack of the model."""
        return depths(self._names)

    def _function_of(self, rules: Sequence[Rule], default: Any) -> Any:
        """What some rules say: one number, or a function of the tensor's name."""
        if not rules:
            return default
        if not rules[0].varies:
            return rules[0].values[0]
        for rule in rules:
            matches = any(rule.part in name for name in self._names)
            if not matches:
                longest = max(self._names, key=len)
                raise InputError(f"filter {rule.part!r} is in no name such as {longest!r}")
        return LayerWeights(tuple(rules), self._depths, default)

    def _named_file(self, key: str, text: str) -> Path:
        """The file or folder that a key of the recipe names.

        Raises:
            InputError: it does not exist.
        """
        place = self._existing(text)
        if place is None:
            raise InputError(f"{key}: there is no {text!r} beside the recipe")
        return place

    def _data(self, entry: Entry) -> Path | None:
        """The file of a model's examples; None where the recipe names precisions instead.

        Raises:
            InputError: only some models have data, the method takes none, or data and a precision
                are named together.
        """
        have_data = [listed.data is not None for listed in self.entries.values()]
        if entry.data is None and not any(have_data):
            return None
        method = self.text.merge_method
        takes_data = method in ("fisher", AUTO)
        if entry.data is None or not all(have_data) or not takes_data:
            raise InputError(
                "data: replaces the precisions of fisher and auto alone, and every model needs it"
            )
        has_precision = bool(entry.precision or entry.n_data)
        if method == "fisher" and has_precision:
            raise InputError(f"{entry.model!r} has data: and precision: or n_data: leave one out")
        return self._named_file("data", entry.data)

    def _precision(self, model: Path, entry: Entry) -> Path | None:
        """H_t: the named place, or the folder ``precision`` of the model; None: there is none."""
        has_data = entry.data is not None and not self.is_auto
        if not self.method.uses_precisions or has_data:
            return None
        if entry.precision is not None:
            return self._named_file("precision", entry.precision)
        is_null = "precision" in entry.model_fields_set  # precision: null takes none
        place = None if is_null else precision_beside(model)
        may_be_missing = self.parameters.missing_precision in ("base", "zero")
        if place is None and not may_be_missing and not self.is_auto:
            raise InputError(
                f"{entry.model!r} has no precision: run `blr-analysis fisher`, or set "
                "missing_precision"
            )
        return place

    def _base_precision(self) -> Path | None:
        """H_0: the named place, or the folder ``precision`` of the base; None: there is none."""
        if not self.method.uses_base_precision:
            return None
        if self.text.base_precision is not None:
            return self._named_file("base_precision", self.text.base_precision)
        is_null = "base_precision" in self.text.model_fields_set  # base_precision: null takes none
        if is_null or self.base is None:
            return None
        place = precision_beside(self.base)
        if place is not None:
            self.notes.append(f"base_precision: taken from {str(place)!r}")
        return place

    def _note_parameters_without_effect(self) -> None:
        """Note parameters and precisions that the method does not use; mergekit ignores them."""
        method = self.method
        entries = list(self.entries.values())
        names: list[str] = []
        for part in self.parts:
            for section in (part.parameters, *(e.parameters for e in part.entries.values())):
                names.extend(sorted(section.model_fields_set))
        is_by_weights = method.name == "slerp" and self._key_of_weights == "weight"
        if is_by_weights:
            names = [name for name in names if name != "weight"]
            self.notes.append("slerp has no t: it is the second model's share of the weights")
        for name in dict.fromkeys(names):
            if not method.takes(name):
                self.notes.append(f"{name.rstrip('_')} has no effect on {method.name}")
        has_precisions = bool(self.text.base_precision) or any(e.precision for e in entries)
        if has_precisions and not method.uses_precisions:
            self.notes.append(f"{method.name} takes no precisions: they are not read")

    def _note_dtype(self) -> None:
        """Note that a half-precision ``dtype`` is not that of the arithmetic."""
        if self.text.dtype in ("bfloat16", "float16"):
            out_dtype = self.text.out_dtype or self.text.dtype
            self.notes.append(f"dtype: computed in float32, rounded once to {out_dtype}")

    def _tokenizer_source(self) -> str | Path | None:
        """What ``tokenizer_source``, or the longer ``tokenizer``, names.

        It is "base", "union", the folder of a model, or None where the recipe has neither key.
        """
        source = self.text.tokenizer_source
        if source is None and self.text.tokenizer is not None:
            source = self.text.tokenizer.source
        if source in (None, "base", "union"):
            return source
        return self._model(source.removeprefix("model:"))


def precision_beside(model: str | os.PathLike[str]) -> Path | None:
    """The folder ``precision`` of a model, where there is one."""
    place = Path(model) / "precision"
    return place if place.exists() else None


def _snapshot(text: str) -> Path | None:
    """The folder of ``org/model``, or ``org/model@revision``, in the Hugging Face cache.

    None where the text is no such name, or the cache of this machine does not have it.
    """
    name, _, revision = text.partition("@")
    if not HUB_NAME.fullmatch(name):
        return None
    try:
        from huggingface_hub import snapshot_download
    except ImportError as fault:
        raise InputError(f"{name!r} is no folder; for names on the hub {install('hf')}") from fault
    with suppress(OSError, ValueError):  # raised where the cache does not have it
        return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    return None
