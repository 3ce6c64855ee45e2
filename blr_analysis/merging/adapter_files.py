"""LoRA adapters in the files of PEFT: opened, copied and written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from blr_analysis.adapters import (
    CONFIG,
    PAIR,
    PLAIN_SETTINGS,
    PREFIX,
    TENSORS,
    is_adapter,
    read_entries,
    scaling_of,
    switched_on,
)
from blr_analysis.checks import some
from blr_analysis.errors import InputError, ModelError
from blr_analysis.files import Folder, drafted
from blr_analysis.files.names import TOKEN_TABLES, module_word

# Settings that a merged adapter takes over from the first one. The others are about the layers or
# the training of one adapter, and are left at PEFT's defaults.
SHARED_SETTINGS = (
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "fan_in_fan_out",
    "inference_mode",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "revision",
    "task_type",
)
# Settings of adapters that are products of matrices, their magnitudes and whole modules.
SETTINGS_OF_PRODUCTS = {
    *PLAIN_SETTINGS,
    "bias",  # "none"
    "fan_in_fan_out",
    "modules_to_save",
    "use_dora",
}
MAGNITUDE = ".lora_magnitude_vector"  # the end of the names of DoRA's magnitudes
BASE_WEIGHT = ".base_layer.weight"  # PEFT saves the base's head and token table if LoRA is on them


@dataclass(frozen=True)
class Adapter:
    """One LoRA adapter, opened.

    Attributes:
        folder: where it is.
        entries: its settings that are switched on.
        file: its tensors.
        pairs: by module, the names of its matrices, by the letters "A" and "B".
        whole: the names of the tensors of modules that the adapter holds whole, and of tables with
            added tokens.
        magnitudes: by module, the name of DoRA's magnitude vector.
        base_weights: the names of weights of the base that the adapter holds unchanged.
        foreign: the names of all other tensors, and of settings that belong to them.
    """

    folder: Path
    entries: Mapping[str, Any]
    file: Folder
    pairs: Mapping[str, Mapping[str, str]]
    whole: tuple[str, ...]
    magnitudes: Mapping[str, str]
    base_weights: tuple[str, ...]
    foreign: tuple[str, ...]

    def row_scales(self, module: str, base: Tensor) -> Tensor:
        """D of a module, ``[O, 1]``: DoRA multiplies the rows of W_0 + ΔW by it. Ones without DoRA.

        Args:
            base: W_0.
        """
        if module not in self.magnitudes:
            return torch.ones(len(base), 1, dtype=torch.float64)
        left, right = self.product(module)
        magnitude = self.tensor(self.magnitudes[module]).double().reshape(-1, 1)
        return magnitude / (base + left @ right).norm(dim=1, keepdim=True)

    def shape_of(self, module: str) -> tuple[int, int]:
        """The shape ``[O, I]`` of the product of a module, by the shapes of B and A."""
        pair = self.pairs[module]
        return self.file.specs[pair["B"]].shape[0], self.file.specs[pair["A"]].shape[-1]

    def product(self, module: str) -> tuple[Tensor, Tensor]:
        """s B ``[O, r]`` and A ``[r, I]`` of a module, in float64.

        Raises:
            ModelError: they are no matrices of the adapter's rank, or hold NaN or inf.
        """
        pair = self.pairs[module]
        rank, scale = scaling_of(self.entries, module, str(self.folder))
        left = self.tensor(pair["B"]).double()
        right = self.tensor(pair["A"]).double()
        are_matrices = left.ndim == 2 and right.ndim == 2
        if not are_matrices or left.shape[1] != rank or right.shape[0] != rank:
            raise ModelError(
                f"{module!r} of {str(self.folder)!r} is no pair of matrices of rank {rank}: merge "
                "it into a model"
            )
        return scale * left, right

    def tensor(self, name: str) -> Tensor:
        """A tensor of the adapter; :class:`ModelError` where it holds NaN or inf."""
        tensor = self.file.tensor(name)
        if not bool(tensor.isfinite().all()):
            raise ModelError(
                f"{name!r} of {str(self.folder)!r} holds NaN or inf: the training diverged, or the "
                "file is damaged"
            )
        return tensor


def open_adapter(place: str | os.PathLike[str]) -> Adapter:
    """An adapter whose tensors are pairs of matrices, their magnitudes and whole modules.

    Raises:
        InputError: no adapter is there.
        ModelError: the adapter is more than products of matrices, or lacks one of a pair.
        StorageError: a file is damaged.
    """
    adapter = read_adapter(place)
    folder = adapter.folder
    read_entries(folder)
    if adapter.foreign:
        raise ModelError(
            f"{str(folder)!r} has {some(adapter.foreign)}, which is no product of two matrices: "
            "merge it into a model (blr.merge with its base)"
        )
    incomplete = [module for module, pair in adapter.pairs.items() if len(pair) < 2]
    if incomplete:
        raise ModelError(f"{str(folder)!r} lacks A or B of {some(incomplete)}: save it again")
    return adapter


def read_adapter(place: str | os.PathLike[str]) -> Adapter:
    """An adapter of any kind.

    Raises:
        InputError: no adapter is there.
        StorageError: a file is damaged.
    """
    folder = Path(place).expanduser()
    if not is_adapter(folder):
        raise InputError(f"{str(place)!r} is no PEFT adapter: it has no {CONFIG}")
    entries = switched_on(folder)
    file = Folder.open(folder, stem="adapter_model")
    saved_modules = entries.get("modules_to_save") or ()
    pairs: dict[str, dict[str, str]] = {}
    magnitudes: dict[str, str] = {}
    whole = []
    base_weights = []
    foreign = _foreign_settings(entries)
    for name in file.specs:
        match = PAIR.fullmatch(name)
        if match is not None:
            module = match["module"].removeprefix(PREFIX)
            pairs.setdefault(module, {})[match["letter"]] = name
        elif name.endswith(MAGNITUDE):
            module = name.removeprefix(PREFIX).removesuffix(MAGNITUDE)
            magnitudes[module] = name
        elif _is_of_module(name, saved_modules):
            whole.append(name)
        elif name.endswith(BASE_WEIGHT):
            base_weights.append(name)
        elif _is_table(name):
            whole.append(name)
        else:
            foreign.append(name)
    return Adapter(
        folder,
        entries,
        file,
        pairs,
        whole=tuple(whole),
        magnitudes=magnitudes,
        base_weights=tuple(base_weights),
        foreign=tuple(foreign),
    )


def _foreign_settings(entries: Mapping[str, Any]) -> list[str]:
    """The settings, in words, that make an adapter more than products of matrices."""
    foreign = sorted(entries.keys() - SETTINGS_OF_PRODUCTS)
    if entries.get("peft_type") != "LORA":
        foreign.append(f"peft_type {entries.get('peft_type')}")
    if entries.get("bias") not in (None, "none"):
        foreign.append("bias")
    return foreign


def _is_table(name: str) -> bool:
    """Whether this is the whole table or head, which PEFT saves where tokens were added."""
    return name.endswith(".weight") and "lora" not in name and module_word(name) in TOKEN_TABLES


def _is_of_module(name: str, modules: Sequence[str]) -> bool:
    """Whether a tensor belongs to one of these modules."""
    parts = name.split(".")[:-1]
    return any(module in parts for module in modules)


def copy_adapter(adapter: Adapter, target: Path) -> None:
    """Write the same adapter to another place.

    Raises:
        ModelError: a tensor holds NaN or inf.
    """
    for name in adapter.file.specs:
        adapter.tensor(name)  # which checks it
    with drafted(target) as draft:
        draft.mkdir()
        for file in (CONFIG, TENSORS):
            shutil.copyfile(adapter.folder / file, draft / file)


def write_adapter(
    target: Path,
    first: Adapter,
    tensors: Mapping[str, Tensor],
    ranks: Mapping[str, int],
    *,
    use_dora: bool,
) -> None:
    """Write an adapter as PEFT reads it.

    Args:
        first: the adapter whose shared settings are taken over.
        tensors: by their names in the file.
        ranks: by module. The scaling of every module becomes 1.
        use_dora: whether there are magnitude vectors.
    """
    first_settings = json.loads((first.folder / CONFIG).read_text(encoding="utf-8"))
    settings = {key: value for key, value in first_settings.items() if key in SHARED_SETTINGS}
    rank = max(ranks.values(), default=1)
    smaller_ranks = {f"^{module}": r for module, r in ranks.items() if r != rank}
    settings |= {
        "r": rank,
        "lora_alpha": rank,
        "use_rslora": False,
        "use_dora": use_dora,
        "target_modules": sorted(ranks),
        "rank_pattern": smaller_ranks,
        "alpha_pattern": smaller_ranks,
        "init_lora_weights": True,
    }
    with drafted(target) as draft:
        draft.mkdir()
        save_file(dict(tensors), draft / TENSORS, metadata={"format": "pt"})
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (draft / CONFIG).write_text(f"{text}\n", encoding="utf-8")
