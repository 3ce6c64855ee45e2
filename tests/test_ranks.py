"""Two and four processes give the numbers of one; what happens where one of them is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranked
import tiny_transformers as tiny
import torch
from ranked_ends import SHARD, network
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves

import blr_analysis as blr
from blr_analysis.sensitivity.index import stored

TESTS = Path(__file__).parent
Said = subprocess.CompletedProcess[str]


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an index, as the processes write them."""
    monkeypatch.setattr(stored, "SHARD", SHARD)


def launched(count: int, script: str, *argv: object) -> Said:
    """A script of tests/support in so many processes of one thread."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    how: dict[str, Any] = {"env": env, "capture_output": True, "text": True, "timeout": 240}
    command = [sys.executable, *torchrun, TESTS / "support" / script, *argv]
    return subprocess.run(list(map(str, command)), check=False, **how)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process's answers."""
    place = tmp_path_factory.mktemp("one")
    return ranked.answers(place) | ranked.of_pieces(place)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A language model, and what it was trained on."""
    pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("model")
    tiny.save(place, tiny.build("llama", "causal_lm", tie_word_embeddings=True), pairs=False)
    data = place / "data.jsonl"
    data.write_text("\n".join(json.dumps({"text": t}) for t in tiny.sentences(9, low=3)))
    return place, data


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, texts: tuple[Path, Path]) -> tuple[Path, Said]:
    """What two processes left behind, and said."""
    place = tmp_path_factory.mktemp("two")
    return place, launched(2, "ranked.py", place, *texts)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    """What two processes left behind, and said, the second of which dies in the end."""
    place = tmp_path_factory.mktemp("ended")
    q = blr.fit_laplace(network(), structure="diag", prior_precision=2.0)
    q.save(place / "q.safetensors")
    said = launched(2, "ranked_ends.py", place)
    (place / "ended").touch()
    return place, said


def agree(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        mine, theirs = (tree_leaves(answers[name]) for answers in (actual, expected))
        assert len(mine) == len(theirs), name
        for a, b in zip(mine, theirs, strict=True):
            a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
            assert a.shape == b.shape, name
            assert float((a - b).norm()) <= 1e-6 * float(b.norm()), name


def all_agree(count: int, place: Path, said: Said, alone: dict[str, Any]) -> None:
    for rank in range(count):
        assert (place / f"rank{rank}.pt").is_file(), said.stderr
        agree(torch.load(place / f"rank{rank}.pt")["answers"], alone)


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(two: tuple[Path, Said], alone: Any) -> None:
    all_agree(2, *two, alone)


@pytest.mark.slow
def test_four_processes(tmp_path: Path, alone: dict[str, Any]) -> None:
    all_agree(4, tmp_path, launched(4, "ranked.py", tmp_path), alone)


def test_refused_on_all_ranks(ended: tuple[Path, Said]) -> None:
    place, said = ended
    for rank in range(2):
        assert (place / f"rank{rank}.pt").is_file(), said.stderr
        sharded, few, one, other = torch.load(place / f"rank{rank}.pt")["refusals"]
        assert "sharded" in sharded
        assert "2 ranks for 1 examples" in few
        assert all("different" in words for words in (one, other))


@pytest.mark.slow
def test_commands_write_once_what_one_process_writes(
    two: tuple[Path, Said], texts: tuple[Path, Path], tmp_path: Path
) -> None:
    place, said = two
    assert ranked.commands(tmp_path, *texts) == [0, 0, 0]
    for rank in range(2):
        assert torch.load(place / f"rank{rank}.pt")["codes"] == [0, 0, 0], said.stderr
    assert said.stdout.count("seconds") == 1
    stored = [blr.Index.open(folder / "i").self_influence for folder in (place, tmp_path)]
    agree({"index": stored[0]}, {"index": stored[1]})
    written = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file())
    for file in written:
        assert (place / file).is_file(), file
        if file.suffix == ".safetensors" and file.parts[0] != "i":  # float16
            agree(load_file(place / file), load_file(tmp_path / file))


def test_ranks_share_the_files_that_the_last_of_them_finds_missing(
    ended: tuple[Path, Said], tmp_path: Path
) -> None:
    q = blr.Posterior.load(ended[0] / "q.safetensors")
    index = blr.Index.build(network(), q, tmp_path / "whole", dtype="float64")
    for rank in range(2):
        late = torch.load(ended[0] / f"rank{rank}.pt")["late"]
        agree({"index": late}, {"index": index.self_influence})


def test_a_rank_that_dies_ends_the_others_and_the_next_run_goes_on(
    ended: tuple[Path, Said], tmp_path: Path
) -> None:
    place, said = ended
    assert said.returncode != 0
    # torchrun may end the other one before it has said so itself
    assert said.stderr.count("BLRError: another rank is gone") <= 1
    assert "SIGKILL" in said.stderr
    left = sorted(place.glob("begun/gradients*"))
    begun, end = ((place / name).stat().st_mtime for name in ("rank1.pt", "ended"))
    assert left
    assert end - begun < 60
    then = [p.stat().st_mtime_ns for p in left]
    task = network()
    q = blr.Posterior.load(place / "q.safetensors")
    index = blr.Index.build(task, q, place / "begun")
    assert [p.stat().st_mtime_ns for p in left] == then
    whole = blr.Index.build(task, q, tmp_path / "whole")
    assert torch.equal(index.influence(task), whole.influence(task))
