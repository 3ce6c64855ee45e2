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
from merging.models_on_disk import family_in_memory, state, write_family, write_model
from safetensors.torch import load_file

from blr_analysis.errors import PosteriorError
from blr_analysis.files import Folder, storage
from blr_analysis.huggingface.fisher import fisher_cost, text_tasks
from blr_analysis.merging.merge import merge
from blr_analysis.posterior.precision_files import read_precision_record, write_precision

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
    texts = "".join(f"{row['premise']}\t{row['label']}\n" for row in rows)
    (place / "data.tsv").write_text("text\tlabel\n" + texts)
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
    name, word = "fisher", "no folder 'nowhere'"
    argv, bad = ("model", "data.tsv", "--seed", 3), ("nowhere", "data.tsv")

    def check(self, out: Path, said: str) -> None:
        tensors, record = storage.read(out)
        zeros = sum(int((t == 0).sum()) for t in tensors.values())
        size, found = sum(t.numel() for t in tensors.values()), printed(said)
        assert found["kind"] == record["kind"] == "fisher_mc" and record["seed"] == 3
        assert found["tensors"] == str(len(tensors))
        assert found["parameters"] == f"{size:,}, {zeros / size:.1%} of them exactly 0"
        assert found["n_data"] == str(N) and float(found["seconds"]) > 0
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
@pytest.mark.parametrize("method", ["fisher", "auto"])
def test_statistics_behind_merged_layers(here: Path, capsys: Any, method: str) -> None:
    """The bits of the same merge in memory; a dry run says what it takes and reads no data."""
    models = ("{model: a, data: a.jsonl, precision: null}",
              "{model: b, data: b.jsonl, precision: null, parameters: {weight: 2}}")  # fmt: skip
    text = f"merge_method: {method}\nbase_model: model\nmodels: [{', '.join(models)}]\n"
    (here / "data.yml").write_text(text)
    code, said, _ = run(capsys, "merge", "data.yml", "--dry-run")
    assert code == 0 and ("forward passes" in said or method == "auto")
    assert run(capsys, "merge", "data.yml", "out")[0] == 0
    tasks = text_tasks("model", ["a.jsonl", "b.jsonl"], labelled=method == "auto")
    how: dict[str, Any] = {"tasks": tasks, "weights": [1, 2], "method": method}
    expected, written = merge(load("model"), [load("a"), load("b")], **how), load("out")
    assert all(torch.equal(written[n], t) for n, t in expected.items())
    for old, new, word in (
        (", data: b.jsonl", "", "at every model"),
        ("data: b.jsonl", "data: c.jsonl", "no 'c.jsonl'"),
        *[("data: b.jsonl", "data: b.jsonl, n_data: 3", "one of them")] * (method == "fisher"),
        (f"method: {method}", "method: gradient_matching", "fisher and auto"),
    ):
        (here / "data.yml").write_text(text.replace(old, new))
        assert word in refused(capsys, "merge", "data.yml", "--dry-run")


def test_the_options_of_fisher_arrive(here: Path, capsys: Any) -> None:
    columns = ("--text", "premise", "--text", "hypothesis", "--label", "label")
    options = ("--kind", "emp", "--examples", 5, "--out", "p", "--max-length", 9)
    more = ("--bfloat16", "--max-memory", "1MB")
    code, said, _ = run(capsys, "fisher", "model", "pairs.jsonl", *columns, *options, *more)
    record, found = read_precision_record(here / "p"), printed(said)["n_data"]
    assert code == 0 and record["kind"] == "fisher_emp"
    assert (record["examples"], record["n_data"], record["max_length"]) == (5, N, 9)
    assert record["columns"] == ["premise", "hypothesis", "label"] and record["truncated"] > 0
    assert "5 used, scaled" in found
    assert f"{record['truncated']} texts were cut to 9 tokens" in found
    assert {t.dtype for t in storage.read(here / "p")[0].values()} == {torch.bfloat16}


def test_a_language_model(tmp_path: Path, capsys: Any) -> None:
    place = tiny.save(tmp_path / "m", tiny.build("gpt2", "causal_lm"))
    (tmp_path / "corpus.txt").write_text("\n".join(tiny.sentences(N)))
    argv = ("fisher", place, tmp_path / "corpus.txt")
    code, said, _ = run(capsys, *argv, "--task", "causal_lm")
    assert code == 0 and printed(said)["n_data"] == str(N)
    assert read_precision_record(place / "precision")["likelihood"] == "causal_lm"
    assert "kind='mc'" in refused(capsys, *argv, "--kind", "ggn", "--force")
    assert read_precision_record(place / "precision")["kind"] == "fisher_mc"


@pytest.mark.slow
def test_a_dry_run_counts_passes_and_bytes(here: Path, capsys: Any) -> None:
    """Of three labels "ggn" takes two backward passes; factors are as large as they will be."""
    argv = ("fisher", "model", "data.tsv")
    for how, times in (
        ((), 1),
        (("--kind", "ggn"), 5 / 3),
        (("--samples", 4), 3),
        (("--structure", "gram"), 1 / 3),
        (("--structure", "kron"), 2),
    ):
        passes = float(printed(run(capsys, *argv, *how, "--dry-run")[1])["passes"].split()[0])
        assert passes == pytest.approx(times, abs=0.5 / N)
        if "--structure" in how:
            assert run(capsys, *argv, *how, "-o", how[1])[0] == 0
            size = sum(t.nbytes for t in storage.read(here / how[1])[0].values())
            assert fisher_cost("model", "data.tsv", structure=how[1]).disk == size


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "task"), [("bert", "classification"), ("gpt2", "causal_lm")])
@pytest.mark.parametrize("structure", ["gram", "kron"])
def test_precisions_with_structure(
    tmp_path: Path, capsys: Any, structure: str, kind: str, task: str
) -> None:
    """Written by the names of the files, and taken by a merge; swapped, refused."""
    (tmp_path / "corpus.txt").write_text("\n".join(tiny.sentences(N)))
    places = [tiny.save(tmp_path / str(k), tiny.build(kind, task, seed=k)) for k in (0, 1)]
    for place in places:
        command = ("fisher", place, tmp_path / "corpus.txt", "--structure", structure)
        assert run(capsys, *command, "--examples", 5)[0] == 0
    record, stored = (
        read_precision_record(places[0] / "precision"),
        [p / "precision" for p in places],
    )
    assert (record["structure"], record["n_data"], record["examples"]) == (structure, N, 5)
    report = merge(None, places, precisions=stored, out=tmp_path / "out", method="fisher")
    assert any("att" in name for name in report.solves)
    assert max(s.residual for s in report.solves.values()) <= 1e-8
    with pytest.raises(PosteriorError, match="swapped"):
        merge(None, places, precisions=stored[::-1], out=tmp_path / "two", method="fisher")


SWAPPED = (
    "merge_method: gradient_matching\nbase_model: model\nmodels:\n"
    "- {model: a, precision: b/precision}\n- {model: b, precision: a/precision}\n"
)
FAILURES = [
    ("merge recipe.yml", "name the folder to write"),
    ("merge bad.yml out", "method 'ties' needs the base"),
    ("merge recipe.yml base --force", "is not empty"),
    ("merge recipe.yml recipe.yml", "is there already"),
    ("merge recipe.yml out --shard-size big", "--shard-size must be a size"),
    ("merge recipe.yml out --max-memory -1", "--max-memory must be a size"),
    ("merge recipe.yml out --threads 0", "threads must be"),
    ("merge recipe.yml out --dryrun", "--dryrun"),
    ("merge recipe.yml out more", "more"),
    ("merge recipe.yml out --validate a.jsonl", "auto"),
    ("merge wrong.yml out", "not the same model"),
    ("merge same.yml out", "equals its base"),
    ("merge swapped.yml out", "swapped"),
    ("fisher model gone.tsv", "gone.tsv"),
    ("fisher model data.tsv --kind hessian", "kind must be one of"),
    ("fisher model data.tsv --kind emp --samples 5", "samples"),
    ("fisher model data.tsv --text nothing", "'text', 'label'"),
    ("fisher model pairs.jsonl --max-memory much", "--max-memory"),
    ("fisher model data.tsv --device abacus", "abacus"),
    ("fisher model", "DATA"),
]


@pytest.mark.parametrize(("argv", "word"), FAILURES)
def test_every_failure_is_one_line_and_leaves_nothing(
    here: Path, capsys: Any, argv: str, word: str
) -> None:
    write_model(here / "odd", {"other.weight": torch.ones(2)})
    write_model(here / "twin", state(0))
    head = "merge_method: task_arithmetic\nbase_model: base\nmodels: "
    (here / "bad.yml").write_text("merge_method: ties\nmodels: [{model: ft1}]")
    (here / "wrong.yml").write_text(f"{head}[{{model: ft1}}, {{model: odd}}]")
    (here / "same.yml").write_text(f"{head}[{{model: twin}}]")
    (here / "swapped.yml").write_text(SWAPPED)
    before = files(here)
    assert word in refused(capsys, *argv.split())
    assert files(here) == before
    if word == "swapped":
        assert run(capsys, *argv.split(), "--trust")[0] == 0


def test_an_interrupt_leaves_nothing(here: Path, capsys: Any, monkeypatch: Any) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("blr_analysis.huggingface.fisher.fit_kept", interrupt)
    code, said, err = run(capsys, "fisher", "model", "data.tsv", "--out", "p")
    assert (code, said) == (130, "") and err.endswith("interrupted\n")
    assert not (here / "p").exists()


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
    told: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, **told)
    assert done.returncode == 0, done.stderr
