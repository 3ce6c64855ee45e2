"""A posterior on disk: named tensors and one record, as ``.safetensors`` and never as pickle.

Two layouts, chosen by the path:

* a path that ends in ``.safetensors`` is one file, whose header metadata holds the record as
  JSON under the key ``blr_analysis``;
* any other path is a folder: shards ``precision-0000k-of-0000n.safetensors``, the index
  ``precision.safetensors.index.json`` (``weight_map`` and ``metadata`` as Hugging Face writes
  them, with every tensor's dtype and shape) and the record, ``precision_config.json``.

Both are written beside the target and renamed into place.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/p.safetensors", {"w": torch.ones(2)}, {"kind": "ivon"})
    ...     tensors, record = read(f"{folder}/p.safetensors")
    >>> tensors["w"], record["format"], record["version"], record["kind"]
    (tensor([1., 1.]), 'blr_analysis.precision', 1, 'ivon')
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from blr_analysis.checks import some
from blr_analysis.errors import InputError, StorageError
from blr_analysis.files.placing import beside, place
from blr_analysis.files.records import AGAIN, FORMAT, VERSION, decode_record, encode
from blr_analysis.files.shards import (
    CONFIG_FILE,
    INDEX_FILE,
    SHARD_KEY,
    read_config,
    read_folder,
    save_tensors,
    write_folder,
)

RECORD_KEY = "blr_analysis"
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")


def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any],
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write ``tensors`` and ``record`` to one file or to a folder of shards.

    Names, shapes and dtypes are kept, values to the bit; memory layout and device are not.
    Missing parent folders are made. An existing file, or a folder that holds nothing else than
    what this function wrote, is replaced as a whole. A run that is killed leaves what was there
    before or (in the instant between the two renames of a folder) nothing; never a half.

    Args:
        path: a file name that ends in ``.safetensors``, or a folder.
        tensors: at least one dense real tensor by name; tied tensors are passed once.
        record: what the tensors are, JSON-able; ``format`` and ``version`` are added here.
        max_shard_bytes: a folder's shards hold at most this many bytes of tensors each; a
            larger tensor has a shard of its own. One file is never split.

    Raises:
        InputError: a tensor, its name, the record or ``max_shard_bytes`` cannot be stored.
        StorageError: the path names a pickle, holds foreign files, or cannot be written.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tensors = {"w": torch.ones(4), "b": torch.ones(2)}
        ...     write(f"{folder}/p", tensors, {"n_data": 10}, max_shard_bytes=16)
        ...     print(*sorted(os.listdir(f"{folder}/p")), sep="\\n")
        precision-00001-of-00002.safetensors
        precision-00002-of-00002.safetensors
        precision.safetensors.index.json
        precision_config.json
    """
    target = _target(path)
    single = Path(path).suffix == ".safetensors"
    document = {**record, "format": FORMAT, "version": VERSION}
    text = encode(document)
    _check_tensors(tensors)
    if isinstance(max_shard_bytes, bool) or max_shard_bytes < 1:
        raise InputError(f"max_shard_bytes must be a positive number, not {max_shard_bytes!r}.")
    try:
        _check_free(target, single)
        with beside(target) as folder:
            draft = folder / "new"
            if single:
                save_tensors(tensors, draft, {"format": "pt", RECORD_KEY: text})
            else:
                draft.mkdir()
                write_folder(draft, tensors, document, max_shard_bytes)
            place(draft, target)
    except StorageError:
        raise
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"cannot write {str(target)!r}: {error}. What was there before is unchanged; name a "
            "place that can be written and has room."
        ) from error


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors (on the CPU) and the record of what :func:`write` wrote to ``path``.

    Raises:
        StorageError: nothing there, a pickle, a foreign format or version, a truncated file, or
            a folder whose index, shards and shapes do not agree.
    """
    target = _target(path)
    try:
        if target.is_dir():
            tensors, record = read_folder(target)
        elif target.exists():
            tensors, record = _read_file(target)
        else:
            raise StorageError(
                f"nothing is stored at {str(target)!r}: expected a .safetensors file or a folder "
                f"with {CONFIG_FILE}."
            )
    except SafetensorError as error:
        raise StorageError(
            f"{str(target)!r} is truncated or is no safetensors file ({error}). {AGAIN}"
        ) from error
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot read {str(target)!r}: {error}.") from error
    return tensors, record


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a file or folder that :func:`write` wrote; nothing happens where there is none.

    Raises:
        StorageError: what is there was not written by :func:`write`, or cannot be removed.
    """
    target = _target(path)
    if not target.exists():
        return
    read_record(target)
    if target.is_dir():
        _check_free(target, single=False)
    try:
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    except OSError as error:
        raise StorageError(f"cannot remove {str(target)!r}: {error}.") from error


def read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The record alone; no tensor is read.

    Raises:
        StorageError: as :func:`read`.
    """
    target = _target(path)
    if not target.exists():
        raise StorageError(f"nothing is stored at {str(target)!r}.")
    try:
        if target.is_dir():
            return read_config(target)
        with safe_open(str(target), framework="pt", device="cpu") as file:
            return _record_in(file.metadata() or {}, target)
    except SafetensorError as error:
        raise StorageError(
            f"{str(target)!r} is truncated or is no safetensors file ({error}). {AGAIN}"
        ) from error
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot read {str(target)!r}: {error}.") from error


def _read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(str(path), framework="pt", device="cpu") as file:
        record = _record_in(file.metadata() or {}, path)
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}, record


def _record_in(metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    if SHARD_KEY in metadata:
        raise StorageError(
            f"{str(path)!r} is shard {metadata[SHARD_KEY]} of a folder: name the folder, "
            f"{str(path.parent)!r}."
        )
    if RECORD_KEY not in metadata:
        raise StorageError(
            f"{str(path)!r} is a safetensors file without a {RECORD_KEY!r} record (the "
            "weights of a model, perhaps): expected a file that Posterior.save wrote."
        )
    return decode_record(metadata[RECORD_KEY], path)


def _target(path: str | os.PathLike[str]) -> Path:
    if Path(path).suffix.lower() in PICKLES:
        raise StorageError(
            f"{str(path)!r} has the name of a pickle ({Path(path).suffix}). A pickle can run any "
            "code when it is read, so posteriors are never kept in one: name a .safetensors file "
            "or a folder. (Saved optimizers are read by Posterior.from_checkpoint.)"
        )
    return Path(os.path.realpath(Path(path).expanduser()))


def _check_free(target: Path, single: bool) -> None:
    """Only a file gives way to a file, and only a folder of ours to a folder."""
    if single:
        if target.is_dir():
            raise StorageError(f"{str(target)!r} is a folder, but its name asks for one file.")
    elif target.is_dir():
        foreign = sorted(p.name for p in target.iterdir() if not _is_ours(p))
        if foreign:
            raise StorageError(
                f"the folder {str(target)!r} holds other files, which replacing it would remove: "
                f"{some(foreign)}. Name a new folder; one inside it will do."
            )
    elif target.exists():
        raise StorageError(
            f"{str(target)!r} is a file: name a folder, or a file that ends in .safetensors."
        )


def _is_ours(path: Path) -> bool:
    shard = path.name.startswith("precision-") and path.suffix == ".safetensors"
    return path.is_file() and (shard or path.name in (INDEX_FILE, CONFIG_FILE))


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    if not tensors:
        raise InputError("there are no tensors to write.")
    for name, tensor in tensors.items():
        if not _can_name(name):
            raise InputError(f"{name!r} cannot name a tensor in a safetensors file.")
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name!r} is no tensor but a {type(tensor).__name__}.")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_complex():
            raise InputError(
                f"{name!r} ({tensor.dtype}, {tensor.layout}, on {tensor.device}) cannot be "
                "stored: expected a dense, real tensor that holds values."
            )


def _can_name(name: object) -> bool:
    if not isinstance(name, str) or name == "__metadata__":
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
