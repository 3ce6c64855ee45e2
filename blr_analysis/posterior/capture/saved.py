"""Finding and reading the files of a training run: the optimizer's state and the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import some
from blr_analysis.errors import OptimizerError, StorageError
from blr_analysis.files import Folder
from blr_analysis.files.folder import read_index
from blr_analysis.posterior.capture.readers import is_state

EXPORT = (
    "Its .metadata is a pickle, which can run code when it is read, so it is not read here. Export "
    "the state safely where the training runs: on every process call "
    "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer, options="
    "StateDictOptions(full_state_dict=True, cpu_offload=True)), then on the first one "
    "torch.save({'model': model_state, 'optimizer': optimizer_state}, 'state.pt'), and name that "
    "file. (torch.distributed.checkpoint.format_utils.dcp_to_torch_save converts this folder too, "
    "but runs the pickle: only where you trust its source.)"
)
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
LAYOUTS = {
    # A checkpoint in one file, as (weights, optimizer); Lightning's first.
    "lightning": ("state_dict", "optimizer_states"),
    "pair": ("model_state_dict", "optimizer_state_dict"),
    "short pair": ("model", "optimizer"),
}


@dataclass(frozen=True)
class Saved:
    """A training run's saved optimizer, and its weights where they were saved with it."""

    source: str
    optimizer: Mapping[str, Any]
    weights: Mapping[str, Tensor] | None


def load_saved(path: Path) -> Saved:
    """What a Trainer folder, a Lightning checkpoint or a saved optimizer state holds.

    Raises:
        StorageError: files are missing, truncated, or hold more than tensors and containers.
        OptimizerError: several optimizers in one file.
    """
    if path.is_dir():
        return _load_folder(path)
    if not path.exists():
        raise StorageError(f"nothing is stored at {str(path)!r}.")
    if path.name == ".metadata" or path.suffix == ".distcp":
        raise StorageError(f"{str(path)!r} is part of a torch.distributed.checkpoint. {EXPORT}")
    content = _torch_load(path)
    for source, (weights, optimizer) in LAYOUTS.items():
        if isinstance(content, Mapping) and weights in content and optimizer in content:
            states = content[optimizer]
            if isinstance(states, list | tuple):
                if len(states) != 1:
                    raise OptimizerError(
                        f"{str(path)!r} holds {len(states)} optimizers: save the one that trained "
                        "the model alone"
                    )
                states = states[0]
            return Saved(source, _checked(states, path), _tensors(content[weights], path))
    return Saved("optimizer state", _checked(content, path), None)


def _load_folder(folder: Path) -> Saved:
    file = next((folder / name for name in OPTIMIZERS if (folder / name).is_file()), None)
    distributed = [p.parent for p in (*folder.glob(".metadata"), *folder.glob("*/.metadata"))]
    if file is None and distributed:
        raise StorageError(f"{str(distributed[0])!r} is a torch.distributed.checkpoint. {EXPORT}")
    if file is None:
        held = sorted(p.name for p in folder.iterdir())
        raise StorageError(
            f"the folder {str(folder)!r} holds no {' or '.join(OPTIMIZERS)} but {some(held, 8)}: "
            "name a checkpoint with its optimizer (export DeepSpeed's and FSDP's by torch.save)"
        )
    return Saved("trainer", _checked(_torch_load(file), file), _load_weights(folder))


def _load_weights(folder: Path) -> dict[str, Tensor]:
    if any(folder.glob(f"{SAFE}*")):
        return Folder.open(folder).tensors()
    index = folder / f"{PICKLED}.index.json"
    files = list(read_index(index)) if index.is_file() else [PICKLED]
    if not (folder / files[0]).is_file():
        raise StorageError(
            f"the folder {str(folder)!r} holds no weights ({SAFE} or {PICKLED}): name the "
            "optimizer's file"
        )
    parts = [_tensors(_torch_load(folder / file), folder / file) for file in files]
    return {name: value for part in parts for name, value in part.items()}


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The state dict that ``torch.save`` wrote.

    Raises:
        StorageError: it is not there, or holds more than tensors by name.
    """
    return _tensors(_torch_load(path), path)


def _torch_load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the bytes lead to
        reason = str(error).strip().split("\n")[0][:300]
        raise StorageError(
            f"{str(path)!r} cannot be read with weights_only=True ({reason}): it is truncated, "
            "or holds more than tensors."
        ) from error


def _tensors(weights: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(weights, Mapping):
        raise StorageError(
            f"the weights in {str(path)!r} are no state_dict but a {type(weights).__name__}."
        )
    return {str(name): value for name, value in weights.items() if isinstance(value, Tensor)}


def _checked(optimizer: Any, path: Path) -> Mapping[str, Any]:
    whole = (
        isinstance(optimizer, Mapping)
        and isinstance(optimizer.get("state"), Mapping)
        and isinstance(optimizer.get("param_groups"), list)
        and len(optimizer["param_groups"]) > 0
        and all(
            is_state(g) and isinstance(g.get("params"), list) for g in optimizer["param_groups"]
        )
    )
    if not whole:
        held = sorted(map(str, optimizer)) if isinstance(optimizer, Mapping) else type(optimizer)
        raise StorageError(
            f"{str(path)!r} holds no optimizer's state_dict ('state' and 'param_groups'); it "
            f"holds {held}."
        )
    return optimizer
