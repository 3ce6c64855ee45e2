"""An index on disk against exact influence, killed builds, and folders of somebody else."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import mlp
from oracles import relative
from tiny_lm import sequences, task_of, tiny_lm

import blr_analysis as blr
from blr_analysis.errors import InputError, PosteriorError, StorageError
from blr_analysis.sensitivity.influence import index as module

QUIET: dict[str, Any] = {"progress": False}
N = 12


def language(seed: int = 0) -> blr.Task:
    return task_of(tiny_lm(seed, tied=True), sequences(N), metadata={"source": [*"ab"] * (N // 2)})


def posterior(task: blr.Task, structure: str = "diag") -> blr.Posterior:
    how: dict[str, Any] = {"prior_precision": 1.0, **QUIET}
    how |= {} if structure == "gram" else {"curvature": "empirical_fisher"}
    return blr.fit_laplace(task, structure=structure, **how)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD", 5)


@pytest.mark.parametrize(
    ("structure", "normalize"),
    [("diag", False), ("kron", False), ("gram", False), ("diag", True), ("kron", "cosine")],
)
def test_with_room_for_everything_it_is_exact(
    tmp_path: Path, structure: str, normalize: bool | str
) -> None:
    task, test = language(), task_of(tiny_lm(tied=True), sequences(4))
    q = posterior(task, structure)
    asked: dict[str, Any] = {"normalize": normalize, **QUIET}
    built = blr.Index.build(task, q, tmp_path / "i", rank=10**6, dtype="float64", **QUIET)
    exact = blr.influence(task, q, test, **asked).matrix
    assert built.error.relative_rms < 1e-10
    index = blr.Index.open(tmp_path / "i")
    assert relative(index.influence(test, **asked), exact) < 1e-10
    assert relative(index.self_influence, blr.sensitivity(task, q, **QUIET).self_influence) < 1e-10
    assert index.examples["source"] == task.metadata["source"]
    top, truth = index.top(test, 3, **asked), blr.top_influence(task, q, test, k=3, **asked)
    assert torch.equal(top.helpful, truth.helpful)
    assert torch.equal(top.harmful, truth.harmful)
    assert list(top.table) == list(truth.table)
    for column in ("test", "effect", "train", "source"):
        assert top.table[column].equals(truth.table[column])


@pytest.mark.parametrize(("few", "threads"), [(0, 1), (8, 1), (8, 2)])
def test_a_search_in_half_precision_finds_the_same(
    few: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, test = language(), task_of(tiny_lm(tied=True), sequences(4))
    monkeypatch.setattr(module, "FEW", few)
    monkeypatch.setattr(module, "SPARE", 2)
    monkeypatch.setattr(module, "CACHED", 200)
    index = blr.Index.build(task, posterior(task), tmp_path / "i", rank=60, **QUIET)
    asked: dict[str, Any] = {"normalize": bool(few), **QUIET}
    values = index.influence(test, **asked)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    top = index.top(test, 3, **asked)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    for side, largest in (("helpful", True), ("harmful", False)):
        truth, rows = values.topk(3, dim=0, largest=largest)
        assert torch.equal(getattr(top, side), rows.mT)
        assert relative(getattr(top, f"{side}_values"), truth.mT) < 1e-6


def test_rows_of_their_own_multiply_where_both_have_them() -> None:
    def drawn(n: int, m: int) -> tuple[module.Kept, torch.Tensor]:
        rows = torch.stack([torch.randperm(9)[:m] for _ in range(n)])
        numbers, z, dense = torch.randn(n, m, 2), torch.randn(n, 3), torch.zeros(n, 9, 2)
        dense.scatter_(1, rows.unsqueeze(-1).expand(-1, -1, 2), numbers)
        return module.Kept(z, {"w": (rows, numbers)}), torch.cat([z, dense.flatten(1)], dim=1)

    (stored, table), (asked, questions) = drawn(5, 4), drawn(3, 6)
    truth = table @ questions.mT
    assert relative(stored.products(asked), truth) < 1e-6
    assert relative(stored.norms(), table.double().norm(dim=1)) < 1e-6
    half = (kept.times(torch.ones(len(kept.z)), torch.float16) for kept in (stored, asked))
    assert relative(next(half).products(next(half)), truth) < 1e-2


def test_a_word_table_keeps_the_rows_of_each_texts_own_words() -> None:
    """Where every matrix has two rows of its own, ten numbers are all that there is to keep."""
    matrices = torch.zeros(6, 1, 50, 3, dtype=torch.float64)
    rows = torch.stack([torch.randperm(50)[:2].sort().values for _ in matrices])
    for matrix, two in zip(matrices, rows, strict=True):
        matrix[0, two] = torch.randn(2, 3, dtype=torch.float64)
    source = torch.Generator().manual_seed(0)
    found = module.leading(lambda: (("w", m) for m in matrices), 10, 4.0, source, words=50)["w"]
    where, numbers = found.largest(matrices)
    assert torch.equal(where.sort().values, rows)
    kept = module.Kept(torch.empty(6, 0, dtype=torch.float64), {"w": (where, numbers)})
    flat = matrices.flatten(1)
    assert relative(kept.products(kept), flat @ flat.mT) < 1e-12


def test_few_numbers_err_as_they_say_and_are_refined(tmp_path: Path) -> None:
    task, test = language(), task_of(tiny_lm(tied=True), sequences(4))
    q = posterior(task)
    index = blr.Index.build(task, q, tmp_path / "i", rank=60, **QUIET)
    assert index.numbers < 120
    assert 0 < index.error.relative_rms < 1
    exact = blr.influence(task, q, test, **QUIET)
    gap = relative(index.influence(test, **QUIET), exact.matrix)
    assert 0.2 < gap / index.error.relative_rms < 5
    for normalize in (False, True, "cosine"):
        refined = index.top(test, 2, refine=N, normalize=normalize, **QUIET)
        truth = blr.influence(task, q, test, normalize=normalize, **QUIET).top(2)
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
    task = language()
    q = posterior(task)
    blr.Index.build(task, q, tmp_path / "whole", rank=100, **QUIET)
    real = module.save_file

    def ended(tensors: Any, draft: Path, metadata: Any) -> None:
        real(tensors, draft, metadata)
        if list((tmp_path / "i").glob("gradients-*")):
            raise raised

    monkeypatch.setattr(module, "save_file", ended)
    with pytest.raises(error):
        blr.Index.build(task, q, tmp_path / "i", rank=100, **QUIET)
    with pytest.raises(StorageError, match="not complete"):
        blr.Index.open(tmp_path / "i")
    monkeypatch.setattr(module, "save_file", real)
    (left,) = (tmp_path / "i").glob("gradients-*")
    kept = left.stat().st_mtime_ns
    blr.Index.build(task, q, tmp_path / "i", rank=100, **QUIET)
    assert left.stat().st_mtime_ns == kept
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "i" / file.name).read_bytes() == file.read_bytes()


def test_a_full_disk_is_said_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = language()
    q = posterior(task)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=7))
    with pytest.raises(StorageError, match=r"7 of .* bytes free"):
        blr.Index.build(task, q, tmp_path / "i", **QUIET)
    with pytest.raises(StorageError, match="not complete"):
        blr.Index.open(tmp_path / "i")


@pytest.mark.parametrize("what", ["input", "target", "metadata"])
def test_one_example_that_was_edited_is_other_data(tmp_path: Path, what: str) -> None:
    """As it stands among those that nobody looks at, in data that are read in another way."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(N, 3, generator=generator), torch.arange(N) % 3
    model, source = torch.nn.Linear(3, 3), [*"ab"] * (N // 2)

    def task() -> blr.Task:
        rows = list(zip(x.clone(), y.clone(), strict=True))
        return blr.Task(model, rows, metadata={"source": list(source)})

    q = posterior(blr.Task(model, (x, y)))
    blr.Index.build(
        blr.Task(model, (x, y), metadata={"source": source}), q, tmp_path / "i", **QUIET
    )
    blr.Index.build(task(), q, tmp_path / "i", **QUIET)
    if what == "input":
        x[5, 1] += 1
    elif what == "target":
        y[5] = (y[5] + 1) % 3
    else:
        source[5] = "c"
    with pytest.raises(StorageError, match="another data"):
        blr.Index.build(task(), q, tmp_path / "i", **QUIET)


def test_what_does_not_belong_is_refused_by_name(tmp_path: Path) -> None:
    task = language()
    q = posterior(task)
    index = blr.Index.build(task, q, tmp_path / "i", rank=100, **QUIET)
    other = language(seed=3)
    with pytest.raises(StorageError, match="another posterior"):
        blr.Index.build(other, posterior(other), tmp_path / "i", rank=100, **QUIET)
    with pytest.raises(StorageError, match="another rank"):
        blr.Index.build(task, q, tmp_path / "i", rank=101, **QUIET)
    with pytest.raises(PosteriorError, match="another model"):
        index.influence(blr.Task(mlp(), (torch.zeros(2, 4), torch.zeros(2).long())))
    with pytest.raises(InputError, match="task="):
        blr.Index.open(tmp_path / "i").top(task, 2, refine=4)
    with pytest.raises(PosteriorError, match="'gram', not 'lowrank'"):
        blr.Index.build(task, posterior(task, "lowrank"), tmp_path / "j")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").touch()
    with pytest.raises(StorageError, match=r"notes\.txt"):
        blr.Index.build(task, q, tmp_path / "foreign")
    plan = tmp_path / "i" / module.PLAN
    plan.write_text(
        json.dumps({k: v for k, v in json.loads(plan.read_text()).items() if k != "data"})
    )
    with pytest.raises(StorageError, match="earlier version"):
        blr.Index.build(task, q, tmp_path / "i", rank=100, **QUIET)
    blr.Index.open(tmp_path / "i", task=task)
    next((tmp_path / "i").glob("gradients-*")).unlink()
    with pytest.raises(StorageError, match="lacks gradients-"):
        blr.Index.open(tmp_path / "i")
    with pytest.raises(StorageError, match="no index"):
        blr.Index.open(tmp_path / "foreign")
