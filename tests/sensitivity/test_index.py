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
from blr_analysis.sensitivity.influence import compressed, search
from blr_analysis.sensitivity.influence import index as module

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


@pytest.mark.parametrize(("normalize", "threads"), [(True, 1), (False, 2)])
def test_a_search_by_signs_finds_the_same(normalize: bool, threads: int, tmp_path: Path) -> None:
    """In two files, among rows that are like the question or not."""
    task = of_rows(280, 32)
    index = blr.Index.build(task, posterior(task), tmp_path / "i", rank=2**9)
    assert index.signs and index._blocks
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
    x: torch.Tensor, size: int, blocks: int = 0, more: int = 1
) -> tuple[compressed.Compression, compressed.Compressed]:
    """What is kept of these vectors."""
    compression = compressed.Compression(size, True, min(size, 3072), blocks)
    parts = zip(compression.roots(flat()).values(), x.split([700, 1, 2299], 1), strict=True)
    whole = slice(None)
    tiles = [(whole, start, w * root) for (start, root), w in parts]
    return compression, compression.compressed(len(x), tiles, more=more)


@pytest.mark.parametrize("size", [256, 1024, 4 * 3072, 43 * 3072])
def test_signs_err_as_the_formula_says(size: int) -> None:
    x, y = drawn(30, 3000, 0), drawn(25, 3000, 1)
    truth = x @ y.T
    (compression, stored), (_, asked) = signed(x, size), signed(y, size)
    assert asked.z.norm(dim=1).mean() == pytest.approx(1, abs=0.1)
    kept = compression.stored(stored, torch.float16)
    assert ("first" in kept) == (size > 2**17)  # which lie apart
    assert sum(kept[n].nbytes for n in ("first", "gradients") if n in kept) == 30 * size // 8
    error = compression.values(kept, asked) - truth
    assert 0.5 < float(error.std()) / (math.pi / 2 / size) ** 0.5 < 1.3
    exact = compression.values(kept, asked)
    for found in (
        compression.rough(kept, compression.rounded(asked, 1)),
        compression.near(kept, compression.rounded(asked, 2)),
        compression.near(kept, compression.rounded(asked, 4)),
    ):
        values, error = found.unbind(1)
        off = ((values - exact) / error).square().mean().sqrt()
        assert 0.4 < float(off) < 1.3 and search._wider(found, exact)[1] == off.clamp_min(1)


def test_the_longest_blocks_are_kept_and_left_out_of_the_signs() -> None:
    """Blocks of 64 of each matrix, by hand; with no number beyond them nothing is left to signs."""
    x, y = drawn(6, 3000, 0), drawn(5, 3000, 1)
    (compression, own), (_, asked) = signed(x, 1024, 3), signed(y, 1024, 3)
    starts = [*range(0, 700, 64), 700, *range(701, 3000, 64)]
    ends = [*starts[1:], 3000]

    def split(v: torch.Tensor) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        pieces = {k: v[a:b] for k, (a, b) in enumerate(zip(starts, ends, strict=True))}
        longest = sorted(pieces, key=lambda a: -float(pieces[a].norm()))[:3]
        rest = [torch.zeros_like(p) if a in longest else p for a, p in pieces.items()]
        return {a: pieces[a] for a in longest}, torch.cat(rest)

    mine, theirs = [split(v) for v in x], [split(v) for v in y]
    assert [set(row.tolist()) for row in own.places] == [set(blocks) for blocks, _ in mine]
    _, rests = signed(torch.stack([rest for _, rest in mine]), 1024)
    assert relative(own.z, rests.z) < 1e-6
    kept = compression.stored(own, torch.float16)
    assert relative(kept["length"], torch.stack([rest.norm() for _, rest in mine])) < 1e-6
    common = [[sum(float(a[k] @ b[k]) for k in a if k in b) for b, _ in theirs] for a, _ in mine]
    assert relative(compressed.in_common(kept, asked), torch.tensor(common)) < 0.1  # 4 bits
    held = compressed.unpacked(kept["blocks"]) * kept["units"].unsqueeze(2)
    assert relative(held, own.blocks) < 0.15
    assert bool(((held - own.blocks).abs() <= kept["units"].unsqueeze(2) * 0.501).all())
    nothing = {n: t for n, t in kept.items()} | {"length": torch.zeros(6)}
    assert torch.equal(compression.values(nothing, asked), compressed.in_common(kept, asked))
    _, more = signed(y, 1024, 3, more=2)
    assert relative(more.z, signed(y, 1024)[1].z) < 1e-12  # all of a question
    assert torch.equal(more.places[:, :3], asked.places)
    whole = [[sum(float(a[k] @ w[starts[k] : ends[k]]) for k in a if k in set(places.tolist()))
              for w, places in zip(y, more.places, strict=True)] for a, _ in mine]  # fmt: skip
    assert relative(compressed.in_common(kept, more), torch.tensor(whole)) < 0.1
    fitting = compressed.Compression.of(flat(), 2000, torch.float16, 50)
    assert fitting.blocks == 50 and 3600 < fitting.nbytes(torch.float16) <= 4000


@pytest.mark.parametrize(("kind", "share"), [("flat", 0), ("few", 1 / 4), ("none", 0)])
def test_as_many_blocks_are_kept_as_leave_least(kind: str, share: float) -> None:
    """A dozen blocks that hold nearly all, all alike, and gradients of 0."""
    squares = torch.ones(5, 1000)
    if kind == "few":
        squares[:, ::100] = 1e4
    squares *= kind != "none"
    best = compressed.best_blocks(squares, 5, 1000, 2000)
    assert best == int(share * 2000) // compressed.HELD
    tiles = [(slice(0, 2), 0, torch.ones(2, 100)), (slice(2, 3), 0, 2 * torch.ones(1, 100))]
    assert compressed.block_squares(3, tiles).tolist() == [[64, 36], [64, 36], [256, 144]]


def test_sums_are_over_random_signs_at_every_place_in_turn() -> None:
    x = drawn(4, 3000, 0)
    mixed = signed(x, 512)[1].z
    bits = np.unpackbits(np.random.PCG64(0).random_raw(48).view(np.uint8))
    places = torch.cat([torch.arange(700), torch.tensor([704]), 768 + torch.arange(2299)])
    by_hand = torch.zeros(4, 512, dtype=torch.float64)
    by_hand.index_add_(1, places % 512, x * torch.from_numpy(bits * 2.0 - 1)[places])
    matrix = compressed.hadamard(256).double()
    assert torch.equal(matrix, matrix.T) and relative(matrix @ matrix, torch.eye(256)) < 1e-6
    assert relative(mixed.view(4, 256, 2), matrix @ by_hand.view(4, 256, 2)) < 1e-6


def test_products_in_bfloat16_change_little() -> None:
    task = language()
    q, compression = posterior(task, "kron"), compressed.Compression(256, True, 256, 0)
    how = (task, q, compression, compression.roots(q))
    exact, half = module._projected(*how), module._projected(*how, half=True)
    assert 1e-5 < relative(half.z, exact.z) < 0.02
    assert relative(half.squares, exact.squares) < 2e-3 and half.z.dtype == exact.z.dtype
    assert not module.multiplies_half(q)  # in double precision


def test_few_numbers_err_as_they_say_and_are_refined(tmp_path: Path) -> None:
    task, test = language(), task_of(tiny_lm(tied=True), sequences(4))
    q = posterior(task)
    index = blr.Index.build(task, q, tmp_path / "i", rank=60)
    assert index.signs and 60 < index._compression.nbytes(torch.float16) <= 120
    assert compressed.Compression.of(q, 20, torch.float16).size == 256  # of 320 bits
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
def test_a_build_that_ends_early_goes_on_to_the_same_bits(
    raised: BaseException,
    error: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = of_rows(300, 12)
    q = posterior(task, "kron")
    monkeypatch.setattr(module, "multiplies_half", lambda q: True)  # and elsewhere, it goes on
    blr.Index.build(task, q, tmp_path / "whole", rank=100)
    real = module.save_file

    def ended(tensors: Any, draft: Path, metadata: Any) -> None:
        real(tensors, draft, metadata)
        if list((tmp_path / "i").glob("gradients-*")):
            raise raised

    monkeypatch.setattr(module, "save_file", ended)
    with pytest.raises(error):
        blr.Index.build(task, q, tmp_path / "i", rank=100)
    with pytest.raises(StorageError, match="not complete"):
        blr.Index.open(tmp_path / "i")
    monkeypatch.setattr(module, "save_file", real)
    monkeypatch.setattr(module, "multiplies_half", lambda q: False)
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
    whole, table = file.read_bytes(), tmp_path / "i" / module.EXAMPLES
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
