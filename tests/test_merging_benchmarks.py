"""Merging's benchmarks: what keeps their figures honest; no timing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.merging import child
from benchmarks.merging.agreement import difference
from benchmarks.merging.checkpoints_made import make

HOLD = "import time; x = b'1' * 200_000_000; time.sleep(0.2)"


def test_a_wrong_result_shows(tmp_path: Path) -> None:
    made = make(tmp_path / "made", 500_000)
    tensors = load_file(made.base / "model.safetensors")
    name = max(tensors, key=lambda n: tensors[n].numel())
    total = sum(t.numel() for t in tensors.values())
    top = float(tensors[name].abs().max())
    tensors[name].view(-1)[0] = 3 * top
    save_file(tensors, tmp_path / "other.safetensors")
    found = difference(tmp_path / "other.safetensors", made.base / "model.safetensors")
    assert found.share == pytest.approx(1 / total)
    assert 2 <= found.largest <= 4
    save_file({"another": tensors[name]}, tmp_path / "foreign.safetensors")
    with pytest.raises(ValueError, match="different names"):
        difference(tmp_path / "foreign.safetensors", made.base / "model.safetensors")


def test_a_child_is_measured_by_itself() -> None:
    held = torch.zeros(30_000_000)  # of this process, and none of the child's
    assert held.sum() == 0
    small = child.run([sys.executable, "-I", "-S", "-c", "print('{\"inner\": 0.5}')"])
    assert small.inner == 0.5 and small.seconds > 0
    assert 1e6 < small.peak < 60e6
    large = child.run([sys.executable, "-I", "-S", "-c", HOLD])
    assert large.inner is None and large.peak > 200e6
    with pytest.raises(child.ChildError, match=r"ended with 3:\s+no luck"):
        child.run(["sh", "-c", "echo no luck; exit 3"])
    with pytest.raises(child.ChildError, match="could not be started"):
        child.run(["no-such-program-anywhere"])
