"""What a plain LoRA adapter does to each tensor of its base, decided from its settings, names and
shapes alone.

A setting is either one whose meaning is known here, or one that plain LoRA leaves empty; an
adapter for which any other is switched on is PEFT's to merge.

Every tensor of the adapter's file is used, and used once, or the adapter is refused: the
matrices A and B of a module, and biases and whole modules that were trained beside them.

PEFT names a tensor ``base_model.model.<module>.<part>``. The base's files may name the module
without the prefix of the task's class (``encoder…`` for ``bert.encoder…``) or with one; the two
are brought together by one prefix for the whole adapter, and only where one alone fits.

PEFT adapts an embedding and the output layer that is tied to it apart. A merged model that keeps
them tied is then not the one that was trained (``merge_and_unload`` returns it all the same), so
only changes that are the same for both are taken.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blr_analysis.checks import some
from blr_analysis.errors import ModelError, StorageError
from blr_analysis.files import Source, Spec
from blr_analysis.files.headers import read_json
from blr_analysis.merging.lora import CONFIG
from blr_analysis.merging.matching import INPUTS, OUTPUTS, same_bytes

PICKLE = "adapter_model.bin"

# Settings that say nothing about which weights come out.
HARMLESS = {
    "auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_type",
    "peft_version", "qalora_group_size", "revision", "runtime_config",
}  # fmt: skip
# What acts on some tokens only, or on a base that is not the one that is stored.
NO_WEIGHTS = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication",
    "megatron_config", "use_qalora",
)  # fmt: skip
# The base's weights are what they were; everything that was learned is in the adapter's tensors.
INITIALISATIONS = ("gaussian", "orthogonal", "eva", "mica")

PREFIX = "base_model.model."
PART = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<letter>[AB])(?:\.weight)?")

Rank = Annotated[int, Field(strict=True, ge=1)]
Alpha = Annotated[float, Field(strict=True, allow_inf_nan=False)]
HEADLESS_TASKS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
HEADLESS = (
    "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
    "ForMultipleChoice", "Model",
)  # fmt: skip
HEADS = ("LMHeadModel", "HeadsModel")
NO_TOKENS = ("position", "token_type", "segment", "wpe", "patch")


class AdapterSettings(BaseModel):
    """The settings of a plain LoRA adapter that decide its weights, named as PEFT names them."""

    model_config = ConfigDict(frozen=True)

    r: Rank
    lora_alpha: Alpha
    rank_pattern: dict[re.Pattern[str], Rank] = {}
    alpha_pattern: dict[re.Pattern[str], Alpha] = {}
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    modules_to_save: tuple[str, ...] = ()
    target_modules: tuple[str, ...] | re.Pattern[str] | None = None
    task_type: str | None = None
    base_model_name_or_path: str | None = None

    def rank(self, module: str) -> int:
        """r of one module: the first entry of ``rank_pattern`` that fits its name, or r."""
        return _first(self.rank_pattern, module, self.r)

    def scaling(self, module: str) -> float:
        """α/r of one module, or α/√r where the adapter is rank-stabilised."""
        alpha, rank = _first(self.alpha_pattern, module, self.lora_alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Whether PEFT puts an adapter on a module of this name."""
        targets = self.target_modules
        if isinstance(targets, re.Pattern):
            return targets.pattern == "all-linear" or targets.fullmatch(module) is not None
        return targets is None or any(f".{module}".endswith(f".{target}") for target in targets)


def _first(patterns: Mapping[re.Pattern[str], Any], module: str, default: Any) -> Any:
    """The value of the first pattern that fits the end of a module's name, as PEFT looks for it."""
    fits = (v for p, v in patterns.items() if re.match(rf"(.*\.)?({p.pattern})$", module))
    return next(fits, default)


def read_entries(folder: Path) -> dict[str, Any]:
    """``adapter_config.json``, without what is null.

    Raises:
        StorageError: the file is damaged.
        ModelError: no weight says what the adapter does.
    """
    path = folder / CONFIG
    entries = {key: value for key, value in read_json(path).items() if value is not None}
    for key in NO_WEIGHTS:
        if entries.get(key):
            raise ModelError(f"{str(path)!r} sets {key!r}: no weights of this base say that.")
    how = entries.get("init_lora_weights", True)
    if isinstance(how, str) and how.lower() not in INITIALISATIONS:
        raise ModelError(
            f"{str(path)!r} has init_lora_weights={how!r}, which changed the base: name the result "
            "of merge_and_unload(), or save with path_initial_model_for_weight_conversion"
        )
    return entries


def is_plain(entries: Mapping[str, Any]) -> bool:
    """Whether an adapter is LoRA, rank-stabilised or not, without any other setting."""
    known = HARMLESS | AdapterSettings.model_fields.keys()
    switched_on = {key for key, value in entries.items() if value}
    return entries.get("peft_type") == "LORA" and switched_on <= known


def read_settings(entries: Mapping[str, Any], folder: Path) -> AdapterSettings:
    """The settings of a plain adapter.

    Raises:
        StorageError: a missing or impossible setting.
    """
    try:
        return AdapterSettings.model_validate(entries)
    except ValidationError as error:
        first = error.errors()[0]
        name, what = ".".join(map(str, first["loc"])), first["msg"]
        raise StorageError(
            f"{str(folder / CONFIG)!r} has an impossible setting: {name}: {what}, "
            f"got {first['input']!r:.60}."
        ) from error


@dataclass
class Grouped:
    """The tensors of an adapter file, by what they are; the values are their names in the file.

    Attributes:
        matrices: module → "A" and "B" → name.
        embeddings: those of the modules whose matrices are of an embedding.
        whole: tensor of the model → what replaces it.
        copies: tensor of the model → a second copy of what replaces it.
    """

    matrices: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    embeddings: set[str] = field(default_factory=set)
    whole: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)


def are_products(file: Source) -> bool:
    """Whether every pair of an adapter's matrices is a product B·A: not where a convolution has
    groups, whose B holds the rank of its own group alone."""
    for name, spec in file.specs.items():
        other = file.specs.get(name.replace(".lora_A", ".lora_B"), spec)
        if ".lora_" not in name or len(spec.shape) == 2:
            continue
        whole = other.shape[1:] == (spec.shape[0], *[1] * len(spec.shape[2:]))
        if len(spec.shape) < 3 or (other is not spec and not whole):
            return False
    return True


def group(keys: Iterable[str], file: str) -> Grouped:
    """Sort the names in an adapter file by what they are.

    Raises:
        ModelError: a name that is none of PEFT's, or a module of which a matrix is missing.
    """
    grouped, odd = Grouped(), []
    for key in sorted(keys):
        name = key.removeprefix(PREFIX)
        part = PART.fullmatch(name)
        if part is not None:
            grouped.matrices[part["module"]][part["letter"]] = key
            grouped.embeddings |= {part["module"]} if part["embedding"] else set()
        elif name == key or "lora_" in name or "trainable_tokens" in name:
            odd.append(key)
        elif ".modules_to_save." in name:
            grouped.copies[name.replace(".modules_to_save.", ".")] = key
        elif ".original_module." not in name:  # which has no effect while the adapter is on
            grouped.whole[name.replace(".base_layer.", ".")] = key
    odd += [key for parts in grouped.matrices.values() if len(parts) < 2 for key in parts.values()]
    if odd:
        raise ModelError(
            f"{file!r} holds {some(odd)}: no pairs of {PREFIX}<module>.lora_A.weight and .lora_B."
        )
    for name in grouped.copies.keys() - grouped.whole.keys():
        grouped.whole[name] = grouped.copies.pop(name)
    return grouped


@dataclass(frozen=True)
class LoraUpdate:
    """scale·B·A as it is added to a base tensor of ``rows`` × ``cols`` elements.

    ``b`` is [out, r] and ``a`` [r, in]. ``transposed``: the base stores [in, out] (Conv1D,
    Embedding), and gets (B·A)ᵀ. ``kernel``: of a convolution, whose ``a`` is [r, in, *kernel] and
    ``b`` [out, r, 1, …].
    """

    a: str
    b: str
    rank: int
    scale: float
    rows: int
    cols: int
    transposed: bool
    kernel: tuple[int, ...] = ()


@dataclass(frozen=True)
class AdapterChange:
    """What happens to one tensor of the base; names are those of the adapter's file.

    Attributes:
        whole: the tensor that stands for the base's, before anything is added.
        low_rank: what is added.
    """

    whole: str | None = None
    low_rank: LoraUpdate | None = None

    @property
    def words(self) -> str:
        """What happens, in a few words, for tables."""
        parts = ["the adapter's own"] if self.whole else []
        if self.low_rank:
            parts.append(f"LoRA, r={self.low_rank.rank}, scaling {self.low_rank.scale:.4g}")
        return ", ".join(parts)


def changes_of(
    settings: AdapterSettings, adapter: Source, base: Source, folder: str
) -> dict[str, AdapterChange]:
    """The change of every base tensor that a plain adapter changes, by the base's names.

    Raises:
        ModelError: the adapter does not fit the base, or its effect cannot be told exactly.
    """
    grouped = group(adapter.specs, adapter.name)
    for name, key in grouped.copies.items():
        if not same_bytes(adapter, key, adapter, grouped.whole[name]):
            raise ModelError(
                f"{adapter.name!r} holds two versions of {name!r} that differ: save it again."
            )
    tied = _drop_tied_heads(settings, grouped, adapter, base)
    own = translate(
        [*(f"{module}.weight" for module in grouped.matrices), *grouped.whole], base.specs, folder
    )
    _check(settings, grouped, own, adapter, base, folder)
    _refuse_tied(settings, grouped, own, tied, base, folder)
    changes = {own[name]: AdapterChange(whole=key) for name, key in grouped.whole.items()}
    for module in grouped.matrices:
        name = own[f"{module}.weight"]
        low_rank = _low_rank(settings, grouped, module, name, adapter, base, folder)
        changes[name] = replace(changes.get(name, AdapterChange()), low_rank=low_rank)
    return changes


def _low_rank(
    settings: AdapterSettings,
    grouped: Grouped,
    module: str,
    name: str,
    adapter: Source,
    base: Source,
    folder: str,
) -> LoraUpdate:
    parts, rank, shape = grouped.matrices[module], settings.rank(module), base.specs[name].shape
    a, b = adapter.specs[parts["A"]].shape, adapter.specs[parts["B"]].shape
    kernel = tuple(shape[2:])
    straight = (*b, *a) == (shape[0], rank, *[1] * len(kernel), rank, *shape[1:])
    straight = straight and module not in grouped.embeddings
    turned = (*b, *a) == (*shape[1:], rank, rank, *shape[:1]) and not kernel
    if len(shape) < 2 or not (straight or turned):
        raise ModelError(
            f"the adapter {folder!r} has B {list(b)} and A {list(a)} (r = {rank}) for {name!r} "
            f"{list(shape)}: was it trained on this base?"
        )
    if straight and turned:
        turned = stored_transposed(name, base.specs, settings.fan_in_fan_out)
    sizes = shape[0], math.prod(shape[1:]), turned, kernel
    return LoraUpdate(parts["A"], parts["B"], rank, settings.scaling(module), *sizes)


def stored_transposed(name: str, base: Mapping[str, Spec], otherwise: bool) -> bool:
    """Whether a square weight is stored as [in, out], which its own shape cannot tell.

    The layers of Conv1D models store [in, out] and have biases. A layer without one is no Conv1D;
    for others the base's weights that are not square tell, by which of their sizes the bias has.
    (``fan_in_fan_out`` in the adapter's configuration only says what PEFT's last layer was.)

    Raises:
        ModelError: the base has layers of both kinds.
    """

    def bias(weight: str) -> tuple[int, ...]:
        spec = base.get(weight.removesuffix("weight") + "bias")
        return spec.shape if spec is not None and weight.endswith(".weight") else ()

    if not bias(name):
        return False
    told = {
        spec.shape.index(bias(n)[0])
        for n, spec in base.items()
        if len(spec.shape) == 2 and len({*spec.shape}) == 2 and set(bias(n)) & {*spec.shape}
    }
    if len(told) > 1:
        raise ModelError(
            f"{name!r} is square and may be stored either way: name the result of "
            "merge_and_unload()"
        )
    return bool(told.pop()) if told else otherwise


def _check(
    settings: AdapterSettings,
    grouped: Grouped,
    own: Mapping[str, str],
    adapter: Source,
    base: Source,
    folder: str,
) -> None:
    """That the file holds what its configuration promises, in the sizes of its base."""
    for source, names in ((base, own.values()), (adapter, adapter.specs)):
        odd = [n for n in names if not source.specs[n].dtype.is_floating_point]
        if odd:
            raise ModelError(
                f"{some(odd)} of {source.name!r}: expected floating-point weights, not quantized "
                f"ones in {source.specs[odd[0]].dtype}"
            )
    for name, key in grouped.whole.items():
        mine, theirs = adapter.specs[key].shape, base.specs[own[name]].shape
        if mine != theirs:
            raise ModelError(
                f"{key!r} of {adapter.name!r} is {list(mine)}, the base's {list(theirs)}: resize "
                "the base first"
            )
    for module in grouped.matrices:
        if not settings.targets(module):
            raise ModelError(
                f"{folder!r} holds matrices for {module!r}, which target_modules does not name"
            )
        bias = f"{own[f'{module}.weight'].removesuffix('weight')}bias"
        if settings.bias != "none" and bias in base.specs and f"{module}.bias" not in grouped.whole:
            raise ModelError(
                f"{folder!r} has bias={settings.bias!r}, but no bias of {module!r}: save the "
                "adapter again"
            )
    for module in settings.modules_to_save:
        inside = [f".{module}." in f".{name}" for name in base.specs]
        if any(inside) and not any(f".{module}." in f".{name}" for name in grouped.whole):
            raise ModelError(
                f"{folder!r} lacks {module!r} of its modules_to_save: save the adapter again"
            )


def near(name: str, base: Collection[str]) -> bool:
    """Whether the base has a tensor of this name, with or without a prefix of either."""
    return name in base or any(own.endswith(f".{name}") or name.endswith(f".{own}") for own in base)


def translate(wanted: Iterable[str], base: Collection[str], folder: str) -> dict[str, str]:
    """The base's name of every tensor that an adapter names.

    Raises:
        ModelError: no one prefix brings all of them to names of the base, or several do.

    Example:
        >>> translate(["bert.pooler.weight"], {"pooler.weight": 1, "x": 2}, "./lora")
        {'bert.pooler.weight': 'pooler.weight'}
    """
    names = list(dict.fromkeys(wanted))
    ways = [{name: name for name in names}]
    ways += [{name: name.removeprefix(p) for name in names} for p in _prefixes(names)]
    ways += [{name: p + name for name in names} for p in _prefixes(base)]
    ways = [way for way in ways if len({*way.values()}) == len(names)]  # two never become one
    missing = [sorted(name for name in names if way[name] not in base) for way in ways]
    fits = [way for way, lost in zip(ways, missing, strict=True) if not lost]
    if not fits:
        lost = min(missing, key=len)
        tied = all(_layer(name) in OUTPUTS for name in lost)
        why = "has tied to its embedding: save the base untied"
        raise ModelError(
            f"the adapter {folder!r} changes {some(lost)}, which the base "
            + (why if tied else "has not: was it trained on this base?")
        )
    other = next((way for way in fits if way != fits[0]), fits[0])
    if fits[0] is not ways[0] and other is not fits[0]:
        name = next(n for n in names if fits[0][n] != other[n])
        raise ModelError(
            f"the adapter {folder!r} may mean {fits[0][name]!r} or {other[name]!r} by {name!r}: "
            "rename the base's tensors"
        )
    return fits[0]


def _prefixes(names: Iterable[str]) -> list[str]:
    """The first word, and the first two, of the modules in these names."""
    words = {tuple(name.split(".")[:-1][:count]) for name in names for count in (1, 2)}
    return sorted(".".join(w) + "." for w in words if w)


def _drop_tied_heads(
    settings: AdapterSettings, grouped: Grouped, adapter: Source, base: Source
) -> set[str]:
    """Forget what the file says of an output layer that the base does not store, where it says
    the same of the embedding.

    Returns:
        The weights of the embeddings of which it does.
    """
    tied = set()
    lost = [n for n in grouped.whole if _layer(n) in OUTPUTS and not near(n, base.specs)]
    for head in lost:
        for name in (n for n in grouped.whole if _layer(n) in INPUTS and near(n, base.specs)):
            if same_bytes(adapter, grouped.whole[head], adapter, grouped.whole[name]):
                tied.add(name)
                del grouped.whole[head]
                break
    for head in [m for m in grouped.matrices if not near(f"{m}.weight", base.specs)]:
        for module in grouped.embeddings:
            one, other = grouped.matrices[head], grouped.matrices[module]
            pairs = ((one["A"], other["B"]), (one["B"], other["A"]))
            turned = all(torch.equal(adapter.tensor(x), adapter.tensor(y).T) for x, y in pairs)
            if turned and settings.scaling(head) == settings.scaling(module):
                tied.add(f"{module}.weight")
                del grouped.matrices[head]
                break
    return tied


def _refuse_tied(
    settings: AdapterSettings,
    grouped: Grouped,
    own: Mapping[str, str],
    tied: set[str],
    base: Source,
    folder: str,
) -> None:
    """Refuse a change of the embedding alone where the base ties its output layer to it."""
    architecture, untied = _said(base)
    if untied:
        return
    for name in (own[n] for n in own if _layer(n) in INPUTS | OUTPUTS):
        for twin in base.specs:
            if twin != name and same_bytes(base, twin, base, name):
                raise ModelError(
                    f"the adapter {folder!r} changes {name!r}, stored again as {twin!r}: leave "
                    f"{twin!r} out, or set tie_word_embeddings=false"
                )
    if settings.task_type in HEADLESS_TASKS:
        return
    headless = architecture.endswith(HEADLESS) and not architecture.endswith(HEADS)
    if settings.task_type is None and headless:
        return
    saved = [f".{module}." for module in settings.modules_to_save]
    changed = {f"{module}.weight" for module in grouped.embeddings}
    changed |= {
        n for n in grouped.whole if _layer(n) in INPUTS and any(s in f".{n}" for s in saved)
    }
    for name in sorted(own[n] for n in changed - tied):
        alike = [
            n for n, s in base.specs.items() if n != name and s.shape == base.specs[name].shape
        ]
        if not alike and not any(word in name for word in NO_TOKENS):
            raise ModelError(
                f"the adapter {folder!r} changes {name!r}, to which the base's output layer is "
                "tied: save the base untied, or set task_type in adapter_config.json"
            )


def _said(base: Source) -> tuple[str, bool]:
    """The architecture that the configuration beside a base names, and whether it says that the
    output layer is not tied."""
    place = Path(base.name).expanduser()
    try:
        folder = place if place.is_dir() else place.parent
        said = json.loads((folder / "config.json").read_text("utf-8")) if place.exists() else {}
        inner = said.get("text_config") or {}
        tied = said.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
        return str((said.get("architectures") or [""])[0]), tied is False
    except (OSError, ValueError, AttributeError, TypeError):
        return "", False


def _layer(name: str) -> str:
    """The last word of the module whose weight this is; empty for other tensors."""
    return name.removesuffix(".weight").rpartition(".")[2] if name.endswith(".weight") else ""
