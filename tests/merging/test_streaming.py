"""Streaming: memory below the promise, the same bits for any cut, and no half results."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models_on_disk import (
    curved,
    family_in_memory,
    near,
    record,
    state,
    write_family,
    write_model,
)
from safetensors.torch import load_file, save_file

import blr_analysis as blr
from blr_analysis.errors import BLRError, StorageError
from blr_analysis.files import Folder, shards
from blr_analysis.merging.folders import execute
from blr_analysis.merging.job import Job, Member
from blr_analysis.merging.plan import make_plan
from blr_analysis.merging.stream import Memory, stream

ROOT = Path(__file__).resolve().parents[2]


def big_family(root: Path, rows: int) -> dict[str, Any]:
    """Two fine-tunes, one tensor of ``rows`` × 64 in each."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> torch.Tensor:
        return torch.randn(rows, 64, generator=generator)

    base = normal().bfloat16()
    places = []
    for k, name in enumerate(("base", "ft1", "ft2")):
        tuned = {"embed": (base + 0.01 * k * normal()).bfloat16(), "norm": torch.ones(64)}
        precision = {"embed": normal().abs(), "norm": torch.ones(64)}
        places.append(write_model(root / name, tuned, precision=precision))
    first, *curved = (place / "precision" for place in places)
    arguments = {"base": places[0], "models": places[1:], "precisions": curved}
    return {**arguments, "base_precision": first, "delta": 1e-6}


@pytest.mark.slow
def test_memory_stays_below_the_promise(tmp_path: Path) -> None:
    """One tensor takes 32 MB in bfloat16 and its precisions 64 MB each; the bound is 14 MB."""
    bound = 14 * 2**20
    family = big_family(tmp_path, 250_000)
    small = big_family(tmp_path / "small", 64)
    script = f"""
        import resource
        from pathlib import PosixPath
        import blr_analysis as blr

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

        limits = dict(max_memory={bound}, threads=2)
        blr.merge(**{small!r}, **limits, out={str(tmp_path / "warm")!r})
        before = peak()
        blr.merge(**{family!r}, **limits, out={str(tmp_path / "out")!r})
        print(peak() - before)
    """
    options = {"capture_output": True, "text": True, "check": True, "cwd": ROOT}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], **options, env=env)
    grown = int(run.stdout)
    assert grown <= bound < Folder.open(family["base"]).specs["embed"].nbytes / 2


def small_plan(root: Path) -> Any:
    family = write_family(root)
    pairs = zip(family["models"], family["precisions"], strict=True)
    members = tuple(Member(m, p) for m, p in pairs)
    return make_plan(Job("gradient_matching", members, family["base"], delta=1.0))


def outputs_in(folder: Path) -> list[str]:
    """Names of outputs, also of unfinished ones."""
    return sorted(p.name for p in folder.iterdir() if p.name.startswith(("out", ".out")))


@pytest.mark.parametrize(("when", "word"), [("before", "has 10 of"), ("then", "No space left")])
def test_a_disk_that_is_full_or_fills_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, word: str
) -> None:
    def full(fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    actual = small_plan(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    if when == "before":
        monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=10))
    monkeypatch.setattr(shards, "_reserve", full)
    with pytest.raises(StorageError, match=word):
        execute(actual, tmp_path / "out")
    assert outputs_in(tmp_path) == []


@pytest.mark.slow
def test_a_killed_merge_leaves_no_output_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    family = big_family(tmp_path, 200_000)
    script = f"""
        from pathlib import PosixPath
        import blr_analysis as blr
        from blr_analysis.files import shards
        put = shards.Shards.put
        def slow(self, *arguments):
            print("going", flush=True)
            import time; time.sleep(0.5)
            put(self, *arguments)
        shards.Shards.put = slow
        blr.merge(**{family!r}, out={str(tmp_path / "out")!r}, threads=1)
    """
    argv = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "going\n"
        with pytest.raises(StorageError, match="another run is writing"):
            blr.merge(**family, out=tmp_path / "out")
        run.send_signal(signal.SIGKILL)
    assert outputs_in(tmp_path) == [".out.unfinished"]
    blr.merge(**family, out=tmp_path / "out")
    assert outputs_in(tmp_path) == ["out"]


def test_a_file_that_changes_during_the_merge_is_refused(tmp_path: Path) -> None:
    actual = small_plan(tmp_path)
    file = tmp_path / "ft1" / "model.safetensors"
    os.utime(file, ns=(time.time_ns(), time.time_ns() + 10**9))
    with pytest.raises(StorageError, match="was changed"):
        execute(actual, tmp_path / "out")
    assert outputs_in(tmp_path) == []


def test_inputs_may_be_read_only_and_are_not_touched(tmp_path: Path) -> None:
    family = write_family(tmp_path / "in")
    files = [p for p in (tmp_path / "in").rglob("*") if p.is_file()]
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in files}
    for p in files:
        p.chmod(0o444)
    report = blr.merge(**family, out=tmp_path / "out")
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in files} == before
    assert os.access(report.folder / "config.json", os.W_OK)


def test_an_output_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    actual = small_plan(tmp_path)
    full = tmp_path / "full"
    empty = tmp_path / "a" / "empty"
    for folder in (full, empty):
        folder.mkdir(parents=True)
    (full / "mine.txt").write_text("dear to me")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for output in (full, full / "mine.txt", tmp_path / "link"):
        with pytest.raises(StorageError, match="name a new one"):
            execute(actual, output)
    assert [p.read_text() for p in full.iterdir()] == ["dear to me"]
    for new in (empty, tmp_path / "b" / "c" / "out"):
        assert (execute(actual, new).folder / "model.safetensors").is_file()


@pytest.mark.parametrize("threads", [1, 4])
def test_the_bar_ends_at_all_bytes(tmp_path: Path, threads: int) -> None:
    bytes_read: list[int] = []
    plan = replace(small_plan(tmp_path), workers=threads)
    devices = dict.fromkeys(state(0), torch.device("cpu"))
    stream(plan, Memory(plan.tensors, devices), bytes_read.append)
    assert sum(bytes_read) == plan.bytes_read


# Refusals, after which nothing is left behind.


Family = dict[str, Any]
Damage = Callable[[Family], object]


def change(file: Path, damage: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file)


def model_of(family: Family) -> Path:
    return family["models"][0] / "model.safetensors"


def on_model(damage: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    return lambda f: change(model_of(f), damage)


def on_precision(damage: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    return lambda f: change(f["precisions"][0] / "precision.safetensors", damage)


def recorded(**fields: Any) -> Damage:
    text = json.dumps(record(**{"parameters": ["scale"], **fields}))
    return lambda f: (f["precisions"][0] / "precision_config.json").write_text(text)


def config(place: str | int, **fields: Any) -> Damage:
    def damage(family: Family) -> None:
        folder = family["base"] if place == "base" else family["models"][place]
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, **fields}))

    return damage


def pickled(f: Family) -> None:
    model_of(f).unlink()
    (f["models"][0] / "pytorch_model.bin").write_bytes(b"x")


def prefixed(t: dict[str, torch.Tensor]) -> None:
    for name in list(t):
        t[f"model.{name}"] = t.pop(name)


NORM = "layers.0.norm.weight"
MLP = "layers.0.mlp.weight"
DAMAGES: list[tuple[Damage, str]] = [
    (on_model(lambda t: t.pop(NORM)), rf"missing in the first: '{NORM}'"),
    (on_model(lambda t: t.update(odd=torch.ones(2, 2))), "only there: 'odd'"),
    (on_model(lambda t: t.update(scale=torch.ones(3))), r"'scale' is \[3\], expected \[\]"),
    (on_model(lambda t: t.update({"embed.weight": torch.ones(13, 6)})), "a vocabulary"),
    (on_model(lambda t: t.update(scale=torch.tensor(3))), r"'scale' is of torch\.int64"),
    (on_model(prefixed), "Save both with the same class"),
    (on_model(lambda t: t[MLP].fill_(torch.nan)), rf"'{MLP}' of '.*ft1' holds NaN"),
    (on_model(lambda t: t.update(state(0))), "equals its base"),
    (on_precision(lambda t: t["scale"].fill_(torch.nan)), "the precision of 'scale'.*NaN"),
    (on_precision(lambda t: t["scale"].fill_(-1e-3)), "the precision of 'scale'.*negative"),
    (on_precision(lambda t: t.update(scale=torch.ones(2))), r"of 'scale' .* is \[2\], .* \[\]"),
    (on_precision(lambda t: t.update(scale=torch.tensor(1))), r"of 'scale' .* is torch\.int64"),
    (lambda f: model_of(f).write_bytes(model_of(f).read_bytes()[:-3]), "truncated"),
    (lambda f: next(f["base"].glob("model-00002*")).unlink(), "model-00002-of-00003"),
    (pickled, "pickle"),
    (recorded(format="x"), "format 'x'"),
    (recorded(structure="lowrank"), "structure='lowrank'"),
    (recorded(prior_precision={"zz": 1.0}), "prior_precision={'zz': 1.0}"),
    (config("base", num_attention_heads=1), "num_attention_heads is None and 1"),
    (config(0, model_type="other"), "architectures"),
    (config(0, quantization_config={"bits": 4}), "quantised"),
    (lambda f: (f["base"] / "config.json").write_text("{"), r"config\.json.*truncated"),
]


@pytest.mark.parametrize(("damage", "word"), DAMAGES)
def test_one_clear_error_and_nothing_written(tmp_path: Path, damage: Damage, word: str) -> None:
    family = write_family(tmp_path)
    damage(family)
    with pytest.raises(BLRError, match=word):
        blr.merge(**family, out=tmp_path / "out")
    assert outputs_in(tmp_path) == []


F: dict[str, Any] = family_in_memory()
BARE: dict[str, Any] = {"precisions": None, "base_precision": None}
FISHER: dict[str, Any] = {"method": "fisher", "base_precision": None}
TASKS = [blr.Task(torch.nn.Linear(2, 2), (torch.ones(2, 2), torch.arange(2)))] * 2
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"models": [], "precisions": []}, "models is empty"),
    ({"models": {}}, "must be a list"),
    ({"models": [F["base"]], "precisions": None, "method": "task_arithmetic", **BARE}, "its base"),
    ({"weights": [1.0]}, "weights must have one entry per model"),
    ({"weights": [1.0, float("nan")]}, "expected a finite number"),
    ({"weights": ["a", "b"]}, "expected a finite number"),
    ({"precisions": [curved(1)]}, "precisions must have one entry"),
    ({"precisions": 1.0}, "precisions must be a list"),
    ({"n_data": [1]}, "n_data must have one entry"),
    ({"n_data": lambda name: 1}, "n_data must be a list"),
    ({"n_data": 1.5}, "n_data must be a positive whole number"),
    ({"precisions": None}, r"precision of 'models\[0\]' is missing"),
    ({"precisions": [curved(1), {**curved(2), "odd": torch.ones(2)}]}, "another model.*'odd'"),
    ({"delta": -1.0}, "delta must be"),
    ({"delta": 1e39}, "delta must be"),
    ({"method": "tyes"}, "method must be one of"),
    ({"base": None}, "needs the base"),
    ({"dtype": torch.bfloat16}, "dtype"),
    ({"out_dtype": torch.int8}, "out_dtype"),
    ({"missing_precision": "guess"}, "missing_precision"),
    ({"seeds": 1}, "takes no 'seeds'"),
    ({**BARE, "method": "linear", "weights": [1.0, -1.0]}, "sum to 0"),
    ({"max_memory": 1000}, "max_memory=1000 bytes is too little"),
    ({**FISHER, "shrink": 0.9}, "shrink needs precisions with factors"),
    ({**FISHER, "shrink": 1.1}, "shrink must be"),
    ({**FISHER, "power": True}, "power must be"),
    # an argument without effect
    ({**BARE, "method": "linear", "scale": 0.5}, "scale="),
    ({**BARE, "method": "linear", "shrink": 0.9}, "shrink="),
    ({**BARE, "method": "linear", "validate": []}, "validate="),
    ({"scale": 0.5}, "scale="),
    ({**BARE, "method": "task_arithmetic", "density": 0.5}, "density="),
    ({**BARE, "method": "linear", "precisions": F["precisions"]}, "precisions="),
    ({**FISHER, "delta": 1.0}, "delta="),
    ({**BARE, "method": "ties", "seed": 1}, "seed="),
    ({**BARE, "method": "ties", "rescale": False}, "rescale="),
    ({"method": "auto", "scale": 0.5}, "scale="),
    ({"method": "auto", "base": None, "delta": 1.0}, "base_precision=|delta="),
    ({**BARE, "method": "auto", "validate": TASKS, "weights": [1.0, 0.5]}, "weights="),
    ({**BARE, "method": "auto", "validate": TASKS, "delta": 1.0}, "delta=.*precisions="),
    ({**BARE, "method": "fisher", "tasks": TASKS, "power": 0.5}, "power=.*precisions="),
    ({**BARE, "method": "fisher", "tasks": TASKS, "trust": True}, "trust="),
    ({**FISHER, "tasks": TASKS}, "precisions="),
    ({**BARE, "tasks": TASKS}, 'method="fisher"'),
    ({**BARE, "method": "fisher", "tasks": TASKS[:1]}, "1 tasks for 2"),
    ({**BARE, "method": "fisher", "tasks": TASKS, "weights": [1, -0.5]}, "at least 0"),
    ({"method": "auto", "validate": TASKS, "precisions": [curved(1), None]}, "every model"),
    # what a method cannot take
    ({**BARE, "method": "ties", "density": 1.5}, "at most 1"),
    ({**BARE, "method": "dare_ties", "density": 0}, "above 0"),
    ({**BARE, "method": "ties", "density": [0.5]}, "one entry per model"),
    ({**BARE, "method": "slerp", "base": None, "models": [F["base"]] * 3}, "merges 2 models"),
    ({**BARE, "method": "dare_ties", "seed": -1}, "seed"),
]


@pytest.mark.parametrize(("changes", "word"), REFUSED)
def test_calls_that_make_no_sense(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(BLRError, match=word):
        blr.merge(**{**F, **changes})


def test_folders_and_state_dicts_may_be_mixed(tmp_path: Path) -> None:
    """The result is written to ``out`` where that is named, and returned otherwise."""
    folders = write_family(tmp_path)
    memory = family_in_memory()
    expected = blr.merge(**memory, delta=1.0)
    mixed = {**folders, "models": memory["models"], "precisions": memory["precisions"]}
    for arguments in (folders, mixed):
        actual = blr.merge(**arguments, delta=1.0)
        assert all(torch.equal(actual[n], expected[n]) for n in expected)
    report = blr.merge(**mixed, delta=1.0, out=tmp_path / "out")
    written = Folder.open(report.folder).tensors()
    assert all(torch.equal(tensor, expected[n]) for n, tensor in written.items())
    assert (report.folder / "config.json").is_file()


def test_a_merge_that_overflows_its_dtype() -> None:
    base = {"w": torch.zeros(3)}
    model = {"w": torch.full((3,), 6e4)}
    arguments: dict[str, Any] = dict(method="task_arithmetic", out_dtype=torch.float16)
    assert blr.merge(base, [model], **arguments)["w"].dtype == torch.float16
    with pytest.raises(BLRError, match=r"does not fit into torch\.float16"):
        blr.merge(base, [model], weights=[2.0], **arguments)


def test_a_model_equal_to_its_base_is_found_wherever_they_differ() -> None:
    base = {"w": torch.zeros(10_000)}
    model = {"w": torch.zeros(10_000)}
    with pytest.raises(BLRError, match="equals its base"):
        blr.merge(base, [model], method="task_arithmetic")
    model["w"][9_000] = 1.0
    assert torch.equal(blr.merge(base, [model], method="task_arithmetic")["w"], model["w"])


def test_an_adapter_needs_its_base_and_a_base_must_fit(tmp_path: Path) -> None:
    """Also a base that only gives its files."""
    tuned = [write_model(tmp_path / f"ft{t}", near(state(0), t)) for t in (1, 2)]
    foreign = write_model(tmp_path / "other", {"odd": torch.ones(2, 2)})
    with pytest.raises(BLRError, match="not the same model"):
        blr.merge(foreign, tuned, method="linear", out=tmp_path / "out")
    (tuned[0] / "adapter_config.json").write_text("{}")
    with pytest.raises(BLRError, match="is an adapter"):
        blr.merge(None, tuned, method="linear", out=tmp_path / "out")


def test_precisions_that_add_up_to_more_than_float32_holds() -> None:
    base = {"w": torch.zeros(2)}
    models = [{"w": torch.full((2,), x)} for x in (0.5, 0.25)]
    huge = [{"w": torch.full((2,), 2e38)}] * 2
    with pytest.raises(BLRError, match="float64"):
        blr.merge(base, models, precisions=huge, method="fisher")
    merged = blr.merge(base, models, precisions=huge, method="fisher", dtype=torch.float64)
    torch.testing.assert_close(merged["w"], torch.full((2,), 0.375))


def test_tensors_without_entries() -> None:
    base = {"w": torch.zeros(0, 4)}
    with pytest.raises(BLRError, match="equals its base"):
        blr.merge(base, [{"w": torch.zeros(0, 4)}], method="task_arithmetic")
    merged = blr.merge(None, [base, {"w": torch.zeros(0, 4).half()}], method="linear")
    assert merged["w"].shape == (0, 4)
