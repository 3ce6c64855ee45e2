"""``blr-analysis merge``: what it writes is what the formula gives, and what it prints is so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CommandContract, refused, run
from merging.models_on_disk import family_in_memory, near, state, write_family, write_model
from safetensors.torch import load_file

import blr_analysis as blr
from blr_analysis.files import Folder

ROOT = Path(__file__).resolve().parents[1]
RECIPE = """
merge_method: gradient_matching
base_model: base
models:
  - model: ft1
    parameters: {weight: 0.5}
  - model: ft2
    parameters: {weight: 1.5}
parameters: {delta: 0.25}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a recipe, a base and two fine-tunes."""
    write_family(tmp_path)
    (tmp_path / "recipe.yml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def load(folder: Path) -> dict[str, torch.Tensor]:
    source = Folder.open(folder)
    return {name: source.tensor(name) for name in source.specs}


class TestMerge(CommandContract):
    name, word = "merge", "the recipe 'none.yml' cannot be read"
    argv, bad, to = ("recipe.yml",), ("none.yml",), ("out",)

    def check(self, out: Path, said: str) -> None:
        expected = blr.merge(**family_in_memory(), weights=[0.5, 1.5], delta=0.25)
        found = load(out)
        assert set(found) == set(expected)
        assert all(torch.equal(found[n], expected[n]) for n in expected)
        assert "6 tensors merged, 0 copied" in said
        assert "had no positive precision" not in said  # there are none
        assert re.search(r"3\.62 kB read, 604 B written in \d+\.\d s, [\d.e-]+ GB/s", said)
        assert "written to out: model.safetensors" in said


def test_no_folder_but_that_of_a_merge_is_replaced(here: Path, capsys: Any) -> None:
    line = refused(capsys, "merge", "recipe.yml", "base", "--force")
    assert "is not empty" in line and (here / "base").is_dir()
    assert (
        "recipe.yml, base_precision: taken from"
        in run(capsys, "merge", "recipe.yml", "--dry-run")[2]
    )


def test_a_linear_recipe_of_mergekit_by_hand(here: Path, capsys: Any) -> None:
    (here / "linear.yml").write_text(
        "models:\n- model: ft1\n  parameters: {weight: 1.0}\n- model: ft2\n"
        "  parameters: {weight: [0.0, 3.0]}\nmerge_method: linear\ndtype: float32\n"
    )
    assert run(capsys, "merge", "linear.yml", "out")[0] == 0
    found, one, two = load(here / "out"), near(state(0), 1), near(state(0), 2)
    shares = {"embed": 1.0, "layers.0": 1.0, "layers.1": 0.25, "scale": 1.0}  # of ft1
    for name, tensor in found.items():
        share = next(s for start, s in shares.items() if name.startswith(start))
        expected = share * one[name].double() + (1 - share) * two[name].double()
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-7)


def test_a_task_arithmetic_recipe_of_mergekit_by_hand(here: Path, capsys: Any) -> None:
    (here / "ta.yml").write_text(
        "models:\n- model: base\n- model: ft1\n  parameters: {weight: 0.5, density: 0.3}\n"
        "- model: ft2\n  parameters:\n    weight:\n    - {filter: mlp, value: 2}\n    - value: 1\n"
        "merge_method: task_arithmetic\nbase_model: base\n"
        "parameters: {normalize: true, lambda: 0.75, int8_mask: true}\ndtype: float32\n"
    )
    assert run(capsys, "merge", "ta.yml", "out")[0] == 0
    found, base = load(here / "out"), state(0)
    steps = [{n: near(base, t)[n].double() - base[n].double() for n in base} for t in (1, 2)]
    for name, tensor in found.items():
        a, b = 0.5, 2.0 if "mlp" in name else 1.0
        mixed = 0.75 * (a * steps[0][name] + b * steps[1][name]) / (a + b)
        expected = base[name].double() + mixed
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_dry_run_writes_nothing(here: Path, capsys: Any) -> None:
    before = sorted(here.rglob("*"))
    code, out, err = run(capsys, "merge", "recipe.yml", "merged", "--dry-run")
    assert code == 0, err
    assert sorted(here.rglob("*")) == before
    assert re.search(r"method +gradient_matching: θ_0 \+ Σ", out)
    assert re.search(r"to read +3\.62 kB\n", out)  # three models, three precisions
    assert re.search(r"to write +604 B\n", out)
    assert re.search(r"memory +[\d.]+ MB of buffers at most", out)
    assert re.search(r"ft2 +1\.5 +ft2/precision\n", out)
    assert re.search(r"merged +6 +151 +float32 +604 B", out)
    assert "embed.weight" not in out
    assert "Nothing was written" in out
    assert run(capsys, "merge", "recipe.yml", "--dry-run")[1] == out


def test_shards_have_the_size_that_was_asked_for(here: Path, capsys: Any) -> None:
    assert (
        run(capsys, "merge", "recipe.yml", "merged", "--shard-size", "300B", "--threads", "1")[0]
        == 0
    )
    files = sorted((here / "merged").glob("model-*.safetensors"))
    assert len(files) > 1
    sizes = [sum(t.nbytes for t in load_file(file).values()) for file in files]
    assert all(size <= 300 for size in sizes)
    assert sum(sizes) == 604
    assert json.loads((here / "merged/model.safetensors.index.json").read_text())["metadata"] == {
        "total_size": 604
    }


FAILURES = {
    "no folder": ("recipe.yml", "name the folder to write"),
    "bad recipe": ("bad.yml out", "method 'ties' needs the base"),
    "full folder": ("recipe.yml base", "is not empty"),
    "a file": ("recipe.yml recipe.yml", "is there already"),
    "size": ("recipe.yml out --shard-size big", "--shard-size must be a size"),
    "memory": ("recipe.yml out --max-memory -1", "--max-memory must be a size"),
    "threads": ("recipe.yml out --threads 0", "threads must be"),
    "option": ("recipe.yml out --dryrun", "--dryrun"),
    "too many": ("recipe.yml out more", "more"),
    "wrong models": ("wrong.yml out", "not the same model"),
    "the base itself": ("same.yml out", "equals its base"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_every_failure_is_one_line_and_leaves_nothing(
    here: Path, capsys: Any, failure: str
) -> None:
    (here / "bad.yml").write_text("merge_method: ties\nmodels: [{model: ft1}]")
    write_model(here / "odd", {"other.weight": torch.ones(2)})
    write_model(here / "twin", state(0))
    head = "merge_method: task_arithmetic\nbase_model: base\nmodels: "
    (here / "wrong.yml").write_text(f"{head}[{{model: ft1}}, {{model: odd}}]")
    (here / "same.yml").write_text(f"{head}[{{model: twin}}]")
    before = sorted(here.rglob("*"))
    argv, expected = FAILURES[failure]
    assert expected in refused(capsys, "merge", *argv.split())
    assert sorted(here.rglob("*")) == before


@pytest.mark.slow
def test_start_up_and_merging_load_only_what_they_need(here: Path) -> None:
    """Other commands do not pay for recipes, and a merge does not pay for tables and pictures."""
    code = """if True:
        import sys
        import blr_analysis.huggingface
        from blr_analysis.cli import main
        tables = {"pandas", "matplotlib", "scipy", "sklearn", "transformers", "pyarrow"}
        others = {"pydantic", "ruamel.yaml", "peft", "lightning", "pytorch_lightning"}
        loaded = sorted((others | tables) & set(sys.modules))
        if loaded: sys.exit(f"at start-up: {loaded}")
        code = main(["merge", "recipe.yml", "out"])
        loaded = sorted(tables & set(sys.modules))
        sys.exit(code or (f"while merging: {loaded}" if loaded else 0))
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
