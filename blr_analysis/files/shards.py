"""The folder layout of a stored posterior: shards, their index, and the record beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from blr_analysis.checks import some
from blr_analysis.errors import StorageError
from blr_analysis.files.records import AGAIN, decode, decode_record, encode

SHARD_KEY = "blr_analysis.shard"
INDEX_FILE = "precision.safetensors.index.json"
CONFIG_FILE = "precision_config.json"
MIXED = "The files are from different saves: save the posterior again."


def write_folder(
    folder: Path, tensors: Mapping[str, Tensor], record: dict[str, Any], max_shard_bytes: int
) -> None:
    """Fill an empty ``folder``: every shard, then the index, then the record."""
    shards = split(tensors, max_shard_bytes)
    weight_map = {}
    for k, names in enumerate(shards, start=1):
        file = f"precision-{k:05d}-of-{len(shards):05d}.safetensors"
        metadata = {"format": "pt", SHARD_KEY: f"{k} of {len(shards)}"}
        save_tensors({name: tensors[name] for name in names}, folder / file, metadata)
        weight_map |= dict.fromkeys(names, file)
    index = {
        "metadata": {
            "total_size": sum(tensor.nbytes for tensor in tensors.values()),
            "tensors": {name: _describe(tensor) for name, tensor in tensors.items()},
        },
        "weight_map": weight_map,
    }
    for name, document in ((INDEX_FILE, index), (CONFIG_FILE, record)):
        (folder / name).write_text(encode(document, indent=2) + "\n", encoding="utf-8")


def read_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What :func:`write_folder` wrote; refused unless index, shards and shapes agree."""
    record = read_config(folder)
    weight_map, shapes = _index(folder / INDEX_FILE)
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, []).append(name)
    missing = [file for file in by_file if not (folder / file).is_file()]
    if missing:
        raise StorageError(
            f"the index of {str(folder)!r} names shards that are not there: {some(missing)}. "
            "Copy the whole folder, or save the posterior again."
        )
    tensors = {}
    for file, names in by_file.items():
        tensors |= _read_shard(folder / file, names, shapes)
    return {name: tensors[name] for name in weight_map}, record


def read_config(folder: Path) -> dict[str, Any]:
    """The record of a folder."""
    return decode_record(_text(folder / CONFIG_FILE), folder / CONFIG_FILE)


def split(tensors: Mapping[str, Tensor], max_shard_bytes: int) -> list[list[str]]:
    """Names, in order, in runs of at most ``max_shard_bytes`` (a larger tensor stands alone)."""
    shards: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= tensor.nbytes
    return shards


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """One safetensors file; tensors that share memory or have holes are copied first."""
    seen: set[int] = set()
    ready = {}
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().resolve_neg().contiguous()
        storage = own.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != own.nbytes:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        ready[name] = own
    path.touch()
    mode = path.stat().st_mode  # what the user's umask gives; safetensors makes files private
    save_file(ready, str(path), metadata=metadata)
    path.chmod(mode)


def _read_shard(path: Path, names: list[str], shapes: dict[str, Any]) -> dict[str, Tensor]:
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            stored = set(file.keys())
            if stored != set(names):
                raise StorageError(
                    f"shard {str(path)!r} and the index disagree: only the index names "
                    f"{some(sorted(set(names) - stored))}; only the shard holds "
                    f"{some(sorted(stored - set(names)))}. {MIXED}"
                )
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise StorageError(
            f"shard {str(path)!r} is truncated or is no safetensors file ({error}). {AGAIN}"
        ) from error
    for name, tensor in tensors.items():
        if _describe(tensor) != shapes[name]:
            raise StorageError(
                f"tensor {name!r} of {str(path)!r} is {_describe(tensor)}, but the index says "
                f"{shapes[name]}. {MIXED}"
            )
    return tensors


def _index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    index = decode(_text(path), path)
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    shapes = metadata.get("tensors") if isinstance(metadata, dict) else None
    if not isinstance(weight_map, dict) or not isinstance(shapes, dict):
        raise StorageError(
            f"{str(path)!r} is no index of ours: expected 'weight_map' and 'metadata' → "
            f"'tensors'. {AGAIN}"
        )
    if set(weight_map) != set(shapes):
        odd = sorted(set(weight_map) ^ set(shapes))
        raise StorageError(f"{str(path)!r} places or describes only half of {some(odd)}. {AGAIN}")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise StorageError(f"{str(path)!r} names a shard outside its folder: {file!r}.")
    return weight_map, shapes


def _text(path: Path) -> str:
    if not path.is_file():
        raise StorageError(
            f"{str(path.parent)!r} holds no {path.name}: expected a folder that Posterior.save "
            "wrote."
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StorageError(f"{str(path)!r} is no text in UTF-8 ({error}). {AGAIN}") from error


def _describe(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
