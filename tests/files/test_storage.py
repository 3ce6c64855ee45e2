"""Posteriors on disk come back to the bit, or the reader says what is wrong with the file."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import FORK
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from blr_analysis.errors import InputError, StorageError
from blr_analysis.files import Loaded, fingerprint, placing, shards, storage

RECORD = {"kind": "ivon", "structure": "diag", "definition": "S", "n_data": 7, "groups": [[1, 2.5]]}
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
        one, two = left[name].detach().contiguous(), right[name].detach().contiguous()
        assert torch.equal(one.view(bits), two.view(bits)), name


# ------------------------------------------------------------------------------ round trips


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(
    lambda text: text != "__metadata__"
)


@st.composite
def tensors_of_any_kind(draw: st.DrawFn) -> dict[str, Tensor]:
    result = {}
    for name in draw(st.lists(names, min_size=1, max_size=6, unique=True)):
        dtype = draw(st.sampled_from(list(INTEGERS)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        seed = draw(st.integers(0, 2**31))
        limits = torch.iinfo(INTEGERS[dtype])
        generator = torch.Generator().manual_seed(seed)
        bits = torch.randint(limits.min, limits.max, shape, generator=generator)
        tensor = bits.to(INTEGERS[dtype]).reshape(-1).view(dtype).reshape(shape)  # NaN included
        layout = draw(st.sampled_from(["plain", "transposed", "every other", "expanded"]))
        if layout == "transposed":
            tensor = tensor.permute(tuple(reversed(range(tensor.ndim))))
        elif layout == "every other" and tensor.ndim:
            tensor = tensor[::2]
        elif layout == "expanded":
            tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
        result[name] = tensor
    return result


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(
    tensors=tensors_of_any_kind(),
    record=st.dictionaries(st.text(max_size=8), json_values, max_size=4),
    limit=st.integers(1, 300),
    single=st.booleans(),
)
def test_any_tensors_and_record_come_back(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, Tensor],
    record: dict[str, Any],
    limit: int,
    single: bool,
) -> None:
    path = tmp_path_factory.mktemp("any") / ("p.safetensors" if single else "p")
    storage.write(path, tensors, record, max_shard_bytes=limit)
    found, returned = storage.read(path)
    assert_same(found, tensors)
    assert returned == {**record, "format": storage.FORMAT, "version": storage.VERSION}
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name]


def test_a_folder_has_the_files_that_hugging_face_has(tmp_path: Path) -> None:
    tensors = some_tensors()
    storage.write(tmp_path / "p", tensors, RECORD, max_shard_bytes=50)
    assert sorted(p.name for p in (tmp_path / "p").iterdir()) == [
        "precision-00001-of-00002.safetensors",
        "precision-00002-of-00002.safetensors",
        "precision.safetensors.index.json",
        "precision_config.json",
    ]
    index = json.loads((tmp_path / "p" / "precision.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 3 * 4 * 4 + 3 * 8 + 2 * 3 * 2
    assert list(index["weight_map"]) == list(tensors)
    for name, file in index["weight_map"].items():
        assert_same({name: load_file(tmp_path / "p" / file)[name]}, {name: tensors[name]})
    config = json.loads((tmp_path / "p" / "precision_config.json").read_text())
    checksum = {"checksum": fingerprint(Loaded("", tensors), progress=False)}
    assert config == {**RECORD, "format": "blr_analysis.precision", "version": 1, **checksum}


@BOTH
def test_views_of_one_buffer_are_stored_each_at_its_own_size(tmp_path: Path, name: str) -> None:
    buffer = torch.arange(1000.0, requires_grad=True)
    tensors = {"a": buffer[:3], "b": buffer[2:6], "same": buffer[:3]}
    storage.write(tmp_path / "new" / name, tensors, {})  # in a folder that is made
    found = storage.read(tmp_path / "new" / name)[0]
    assert_same(found, tensors)
    assert not any(t.requires_grad for t in found.values())
    files = [p for p in tmp_path.rglob("*.safetensors") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 1000


@BOTH
def test_the_record_alone(tmp_path: Path, name: str) -> None:
    storage.write(tmp_path / name, some_tensors(), RECORD)
    for shard in tmp_path.glob("p/*.safetensors"):
        shard.unlink()  # which it is not in
    found = storage.read_record(tmp_path / name)
    assert {k: found[k] for k in RECORD} == RECORD


# ------------------------------------------------------------------- replaced as a whole


@BOTH
def test_a_second_save_replaces_the_first(tmp_path: Path, name: str) -> None:
    storage.write(tmp_path / name, some_tensors(), RECORD, max_shard_bytes=10)
    loaded, record = storage.read(tmp_path / name)
    storage.write(tmp_path / name, {"w": loaded["net.bias"]}, {**record, "n_data": 8})
    tensors, record = storage.read(tmp_path / name)
    assert_same(tensors, {"w": some_tensors()["net.bias"]})
    assert record["n_data"] == 8
    assert [p.name for p in tmp_path.iterdir()] == [name]


class Crash(BaseException):
    pass


@BOTH
@pytest.mark.parametrize("where", ["save_file", "fsync", "rename"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Crash()])
def test_a_failed_save_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str, error: BaseException
) -> None:
    storage.write(tmp_path / name, some_tensors(), RECORD)
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if where == "save_file":  # half of the file is there
            Path(args[1]).write_bytes(b"half")
        raise error

    if where == "save_file":
        monkeypatch.setattr(shards, "save_file", failing)
    elif where == "fsync":
        monkeypatch.setattr(placing.os, "fsync", failing)
    else:
        replacing = "replace" if name.endswith(".safetensors") else "rename"
        rename = os.rename

        def second_rename_fails(source: Path, target: Path) -> None:
            return failing() if Path(source).name == "new" else rename(source, target)

        monkeypatch.setattr(placing.os, replacing, second_rename_fails)
    expected = StorageError if isinstance(error, OSError) else Crash
    with pytest.raises(expected):
        storage.write(tmp_path / name, {"w": torch.zeros(1)}, {})
    monkeypatch.undo()
    assert calls == 1
    assert_same(storage.read(tmp_path / name)[0], some_tensors())
    assert [p.name for p in tmp_path.iterdir()] == [name]


def writes_until(path: Path, call: int) -> None:
    """A write that is killed at this call of safetensors, half of whose file is there."""
    save, calls = shards.save_file, 0

    def killed(tensors: Any, path: Any, metadata: Any) -> None:
        nonlocal calls
        calls += 1
        save(tensors, path, metadata)
        if calls == call:
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    shards.save_file = killed
    storage.write(path, {"a": torch.zeros(9), "b": torch.zeros(9)}, {}, max_shard_bytes=36)


@pytest.mark.parametrize(("name", "call"), [("p.safetensors", 1), ("p", 1), ("p", 2)])
def test_a_killed_save_leaves_the_old_one_readable(tmp_path: Path, name: str, call: int) -> None:
    storage.write(tmp_path / name, some_tensors(), RECORD)
    run = FORK.Process(target=writes_until, args=(tmp_path / name, call))
    run.start()
    run.join()
    assert run.exitcode == -signal.SIGKILL
    assert_same(storage.read(tmp_path / name)[0], some_tensors())


def test_an_empty_folder_is_filled_and_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    storage.write(tmp_path / "link", some_tensors(), RECORD)
    assert (tmp_path / "link").is_symlink()
    assert_same(storage.read(tmp_path / "real")[0], some_tensors())


# ---------------------------------------------------------------------------- what is refused


def written(at: Path, **more: Any) -> None:
    """What the tests below put at a path that has something there already."""
    storage.write(at, more.pop("tensors", {"w": torch.ones(1)}), more.pop("record", {}), **more)


Put = Callable[[Path], object]
UNWRITTEN: list[tuple[str, Put | None, dict[str, Any], type[Exception], str]] = [
    ("p", None, {"tensors": {}}, InputError, "no tensors"),
    ("p", None, {"tensors": {"__metadata__": torch.ones(1)}}, InputError, "cannot name"),
    ("p", None, {"tensors": {"\ud800": torch.ones(1)}}, InputError, "cannot name"),
    ("p", None, {"tensors": {"w": [1.0]}}, InputError, "dense"),
    ("p", None, {"tensors": {"w": torch.eye(2).to_sparse()}}, InputError, "dense"),
    ("p", None, {"tensors": {"w": torch.ones(2, device="meta")}}, InputError, "numbers"),
    ("p", None, {"tensors": {"w": torch.ones(2, dtype=torch.complex64)}}, InputError, "real"),
    *(
        ("p", None, {"record": {"value": value}}, InputError, "JSON")
        for value in (float("nan"), float("inf"), torch.ones(1), {1, 2})
    ),
    *(("p", None, {"max_shard_bytes": n}, InputError, "max_shard_bytes") for n in (0, -1, True)),
    *(
        (f"p.{end}", None, {}, StorageError, "run code")
        for end in ("pt", "bin", "PTH", "ckpt", "pkl")
    ),
    ("p", lambda p: p.write_text("a file"), {}, StorageError, "is a file"),
    ("p.safetensors", lambda p: p.mkdir(), {}, StorageError, "is a folder"),
    ("in/p", lambda p: p.parent.write_text("in the way"), {}, StorageError, "cannot write"),
    ("in/p.safetensors", lambda p: p.parent.write_text(""), {}, StorageError, "cannot write"),
    (
        "p",
        lambda p: (written(p), (p / "notes.txt").write_text("precious")),
        {},
        StorageError,
        r"other files.*notes\.txt",
    ),
]


@pytest.mark.parametrize(("name", "put", "how", "error", "word"), UNWRITTEN)
def test_what_cannot_be_written_leaves_all_as_it_was(
    tmp_path: Path, name: str, put: Put | None, how: dict[str, Any], error: Any, word: str
) -> None:
    if put is not None:
        put(tmp_path / name)
    before = {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}
    with pytest.raises(error, match=word):
        written(tmp_path / name, **how)
    assert {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")} == before


SHARD = "precision-00001-of-00001.safetensors"
INDEX, CONFIG = "precision.safetensors.index.json", "precision_config.json"


def one_of(place: Path) -> Path:
    return next(p for p in (place, *place.rglob("*.safetensors")) if p.is_file())


def flipped(place: Path) -> None:
    """One bit of the last number."""
    content = bytearray(one_of(place).read_bytes())
    content[-1] ^= 1
    one_of(place).write_bytes(bytes(content))


def cut(place: Path, kept: int) -> None:
    file = one_of(place)
    os.truncate(file, kept if kept >= 0 else file.stat().st_size + kept)


def told(place: Path, **changes: Any) -> None:
    """Another record beside the same numbers."""
    record = {**storage.read_record(place), **changes}
    if place.is_dir():
        (place / CONFIG).write_text(json.dumps(record))
    else:
        save_file(load_file(place), place, metadata={"blr_analysis": json.dumps(record)})


def document(place: Path, file: str, content: bytes) -> None:
    (place / file).write_bytes(content)


def shard(place: Path, **tensors: Tensor) -> None:
    save_file({**some_tensors(), **tensors}, place / SHARD)


def elsewhere(place: Path, file: object) -> None:
    index = json.loads((place / INDEX).read_text())
    index["weight_map"]["net.bias"] = file
    (place / INDEX).write_text(json.dumps(index))


EITHER: list[tuple[Callable[[Path], object], str]] = [
    (lambda p: shutil.rmtree(p) if p.is_dir() else p.unlink(), "nothing is stored"),
    *((partial(cut, kept=kept), "truncated") for kept in (0, 4, 60, -1)),
    (flipped, "damaged"),
    (lambda p: told(p, format="other"), "of format 'other'"),
    (lambda p: told(p, version=2), "of version 2"),
]
FOLDERS: list[tuple[Callable[[Path], object], str]] = [
    (lambda p: (p / INDEX).unlink(), "holds no precision"),
    (lambda p: (p / CONFIG).unlink(), "holds no .* record"),
    *(
        (partial(document, file=file, content=content), "precision")
        for file in (INDEX, CONFIG)
        for content in (b"", b"{", b"[]", b"\xff", b"{}")
    ),
    (lambda p: (p / SHARD).unlink(), r"00001-of-00001.*not there"),
    (lambda p: shard(p, **{"net.bias": torch.ones(4)}), "damaged"),
    (lambda p: shard(p, **{"net.bias": some_tensors()["net.bias"].float()}), "damaged"),
    (lambda p: shard(p, extra=torch.ones(1)), "disagree on 'extra'"),
    *(
        (partial(elsewhere, file=file), "same folder")
        for file in ("../p.safetensors", "/etc/passwd", "..", "", 3)
    ),
]
DAMAGED = [(name, *case) for name in ("p", "p.safetensors") for case in EITHER]


@pytest.mark.parametrize(
    ("name", "damage", "word"), [*DAMAGED, *(("p", *case) for case in FOLDERS)]
)
def test_damage_is_named(
    tmp_path: Path, name: str, damage: Callable[[Path], object], word: str
) -> None:
    storage.write(tmp_path / name, some_tensors(), RECORD)
    damage(tmp_path / name)
    with pytest.raises(StorageError, match=word):
        storage.read(tmp_path / name)


def test_what_is_another_programs_is_not_read(tmp_path: Path) -> None:
    save_file(some_tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.save({"w": torch.ones(1)}, tmp_path / "p.pt")
    storage.write(tmp_path / "p", some_tensors(), RECORD)
    for name, word in {
        "model.safetensors": "no 'blr_analysis' record",
        f"p/{SHARD}": "no 'blr_analysis' record",
        "p.pt": "run code",
    }.items():
        with pytest.raises(StorageError, match=word):
            storage.read(tmp_path / name)


RECORDED = {"structure": "diag", "parameters": ["w"], "n_data": 5, "prior_precision": 1}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"structure": "full"}, "structure"),
        *(({"parameters": names}, "names") for names in ([], "w", [1], None)),
        ({"tied": ["w"]}, "names"),
        ({"tied": {"w": "x"}}, "names"),
        ({"frozen": "w"}, "names"),
        *(({"n_data": n}, "n_data") for n in (0, -1, True, 2.0, None)),
        *(({"prior_precision": d}, "prior_precision") for d in (-1, None, True, {"w": "1"})),
        ({"prior_precision": float("inf")}, "prior_precision"),
        ({"prior_precision": {"w": 1.0, "v": 1.0}}, "per weight"),
    ],
)
def test_a_record_that_no_merge_can_take(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(StorageError, match=word):
        storage.checked_record({**RECORDED, **changes}, "p")
    assert storage.checked_record(RECORDED, "p")["prior_precision"] == 1.0
    assert storage.checked_record({**RECORDED, "prior_precision": {"w": 2}}, "p") == {
        **RECORDED, "prior_precision": {"w": 2.0},
    }  # fmt: skip


def test_sums_go_on_only_where_they_are_the_same(tmp_path: Path) -> None:
    """A file of another key, of other shapes, or damaged, is not taken up."""
    sums = {"w": torch.tensor([3.0, 4.0])}
    first = storage.Unfinished(tmp_path / "p.unfinished", "key", done=4, _due=0.0)
    first.follow(sums)
    assert not storage.Unfinished(tmp_path / "other", "key", done=4).path.exists()
    for key, start, taken in (("key", torch.ones(2), 5), ("other", torch.ones(2), 1),
                              ("key", torch.ones(3), 1)):  # fmt: skip
        again = storage.Unfinished(first.path, key)
        found = {"w": start.clone()}
        again.follow(found)
        assert again.done == taken
        assert torch.equal(found["w"], sums["w"] if taken == 5 else start)
    first.path.write_bytes(first.path.read_bytes()[:-1])
    again = storage.Unfinished(first.path, "key")
    again.follow({"w": torch.ones(2)})
    assert again.done == 1
    soon = storage.Unfinished(tmp_path / "soon", "key", done=1)
    soon.follow(sums)
    assert not soon.path.exists()  # the last time is not a while ago
    first.remove()
    assert not first.path.exists()


@BOTH
def test_files_get_the_rights_that_the_umask_gives(tmp_path: Path, name: str) -> None:
    old = os.umask(0o022)
    try:
        storage.write(tmp_path / name, {"w": torch.ones(2)}, {})
    finally:
        os.umask(old)
    written = [p for p in [tmp_path / name, *(tmp_path / name).rglob("*")] if p.is_file()]
    assert written
    assert {p.stat().st_mode & 0o777 for p in written} == {0o644}
