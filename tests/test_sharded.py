"""Models that ``fully_shard`` divides give the numbers of one process, in less memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import divided
import pytest
import torch
from torch.utils._pytree import tree_leaves

pytest.importorskip("peft")
pytestmark = pytest.mark.slow
TESTS = Path(__file__).parent
REFUSED = (
    "load its full",
    "save its full",
    "parallelize_module",
    "make the Task anew",
    "leave ranks.alone()",
)


def results(place: Path, count: int, *names: str) -> list[dict[str, Any]]:
    """What so many processes of one thread found of these models, one after the other."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = [sys.executable, *torchrun, str(TESTS / "support" / "divided.py"), str(place), *names]
    ended = subprocess.run(
        script, check=False, env=env, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    return [torch.load(place / f"rank{rank}.pt") for rank in range(count)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("divided")


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, Any]:
    """One process's answers, of models that are whole."""
    return divided.answers(place, divided.TASKS, shard=False)


@pytest.fixture(scope="module")
def two(place: Path, alone: dict[str, Any]) -> list[dict[str, Any]]:
    return results(place, 2, *divided.TASKS)


def largest_gaps(actual: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The distance of each answer from the expected one, relative to its norm."""
    assert actual.keys() == expected.keys()
    gaps = {}
    for name, answer in expected.items():
        pairs = zip(tree_leaves(actual[name]), tree_leaves(answer), strict=True)
        gaps[name] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    return gaps


def test_two_processes_give_the_numbers_of_one(two: Any, alone: dict[str, Any]) -> None:
    """Each holds its share of the weights and the layer at work, and refuses what it cannot do.

    One test, because each worker would start the processes again.
    """
    for process in two:
        gaps = largest_gaps(process["answers"], alone)
        assert max(gaps.values()) < 1e-9, gaps
        memory = process["memory"]
        assert memory["local"] <= (1 / 2 + 0.1) * memory["whole"]
        assert memory["gathered"] <= memory["layer"]
        assert memory["left"] == 0
        for message, words in zip(process["refusals"], REFUSED, strict=True):
            assert words in message


def test_four_processes(place: Path, alone: dict[str, Any], tmp_path: Path) -> None:
    for file in place.glob("*.safetensors"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    expected = {name: answer for name, answer in alone.items() if name.startswith("frozen layer")}
    for process in results(tmp_path, 4, "frozen layer"):
        gaps = largest_gaps(process["answers"], expected)
        assert max(gaps.values()) < 1e-9, gaps
