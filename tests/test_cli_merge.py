"""``blr-analysis fisher`` and ``merge``: they write what the functions give, and say what is so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers as tiny
import torch
from commands import CommandContract, files, refused, run
from merging.models_on_disk import family_in_memory, write_family
from safetensors.torch import load_file

from blr_analysis.files import Folder, storage
from blr_analysis.huggingface.fisher import fisher_cost, text_tasks
from blr_analysis.merging.merge import merge
from blr_analysis.posterior.precision_files import write_precision

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[1]
N = 7
RECIPE = """
merge_method: gradient_matching
base_model: base
models:
- {model: ft1, parameters: {weight: 0.5}}
- {model: ft2, parameters: {weight: 1.5}}
parameters: {delta: 0.25}
"""


@pytest.fixture(scope="module")
def berts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two others of it with precisions, examples for each, and a recipe."""
    place = tmp_path_factory.mktemp("berts")
    tiny.save(place / "model", tiny.build("bert"))
    pairs = zip(tiny.sentences(N), tiny.sentences(N, high=4, seed=1), strict=True)
    rows = [{"premise": a, "hypothesis": b, "label": i % 3} for i, (a, b) in enumerate(pairs)]
    (place / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for k, name in enumerate("ab", 1):
        model, generator = tiny.build("bert"), torch.Generator().manual_seed(k)
        for p in model.parameters():
            p.data += 0.05 * torch.randn(p.shape, generator=generator)
        folder = tiny.save(place / name, model)
        curved = {n: torch.full(s.shape, float(k)) for n, s in Folder.open(folder).specs.items()}
        about = {"kind": "fisher_mc", "definition": "constant", "n_data": 10}
        write_precision(folder / "precision", curved, **about, model=folder)
        rows = [{"text": t, "label": i % 3} for i, t in enumerate(tiny.sentences(12, seed=k))]
        (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return place


@pytest.fixture
def here(tmp_path: Path, berts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder: a recipe, a base and two fine-tunes, and links to the models of text."""
    write_family(tmp_path)
    (tmp_path / "recipe.yml").write_text(RECIPE)
    for place in berts.iterdir():
        (tmp_path / place.name).symlink_to(place)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def load(folder: Path | str) -> dict[str, torch.Tensor]:
    return Folder.open(folder).tensors()


def printed(out: str) -> dict[str, str]:
    """The printed lines by their first word."""
    split = [re.split(r"\s{2,}", line, maxsplit=1) for line in out.splitlines() if "  " in line]
    return dict(pair for pair in split if len(pair) == 2)


class TestMerge(CommandContract):
    name, word = "merge", "the recipe 'none.yml' cannot be read"
    argv, bad, to = ("recipe.yml", "--shard-size", "300B"), ("none.yml",), ("out",)

    def check(self, out: Path, said: str) -> None:
        expected, found = merge(**family_in_memory(), weights=[0.5, 1.5], delta=0.25), load(out)
        assert set(found) == set(expected)
        assert all(torch.equal(found[n], expected[n]) for n in expected)
        assert "6 tensors merged, 0 copied" in said
        assert "had no positive precision" not in said  # there are none
        assert re.search(r"3\.62 kB read, 604 B written in \d+\.\d s, [\d.]+ kB/s", said)
        assert "written to out: model-00001-of-00003.safetensors, model-00002" in said
        sizes = [sum(t.nbytes for t in load_file(f).values()) for f in out.glob("*.safetensors")]
        assert max(sizes) <= 300 and sum(sizes) == 604


class TestFisher(CommandContract):
    """With all of its options."""

    name, word = "fisher", "no folder 'nowhere'"
    argv = ("model", "pairs.jsonl", "--text", "premise", "--text", "hypothesis", "--label", "label",
            "--kind", "emp", "--task", "classification", "--examples", 5, "--max-length", 9,
            "--bfloat16", "--max-memory", "1MB", "--seed", 3)  # fmt: skip
    bad = ("nowhere", "pairs.jsonl")

    def check(self, out: Path, said: str) -> None:
        (tensors, record), found = storage.read(out), printed(said)
        zeros = sum(int((t == 0).sum()) for t in tensors.values())
        size, cut = sum(t.numel() for t in tensors.values()), record["truncated"]
        assert found["kind"] == record["kind"] == "fisher_emp" and record["seed"] == 3
        assert (record["examples"], record["n_data"], record["max_length"]) == (5, N, 9)
        assert record["columns"] == ["premise", "hypothesis", "label"] and cut > 0
        assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
        assert found["tensors"] == str(len(tensors))
        assert found["parameters"] == f"{size:,}, {zeros / size:.1%} of them exactly 0"
        used = f"{N} (5 used, scaled); {cut} texts were cut to 9 tokens (--max-length)"
        assert found["n_data"] == used and float(found["seconds"]) > 0
        assert found["written"] == "out" and found["next"].startswith("blr-analysis merge")


def test_a_dry_run_says_what_would_be_done(here: Path, capsys: Any) -> None:
    code, out, err = run(capsys, "merge", "recipe.yml", "merged", "--dry-run")
    assert code == 0 and "recipe.yml, base_precision: taken from" in err
    found = printed(out)
    assert found["method"].startswith("gradient_matching: θ_0 + Σ")
    assert (found["to read"], found["to write"]) == ("3.62 kB", "604 B")
    assert re.fullmatch(r"[\d.]+ MB of buffers at most, \d threads?", found["memory"])
    assert re.search(r"ft2 +1\.5 +ft2/precision\n", out)
    assert re.search(r"merged +6 +151 +float32 +604 B", out)
    assert "embed.weight" not in out and "Nothing was written" in out
    assert run(capsys, "merge", "recipe.yml", "--dry-run")[1] == out


def test_by_validation(here: Path, capsys: Any) -> None:
    """Of all that auto tries the best comes first; without data nothing is chosen."""
    (here / "auto.yml").write_text(
        "merge_method: auto\nbase_model: model\nmodels: [{model: a}, {model: b}]\n"
        "parameters: {delta: 0.5}\n"
    )
    assert "chooses by data" in refused(capsys, "merge", "auto.yml", "out")
    data = ("--validate", "a.jsonl", "--validate", "b.jsonl")
    code, said, err = run(capsys, "merge", "auto.yml", "out", *data)
    assert code == 0 and "auto: Choice(" in err and load("out")
    tried = said.split("Tried")[1].splitlines()
    rows = [line.rsplit(None, 1) for line in tried if " " in line.strip()][1:]
    values = [float(value) for name, value in rows if name.strip().startswith(("average", "task"))]
    assert values == sorted(values) and len(values) >= 5


@pytest.mark.slow
def test_statistics_behind_merged_layers(here: Path, capsys: Any) -> None:
    """The bits of the same merge in memory; a dry run says what it takes and reads no data."""
    models = "{model: a, data: a.jsonl}, {model: b, data: b.jsonl, parameters: {weight: 2}}"
    text = f"merge_method: fisher\nbase_model: model\nmodels: [{models}]\n"
    (here / "data.yml").write_text(text.replace("jsonl", "jsonl, precision: null"))
    code, said, _ = run(capsys, "merge", "data.yml", "--dry-run")
    assert code == 0 and "forward passes" in said
    assert run(capsys, "merge", "data.yml", "out")[0] == 0
    tasks = text_tasks("model", ["a.jsonl", "b.jsonl"], labelled=False)
    how: dict[str, Any] = {"tasks": tasks, "weights": [1, 2], "method": "fisher"}
    expected, written = merge(load("model"), [load("a"), load("b")], **how), load("out")
    assert all(torch.equal(written[n], t) for n, t in expected.items())


@pytest.mark.slow
def test_a_dry_run_counts_passes_and_bytes(here: Path, capsys: Any) -> None:
    """Of three labels "ggn" takes two backward passes; factors are as large as they will be, and
    a merge takes them."""
    argv = ("fisher", "model", "a.jsonl")
    for how, times in (
        ((), 1),
        (("--kind", "ggn"), 5 / 3),
        (("--samples", 4), 3),
        (("--structure", "gram"), 1 / 3),
        (("--structure", "kron"), 2),
    ):
        passes = float(printed(run(capsys, *argv, *how, "--dry-run")[1])["passes"].split()[0])
        assert passes == pytest.approx(times, abs=0.5 / 12)
        if "--structure" in how:
            assert run(capsys, *argv, *how, "-o", how[1])[0] == 0
            size = sum(t.nbytes for t in storage.read(here / how[1])[0].values())
            assert fisher_cost("model", "a.jsonl", structure=how[1]).disk == size
            given: dict[str, Any] = {"precisions": [how[1]] * 2, "method": "fisher"}
            solves = merge(None, ["model", "model"], out=f"{how[1]}_out", **given).solves
            assert any("att" in name and s.residual <= 1e-8 for name, s in solves.items())


SWAPPED = (
    "merge_method: gradient_matching\nbase_model: model\nmodels:\n"
    "- {model: a, precision: b/precision}\n- {model: b, precision: a/precision}\n"
)
FAILURES = [
    ("merge recipe.yml", "name the folder to write"),
    ("merge recipe.yml base --force", "is not empty"),
    ("merge recipe.yml recipe.yml", "is there already"),
    ("merge recipe.yml out --shard-size big", "--shard-size must be a size"),
    ("merge recipe.yml out --max-memory -1", "--max-memory must be a size"),
    ("merge recipe.yml out --threads 0", "threads must be"),
    ("merge recipe.yml out --validate a.jsonl", "auto"),
    ("merge swapped.yml out", "swapped"),
    ("fisher model pairs.jsonl --max-memory much", "--max-memory"),
    ("fisher model pairs.jsonl --device abacus", "abacus"),
]


@pytest.mark.parametrize(("argv", "word"), FAILURES)
def test_every_failure_is_one_line_and_leaves_nothing(
    here: Path, capsys: Any, argv: str, word: str
) -> None:
    (here / "swapped.yml").write_text(SWAPPED)
    before = files(here)
    assert word in refused(capsys, *argv.split())
    assert files(here) == before
    if word == "swapped":
        assert run(capsys, *argv.split(), "--trust")[0] == 0


@pytest.mark.slow
def test_start_up_and_merging_load_only_what_they_need(here: Path) -> None:
    """Other commands do not pay for recipes, and a merge does not pay for tables and pictures."""
    code = """if True:
        import sys
        import blr_analysis.huggingface
        from blr_analysis.cli import main
        tables = {"pandas", "matplotlib", "scipy", "sklearn", "transformers", "pyarrow"}
        others = {"pydantic", "ruamel.yaml", "peft", "lightning", "pytorch_lightning"}
        assert not (others | tables) & {*sys.modules}
        assert main(["merge", "recipe.yml", "out"]) == 0 and not tables & {*sys.modules}
    """
    told: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, **told)
    assert done.returncode == 0, done.stderr
