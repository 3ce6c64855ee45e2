"""The command line: what it prints is what the library finds, and every failure is one line."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from dataclasses import fields
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import typer
from commands import CommandContract, documented_names, facts_of, refused, run
from rich.console import Console
from rich.text import Text
from safetensors.torch import load_file

import blr_analysis as blr
from blr_analysis.audit import in_text, investigate, sections
from blr_analysis.audit.section import percent, two_digits
from blr_analysis.cli import main
from blr_analysis.cli.commands import IDLE_OPTIONS, app
from blr_analysis.cli.inputs import load_tasks
from blr_analysis.cli.options import Shared
from blr_analysis.errors import InputError, PosteriorWarning
from blr_analysis.learning_rule.table import table1
from blr_analysis.terminal import as_text, show

SCRIPT = """
import sys, torch
from dataclasses import dataclass
from torch import nn
from blr_analysis import Recipe, Task
import beside

@dataclass
class Settings:
    classes: int = 3

def data(n, seed):
    x = torch.randn(n, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x.mean((1, 2, 3)) * 8).round().long().clamp(-1, 1) + 1

def model(outputs=3):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, outputs))
    net[1].weight.data *= 4
    return net

def make_task():
    metadata = {"source": ["web", "book", "web"] * 20, "kind": ["so"] * 60}
    recipe, net = Recipe("sgd", lr=0.1, epochs=2, batch_size=30), model(Settings().classes)
    earlier = {name: 0.5 * value for name, value in net.state_dict().items()}
    return Task(net, data(60, 0), metadata=metadata, checkpoints=[earlier], recipe=recipe)

def interrupts():
    raise KeyboardInterrupt

X, TASK = data(60, 0)[0], make_task()
make_test = lambda: Task(model(), data(30, 2))
regression = lambda: Task(model(1), (X, X.sum((1, 2, 3))), likelihood="gaussian")
empty = lambda: Task(model(), (X[:0], X[:0]))
own = lambda: Task(model(), data(60, 0), recipe=Recipe(train=lambda data, seed: model()))
number, leaves = lambda: 3, lambda: sys.exit(3)
fails = lambda: {}["gone"]
if __name__ == "__main__":
    raise RuntimeError("training must not start")
"""
FILES = {"script.py": SCRIPT, "beside.py": "", "recipe.yml": ""}
FILES["broken.py"] = "\ndef broken(:\n    pass\n"
FILES["d.csv"] = "index,action,label\n3,relabel,2\n4,relabel,2\n6,keep,\n7,drop,\n"
GONE = SCRIPT.splitlines().index('fails = lambda: {}["gone"]') + 1
TASK = "script.py:make_task"
Q = ("-p", "q.safetensors")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with scripts, a posterior and an index."""
    folder = tmp_path_factory.mktemp("user")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    task, _ = load_tasks(f"{folder}/{TASK}")
    blr.fit_laplace(task, prior_precision=2.0).save(folder / "q.safetensors")
    argv = ("index", f"{folder}/{TASK}", "-p", f"{folder}/q.safetensors")
    assert main([*argv, "--out", f"{folder}/index"]) == 0
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working folder with the scripts, the posterior q.safetensors and their index alone."""
    for name in (*FILES, "q.safetensors", "index"):
        (tmp_path / name).symlink_to(place / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def inputs() -> tuple[blr.Task, blr.Task, blr.Posterior]:
    task, test = load_tasks(TASK, "make_test")
    assert test is not None
    return task, test, blr.Posterior.load("q.safetensors")


def cells(text: str, first: str) -> list[str]:
    """The row that starts with these words, cut where two blanks stand."""
    rows = (re.split(r"\s{2,}", t.strip()) for t in text.splitlines() if t.startswith(first))
    (row,) = (row for row in rows if len(row) > 1)  # not a sentence that begins so
    return row


@pytest.mark.slow
class TestAudit(CommandContract):
    name = "audit"
    argv = (TASK, *Q, "--test", "make_test")

    def check(self, out: Path, said: str) -> None:
        task, test, q = inputs()
        actual = investigate(task, q, test=test)
        scores = actual.scores
        loo = actual.loo
        wrong = actual.suspicions
        tables = {"table": actual.table, "suspicious": wrong.table, "removals": actual.removals}
        pictures = {"memory_map", "deviations", "leave_one_out", "suspicious", "removals"}
        assert {p.stem for p in out.glob("*.png")} == pictures
        others = {"table", "posterior", "summary", "report"}
        assert {p.stem for p in out.iterdir()} == pictures | others
        for name, table in tables.items():
            written = pd.read_parquet(out / f"{name}.parquet")
            pd.testing.assert_frame_equal(
                written, table, check_dtype=False, check_categorical=False
            )
        assert actual.table["left_out_prediction"].tolist() == loo.predictions.tolist()
        assert actual.table["left_out_loss"].tolist() == loo.losses.tolist()
        assert actual.table["kind"].tolist() == wrong.kind
        assert actual.table["kind_metadata"].tolist() == task.metadata["kind"]
        assert len(blr.Posterior.load(out / "posterior.safetensors").earlier) == len(q.earlier)
        summary = as_text(in_text(*sections(actual).values()))
        assert (out / "summary.txt").read_text() == summary
        assert said.startswith(summary[:2000])
        x, y = test.dataset.tensors
        nll = torch.nn.functional.cross_entropy(outputs := test.model(x), y).item()
        hits = (outputs.argmax(-1) == y).double().mean().item()
        estimate = cells(said, "leave-one-out estimate")
        assert estimate[1] == two_digits(loo.nll)
        assert estimate[-1] == percent(loo.accuracy)
        on_test = cells(said, "test data")
        assert on_test[1] == two_digits(nll)
        assert on_test[-1] == percent(hits)
        assert cells(said, "training data")[1] == two_digits(scores.losses.mean())
        for region, count in actual.memory.counts().items():
            assert cells(said, f"{region}  ")[:2] == [region, str(count)]
        first = int(scores.table["deviation"].idxmax())
        assert re.search(rf"Most influential.*?\n\s*{first}\s", said, re.DOTALL)
        rows = r"^ +(\d+) +(?:label|unfamiliar|duplicate) "
        shown = re.findall(rows, said.split("Suspicious is")[1], re.MULTILINE)
        suspects = [i for i in wrong.order.tolist() if wrong.kind[i] != "none"]
        assert list(map(int, shown)) == suspects[: len(shown)]
        assert shown
        each = blr.what_if_each(task, q, evaluate=test)
        pd.testing.assert_frame_equal(actual.removals, each)


class TestWhatIf(CommandContract):
    name = "what-if"
    argv = (TASK, *Q, "--test", "make_test", "--remove", "target == 1", "--seeds", "2")

    def check(self, out: Path, said: str) -> None:
        task, test, q = inputs()
        result = blr.what_if(task, q, remove="target == 1", evaluate=test, seeds=2)
        row = ["all", "30", f"{result.before.nll:.3f}", f"{result.nll:.3f}"]
        assert cells(said, "all")[:4] == row
        assert result.interval is not None
        words = " ".join(said.split())
        low, high = result.interval
        assert f"{result.removed} of 60 training examples" in words
        assert f"between {low:.3f} and {high:.3f}" in words
        assert result.solver == "retrain"
        assert "by whole trainings" in words
        pd.testing.assert_frame_equal(pd.read_parquet(out / "by_class.parquet"), result.by_class)
        left = load_file(out / "without.safetensors")
        assert torch.equal(left["1.weight"], result.parameters["1.weight"])

    def test_solvers_are_named(self, here: Path, capsys: Any) -> None:
        task, _, q = inputs()
        named = {"posterior": "in one step", "cg": "by a descent", "replay": "by short trainings"}
        for solver, said in named.items():
            argv = ("what-if", TASK, *Q, "--decisions", "d.csv", "--solver", solver)
            code, out, err = run(capsys, *argv)
            truth = blr.what_if(task, q, relabel={3: 2, 4: 2}, remove=[7], solver=solver)
            assert code == 0 and cells(out, "all")[3] == f"{truth.nll:.3f}", err
            words = " ".join(out.split())
            assert "2 relabelled" in out
            assert truth.note in words
            assert said in words


class TestValidate(CommandContract):
    name = "validate"
    argv = (TASK, *Q, "--test", "make_test", "--halves", "5", "--scores", "ones=ones.npy")

    @pytest.fixture(autouse=True)
    def scores(self, here: Path) -> None:
        np.save(here / "ones.npy", np.ones((60, 30)))

    def check(self, out: Path, said: str) -> None:
        task, test, q = inputs()
        result = blr.validate(task, q, test, halves=5)
        ours = result.score("influence")
        ceiling = result.ceiling
        shown = [f"{ours.value:.3f}", f"{ours.low:.2f} to {ours.high:.2f}"]
        assert cells(said, "influence")[1:] == [*shown, f"{ours.value / ceiling:.2f}"]
        assert cells(said, "ones")[1] == "0.000"
        assert cells(said, "ceiling")[1] == f"{ceiling:.3f}"
        written = pd.read_parquet(out / "validation.parquet")
        assert set(written["method"]) == {"influence", "ones", "ceiling"}
        assert (out / "validation.png").is_file()

    def test_the_cost_comes_first_and_json_is_what_the_function_says(
        self, here: Path, capsys: Any
    ) -> None:
        code, out, err = run(capsys, "validate", *self.argv, "--keep", "h.safetensors", "--json")
        facts = json.loads(out)
        assert code == 0
        assert (facts["halves"], facts["seeds"], facts["epochs"]) == (5, 2, 2)
        assert [row["method"] for row in facts["methods"]][-1] == "ceiling"
        assert 0 < err.index("10 retrainings on half of the data") < len(err)
        _, _, err = run(capsys, "validate", *self.argv, "--keep", "h.safetensors", "--dry-run")
        assert "none is made" in err


def test_json_is_what_the_functions_say(here: Path, capsys: Any) -> None:
    task, test, q = inputs()
    result = blr.what_if(task, q, remove="target == 1", evaluate=test, solver="posterior")
    argv = ("what-if", TASK, *Q, "--test", "make_test", "--remove", "target == 1", "--json")
    code, out, err = run(capsys, *argv, "--solver", "posterior")
    facts = json.loads(out)
    assert code == 0 and facts["removed"] == result.removed, err
    assert facts["after"]["nll"] == pytest.approx(result.nll)
    assert facts["before"]["accuracy"] == pytest.approx(result.before.accuracy)


def test_what_a_script_prints_is_not_in_the_json(here: Path, capsys: Any) -> None:
    Path("loud.py").write_text("print('epoch 1')\nfrom script import make_task\n")
    argv = ("what-if", "loud.py:make_task", *Q, "--remove", "target == 1", "--dry-run")
    assert "dry_run" in facts_of(capsys, *argv)
    assert "epoch 1" in run(capsys, *argv)[1]


@pytest.mark.parametrize(
    ("how", "solver"),
    [
        (("--remove", "target == 1"), None),
        (("--remove", "deviation > 0.5"), None),
        (("--remove", "index == 3"), "posterior"),
        (("--relabel", "index == 3: 0", "--solver", "cg"), "cg"),
    ],
)
def test_a_dry_run_of_a_question_fits_nothing(
    here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, how: Any, solver: str | None
) -> None:
    """It says at most what the run then takes, by the counts of the answer."""
    answer = ("what-if", TASK, *how, "--seeds", 1, "--fit", "diag")
    done = facts_of(capsys, *answer)
    monkeypatch.setattr("blr_analysis.posterior.laplace.fit_at_weights", lambda *_, **__: 1 / 0)
    planned = facts_of(capsys, *answer, "--dry-run")["dry_run"]
    assert planned["solver"] == solver
    assert planned["passes"] >= done["passes"]
    said = run(capsys, *answer, "--dry-run")[1]
    assert ("the fit decides" in said) == (solver is None)


def test_a_dry_run_counts_the_trainings_by_ones_own_function(here: Path, capsys: Any) -> None:
    """Three for each of three classes, and one that calibrates; their passes are not known."""
    argv = ("audit", "script.py:own", "--calibrate", "--dry-run")
    assert "up to 10 trainings by your train=" in run(capsys, *argv)[1]
    assert facts_of(capsys, *argv)["dry_run"]["passes"] < 20
    assert "your train=" not in run(capsys, "audit", TASK, *argv[2:])[1]


def test_decisions_make_a_cleaned_data_set(here: Path, capsys: Any) -> None:
    """Example 7 is dropped, and 3 and 4 have another label."""
    task, _, _ = inputs()
    argv = ("what-if", TASK, *Q, "--decisions", "d.csv", "--solver", "posterior", "--out", "new")
    code, _, err = run(capsys, *argv)
    table = pd.read_csv(here / "new" / "cleaned.csv")
    labels = task.dataset.tensors[1].tolist()
    expected = [2 if i in (3, 4) else labels[i] for i in range(60) if i != 7]
    assert code == 0 and table["index"].tolist() == [i for i in range(60) if i != 7], err
    assert table["target"].tolist() == expected
    assert table["source"].tolist() == [task.metadata["source"][i] for i in table["index"]]
    Path("drops.csv").write_text("index,action,label\n7,drop,\n")
    code, out, err = run(capsys, "what-if", TASK, *Q, "--decisions", "drops.csv", "--dry-run")
    assert code == 0 and "answers" in out, err


class TestIndex(CommandContract):
    name = "index"
    argv = (TASK, "--prior-precision", "2", "--profile")
    resumes = True

    def check(self, out: Path, said: str) -> None:
        assert cells(said, "examples")[1] == "60"
        assert "Kronecker factors" in said
        assert "the rest" in said
        ours = blr.Index.open(out).posterior
        own = inputs()[2].earlier[-1]
        # the checkpoint nearest half of the run
        assert torch.equal(ours.variance("1.weight"), own.variance("1.weight"))


class TestQuery(CommandContract):
    name = "query"
    argv = ("index", "script.py:make_test", "--top", "3", "--refine", "60")

    def check(self, out: Path, said: str) -> None:
        task, test, q = inputs()
        how: dict[str, Any] = {"k": 3, "normalize": True}
        exact = blr.influence(task, q.earlier[-1], test, **how).table.query("effect == 'helpful'")
        exact = exact.rename(columns={"test": "question", "train": "example"})
        actual = pd.read_parquet(out / "sources.parquet")
        pd.testing.assert_frame_equal(
            actual, exact[[*actual]].reset_index(drop=True), check_dtype=False, rtol=1e-4
        )
        assert {"train_target", "source"} <= {*actual}
        first = actual.iloc[0]
        row = ["0", *(str(first[n]) for n in ("test_target", "test_prediction", "example"))]
        row += [str(first["train_target"]), f"{first['normalized_influence']:.3g}"]
        assert row in [line.split() for line in said.splitlines()]


class TestAlgorithms(CommandContract):
    name = "algorithms"
    argv = ("Adam",)

    def check(self, out: Path, said: str) -> None:
        assert "squared minibatch gradient" in said
        assert "blr_analysis.learning_rule.optim" in said
        assert "BayesBiNN" not in said
        pd.testing.assert_frame_equal(table1(), pd.read_parquet(out / "table1.parquet"))


def test_verify_reads_everything_and_names_what_is_damaged(here: Path, capsys: Any) -> None:
    code, out, err = run(capsys, "verify", "index", "--dry-run")
    assert code == 0, err
    files = sum(path.is_file() for path in (here / "index").rglob("*"))
    assert cells(out, "reads")[1].startswith(f"{files} files")
    facts = facts_of(capsys, "verify", "index")
    assert len(facts["whole"]) == files
    assert facts.keys() == documented_names("verify")
    code, out, err = run(capsys, "verify", "index")
    assert code == 0 and cells(out, "whole")[1].startswith(f"{files} files"), err
    (here / "mixed").mkdir()
    for name in ("q.safetensors", "d.csv"):
        shutil.copy(name, here / "mixed" / name)
    code, out, err = run(capsys, "verify", "mixed")
    assert code == 0 and "'d.csv'" in cells(out, "without a checksum")[1], err
    file = here / "mixed" / "q.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "q.safetensors' is damaged" in refused(capsys, "verify", "mixed")
    assert "checksum" in refused(capsys, "verify", "d.csv", "--json")
    assert "nothing is stored" in refused(capsys, "verify", "nowhere")


@pytest.mark.slow
def test_an_audit_leaves_nothing_of_an_earlier_one(here: Path, capsys: Any) -> None:
    argv = ("audit", TASK, "--fit", "diag", "--out", "audit", "--passes", "1", "--by", "source")
    code, out, err = run(capsys, *argv)
    assert code == 0 and "Which groups help, which hurt" in out, err
    for words in ("the training data themselves", "This posterior is diagonal"):
        assert words in " ".join(out.split())
    assert pd.read_csv("audit/removals.csv")["group"].tolist() == ["book", "web"]
    for name in ("leave_one_out.png", "mine.png"):  # as of an audit with test data; a stranger's
        Path("audit", name).touch()
    given = ("script.py:regression", "--prior-precision", "1", "--force", "--out")
    code, out, err = run(capsys, "audit", *given, "audit")
    assert code == 0 and "What if" not in out, err
    left = {path.name for path in Path("audit").iterdir()}
    assert not left & {"removals.csv", "removals.parquet", "removals.png", "leave_one_out.png"}
    assert {"table.csv", "mine.png"} <= left
    code, out, err = run(capsys, "what-if", *given, "less", "--remove", "index == 3")
    assert code == 0 and cells(out, "all")[1] == "60", err
    assert {p.name for p in Path("less").iterdir()} == {"what_if.png", "without.safetensors"}


# Options and help


def split(argv: str) -> list[str]:
    short = {"T": [TASK], "Q": Q, "W": ["what-if", TASK, *Q, "--remove", "loss > 1"]}
    return [word for part in shlex.split(argv) for word in short.get(part, [part])]


DEFAULTS = {n: signature(blr.what_if).parameters[n].default for n in ("solver", "passes", "seeds")}


@pytest.mark.parametrize(
    ("argv", "door", "name", "told"),
    [
        ("W", "sensitivity", "what_if", DEFAULTS | {"remove": "loss > 1", "evaluate": None}),
        (
            "W --solver cg --passes 9 --seeds 7 --max-memory 1MB --no-progress",
            "sensitivity",
            "what_if",
            {"solver": "cg", "passes": 9, "seeds": 7, "memory_budget": 10**6, "progress": False},
        ),
        (
            "what-if T Q --relabel 'index in [3, 4]: 2' --relabel 'index == 5:0.5'",
            "sensitivity",
            "what_if",
            {"relabel": {3: 2, 4: 2, 5: 0.5}, "remove": None},
        ),
        ("W --calibrate", "sensitivity", "calibrate", {"progress": None}),
        (
            "audit T --fit diag --prior-precision 5",
            "posterior",
            "fit_laplace",
            {"structure": "diag", "prior_precision": 5.0, "curvature": None},
        ),
        ("audit T Q --by none --passes 3", "audit", "investigate", {"by": None, "passes": 3}),
        ("index T Q --rank 7 --out i", "sensitivity:Index", "build", {"rank": 7}),
        (
            "query index script.py:make_test --refine 9 --no-normalize",
            "sensitivity:Index",
            "top",
            {"refine": 9, "normalize": False, "harmful": False},
        ),
        ("demo --seed 3 --out out", "demo", "run", {"seed": 3}),
    ],
)
def test_options_arrive(
    here: Path, capsys: Any, monkeypatch: Any, argv: str, door: str, name: str, told: dict[str, Any]
) -> None:
    def arrived(first: Any, *_: Any, **options: Any) -> None:
        actual = getattr(first, "__dict__", {}) | options
        raise InputError(str({name: actual[name] for name in told}))

    owner = resolve_name(f"blr_analysis.{door}" + ":" * (":" not in door))
    monkeypatch.setattr(owner, name, arrived)
    assert refused(capsys, *split(argv)) == f"blr-analysis: {told}"


DEFAULTS_OF = {  # where a command takes the options of a function
    "demo": ("demo:run", ["seed"]),
    "audit": ("audit:investigate", ["by", "passes"]),
    "what-if": ("sensitivity:what_if", ["solver", "seeds", "passes"]),
    "validate": ("sensitivity:validate", ["halves", "seeds", "passes", "keep"]),
    "fisher": (
        "huggingface.fisher:fisher",
        ["kind", "structure", "samples", "label", "task", "examples", "max_length", "seed"],
    ),
    "merge": ("merging.plan:make_plan", ["threads"]),
}


@pytest.mark.parametrize("name", DEFAULTS_OF)
def test_options_have_the_defaults_of_their_functions(name: str) -> None:
    door, options = DEFAULTS_OF[name]
    function = signature(resolve_name(f"blr_analysis.{door}")).parameters
    program: Any = typer.main.get_command(app)
    command = {parameter.name: parameter.default for parameter in program.commands[name].params}
    assert {o: command[o] for o in options} == {o: function[o].default for o in options}


def test_every_example_of_the_help_is_a_command_line() -> None:
    """Every option is known and takes its value; a command has the shared ones that it looks at."""
    program: Any = typer.main.get_command(app)
    pages = [program.help, *(command.help for command in program.commands.values())]
    lines = {line.strip() for page in pages for line in page.split("\n") if line.startswith("  ")}
    examples = [line for line in lines if line.startswith("blr-analysis ") and line[-1] != "."]
    assert len(examples) >= 15
    assert max(map(len, examples)) <= 76  # whole on a terminal of 80 columns
    for command in program.commands.values():
        assert any(example.split()[1] == command.name for example in examples)
    for example in examples:
        name, *rest = shlex.split(example)[1:]
        program.commands[name].make_context(name, rest)
    shared = {field.name for field in fields(Shared)}
    for name, command in program.commands.items():
        options = {p.name for p in command.params}
        assert shared - options == set(IDLE_OPTIONS.get(name, ()))


# Failures


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ("loo", "No such command"),
        ("audit T Q --fit kron", "belong to a fit"),
        ("audit T -p script.py", "script.py"),
        ("audit script.py:make_test Q", "60 examples"),
        ("audit gone.py:make_task", "no script 'gone.py'"),
        ("audit script.py", "SCRIPT.py:NAME"),
        ("audit script.py:gone", "TASK, make_test"),
        ("audit script.py:number", "gives int"),
        ("audit script.py:leaves", "SystemExit: 3"),
        ("audit script.py:fails", f"failed in line {GONE}: KeyError: 'gone'"),
        ("audit script.py:empty", "no examples"),
        ("audit broken.py:task", "the script 'broken.py' failed in line 2: "),
        ("audit T --by colour", "no column 'colour'"),
        ("audit T q.safetensors", "leave 'q.safetensors' out"),
        ("audit T --device abacus", "abacus"),
        *(
            (f"audit T --max-memory '{size}'", "--max-memory must be a size")
            for size in ("GB", "0", "-1", "1XB", "1e400", "nan", "1 GB extra", "²GB")
        ),
        ("audit T --out script.py/x", "script.py/x"),
        ("audit T --out ''", "empty"),
        ("demo --out script.py --force", "script.py"),
        ("demo --out index", "is there already"),
        ("what-if T", "--remove"),
        ("what-if T --remove index==3 --decisions d.csv", "--decisions"),
        ("what-if T Q --relabel 'index == 3'", "QUERY:LABEL"),
        ("what-if T -p gone --remove \"source = 'a'\"", "compare with =="),
        ("what-if T -p gone --remove 'nobody == 3'", "no query of"),
        ("what-if T -p gone --remove 'index == 99'", "selects none"),
        ("what-if T -p gone --relabel 'loss = 3: 2'", "compare with =="),
        ("validate T Q", "--test NAME"),
        ("validate T Q --test make_test --scores gone.npy", "'gone.npy' cannot be read as npy"),
        ("validate T Q --test make_test --scores a=1.npy --scores a=2.npy", "write NAME=FILE"),
        ("index T --fit full --out i", "not full"),
        ("index T --out i --text words", "MODEL DATA"),
        ("query index script.py:regression", "another model"),
        ("query index script.py:make_test --data script.py:make_test", "60 examples"),
        ("query index script.py:make_test --data rows.jsonl", "--data SCRIPT.py:TASK"),
        ("query index script.py:make_test --tokens --out o", "language model"),
        ("query index rows.jsonl", "--model"),
        ("query gone script.py:make_test", "holds no index"),
        ("algorithms adamax", "no row is called 'adamax'"),
        ("fisher gone rows.jsonl", "no folder 'gone'"),
        ("merge gone.yml out", "the recipe 'gone.yml' cannot be read"),
        ("merge recipe.yml", "name the folder to write"),
        ("merge recipe.yml index --force", "is not empty"),
        ("merge recipe.yml recipe.yml", "is there already"),
        ("merge recipe.yml out --shard-size big", "--shard-size must be a size"),
    ],
)
def test_bad_input_is_one_line_and_code_2(here: Path, capsys: Any, argv: str, word: str) -> None:
    before = {path.name for path in here.iterdir()} | {"__pycache__"}
    assert word in refused(capsys, *split(argv))
    assert {path.name for path in here.iterdir()} <= before


def test_faults_and_warnings_are_one_line(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def warned() -> Any:
        warnings.warn("of other\n  data", PosteriorWarning, stacklevel=1)
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("blr_analysis.learning_rule.table.table1", warned)
    code, out, err = run(capsys, "algorithms")
    assert (code, out) == (1, "")
    said = "blr-analysis: unexpected RuntimeError: first line second line (--debug shows where)"
    assert err.splitlines() == ["warning: of other data", said]
    for argv in (("--debug", "algorithms"), ("algorithms", "--debug")):
        code, _, err = run(capsys, *argv)
        assert code == 1
        assert 'raise RuntimeError("first line' in err
        assert err.splitlines()[-1] == said.removesuffix(" (--debug shows where)")


def test_an_interruption_and_the_guard_main_of_the_script(here: Path, capsys: Any) -> None:
    code, out, err = run(capsys, "audit", "script.py:interrupts", "--out", "audit")
    assert (code, out, err.splitlines()[-1]) == (130, "", "blr-analysis: interrupted")
    before = list(sys.path)
    task, none = load_tasks("script.py:TASK")
    assert isinstance(task, blr.Task)
    assert none is None
    assert sys.path == before
    assert run(capsys, "demo", "--dry-run", "--out", "demo")[0] == 0
    assert not Path("audit").exists()
    assert not Path("demo").exists()


# Processes of their own


def test_the_package_runs_as_a_module_and_its_reader_may_go_away() -> None:
    program = f"{sys.executable} -m blr_analysis"
    seen = f"{program} --help | head -1 >/dev/null; test ${{PIPESTATUS[0]}} = 0"
    shell = f"{seen} && {program} --version"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(["bash", "-c", shell], capture_output=True, env=env, text=True)
    assert done.stdout.split() == ["blr-analysis", blr.__version__]
    assert (done.returncode, done.stderr) == (0, "")


# Terminals


def test_any_width_of_terminal(here: Path) -> None:
    task, test, q = inputs()
    findings = in_text(*sections(investigate(task, q, test=test, by=None)).values())
    for width in (40, 60, 80, 140):
        file = io.StringIO()
        show(findings, Console(file=file, width=width, highlight=False))
        lines = file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert any("unpred" in line for line in lines)
        assert not any(line != line.rstrip() for line in lines)
    said = as_text(Text("web\u202e, \x1b[31mred\u200b\nnext"))
    assert said == "web?, ?[31mred?\nnext\n"  # no text steers the terminal


def test_an_ascii_terminal(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["what-if", TASK, *Q, "--remove", "index == 3"]) == 0
    out.flush()
    said = out.buffer.getvalue().decode("ascii")
    assert "training examples taken out" in said
    assert "-----" in said
    assert "?" not in said.replace("gone?", "")
