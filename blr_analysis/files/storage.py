"""A posterior on disk: named tensors and one record, as ``.safetensors`` and never as pickle.

Two layouts, chosen by the path:

* a path that ends in ``.safetensors`` is one file, whose header metadata holds the record as
  JSON under the key ``blr_analysis``;
* any other path is a folder: shards ``precision-0000k-of-0000n.safetensors``, the index
  ``precision.safetensors.index.json`` (``weight_map`` and ``metadata`` as Hugging Face writes
  them, with every tensor's dtype and shape) and the record, ``precision_config.json``.

Both are written beside the target and renamed into place. What a long sweep has summed so far lies
there too, as :class:`Unfinished`.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/p.safetensors", {"w": torch.ones(2)}, {"kind": "ivon"})
    ...     tensors, record = read(f"{folder}/p.safetensors")
    >>> tensors["w"], record["format"], record["version"], record["kind"]
    (tensor([1., 1.]), 'blr_analysis.precision', 1, 'ivon')
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blr_analysis.checks import positive_int, some
from blr_analysis.errors import InputError, StorageError
from blr_analysis.files import shards
from blr_analysis.files.folder import Folder
from blr_analysis.files.headers import METADATA, parse_json, read_header, read_json
from blr_analysis.files.placing import drafted
from blr_analysis.files.shards import shard_name, split, write_index
from blr_analysis.files.source import Spec
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
EARLIER_KINDS = {"mc_fisher": "fisher_mc", "empirical_fisher": "fisher_emp"}
STEM = "precision"
INDEX_FILE = f"{STEM}.safetensors.index.json"
CONFIG_FILE = "precision_config.json"
RECORD_KEY = "blr_analysis"
SHARD_KEY = "blr_analysis.shard"
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
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
    text = encode(document)
    _check_tensors(tensors)
    positive_int("max_shard_bytes", max_shard_bytes)
    sharded = any(map(is_sharded, tensors.values()))
    if sharded:
        tensors = shards.in_order(tensors)  # in which all processes gather them
    with ExitStack() as stack:
        if not sharded or dist.get_rank() == 0:
            with _told_to_all(target) if sharded else nullcontext():
                draft = stack.enter_context(drafted(target))
                _check_free(target, single)
            if single:
                shards.save_file(tensors, draft, {"format": "pt", RECORD_KEY: text})
            else:
                draft.mkdir()
                _write_folder(draft, tensors, document, max_shard_bytes)
        else:
            with _told_to_all(target):
                pass
            for tensor in tensors.values():
                whole(tensor)
    if sharded:
        dist.barrier()


@contextmanager
def _told_to_all(target: Path) -> Iterator[None]:
    """Every process goes on only if the first one can write."""
    ready = [False]
    try:
        yield
        ready = [True]
    finally:
        dist.broadcast_object_list(ready)
    if not ready[0]:
        raise StorageError(f"the first rank cannot write {str(target)!r}.")


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
        StorageError: nothing there, a pickle, a foreign format or version, a truncated file, or
            a folder whose index, shards and shapes do not agree.
    """
    target = _target(path)
    file = Folder.open(target, stem=STEM) if target.is_file() else None
    record = _record(target, None if file is None else file.metadata)
    source = file or Folder.open(target, stem=STEM)
    names: Any = source.specs
    if "tensors" in source.index:
        names = source.index["tensors"]  # in the order in which they were written
        _check_described(source, names)
    tensors = source.tensors()
    return {name: tensors[name] for name in names}, record


def read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The record alone; no tensor is read.

    Raises:
        StorageError: as :func:`read`.
    """
    return _record(_target(path))


def _record(target: Path, metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    if not target.exists():
        raise StorageError(
            f"nothing is stored at {str(target)!r}: expected a .safetensors file or a folder with "
            f"{CONFIG_FILE}."
        )
    record = find_record(target, metadata)
    if record is None:
        lacks = f"no {CONFIG_FILE}" if target.is_dir() else f"no {RECORD_KEY!r} record"
        raise StorageError(
            f"{str(target)!r} holds {lacks} (the weights of a model, perhaps): expected what "
            "Posterior.save wrote."
        )
    return record


def find_record(path: Path, metadata: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """The record of stored tensors, or None for those that another program wrote; ``metadata`` of
    a file whose header was read before.

    Raises:
        StorageError: a file that is damaged, of another format or version, or one shard of many.
    """
    config = path / CONFIG_FILE
    if config.is_file():
        return checked(read_json(config), config)
    file = path / f"{STEM}.safetensors" if path.is_dir() else path
    if metadata is None:
        metadata = read_header(file).metadata if file.is_file() else {}
    if SHARD_KEY in metadata:
        raise StorageError(
            f"{str(path)!r} is shard {metadata[SHARD_KEY]} of a folder: name the folder, "
            f"{str(path.parent)!r}."
        )
    return checked(parse_json(metadata[RECORD_KEY], path), path) if RECORD_KEY in metadata else None


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


def _write_folder(
    folder: Path, tensors: Mapping[str, Tensor], record: dict[str, Any], max_shard_bytes: int
) -> None:
    """Every shard, then the index, then the record."""
    runs = split({name: tensor.nbytes for name, tensor in tensors.items()}, max_shard_bytes)
    count, held = len(runs), {}
    for k, names in enumerate(runs, start=1):
        file = shard_name(STEM, k, count)
        metadata = {"format": "pt", SHARD_KEY: f"{k} of {count}"}
        shards.save_file({name: tensors[name] for name in names}, folder / file, metadata)
        held |= dict.fromkeys(names, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    described = {name: _describe(tensor) for name, tensor in tensors.items()}
    write_index(folder, STEM, held, {"total_size": total, "tensors": described})
    (folder / CONFIG_FILE).write_text(encode(record, indent=2) + "\n", encoding="utf-8")


def _check_described(source: Folder, described: Any) -> None:
    held = {name: _describe(spec) for name, spec in source.specs.items()}
    described = described if isinstance(described, dict) else {}
    for name in {**held, **described}:
        if held.get(name) != described.get(name):
            raise StorageError(
                f"tensor {name!r} of {source.name!r} is {held.get(name)}, the index says "
                f"{described.get(name)}: save the posterior again."
            )


def _describe(tensor: Tensor | Spec) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


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
        if target.is_dir():
            raise StorageError(f"{str(target)!r} is a folder, but its name asks for one file.")
    elif target.is_dir():
        foreign = sorted(p.name for p in target.iterdir() if not _is_ours(p))
        if foreign:
            raise StorageError(
                f"the folder {str(target)!r} holds other files: {some(foreign)}. Name a new folder."
            )
    elif target.exists():
        raise StorageError(
            f"{str(target)!r} is a file: name a folder, or a file that ends in .safetensors."
        )


def _is_ours(path: Path) -> bool:
    shard = path.name.startswith(("precision-", "shard-")) and path.suffix == ".safetensors"
    return path.is_file() and (shard or path.name in (INDEX_FILE, CONFIG_FILE))


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    if not tensors:
        raise InputError("there are no tensors to write.")
    for name, tensor in tensors.items():
        known = isinstance(name, str) and name != METADATA
        if not known or name.encode(errors="replace").decode() != name:
            raise InputError(f"{name!r} cannot name a tensor in a safetensors file.")
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name!r} is no tensor but a {type(tensor).__name__}.")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_complex():
            raise InputError(
                f"{name!r} ({tensor.dtype}, {tensor.layout}, on {tensor.device}) cannot be "
                "stored: expected a dense, real tensor."
            )


def encode(document: Mapping[str, Any], indent: int | None = None) -> str:
    """Strict JSON: no NaN, no infinity, nothing that JSON cannot say."""
    try:
        return json.dumps(document, indent=indent, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the record cannot be written as JSON ({error}): use plain, finite values."
        ) from error


def checked(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """The record, refused unless it is of the format and version that are read here."""
    if record.get("format") != FORMAT:
        raise StorageError(
            f"{str(path)!r} is of format {record.get('format')!r}: expected {FORMAT!r}, which "
            "Posterior.save writes."
        )
    if record.get("version") != VERSION:
        raise StorageError(
            f"{str(path)!r} is of version {record.get('version')!r}, not {VERSION}: upgrade "
            "blr_analysis, or save it again."
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
    checks = {
        f"is of structure {record.get('structure')!r}: expected one of {STRUCTURES}": (
            record.get("structure") in STRUCTURES
        ),
        "names no parameters": bool(names) and _is_names(names),
        f"has n_data={n!r}": isinstance(n, int) and not isinstance(n, bool) and n >= 1,
        "has malformed tied or frozen names": (
            _is_names(frozen) and isinstance(tied, dict) and all(map(_is_names, tied.values()))
        ),
    }
    for wrong, fits in checks.items():
        if not fits:
            raise StorageError(f"the record of {where!r} {wrong}. Save it again with this release.")
    kind = record.get("kind")
    kind = EARLIER_KINDS.get(kind, kind) if isinstance(kind, str) else None
    return {**record, "kind": kind, "prior_precision": _prior(record, names, where)}


def _is_names(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _prior(record: Mapping[str, Any], names: Any, where: str) -> float | dict[str, float]:
    prior: Any = record.get("prior_precision")
    values = prior.values() if isinstance(prior, dict) else [prior]
    real = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if not (real and all(math.isfinite(v) and v >= 0 for v in values)):
        raise StorageError(
            f"the record of {where!r} has prior_precision={prior!r}: expected finite numbers, at "
            "least 0."
        )
    if isinstance(prior, dict) and set(prior) != set(names):
        raise StorageError(
            f"{where!r} has a prior precision per weight for "
            f"{sorted(set(names) ^ set(prior))[:5]}: save one number per tensor."
        )
    if isinstance(prior, dict):
        return {name: float(value) for name, value in prior.items()}
    return float(prior)


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
        if kept.metadata.get("key") != self.key or dict(kept.specs) != specs:
            return
        for name, total in sums.items():
            total.copy_(kept.tensor(name))
        self.done = int(kept.metadata["passes"])

    def follow(self, sums: Mapping[str, Tensor]) -> None:
        """After each pass, of sums that the first one makes: take up after that one, then keep.

        Passes whose numbers, from 0, are below ``done`` are to be left out.
        """
        self.done += 1
        if self.done == 1:
            self.take_up(sums)
        else:
            self.keep(self.done, sums)

    def keep(self, passes: int, sums: Mapping[str, Tensor]) -> None:
        """Write the sums after so many passes, if the last time is a while ago."""
        self.done, started = passes, time.monotonic()
        if started < self._due:
            return
        with drafted(self.path) as draft:
            shards.save_file(sums, draft, {"key": self.key, "passes": str(passes)})
        now = time.monotonic()
        self._due = now + max(EVERY, SHARE * (now - started))

    def remove(self) -> None:
        """Once the target is whole."""
        self.path.unlink(missing_ok=True)
