"""Reading pieces of safetensors files: the numbers to the bit, and every damage named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from blr_analysis.errors import BLRError, InputError, StorageError
from blr_analysis.files import Folder, Loaded, Scratch, fingerprint
from blr_analysis.files.source import OPEN

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


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="lists what is open")
def test_few_files_stay_open_and_none_for_longer_than_the_buffers(tmp_path: Path) -> None:
    for k in range(3 * OPEN):
        save_file({f"t{k}": torch.tensor([float(k)])}, tmp_path / f"{k}.safetensors")
    sources = [Folder.open(path) for path in sorted(tmp_path.iterdir())]

    def held() -> int:
        places = (os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir())
        return sum(place.startswith(os.path.realpath(tmp_path)) for place in places)

    scratch = Scratch()
    for _ in range(2):
        for source in sources:
            (name,) = source.specs
            assert source.read(name, 0, 1, scratch).item() == float(name[1:])
            assert held() <= OPEN
    assert held() == OPEN
    del scratch
    assert held() == 0


def test_a_piece_outside_a_tensor_is_refused(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    source = Folder.open(tmp_path)
    for bad in ((-1, 2), (3, 2), (0, 16)):
        with pytest.raises(InputError, match="float32"):
            source.read("float32", *bad, Scratch())
    with pytest.raises(InputError, match="nothing_like_it"):
        source.read("nothing_like_it", 0, 1, Scratch())


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no folder"):
        Folder.open(tmp_path / "absent")
    with pytest.raises(StorageError, match=r"holds no model\.safetensors"):
        Folder.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(StorageError, match="pickle"):
        Folder.open(tmp_path)


def test_a_distributed_checkpoint_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x04.")
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(StorageError, match=r"\.metadata is a pickle.*dcp_to_torch_save"):
        Folder.open(tmp_path)


def test_two_generations_of_weights(tmp_path: Path) -> None:
    sharded(tmp_path, halves())
    save_file(tensors(), tmp_path / "model.safetensors")
    with pytest.raises(StorageError, match="both"):
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


def test_an_index_that_names_a_missing_file(tmp_path: Path) -> None:
    sharded(tmp_path, halves())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(StorageError, match="model-00002-of-00002"):
        Folder.open(tmp_path)


def test_an_index_that_disagrees_with_its_shards(tmp_path: Path) -> None:
    sharded(tmp_path, halves())
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    lost = weight_map.pop("float32")
    write_index(tmp_path, weight_map)
    with pytest.raises(StorageError, match="only the file holds 'float32'"):
        Folder.open(tmp_path)
    write_index(tmp_path, {**weight_map, "float32": lost, "ghost": lost})
    with pytest.raises(StorageError, match="only the index places 'ghost'"):
        Folder.open(tmp_path)


def test_one_name_in_two_shards(tmp_path: Path) -> None:
    one, two = halves()
    sharded(tmp_path, [one, {**two, "float32": one["float32"]}])
    with pytest.raises(StorageError, match="float32"):
        Folder.open(tmp_path)
    text = '{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(StorageError, match="'w' stands in it twice"):
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


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "8 bytes, placed in 4"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "begins at byte 4"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "impossible"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "impossible"),
        ({"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}, "impossible"),
        ({"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}, "'F4'"),
        ({"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}, "dtype"),
        ({"dtype": "F32", "shape": [1]}, "lacks"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0]}, "lacks"),
        ("F32", "lacks"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "more": 1}, "longer"),
    ],
)
def test_a_header_that_does_not_add_up(tmp_path: Path, entry: object, word: str) -> None:
    path = tmp_path / "model.safetensors"
    header(path, {"w": entry}, 4 + 4 * (word == "longer"))
    with pytest.raises(StorageError, match=word):
        Folder.open(path)


def test_overlapping_tensors(tmp_path: Path) -> None:
    span = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header(tmp_path / "m.safetensors", {"a": span, "b": span}, 4)
    with pytest.raises(StorageError, match="begins at byte 0 of the data, not at 4"):
        Folder.open(tmp_path / "m.safetensors")


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


PIECES = "DCP_SHARDING_INFO"  # as torch.distributed.checkpoint names them


def in_pieces(folder: Path, starts: list[list[int]]) -> torch.Tensor:
    """A matrix whose rows lie in two files, said to begin there."""
    folder.mkdir()
    rows = torch.arange(20.0).view(5, 4)
    for k, (part, start) in enumerate(zip((rows[:3], rows[3:]), starts, strict=True)):
        told = {PIECES: json.dumps({"w": {"saved_offsets": start}})}
        save_file({"w": part.contiguous()}, folder / f"shard-{k}.safetensors", told)
    write_index(folder, {"w": ["shard-1.safetensors", "shard-0.safetensors"]})
    return rows


def test_rows_that_processes_wrote_are_one_tensor(tmp_path: Path) -> None:
    rows = in_pieces(tmp_path / "a", [[0, 0], [3, 0]])
    source = Folder.open(tmp_path / "a")
    assert (source.specs["w"].shape, source.specs["w"].dtype) == ((5, 4), torch.float32)
    assert torch.equal(source.tensors()["w"], rows)
    for start in range(21):
        for stop in range(start, 21):
            assert torch.equal(source.read("w", start, stop, Scratch()), rows.flatten()[start:stop])
    with pytest.raises(StorageError, match="pieces"):
        Folder.open(tmp_path / "a" / "shard-0.safetensors")


@pytest.mark.parametrize("second", [[4, 0], [0, 4], ["a", 0], 3])
def test_rows_that_do_not_join_are_refused(tmp_path: Path, second: list[int]) -> None:
    in_pieces(tmp_path / "a", [[0, 0], second])
    with pytest.raises(StorageError):
        Folder.open(tmp_path / "a")
