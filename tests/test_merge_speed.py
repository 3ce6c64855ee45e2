"""The speed benchmark of merging: the same result from everyone, and honest figures; no timing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import blr_analysis as blr
from benchmarks.merging import child, run_blr, speed
from benchmarks.merging.agreement import difference
from benchmarks.merging.checkpoints_made import (
    DELTA,
    WEIGHTS,
    Checkpoints,
    make,
)
from benchmarks.merging.contenders import ARITHMETIC, MATCHING, SIMPLE, contenders

TINY = 500_000
HOLD = "import time; x = b'1' * 200_000_000; time.sleep(0.2)"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make(tmp_path_factory.mktemp("speed"), TINY)


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the results are right does not hang on threads, and busy cores are slow with them;
    nor on where Python keeps what it compiled, and in a new folder it compiles all of torch."""
    run = child.run
    monkeypatch.setattr(child, "run", lambda command, path, bytecode: run(command, path))
    monkeypatch.setattr(child, "LEFT_TO_EACH", ())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def in_memory(made: Checkpoints, method: str) -> dict[str, torch.Tensor]:
    base, *models = (load_file(f / "model.safetensors") for f in (made.base, *made.models))
    extra: dict[str, Any] = {}
    if method == MATCHING:
        first, *others = (
            load_file(made.precision(f) / "precision.safetensors")
            for f in (made.base, *made.models)
        )
        extra = {"precisions": others, "base_precision": first, "delta": DELTA}
    return blr.merge(base, models, weights=list(WEIGHTS), method=method, **extra)


@pytest.mark.slow
def test_all_contenders_write_the_same_model(
    made: Checkpoints, one_thread: None, tmp_path: Path
) -> None:
    expected = {}
    for method in (MATCHING, ARITHMETIC):
        expected[method] = tmp_path / f"{method}.safetensors"
        save_file(in_memory(made, method), expected[method])
    seen = []

    def after(found: list[speed.Measured]) -> None:
        for method, file in expected.items():
            ours = made.root / f"ours_{method}" / "model.safetensors"
            seen.append(difference(ours, file))

    # what is not ours, and the recipe, go either way alike with either method: once is enough
    wanted = [
        c
        for c in contenders(made, made.root / "no peers")
        if c.method == MATCHING or (c.method == ARITHMETIC and c.name == "ours")
    ]
    found = speed.measure(made, wanted, 1, after=after)
    assert [one.error for one in found] == [""] * len(found)
    assert [(d.share, d.largest) for d in seen] == [(0.0, 0.0)] * 2  # streamed or not: the same
    names = [one.contender.name for one in found if one.contender.method == MATCHING]
    assert names == ["raw", "raw, flushed", "ours", "ours, blr-analysis merge", "all in memory"]
    for one in found:
        if one.contender.merges:
            assert one.apart is not None
            # bfloat16 keeps 8 bits: sums in another order are rounded to another neighbour at most
            assert one.apart.share < 1e-3 and one.apart.largest <= 2**-7
        else:
            assert one.apart is None
    shown = speed.table(found)
    assert [row["× raw"] for row in shown if row["contender"] == "raw"] == ["1.00"]
    assert all(row["inner"] for row in shown if row["contender"] in ("ours", "all in memory"))
    assert any("faster than all in memory" in line for line in speed.remarks(found))
    assert not (made.root / "out").exists() and not list(made.root.glob("ours_*_*/"))


@pytest.mark.parametrize("method", SIMPLE)
def test_ours_merges_by_every_method(
    made: Checkpoints, method: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    """In this process: that a fresh one can, others show."""
    monkeypatch.setattr(sys, "argv", ["run_blr.py", method, str(made.root), str(tmp_path / "out")])
    run_blr.main()
    assert json.loads(capsys.readouterr().out)["inner"] > 0
    merged = load_file(tmp_path / "out" / "model.safetensors")
    base = load_file(made.base / "model.safetensors")
    assert {n: t.shape for n, t in merged.items()} == {n: t.shape for n, t in base.items()}


def test_a_wrong_result_shows(made: Checkpoints, tmp_path: Path) -> None:
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
    assert 200e6 < large.own <= large.peak
    with pytest.raises(child.ChildError, match=r"ended with 3:\s+no luck"):
        child.run(["sh", "-c", "echo no luck; exit 3"])
    with pytest.raises(child.ChildError, match="could not be started"):
        child.run(["no-such-program-anywhere"])
