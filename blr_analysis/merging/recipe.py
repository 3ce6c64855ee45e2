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

from blr_analysis.adapters import is_adapter
from blr_analysis.checks import install, path_of
from blr_analysis.errors import BLRError, InputError, StorageError, told_as
from blr_analysis.files import Folder
from blr_analysis.merging.job import Job, Member
from blr_analysis.merging.layer_weights import LayerWeights, Rule, depths
from blr_analysis.merging.methods import METHODS, default_weights, method_of, widest

AUTO = "auto"
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
# What mergekit does and this package does not, by the keys or methods of its recipes.
ELSEWHERES = {
    "experts": "experts: mixtures of experts are mergekit's (mergekit-moe)",
    "gate_mode": "gate_mode: mixtures of experts are mergekit's (mergekit-moe)",
    "genome": "genome: evolution is mergekit's (mergekit-evolve)",
}
MAX_BYTES = 200_000
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
ELSEWHERE = "perhaps mergekit does this"  # of what no recipe here has
# Our words for some of pydantic's complaints.
COMPLAINTS = {
    "extra_forbidden": f"there is no such key ({ELSEWHERE})",
    "model_type": "expected keys and values, such as model: ./ft1",
}


def _form(value: Any) -> str:
    """In which of its forms a weight is written."""
    if isinstance(value, list) and value and all(isinstance(rule, dict) for rule in value):
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


def _empty_section(value: Any) -> Any:
    """A section that is named and left empty has no keys."""
    return value or {}


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
    epsilon: WrittenWeight | None = None
    gamma: WrittenWeight | None = None
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
    select_topk: Share | None = None
    r: Annotated[Number, Field(ge=0)] | None = None
    alpha: Annotated[Number, Field(ge=0)] | None = None
    nuslerp_flatten: Literal[True] | None = None
    nuslerp_row_wise: Literal[False] | None = None
    filter_wise: Literal[False] | None = None


class Entry(Section):
    """One of ``models``."""

    model: Text
    precision: Text | None = None
    n_data: Annotated[StrictInt, Field(gt=0)] | None = None
    data: Text | None = None
    parameters: Annotated[ModelParameters, BeforeValidator(_empty_section)] = ModelParameters()


class SliceSource(Section):
    """One of the ``sources`` of a slice."""

    model: Text
    layer_range: tuple[StrictInt, StrictInt]
    parameters: Annotated[ModelParameters, BeforeValidator(_empty_section)] = ModelParameters()


class Slice(Section):
    """Layers that are merged by themselves."""

    sources: Annotated[list[SliceSource], Field(min_length=1)]
    parameters: Annotated[Parameters, BeforeValidator(_empty_section)] = Parameters()


class Tokenizer(Section):
    """``tokenizer``, mergekit's longer form of ``tokenizer_source``."""

    source: Text = "base"


class OutAdapter(Section):
    """``out_adapter``: adapters are merged into an adapter."""

    rank: Annotated[StrictInt, Field(gt=0)] | None = None


class RecipeText(Section):
    """A recipe as it is written."""

    merge_method: Text
    models: Annotated[list[Entry], Field(min_length=1)] | None = None
    slices: Annotated[list[Slice], Field(min_length=1)] | None = None
    base_model: Text | None = None
    base_precision: Text | None = None
    parameters: Annotated[Parameters, BeforeValidator(_empty_section)] = Parameters()
    dtype: Dtype | None = None
    out_dtype: Dtype | None = None
    tokenizer_source: Text | None = None
    tokenizer: Tokenizer | None = None
    out_adapter: Annotated[OutAdapter, BeforeValidator(_empty_section)] | None = None


@dataclass(frozen=True)
class Recipe:
    """A recipe that has been read and checked.

    Attributes:
        path: its file.
        text: what the file says.
        job: what it means.
        notes: what the user should know and is no error.
        auto: whether the method is still to be chosen (:mod:`blr_analysis.merging.auto`).
        out_adapter: how adapters are merged into an adapter; None: into a model.
    """

    path: Path
    text: str
    job: Job
    notes: tuple[str, ...]
    auto: bool = False
    out_adapter: OutAdapter | None = None


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
    raw = _read_bytes(place)
    with told_as(InputError, f"{place.name} is no readable YAML"):
        text = raw.decode("utf-8-sig")
        data = YAML(typ="safe", pure=True).load(text)
    _refuse_elsewhere(data, place.name)
    try:
        written = RecipeText.model_validate(data)
    except ValidationError as fault:
        raise InputError(f"{place.name}: {_complaints(fault)}") from fault
    try:
        reader = _Reader(written, Path(os.path.abspath(place)).parent)
        job = reader.job()
    except BLRError as fault:
        raise type(fault)(f"{place.name}: {fault}") from fault
    return Recipe(
        place, text, job, tuple(reader.notes), reader.is_auto, out_adapter=written.out_adapter
    )


def _refuse_elsewhere(data: Any, name: str) -> None:
    """Raise where a recipe asks for what only mergekit has, before its keys are complained of."""
    if not isinstance(data, dict):
        return
    for key in data:
        if key in ELSEWHERES:
            raise InputError(f"{name}: {ELSEWHERES[key]}")
    if "models" in data and "slices" in data:
        raise InputError(f"{name}: slices: models stand beside them: write one ({ELSEWHERE})")
    method = data.get("merge_method")
    if isinstance(method, str) and method not in (*METHODS, AUTO):
        methods = ", ".join((*METHODS, AUTO))
        reason = "it stacks layers, and mergekit does this"
        if method != "passthrough":
            reason = ELSEWHERE
        raise InputError(f"{name}: merge_method {method!r} is none of {methods}: {reason}")


def _read_bytes(place: Path) -> bytes:
    try:
        with open(place, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as fault:
        raise StorageError(f"the recipe {str(place)!r} cannot be read: {fault}.") from fault
    if len(raw) > MAX_BYTES:
        raise InputError(f"{place.name} has more than {MAX_BYTES:,} bytes: no recipe is that long")
    return raw


def _complaints(fault: ValidationError) -> str:
    """What pydantic complains of, key by key."""
    sentences = []
    for error in fault.errors(include_url=False, include_input=False)[:5]:
        place = ".".join(map(str, error["loc"])) or "the recipe"
        sentences.append(f"{place}: {COMPLAINTS.get(error['type'], error['msg'])}")
    return "; ".join(sentences)


class _Reader:
    """What the parts of one recipe mean.

    Attributes:
        notes: what the user should know and is no error.
        is_auto: whether the method is still to be chosen; the recipe is then read as for the method
            that takes most.
        base: the folder of the base, or None.
        entries: what is written of each model, by its folder.
    """

    def __init__(self, text: RecipeText, folder: Path) -> None:
        self.text = text
        self.folder = folder
        self.notes: list[str] = []
        self.is_auto = text.merge_method == AUTO
        self.parameters = text.parameters
        has_base = text.base_model is not None
        self.method = widest(based=has_base) if self.is_auto else method_of(text.merge_method)
        self.base: Path | None = None
        if text.base_model is not None:
            self.base = self._model(text.base_model)
        self.listed = self._listed()
        self.entries = self._entries()

    def job(self) -> Job:
        """The merge that the recipe describes."""
        self._note_parameters_without_effect()
        self._note_dtype()
        return Job(
            self.method.name,
            tuple(self._member(model, entry) for model, entry in self.entries.items()),
            self.base,
            self._base_precision(),
            tokenizer_source=self._tokenizer_source(),
            **self._settings(),
        )

    def _settings(self) -> dict[str, Any]:
        """The fields of a job that the recipe sets."""
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
        """A parameter of all models and tensors."""
        rules = self._rules(name, None)
        if not rules:
            return None
        if rules[0].varies:
            raise InputError(f"{name} of {self.method.name} must be one number")
        return rules[0].values[0]

    def _listed(self) -> list[Entry]:
        """The models, also where they are written as slices of all layers.

        Raises:
            InputError: slices that leave layers out, repeat or reorder them, or of which each has
                models or parameters of its own.
        """
        slices = self.text.slices
        if slices is None:
            if self.text.models is None:
                raise InputError("models: Field required, or slices")
            return self.text.models
        first = slices[0]
        self._check_layers([[source.layer_range for source in part.sources] for part in slices])
        for part in slices[1:]:
            models = [(source.model, source.parameters) for source in part.sources]
            first_models = [(source.model, source.parameters) for source in first.sources]
            if models != first_models or part.parameters != first.parameters:
                raise InputError(
                    "slices: each has models or parameters of its own, which mergekit does; here "
                    "weight: [..] or filters change them over the layers"
                )
        changes = {
            name: getattr(first.parameters, name) for name in first.parameters.model_fields_set
        }
        self.parameters = self.text.parameters.model_copy(update=changes)
        return [Entry(model=source.model, parameters=source.parameters) for source in first.sources]

    def _check_layers(self, ranges: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Raise unless slices are all layers of the model in their order."""
        assert self.text.slices is not None
        model = self._model(self.text.slices[0].sources[0].model)
        stacks = depths(Folder.open(model).specs)
        count = max(stacks.values(), default=0)
        position = 0
        for sources in ranges:
            start, stop = sources[0]
            if any(source != (start, stop) for source in sources) or start != position:
                break
            position = stop
        else:
            if position == count:
                return
        raise InputError(
            f"slices: they must be layers 0 to {count} of every model, in order; other layers are "
            "mergekit's"
        )

    def _existing(self, text: str) -> Path | None:
        """The file or folder that a recipe names; None where there is none."""
        with told_as(InputError, f"{text!r:.80} names no file"):
            place = self.folder / Path(text).expanduser()
            return place if place.exists() else None

    def _model(self, text: str) -> Path:
        """The folder of a model; ``MODEL+ADAPTER`` where MODEL is the base."""
        place = self._existing(text)
        model, plus, adapter = text.partition("+")
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

    def _entries(self) -> dict[Path, Entry]:
        """The models that take part, each once; the base only where it is averaged like them."""
        by_place: dict[Path, tuple[Path, Entry]] = {}
        for number, entry in enumerate(self.listed):
            model = self._model(entry.model)
            if model.resolve() in by_place:
                raise InputError(
                    f"models.{number}: {entry.model!r} is there twice: add up the weights"
                )
            if is_adapter(model) and self.base is None:
                raise InputError(f"{entry.model!r} is an adapter: name its base_model")
            by_place[model.resolve()] = model, entry
        if self.base is not None:
            by_place = self._with_base_in_place(by_place, self.base.resolve())
        if not by_place:
            raise InputError("there is no model beside the base to merge")
        return dict(by_place.values())

    def _with_base_in_place(
        self, by_place: dict[Path, tuple[Path, Entry]], base: Path
    ) -> dict[Path, tuple[Path, Entry]]:
        """The models without the base, or with it where the method averages it like them."""
        is_listed = base in by_place
        if is_listed and self.method.uses_base:  # its step is 0
            _, entry = by_place.pop(base)
            if self.method.uses_precisions and (entry.precision or entry.parameters.weight):
                raise InputError(f"models: {entry.model!r} is base_model itself: take it out")
        elif is_listed and self.method.name == "slerp":  # which starts at the base
            return {base: by_place.pop(base), **by_place}
        elif not is_listed and self.method.name == "linear" and self.parameters.weight:
            self.notes.append("base_model is averaged in with the weight of all, as in mergekit")
            by_place[base] = base, Entry(model=str(base))
        return by_place

    def _member(self, model: Path, entry: Entry) -> Member:
        method = self.method
        key = "t" if method.name == "slerp" else "weight"
        self._refuse_missing_weight(key, entry)
        default = 1.0 if method.normalize else default_weights(method.name, len(self.entries))[0]
        is_start = key == "t" and self.base is not None and model.samefile(self.base)
        weight = self._by_layer(key, entry, default, complement=is_start)
        density = self._by_layer("density", entry, 1.0) if method.thinned else 1.0
        epsilon = self._by_layer("epsilon", entry, None) if method.takes("epsilon") else None
        gamma = self._by_layer("gamma", entry, 0.01) if method.takes("gamma") else 0.01
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

    def _refuse_missing_weight(self, key: str, entry: Entry) -> None:
        """Raise where some models have a weight and others have none."""
        have_weights = [bool(self._rules(key, listed)) for listed in self.entries.values()]
        is_needed = key == "t" or (any(have_weights) and not self.method.uses_precisions)
        if is_needed and not all(have_weights):
            raise InputError(
                f"{entry.model!r} or another has no {key}, which {self.method.name} needs"
            )

    def _rules(self, name: str, entry: Entry | None) -> tuple[Rule, ...]:
        """The rules of a parameter, what decides first: a model's own, then those of all."""
        sections: list[ModelParameters] = [self.parameters]
        if entry is not None:
            sections.insert(0, entry.parameters)
        return tuple(rule for section in sections for rule in _read(getattr(section, name)))

    def _by_layer(
        self, name: str, entry: Entry | None, default: Any, *, complement: bool = False
    ) -> Any:
        """A parameter as a function of the tensor's name.

        Without an entry, it is that of all models. ``complement`` gives 1 less the values.
        """
        rules = self._rules(name, entry)
        if complement:
            rules = tuple(
                replace(rule, values=tuple(1 - value for value in rule.values)) for rule in rules
            )
        if not rules:
            return default
        if not rules[0].varies:
            return rules[0].values[0]
        names = Folder.open(self.base or next(iter(self.entries))).specs
        for rule in rules:
            if not any(rule.part in name for name in names):
                longest = max(names, key=len)
                raise InputError(f"filter {rule.part!r} is in no name such as {longest!r}")
        return LayerWeights(rules, depths(names), default)

    def _named_file(self, key: str, text: str) -> Path:
        """A file that must be there."""
        place = self._existing(text)
        if place is None:
            raise InputError(f"{key}: there is no {text!r} beside the recipe")
        return place

    def _data(self, entry: Entry) -> Path | None:
        """The examples that statistics are taken of on the way, of all models or of none."""
        have_data = [listed.data is not None for listed in self.entries.values()]
        method = self.text.merge_method
        if any(have_data) and (not all(have_data) or method not in ("fisher", AUTO)):
            raise InputError("data: stand for precisions of fisher and auto, at every model")
        if any(have_data) and method == "fisher" and (entry.precision or entry.n_data):
            raise InputError(f"{entry.model!r}: precision or n_data beside data: one of them")
        return None if entry.data is None else self._named_file("data", entry.data)

    def _precision(self, model: Path, entry: Entry) -> Path | None:
        """H_t: as named, or the folder ``precision`` of the model."""
        has_data = entry.data is not None and not self.is_auto
        if not self.method.uses_precisions or has_data:
            return None
        if entry.precision is not None:
            return self._named_file("precision", entry.precision)
        is_written = "precision" in entry.model_fields_set  # as null, which takes none
        place = None if is_written else precision_beside(model)
        may_be_missing = self.parameters.missing_precision in ("base", "zero")
        if place is None and not may_be_missing and not self.is_auto:
            raise InputError(
                f"{entry.model!r} has no precision: run `blr-analysis fisher`, or set "
                "missing_precision"
            )
        return place

    def _base_precision(self) -> Path | None:
        """H_0: as named, or the folder beside the base; ``base_precision: null`` takes none."""
        if not self.method.uses_base_precision:
            return None
        if self.text.base_precision is not None:
            return self._named_file("base_precision", self.text.base_precision)
        is_written = "base_precision" in self.text.model_fields_set
        if is_written or self.base is None:
            return None
        place = precision_beside(self.base)
        if place is not None:
            self.notes.append(f"base_precision: taken from {str(place)!r}")
        return place

    def _note_parameters_without_effect(self) -> None:
        """mergekit ignores them, too."""
        method = self.method
        entries = list(self.entries.values())
        for section in (self.parameters, *(entry.parameters for entry in entries)):
            for name in sorted(section.model_fields_set):
                if not method.takes(name):
                    self.notes.append(f"{name.rstrip('_')} has no effect on {method.name}")
        has_precisions = bool(self.text.base_precision) or any(e.precision for e in entries)
        if has_precisions and not method.uses_precisions:
            self.notes.append(f"{method.name} takes no precisions: they are not read")

    def _note_dtype(self) -> None:
        if self.text.dtype in ("bfloat16", "float16"):
            out_dtype = self.text.out_dtype or self.text.dtype
            self.notes.append(f"dtype: computed in float32, rounded once to {out_dtype}")

    def _tokenizer_source(self) -> str | Path | None:
        """What ``tokenizer_source``, or the longer ``tokenizer``, names."""
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


def _read(written: WrittenWeight | None) -> list[Rule]:
    """A weight in any of its forms; ``*`` and no filter are the part of every name."""
    if written is None:
        return []
    if isinstance(written, tuple):
        return [Rule(written)]
    rules: Sequence[WrittenRule] = written if isinstance(written, list) else [written]
    return [Rule(rule.value, _part(rule.filter)) for rule in rules]


def _part(written_filter: str | None) -> str:
    """What a tensor's name must contain."""
    return "" if written_filter in (None, "*") else written_filter


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
