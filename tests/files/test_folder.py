"""Reading pieces of safetensors files: the numbers to the bit, and every damage named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
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


def shards(folder: Path, **changes: object) -> None:
    """Two shards, whose index says of some tensors that they are elsewhere (None: left out)."""
    sharded(folder, halves())
    weight_map = {n: f"model-0000{k}-of-00002.safetensors" for k in (1, 2) for n in halves()[k - 1]}
    write_index(folder, {n: f for n, f in (weight_map | changes).items() if f != "nowhere"})


def entry(folder: Path, entries: dict, data: int) -> None:
    """A file with this header and so many bytes of numbers."""
    text = json.dumps(entries).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(data)
    (folder / "model.safetensors").write_bytes(content)


def cut(folder: Path, kept: int) -> None:
    save_file({"w": torch.ones(64)}, folder / "model.safetensors")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:kept])


def both(folder: Path) -> None:
    shards(folder)
    save_file(tensors(), folder / "model.safetensors")


def lacking(folder: Path) -> None:
    shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def twice(folder: Path) -> None:
    one, two = halves()
    sharded(folder, [one, {**two, "float32": one["float32"]}])


def part(folder: Path) -> None:
    told = {"DCP_SHARDING_INFO": json.dumps({"float32": {"saved_offsets": [3, 0]}})}
    save_file(tensors(), folder / "model.safetensors", told)


def index(folder: Path, text: str) -> None:
    content = text.encode("utf-8", "surrogateescape")
    (folder / "model.safetensors.index.json").write_bytes(content)


W = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
OUTSIDE = [
    "../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "..", "",
    "C:\\x.safetensors", "a\\b.safetensors", "model.bin", ".hidden.safetensors", 3, None, ["x"],
]  # fmt: skip
ODD: list[tuple[dict, int]] = [
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
]
REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (lambda p: p.rmdir(), "no folder"),
    (lambda p: None, r"holds no model\.safetensors"),
    (lambda p: (p / "pytorch_model.bin").write_bytes(b"\x80\x04."), "pickle"),
    (lambda p: (p / "__0_0.distcp").write_bytes(b""), r"\.metadata is a pickle.*dcp_to_torch_save"),
    (both, "both"),
    (lacking, "model-00002-of-00002"),
    (twice, "disagree on 'float32'"),
    (lambda p: shards(p, float32="nowhere"), "disagree on 'float32'"),
    (lambda p: shards(p, ghost="model-00001-of-00002.safetensors"), "disagree on 'ghost'"),
    (part, "parts of tensors"),
    (lambda p: entry(p, {"w": {**W, "dtype": "F8_E8M0", "shape": [4]}}, 4), "F8_E8M0"),
    *((partial(shards, w=file), "places 'w' in") for file in OUTSIDE),
    *(
        (partial(index, text=text), "index")
        for text in ("", "[]", "{", '{"weight_map": []}', "{}", '"x"', "\udcff")
    ),
    *((partial(cut, kept=kept), "truncated") for kept in (0, 4, 7, 8, 9, 60, -1)),
    *(
        (partial(entry, entries=odd, data=size), r"truncated or damaged \(no safetensors.*\w")
        for odd, size in ODD
    ),
]


@pytest.mark.parametrize(("made", "word"), REFUSED)
def test_what_is_no_model_is_refused(
    tmp_path: Path, made: Callable[[Path], object], word: str
) -> None:
    made(tmp_path)
    with pytest.raises(StorageError, match=word):
        Folder.open(tmp_path)


def mine() -> Loaded:
    return Loaded("mine", tensors())


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: mine().read("float32", -1, 2, Scratch()), "float32"),
        (lambda: mine().read("float32", 3, 2, Scratch()), "float32"),
        (lambda: mine().read("float32", 0, 16, Scratch()), "float32"),
        (lambda: mine().read("nothing_like_it", 0, 1, Scratch()), "nothing_like_it"),
        (lambda: Loaded("mine", {}), "mine"),
        (lambda: Loaded("mine", [1]), "mine"),  # type: ignore[arg-type]
        (lambda: Loaded("mine", {"w": 1}), "mine"),
        (lambda: Loaded("mine", {1: torch.ones(1)}), "mine"),  # type: ignore[dict-item]
        (lambda: Loaded("mine", {"w": torch.ones(1, device="meta")}), "mine"),
    ],
)
def test_what_is_no_piece_or_state_dict_is_refused(call: Callable[[], object], word: str) -> None:
    with pytest.raises(InputError, match=word):
        call()


@settings(max_examples=100, deadline=None)
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
