"""The command line: what it prints is what the library finds, and every failure is one line."""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
import typer
from commands import run
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text
from safetensors.torch import save_file
from torch import nn

import blr_analysis as blr
from blr_analysis.audit import (
    folder_for,
    investigate,
    most_suspicious,
    summary,
    write,
    write_picture,
)
from blr_analysis.audit import pictures as pictures_module
from blr_analysis.cli import main
from blr_analysis.cli.commands import app
from blr_analysis.cli.script import load_tasks
from blr_analysis.cli.selectors import selected
from blr_analysis.errors import BLRError, InputError, StorageError
from blr_analysis.terminal import as_text, show

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import sys
from dataclasses import dataclass
import torch
from torch import nn
from blr_analysis import Task
import beside

@dataclass
class Settings:
    classes: int = 3

G = torch.Generator().manual_seed(0)
X = torch.randn(60, 1, 4, 4, generator=G)
Y = (X.mean((1, 2, 3)) * 8).round().long().clamp(-1, 1) + 1
XT = torch.randn(30, 1, 4, 4, generator=G)
YT = (XT.mean((1, 2, 3)) * 8).round().long().clamp(-1, 1) + 1

def model(outputs=3):
    g = torch.Generator().manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, outputs))
    for p in net.parameters():
        p.data = torch.randn(p.shape, generator=g)
    return net

def make_task():
    metadata = {"source": ["web", "book", "web"] * 20, "year": range(2000, 2060),
                "checked": [True, False] * 30, "the word": ["it's", "its", "is"] * 20}
    return Task(model(Settings().classes), (X, Y), metadata=metadata)

def make_test():
    return Task(model(), (XT, YT))

def regression():
    return Task(model(1), (X, X.sum((1, 2, 3))), likelihood="gaussian")

def wider():
    return Task(model(), (torch.randn(9, 1, 5, 5), Y[:9]))

def several():
    return Task(model(3), (X, X[:, 0, 0, :3]), likelihood="gaussian")

def tags():
    return Task(model(3), (X, (X[:, 0, 0, :3] > 0).float()), likelihood="bernoulli")

TASK = make_task()

def fails():
    return {}["gone"]

def leaves():
    sys.exit(3)

def interrupts():
    raise KeyboardInterrupt

def number():
    return 3

def needs(argument):
    return TASK

if __name__ == "__main__":
    raise RuntimeError("training must not start")
"""

GONE = SCRIPT.splitlines().index('    return {}["gone"]') + 1


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script, the module that it imports, and a saved posterior."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "beside.py").write_text("VALUE = 1\n")
    task, _ = load_tasks(f"{folder}/script.py:make_task")
    blr.fit_laplace(task, structure="kron", prior_precision=2.0).save(folder / "q.safetensors")
    blr.fit_laplace(task, structure="diag", prior_precision=2.0).save(folder / "d.safetensors")
    argv = ("index", f"{folder}/script.py:make_task", "-p", f"{folder}/q.safetensors")
    assert main([*argv, "--out", f"{folder}/index"]) == 0
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working folder with script.py, its posterior q.safetensors and their index alone."""
    for name in ("script.py", "beside.py", "q.safetensors", "d.safetensors", "index"):
        (tmp_path / name).symlink_to(place / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are laid out and written, and not rendered."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: Path(path).write_bytes(b""))


def inputs() -> tuple[blr.Task, blr.Task, blr.Posterior]:
    task, test = load_tasks("script.py:make_task", "make_test")
    assert test is not None
    return task, test, blr.Posterior.load("q.safetensors")


def cells(text: str, first: str) -> list[str]:
    """The row that starts with these words, cut where two blanks stand."""
    rows = (re.split(r"\s{2,}", t.strip()) for t in text.splitlines() if t.startswith(first))
    (row,) = (row for row in rows if len(row) > 1)  # not a sentence that begins so
    return row


# What is printed and written


def test_audit_prints_and_writes_what_the_library_finds(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("audit", "script.py:make_task", "-p", "q.safetensors", "--test", "make_test")
    code, out, err = run(capsys, *argv, "--out", "audit")
    assert code == 0
    task, test, q = inputs()
    scores, loo = blr.sensitivity(task, q), blr.leave_one_out(task, q)
    with torch.no_grad():
        outputs = test.model(test.dataset.tensors[0])
    nll = torch.nn.functional.cross_entropy(outputs, test.dataset.tensors[1]).item()
    hits = (outputs.argmax(-1) == test.dataset.tensors[1]).double().mean().item()
    estimate = ["leave-one-out estimate", f"{loo.nll:.4f}", f"{loo.accuracy:.1%}"]
    assert cells(out, "leave-one-out estimate") == estimate
    assert cells(out, "test data") == ["test data", f"{nll:.4f}", f"{hits:.1%}"]
    assert cells(out, "training data")[1] == f"{scores.losses.mean():.4f}"
    for region, count in blr.memory_map(scores).counts().items():
        assert cells(out, f"{region}  ")[:2] == [region, str(count)]
    first = int(scores.table["deviation"].idxmax())
    assert re.search(rf"Most influential.*?\n\s*{first}\s", out, re.DOTALL)
    each = blr.what_if_each(task, q, evaluate=test)
    worst = each.loc[each["nll_change"].abs().idxmax()]
    after = cells(out.split("What if")[1].split("change")[1], f"    {int(worst['group'])}  ")
    assert after[2:4] == [f"{worst['nll_after']:.3f}", f"{worst['nll_change']:+.3f}"]

    names = {path.name for path in Path("audit").iterdir()}
    tables = {
        f"{n}.{s}" for n in ("table", "leave_one_out", "removals") for s in ("csv", "parquet")
    }
    pictures = {"memory_map", "deviations", "leave_one_out", "suspicious", "removals"}
    others = {f"{n}.png" for n in pictures} | {
        "posterior.safetensors",
        "summary.txt",
        "report.html",
    }
    assert names == tables | others
    for name in names - tables:
        assert Path("audit", name).stat().st_size > 500
    table = pd.read_parquet("audit/table.parquet")
    pd.testing.assert_series_equal(table["deviation"], scores.table["deviation"])
    quality = loo.logits.softmax(-1).gather(1, loo.targets[:, None]).flatten()
    assert table["label_quality"].to_numpy() == pytest.approx(quality.numpy(), rel=1e-5)
    assert table["suspicious"].tolist() == (loo.logits.argmax(-1) != loo.targets).tolist()
    assert table["left_out_prediction"].tolist() == loo.logits.argmax(-1).tolist()
    assert table["source"].tolist() == task.metadata["source"]
    pd.testing.assert_frame_equal(pd.read_parquet("audit/removals.parquet"), each)
    again = blr.Posterior.load("audit/posterior.safetensors")
    assert torch.equal(again.variance("1.weight"), q.variance("1.weight"))
    assert Path("audit/summary.txt").read_text().splitlines()[:30] == out.splitlines()[:30]
    assert "sensitivity" in err
    assert "\x1b" not in out + err


def test_suspicious_labels_are_sorted_by_how_surely_they_are_contradicted(here: Path) -> None:
    task, _, q = inputs()
    findings = investigate(task, q, by=None)
    table = findings.table
    worst = most_suspicious(table, 5)
    assert worst["suspicious"].to_numpy().all()
    assert worst["label_quality"].is_monotonic_increasing
    doubted = table["label_quality"].to_numpy()[table["suspicious"].to_numpy()]
    assert len(doubted) > 5
    assert sorted(doubted)[:5] == worst["label_quality"].tolist()


def test_label_quality_is_a_probability_where_the_loss_has_weights_and_smoothing() -> None:
    torch.manual_seed(0)
    X, y = torch.randn(40, 2), torch.arange(40) % 2
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]), label_smoothing=0.1)
    task = blr.Task(nn.Linear(2, 2), (X, y), likelihood=loss)
    findings = investigate(task, blr.fit_laplace(task, prior_precision=1.0), by=None)
    quality = findings.loo.logits.softmax(-1)[torch.arange(40), y]
    assert findings.table["label_quality"].to_numpy() == pytest.approx(quality.numpy())
    contradicted = sorted(quality[quality < 0.5].tolist())
    assert most_suspicious(findings.table, 5)["label_quality"].tolist() == pytest.approx(
        contradicted[:5]
    )


@pytest.mark.usefixtures("sketched")
@pytest.mark.parametrize("name", ["regression", "several", "tags"])
def test_audit_of_other_likelihoods(
    here: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    argv = (f"script.py:{name}", "--fit", "kron", "--prior-precision", "1")
    code, out, _ = run(capsys, "audit", *argv, "--test", name, "--out", "audit")
    assert code == 0
    assert "What if" not in out
    assert not Path("audit/removals.csv").exists()
    table = pd.read_csv("audit/table.csv")
    assert ("label_quality" in table) == (name == "tags")
    assert ("left_out_prediction" in table) == (name == "regression")
    code, out, _ = run(capsys, "what-if", *argv, "--remove", "3,4", "--out", "less")
    assert code == 0
    assert cells(out, "all")[1] == "60"
    assert {path.name for path in Path("less").iterdir()} == {
        "what_if.png",
        "perturbed.safetensors",
    }


def test_metadata_with_the_names_of_columns_keep_their_values() -> None:
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    metadata = {"suspicious": ["so"] * 12, "prediction": ["me"] * 12, "loss_weight": [1.0] * 12}
    task = blr.Task(torch.nn.Linear(2, 3), (x, torch.arange(12) % 3), metadata=metadata)
    q = blr.fit_laplace(task, structure="diag", prior_precision=1.0)
    table = investigate(task, q, by=None).table
    assert table["suspicious_metadata"].tolist() == ["so"] * 12
    assert table["prediction_metadata"].tolist() == ["me"] * 12
    assert table["suspicious"].dtype == bool
    assert "left_out_loss_weight" not in table


@pytest.mark.usefixtures("sketched")
def test_audit_by_a_metadata_column_and_by_none(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("audit", "script.py:TASK", "-p", "d.safetensors", "--out", "audit")
    code, out, _ = run(capsys, *argv, "--by", "source")
    assert code == 0
    assert "What if a source were gone?" in out
    assert "the training data themselves" in " ".join(out.split())
    assert "This posterior is diagonal" in out
    assert pd.read_csv("audit/removals.csv")["group"].tolist() == ["book", "web"]
    Path("audit/leave_one_out.png").touch()  # as of an audit with test data
    Path("audit/mine.png").touch()
    code, out, _ = run(capsys, *argv, "--by", "none")
    assert code == 0
    assert "What if" not in out
    files = {path.name for path in Path("audit").iterdir()}
    assert not files & {"removals.csv", "removals.parquet", "removals.png", "leave_one_out.png"}
    assert {"table.csv", "mine.png"} <= files


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_posterior_around_the_first_weights(
    here: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    task, _, _ = inputs()
    weights = {n: p + 0.5 for n, p in task.parameters().items()}
    write = torch.save if suffix == "pt" else save_file
    write(weights, Path(f"first.{suffix}"))
    argv = ("what-if", "script.py:TASK", "--remove", "3", "--initial", f"first.{suffix}")
    code, _, err = run(capsys, *argv, "--fit", "diag", "--out", "w", "--solver", "posterior")
    assert code == 0, err
    q = blr.fit_laplace(task, structure="diag", initial=weights)
    truth = blr.what_if(task, q, remove=[3], solver="posterior").parameters
    saved = blr.Posterior.load("w/perturbed.safetensors").mean
    torch.testing.assert_close(saved, truth)
    code, _, err = run(capsys, *argv, "-p", "d.safetensors")
    assert code == 2 and "--initial" in err
    Path("first.pt").write_bytes(b"no weights")
    code, _, err = run(capsys, *argv[:-1], "first.pt", "--fit", "diag")
    assert code != 0 and "weights_only" in err


def test_map(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("map", "script.py:make_task", "-p", "q.safetensors", "--quantile", "0.8")
    code, out, _ = run(capsys, *argv, "--out", "map")
    assert code == 0
    task, _, q = inputs()
    memory = blr.memory_map(blr.sensitivity(task, q), quantile=0.8)
    for region, count in memory.counts().items():
        assert cells(out.split("Extremes")[0], f"{region}  ")[1] == str(count)
    assert re.search(rf"memorable ones first.*?\n\s*{int(memory.memorable[0])}\s", out, re.DOTALL)
    names = {path.name for path in Path("map").iterdir()}
    assert names == {"memory_map.csv", "memory_map.parquet", "memory_map.png"}
    assert run(capsys, *argv)[0] == 0


@pytest.mark.parametrize("correction", ["first_order", "cavity"])
def test_loo(here: Path, capsys: pytest.CaptureFixture[str], correction: str) -> None:
    argv = ("loo", "script.py:make_task", "-p", "q.safetensors", "--correction", correction)
    code, out, _ = run(capsys, *argv, "--test", "make_test", "--out", "loo")
    assert code == 0
    task, _, q = inputs()
    found = blr.leave_one_out(task, q, correction=correction)
    assert cells(out, "leave-one-out estimate")[1:] == [f"{found.nll:.4f}", f"{found.accuracy:.1%}"]
    assert {path.name for path in Path("loo").iterdir()} == {
        "leave_one_out.csv",
        "leave_one_out.parquet",
        "leave_one_out.png",
    }


@pytest.mark.parametrize("delta", [0.5, None])
def test_fit_is_fit_laplace(
    delta: float | None, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = () if delta is None else ("--prior-precision", str(delta))
    code, out, err = run(capsys, "loo", "script.py:make_task", "--fit", "full", *named)
    assert code == 0
    task, _, _ = inputs()
    q = blr.fit_laplace(task, structure="full", prior_precision=delta)
    assert (f"prior precision {q.prior_precision:.3g} by " in err) == (delta is None)
    assert cells(out, "leave-one-out estimate")[1] == f"{blr.leave_one_out(task, q).nll:.4f}"


def test_what_if(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("what-if", "script.py:make_task", "-p", "q.safetensors", "--test", "make_test")
    code, out, _ = run(capsys, *argv, "--remove", "target=1", "--out", "less")
    assert code == 0
    task, test, q = inputs()
    result = blr.what_if(task, q, remove=lambda row: row.target == 1, evaluate=test)
    row = ["all", "30", f"{result.before.nll:.3f}", f"{result.nll:.3f}"]
    assert cells(out, "all")[:4] == row
    assert f"{result.removed} of 60 training examples" in out
    pd.testing.assert_frame_equal(pd.read_parquet("less/by_class.parquet"), result.by_class)
    left = blr.Posterior.load("less/perturbed.safetensors")
    assert torch.equal(left.mean["1.weight"], result.parameters["1.weight"])
    assert left.n_data == 60 - result.removed


def test_what_if_by_each_solver(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("what-if", "script.py:make_task", "-p", "q.safetensors", "--test", "make_test")
    task, test, q = inputs()
    gone = task.dataset.tensors[1] == 1
    for flags, options, said in (
        (("--solver", "posterior"), {"solver": "posterior"}, "without retraining"),
        (("--passes", "5"), {"passes": 5}, "by short trainings"),
        (("--solver", "cg", "--passes", "9"), {"solver": "cg", "passes": 9}, "a descent of 9"),
        (("--converge",), {"steps": "converge"}, "by a descent of"),
    ):
        code, out, _ = run(capsys, *argv, "--remove", "target=1", *flags)
        result = blr.what_if(task, q, remove=gone, evaluate=test, **options)
        assert code == 0 and said in " ".join(out.split())
        assert cells(out, "all")[3] == f"{result.nll:.3f}"
        assert ("One more step would change the NLL" in out) is ("9" in flags)
    code, _, err = run(capsys, *argv, "--remove", "3", "--solver", "posterior", "--passes", "5")
    assert code == 2 and "passes= bounds solver='cg'" in err


@pytest.mark.usefixtures("sketched")
def test_audit_takes_groups_of_an_unfinished_model_out_by_replays(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["audit", "script.py:make_task", "-p", "q.safetensors", "--test", "make_test"]
    code, out, err = run(capsys, *argv, "--passes", "8", "--out", "deep")
    assert code == 0 and "by short trainings" in " ".join(out.split())
    assert "about 8 passes over the data for each" in err
    task, test, q = inputs()
    each = blr.what_if_each(task, q, evaluate=test, passes=8)
    pd.testing.assert_frame_equal(pd.read_parquet("deep/removals.parquet"), each)


@pytest.mark.parametrize("refine", [False, True])
def test_query(here: Path, capsys: pytest.CaptureFixture[str], refine: bool) -> None:
    more = ("--refine", "60") if refine else ()
    argv = ("query", "index", "script.py:make_test", "--top", "3", "--out", "found")
    code, out, _ = run(capsys, *argv, *more)
    assert code == 0 and "normalized_influence" in out
    code, out, _ = run(capsys, *argv, *more, "--no-normalize")
    assert code == 0
    task, test, q = inputs()
    exact = blr.influence(task, q, test, k=3).table.query("effect == 'helpful'")
    found = pd.read_parquet("found/sources.parquet")
    close = {"rel": 1e-4} if refine else {"rel": 2e-3, "abs": 1e-6}  # float16 in the index
    assert found["influence"].tolist() == pytest.approx(exact["influence"].tolist(), **close)
    assert found["question"].tolist() == exact["test"].tolist()
    targets = task.dataset.tensors[1][found["example"].tolist()]
    assert found["train_target"].tolist() == targets.tolist()
    assert found["source"].tolist() == [task.metadata["source"][i] for i in found["example"]]
    if refine:
        assert found["example"].tolist() == exact["train"].tolist()
    first = found.iloc[0]
    row = ["0", *(str(first[n]) for n in ("test_target", "test_prediction", "example"))]
    row += [str(first["train_target"]), f"{first['influence']:.3g}"]
    assert row in [line.split() for line in out.splitlines()]


def test_index_fits_as_the_other_commands_do(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("index", "script.py:make_task", "--fit", "kron", "--prior-precision", "2")
    code, out, _ = run(capsys, *argv, "--dry-run", "--out", "other")
    assert code == 0 and "passes" in out and not Path("other").exists()
    code, out, _ = run(capsys, *argv, "--out", "other")
    assert code == 0 and cells(out, "examples")[1] == "60"
    q = blr.Index.open("other").posterior
    assert torch.equal(q.variance("1.weight"), inputs()[2].variance("1.weight"))


# Selections


@pytest.mark.parametrize(
    ("texts", "meant"),
    [
        (["target=1"], lambda t: t.target == 1),
        (["target!=1"], lambda t: t.target != 1),
        (["loss>0.5"], lambda t: t.loss > 0.5),
        (["source=web"], lambda t: t.source == "web"),
        (["target == 1 and source == 'web'"], lambda t: (t.target == 1) & (t.source == "web")),
        (
            ["not (target in [0, 1] or suspicious)"],
            lambda t: ~(t.target.isin([0, 1]) | t.suspicious),
        ),
        (["the word=it's"], lambda t: t["the word"] == "it's"),
        (['`the word` == "it\'s"'], lambda t: t["the word"] == "it's"),
        (["year>2030"], lambda t: t.year > 2030),
        (["checked=true"], lambda t: t.checked),
        (["checked=no"], lambda t: ~t.checked),
        (["suspicious=true"], lambda t: t.suspicious),
        (["label_quality<0.2"], lambda t: t.label_quality < 0.2),
        (["3, 17"], lambda t: t["index"].isin([3, 17])),
        (["0,"], lambda t: t["index"] == 0),
        (["source=book", "year<2003"], lambda t: (t.source == "book") | (t.year < 2003)),
    ],
)
def test_selections_mean_the_rows_of_the_table(here: Path, texts: list[str], meant) -> None:
    task, _, q = inputs()
    expected = meant(investigate(task, q, by=None).table)
    assert 0 < expected.sum() < 60
    assert selected(texts, task, q).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("source>3", "cannot be answered"),
        ("year=late", "'late' is none"),
        ("checked=maybe", "true and false"),
        ("nothing=3", "'nothing' is not defined"),
        ("source == web", "words stand in quotes"),
        ("target=9", "selects none"),
        ("3,99", "example 99"),
        ("-1", "cannot read"),
        ("", "cannot read"),
        ("target == @inputs", "cannot read"),
        ("index == __import__('os').getpid()", "not call"),
        ("target.to_csv('stolen.csv')", "not call"),
        ("`source`.str.len() > 3", "not call"),
        ("target = `source`.str.len()", "is none"),
    ],
)
def test_selections_that_mean_nothing(here: Path, text: str, word: str) -> None:
    task, _, q = inputs()
    with pytest.raises(InputError, match=re.escape(word)):
        selected([text], task, q)
    assert not Path("stolen.csv").exists()


def test_only_selections_of_analysed_columns_need_the_analyses(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, _, q = inputs()
    monkeypatch.setattr("blr_analysis.cli.selectors.investigate", None)
    assert selected(["target == 1 and loss > 0 and source == 'web'"], task, q).any()
    with pytest.raises(TypeError):
        selected(["deviation > 0"], task, q)


# Failures


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ("loo", "Missing argument"),
        ("nothing", "No such command"),
        ("loo script.py:make_task", "Posterior.from_optimizer"),
        ("audit script.py:make_task", "--fit kron"),
        ("loo script.py:make_task -p q.safetensors --fit kron", "not both"),
        ("loo script.py:make_task -p q.safetensors --prior-precision 1", "belongs to --fit"),
        ("loo script.py:make_task --fit kron --prior-precision -1", "above 0"),
        ("loo script.py:make_task --fit none --prior-precision 1", "'kron'"),
        ("loo script.py:make_task -p gone.safetensors", "nothing is stored"),
        ("loo script.py:make_task -p script.py", "script.py"),
        ("loo script.py:make_test -p q.safetensors", "60 examples"),
        ("loo script.py -p q.safetensors", "SCRIPT.py:NAME"),
        ("loo gone.py:make_task -p q.safetensors", "no script 'gone.py'"),
        ("loo script.py:gone -p q.safetensors", "make_task, make_test"),
        ("loo script.py:number -p q.safetensors", "type int"),
        ("loo script.py:needs -p q.safetensors", "argument"),
        ("loo script.py:fails -p q.safetensors", f"failed in line {GONE}: KeyError: 'gone'"),
        ("loo script.py:make_task -p q.safetensors --test gone", "defines no 'gone'"),
        ("loo script.py:make_task -p q.safetensors --test regression", "another model"),
        ("what-if script.py:make_task -p q.safetensors", "--remove"),
        ("what-if script.py:make_task -p q.safetensors --remove three", "quotes"),
        ("what-if script.py:make_task -p q.safetensors --remove target>=0", "all 60"),
        ("audit script.py:make_task -p q.safetensors --by colour", "no column 'colour'"),
        ("audit script.py:make_task q.safetensors -p q.safetensors", "leave 'q.safetensors' out"),
        ("audit script.py:make_task -p q.safetensors --by colour --dry-run", "no column 'colour'"),
        ("what-if script.py:make_task -p q.safetensors --decisions gone", "'gone': No such file"),
        ("index script.py:make_task --out i", "--fit kron"),
        ("index script.py:gone --fit kron --out i", "make_task, make_test"),
        ("index script.py:make_task --fit kron --out i --text words", "MODEL DATA"),
        ("query gone script.py:make_test", "holds no index"),
        ("query index script.py:gone", "make_task, make_test"),
        ("query index script.py:regression", "another model"),
        ("query index script.py:wider", "shape"),
        ("query index script.py:make_test --data script.py:make_test", "60 examples"),
        ("query index script.py:make_test --data rows.jsonl", "--data SCRIPT.py:TASK"),
        ("query index script.py:make_test --tokens --out o", "language model"),
        ("query index script.py:make_test --max-length 9", "language model"),
        ("query index rows.jsonl", "--model"),
        ("demo --seed -1", "seed"),
        ("demo --out script.py", "it is a file"),
        ("audit script.py:make_task -p q.safetensors --out script.py/x", "script.py/x"),
        ("audit script.py:make_task -p q.safetensors --out ''", "empty"),
        ("report script.py:make_task -p q.safetensors --out .", "is a folder"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    here: Path, capsys: pytest.CaptureFixture[str], argv: str, word: str
) -> None:
    before = {path.name for path in here.iterdir()} | {"__pycache__"}
    code, out, err = run(capsys, *shlex.split(argv))
    *progress, last = err.splitlines()
    assert (code, out) == (2, "")
    assert last.startswith("blr-analysis: ")
    assert word in last
    assert all(re.match(r" +\d+\.\d s  ", line) for line in progress)
    assert {path.name for path in here.iterdir()} <= before


@pytest.mark.parametrize("source", ["import nothing_of_the_kind", "def broken(:\n    pass"])
def test_a_script_that_cannot_be_run(
    here: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    Path("bad.py").write_text(f"\n{source}\n")
    code, out, err = run(capsys, "loo", "bad.py:task", "-p", "q.safetensors")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("blr-analysis: the script 'bad.py' failed in line 2: ")


@pytest.mark.parametrize("where", ["before", "after"])
def test_debug_shows_the_traceback(
    here: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    argv = ["loo", "script.py:fails", "-p", "q.safetensors"]
    code, _, err = run(capsys, *(["--debug", *argv] if where == "before" else [*argv, "--debug"]))
    assert code == 2
    assert 'return {}["gone"]' in err
    assert err.splitlines()[-1].startswith("blr-analysis: fails()")


def test_an_unexpected_fault_is_one_line_and_code_1(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(sys.modules["blr_analysis.sensitivity"], "leave_one_out", broken)
    code, out, err = run(capsys, "loo", "script.py:make_task", "-p", "q.safetensors")
    assert (code, out) == (1, "")
    said = "blr-analysis: unexpected RuntimeError: first line second line (--debug shows where)"
    assert err.splitlines()[-1] == said


@pytest.mark.parametrize("command", ["demo", "audit", "report", "map", "loo", "what-if"])
def test_a_folder_that_cannot_be_written_is_found_before_the_work(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def began(*_: object, **__: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr("blr_analysis.cli.script.load_tasks", began)
    monkeypatch.setattr("blr_analysis.demo.job.load", began)
    Path("file").write_text("")
    argv = [command, "--out", "file/below"]
    if command != "demo":
        argv += ["script.py:make_task", "-p", "q.safetensors"]
    if command == "what-if":
        argv += ["--remove", "target=1"]
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "file/below" in err and re.search("cannot (be written|write)", err)


def test_a_folder_made_for_nothing_is_removed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), folder_for(tmp_path / "a"):
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError), folder_for(tmp_path / "a") as folder:
        (folder / "kept").write_text("")
        raise RuntimeError
    assert (tmp_path / "a" / "kept").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = Figure()
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda path, **_: save("/dev/full", format="png"))
    with pytest.raises(StorageError, match=r"map\.png.*No space left"):
        write_picture(figure, tmp_path, "map")
    assert not list(tmp_path.iterdir())


# Interruptions


def test_an_interrupted_picture_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "map.png").write_bytes(b"old")

    def half(self: Figure, path: str, **_: object) -> None:
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(KeyboardInterrupt):
        write_picture(Figure(), tmp_path, "map")
    assert [path.name for path in tmp_path.iterdir()] == ["map.png"]
    assert (tmp_path / "map.png").read_bytes() == b"old"


def test_interrupted_in_the_script(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("audit", "script.py:interrupts", "-p", "q.safetensors", "--out", "audit")
    code, out, err = run(capsys, *argv)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "blr-analysis: interrupted"
    assert not Path("audit").exists()


def test_interrupted_between_files(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, _, q = inputs()
    findings = investigate(task, q, by=None)
    real = pictures_module.write_table
    monkeypatch.setattr(
        pictures_module, "write_table", lambda *a: real(*a) if a[2] == "table" else _interrupt()
    )
    with pytest.raises(KeyboardInterrupt), folder_for("audit") as folder:
        write(findings, folder)
    assert sorted(path.name for path in Path("audit").iterdir()) == ["table.csv", "table.parquet"]
    assert len(pd.read_parquet("audit/table.parquet")) == 60


def _interrupt() -> None:
    raise KeyboardInterrupt


# A shell lets its background jobs ignore Ctrl-C, and what they start as well.
PROGRAM = """import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from blr_analysis.cli import main
sys.exit(main())"""


def program(*argv: str, **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,  # type: ignore[call-overload]
    )


def test_the_package_runs_as_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["blr-analysis", "--help"])
        runpy.run_module("blr_analysis", run_name="__main__")
    assert ended.value.code == 0 and "what-if" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_while_the_demo_trains(tmp_path: Path) -> None:
    process = program("demo", "--out", "digits", cwd=tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if "training" in line:
            break
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - began < 20
    assert out == ""
    assert err.splitlines()[-1] == "blr-analysis: interrupted"
    assert "Traceback" not in err
    assert not (tmp_path / "digits").exists()


@pytest.mark.slow
def test_a_reader_that_goes_away() -> None:
    shell = f"{sys.executable} -c '{PROGRAM}' --help | head -1 >/dev/null; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr


def test_no_text_steers_the_terminal() -> None:
    said = as_text(Text("web\u202e, \x1b[31mred\u200b\nnext"))
    assert said == "web?, ?[31mred?\nnext\n"


def test_an_ascii_terminal(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    code = main(["loo", "script.py:make_task", "-p", "q.safetensors"])
    for stream in (out, err):
        stream.flush()
    said = out.buffer.getvalue().decode("ascii")
    assert code == 0, err.buffer.getvalue()
    assert "leave-one-out estimate" in said
    assert "-----" in said
    assert "?" not in said.replace("generalise?", "")
    assert b"Traceback" not in err.buffer.getvalue()


# Help


def test_every_example_of_the_help_is_a_command_line(here: Path) -> None:
    """Every option is known and takes its value; every selection finds examples."""
    program = typer.main.get_command(app)
    pages = [program.help, *(command.help for command in program.commands.values())]
    lines = {line.strip() for page in pages for line in page.split("\n") if line.startswith("  ")}
    examples = [line for line in lines if line.startswith("blr-analysis ") and line[-1] != "."]
    assert len(examples) >= 25
    task, _, q = inputs()
    for example in examples:
        name, *rest = shlex.split(example)[1:]
        given = program.commands[name].make_context(name, rest).params
        for text in given.get("remove") or ():
            assert selected([text.replace("target=3", "target=1")], task, q).any(), example


def test_help_loads_nothing_heavy() -> None:
    """--help and wrong command lines answer before torch could have been imported."""
    asked = "import sys; from blr_analysis.cli import main; main(['--help']); main(['loo'])"
    heavy = "print(sorted({'torch', 'pandas', 'matplotlib', 'bokeh', 'sklearn'} & {*sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", f"{asked}; {heavy}"], capture_output=True, text=True, check=True
    )
    assert "what-if" in done.stdout and done.stdout.splitlines()[-1] == "[]"


def test_any_width_of_terminal(here: Path) -> None:
    task, test, q = inputs()
    findings = summary(investigate(task, q, test=test))
    for width in (40, 60, 80, 140):
        file = io.StringIO()
        show(findings, Console(file=file, width=width, highlight=False))
        lines = file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert any("unpred" in line for line in lines)
        assert not any(line != line.rstrip() for line in lines)


# The script


def test_the_guard_main_does_not_run_and_the_path_is_given_back(here: Path) -> None:
    before = list(sys.path)
    task, none = load_tasks("script.py:TASK")
    assert isinstance(task, blr.Task)
    assert none is None
    assert sys.path == before


def test_errors_of_the_package_inside_the_script_name_the_script(here: Path) -> None:
    Path("empty.py").write_text(
        "import torch\nfrom blr_analysis import Task\n"
        "def task():\n    return Task(torch.nn.Linear(1, 2), (torch.ones(0, 1), torch.ones(0)))\n"
    )
    with pytest.raises(BLRError, match=r"task\(\) in 'empty.py' failed in line 4: .*no examples"):
        load_tasks("empty.py:task")


def test_running_statistics_that_are_not_the_posteriors(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("norm.py").write_text(
        "import torch\nfrom blr_analysis import Task\n"
        "X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))\n"
        "def task(seed=0):\n"
        "    torch.manual_seed(seed)\n"
        "    m = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)).eval()\n"
        "    return Task(m, (X, torch.arange(20) % 2))\n"
        "def untrained():\n    return task(1)\n"
    )
    task, _ = load_tasks("norm.py:task")
    blr.fit_laplace(task, structure="diag", prior_precision=1.0).save("n.safetensors")
    code, _, err = run(capsys, "loo", "norm.py:task", "-p", "n.safetensors")
    assert code == 0
    assert "BatchNorm" not in err
    code, _, err = run(capsys, "loo", "norm.py:untrained", "-p", "n.safetensors")
    assert code == 0
    assert "load the trained state" in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.split()[:2] == ["blr-analysis", blr.__version__]
