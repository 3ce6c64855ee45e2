"""Reading pieces of safetensors files: the numbers to the bit, and every damage named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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


def shards(folder: Path, *parts: dict[str, torch.Tensor], **placed: object) -> Path:
    """Two shards, whose index says of some tensors that they are elsewhere (None: nowhere)."""
    folder.mkdir(exist_ok=True)
    every = list(tensors().items())
    weight_map: dict[str, object] = {}
    for k, part in enumerate(parts or (dict(every[:4]), dict(every[4:])), 1):
        file = f"model-{k:05d}-of-00002.safetensors"
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    weight_map = {n: f for n, f in (weight_map | placed).items() if f != "nowhere"}
    index(folder, json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def index(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)


def test_one_file_or_shards_or_the_links_of_a_hubs_cache(tmp_path: Path) -> None:
    """The numbers of the library; one fingerprint, which is of weights and not of their files."""
    single = tmp_path / "single"
    snapshot = tmp_path / "snapshot"
    for folder in (single, snapshot):
        folder.mkdir()
    save_file(tensors(), single / "model.safetensors", metadata={"made": "elsewhere"})
    blobs = shards(tmp_path / "blobs")
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    library = load_file(single / "model.safetensors")
    expected = fingerprint(Loaded("memory", tensors()), progress=False)
    for place in (single, single / "model.safetensors", blobs, snapshot):
        source = Folder.open(place)
        actual = source.tensors()
        assert actual.keys() == library.keys()
        for name, value in library.items():
            assert torch.equal(actual[name], value)
            assert actual[name].dtype == value.dtype
            assert source.specs[name].shape == value.shape
            for start, stop in ((0, 0), (0, 1), (4, 11), (14, 15)) if value.ndim == 2 else ():
                start = min(start, value.numel())
                stop = min(stop, value.numel())
                piece = source.read(name, start, stop, Scratch())
                assert torch.equal(piece, value.reshape(-1)[start:stop])
        assert fingerprint(source, progress=False) == expected
    changed = {**tensors(), "scalar": torch.tensor(2.25)}
    assert len(expected) == 64
    assert fingerprint(Loaded("memory", changed), progress=False) != expected


def cut(folder: Path, kept: int) -> None:
    save_file({"w": torch.ones(64)}, folder / "model.safetensors")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:kept])


def both(folder: Path) -> None:
    save_file(tensors(), shards(folder) / "model.safetensors")


def part(folder: Path) -> None:
    told = {"DCP_SHARDING_INFO": json.dumps({"float32": {"saved_offsets": [3, 0]}})}
    save_file(tensors(), folder / "model.safetensors", told)


def strange(folder: Path) -> None:
    text = json.dumps({"w": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(4)
    (folder / "model.safetensors").write_bytes(content)


OUTSIDE = ["../a.safetensors", "/a.safetensors", "C:\\a.safetensors", "a.bin", ".a.safetensors", 3]
REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (lambda p: p.rmdir(), "no folder"),
    (lambda p: None, r"holds no model\.safetensors"),
    (lambda p: (p / "pytorch_model.bin").write_bytes(b"\x80\x04."), "pickle"),
    (lambda p: (p / "__0_0.distcp").write_bytes(b""), "pickle"),
    (both, "both"),
    (lambda p: (shards(p) / "model-00002-of-00002.safetensors").unlink(), "model-00002-of-00002"),
    (lambda p: shards(p, tensors(), {"float32": torch.ones(1)}), "disagree on 'float32'"),
    (lambda p: shards(p, float32="nowhere"), "disagree on 'float32'"),
    (lambda p: shards(p, ghost="model-00001-of-00002.safetensors"), "disagree on 'ghost'"),
    (part, "parts of tensors"),
    (strange, "F8_E8M0"),
    *((partial(shards, w=file), "places 'w' in") for file in OUTSIDE),
    *((partial(index, text=text), "index") for text in ("", "[]", '{"weight_map": []}', '"x"')),
    *((partial(cut, kept=kept), "truncated") for kept in (0, 4, 7, 8, 9, 60, -1)),
]


@pytest.mark.parametrize(("made", "word"), REFUSED)
def test_what_is_no_model_is_refused(
    tmp_path: Path, made: Callable[[Path], object], word: str
) -> None:
    made(tmp_path)
    with pytest.raises(StorageError, match=word):
        Folder.open(tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        {},
        [1],
        {"w": 1},
        {1: torch.ones(1)},
        {"w": torch.ones(1, device="meta")},
        {"w": torch.eye(2).to_sparse()},
    ],
)
def test_what_is_no_state_dict_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match="mine"):
        Loaded("mine", given)


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
