"""A posterior on disk: named tensors and one record, as ``.safetensors`` and never as pickle.

Two layouts, chosen by the path:

* a path that ends in ``.safetensors`` is one file, whose header metadata holds the record as
  JSON under the key ``blr_analysis``;
* any other path is a folder: shards ``precision-0000k-of-0000n.safetensors``, the index
  ``precision.safetensors.index.json`` (``weight_map`` and ``metadata`` as Hugging Face writes
  them) and the record, ``precision_config.json``.

The header of each file holds the checksums of all its tensors and of itself. The record of a folder
holds the checksums of its files and its own (:mod:`~blr_analysis.files.checksums`). They are
compared when tensors are read whole. Both layouts are written beside the target and renamed into
place. The sums of an unfinished sweep are stored there too, as :class:`Unfinished`.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/p.safetensors", {"w": torch.ones(2)}, {"kind": "ivon"})
    ...     tensors, record = read(f"{folder}/p.safetensors")
    >>> tensors["w"], record
    (tensor([1., 1.]), {'kind': 'ivon', 'format': 'blr_analysis.precision', 'version': 1})
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from blr_analysis.checks import some
from blr_analysis.errors import InputError, StorageError, told_as
from blr_analysis.files import shards
from blr_analysis.files.checksums import checksum_of_file
from blr_analysis.files.folder import PICKLES, Folder
from blr_analysis.files.headers import (
    FILES,
    METADATA,
    damaged,
    parse_json,
    plain_record,
    read_header,
    read_json,
    reading,
    record_text,
)
from blr_analysis.files.placing import check_file, drafted
from blr_analysis.files.source import Loaded, specs_of
from blr_analysis.ranks import is_sharded, whole

FORMAT = {"format": "blr_analysis.precision", "version": 1}
FIELDS = (  # of the record of every precision beside a model; an unknown value is None
    "kind",
    "definition",
    "n_data",
    "optimizer",
    "batch_size",
    "beta2",
    "step",
    "bias_corrected",
    "tied",
    "frozen",
    "model_sha256",
    "sample_sha256",
)
STRUCTURES = ("diag", "gram", "kron")
SAMPLE = 1024  # numbers of every tensor that sample_sha256 reads
STEM = "precision"
CONFIG_FILE = "precision_config.json"
OWN_FILES = (f"{STEM}-*.safetensors", f"{STEM}.safetensors.index.json", CONFIG_FILE)
RECORD_KEY = "blr_analysis"
MIN_INTERVAL = 60.0  # seconds between two writings of unfinished sums
MIN_WRITINGS = 20  # the interval is at least as long as this many writings take


def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any],
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write ``tensors`` and ``record`` to one file or to a folder of shards.

    Names, shapes, dtypes and the bits of values are kept; memory layout and device are not. Missing
    parent folders are made. An existing file, or a folder with nothing but files of this function,
    is replaced as a whole. A run that is killed leaves the old files or, between the two renames of
    a folder, no files; never a half.

    Of ``DTensor``s every process calls this. The first process gathers and writes them, one at a
    time.

    Args:
        path: a file name that ends in ``.safetensors``, or a folder.
        tensors: at least one dense real tensor by name; tied tensors are passed once.
        record: facts about the tensors that JSON can hold; ``format`` and ``version`` are added
            here.
        max_shard_bytes: of tensors in each shard of a folder; a larger tensor has a shard of its
            own. One file is never split.

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
    target, is_file = _target(path)
    detached = Loaded("tensors", tensors).detached
    _check_storable(detached)
    is_divided = any(map(is_sharded, tensors.values()))
    writes = not is_divided or dist.get_rank() == 0
    dense = {}
    for name, tensor in detached.items():
        full = whole(tensor)  # every process takes part in gathering it
        if writes:
            dense[name] = full.cpu().resolve_neg().contiguous()
    if writes:
        with drafted(target) as draft:
            _check_free(target, is_file)
            _write_draft(draft, is_file, dense, {**record, **FORMAT}, max_shard_bytes)
    if is_divided:
        dist.barrier()


def _check_storable(tensors: Mapping[str, Tensor]) -> None:
    """Raise :class:`InputError` for complex tensors, and names that a header cannot hold."""
    unstorable = [
        name
        for name, tensor in tensors.items()
        if tensor.is_complex() or not _is_storable_name(name)
    ]
    if unstorable:
        raise InputError(
            f"{some(unstorable)} cannot be stored: give real tensors, and names that are valid in "
            "safetensors files."
        )


def _is_storable_name(name: str) -> bool:
    """Whether the header of a safetensors file can hold this name."""
    is_valid_unicode = name.encode(errors="replace").decode() == name
    return name != METADATA and is_valid_unicode


def _write_draft(
    draft: Path,
    is_file: bool,
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any],
    max_shard_bytes: int,
) -> None:
    """Write one file, or a folder with shards, index and record."""
    with told_as(InputError, "the record cannot be written as JSON", "use plain, finite values"):
        text = json.dumps(record, indent=2, allow_nan=False)
    if is_file:
        shards.save_file(tensors, draft, {"format": "pt", RECORD_KEY: text})
        return
    draft.mkdir()
    checksums = shards.save_folder(tensors, draft, max_shard_bytes, stem=STEM, record=CONFIG_FILE)
    (draft / CONFIG_FILE).write_text(record_text(record, checksums), encoding="utf-8")


def check_target(path: str | os.PathLike[str], *, force: bool) -> Path:
    """The place where :func:`write` will write ``path``; for a check before any work.

    Raises:
        StorageError: the place is taken and ``force`` is False, or it cannot be replaced.
    """
    target, is_file = _target(path)
    if target.exists() and not force:
        raise StorageError(
            f"{str(target)!r} is already there: name another place, or pass force=True (--force)."
        )
    _check_free(target, is_file)
    return target


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors (on the CPU) and the record that :func:`write` wrote to ``path``.

    Raises:
        StorageError: an empty place, a pickle, a foreign format or version, a truncated or damaged
            file, or a folder whose index and shards do not agree.
    """
    record = read_record(path)
    target, is_file = _target(path)
    source = Folder.open(target, stem=STEM)
    if not is_file:
        check_files(target / CONFIG_FILE)
    return source.tensors(), record


def read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The record alone; no tensor is read.

    Raises:
        StorageError: as :func:`read`.
    """
    target, _ = _target(path)
    record = find_record(target)
    if record is None:
        reason = "it holds no record of a posterior" if target.exists() else "it does not exist"
        raise StorageError(
            f"nothing is stored at {str(target)!r}: {reason}. Name what Posterior.save wrote."
        )
    return record


def find_record(path: Path) -> dict[str, Any] | None:
    """The record of stored tensors, or None for those that another program wrote.

    Raises:
        StorageError: a file that is damaged, or of another format or version.
    """
    record = _record_beside(path)
    if record is None:
        record = _record_in_header(path)
    if record is None:
        return None
    for key, expected in FORMAT.items():
        if record.get(key) != expected:
            raise StorageError(
                f"{str(path)!r} is a file of {key} {record.get(key)!r}, and this release reads "
                f"{expected!r}: save it again with this release."
            )
    return plain_record(record)


def _record_beside(folder: Path) -> dict[str, Any] | None:
    """The record of a folder; None if it has none."""
    config = folder / CONFIG_FILE
    return read_json(config) if config.is_file() else None


def _record_in_header(path: Path) -> dict[str, Any] | None:
    """The record in the header of one file, or of a folder's only file; None without one."""
    file = path / f"{STEM}.safetensors" if path.is_dir() else path
    if not file.is_file():
        return None
    text = read_header(file).metadata.get(RECORD_KEY)
    return None if text is None else parse_json(text, path)


def check_files(config: Path) -> None:
    """Compare the files beside a record with the checksums in it.

    Tensors are not read here: reading a whole tensor checks it by the header of its file.

    Raises:
        StorageError: a file is missing, or is not the one of the record.
    """
    if not config.is_file():
        return
    for name, checksum in read_json(config).get(FILES, {}).items():
        check_file_beside(config.parent / name, checksum)


def check_file_beside(file: Path, checksum: str) -> None:
    """Raise :class:`StorageError` if a file is missing, or has another checksum."""
    if not file.is_file():
        raise StorageError(f"{str(file.parent)!r} lacks {file.name!r}: copy the whole folder.")
    if file_checksum(file) != checksum:
        raise StorageError(damaged(file))


def file_checksum(path: Path) -> str:
    """The checksum of a file for a record.

    For a safetensors file it is that of the header, which holds the checksums of the tensors. For
    any other file, and a header without a checksum, it is the checksum of all bytes.
    """
    if path.suffix == ".safetensors":
        header_checksum = read_header(path).checksum
        if header_checksum:
            return header_checksum
    with reading(path):
        return checksum_of_file(path)


def _target(path: str | os.PathLike[str]) -> tuple[Path, bool]:
    """The place where tensors are stored, and whether it is one file.

    Raises:
        StorageError: the path has the name of a pickle.
    """
    suffix = Path(path).suffix
    if suffix.lower() in PICKLES:
        raise StorageError(
            f"{str(path)!r} has the name of a pickle, which can run code: name a .safetensors file "
            "or a folder; Posterior.from_checkpoint reads the state of an optimizer."
        )
    target = Path(os.path.realpath(Path(path).expanduser()))
    is_file = suffix == ".safetensors"
    return target, is_file


def _check_free(target: Path, is_file: bool) -> None:
    """Raise :class:`StorageError` unless the target may be replaced.

    A file may replace a file, and a folder may replace a folder of this module.
    """
    if is_file:
        check_file(target)
        return
    if target.exists() and not target.is_dir():
        raise StorageError(f"{str(target)!r} is a file: name a folder, or a .safetensors file.")
    foreign = set(target.glob("*"))
    for pattern in OWN_FILES:
        foreign.difference_update(target.glob(pattern))
    if foreign:
        names = sorted(path.name for path in foreign)
        raise StorageError(f"{str(target)!r} holds other files: {some(names)}.")


def checked_record(record: dict[str, Any], where: str) -> dict[str, Any]:
    """The record of precisions for merging, complete, δ as floats.

    Raises:
        StorageError: another structure, no names, no ``n_data``, a δ that is no number, or a δ with
            an entry for each weight.
    """
    names: Any = record.get("parameters")
    tied = record.get("tied") or {}
    n_data = record.get("n_data")
    prior = record.get("prior_precision")
    has_names = bool(names) and _is_names(names)
    fits = {
        "structure": record.get("structure") in STRUCTURES,
        "parameters": has_names,
        "tied": isinstance(tied, dict) and all(map(_is_names, tied.values())),
        "frozen": _is_names(record.get("frozen") or []),
        "n_data": type(n_data) is int and n_data >= 1,
        "prior_precision": has_names and _is_prior(prior, names),  # "parameters" is refused first
    }
    for key, is_fit in fits.items():
        if not is_fit:
            raise StorageError(
                f"the record of {where!r} has {key}={record.get(key)!r:.80}: save it again."
            )
    if isinstance(prior, dict):
        prior_precision: Any = {name: float(delta) for name, delta in prior.items()}
    else:
        prior_precision = float(cast(float, prior))
    return {**record, "prior_precision": prior_precision}


def _is_names(names: Any) -> bool:
    """Whether this is a list of texts."""
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _is_prior(prior: Any, names: list[str]) -> bool:
    """Whether this is δ: one number, or one for each name."""
    if isinstance(prior, dict):
        return set(prior) == set(names) and all(map(_is_precision, prior.values()))
    return _is_precision(prior)


def _is_precision(delta: Any) -> bool:
    """Whether this is a finite number, 0 or more."""
    return type(delta) in (int, float) and 0 <= delta < math.inf


@dataclass
class Unfinished:
    """Sums of a long sweep and the place where it stopped, in one file ``TARGET.unfinished``.

    A run that goes on adds in the same order as before, so that it ends with the same bits.

    Attributes:
        path: the file.
        key: a digest of all that the sums depend on; a file with another key is not read.
        done: how many passes the sums hold.
    """

    path: Path
    key: str
    done: int = 0
    _due: float = field(default_factory=lambda: time.monotonic() + MIN_INTERVAL)

    def take_up(self, sums: Mapping[str, Tensor]) -> None:
        """Copy the sums in the file into these; without such a file they stay as they are."""
        try:
            source = Folder.open(self.path)
            is_of_this_sweep = source.metadata.get("key") == self.key
            if not is_of_this_sweep or source.specs != specs_of(sums):
                return
            for name in sums:
                source.tensor(name)  # raises if damaged: all are checked before one is copied
        except StorageError:  # there is no file, or it is damaged
            return
        for name, total in sums.items():
            total.copy_(source.tensor(name))
        self.done = int(source.metadata["passes"])

    def follow(self, sums: Mapping[str, Tensor]) -> None:
        """Call this after each pass.

        The first call copies the sums of the file, if there are any. The later calls write the
        sums from time to time. The caller leaves out the passes 0 … ``done`` − 1.
        """
        self.done += 1
        started = time.monotonic()
        if self.done == 1:
            self.take_up(sums)
        elif started >= self._due:
            with drafted(self.path) as draft:
                shards.save_file(sums, draft, {"key": self.key, "passes": str(self.done)})
            now = time.monotonic()
            self._due = now + max(MIN_INTERVAL, MIN_WRITINGS * (now - started))

    def remove(self) -> None:
        """Remove the file; for the end, when the target is written."""
        self.path.unlink(missing_ok=True)
