"""One flipped bit anywhere in what the package wrote: refused by `verify`, and where it is read."""

from __future__ import annotations

import operator
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import StorageError
from blr_analysis.files import Folder, Scratch, verify
from blr_analysis.files.checksums import PIECE, ROW, WORD, Checksum, checksum_of
from blr_analysis.files.headers import read_record, record_text
from blr_analysis.files.shards import save_file as save_with_checksums
from blr_analysis.merging import merge
from blr_analysis.merging.folders import execute
from blr_analysis.merging.job import Job, Member
from blr_analysis.merging.plan import make_plan
from blr_analysis.posterior import write_precision

FLIPS = 200
FEW = 6
RECIPE = {"optimizer": "sgd", "lr": 0.1, "epochs": 2, "batch_size": 5}


def task() -> blr.Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    return blr.Task(model, (torch.randn(20, 3), torch.arange(20) % 3), metadata={"id": range(20)})


def write_posterior(path: Path) -> None:
    blr.fit_laplace(task(), structure="kron", prior_precision=1.0).save(path)


def write_a_precision(path: Path) -> None:
    tensors = {name: p.detach().square() for name, p in task().model.named_parameters()}
    write_precision(path, tensors, kind="fisher_emp", definition="sum g^2", n_data=20)


def merge_with(path: Path) -> None:
    """Both of one training, which a merge remarks upon."""
    models = [{n: p.detach() + k for n, p in task().model.named_parameters()} for k in range(2)]
    merge(None, models, precisions=[path, path], method="fisher")


def write_index(path: Path) -> None:
    trained = task()
    q = blr.fit_laplace(trained, structure="kron", prior_precision=1.0)
    blr.Index.build(trained, q, path)


def query_index(path: Path) -> None:
    index = blr.Index.open(path)
    index.influence(task())
    assert len(index.self_influence) == 20


def write_run(path: Path) -> None:
    model = task().model
    checkpoints = blr.Checkpoints(model, steps=8, folder=path)
    checkpoints.begin()
    for _ in range(8):
        for p in model.parameters():
            p.data += 0.01
        checkpoints.step()
    (path / "recipe.json").write_text(record_text(RECIPE))


def read_run(path: Path) -> None:
    for file in path.glob("*.safetensors"):
        Folder.open(file).tensors()
    assert read_record(path / "recipe.json") == RECIPE


@dataclass(frozen=True)
class Kind:
    """How it is written and read; files that reading does not look at."""

    name: str
    write: Callable[[Path], None]
    read: Callable[[Path], object]
    unread: tuple[str, ...] = ()


KINDS = [
    Kind("posterior.safetensors", write_posterior, blr.Posterior.load),
    Kind("posterior", write_posterior, blr.Posterior.load),
    Kind("precision.safetensors", write_a_precision, merge_with),
    Kind("precision", write_a_precision, merge_with, ("precision.safetensors.index.json",)),
    Kind("index", write_index, query_index, ("index_plan.json",)),
    Kind("run", write_run, read_run),
]
KIND_NAME = operator.attrgetter("name")
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=KIND_NAME)


def files_of(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(p for p in place.rglob("*") if p.is_file())


def check_flips(kind: Kind, folder: Path, flips: int) -> None:
    place = folder / kind.name
    kind.write(place)
    files = files_of(place)
    assert set(verify(place).whole) == set(files)
    kind.read(place)
    choose = random.Random(0)
    for _ in range(flips):
        file = choose.choice(files)
        content = file.read_bytes()
        damaged = bytearray(content)
        at = choose.randrange(len(damaged))
        damaged[at] ^= 1 << choose.randrange(8)
        file.write_bytes(damaged)
        where = f"byte {at} of {len(damaged)} of {file.name}"
        readers = [verify] if file.name in kind.unread else [verify, kind.read]
        for reader in readers:
            with pytest.raises(StorageError):
                reader(place)
                pytest.fail(f"{where} was read")
        file.write_bytes(content)
    assert set(verify(place).whole) == set(files)


@pytest.mark.slow
@EVERY_KIND
def test_flipped_bits_are_refused(kind: Kind, tmp_path: Path) -> None:
    check_flips(kind, tmp_path, FLIPS)


@EVERY_KIND
def test_some_flipped_bits_are_refused(kind: Kind, tmp_path: Path) -> None:
    check_flips(kind, tmp_path, FEW)


def test_a_merge_by_recipe_is_verified(tmp_path: Path) -> None:
    """Tensors of odd sizes, written in pieces to several files; a folder beside them."""
    base = tmp_path / "base"
    (base / "code").mkdir(parents=True)
    (base / "config.json").write_text("{}")
    (base / "code" / "modeling_x.py").write_text("pass")
    g = torch.Generator().manual_seed(0)
    for name in ("base", "one"):
        (tmp_path / name).mkdir(exist_ok=True)
        tensors = {f"w{k}": torch.randn(3 * k + 1, 7, generator=g).bfloat16() for k in range(9)}
        save_file(tensors | {"odd": torch.ones(5)}, tmp_path / name / "model.safetensors")
    job = Job(members=(Member(tmp_path / "one"),), base=base, method="task_arithmetic")
    out = tmp_path / "out"
    execute(make_plan(job), out, max_shard_bytes=600, documents=lambda report: {"README.md": "x"})
    files = files_of(out)
    assert set(verify(out).whole) == set(files)
    assert len(list(out.glob("model-*"))) > 2
    choose = random.Random(0)
    for file in files:
        content = file.read_bytes()
        damaged = bytearray(content)
        damaged[choose.randrange(len(damaged))] ^= 1 << choose.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(StorageError):
            verify(out)
            pytest.fail(f"{file.name} was read")
        file.write_bytes(content)


def test_what_is_missing_foreign_or_damaged_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nothing is stored"):
        verify(tmp_path / "nowhere")
    save_file({"w": torch.ones(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(StorageError, match="none can be compared"):
        verify(tmp_path)
    write_posterior(tmp_path / "q")
    actual = verify(tmp_path)
    assert [p.name for p in actual.unknown] == ["foreign.safetensors"]
    assert len(actual.whole) == 3
    assert actual.nbytes == sum(p.stat().st_size for p in (tmp_path / "q").iterdir())
    shard = next((tmp_path / "q").glob("*.safetensors"))
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(StorageError, match=f"lacks '{shard.name}'"):
        verify(tmp_path)
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (tmp_path / "q" / "precision_config.json").write_text("{")
    with pytest.raises(StorageError, match="2 of 4 files are damaged"):
        verify(tmp_path)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name != "run"], ids=KIND_NAME)
def test_each_missing_file_is_refused(kind: Kind, tmp_path: Path) -> None:
    """The record too, without which every other file is whole."""
    place = tmp_path / kind.name
    kind.write(place)
    for file in files_of(place):
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(StorageError, match=r"lacks|nothing"):
            verify(place)
            pytest.fail(f"{file.name} was missing")
        file.write_bytes(content)
    verify(place)


def test_a_stray_shard_is_refused(tmp_path: Path) -> None:
    write_posterior(tmp_path / "q")
    shard = next((tmp_path / "q").glob("*.safetensors"))
    shutil.copy(shard, tmp_path / "q" / "precision-00002-of-00002.safetensors")
    with pytest.raises(StorageError, match="does not list"):
        verify(tmp_path)


def test_shards_of_another_posterior_are_refused(tmp_path: Path) -> None:
    """Though each is whole."""
    for name, value in (("one", 1.0), ("two", 2.0)):
        q = blr.Posterior(
            {"w": torch.zeros(2)}, {"w": value * torch.ones(2)}, n_data=3, prior_precision=1.0
        )
        q.save(tmp_path / name)
    shard = next((tmp_path / "one").glob("*.safetensors"))
    shutil.copy(shard, tmp_path / "two" / shard.name)
    for reader in (verify, blr.Posterior.load):
        with pytest.raises(StorageError, match="damaged"):
            reader(tmp_path / "two")


SIZES = st.sampled_from([0, 1, 7, 8, 9, ROW - 1, ROW, ROW + 8, 3 * ROW + 5, PIECE + ROW + 3])


@settings(deadline=None, max_examples=30)
@given(size=SIZES, seed=st.integers(0, 2**32), data=st.data())
def test_the_sums_are_of_the_words_whatever_the_pieces(
    size: int, seed: int, data: st.DataObject
) -> None:
    """Against sums of Python's own whole numbers, of pieces in any order."""
    content = np.random.default_rng(seed).bytes(size)
    cuts = sorted(data.draw(st.lists(st.integers(0, size // WORD), max_size=4)))
    ends = [0, *(WORD * cut for cut in cuts), size]
    pieces = data.draw(st.permutations(list(pairwise(ends))))
    checksum = Checksum()
    for start, end in pieces:
        checksum.add(content[start:end], start)
    words = [int.from_bytes(content[k : k + WORD], "little") for k in range(0, size, WORD)]
    columns = ROW // WORD
    sums = [sum(words[column::columns]) % 2**64 for column in range(columns)]
    assert checksum._sums.tolist() == sums
    assert checksum.hexdigest() == checksum_of(content)


def test_pieces_of_a_tensor_are_compared_when_all_were_read(tmp_path: Path) -> None:
    """In any order, after a look at some; in a file of another program never."""
    values = torch.arange(4096.0)
    file = tmp_path / "w.safetensors"
    save_with_checksums({"w": values}, file, {})
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    source = Folder.open(file)
    pieces = [(1024, 4096), (0, 512), (512, 1024)]

    def read(*piece: int) -> Tensor:
        return source.read("w", *piece, Scratch())

    for _ in range(2):
        read(0, 100)
        for piece in pieces[:-1]:
            read(*piece)
        with pytest.raises(StorageError, match="damaged"):
            read(*pieces[-1])
    source = Folder.open(file)
    for piece in pieces[:-1]:  # by two readers in turn
        assert torch.equal(read(*piece), read(*piece))
    with pytest.raises(StorageError, match="damaged"):
        read(*pieces[-1])
    save_file({"w": values}, file)
    source = Folder.open(file)
    assert torch.equal(torch.cat([read(0, 1), read(1, 4096)]), values)
