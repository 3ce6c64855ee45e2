"""What to merge with what, as YAML: a recipe becomes a :class:`~blr_analysis.merging.job.Job`.

A recipe is written as for mergekit, whose ``linear`` and ``task_arithmetic`` recipes mean the
same here. Different on purpose: relative paths start at the recipe's folder; models are read from
this machine only (a name such as ``org/model`` from the Hugging Face cache); arithmetic is in
float32 (or float64) where mergekit computes in ``dtype``, which names what is written unless
``out_dtype`` does; what mergekit drops or overlooks silently (unknown keys, a model named twice) is
an error. No tag of the YAML is ever acted upon.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictInt,
    Tag,
    ValidationError,
)
from ruamel.yaml import YAML

from blr_analysis.checks import install, path_of
from blr_analysis.errors import BLRError, InputError, StorageError, told_as
from blr_analysis.files import Folder
from blr_analysis.merging.job import Job, Member, Weight
from blr_analysis.merging.layer_weights import LayerWeights, Rule, depths
from blr_analysis.merging.lora import is_adapter
from blr_analysis.merging.methods import METHODS, default_weights, method_of, widest

AUTO = "auto"
SETTINGS = ("missing_precision", "normalize", "shrink", "power", "damping", "seed", "rescale")
MOST_BYTES = 200_000
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
ELSE = "perhaps mergekit does this"  # of what no recipe here has
SAID = {  # in the place of pydantic's words
    "extra_forbidden": f"there is no such key ({ELSE})",
    "model_type": "expected keys and values, such as model: ./ft1",
}


def _form(value: Any) -> str:
    """In which of its forms a weight is written."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "rules"
    return "rule" if isinstance(value, dict) else "values"


Text = Annotated[str, Field(pattern=r"^[^\x00]*[^\s\x00][^\x00]*$")]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Share = Annotated[Number, Field(ge=0, le=1)]
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32", "float64"],
    BeforeValidator(lambda v: v.removeprefix("torch.") if isinstance(v, str) else v),
]
Values = Annotated[
    tuple[Number, ...],
    BeforeValidator(lambda v: v if isinstance(v, list) else [v]),
    Field(min_length=1),
]


class Section(BaseModel):
    """A mapping of the recipe; a key that is not here is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WrittenRule(Section):
    """A value for the tensors whose name contains ``filter``."""

    value: Values
    filter: Annotated[str, Field(min_length=1)] | None = None


WrittenWeight = Annotated[
    Annotated[Values, Tag("values")]
    | Annotated[WrittenRule, Tag("rule")]
    | Annotated[list[WrittenRule], Tag("rules")],
    Discriminator(_form),
]


class ModelParameters(Section):
    """``parameters`` of one model."""

    weight: WrittenWeight | None = None
    lambda_: WrittenWeight | None = Field(default=None, alias="lambda")
    density: WrittenWeight | None = None
    t: WrittenWeight | None = None
    normalize: bool | None = None
    rescale: bool | None = None
    int8_mask: Any = None  # which changes no number


class Parameters(ModelParameters):
    """``parameters`` of the whole recipe."""

    delta: Annotated[Number, Field(ge=0)] | None = None
    missing_precision: Literal["error", "base", "zero"] | None = None
    shrink: Share | None = None
    power: Share | None = None
    damping: Annotated[Number, Field(ge=0)] | None = None
    seed: Annotated[StrictInt, Field(ge=0)] | None = None


class Entry(Section):
    """One of ``models``."""

    model: Text
    precision: Text | None = None
    n_data: Annotated[StrictInt, Field(gt=0)] | None = None
    data: Text | None = None
    parameters: Annotated[ModelParameters, BeforeValidator(lambda v: v or {})] = ModelParameters()


class Tokenizer(Section):
    """``tokenizer``, mergekit's longer form of ``tokenizer_source``."""

    source: Text = "base"


class RecipeText(Section):
    """A recipe as it is written."""

    merge_method: Text
    models: Annotated[list[Entry], Field(min_length=1)]
    base_model: Text | None = None
    base_precision: Text | None = None
    parameters: Annotated[Parameters, BeforeValidator(lambda v: v or {})] = Parameters()
    dtype: Dtype | None = None
    out_dtype: Dtype | None = None
    tokenizer_source: Text | None = None
    tokenizer: Tokenizer | None = None


@dataclass(frozen=True)
class Recipe:
    """A recipe that has been read and checked.

    Attributes:
        path: its file.
        text: what the file says.
        job: what it means.
        notes: what the user should know and is no error.
        auto: whether the method is still to be chosen (:mod:`blr_analysis.merging.auto`).
    """

    path: Path
    text: str
    job: Job
    notes: tuple[str, ...]
    auto: bool = False


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Read a recipe and find everything that it names; no weights are read.

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
        InputError: it is no such recipe.

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
    try:
        with open(place, "rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as fault:
        raise StorageError(f"the recipe {str(path)!r} cannot be read: {fault}.") from fault
    if len(raw) > MOST_BYTES:
        raise InputError(f"{place.name} has more than {MOST_BYTES:,} bytes: no recipe is that long")
    with told_as(InputError, f"{place.name} is no readable YAML"):
        text = raw.decode("utf-8-sig")
        data = YAML(typ="safe", pure=True).load(text)
    try:
        written = RecipeText.model_validate(data)
    except ValidationError as fault:
        raise InputError(f"{place.name}: {_complaints(fault)}") from fault
    try:
        reader = _Reader(written, Path(os.path.abspath(place)).parent)
        return Recipe(place, text, reader.job(), tuple(reader.notes), reader.auto)
    except BLRError as fault:
        raise type(fault)(f"{place.name}: {fault}") from fault


def _complaints(fault: ValidationError) -> str:
    """pydantic's own words, key by key."""
    errors = fault.errors(include_url=False, include_input=False)[:5]
    places = (".".join(map(str, e["loc"])) or "the recipe" for e in errors)
    said = (SAID.get(e["type"], e["msg"]) for e in errors)
    return "; ".join(map(": ".join, zip(places, said, strict=True)))


class _Reader:
    """What the parts of one recipe mean."""

    def __init__(self, text: RecipeText, folder: Path) -> None:
        self.text, self.folder, self.all = text, folder, text.parameters
        self.notes: list[str] = []
        self.auto = text.merge_method == AUTO  # read as the method that takes most
        if text.merge_method not in (*METHODS, AUTO):
            known = ", ".join((*METHODS, AUTO))
            raise InputError(f"merge_method {text.merge_method!r} is none of {known}: {ELSE}")
        based = text.base_model is not None
        self.method = widest(based=based) if self.auto else method_of(text.merge_method)
        self.base = None
        if text.base_model is not None:
            self.base = self._model(text.base_model)
        self.models = self._models()

    def job(self) -> Job:
        """The merge that the recipe describes."""
        text, method, told = self.text, self.method, self.all
        self._note_idle()
        out_dtype = text.out_dtype or text.dtype
        if text.dtype in ("bfloat16", "float16"):
            self.notes.append(f"dtype: computed in float32, rounded once to {out_dtype}")
        given = {
            "delta": told.delta if method.takes("delta") else None,
            "out_dtype": None if out_dtype is None else getattr(torch, out_dtype),
            "dtype": torch.float64 if text.dtype == "float64" else None,
            "scale": self._by_layer("lambda_", None, 1.0) if method.takes("scale") else None,
            **{name: getattr(told, name) for name in SETTINGS},
        }
        return Job(
            method.name,
            tuple(self._member(model, entry) for model, entry in self.models.items()),
            self.base,
            self._base_precision(),
            tokenizer_source=self._tokenizer_source(),
            **{name: value for name, value in given.items() if value is not None},
        )

    def _existing(self, text: str) -> Path | None:
        with told_as(InputError, f"{text!r:.80} names no file"):
            place = self.folder / Path(text).expanduser()
            return place if place.exists() else None

    def _model(self, text: str) -> Path:
        """The folder of a model; ``MODEL+ADAPTER`` where MODEL is the base."""
        place, (model, plus, adapter) = self._existing(text), text.partition("+")
        if place is None and plus:
            if self.base is None or not self._model(model).samefile(self.base):
                raise InputError(f"adapters are applied to base_model: write base_model: {model}")
            return self._model(adapter)
        place = place or _snapshot(text)
        if place is None:
            raise InputError(
                f"there is no {text!r} in the folder of the recipe or the hub's cache "
                "(`huggingface-cli download`)"
            )
        return place

    def _models(self) -> dict[Path, Entry]:
        """The models that take part, each once; the base only where it is averaged like them."""
        own = None if self.base is None else self.base.resolve()
        seen: dict[Path, tuple[Path, Entry]] = {}
        for at, entry in enumerate(self.text.models):
            model = self._model(entry.model)
            if model.resolve() in seen:
                raise InputError(f"models.{at}: {entry.model!r} is there twice: add up the weights")
            if is_adapter(model) and self.base is None:
                raise InputError(f"{entry.model!r} is an adapter: name its base_model")
            seen[model.resolve()] = model, entry
        if own is not None and own in seen and self.method.uses_base:  # whose step is 0
            _, entry = seen.pop(own)
            if self.method.uses_precisions and (entry.precision or entry.parameters.weight):
                raise InputError(f"models: {entry.model!r} is base_model itself: take it out")
        elif own is not None and own in seen and self.method.name == "slerp":
            seen = {own: seen.pop(own), **seen}
        elif own and own not in seen and self.method.name == "linear" and self.all.weight:
            self.notes.append("base_model is averaged in with the weight of all, as in mergekit")
            seen[own] = own, Entry(model=str(own))
        if not seen:
            raise InputError("there is no model beside the base to merge")
        return dict(seen.values())

    def _member(self, model: Path, entry: Entry) -> Member:
        method = self.method
        key = "t" if method.name == "slerp" else "weight"
        told = [bool(self._rules(key, other)) for other in self.models.values()]
        if not all(told) and (key == "t" or (any(told) and not method.uses_precisions)):
            raise InputError(f"{entry.model!r} or another has no {key}, which {method.name} needs")
        usual = 1.0 if method.normalize else default_weights(method.name, len(told))[0]
        first = key == "t" and self.base is not None and model.samefile(self.base)
        weight = self._by_layer(key, entry, usual, rest=first)
        density = self._by_layer("density", entry, 1.0) if method.thinned else 1.0
        data = self._data(entry)
        return Member(model, self._precision(model, entry), weight, entry.n_data, density, data)

    def _rules(self, name: str, entry: Entry | None) -> tuple[Rule, ...]:
        """The rules of a parameter, what decides first: a model's own, then those of all."""
        parts = [self.all] if entry is None else [entry.parameters, self.all]
        return tuple(rule for part in parts for rule in _read(getattr(part, name)))

    def _by_layer(
        self, name: str, entry: Entry | None, usual: float, *, rest: bool = False
    ) -> Weight:
        """A parameter as a function of the tensor's name; of no model: what is said of all."""
        rules = self._rules(name, entry)
        if rest:
            rules = tuple(replace(r, values=tuple(1 - v for v in r.values)) for r in rules)
        if not any(rule.varies for rule in rules[:1]):
            return rules[0].values[0] if rules else usual
        names = Folder.open(self.base or next(iter(self.models))).specs
        for rule in rules:
            if not any(rule.part in n for n in names):
                like = max(names, key=len)
                raise InputError(f"filter {rule.part!r} is in no name such as {like!r}")
        return LayerWeights(rules, depths(names), usual)

    def _stored(self, what: str, text: str | None, beside: Path | None) -> Path | None:
        """A file that must be there where it is named; else the one beside a model."""
        if text is None:
            place = None if beside is None else beside / "precision"
            return place if place is not None and place.exists() else None
        place = self._existing(text)
        if place is None:
            raise InputError(f"{what}: there is no {text!r} beside the recipe")
        return place

    def _data(self, entry: Entry) -> Path | None:
        """The examples that statistics are taken of on the way, of all models or of none."""
        told, name = [e.data is not None for e in self.models.values()], self.text.merge_method
        if any(told) and (not all(told) or name not in ("fisher", AUTO)):
            raise InputError("data: stand for precisions of fisher and auto, at every model")
        if any(told) and name == "fisher" and (entry.precision or entry.n_data):
            raise InputError(f"{entry.model!r}: precision or n_data beside data: one of them")
        return self._stored("data", entry.data, None)

    def _precision(self, model: Path, entry: Entry) -> Path | None:
        """H_t: as named, or the folder ``precision`` of the model."""
        if not self.method.uses_precisions or (entry.data is not None and not self.auto):
            return None
        beside = model if "precision" not in entry.model_fields_set else None
        place = self._stored("precision", entry.precision, beside)
        if place is None and self.all.missing_precision in (None, "error") and not self.auto:
            what = f"{entry.model!r} has no precision"
            raise InputError(f"{what}: run `blr-analysis fisher`, or set missing_precision")
        return place

    def _base_precision(self) -> Path | None:
        """H_0: as named, or the folder beside the base; ``base_precision: null`` takes none."""
        if not self.method.uses_base_precision:
            return None
        beside = self.base if "base_precision" not in self.text.model_fields_set else None
        place = self._stored("base_precision", self.text.base_precision, beside)
        if place is not None and beside is not None:
            self.notes.append(f"base_precision: taken from {str(place)!r}")
        return place

    def _note_idle(self) -> None:
        """Parameters without effect, which mergekit ignores too."""
        method, told = self.method, self.text.base_precision
        for part in (self.all, *(entry.parameters for entry in self.models.values())):
            said = [name for name in sorted(part.model_fields_set) if not method.takes(name)]
            self.notes += [f"{name.rstrip('_')} has no effect on {method.name}" for name in said]
        if not method.uses_precisions and (told or any(e.precision for e in self.models.values())):
            self.notes.append(f"{method.name} takes no precisions: they are not read")

    def _tokenizer_source(self) -> str | Path | None:
        """What ``tokenizer_source``, or the longer ``tokenizer``, names."""
        longer_form = self.text.tokenizer
        source = self.text.tokenizer_source
        if source is None and longer_form is not None:
            source = longer_form.source
        if source in (None, "base", "union"):
            return source
        return self._model(source.removeprefix("model:"))


def _read(written: WrittenWeight | None) -> list[Rule]:
    """A weight in any of its forms; ``*`` and no filter are the part of every name."""
    if written is None or isinstance(written, tuple):
        return [] if written is None else [Rule(written)]
    rules: Sequence[WrittenRule] = written if isinstance(written, list) else [written]
    return [Rule(r.value, "" if r.filter in (None, "*") else str(r.filter)) for r in rules]


def _snapshot(text: str) -> Path | None:
    """A model's folder in the Hugging Face cache of this machine, ``org/model`` or with ``@``."""
    name, _, revision = text.partition("@")
    if not HUB_NAME.fullmatch(name):
        return None
    try:
        from huggingface_hub import snapshot_download
    except ImportError as fault:
        raise InputError(f"{name!r} is no folder; for names on the hub {install('hf')}") from fault
    with suppress(OSError, ValueError):  # not there, or no such name
        return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    return None
