"""What to merge with what, as YAML: a recipe becomes a :class:`~blr_analysis.merging.job.Job`.

A recipe is written as for mergekit, whose ``linear`` and ``task_arithmetic`` recipes mean the
same here. Different on purpose: relative paths start at the recipe's folder; models are read from
this machine only; arithmetic is in float32 (or float64) where mergekit computes in ``dtype``,
which names what is written unless ``out_dtype`` does; what mergekit drops or overlooks silently
(unknown keys, a model named twice) is an error.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blr_analysis.checks import path_of
from blr_analysis.errors import InputError
from blr_analysis.files import Folder
from blr_analysis.merging.job import Job, Member, Weight
from blr_analysis.merging.lora import is_adapter
from blr_analysis.merging.methods import CURVED, METHODS, Method, widest
from blr_analysis.merging.propagation import PropagatedJob, check_propagates
from blr_analysis.merging.recipe.layer_weights import (
    Rule,
    depths,
    rest,
    varies,
    weight_by_layer,
)
from blr_analysis.merging.recipe.places import (
    existing,
    locate,
    renumbered,
    vocabulary,
)
from blr_analysis.merging.recipe.schema import (
    FOREIGN,
    Entry,
    ModelParameters,
    Page,
    Parameters,
    RecipeText,
    Way,
    WrittenWeight,
)
from blr_analysis.merging.vocabularies import Vocabulary, table_lengths, union
from blr_analysis.merging.weighting import default_weights

AUTO = "auto"


@dataclass(frozen=True)
class Recipe:
    """A recipe that has been read and checked.

    Attributes:
        path: its file.
        text: what the file says.
        job: what it means.
        notes: what the user should know and is no error, with line numbers.
        adapter_rank: of the adapter that is written instead of a model.
        auto: whether the method is still to be chosen (:mod:`blr_analysis.merging.auto`).
    """

    path: Path
    text: str
    job: Job
    notes: tuple[str, ...]
    auto: bool = False
    adapter_rank: float | None = None


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
    page = Page.open(place)
    reader = _RecipeReader(page, page.check())
    job = reader.job()
    auto = reader.text.merge_method == AUTO
    return Recipe(place, page.text, job, tuple(page.notes), auto, reader.text.adapter_rank)


@dataclass(frozen=True)
class _Listed:
    """One entry of the recipe, with its folder."""

    way: Way
    entry: Entry
    model: Path


class _RecipeReader:
    """What the parts of one recipe mean."""

    def __init__(self, page: Page, text: RecipeText) -> None:
        self.page = page
        self.text = text
        # the parameters that hold for all models, what decides first
        self.levels: list[tuple[Way, Parameters]] = [(("parameters",), text.parameters)]
        for key in ("slices", "modules", "chat_template"):
            if getattr(text, key) is not None:
                raise page.wrong((key,), f"{key} are not of this package: mergekit does this")
        self.method = self._method()
        self.base = self._base()
        self.listed = self._models()

    def job(self) -> Job:
        """The merge that the recipe describes."""
        text, method = self.text, self.method
        for key in ("name", "model_name", "random_seed"):
            if getattr(text, key) is not None:
                self.page.note((key,), f"{key} has no effect, here as in mergekit")
        self._check_vocabularies()
        self._note_ignored()
        tokenizer, tokens = self._tokenizer()
        for one in self.listed:
            if text.adapter_rank is not None and not is_adapter(one.model):
                what = f"a rank is for adapters alone: {one.entry.model!r} is none"
                raise self.page.wrong(("adapter_rank",), what)
        members = list({one.model: one for one in self.listed}.values())
        weights, normalize = self._weights([one.model for one in members])
        data = self._data(members, weights, tokens)
        kind = PropagatedJob if data and text.merge_method != AUTO else Job
        out_dtype = text.out_dtype or text.dtype
        if text.dtype in ("bfloat16", "float16"):
            self.page.note(("dtype",), f"computed in float32, rounded once to {out_dtype}")
        return kind(
            method=method.name,
            members=tuple(
                Member(
                    one.model, self._precision(one), weight, one.entry.n_data,
                    self._by_layer("density", one.model, 1.0) if method.thinned else 1.0,
                    data.get(one.model),
                )
                for one, weight in zip(members, weights, strict=True)
            ),
            base=self.base,
            base_precision=self._base_precision(),
            delta=self._first("delta", 0.0) if method.uses_base_precision else 0.0,
            missing_precision=self._first("missing_precision", "error"),
            normalize=normalize,
            shrink=self._first("shrink", None),
            power=self._first("power", 1.0),
            damping=self._first("damping"),
            dtype=torch.float64 if text.dtype == "float64" else torch.float32,
            out_dtype=None if out_dtype is None else getattr(torch, out_dtype),
            tokenizer_source=tokenizer,
            vocabulary=tokens,
            scale=self._by_layer("lambda_", None, 1.0) if method.takes("scale") else 1.0,
            seed=self._first("seed", 0),
            rescale=self._first("rescale", True),
        )  # fmt: skip

    def _first(self, name: str, default: Any = None) -> Any:
        """The value of a parameter of all models that decides."""
        values = (getattr(part, name) for _, part in self.levels)
        return next((value for value in values if value is not None), default)

    def _rules(self, name: str, one: _Listed | None = None) -> tuple[Rule, ...]:
        """The rules of a parameter for one model, what decides first."""
        parts: list[tuple[Way, ModelParameters]] = [] if one is None else [
            (one.way, one.entry.parameters)
        ]  # fmt: skip
        parts.append(((), self.text.parameters))
        return tuple(
            rule for way, own in parts
            for rule in self._read((*way, "parameters", name.rstrip("_")), getattr(own, name))
        )  # fmt: skip

    def _read(self, way: Way, written: WrittenWeight | None) -> list[Rule]:
        """A weight in any of its forms; ``*`` and no filter are the part of every name."""
        if written is None:
            return []
        if isinstance(written, tuple):
            return [Rule(written)]
        rules = {(*way, k): r for k, r in enumerate(written)} if isinstance(written, list) else {
            way: written
        }  # fmt: skip
        return [
            Rule(
                r.value,
                "" if r.filter in (None, "*") else r.filter,
                self.page.place((*at, "filter")),
            )
            for at, r in rules.items()
        ]

    def _by_layer(self, name: str, model: Path | None, usual: float) -> Weight:
        """A parameter as a function of the tensor's name; of no model: what is said of all."""
        rules = self._rules(name, next((o for o in self.listed if o.model == model), None))
        if name == "t" and self.base is not None and model == self.base:
            rules = rest(rules)
        around: Mapping[str, int] = {}
        if varies(rules):
            way: Way = ("base_model",) if self.base else ("models",)
            around = self._depths(self.base or self.listed[0].model, way)
        for_all = name in ("weight", "t") and not self.method.uses_precisions
        return weight_by_layer(rules, around, usual, for_all=for_all)

    def _place(self, way: Way, text: str) -> Path:
        """The folder of a model; ``MODEL+ADAPTER`` where MODEL is the base."""
        with self.page.naming(way):
            model, plus, adapter = text.partition("+")
            if not plus or existing(text, self.page.folder):
                return locate(text, self.page.folder)
            onto, adapter = locate(model, self.page.folder), locate(adapter, self.page.folder)
            if self.base is None or onto.resolve() != self.base.resolve():
                raise InputError(f"adapters are applied to base_model: write base_model: {model}")
            return adapter

    def _method(self) -> Method:
        name = self.text.merge_method
        if name == AUTO:  # read as the method that takes most
            return widest(based=bool(self.text.base_model))
        if name in METHODS:
            return METHODS[name]
        near = difflib.get_close_matches(name, METHODS, n=1)
        meant = f"did you mean {near[0]!r}? Known" if near else "known"
        raise self.page.wrong(
            ("merge_method",), f"no method {name!r} here; {meant} are: {', '.join(METHODS)}"
        )

    def _base(self) -> Path | None:
        """θ_0."""
        self.base = None
        if self.text.base_model is not None:
            return self._place(("base_model",), self.text.base_model)
        if self.method.needs_base:
            raise self.page.wrong(("merge_method",), f"{self.method.name} needs base_model")
        return None

    def _models(self) -> list[_Listed]:
        """The models that take part, each once; the base only where it is averaged like them."""
        if self.text.models is None:
            raise self.page.wrong(("merge_method",), "the key 'models' is missing")
        seen: dict[str, _Listed] = {}
        for at, entry in enumerate(self.text.models):
            way = ("models", at)
            model = self._place((*way, "model"), entry.model)
            one = _Listed(way, entry, model)
            twin = seen.setdefault(os.path.realpath(model), one)
            if twin is not one:
                first = self.page.find((*twin.way, "model"))[1]
                raise self.page.wrong(
                    (*way, "model"), f"the same model as on line {first}: add up the weights"
                )
        own = None if self.base is None else os.path.realpath(self.base)
        if self.method.uses_base and own in seen:
            self._note_base(seen.pop(own))
        elif own is not None and own not in seen:
            self._base_unlisted(seen, own, self._rules("weight"))
        elif self.method.name == "slerp" and own in seen:
            seen = {own: seen.pop(own), **seen}
        listed = list(seen.values())
        if not listed:
            raise self.page.wrong(("models",), "there is no model beside the base to merge")
        return listed

    def _base_unlisted(self, listed: dict[str, _Listed], own: str, above: tuple[Rule, ...]) -> None:
        """What becomes of a base that is not one of the models where the method has no base."""
        if self.method.name != "linear":
            return
        way = ("base_model",)
        if above:  # as mergekit's `linear` does
            self.page.note(way, "base_model is averaged in with the weight of all")
            listed[own] = _Listed(way, Entry(model=self.text.base_model or ""), Path(own))
        else:
            self.page.note(way, "base_model gives config and tokenizer, and is not averaged in")

    def _note_base(self, own: _Listed) -> None:
        """The base among the models, as mergekit's users write it: its step is 0."""
        if not (own.entry.precision or own.entry.n_data or own.entry.parameters.weight):
            return
        if self.method.uses_precisions:
            raise self.page.wrong(
                (*own.way, "model"),
                "this is base_model itself: take it out of the models",
            )
        self.page.note(own.way, "base_model among the models: its weight has no effect")

    def _depths(self, model: Path, way: Way) -> Mapping[str, int]:
        with self.page.naming(way):
            return depths(Folder.open(model).specs)

    def _check_vocabularies(self) -> None:
        """Raise where models number their tokens differently: their rows are other words."""
        if self.text.tokenizer_source is not None or self.text.tokenizer is not None:
            return  # which brings them together
        first = self.base or self.listed[0].model
        for one in self.listed:
            way = (*one.way, "model")
            with self.page.naming(way):
                odd = renumbered(first, one.model)
            for token, (mine, theirs) in odd.items():
                raise self.page.wrong(
                    way,
                    f"{one.entry.model!r} and {first.name!r} number {len(odd):,} tokens "
                    "differently "
                    f"({token!r} is {mine} and {theirs}): set tokenizer_source",
                )

    def _note_ignored(self) -> None:
        """Parameters without effect: a note where mergekit ignores them too, else an error."""
        method = self.method
        idle = {
            "lambda": not method.takes("scale"),
            "t": method.name != "slerp",
            "weight": method.name in ("slerp", "model_stock"),
            "embed_slerp": True,
        }
        taken = ("delta", "density", "seed", "rescale", *CURVED)
        idle |= {key: not method.takes(key) for key in taken} | dict.fromkeys(FOREIGN, True)
        if self.text.merge_method != AUTO and any(one.entry.data for one in self.listed):
            idle |= {"power": True, "damping": True}  # of moments of inputs
        parts: list[tuple[Way, ModelParameters]] = [*self.levels]
        parts += [((*one.way, "parameters"), one.entry.parameters) for one in self.listed]
        for way, part in parts:
            for name in sorted(part.model_fields_set - {"int8_mask"}):
                key = name.rstrip("_")
                said = f"{key} has no effect on {method.name}"
                own = method.uses_precisions or method.span or method.thinned
                if idle.get(key):
                    harmless = key == "rescale" and not part.rescale
                    if (
                        own
                        and key not in ("delta", "weight", "seed", "embed_slerp", *CURVED)
                        and not harmless
                    ):
                        raise self.page.wrong((*way, key), f"{said}: take it out")
                    self.page.note((*way, key), said)
                elif not isinstance(part, Parameters) and key not in ("weight", "density"):
                    self.page.note((*way, key), f"{key} has an effect only on all models together")
        said = [(*o.way, "precision") for o in self.listed if o.entry.precision is not None]
        if said and not method.uses_precisions:
            self.page.note(said[0], f"{method.name} takes no precisions: they are not read")

    def _weights(self, models: Sequence[Path]) -> tuple[Sequence[Weight], bool | None]:
        """α_t, and whether they are still to be normalized; None where the method decides."""
        method = self.method
        key = "t" if method.name == "slerp" else "weight"
        without = [o for o in self.listed if not self._rules(key, o)]
        if key == "t" and without:
            raise self.page.wrong(("parameters",), "slerp needs t: 0 is base_model, 1 the other")
        some = key == "weight" and 0 < len(without) < len(self.listed)
        if some and not method.uses_precisions:
            raise self.page.wrong(
                without[0].way, "no weight, and others have: write parameters: {weight: …}"
            )
        usual = 1.0
        if not method.normalize and key == "weight":
            usual = default_weights(method.name, len(models))[0]
        if without and method.name == "task_arithmetic":
            self.page.note(
                ("models",), f"no weights: {usual:g} for each model, one over their number"
            )
        weights = [self._by_layer(key, model, usual) for model in models]
        return weights, self._first("normalize")

    def _stored(self, way: Way, text: str | None) -> Path | None:
        if text is None:
            return None
        with self.page.naming(way):
            place = existing(text, self.page.folder)
            if place is None:
                raise InputError(f"there is no {way[-1]} {text!r} beside the recipe")
            return place

    def _data(
        self, members: Sequence[_Listed], weights: Sequence[Weight], tokens: Vocabulary | None
    ) -> dict[Path, Path]:
        """The examples that statistics are taken of on the way, of all models or of none."""
        said = [one for one in members if one.entry.data is not None]
        if not said:
            return {}
        way, name = (*said[0].way, "data"), self.text.merge_method
        if name not in ("fisher", AUTO):
            raise self.page.wrong(way, f"data stand for precisions: of fisher and auto, not {name}")
        if len(said) < len(members):
            one = next(one for one in members if one not in said)
            raise self.page.wrong((*one.way, "model"), "no data, and other models have them")
        with self.page.naming(way):
            check_propagates("fisher", None, weights)
        if self.text.adapter_rank is not None or tokens is not None:
            raise self.page.wrong(way, "data are for whole models of one vocabulary")
        for one in members if name == "fisher" else ():
            if one.entry.precision is not None:
                raise self.page.wrong((*one.way, "precision"), "beside data: one of them")
            if one.entry.n_data is not None:
                raise self.page.wrong((*one.way, "n_data"), "beside data, which are counted")
        places = ((one.model, self._stored((*one.way, "data"), one.entry.data)) for one in members)
        return {model: place for model, place in places if place is not None}

    def _precision(self, one: _Listed) -> Path | None:
        """H_t: as named, or the folder ``precision`` of the model."""
        auto = self.text.merge_method == AUTO
        if not self.method.uses_precisions or (one.entry.data is not None and not auto):
            return None
        place = self._stored((*one.way, "precision"), one.entry.precision)
        if place is None and "precision" not in one.entry.model_fields_set:
            place = existing("precision", one.model)
        needed = self._first("missing_precision", "error") == "error"
        if place is None and needed and not auto:
            raise self.page.wrong(
                (*one.way, "precision"),
                f"{one.entry.model!r} has no precision: run `blr-analysis fisher`, or set "
                "missing_precision",
            )
        return place

    def _base_precision(self) -> Path | None:
        """H_0: as named, or the folder beside the base; ``base_precision: null`` takes none."""
        text, method, way = self.text, self.method, ("base_precision",)
        stands_in = self._first("missing_precision") == "base" and method.uses_precisions
        if not (method.uses_base_precision or stands_in):
            if text.base_precision is not None:
                self.page.note(way, f"{method.name} takes no base_precision: it is not read")
            return None
        place = self._stored(way, text.base_precision)
        if place is None and self.base is not None and way[0] not in text.model_fields_set:
            place = existing("precision", self.base)
            if place is not None:
                self.page.note(("base_model",), f"base_precision: taken from {str(place)!r}")
        return place

    def _tokenizer(self) -> tuple[str | Path, Vocabulary | None]:
        """Where the tokenizer comes from, and the tokens of the result where models differ."""
        way: Way = ("tokenizer_source",)
        source, said = self.text.tokenizer_source, self.text.tokenizer
        if said is not None:
            way = ("tokenizer", "source")
            if source is not None:
                raise self.page.wrong(("tokenizer",), "beside tokenizer_source: one of them")
            source = said.source
        if source == "base" and self.base is None:
            raise self.page.wrong(way, "'base', but the recipe has no base_model")
        if source is None:
            return "base", None
        first = self.base or self.listed[0].model
        named = source not in ("base", "union")
        place = self._place(way, source.removeprefix("model:")) if named else first
        models = list(dict.fromkeys([first, *(one.model for one in self.listed)]))
        with self.page.naming(way):
            whole = {m: first if is_adapter(m) else m for m in models}
            own = {m: vocabulary(folder) for m, folder in whole.items()}
            lengths = {
                m: table_lengths(Folder.open(folder).specs)
                for m, folder in whole.items() if not is_adapter(folder)
            }  # fmt: skip
            tokens, document = dict(vocabulary(place)), None
            if source == "union" and any(t.keys() - tokens.keys() for t in own.values()):
                folders = [m for m in models if not is_adapter(m)]
                tokens, document = union(folders, own)
        alike = all(known in (tokens, {}) for known in own.values())
        tables = [(n, rows) for table in lengths.values() for n, rows in table.items()]
        alike = alike and len(set(tables)) == len(dict(tables))  # padded alike
        if alike:
            return (place if named else "base"), None
        if not tokens or not all(own.values()):
            raise self.page.wrong(way, "every model needs a tokenizer.json to tell its tokens")
        if self.text.merge_method == AUTO:
            raise self.page.wrong(way, "auto needs models of one vocabulary")
        found = Vocabulary(tokens, 1 + max(tokens.values()), own, self.base, document)
        return (place if named else "base"), found
