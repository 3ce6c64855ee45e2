"""``blr-analysis fisher``: what it prints is what lies on disk, and every failure is one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers as tiny
import torch
from commands import CommandContract, refused, run

from blr_analysis.errors import PosteriorError
from blr_analysis.files import storage
from blr_analysis.huggingface.fisher import fisher_cost
from blr_analysis.merging.card import outcome
from blr_analysis.merging.merge import merge
from blr_analysis.posterior.precision_files import read_precision_record

pytest.importorskip("transformers")

N = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tiny.save(tmp_path_factory.mktemp("model"), tiny.build("bert"))
    pairs = zip(tiny.sentences(N), tiny.sentences(N, high=4, seed=1), strict=True)
    rows = [{"premise": a, "hypothesis": b, "label": i % 3} for i, (a, b) in enumerate(pairs)]
    (place / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = "".join(f"{row['premise']}\t{row['label']}\n" for row in rows)
    (place / "data.tsv").write_text("text\tlabel\n" + texts)
    return place


@pytest.fixture
def here(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(out: str) -> dict[str, str]:
    """The printed lines by their first word."""
    split = [re.split(r"\s{2,}", line, maxsplit=1) for line in out.splitlines() if "  " in line]
    return dict(pair for pair in split if len(pair) == 2)


class TestFisher(CommandContract):
    name, word = "fisher", "no folder 'nowhere'"
    argv = ("model", "model/data.tsv", "--seed", 3)
    bad = ("nowhere", "model/data.tsv")

    def check(self, out: Path, said: str) -> None:
        tensors, record = storage.read(out)
        zeros = sum(int((t == 0).sum()) for t in tensors.values())
        size = sum(t.numel() for t in tensors.values())
        found = rows(said)
        assert found["kind"] == record["kind"] == "fisher_mc" and record["seed"] == 3
        assert found["tensors"] == str(len(tensors))
        assert found["parameters"] == f"{size:,}, {zeros / size:.1%} of them exactly 0"
        assert found["n_data"] == str(N) and float(found["seconds"]) > 0
        assert found["written"] == "out" and found["next"].startswith("blr-analysis merge")


def test_the_options_arrive(here: Path, capsys: Any) -> None:
    columns = ["--text", "premise", "--text", "hypothesis", "--label", "label"]
    options = ["--kind", "emp", "--examples", 5, "--out", "p", "--max-length", 9]
    more = ["--bfloat16", "--max-memory", "1MB"]
    code, said, _ = run(capsys, "fisher", "model", "model/pairs.jsonl", *columns, *options, *more)
    record = read_precision_record(here / "p")
    assert code == 0 and record["kind"] == "fisher_emp"
    assert (record["examples"], record["n_data"], record["max_length"]) == (5, N, 9)
    assert record["columns"] == ["premise", "hypothesis", "label"] and record["truncated"] > 0
    assert "5 used, scaled" in rows(said)["n_data"]
    assert f"{record['truncated']} texts were cut to 9 tokens" in rows(said)["n_data"]
    assert {t.dtype for t in storage.read(here / "p")[0].values()} == {torch.bfloat16}


def test_a_language_model(tmp_path: Path, capsys: Any) -> None:
    place = tiny.save(tmp_path / "m", tiny.build("gpt2", "causal_lm"))
    (tmp_path / "corpus.txt").write_text("\n".join(tiny.sentences(N)))
    argv = ("fisher", place, tmp_path / "corpus.txt")
    code, said, _ = run(capsys, *argv, "--task", "causal_lm")
    assert code == 0 and rows(said)["n_data"] == str(N)
    assert read_precision_record(place / "precision")["likelihood"] == "causal_lm"
    assert "kind='mc'" in refused(capsys, *argv, "--kind", "ggn", "--force")
    assert read_precision_record(place / "precision")["kind"] == "fisher_mc"


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ("model gone.tsv", "gone.tsv"),
        ("model model/data.tsv --kind hessian", "kind must be one of"),
        ("model model/data.tsv --kind emp --samples 5", "samples"),
        ("model model/data.tsv --text nothing", "'text', 'label'"),
        ("model model/pairs.jsonl --max-memory much", "--max-memory"),
        ("model model/data.tsv --device abacus", "abacus"),
        ("model", "DATA"),
    ],
)
def test_refusals(here: Path, capsys: Any, argv: str, word: str) -> None:
    assert word in refused(capsys, "fisher", *argv.split())
    assert [path.name for path in here.iterdir()] == ["model"]


def test_an_interrupt_leaves_nothing(
    here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("blr_analysis.huggingface.fisher.fit_kept", interrupt)
    code, said, err = run(capsys, "fisher", "model", "model/data.tsv", "--out", "p")
    assert (code, said) == (130, "") and err.endswith("interrupted\n")
    assert not (here / "p").exists()


@pytest.mark.slow
def test_a_dry_run_counts_passes_and_bytes(here: Path, capsys: Any) -> None:
    """Of three labels "ggn" takes two backward passes; factors are as large as they will be."""
    argv = ("fisher", "model", "model/data.tsv")

    def passes(*how: object) -> float:
        found = rows(run(capsys, *argv, *how, "--dry-run")[1])
        return float(found["passes"].split()[0])

    assert passes() == 1
    assert passes("--kind", "ggn") == pytest.approx(5 / 3, abs=0.5 / N)
    assert passes("--samples", 4) == pytest.approx(3, abs=0.5 / N)
    for structure, times in (("gram", 1 / 3), ("kron", 2)):
        how = ("--structure", structure)
        assert passes(*how) == pytest.approx(times, abs=0.5 / N)
        assert run(capsys, *argv, *how, "-o", structure)[0] == 0
        size = sum(t.nbytes for t in storage.read(here / structure)[0].values())
        assert fisher_cost("model", "model/data.tsv", structure=structure).disk == size


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "task"), [("bert", "classification"), ("gpt2", "causal_lm")])
@pytest.mark.parametrize("structure", ["gram", "kron"])
def test_precisions_with_structure(
    tmp_path: Path, capsys: Any, structure: str, kind: str, task: str
) -> None:
    """Written by the names of the files, and taken by a merge; swapped, refused."""
    (tmp_path / "corpus.txt").write_text("\n".join(tiny.sentences(N)))
    models = [tiny.build(kind, task, seed=k) for k in (0, 1)]
    places = [tiny.save(tmp_path / n, m) for n, m in zip("ab", models, strict=True)]
    for place in places:
        command = ["fisher", place, tmp_path / "corpus.txt", "--structure", structure]
        assert run(capsys, *command, "--examples", 5)[0] == 0
    record = read_precision_record(places[0] / "precision")
    assert (record["structure"], record["n_data"], record["examples"]) == (structure, N, 5)
    assert (record["kind"] == "gram") == (structure == "gram")
    stored = [p / "precision" for p in places]
    how: dict[str, Any] = {"method": "fisher"}
    report = merge(None, places, precisions=stored, out=tmp_path / "out", **how)
    assert any("att" in name for name in report.solves)
    assert max(s.residual for s in report.solves.values()) <= 1e-8
    assert not any("head alone" in sentence for sentence in outcome(report))
    with pytest.raises(PosteriorError, match="swapped"):
        merge(None, places, precisions=stored[::-1], out=tmp_path / "two", **how)
