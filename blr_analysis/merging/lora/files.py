"""What the two files of a PEFT adapter say: its settings, and which tensors belong together.

A setting is either one whose meaning is known here, or one that plain LoRA leaves empty; an
adapter for which any other is switched on is PEFT's to merge.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blr_analysis.checks import some
from blr_analysis.errors import ModelError, StorageError
from blr_analysis.files.headers import parse_json
from blr_analysis.merging.lora import CONFIG

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
    try:
        document = parse_json(path.read_bytes(), path)
    except OSError as error:
        raise StorageError(f"cannot read {str(path)!r}: {error.strerror or error}.") from error
    entries = {key: value for key, value in document.items() if value is not None}
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
