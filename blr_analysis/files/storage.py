"""A posterior on disk: named tensors and one record, as ``.safetensors`` and never as pickle.

Two layouts, chosen by the path:

* a path that ends in ``.safetensors`` is one file, whose header metadata holds the record as
  JSON under the key ``blr_analysis``;
* any other path is a folder: shards ``precision-0000k-of-0000n.safetensors``, the index
  ``precision.safetensors.index.json`` (``weight_map`` and ``metadata`` as Hugging Face writes
  them) and the record, ``precision_config.json``.

Checksums of all tensors and of itself stand in the header of each file. The record of a folder
holds those of its files, and its own (:mod:`~blr_analysis.files.checksums`). They are compared when
tensors are read whole. Both layouts are written beside the target and renamed into place. What a
long sweep has summed so far lies there too, as :class:`Unfinished`.

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
from typing import Any

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
FIELDS = (  # what every precision beside a model says of itself; None where it does not apply
    *("kind", "definition", "n_data", "optimizer", "batch_size", "beta2", "step"),
    *("bias_corrected", "tied", "frozen", "model_sha256", "sample_sha256"),
)
STRUCTURES = ("diag", "gram", "kron")
SAMPLE = 1024  # numbers of every tensor that sample_sha256 looks at
STEM = "precision"
CONFIG_FILE = "precision_config.json"
OURS = (f"{STEM}-*.safetensors", f"{STEM}.safetensors.index.json", CONFIG_FILE)
RECORD_KEY = "blr_analysis"
EVERY = 60.0  # seconds
SHARE = 20  # and no sooner than so many times what the last writing took


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
            Of ``DTensor``s every process calls this; the first one gathers and writes them, one at
            a time.
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
    target, single = _target(path)
    given = Loaded("tensors", tensors).held
    sayable = {n for n in given if n.encode(errors="replace").decode() == n} - {METADATA}
    if odd := [n for n, t in given.items() if t.is_complex() or n not in sayable]:
        raise InputError(f"{some(odd)} cannot be stored: complex, or no name in such a file.")
    sharded = any(map(is_sharded, tensors.values()))
    leads = not sharded or dist.get_rank() == 0
    dense = {}
    for name, tensor in given.items():
        full = whole(tensor)
        if leads:
            dense[name] = full.cpu().resolve_neg().contiguous()
    if leads:
        document = {**record, **FORMAT}
        with told_as(InputError, "the record is no JSON", "use plain, finite values"):
            text = json.dumps(document, indent=2, allow_nan=False)
        with drafted(target) as draft:
            _check_free(target, single)
            if single:
                shards.save_file(dense, draft, {"format": "pt", RECORD_KEY: text})
            else:
                draft.mkdir()
                files = shards.save_folder(dense, draft, max_shard_bytes, stem=STEM)
                text = record_text(document, files)
                (draft / CONFIG_FILE).write_text(text, encoding="utf-8")
    if sharded:
        dist.barrier()


def check_target(path: str | os.PathLike[str], *, force: bool) -> Path:
    """Where :func:`write` will put ``path``, before any work.

    Raises:
        StorageError: something is there and ``force`` is not given, or could not be replaced.
    """
    target, single = _target(path)
    if target.exists() and not force:
        raise StorageError(
            f"{str(target)!r} is already there: name another place, or pass force=True (--force)."
        )
    _check_free(target, single)
    return target


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors (on the CPU) and the record of what :func:`write` wrote to ``path``.

    Raises:
        StorageError: nothing there, a pickle, a foreign format or version, a truncated or damaged
            file, or a folder whose index and shards do not agree.
    """
    record = read_record(path)
    target, single = _target(path)
    source = Folder.open(target, stem=STEM)
    if not single:
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
        what = "holds no record of a posterior" if target.exists() else "is not there"
        raise StorageError(
            f"nothing is stored at {str(target)!r}, which {what}: name what Posterior.save wrote."
        )
    return record


def find_record(path: Path) -> dict[str, Any] | None:
    """The record of stored tensors, or None for those that another program wrote.

    Raises:
        StorageError: a file that is damaged, or of another format or version.
    """
    config = path / CONFIG_FILE
    if config.is_file():
        record = read_json(config)
    else:
        file = path / f"{STEM}.safetensors" if path.is_dir() else path
        held = read_header(file).metadata if file.is_file() else {}
        if RECORD_KEY not in held:
            return None
        record = parse_json(held[RECORD_KEY], path)
    if odd := [key for key, known in FORMAT.items() if record.get(key) != known]:
        raise StorageError(
            f"{str(path)!r} is of {odd[0]} {record.get(odd[0])!r}: save it again with this release."
        )
    return plain_record(record)


def check_files(config: Path) -> None:
    """Compare the files beside a record with the checksums in it, but for their tensors, which
    their own headers know.

    Raises:
        StorageError: one is missing, or another than the record says.
    """
    record = read_json(config) if config.is_file() else {}
    for name, checksum in record.get(FILES, {}).items():
        check_file_beside(config.parent / name, checksum)


def check_file_beside(file: Path, checksum: str) -> None:
    """Raise :class:`StorageError` where a file is missing, or not the one of this checksum."""
    if not file.is_file():
        raise StorageError(f"{str(file.parent)!r} lacks {file.name!r}: copy the whole folder.")
    if file_checksum(file) != checksum:
        raise StorageError(damaged(file))


def file_checksum(path: Path) -> str:
    """What a record says of a file: its header's checksum, which holds those of the tensors; of
    any other file, that of its bytes."""
    if path.suffix == ".safetensors":
        return read_header(path).checksum
    with reading(path):
        return checksum_of_file(path)


def _target(path: str | os.PathLike[str]) -> tuple[Path, bool]:
    """Where tensors are stored, and whether as one file."""
    suffix = Path(path).suffix
    if suffix.lower() in PICKLES:
        raise StorageError(
            f"{str(path)!r} has the name of a pickle, which can run code: name a .safetensors file "
            "or a folder (of an optimizer: Posterior.from_checkpoint)."
        )
    return Path(os.path.realpath(Path(path).expanduser())), suffix == ".safetensors"


def _check_free(target: Path, single: bool) -> None:
    """Only a file gives way to a file, and only a folder of ours to a folder."""
    if single:
        check_file(target)
    elif target.exists() and not target.is_dir():
        raise StorageError(f"{str(target)!r} is a file: name a folder, or a .safetensors file.")
    elif foreign := {*target.glob("*")}.difference(*map(target.glob, OURS)):
        raise StorageError(
            f"{str(target)!r} holds other files: {some(sorted(p.name for p in foreign))}."
        )


def checked_record(record: dict[str, Any], where: str) -> dict[str, Any]:
    """The record of precisions for merging, complete, δ as floats.

    Raises:
        StorageError: another structure, no names, no ``n_data``, a δ that is none or that has an
            entry per weight.
    """
    names: Any = record.get("parameters")
    prior: Any = record.get("prior_precision")
    n, tied = record.get("n_data"), record.get("tied") or {}
    each = prior if isinstance(prior, dict) else {"": prior}
    fits = {
        "structure": record.get("structure") in STRUCTURES,
        "parameters": bool(names) and _is_names(names),
        "tied": isinstance(tied, dict) and all(map(_is_names, tied.values())),
        "frozen": _is_names(record.get("frozen") or []),
        "n_data": type(n) is int and n >= 1,
        "prior_precision": all(
            type(delta) in (int, float) and 0 <= delta < math.inf for delta in each.values()
        ),
    }
    fits["prior_precision"] &= each is not prior or (fits["parameters"] and {*each} == {*names})
    if odd := [key for key, fitting in fits.items() if not fitting]:
        raise StorageError(
            f"the record of {where!r} has {odd[0]}={record.get(odd[0])!r:.80}: save it again."
        )
    floats = {key: float(delta) for key, delta in each.items()}
    return {**record, "prior_precision": floats if each is prior else floats[""]}


def _is_names(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


@dataclass
class Unfinished:
    """Sums and where they stopped: ``TARGET.unfinished``, one safetensors file.

    They are added to in the same order again, so that a run that goes on ends with the same bits.

    Attributes:
        path: of the file.
        key: of all that the sums depend on; a file with another key is not read.
        done: passes that the sums hold.
    """

    path: Path
    key: str
    done: int = 0
    _due: float = field(default_factory=lambda: time.monotonic() + EVERY)

    def take_up(self, sums: Mapping[str, Tensor]) -> None:
        """Put what is in the file into these sums; they stay as they are where there is none."""
        try:
            source = Folder.open(self.path)
            if source.metadata.get("key") != self.key or source.specs != specs_of(sums):
                return
            for name in sums:
                source.tensor(name)  # none is copied before all are known to be whole
        except StorageError:  # none, or damaged
            return
        for name, total in sums.items():
            total.copy_(source.tensor(name))
        self.done = int(source.metadata["passes"])

    def follow(self, sums: Mapping[str, Tensor]) -> None:
        """After each pass: the first takes up what is there, the others write the sums if the last
        time is a while ago. Passes whose numbers, from 0, are below ``done`` are to be left out.
        """
        self.done, started = self.done + 1, time.monotonic()
        if self.done == 1:
            self.take_up(sums)
        elif started >= self._due:
            with drafted(self.path) as draft:
                shards.save_file(sums, draft, {"key": self.key, "passes": str(self.done)})
            now = time.monotonic()
            self._due = now + max(EVERY, SHARE * (now - started))

    def remove(self) -> None:
        """Once the target is whole."""
        self.path.unlink(missing_ok=True)
