"""Posteriors on disk come back to the bit, or the reader says what is wrong with the file."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blr_analysis.errors import BLRError, StorageError
from blr_analysis.files import placing, shards, storage

RECORD = {"kind": "ivon", "structure": "diag", "definition": "S", "n_data": 7, "groups": [[1, 2.5]]}
SHARD = "precision-00001-of-00001.safetensors"
INDEX = "precision.safetensors.index.json"
CONFIG = "precision_config.json"
BOTH = pytest.mark.parametrize("name", ["p.safetensors", "p"])
INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}


def some_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "net.weight": torch.randn(3, 4, generator=generator),
        "net.bias": torch.randn(3, generator=generator, dtype=torch.float64),
        "head.weight": torch.randn(2, 3, generator=generator).to(torch.bfloat16),
    }


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert set(left) == set(right)
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert left[name].shape == right[name].shape, name
        bits = INTEGERS[left[name].dtype]
        one = left[name].detach().contiguous()
        two = right[name].detach().contiguous()
        assert torch.equal(one.view(bits), two.view(bits)), name


@BOTH
@pytest.mark.parametrize("limit", [1, 40, 10_000])
def test_tensors_of_any_kind_come_back(tmp_path: Path, name: str, limit: int) -> None:
    """Also views of one buffer, each stored at its own size."""
    buffer = torch.arange(1000.0, requires_grad=True)
    wide = buffer[:12].view(3, 4)
    tensors = {
        **some_tensors(),
        **{"a": buffer[:3], "b": buffer[2:6], "same": buffer[:3], "transposed": wide.mT},
        **{"every other": wide[::2], "expanded": wide[0].expand(2, 4), "é\n": wide[0]},
        **{"odd": torch.tensor([math.nan, -math.nan, math.inf, -0.0]).bfloat16()},
        **{"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4).double()},
    }
    storage.write(tmp_path / "new" / name, tensors, RECORD, max_shard_bytes=limit)
    actual, returned = storage.read(tmp_path / "new" / name)
    assert_same(actual, tensors)
    assert returned == {**RECORD, **storage.FORMAT}
    assert not any(t.requires_grad for t in actual.values())
    assert [p.name for p in (tmp_path / "new").iterdir()] == [name]
    if limit > 1:
        files = [p for p in tmp_path.rglob("*.safetensors") if p.is_file()]
        assert sum(p.stat().st_size for p in files) < 4000


def test_a_folder_has_the_files_that_hugging_face_has(tmp_path: Path) -> None:
    tensors = some_tensors()
    place = tmp_path / "p"
    storage.write(place, tensors, RECORD, max_shard_bytes=50)
    parts = [f"precision-0000{k}-of-00002.safetensors" for k in (1, 2)]
    assert sorted(p.name for p in place.iterdir()) == [*parts, INDEX, CONFIG]
    index = json.loads((place / INDEX).read_text())
    assert index["metadata"]["total_size"] == 3 * 4 * 4 + 3 * 8 + 2 * 3 * 2
    assert list(index["weight_map"]) == list(tensors)
    for name, file in index["weight_map"].items():
        assert_same({name: load_file(place / file)[name]}, {name: tensors[name]})
    record = json.loads((place / CONFIG).read_text())
    assert record.pop("files").keys() == {*parts, INDEX}
    assert len(record.pop("checksum")) == 64
    assert record == {**RECORD, **storage.FORMAT}
    for part in parts:
        (place / part).unlink()  # which the record is not in
    assert storage.read_record(place) == {**RECORD, **storage.FORMAT}


@BOTH
def test_a_second_save_replaces_the_first(tmp_path: Path, name: str) -> None:
    """Under the rights that the umask gives; a link stays one."""
    (tmp_path / "link").mkdir()
    link = tmp_path / "link" / name
    link.symlink_to(tmp_path / name)
    old = os.umask(0o022)
    try:
        storage.write(tmp_path / name, some_tensors(), RECORD, max_shard_bytes=10)
        loaded, record = storage.read(tmp_path / name)
        storage.write(link, {"w": loaded["net.bias"]}, {**record, "n_data": 8})
    finally:
        os.umask(old)
    tensors, record = storage.read(tmp_path / name)
    assert_same(tensors, {"w": some_tensors()["net.bias"]})
    assert record["n_data"] == 8
    assert link.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", name]
    written = [p for p in [tmp_path / name, *(tmp_path / name).rglob("*")] if p.is_file()]
    assert written
    assert {p.stat().st_mode & 0o777 for p in written} == {0o644}


class Crash(BaseException):
    pass


@BOTH
@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Crash()])
def test_a_failed_save_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str, error: BaseException
) -> None:
    storage.write(tmp_path / name, some_tensors(), RECORD)
    calls = []

    def failing(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        raise error

    writing = (shards, "save_file")
    monkeypatch.setattr(*(writing if where == "write" else (placing.os, where)), failing)
    with pytest.raises(StorageError if isinstance(error, OSError) else Crash):
        storage.write(tmp_path / name, {"w": torch.zeros(1)}, {})
    monkeypatch.undo()
    assert len(calls) == 1
    assert_same(storage.read(tmp_path / name)[0], some_tensors())
    assert [p.name for p in tmp_path.iterdir()] == [name]


# What is refused


def written(at: Path, **more: Any) -> None:
    storage.write(at, more.pop("tensors", {"w": torch.ones(1)}), more.pop("record", {}), **more)


def full(place: Path) -> None:
    written(place)
    (place / "notes.txt").write_text("precious")


Put = Callable[[Path], object]
NAMELESS = {"__metadata__": torch.ones(1)}, {"\ud800": torch.ones(1)}, {"w": torch.ones(1) * 1j}
UNWRITTEN: list[tuple[str, Put | None, dict[str, Any], str]] = [
    ("p", None, {"tensors": {}}, "at least one"),
    ("p", None, {"tensors": {"w": [1.0]}}, "dense"),
    *(("p", None, {"tensors": tensors}, "cannot be stored") for tensors in NAMELESS),
    *(("p", None, {"record": {"value": v}}, "JSON") for v in (math.nan, math.inf, {1, 2})),
    *(("p", None, {"max_shard_bytes": n}, "max_shard_bytes") for n in (0, -1, True)),
    *((f"p.{end}", None, {}, "run code") for end in ("pt", "PTH", "ckpt", "pkl")),
    ("p", lambda p: p.write_text("a file"), {}, "is a file"),
    ("p.safetensors", lambda p: p.mkdir(), {}, "is a folder"),
    ("in/p", lambda p: p.parent.write_text("in the way"), {}, "cannot write"),
    ("in/p.safetensors", lambda p: p.parent.write_text(""), {}, "cannot write"),
    ("p", full, {}, r"other files.*notes\.txt"),
]


@pytest.mark.parametrize(("name", "put", "how", "word"), UNWRITTEN)
def test_what_cannot_be_written_leaves_all_as_it_was(
    tmp_path: Path, name: str, put: Put | None, how: dict[str, Any], word: str
) -> None:
    if put is not None:
        put(tmp_path / name)
    before = {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}
    with pytest.raises(BLRError, match=word):
        written(tmp_path / name, **how)
    assert {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")} == before


def one_of(place: Path) -> Path:
    return next(p for p in (place, *place.rglob("*.safetensors")) if p.is_file())


def flipped(place: Path) -> None:
    """One bit of the last number."""
    content = bytearray(one_of(place).read_bytes())
    content[-1] ^= 1
    one_of(place).write_bytes(bytes(content))


def told(place: Path, **changes: Any) -> None:
    """Another record beside the same numbers."""
    record = {**storage.read_record(place), **changes}
    if place.is_dir():
        (place / CONFIG).write_text(json.dumps(record))
    else:
        save_file(load_file(place), place, metadata={"blr_analysis": json.dumps(record)})


def shard(place: Path, **tensors: Tensor) -> None:
    save_file({**some_tensors(), **tensors}, place / SHARD)


Damage = Callable[[Path], object]
EITHER: list[tuple[Damage, str]] = [
    (lambda p: shutil.rmtree(p) if p.is_dir() else p.unlink(), "nothing is stored"),
    *((lambda p, kept=kept: os.truncate(one_of(p), kept), "truncated") for kept in (0, 4, 60)),
    (flipped, "damaged"),
    (lambda p: told(p, format="other"), "of format 'other'"),
    (lambda p: told(p, version=2), "of version 2"),
]
FOLDERS: list[tuple[Damage, str]] = [
    (lambda p: (shutil.rmtree(p), save_file(some_tensors(), p)), "no record"),
    (lambda p: (p / INDEX).unlink(), "holds no precision"),
    (lambda p: (p / CONFIG).unlink(), "holds no record"),
    (lambda p: (p / CONFIG).write_bytes(b"\xff"), "precision_config"),
    (lambda p: (p / CONFIG).write_bytes(b"[]"), "precision_config"),
    (lambda p: (p / INDEX).write_bytes(b"{"), "index"),
    (lambda p: (p / SHARD).unlink(), r"00001-of-00001.*No such file"),
    (lambda p: shard(p, **{"net.bias": torch.ones(4)}), "damaged"),
    (lambda p: shard(p, **{"net.bias": some_tensors()["net.bias"].float()}), "damaged"),
    (
        lambda p: (
            storage.write(p / "other" / "p", {"w": torch.ones(3)}, RECORD)
            or shutil.copy(p / "other" / "p" / SHARD, p / SHARD)
        ),
        "disagree",
    ),
    (lambda p: shard(p, extra=torch.ones(1)), "disagree on 'extra'"),
]
DAMAGED = [("p.safetensors", *case) for case in EITHER]
DAMAGED += [("p", *case) for case in (*EITHER, *FOLDERS)]


@pytest.mark.parametrize(("name", "damage", "word"), DAMAGED)
def test_damage_is_named(tmp_path: Path, name: str, damage: Damage, word: str) -> None:
    storage.write(tmp_path / name, some_tensors(), RECORD)
    damage(tmp_path / name)
    with pytest.raises(StorageError, match=word):
        storage.read(tmp_path / name)


RECORDED = {"structure": "diag", "parameters": ["w"], "n_data": 5, "prior_precision": 1}
ODD = {
    "structure": ["full"],
    "parameters": [[], "w", [1], None],
    "tied": [["w"], {"w": "x"}],
    "frozen": ["w"],
    "n_data": [0, -1, True, 2.0, None],
    "prior_precision": [-1, None, True, math.inf, {"w": "1"}, {}, {"w": 1.0, "v": 1.0}],
}


@pytest.mark.parametrize(("key", "value"), [(key, v) for key, odd in ODD.items() for v in odd])
def test_a_record_that_no_merge_can_take(key: str, value: Any) -> None:
    with pytest.raises(StorageError, match=f"'p' has {key}="):
        storage.checked_record({**RECORDED, key: value}, "p")
    assert storage.checked_record(RECORDED, "p")["prior_precision"] == 1.0
    two = storage.checked_record({**RECORDED, "prior_precision": {"w": 2}}, "p")
    assert two == {**RECORDED, "prior_precision": {"w": 2.0}}


def test_sums_go_on_only_where_they_are_the_same(tmp_path: Path) -> None:
    """A file of another key, of other shapes, or damaged, is not taken up."""
    sums = {"w": torch.tensor([3.0, 4.0])}
    first = storage.Unfinished(tmp_path / "p.unfinished", "key", done=4, _due=0.0)
    first.follow(sums)

    def goes_on(key: str, start: Tensor) -> bool:
        again = storage.Unfinished(first.path, key)
        actual = {"w": start.clone()}
        again.follow(actual)
        taken = again.done == 5
        assert again.done in (1, 5)
        assert torch.equal(actual["w"], sums["w"] if taken else start)
        return taken

    assert goes_on("key", torch.ones(2))
    assert not goes_on("other", torch.ones(2))
    assert not goes_on("key", torch.ones(3))
    os.truncate(first.path, first.path.stat().st_size - 1)
    assert not goes_on("key", torch.ones(2))
    soon = storage.Unfinished(tmp_path / "soon", "key", done=1)
    soon.follow(sums)
    assert not soon.path.exists()  # the last time is not a while ago
    first.remove()
    assert not first.path.exists()
