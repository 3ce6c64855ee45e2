"""Posteriors on disk come back to the bit, or the reader says what is wrong with the file."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import FORK
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from blr_analysis.errors import InputError, StorageError
from blr_analysis.files import placing, shards, storage

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


@settings(deadline=None, max_examples=80)
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
    assert config == {**RECORD, "format": "blr_analysis.precision", "version": 1}


def test_one_file_holds_the_record_in_its_header(tmp_path: Path) -> None:
    storage.write(tmp_path / "p.safetensors", some_tensors(), RECORD)
    assert [p.name for p in tmp_path.iterdir()] == ["p.safetensors"]
    with safe_open(tmp_path / "p.safetensors", "pt") as file:
        assert json.loads(file.metadata()["blr_analysis"])["n_data"] == 7


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(1, [["a"], ["b"], ["c"]]), (16, [["a"], ["b", "c"]]), (1000, [["a", "b", "c"]])],
)
def test_shards_stay_below_the_limit_unless_one_tensor_is_larger(
    limit: int, expected: list[list[str]]
) -> None:
    assert shards.split({"a": 20, "b": 8, "c": 8}, limit) == expected


@BOTH
def test_views_of_one_buffer_are_stored_each_at_its_own_size(tmp_path: Path, name: str) -> None:
    buffer = torch.arange(1000.0)
    tensors = {"a": buffer[:3], "b": buffer[2:6], "same": buffer[:3]}
    storage.write(tmp_path / name, tensors, {})
    assert_same(storage.read(tmp_path / name)[0], tensors)
    files = [p for p in tmp_path.rglob("*.safetensors") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 1000


@BOTH
def test_parents_are_made_and_gradients_are_left_behind(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new" / "er" / name
    storage.write(path, {"w": torch.ones(2, requires_grad=True)}, {})
    assert not storage.read(path)[0]["w"].requires_grad


@BOTH
def test_the_record_alone(tmp_path: Path, name: str) -> None:
    storage.write(tmp_path / name, some_tensors(), RECORD)
    assert storage.read_record(tmp_path / name) == storage.read(tmp_path / name)[1]
    with pytest.raises(StorageError, match="nothing is stored"):
        storage.read_record(tmp_path / "other")


def test_a_folders_record_is_read_without_its_shards(tmp_path: Path) -> None:
    storage.write(tmp_path / "p", some_tensors(), RECORD)
    (tmp_path / "p" / "precision-00001-of-00001.safetensors").unlink()
    assert storage.read_record(tmp_path / "p")["n_data"] == 7


# ----------------------------------------------------------------------------------- removed


@BOTH
def test_what_was_written_can_be_removed(tmp_path: Path, name: str) -> None:
    storage.write(tmp_path / name, some_tensors(), RECORD)
    storage.remove(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    storage.remove(tmp_path / name)  # nothing there, nothing to do


def test_only_what_was_written_here_is_removed(tmp_path: Path) -> None:
    storage.write(tmp_path / "p", some_tensors(), RECORD)
    (tmp_path / "p" / "notes.txt").write_text("precious")
    with pytest.raises(StorageError, match=r"other files.*notes\.txt"):
        storage.remove(tmp_path / "p")
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "notes.txt").write_text("precious")
    with pytest.raises(StorageError, match=r"no precision_config\.json"):
        storage.remove(tmp_path / "q")
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(StorageError, match="record"):
        storage.remove(tmp_path / "model.safetensors")
    assert len(list(tmp_path.rglob("*.*"))) == 6  # all that was there


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


def test_a_folder_with_other_files_is_never_replaced(tmp_path: Path) -> None:
    storage.write(tmp_path / "p", some_tensors(), RECORD)
    (tmp_path / "p" / "notes.txt").write_text("precious")
    with pytest.raises(StorageError, match=r"other files.*notes\.txt"):
        storage.write(tmp_path / "p", some_tensors(), RECORD)
    assert (tmp_path / "p" / "notes.txt").read_text() == "precious"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    storage.write(tmp_path / "p", some_tensors(), RECORD)
    assert_same(storage.read(tmp_path / "p")[0], some_tensors())


def test_writing_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    storage.write(tmp_path / "link", some_tensors(), RECORD)
    assert (tmp_path / "link").is_symlink()
    assert_same(storage.read(tmp_path / "real")[0], some_tensors())


# ---------------------------------------------------------------------------- bad targets


@pytest.mark.parametrize("name", ["p.pt", "p.bin", "p.PTH", "p.ckpt", "p.pkl"])
def test_pickles_are_refused_both_ways(tmp_path: Path, name: str) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / name)
    with pytest.raises(StorageError, match="run code"):
        storage.read(tmp_path / name)
    with pytest.raises(StorageError, match="run code"):
        storage.write(tmp_path / name, some_tensors(), {})


@BOTH
def test_a_place_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot write"):
        storage.write(tmp_path / "file" / name, some_tensors(), {})


@BOTH
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission(tmp_path: Path, name: str) -> None:
    (tmp_path / "shut").mkdir(mode=0o500)
    with pytest.raises(StorageError, match="cannot write"):
        storage.write(tmp_path / "shut" / name, some_tensors(), {})


def test_a_file_is_not_replaced_by_a_folder_nor_the_reverse(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("a file")
    with pytest.raises(StorageError, match="is a file"):
        storage.write(tmp_path / "p", some_tensors(), {})
    (tmp_path / "p.safetensors").mkdir()
    with pytest.raises(StorageError, match="is a folder"):
        storage.write(tmp_path / "p.safetensors", some_tensors(), {})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "no tensors"),
        ({"__metadata__": torch.ones(1)}, "cannot name"),
        ({"\ud800": torch.ones(1)}, "cannot name"),
        ({"w": [1.0]}, "is no tensor but a list"),
        ({"w": torch.eye(2).to_sparse()}, "dense"),
        ({"w": torch.ones(2, device="meta")}, "meta"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, "real"),
    ],
)
def test_what_cannot_be_stored_is_named(
    tmp_path: Path, tensors: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        storage.write(tmp_path / "p", tensors, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.ones(1), {1, 2}])
def test_a_record_that_is_no_json(tmp_path: Path, value: object) -> None:
    with pytest.raises(InputError, match="JSON"):
        storage.write(tmp_path / "p", some_tensors(), {"value": value})


@pytest.mark.parametrize("limit", [0, -1, True])
def test_shards_of_no_size(tmp_path: Path, limit: int) -> None:
    with pytest.raises(InputError, match="max_shard_bytes"):
        storage.write(tmp_path / "p", some_tensors(), {}, max_shard_bytes=limit)


# ------------------------------------------------------------------------------ bad sources


@BOTH
def test_nothing_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(StorageError, match="nothing is stored"):
        storage.read(tmp_path / name)


@BOTH
@pytest.mark.parametrize("kept", [0, 4, 60, -1])
def test_truncated(tmp_path: Path, name: str, kept: int) -> None:
    storage.write(tmp_path / name, some_tensors(), RECORD)
    file = next(p for p in tmp_path.rglob("*.safetensors") if p.is_file())
    os.truncate(file, kept if kept >= 0 else file.stat().st_size + kept)
    with pytest.raises(StorageError, match="truncated"):
        storage.read(tmp_path / name)


def test_a_foreign_safetensors_file(tmp_path: Path) -> None:
    save_file(some_tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StorageError, match="no 'blr_analysis' record"):
        storage.read(tmp_path / "model.safetensors")


def test_a_shard_alone_names_its_folder(tmp_path: Path) -> None:
    storage.write(tmp_path / "p", some_tensors(), RECORD)
    with pytest.raises(StorageError, match="shard 1 of 1 of a folder"):
        storage.read(tmp_path / "p" / "precision-00001-of-00001.safetensors")


@BOTH
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("format", "other", "of format 'other'"), ("version", 2, "of version 2")],
)
def test_another_format_or_version(
    tmp_path: Path, name: str, key: str, value: object, message: str
) -> None:
    path = tmp_path / name
    storage.write(path, some_tensors(), RECORD)
    record = {**storage.read(path)[1], key: value}
    if path.is_dir():
        (path / "precision_config.json").write_text(json.dumps(record))
    else:
        save_file(some_tensors(), path, metadata={"blr_analysis": json.dumps(record)})
    with pytest.raises(StorageError, match=message):
        storage.read(path)


@pytest.mark.parametrize("file", ["precision_config.json", "precision.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"{}", None])
def test_a_folder_with_a_damaged_document(tmp_path: Path, file: str, content: bytes | None) -> None:
    storage.write(tmp_path / "p", some_tensors(), RECORD)
    if content is None:
        (tmp_path / "p" / file).unlink()
    else:
        (tmp_path / "p" / file).write_bytes(content)
    with pytest.raises(StorageError, match="precision"):
        storage.read(tmp_path / "p")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    storage.write(tmp_path / "p", some_tensors(), RECORD, max_shard_bytes=1)
    (tmp_path / "p" / "precision-00002-of-00003.safetensors").unlink()
    with pytest.raises(StorageError, match=r"00002-of-00003.*not there"):
        storage.read(tmp_path / "p")


def test_shards_of_another_save_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "p"
    storage.write(path, some_tensors(), RECORD)
    shard = path / "precision-00001-of-00001.safetensors"
    save_file({**some_tensors(), "net.bias": torch.ones(4)}, shard)
    with pytest.raises(StorageError, match=r"'net\.bias'.*\[4\].*index says.*\[3\]"):
        storage.read(path)
    save_file({**some_tensors(), "net.bias": torch.ones(3)}, shard)
    with pytest.raises(StorageError, match=r"float32.*index says.*float64"):
        storage.read(path)
    save_file({"net.weight": torch.ones(3, 4), "extra": torch.ones(1)}, shard)
    with pytest.raises(StorageError, match=r"disagree on 'extra', 'head\.weight'"):
        storage.read(path)


@pytest.mark.parametrize("file", ["../p.safetensors", "/etc/passwd", "..", "", 3])
def test_an_index_that_points_outside_its_folder(tmp_path: Path, file: object) -> None:
    storage.write(tmp_path / "p", some_tensors(), RECORD)
    index_file = tmp_path / "p" / "precision.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"]["net.bias"] = file
    index_file.write_text(json.dumps(index))
    with pytest.raises(StorageError, match=r"same folder"):
        storage.read(tmp_path / "p")


def test_an_index_that_describes_only_some_tensors(tmp_path: Path) -> None:
    storage.write(tmp_path / "p", some_tensors(), RECORD)
    index_file = tmp_path / "p" / "precision.safetensors.index.json"
    index = json.loads(index_file.read_text())
    del index["metadata"]["tensors"]["net.bias"]
    index_file.write_text(json.dumps(index))
    with pytest.raises(StorageError, match=r"'net\.bias'.*index says None"):
        storage.read(tmp_path / "p")


@pytest.mark.parametrize("name", ["p.safetensors", "p"])
def test_files_get_the_rights_that_the_umask_gives(tmp_path: Path, name: str) -> None:
    old = os.umask(0o022)
    try:
        storage.write(tmp_path / name, {"w": torch.ones(2)}, {})
    finally:
        os.umask(old)
    written = [p for p in [tmp_path / name, *(tmp_path / name).rglob("*")] if p.is_file()]
    assert written
    assert {p.stat().st_mode & 0o777 for p in written} == {0o644}
