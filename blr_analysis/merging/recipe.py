"""What to merge with what, as YAML: a recipe becomes a :class:`~blr_analysis.merging.job.Job`.

A recipe is written as for mergekit, whose ``linear`` and ``task_arithmetic`` recipes mean the
same here. Different on purpose: relative paths start at the recipe's folder; models are read from
this machine only (a name such as ``org/model`` from the Hugging Face cache); arithmetic is in
float32 (or float64) where mergekit computes in ``dtype``, which names what is written unless
``out_dtype`` does; what mergekit drops or overlooks silently (unknown keys, a model named twice) is
an error. No tag of the YAML is ever acted upon.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from blr_analysis.merging.job import Job, Member, Vocabulary, Weight
from blr_analysis.merging.layer_weights import Rule, depths, rest, varies, weight_by_layer
from blr_analysis.merging.lora import is_adapter
from blr_analysis.merging.methods import CURVED, Method, default_weights, method_of, widest
from blr_analysis.merging.sources import TABLES, layer_of

AUTO = "auto"
MOST_BYTES = 200_000
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MERGEKIT = {  # which keys and methods of it are not of this package
    *("slices", "modules", "chat_template", "tokens", "pad_to_multiple_of", "epsilon", "gamma"),
    *("select_topk", "normalize_weights", "filter_wise", "max_iter", "tol", "eps", "embed_slerp"),
    *("passthrough", "breadcrumbs", "breadcrumbs_ties", "della", "della_linear", "nuslerp", "sce"),
    *("nearswap", "arcee_fusion", "random_seed", "name"),
}


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a finite number")
    return value


def _form(value: Any) -> str:
    """In which of its forms a weight is written."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "rules"
    return "rule" if isinstance(value, dict) else "values"


Text = Annotated[str, Field(pattern=r"^[^\x00]*[^\s\x00][^\x00]*$")]
Number = Annotated[float, BeforeValidator(_no_flag), Field(allow_inf_nan=False)]
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
    adapter_rank: Annotated[Number, Field(gt=0)] | None = None


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
        job = reader.job()
    except BLRError as fault:
        raise type(fault)(f"{place.name}: {fault}") from fault
    return Recipe(place, text, job, tuple(reader.notes), written.merge_method == AUTO)


def _complaints(fault: ValidationError) -> str:
    """pydantic's own words, key by key."""
    said = []
    for error in fault.errors(include_url=False, include_input=False)[:5]:
        foreign = error["type"] == "extra_forbidden" and error["loc"][-1] in MERGEKIT
        words = "mergekit does this" if foreign else error["msg"]
        said.append(f"{'.'.join(map(str, error['loc']))}: {words}")
    return "; ".join(said)


@dataclass(frozen=True)
class _Listed:
    """One entry of the recipe, with its folder."""

    at: int
    entry: Entry
    model: Path


class _Reader:
    """What the parts of one recipe mean."""

    def __init__(self, text: RecipeText, folder: Path) -> None:
        self.text, self.folder, self.all = text, folder, text.parameters
        self.notes: list[str] = []
        self.method = self._method()
        self.base = None if text.base_model is None else self._place(text.base_model)
        if self.method.needs_base and self.base is None:
            raise InputError(f"{self.method.name} needs base_model")
        self.listed = self._models()

    def job(self) -> Job:
        """The merge that the recipe describes."""
        text, method, told = self.text, self.method, self.all
        self._note_idle()
        tokenizer, vocabulary = self._tokenizer()
        out_dtype = text.out_dtype or text.dtype
        if text.dtype in ("bfloat16", "float16"):
            self.notes.append(f"dtype: computed in float32, rounded once to {out_dtype}")
        own = {name: getattr(told, name) for name in ("missing_precision", "power", "seed")}
        own |= {"rescale": told.rescale, "delta": told.delta if method.takes("delta") else None}
        scale = self._by_layer("lambda_", None, 1.0) if method.takes("scale") else 1.0
        return Job(
            method=method.name,
            members=tuple(self._member(one) for one in self.listed),
            base=self.base,
            base_precision=self._base_precision(),
            normalize=told.normalize,
            shrink=told.shrink,
            damping=told.damping,
            dtype=torch.float64 if text.dtype == "float64" else torch.float32,
            out_dtype=None if out_dtype is None else getattr(torch, out_dtype),
            scale=scale,
            rank=text.adapter_rank,
            tokenizer_source=tokenizer,
            vocabulary=vocabulary,
            **{name: value for name, value in own.items() if value is not None},
        )

    def _method(self) -> Method:
        name = self.text.merge_method
        if name in MERGEKIT:
            raise InputError(f"merge_method: {name}: mergekit does this")
        if name == AUTO:  # read as the method that takes most
            return widest(based=bool(self.text.base_model))
        return method_of(name)

    def _place(self, text: str) -> Path:
        """The folder of a model; ``MODEL+ADAPTER`` where MODEL is the base."""
        model, plus, adapter = text.partition("+")
        if not plus or self._existing(text):
            return self._located(text)
        if self.base is None or self._located(model).resolve() != self.base.resolve():
            raise InputError(f"adapters are applied to base_model: write base_model: {model}")
        return self._located(adapter)

    def _existing(self, text: str) -> Path | None:
        with told_as(InputError, f"{text!r:.80} names no file"):
            try:
                place = self.folder / Path(text).expanduser()
                return place if place.exists() else None
            except OSError:  # a name longer than the file system takes
                return None

    def _located(self, text: str) -> Path:
        place = self._existing(text)
        name, _, revision = text.partition("@")
        if place is None and HUB_NAME.fullmatch(name):
            place = _snapshot(name, revision or None)
        if place is None:
            raise InputError(
                f"there is no {text!r}: paths start at the folder of the recipe, and names on the "
                "hub are looked for in its cache alone (`huggingface-cli download`)"
            )
        return place

    def _stored(self, what: str, text: str | None, beside: Path | None = None) -> Path | None:
        """A file that must be there where it is named; else the one beside a model."""
        if text is None:
            place = None if beside is None else beside / "precision"
            return place if place is not None and place.exists() else None
        place = self._existing(text)
        if place is None:
            raise InputError(f"{what}: there is no {text!r} beside the recipe")
        return place

    def _models(self) -> list[_Listed]:
        """The models that take part, each once; the base only where it is averaged like them."""
        seen: dict[str, _Listed] = {}
        for at, entry in enumerate(self.text.models):
            one = _Listed(at, entry, self._place(entry.model))
            if seen.setdefault(os.path.realpath(one.model), one) is not one:
                raise InputError(f"models.{at}: {entry.model!r} is there twice: add up the weights")
        own = None if self.base is None else os.path.realpath(self.base)
        if self.method.uses_base and own in seen:
            base = seen.pop(own).entry  # whose step is 0
            if self.method.uses_precisions and (base.precision or base.parameters.weight):
                raise InputError(f"models: {base.model!r} is base_model itself: take it out")
        elif own is not None and own not in seen and self.method.name == "linear":
            if self.all.weight is not None:  # as mergekit does
                self.notes.append("base_model is averaged in with the weight of all")
                seen[own] = _Listed(len(seen), Entry(model=str(self.base)), Path(own))
        elif self.method.name == "slerp" and own in seen:
            seen = {own: seen.pop(own), **seen}
        if not seen:
            raise InputError("there is no model beside the base to merge")
        return list(seen.values())

    def _member(self, one: _Listed) -> Member:
        method, entry = self.method, one.entry
        key = "t" if method.name == "slerp" else "weight"
        told = [bool(self._rules(key, other)) for other in self.listed]
        if not all(told) and (key == "t" or (any(told) and not method.uses_precisions)):
            raise InputError(f"models.{told.index(False)}: no {key}, which {method.name} needs")
        usual = 1.0
        if not method.normalize:
            usual = default_weights(method.name, len(self.listed))[0]
        if not any(told) and method.name == "task_arithmetic" and one is self.listed[0]:
            self.notes.append(f"no weights: {usual:g} for each model, one over their number")
        density = self._by_layer("density", one, 1.0) if method.thinned else 1.0
        weight = self._by_layer(key, one, usual)
        return Member(
            one.model, self._precision(one), weight, entry.n_data, density, self._data(one)
        )

    def _rules(self, name: str, one: _Listed | None) -> tuple[Rule, ...]:
        """The rules of a parameter, what decides first: a model's own, then those of all."""
        parts = [self.all] if one is None else [one.entry.parameters, self.all]
        return tuple(rule for part in parts for rule in _read(getattr(part, name)))

    def _by_layer(self, name: str, one: _Listed | None, usual: float) -> Weight:
        """A parameter as a function of the tensor's name; of no model: what is said of all."""
        rules = self._rules(name, one)
        if name == "t" and one is not None and one.model == self.base:
            rules = rest(rules)
        around: Mapping[str, int] = {}
        if varies(rules):
            around = depths(Folder.open(self.base or self.listed[0].model).specs)
        for_all = name in ("weight", "t") and not self.method.uses_precisions
        return weight_by_layer(rules, around, usual, for_all=for_all)

    def _data(self, one: _Listed) -> Path | None:
        """The examples that statistics are taken of on the way, of all models or of none."""
        told, name = [o.entry.data is not None for o in self.listed], self.text.merge_method
        if not any(told):
            return None
        if not all(told) or name not in ("fisher", AUTO):
            raise InputError("data: stand for precisions of fisher and auto, at every model")
        if name == "fisher" and (one.entry.precision or one.entry.n_data):
            raise InputError(f"models.{one.at}: precision and n_data beside data: one of them")
        return self._stored("data", one.entry.data)

    def _precision(self, one: _Listed) -> Path | None:
        """H_t: as named, or the folder ``precision`` of the model."""
        auto, entry = self.text.merge_method == AUTO, one.entry
        if not self.method.uses_precisions or (entry.data is not None and not auto):
            return None
        beside = one.model if "precision" not in entry.model_fields_set else None
        place = self._stored("precision", entry.precision, beside)
        needed = self.all.missing_precision in (None, "error") and not auto
        if place is None and needed:
            raise InputError(
                f"models.{one.at}: {entry.model!r} has no precision: run `blr-analysis fisher`, or "
                "set missing_precision"
            )
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
        method = self.method
        idle = {
            "lambda_": not method.takes("scale"),
            "t": method.name != "slerp",
            "weight": method.name in ("slerp", "model_stock"),
            **{
                key: not method.takes(key)
                for key in ("delta", "density", "seed", "rescale", *CURVED)
            },
        }
        for part in (self.all, *(one.entry.parameters for one in self.listed)):
            without = sorted(key.rstrip("_") for key in part.model_fields_set if idle.get(key))
            self.notes += [f"{key} has no effect on {method.name}" for key in without]
        told = self.text.base_precision or any(one.entry.precision for one in self.listed)
        if told and not method.uses_precisions:
            self.notes.append(f"{method.name} takes no precisions: they are not read")

    def _tokenizer(self) -> tuple[str | Path, Vocabulary | None]:
        """Where the tokenizer comes from, and how many tokens there are where models differ."""
        source = self.text.tokenizer_source
        if self.text.tokenizer is not None:
            source = source or self.text.tokenizer.source
        if source == "base" and self.base is None:
            raise InputError("tokenizer_source: 'base', but the recipe has no base_model")
        models = [self.base, *(one.model for one in self.listed)]
        folders = list(dict.fromkeys(m for m in models if m is not None and not is_adapter(m)))
        own = {m: vocabulary(m) for m in folders}
        first = folders[0]
        if source in ("base", "union", None):
            place = first if source != "union" else max(folders, key=lambda m: len(own[m]))
        else:
            place = self._place(source.removeprefix("model:"))
        tokens = vocabulary(place)
        for model, known in own.items():
            self._check_numbers(place, tokens, model, known)
        here: str | Path = "base" if place == first else place
        lengths = {m: _table_lengths(m) for m in folders} if source is not None else {}
        if len({tuple(each) for each in lengths.values()}) < 2:
            return here, None
        if self.text.merge_method == AUTO or not all(own.values()) or not tokens:
            raise InputError("tokenizer_source: models of other lengths need a tokenizer.json each")
        for model, known in own.items():
            beyond = {n: t for t, n in tokens.items()}
            odd = [t for t, n in known.items() if beyond.get(n, t) != t]
            if odd:
                raise InputError(
                    f"{str(model)!r} has another token than {odd[0]!r}: mergekit does this"
                )
        counts = {m: 1 + max(own.get(m, own[first]).values()) for m in models if m is not None}
        return here, Vocabulary(1 + max(tokens.values()), counts)

    def _check_numbers(
        self, place: Path, tokens: Mapping[str, int], model: Path, known: Mapping[str, int]
    ) -> None:
        """Raise where two models number their tokens differently: their rows are other words."""
        odd = {t: (n, tokens[t]) for t, n in known.items() if tokens.get(t, n) != n}
        for token, (mine, theirs) in odd.items():
            raise InputError(
                f"{model.name!r} and {place.name!r} number {len(odd):,} tokens differently "
                f"({token!r} is {mine} and {theirs}): mergekit does this"
            )


def _read(written: WrittenWeight | None) -> list[Rule]:
    """A weight in any of its forms; ``*`` and no filter are the part of every name."""
    if written is None or isinstance(written, tuple):
        return [] if written is None else [Rule(written)]
    rules: Sequence[WrittenRule] = written if isinstance(written, list) else [written]
    return [Rule(r.value, "" if r.filter in (None, "*") else str(r.filter)) for r in rules]


def _snapshot(name: str, revision: str | None) -> Path | None:
    """A model's folder in the Hugging Face cache of this machine."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError as fault:
        raise InputError(
            f"{name!r} is no folder; for the Hugging Face cache, {install('hf')}"
        ) from fault
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def vocabulary(model: Path) -> dict[str, int]:
    """The number of every token of a model's folder, read from the file itself; empty where no file
    has them.

    Raises:
        StorageError: the file that should have them cannot be read.
    """
    names = ("tokenizer.json", "vocab.json", "vocab.txt")
    file = next((model / name for name in names if (model / name).is_file()), None)
    if file is None:
        return {}
    with told_as(StorageError, f"the tokenizer {str(file)!r} cannot be read"):
        text = file.read_text("utf-8")
        if file.name == "vocab.txt":
            return {token: n for n, token in enumerate(text.splitlines())}
        document = json.loads(text)
        if file.name == "vocab.json":
            return dict(document)
        inside = document.get("model", {}).get("vocab", {})
        if isinstance(inside, list):  # of tokens and their scores
            inside = {token: n for n, (token, _) in enumerate(inside)}
        return inside | {t["content"]: t["id"] for t in document.get("added_tokens", ())}


def _table_lengths(model: Path) -> set[int]:
    """How many rows a model's tables of tokens have."""
    specs = Folder.open(model).specs
    return {s.shape[0] for n, s in specs.items() if layer_of(n) in TABLES and s.shape}
