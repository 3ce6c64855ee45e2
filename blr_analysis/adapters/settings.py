"""The settings of an adapter, from its ``adapter_config.json``."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blr_analysis.checks import some
from blr_analysis.errors import ModelError, StorageError, told_as
from blr_analysis.files.headers import read_json

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
# Settings of plain LoRA: this package applies them, or they do not change the weights.
PLAIN_SETTINGS = {
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
}
# No weights of a model express an adapter with these settings: it acts on some tokens only, repeats
# layers, or is no product.
INEXPRESSIBLE_SETTINGS = {
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "megatron_config",
    "use_qalora",
}
# These initialisations leave the base's weights as they were.
HARMLESS_INITIALISATIONS = ("gaussian", "orthogonal", "eva", "mica")


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is the folder of a PEFT adapter.

    >>> is_adapter("no/such/folder")
    False
    """
    return (Path(path).expanduser() / CONFIG).is_file()


def switched_on(folder: Path) -> dict[str, Any]:
    """The settings in ``adapter_config.json`` by name, without those that are empty or false.

    Raises:
        StorageError: the file is damaged.
    """
    return {key: value for key, value in read_json(folder / CONFIG).items() if value}


def read_entries(folder: Path) -> dict[str, Any]:
    """:func:`switched_on` of an adapter that changes the weights of the base.

    Raises:
        StorageError: the file is damaged.
        ModelError: the base's weights cannot express the adapter.
    """
    entries = switched_on(folder)
    file = str(folder / CONFIG)
    inexpressible = sorted(INEXPRESSIBLE_SETTINGS & entries.keys())
    if inexpressible:
        raise ModelError(
            f"{file!r} sets {some(inexpressible)}, which no weights of the base can express: leave "
            "this adapter out"
        )
    initialisation = entries.get("init_lora_weights")
    is_named = isinstance(initialisation, str)
    if is_named and initialisation.lower() not in HARMLESS_INITIALISATIONS:
        raise ModelError(
            f"{file!r} sets init_lora_weights={initialisation}, which changes the base: save the "
            "adapter with path_initial_model_for_weight_conversion, or save the result of "
            "merge_and_unload() and name that folder"
        )
    return entries


def is_plain_lora(entries: Mapping[str, Any]) -> bool:
    """Whether the settings say that the adapter adds s·B·A to weights and changes nothing else."""
    trains_biases = entries.get("bias") not in (None, "none")
    settings = entries.keys() - {"bias"}
    return entries["peft_type"] == "LORA" and settings <= PLAIN_SETTINGS and not trains_biases


def scaling_of(entries: Mapping[str, Any], module: str, folder: str) -> tuple[int, float]:
    """The rank r and the scaling s of a module.

    Raises:
        StorageError: a rank or an α that is no number, or a pattern that cannot be read.
    """
    with told_as(StorageError, f"{folder!r} has an impossible setting"):
        rank = _of_module(entries, "rank_pattern", module, default=entries.get("r"))
        alpha = _of_module(entries, "alpha_pattern", module, default=entries.get("lora_alpha"))
        if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
            raise StorageError(f"{folder!r} has an impossible setting: r={rank}, alpha={alpha!r}")
        divisor = math.sqrt(rank) if entries.get("use_rslora") else rank
        return rank, alpha / divisor


def _of_module(entries: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """The setting of the first pattern under ``key`` that fits the end of the module's name."""
    for pattern, value in entries.get(key, {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
