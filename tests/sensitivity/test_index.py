"""An index on disk against exact influence, killed builds, and folders of somebody else."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import mlp
from oracles import fit_at_rest, relative
from safetensors.torch import load_file, save_file
from tiny_lm import sequences, task_of, tiny_lm

import blr_analysis as blr
from blr_analysis.errors import InputError, PosteriorError, StorageError
from blr_analysis.sensitivity.index import block_count, blocks, build, stored
from blr_analysis.sensitivity.index.compressed import Compressed, Compression
from blr_analysis.sensitivity.index.projection import Projection, multiplies_half
from blr_analysis.sensitivity.index.rounded import estimates, rounded
from blr_analysis.sensitivity.index.search import error_factor
from blr_analysis.sensitivity.index.signs import hadamard
from blr_analysis.sensitivity.index.whitened import Tile

N = 12


def language(seed: int = 0) -> blr.Task:
    return task_of(tiny_lm(seed, tied=True), sequences(N), metadata={"source": [*"ab"] * (N // 2)})


def posterior(task: blr.Task, structure: str = "diag") -> blr.Posterior:
    how: dict[str, Any] = {"prior_precision": 1.0}
    how |= {} if structure == "gram" else {"curvature": "empirical_fisher"}
    return fit_at_rest(task, structure=structure, **how)


@pytest.mark.parametrize(
    ("structure", "normalize"),
    [("diag", False), ("kron", False), ("gram", False), ("diag", True), ("kron", "cosine")],
)
def test_with_room_for_everything_it_is_exact(
    tmp_path: Path, structure: str, normalize: bool | str
) -> None:
    task, test = language(), task_of(tiny_lm(tied=True), sequences(4))
    q = posterior(task, structure)
    asked: dict[str, Any] = {"normalize": normalize}
    built = blr.Index.build(task, q, tmp_path / "i", rank=10**6, dtype="float64")
    exact = blr.influence(task, q, test, **asked).matrix
    assert built.error.relative_rms < 1e-10
    index = blr.Index.open(tmp_path / "i")
    assert relative(index.influence(test, **asked), exact) < 1e-10
    assert relative(index.self_influence, blr.sensitivity(task, q).self_influence) < 1e-10
    assert index.examples["source"] == task.metadata["source"]
    top, truth = index.top(test, 3, **asked), blr.influence(task, q, test, k=3, **asked)
    assert torch.equal(top.helpful, truth.helpful)
    assert torch.equal(top.harmful, truth.harmful)
    assert list(top.table) == list(truth.table)
    for column in ("test", "effect", "train", "source"):
        assert top.table[column].equals(truth.table[column])


def of_rows(n: int, width: int) -> blr.Task:
    """Labels of normal rows; every 60th is nearly the first."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, width, generator=generator)
    x[::60] = x[0] + 0.3 * x[::60]
    y = torch.randint(width, (n,), generator=generator)
    y[::60] = y[0]
    torch.manual_seed(0)
    return blr.Task(torch.nn.Linear(width, width), (x, y), likelihood="categorical")


@pytest.mark.slow
@pytest.mark.parametrize(("normalize", "threads"), [(True, 1), (False, 2)])
def test_a_search_by_signs_finds_the_same(normalize: bool, threads: int, tmp_path: Path) -> None:
    """In two files, among rows that are like the question or not."""
    task = of_rows(280, 32)
    index = blr.Index.build(task, posterior(task), tmp_path / "i", rank=2**9)
    assert index.signs and index._compression.blocks
    test = task.subset(range(9 if threads == 1 else 3))
    values, before = index.influence(test, normalize=normalize), torch.get_num_threads()
    torch.set_num_threads(threads)
    top = index.top(test, 3, normalize=normalize)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    alone = index.top(test, 3, normalize=normalize, harmful=False)
    assert torch.equal(alone.helpful, top.helpful) and alone.harmful.shape == (test.n_data, 0)
    assert alone.table.train.tolist() == top.table.query("effect == 'helpful'").train.tolist()
    for side, largest in (("helpful", True), ("harmful", False)):
        truth, rows = values.topk(3, dim=0, largest=largest)
        assert torch.equal(getattr(top, side), rows.mT)
        assert relative(getattr(top, f"{side}_values"), truth.mT) < 1e-5


def drawn(count: int, numbers: int, seed: int) -> torch.Tensor:
    """Unit vectors whose numbers are of very different sizes, all near one direction."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.logspace(0, -2, numbers, dtype=torch.float64)
    x = torch.randn(count, numbers, generator=generator, dtype=torch.float64) * size
    return torch.nn.functional.normalize(x + 0.3 * size)


def flat() -> blr.Posterior:
    """Σ = 1 over 3,000 numbers, in three matrices."""
    sizes = {"a": 700, "b": 1, "c": 2299}
    ones = {n: torch.ones(k) for n, k in sizes.items()}
    mean = {n: torch.zeros(k) for n, k in sizes.items()}
    return blr.Posterior(mean, ones, prior_precision=1.0, n_data=1)


def signed(
    x: torch.Tensor, size: int, count: int = 0, factor: int = 1
) -> tuple[Compression, Compressed]:
    """What is stored of these vectors, with so many blocks."""
    compression = Compression(size, True, min(size, 3072), count)
    parts = zip(compression.roots(flat()).values(), x.split([700, 1, 2299], 1), strict=True)
    tiles = [Tile(slice(None), start, w * root) for (start, root), w in parts]
    return compression, compression.compressed(len(x), tiles, block_factor=factor)


@pytest.mark.parametrize("size", [256, 1024, 4 * 3072, 43 * 3072])
def test_signs_err_as_the_formula_says(size: int) -> None:
    x = drawn(30, 3000, 0)
    y = drawn(25, 3000, 1)
    compression, gradients = signed(x, size)
    _, questions = signed(y, size)
    assert questions.z.norm(dim=1).mean() == pytest.approx(1, abs=0.1)
    records = compression.records(gradients, torch.float16)
    assert ("first" in records) == (size > 2**17)  # which lie apart
    signs = [records[name] for name in ("first", "gradients") if name in records]
    assert sum(tensor.nbytes for tensor in signs) == 30 * size // 8
    values = compression.values(records, questions)
    assert 0.5 < float((values - x @ y.T).std()) / (math.pi / 2 / size) ** 0.5 < 1.3
    for bits in (1, 2, 4):
        estimated = estimates(compression, records, rounded(compression, questions, bits))
        rough, error = estimated.unbind(1)
        deviation = ((rough - values) / error).square().mean().sqrt()
        assert 0.4 < float(deviation) < 1.3
        assert error_factor(estimated, values) == deviation.clamp_min(1)


def blocks_by_hand(w: torch.Tensor) -> dict[int, torch.Tensor]:
    """Blocks of 64 of each of the three matrices."""
    starts = [*range(0, 700, 64), 700, *range(701, 3000, 64)]
    ends = [*starts[1:], 3000]
    return {k: w[a:b] for k, (a, b) in enumerate(zip(starts, ends, strict=True))}


def longest_by_hand(w: torch.Tensor, count: int) -> dict[int, torch.Tensor]:
    parts = blocks_by_hand(w)
    longest = sorted(parts, key=lambda place: -float(parts[place].norm()))[:count]
    return {place: parts[place] for place in longest}


def rest_by_hand(w: torch.Tensor, count: int) -> torch.Tensor:
    """All but the longest blocks."""
    longest = longest_by_hand(w, count)
    parts = blocks_by_hand(w)
    return torch.cat([torch.zeros_like(p) if k in longest else p for k, p in parts.items()])


def common_by_hand(
    stored: list[dict[int, torch.Tensor]], asked: list[dict[int, torch.Tensor]]
) -> torch.Tensor:
    return torch.tensor(
        [[sum(float(a[k] @ b[k]) for k in a if k in b) for b in asked] for a in stored]
    )


def test_the_longest_blocks_are_stored_and_left_out_of_the_signs() -> None:
    """With no number beyond them nothing is left to signs."""
    x = drawn(6, 3000, 0)
    compression, gradients = signed(x, 1024, 3)
    longest = [longest_by_hand(w, 3) for w in x]
    rests = torch.stack([rest_by_hand(w, 3) for w in x])
    assert [set(row.tolist()) for row in gradients.places] == [set(parts) for parts in longest]
    assert relative(gradients.z, signed(rests, 1024)[1].z) < 1e-6
    records = compression.records(gradients, torch.float16)
    assert relative(records["length"], rests.norm(dim=1)) < 1e-6
    units = records["units"].unsqueeze(2)
    numbers = blocks.unpacked(records["blocks"]) * units
    assert relative(numbers, gradients.blocks) < 0.15
    assert bool(((numbers - gradients.blocks).abs() <= units * 0.501).all())
    _, questions = signed(drawn(5, 3000, 1), 1024, 3)
    without_rest = records | {"length": torch.zeros(6)}
    common = blocks.common_products(records, questions.block_table)
    assert torch.equal(compression.values(without_rest, questions), common)
    fitting = Compression.of(flat(), 2000, torch.float16, 50)
    assert fitting.blocks == 50 and 3600 < fitting.nbytes(torch.float16) <= 4000


@pytest.mark.parametrize("factor", [1, 2])
def test_blocks_are_multiplied_with_those_of_a_question(factor: int) -> None:
    """In 4 bits. With more of a question's blocks than are stored, its z is of all of it."""
    x = drawn(6, 3000, 0)
    y = drawn(5, 3000, 1)
    compression, gradients = signed(x, 1024, 3)
    _, questions = signed(y, 1024, 3, factor)
    stored = [longest_by_hand(w, 3) for w in x]
    asked = [longest_by_hand(w, 3 * factor) for w in y]
    common = blocks.common_products(
        compression.records(gradients, torch.float16), questions.block_table
    )
    assert relative(common, common_by_hand(stored, asked)) < 0.1
    assert [set(row.tolist()) for row in questions.places] == [set(parts) for parts in asked]
    if factor > 1:
        assert relative(questions.z, signed(y, 1024)[1].z) < 1e-12


@pytest.mark.parametrize(("kind", "share"), [("flat", 0), ("few", 1 / 4), ("none", 0)])
def test_as_many_blocks_are_kept_as_leave_least(kind: str, share: float) -> None:
    """A dozen blocks that hold nearly all, all alike, and gradients of 0."""
    squares = torch.ones(5, 1000)
    if kind == "few":
        squares[:, ::100] = 1e4
    squares *= kind != "none"
    best = block_count.best_block_count(squares, 5, 1000, 2000)
    assert best == int(share * 2000) // blocks.BLOCK_BYTES
    first = Tile(slice(0, 2), 0, torch.ones(2, 100))
    second = Tile(slice(2, 3), 0, 2 * torch.ones(1, 100))
    assert block_count.block_squares(3, [first, second]).tolist() == [
        [64, 36],
        [64, 36],
        [256, 144],
    ]


def test_sums_are_over_random_signs_at_every_place_in_turn() -> None:
    x = drawn(4, 3000, 0)
    mixed = signed(x, 512)[1].z
    bits = np.unpackbits(np.random.PCG64(0).random_raw(48).view(np.uint8))
    places = torch.cat([torch.arange(700), torch.tensor([704]), 768 + torch.arange(2299)])
    by_hand = torch.zeros(4, 512, dtype=torch.float64)
    by_hand.index_add_(1, places % 512, x * torch.from_numpy(bits * 2.0 - 1)[places])
    matrix = hadamard(256).double()
    assert torch.equal(matrix, matrix.T) and relative(matrix @ matrix, torch.eye(256)) < 1e-6
    assert relative(mixed.view(4, 256, 2), matrix @ by_hand.view(4, 256, 2)) < 1e-6


def test_products_in_bfloat16_change_little() -> None:
    task = language()
    q = posterior(task, "kron")
    compression = Compression(256, True, 256, 0)
    roots = compression.roots(q)
    exact = Projection(task, q, compression, roots).compressed()
    half = Projection(task, q, compression, roots, half=True).compressed()
    assert 1e-5 < relative(half.z, exact.z) < 0.02
    assert relative(half.squares, exact.squares) < 2e-3 and half.z.dtype == exact.z.dtype
    assert not multiplies_half(q)  # in double precision


def test_few_numbers_err_as_they_say_and_are_refined(tmp_path: Path) -> None:
    task, test = language(), task_of(tiny_lm(tied=True), sequences(4))
    q = posterior(task)
    index = blr.Index.build(task, q, tmp_path / "i", rank=60)
    assert index.signs and 60 < index._compression.nbytes(torch.float16) <= 120
    assert Compression.of(q, 20, torch.float16).size == 256  # of 320 bits
    assert 0 < index.error.relative_rms < 1
    exact = blr.influence(task, q, test)
    gap = relative(index.influence(test), exact.matrix)
    assert 0.2 < gap / index.error.relative_rms < 5
    for normalize in (False, True, "cosine"):
        refined = index.top(test, 2, refine=N, normalize=normalize)
        truth = blr.influence(task, q, test, normalize=normalize).top(2)
        assert torch.equal(refined.helpful, truth.helpful)
        assert relative(refined.harmful_values, truth.harmful_values) < 1e-10


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, "No space left on device"), StorageError),
    ],
    ids=["killed", "full disk"],
)
@pytest.mark.slow
def test_a_build_that_ends_early_goes_on_to_the_same_bits(
    raised: BaseException,
    error: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = of_rows(300, 12)
    q = posterior(task, "kron")
    monkeypatch.setattr(build, "multiplies_half", lambda q: True)  # and elsewhere, it goes on
    blr.Index.build(task, q, tmp_path / "whole", rank=100)
    real = stored.save_file

    def ended(tensors: Any, draft: Path, metadata: Any) -> None:
        real(tensors, draft, metadata)
        if list((tmp_path / "i").glob("gradients-*")):
            raise raised

    monkeypatch.setattr(stored, "save_file", ended)
    with pytest.raises(error):
        blr.Index.build(task, q, tmp_path / "i", rank=100)
    with pytest.raises(StorageError, match="not complete"):
        blr.Index.open(tmp_path / "i")
    monkeypatch.setattr(stored, "save_file", real)
    monkeypatch.setattr(build, "multiplies_half", lambda q: False)
    (left,) = (tmp_path / "i").glob("gradients-*")
    kept = left.stat().st_mtime_ns
    blr.Index.build(task, q, tmp_path / "i", rank=100)
    assert left.stat().st_mtime_ns == kept
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "i" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("what", ["input", "target", "metadata"])
def test_one_example_that_was_edited_is_other_data(tmp_path: Path, what: str) -> None:
    """As it stands among those that nobody looks at, in data that are read in another way."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(N, 3, generator=generator), torch.arange(N) % 3
    model, source = torch.nn.Linear(3, 3), [*"ab"] * (N // 2)

    def task() -> blr.Task:
        rows = list(zip(x.clone(), y.clone(), strict=True))
        return blr.Task(model, rows, metadata={"source": list(source)})

    q, apart = posterior(blr.Task(model, (x, y))), torch.stack([y, y], 1)[:, 0]
    blr.Index.build(blr.Task(model, (x, apart), metadata={"source": source}), q, tmp_path / "i")
    blr.Index.build(task(), q, tmp_path / "i")
    if what == "input":
        x[5, 1] += 1
    elif what == "target":
        y[5] = (y[5] + 1) % 3
    else:
        source[5] = "c"
    with pytest.raises(StorageError, match="another data"):
        blr.Index.build(task(), q, tmp_path / "i")
    with pytest.raises(PosteriorError, match="other data"):
        blr.Index.open(tmp_path / "i", task=task())


def test_what_does_not_belong_is_refused_by_name(tmp_path: Path) -> None:
    task = language()
    q = posterior(task)
    index = blr.Index.build(task, q, tmp_path / "i", rank=100)
    other = language(seed=3)
    with pytest.raises(StorageError, match="another posterior"):
        blr.Index.build(other, posterior(other), tmp_path / "i", rank=100)
    with pytest.raises(StorageError, match="another rank"):
        blr.Index.build(task, q, tmp_path / "i", rank=101)
    with pytest.raises(PosteriorError, match="another model"):
        index.influence(blr.Task(mlp(), (torch.zeros(2, 4), torch.zeros(2).long())))
    with pytest.raises(InputError, match="task="):
        blr.Index.open(tmp_path / "i").top(task, 2, refine=4)
    with pytest.raises(PosteriorError, match="'gram', not 'lowrank'"):
        blr.Index.build(task, posterior(task, "lowrank"), tmp_path / "j")
    with pytest.raises(PosteriorError, match="examples differ"):
        blr.Index.open(tmp_path / "i", task=task.subset(range(task.n_data)[::-1]))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").touch()
    with pytest.raises(StorageError, match=r"notes\.txt"):
        blr.Index.build(task, q, tmp_path / "foreign")
    opened = blr.Index.open(tmp_path / "i", task=task)
    file = next((tmp_path / "i").glob("gradients-*"))
    whole, table = file.read_bytes(), tmp_path / "i" / stored.EXAMPLES
    kept = load_file(file)
    for other, first in ((kept, "256"), ({n: t[:-1] for n, t in kept.items()}, "0")):
        save_file({n: t.contiguous() for n, t in other.items()}, file, {"first": first})
        with pytest.raises(StorageError, match="another file of an index"):
            blr.Index.open(tmp_path / "i")
    file.write_bytes(whole)
    rows = table.read_bytes()
    table.write_bytes(rows[: len(rows) // 2])
    with pytest.raises(StorageError, match=r"examples\.parquet' is damaged"):
        _ = blr.Index.open(tmp_path / "i").self_influence
    table.write_bytes(rows)
    file.write_bytes(whole[:-50])
    with pytest.raises(StorageError, match="is damaged"):
        opened.top(task, 2)
    file.unlink()
    with pytest.raises(StorageError, match="lacks gradients-"):
        blr.Index.open(tmp_path / "i")
    with pytest.raises(StorageError, match="no index"):
        blr.Index.open(tmp_path / "foreign")
