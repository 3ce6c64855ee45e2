"""Reading pieces of safetensors files: the numbers to the bit, and every damage named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from blr_analysis.errors import BLRError, InputError, StorageError
from blr_analysis.files import Folder, Loaded, Scratch, fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {
        str(d).removeprefix("torch."): torch.randint(0, 2, (3, 5), generator=generator).to(d)
        for d in DTYPES
    }
    return {**made, "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}


def sharded(folder: Path, parts: list[dict[str, torch.Tensor]]) -> Path:
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for k, part in enumerate(parts, 1):
        file = f"model-{k:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def halves() -> list[dict[str, torch.Tensor]]:
    every = list(tensors().items())
    return [dict(every[:4]), dict(every[4:])]


def test_the_same_numbers_as_the_library_reads(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    library = load_file(tmp_path / "model.safetensors")
    for place in (tmp_path, tmp_path / "model.safetensors"):
        source = Folder.open(place)
        assert set(source.specs) == set(library)
        for name, value in library.items():
            assert torch.equal(source.tensor(name), value)
            assert source.specs[name].shape == value.shape
            assert source.specs[name].dtype == value.dtype


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 15), st.integers(0, 15), st.sampled_from(DTYPES))
def test_any_piece(
    tmp_path_factory: pytest.TempPathFactory, a: int, b: int, dtype: torch.dtype
) -> None:
    folder = tmp_path_factory.getbasetemp() / "pieces"
    if not folder.exists():
        folder.mkdir()
        save_file(tensors(), folder / "model.safetensors")
    name = str(dtype).removeprefix("torch.")
    start, stop = min(a, b), max(a, b)
    found = Folder.open(folder).read(name, start, stop, Scratch())
    assert torch.equal(found, tensors()[name].reshape(-1)[start:stop])
    assert torch.equal(Loaded("x", tensors()).read(name, start, stop, Scratch()), found)


def test_shards_and_symbolic_links_as_a_hubs_cache_has_them(tmp_path: Path) -> None:
    sharded(tmp_path / "blobs", halves())
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(file)
    source = Folder.open(snapshot)
    assert all(torch.equal(source.tensor(n), t) for n, t in tensors().items())


def test_the_fingerprint_is_of_the_weights_and_not_of_their_files(tmp_path: Path) -> None:
    one, other = sharded(tmp_path / "one", halves()), tmp_path / "other"
    other.mkdir()
    save_file(tensors(), other / "model.safetensors", metadata={"made": "elsewhere"})
    print_ = fingerprint(Folder.open(one), progress=False)
    assert print_ == fingerprint(Folder.open(other), progress=False)
    assert print_ == fingerprint(Loaded("memory", tensors()), progress=False)
    changed = {**tensors(), "scalar": torch.tensor(2.25)}
    assert print_ != fingerprint(Loaded("memory", changed), progress=False)
    assert len(print_) == 64


def test_a_piece_outside_a_tensor_is_refused(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    source = Folder.open(tmp_path)
    for bad in ((-1, 2), (3, 2), (0, 16)):
        with pytest.raises(InputError, match="float32"):
            source.read("float32", *bad, Scratch())
    with pytest.raises(InputError, match="nothing_like_it"):
        source.read("nothing_like_it", 0, 1, Scratch())


def nothing_there(folder: Path) -> None:
    folder.rmdir()


def a_pickle(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def a_distributed_checkpoint(folder: Path) -> None:
    (folder / "__0_0.distcp").write_bytes(b"")


def two_generations(folder: Path) -> None:
    sharded(folder, halves())
    save_file(tensors(), folder / "model.safetensors")


def a_missing_shard(folder: Path) -> None:
    sharded(folder, halves())
    (folder / "model-00002-of-00002.safetensors").unlink()


def a_name_in_two_shards(folder: Path) -> None:
    one, two = halves()
    sharded(folder, [one, {**two, "float32": one["float32"]}])


def a_name_twice_in_the_index(folder: Path) -> None:
    text = '{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(text)


def a_part_of_a_tensor(folder: Path) -> None:
    told = {"DCP_SHARDING_INFO": json.dumps({"float32": {"saved_offsets": [3, 0]}})}
    save_file(tensors(), folder / "model.safetensors", told)


def a_dtype_that_torch_lacks(folder: Path) -> None:
    header(folder / "model.safetensors", {"w": {**W, "dtype": "F8_E8M0", "shape": [4]}}, 4)


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (nothing_there, "no folder"),
        (lambda _: None, r"holds no model\.safetensors"),
        (a_pickle, "pickle"),
        (a_distributed_checkpoint, r"\.metadata is a pickle.*dcp_to_torch_save"),
        (two_generations, "both"),
        (a_missing_shard, "model-00002-of-00002"),
        (a_name_in_two_shards, "float32"),
        (a_name_twice_in_the_index, "'w' stands in it twice"),
        (a_part_of_a_tensor, "parts of tensors"),
        (a_dtype_that_torch_lacks, "F8_E8M0"),
    ],
)
def test_what_is_no_model_is_refused(
    tmp_path: Path, made: Callable[[Path], None], word: str
) -> None:
    made(tmp_path)
    with pytest.raises(StorageError, match=word):
        Folder.open(tmp_path)


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "..", "",
        "C:\\x.safetensors", "a\\b.safetensors", "model.bin", ".hidden.safetensors", 3, None, ["x"],
    ],
)  # fmt: skip
def test_an_index_opens_nothing_outside_its_folder(tmp_path: Path, file: object) -> None:
    sharded(tmp_path, halves())
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    write_index(tmp_path, {**weight_map, "w": file})
    with pytest.raises(StorageError, match="places 'w' in"):
        Folder.open(tmp_path)


def test_an_index_that_disagrees_with_its_shards(tmp_path: Path) -> None:
    sharded(tmp_path, halves())
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    lost = weight_map.pop("float32")
    write_index(tmp_path, weight_map)
    with pytest.raises(StorageError, match="disagree on 'float32'"):
        Folder.open(tmp_path)
    write_index(tmp_path, {**weight_map, "float32": lost, "ghost": lost})
    with pytest.raises(StorageError, match="disagree on 'ghost'"):
        Folder.open(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": []}', "{}", '"x"', "\udcff"])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(StorageError, match="index"):
        Folder.open(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 7, 8, 9, 60, -1])
def test_a_truncated_file(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(64)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(StorageError, match="truncated"):
        Folder.open(tmp_path)


def header(path: Path, entries: dict, data: int) -> None:
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))


W = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("entries", "size"),
    [
        ({"w": {**W, "shape": [2]}}, 4),
        ({"w": {**W, "data_offsets": [4, 8]}}, 8),
        ({"w": {**W, "shape": [-1]}}, 4),
        ({"w": {**W, "shape": [True]}}, 4),
        ({"w": {**W, "shape": "1"}}, 4),
        ({"w": {**W, "dtype": "F4"}}, 4),
        ({"w": {**W, "dtype": ["F32"]}}, 4),
        ({"w": {"dtype": "F32", "shape": [1]}}, 4),
        ({"w": {**W, "data_offsets": [0]}}, 4),
        ({"w": "F32"}, 4),
        ({"w": W}, 8),
        ({"a": W, "b": W}, 4),
        ({"w": W, "__metadata__": {"a": 1}}, 4),
    ],
)
def test_a_header_that_does_not_add_up(tmp_path: Path, entries: dict, size: int) -> None:
    header(tmp_path / "model.safetensors", entries, size)
    with pytest.raises(StorageError, match=r"truncated or is no safetensors file \(.*\w"):
        Folder.open(tmp_path)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_damage_of_the_header_goes_unnamed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any bytes give tensors that lie inside of the file, or an error of ours."""
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    save_file({"a": torch.ones(3), "b": torch.zeros(2, 2)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(bytes(content[:cut]) + data.draw(st.binary(max_size=8)))
    try:
        source = Folder.open(path)
    except BLRError:
        return
    for name, spec in source.specs.items():
        assert source.tensor(name).numel() == spec.numel


def test_a_file_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(4)}, path)
    source = Folder.open(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(StorageError, match="was changed"):
        source.tensor("w")
    path.unlink()
    with pytest.raises(StorageError, match="cannot read"):
        source.tensor("w")


@pytest.mark.parametrize(
    "given_", [{}, [1], {"w": 1}, {1: torch.ones(1)}, {"w": torch.ones(1, device="meta")}]
)
def test_a_state_dict_that_is_none(given_: object) -> None:
    with pytest.raises(InputError, match="mine"):
        Loaded("mine", given_)
