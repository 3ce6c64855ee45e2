"""What ``adapter_config.json`` says of a LoRA adapter, and a refusal of all that is not exact.

A setting is either one whose meaning is known here, or one that plain LoRA leaves empty. Anything
else that is switched on (another PEFT method, a variant of LoRA, an initialisation that changed
the base's weights, a setting of a later version) is refused by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blr_analysis.checks import some
from blr_analysis.errors import ModelError, StorageError
from blr_analysis.files.headers import parse_json

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"

# Settings that say nothing about which weights come out.
HARMLESS = frozenset(
    [
        "auto_mapping",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    ]
)
# Settings that are read below.
KNOWN = frozenset(
    [
        "alpha_pattern",
        "base_model_name_or_path",
        "bias",
        "ensure_weight_tying",
        "fan_in_fan_out",
        "init_lora_weights",
        "lora_alpha",
        "lora_bias",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "task_type",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    ]
)
REFUSED = {
    "layer_replication": "layers of the base are repeated: the result is another architecture",
    "alora_invocation_tokens": "activated LoRA acts on some tokens only: no one weight says that",
    "arrow_config": "Arrow chooses an adapter for each token: no one weight says that",
    "kasa_config": "KaSA changed the base's own weights",
    "use_qalora": "QA-LoRA lives on a quantized base",
    "megatron_config": "Megatron splits layers otherwise",
}
# The base's weights are what they were; everything that was learned is in the adapter's tensors.
INITIALISATIONS = ("gaussian", "orthogonal", "eva", "mica")
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of a LoRA adapter that decide its weights, named as PEFT names them."""

    folder: str
    r: int
    lora_alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    fan_in_fan_out: bool
    bias: str
    modules_to_save: tuple[str, ...]
    target_modules: tuple[str, ...] | str | None
    target_parameters: tuple[str, ...]
    trainable_token_indices: Mapping[str, tuple[int, ...]] | tuple[int, ...] | None
    ensure_weight_tying: bool
    task_type: str | None
    base: str | None

    def rank(self, module: str) -> int:
        """r of one module: the first entry of ``rank_pattern`` that fits its name, or r."""
        return self.rank_pattern.get(_first(self.rank_pattern, module), self.r)

    def scaling(self, module: str) -> float:
        """α/r of one module, or α/√r where the adapter is rank-stabilised."""
        alpha = self.alpha_pattern.get(_first(self.alpha_pattern, module), self.lora_alpha)
        rank = self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, module: str) -> bool:
        """Whether PEFT puts an adapter on a module of this name."""
        targets = self.target_modules
        if targets is None or targets == "all-linear":
            return True
        if isinstance(targets, str):
            return re.fullmatch(targets, module) is not None
        return any(ends_with(module, target) for target in targets)


def read_config(folder: Path) -> AdapterConfig:
    """The configuration in ``folder``, checked.

    Raises:
        StorageError: the file is not there or is damaged.
        ModelError: the adapter is of a kind whose weights cannot be told exactly.
    """
    path = folder / CONFIG
    try:
        entries = parse_json(path.read_bytes(), path)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot read {str(path)!r}: {error.strerror or error}.") from error
    _check_kind(entries, path)
    try:
        return _parse(entries, str(folder))
    except (KeyError, TypeError, ValueError, re.error) as error:
        raise StorageError(
            f"{str(path)!r} has a missing or impossible setting ({type(error).__name__}: {error}): "
            "expected the configuration that save_pretrained wrote."
        ) from error


def ends_with(name: str, ending: str) -> bool:
    """Whether the last dotted words of ``name`` are ``ending``."""
    return name == ending or name.endswith(f".{ending}")


def _check_kind(entries: Mapping[str, Any], path: Path) -> None:
    kind = entries.get("peft_type")
    if kind != "LORA":
        raise ModelError(
            f"{str(path)!r} is of PEFT type {kind!r}: only 'LORA' can be added to the base's "
            "weights here. Where PEFT can merge it, save the result of merge_and_unload() and "
            "name that folder instead."
        )
    for key, reason in REFUSED.items():
        if entries.get(key):
            raise ModelError(f"{str(path)!r} sets {key!r}: {reason}.")
    unknown = sorted(k for k, v in entries.items() if v and k not in HARMLESS | KNOWN)
    if unknown:
        raise ModelError(
            f"{str(path)!r} sets {some(unknown)}, whose effect on the weights is not known here: "
            "save the result of PEFT's merge_and_unload() and name that folder instead."
        )
    how = entries.get("init_lora_weights", True)
    if isinstance(how, str) and how.lower().startswith(CHANGED_BASE):
        raise ModelError(
            f"{str(path)!r} has init_lora_weights={how!r}, which changed the base's own weights: "
            "the adapter does not fit the plain base. Save it converted: save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...), or merge_and_unload() and name that "
            "folder instead (the only way for 'loftq')."
        )
    if isinstance(how, str) and how.lower() not in INITIALISATIONS:
        raise ModelError(
            f"{str(path)!r} has init_lora_weights={how!r}, which is not known here: it may have "
            "changed the base's weights. Name the folder of a merged model instead."
        )


def _parse(entries: Mapping[str, Any], folder: str) -> AdapterConfig:
    targets, tokens = entries.get("target_modules"), entries.get("trainable_token_indices")
    config = AdapterConfig(
        folder=folder,
        r=_whole(entries["r"]),
        lora_alpha=_number(entries["lora_alpha"]),
        rank_pattern={k: _whole(v) for k, v in (entries.get("rank_pattern") or {}).items()},
        alpha_pattern={k: _number(v) for k, v in (entries.get("alpha_pattern") or {}).items()},
        **{name: _flag(entries, name) for name in ("use_rslora", "use_dora", "lora_bias")},
        fan_in_fan_out=_flag(entries, "fan_in_fan_out"),
        bias=entries.get("bias") or "none",
        modules_to_save=_names(entries.get("modules_to_save")),
        target_modules=targets if isinstance(targets, str | None) else _names(targets),
        target_parameters=_names(entries.get("target_parameters")),
        trainable_token_indices=_tokens(tokens),
        ensure_weight_tying=_flag(entries, "ensure_weight_tying"),
        task_type=entries.get("task_type"),
        base=entries.get("base_model_name_or_path"),
    )
    if config.bias not in ("none", "all", "lora_only"):
        raise ValueError(f"bias={config.bias!r}")
    for pattern in (*config.rank_pattern, *config.alpha_pattern):
        re.compile(pattern)
    if isinstance(targets, str):
        re.compile(targets)
    return config


def _first(patterns: Mapping[str, Any], module: str) -> str:
    """The first pattern that fits the end of a module's name, as PEFT looks for it."""
    fits = (p for p in patterns if re.match(rf"(.*\.)?({p})$", module))
    return next(fits, module)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"a rank of {value!r}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"an alpha of {value!r}")
    return value


def _flag(entries: Mapping[str, Any], name: str) -> bool:
    value = entries.get(name)
    if value not in (None, True, False):
        raise ValueError(f"{name}={value!r}")
    return bool(value)


def _names(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise TypeError(f"expected a list of names, not {value!r}")
    return tuple(value)


def _tokens(value: Any) -> Mapping[str, tuple[int, ...]] | tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, dict):
        return {name: _rows(rows) for name, rows in value.items()}
    return _rows(value)


def _rows(value: Any) -> tuple[int, ...]:
    rows = tuple(value)
    if not all(type(row) is int and row >= 0 for row in rows) or len(set(rows)) != len(rows):
        raise ValueError("token indices that are negative, no integers, or there twice")
    return rows
