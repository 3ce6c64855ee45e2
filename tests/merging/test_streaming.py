"""Streaming: the promise about memory, the same bits however it is cut, and no half results."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from merging.models_on_disk import state, write_family, write_model

import blr_analysis as blr
from blr_analysis.errors import InputError, StorageError
from blr_analysis.files import Folder, fingerprint, shards
from blr_analysis.merging.folders import execute
from blr_analysis.merging.job import Job, Member
from blr_analysis.merging.plan import plan_folders

ROOT = Path(__file__).resolve().parents[2]


def big_family(root: Path, rows: int) -> dict[str, Any]:
    """Two fine-tunes, one tensor of ``rows`` × 64 in each."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> torch.Tensor:
        return torch.randn(rows, 64, generator=generator)

    base = {"embed": normal().bfloat16(), "norm": torch.ones(64)}
    made = {}
    for name in ("base", "ft1", "ft2"):
        tuned = {n: (t + 0.01 * torch.randn_like(t)).to(t.dtype) for n, t in base.items()}
        precision = {"embed": normal().abs(), "norm": torch.ones(64)}
        made[name] = write_model(
            root / name, base if name == "base" else tuned, precision=precision
        )
    models = [made["ft1"], made["ft2"]]
    return {
        "base": made["base"],
        "models": models,
        "precisions": [m / "precision" for m in models],
        "base_precision": made["base"] / "precision",
        "delta": 1e-6,
    }


def test_the_same_bits_for_any_memory_and_any_threads(tmp_path: Path) -> None:
    family = big_family(tmp_path, 12_001)
    prints = set()
    for k, (memory, threads) in enumerate([(2**28, 1), (2**28, 4), (2**24, 1), (30_000_000, 2)]):
        out = tmp_path / f"out{k}"
        report = blr.merge(**family, out=out, max_memory=memory, threads=threads)
        assert report.plan.memory <= memory
        prints.add(fingerprint(Folder.open(out), progress=False))
    assert len(prints) == 1


def test_memory_stays_below_the_promise(tmp_path: Path) -> None:
    """One tensor takes 64 MB in bfloat16 and its precisions 128 MB each; the bound is 24 MB."""
    bound = 24 * 2**20
    family = big_family(tmp_path, 500_000)
    small = big_family(tmp_path / "small", 64)
    script = f"""
        import resource
        from pathlib import PosixPath
        import blr_analysis as blr

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

        more = dict(max_memory={bound}, threads=2)
        blr.merge(**{small!r}, **more, out={str(tmp_path / "warm")!r})
        before = peak()
        report = blr.merge(**{family!r}, **more, out={str(tmp_path / "out")!r})
        print(peak() - before, report.plan.workers)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    grown, _ = map(int, run.stdout.split())
    largest = Folder.open(family["base"]).specs["embed"].nbytes
    assert largest > 2 * bound
    assert grown <= bound


def test_a_bound_that_is_too_low_says_how_much_is_needed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="max_memory=1000 bytes is too little"):
        blr.merge(**write_family(tmp_path), out=tmp_path / "out", max_memory=1000)


def small_plan(root: Path, **more: Any) -> Any:
    family = write_family(root)
    members = [Member(m, p) for m, p in zip(family["models"], family["precisions"], strict=True)]
    return plan_folders(
        Job("gradient_matching", members=tuple(members), base=family["base"], delta=1.0, **more)
    )


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith(("out", ".out")))


def test_a_full_disk_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = small_plan(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=10))
    with pytest.raises(StorageError, match="has 10 of"):
        execute(found, tmp_path / "out")
    assert left(tmp_path) == []


def test_a_disk_that_fills_up_on_the_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shards, "_reserve", full)
    with pytest.raises(StorageError, match="No space left on device"):
        execute(small_plan(tmp_path), tmp_path / "out")
    assert left(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_merge_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    calls = []
    put = shards.Shards.put

    def stop(self: shards.Shards, *given: Any) -> None:
        calls.append(given)
        if len(calls) == 3:
            raise error
        put(self, *given)

    monkeypatch.setattr(shards.Shards, "put", stop)
    with pytest.raises(error):
        execute(small_plan(tmp_path), tmp_path / "out")
    assert left(tmp_path) == []


def test_a_killed_merge_leaves_no_output_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    family = big_family(tmp_path, 200_000)
    script = f"""
        from pathlib import PosixPath
        import blr_analysis as blr
        from blr_analysis.files import shards
        put = shards.Shards.put
        def slow(self, *given):
            print("going", flush=True)
            import time; time.sleep(0.5)
            put(self, *given)
        shards.Shards.put = slow
        blr.merge(**{family!r}, out={str(tmp_path / "out")!r}, threads=1)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "going\n"
        with pytest.raises(StorageError, match="another run is writing"):
            blr.merge(**family, out=tmp_path / "out")
        run.send_signal(signal.SIGKILL)
    assert left(tmp_path) == [".out.unfinished"]
    blr.merge(**family, out=tmp_path / "out")
    assert left(tmp_path) == ["out"]


def test_a_file_that_changes_during_the_merge_is_refused(tmp_path: Path) -> None:
    found = small_plan(tmp_path)
    file = tmp_path / "ft1" / "model.safetensors"
    os.utime(file, ns=(time.time_ns(), time.time_ns() + 10**9))
    with pytest.raises(StorageError, match="was changed"):
        execute(found, tmp_path / "out")
    assert left(tmp_path) == []


def test_inputs_may_be_read_only_and_are_not_touched(tmp_path: Path) -> None:
    family = write_family(tmp_path / "in")
    files = [p for p in (tmp_path / "in").rglob("*") if p.is_file()]
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in files}
    for p in files:
        p.chmod(0o444)
    report = blr.merge(**family, out=tmp_path / "out")
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in files} == before
    assert os.access(report.folder / "config.json", os.W_OK)


@pytest.mark.parametrize("kind", ["full", "file", "broken link"])
def test_an_output_that_is_there_is_never_overwritten(tmp_path: Path, kind: str) -> None:
    found, out = small_plan(tmp_path), tmp_path / "out"
    if kind == "full":
        out.mkdir()
        (out / "mine.txt").write_text("dear to me")
    elif kind == "file":
        out.write_text("dear to me")
    else:
        out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="name a new one"):
        execute(found, out)
    assert left(tmp_path) == ["out"]
    if kind == "full":
        assert (out / "mine.txt").read_text() == "dear to me"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    execute(small_plan(tmp_path), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_missing_parents_are_made(tmp_path: Path) -> None:
    report = execute(small_plan(tmp_path), tmp_path / "a" / "b" / "out")
    assert report.folder.is_dir()


@pytest.mark.parametrize("threads", [1, 4])
def test_the_bar_ends_at_all_bytes(tmp_path: Path, threads: int) -> None:
    from blr_analysis.merging.plan import make_plan
    from blr_analysis.merging.stream import Memory, stream

    found = small_plan(tmp_path)
    told: list[int] = []
    made = make_plan(found.job, found.base, found.parts, threads=threads)
    devices = dict.fromkeys(state(0), torch.device("cpu"))
    stream(made, Memory(made.items, devices), told.append)
    assert sum(told) == made.bytes_read
