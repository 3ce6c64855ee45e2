"""A posterior on disk: named tensors and one record, as ``.safetensors`` and never as pickle.

Two layouts, chosen by the path:

* a path that ends in ``.safetensors`` is one file, whose header metadata holds the record as
  JSON under the key ``blr_analysis``;
* any other path is a folder: shards ``precision-0000k-of-0000n.safetensors``, the index
  ``precision.safetensors.index.json`` (``weight_map`` and ``metadata`` as Hugging Face writes
  them) and the record, ``precision_config.json``.

The record holds a checksum of the tensors, their names, dtypes and shapes, which is verified when
they are read whole. Both are written beside the target and renamed into place. What a long sweep
has summed so far lies there too, as :class:`Unfinished`.

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

import torch
import torch.distributed as dist
from torch import Tensor

from blr_analysis.checks import positive_int, some
from blr_analysis.errors import InputError, StorageError
from blr_analysis.files import shards
from blr_analysis.files.folder import PICKLES, Folder
from blr_analysis.files.headers import METADATA, parse_json, read_header, read_json
from blr_analysis.files.placing import check_file, drafted
from blr_analysis.files.shards import shard_name, split, write_index
from blr_analysis.files.source import Loaded, Spec, fingerprint
from blr_analysis.ranks import is_sharded, whole

FORMAT = "blr_analysis.precision"
VERSION = 1
FIELDS = (
    # What every precision beside a model says of itself; None where it does not apply.
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
SAMPLE = 1024  # numbers of every tensor that sample_sha256 looks at
STEM = "precision"
INDEX_FILE = f"{STEM}.safetensors.index.json"
CONFIG_FILE = "precision_config.json"
RECORD_KEY = "blr_analysis"
CHECKSUM = "checksum"
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
    target, single = _target(path), Path(path).suffix == ".safetensors"
    document = {**record, "format": FORMAT, "version": VERSION}
    _check_tensors(tensors)
    positive_int("max_shard_bytes", max_shard_bytes)
    sharded = any(map(is_sharded, tensors.values()))
    leads = not sharded or dist.get_rank() == 0
    held = {}
    for name, tensor in tensors.items():
        full = whole(tensor.detach())
        if leads:
            held[name] = full.cpu().resolve_neg().contiguous()
    if leads:
        document[CHECKSUM] = fingerprint(Loaded("", held), progress=False)
        text = encode(document)
        with drafted(target) as draft:
            _check_free(target, single)
            if single:
                shards.save_file(held, draft, {"format": "pt", RECORD_KEY: text})
            else:
                draft.mkdir()
                _write_folder(draft, held, text, max_shard_bytes)
    if sharded:
        dist.barrier()


def check_target(path: str | os.PathLike[str], *, force: bool) -> Path:
    """Where :func:`write` will put ``path``, before any work.

    Raises:
        StorageError: something is there and ``force`` is not given, or could not be replaced.
    """
    target = _target(path)
    if target.exists() and not force:
        raise StorageError(
            f"{str(target)!r} is already there: name another place, or pass force=True (--force)."
        )
    _check_free(target, single=Path(path).suffix == ".safetensors")
    return target


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors (on the CPU) and the record of what :func:`write` wrote to ``path``.

    Raises:
        StorageError: nothing there, a pickle, a foreign format or version, a truncated or damaged
            file, or a folder whose index and shards do not agree.
    """
    record = read_record(path)
    tensors = Folder.open(_target(path), stem=STEM).tensors()
    if record.pop(CHECKSUM, None) not in (None, fingerprint(Loaded("", tensors), progress=False)):
        raise StorageError(f"{str(path)!r} is damaged: its numbers are not those that were saved.")
    return tensors, record


def read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The record alone; no tensor is read.

    Raises:
        StorageError: as :func:`read`.
    """
    target = _target(path)
    if not target.exists():
        raise StorageError(f"nothing is stored at {str(target)!r}: name what Posterior.save wrote.")
    record = find_record(target)
    if record is None:
        raise StorageError(
            f"{str(target)!r} holds no {RECORD_KEY!r} record (a model's weights, perhaps): name "
            "what Posterior.save wrote."
        )
    return record


def find_record(path: Path) -> dict[str, Any] | None:
    """The record of stored tensors, or None for those that another program wrote.

    Raises:
        StorageError: a file that is damaged, or of another format or version.
    """
    config = path / CONFIG_FILE
    if config.is_file():
        return checked(read_json(config), config)
    file = path / f"{STEM}.safetensors" if path.is_dir() else path
    held = read_header(file).metadata if file.is_file() else {}
    return checked(parse_json(held[RECORD_KEY], path), path) if RECORD_KEY in held else None


def _write_folder(
    folder: Path, tensors: Mapping[str, Tensor], record: str, max_shard_bytes: int
) -> None:
    """Every shard, then the index, then the record."""
    runs = split({name: tensor.nbytes for name, tensor in tensors.items()}, max_shard_bytes)
    count, held = len(runs), {}
    for k, names in enumerate(runs, start=1):
        file = shard_name(STEM, k, count)
        shards.save_file({n: tensors[n] for n in names}, folder / file, {"format": "pt"})
        held |= dict.fromkeys(names, file)
    write_index(folder, STEM, held, {"total_size": sum(t.nbytes for t in tensors.values())})
    (folder / CONFIG_FILE).write_text(record + "\n", encoding="utf-8")


def _target(path: str | os.PathLike[str]) -> Path:
    if Path(path).suffix.lower() in PICKLES:
        raise StorageError(
            f"{str(path)!r} has the name of a pickle, which can run code: name a .safetensors "
            "file or a folder (for saved optimizers: Posterior.from_checkpoint)."
        )
    return Path(os.path.realpath(Path(path).expanduser()))


def _check_free(target: Path, single: bool) -> None:
    """Only a file gives way to a file, and only a folder of ours to a folder."""
    if single:
        return check_file(target)
    if target.exists() and not target.is_dir():
        raise StorageError(f"{str(target)!r} is a file: name a folder, or a .safetensors file.")
    foreign = [p.name for p in sorted(target.glob("*")) if not _is_ours(p)]
    if foreign:
        raise StorageError(
            f"the folder {str(target)!r} holds other files: {some(foreign)}. Name a new folder."
        )
    return None


def _is_ours(path: Path) -> bool:
    shard = path.name.startswith(f"{STEM}-") and path.suffix == ".safetensors"
    return path.is_file() and (shard or path.name in (INDEX_FILE, CONFIG_FILE))


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    if not tensors:
        raise InputError("there are no tensors to write.")
    for name, tensor in tensors.items():
        if name == METADATA or str(name).encode(errors="replace").decode() != name:
            raise InputError(f"{name!r} cannot name a tensor in a safetensors file.")
        dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        if not dense or tensor.is_meta or tensor.is_complex():
            raise InputError(f"{name!r} is no dense, real tensor that holds numbers.")


def encode(document: Mapping[str, Any]) -> str:
    """Strict JSON: no NaN, no infinity, nothing that JSON cannot say."""
    try:
        return json.dumps(document, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the record cannot be written as JSON ({error}): use plain, finite values."
        ) from error


def checked(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """The record, refused unless it is of the format and version that are read here."""
    for name, known in {"format": FORMAT, "version": VERSION}.items():
        if record.get(name) != known:
            raise StorageError(
                f"{str(path)!r} is of {name} {record.get(name)!r}, not {known!r}: save it again "
                "with this release of blr_analysis."
            )
    return record


def checked_record(record: dict[str, Any], where: str) -> dict[str, Any]:
    """The record of precisions for merging, complete, δ as floats.

    Raises:
        StorageError: another structure, no names, no ``n_data``, a δ that is none or that has an
            entry per weight.
    """
    names, n = record.get("parameters"), record.get("n_data")
    tied, frozen = record.get("tied") or {}, record.get("frozen") or []
    prior: Any = record.get("prior_precision")
    each = prior if isinstance(prior, dict) else {"": prior}
    odd = sorted(set(each) ^ set(names or ())) if each is prior else []
    real = all(type(v) in (int, float) and math.isfinite(v) and v >= 0 for v in each.values())
    named = isinstance(tied, dict) and all(map(_is_names, (frozen, *tied.values())))
    checks = {
        f"is of structure {record.get('structure')!r}, not one of {STRUCTURES}": (
            record.get("structure") in STRUCTURES
        ),
        "names no parameters": bool(names) and _is_names(names),
        "has malformed tied or frozen names": named,
        f"has n_data={n!r}": type(n) is int and n >= 1,
        f"has prior_precision={prior!r}": real,
        f"has a prior precision per weight for {odd[:5]}, not one number per tensor": not odd,
    }
    for wrong, fits in checks.items():
        if not fits:
            raise StorageError(f"the record of {where!r} {wrong}. Save it again with this release.")
    floats = {k: float(v) for k, v in each.items()}
    prior = floats if each is prior else floats[""]
    return {**record, "prior_precision": prior}


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
            kept = Folder.open(self.path)
        except StorageError:  # none, or damaged
            return
        specs = {n: Spec(tuple(t.shape), t.dtype) for n, t in sums.items()}
        if kept.metadata.get("key") == self.key and kept.specs == specs:
            for name, total in sums.items():
                total.copy_(kept.tensor(name))
            self.done = int(kept.metadata["passes"])

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
