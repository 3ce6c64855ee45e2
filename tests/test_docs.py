"""The pages: code runs, links lead somewhere; and every result shows itself in a notebook."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import tiny_transformers
import torch
from tiny_lm import TinyLM
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import blr_analysis as blr
from blr_analysis.audit import investigate

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(p for p in (*ROOT.glob("*.md"), *ROOT.glob("*/*.md")) if p.name != "CHANGELOG.md")
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INCLUDE = re.compile(r"^```\{literalinclude\} (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"^:([\w-]+): (.*)$", re.MULTILINE)
INCLUDES = [found for page in PAGES for found in INCLUDE.findall(page.read_text("utf-8"))]
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def digits() -> dict[str, Any]:
    """What most pages take for granted: a small classifier, its data, its loop."""
    torch.manual_seed(0)
    X = torch.randn(60, 4)
    y = torch.arange(60) % 3
    X[:, 0] += y
    model = nn.Linear(4, 3)
    loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def train() -> None:
        for _ in range(30):
            optimizer.zero_grad()
            loss(model(X), y).backward()
            optimizer.step()

    train()
    data = TensorDataset(X, y)
    test_data = TensorDataset(X[:20] + 0.1, y[:20])
    task = blr.Task(model, data)
    test_task = blr.Task(model, test_data)
    models = [nn.Linear(4, 3), nn.Linear(4, 3)]
    tasks = [blr.Task(model, data) for model in models]
    return {
        "X": X,
        "y": y,
        "model": model,
        "data": data,
        "task": task,
        "test_task": test_task,
        "posterior": blr.fit_laplace(task, prior_precision=1.0),
        "delta": 1.0,
        "train": train,
        "optimizer": optimizer,
        "loader": DataLoader(data, batch_size=20, shuffle=True),
        "loss": loss,
        "epochs": 1,
        "base": model,
        "models": models,
        "tasks": tasks,
        "held_out": tasks,
    }


def language() -> dict[str, Any]:
    torch.manual_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(7, (8, 6))]
    model = TinyLM()
    loader = DataLoader(rows, batch_size=4)
    questions = blr.Task(model, DataLoader(rows[:2], batch_size=2), likelihood="causal_lm")
    return {"model": model, "loader": loader, "delta": 1.0, "questions": questions}


def tables() -> dict[str, Any]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    known = digits()
    X = known["X"].numpy()
    y = known["y"].numpy()
    pipeline = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, y)
    return {
        **known,
        "pd": pd,
        "datasets": pytest.importorskip("datasets"),
        "pipeline": pipeline,
        "X_train": X,
        "y_train": y,
        "X_test": X[:20],
        "y_test": y[:20],
    }


class Record(dict):
    """What FiftyOne and Argilla make of keywords."""

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(named, values=list(values))

    def add_sample(self, sample: Record) -> None:
        self["values"].append(sample)


def stand_in(*names: str) -> SimpleNamespace:
    """A package that is not installed here: classes that keep what they are given."""
    return SimpleNamespace(**dict.fromkeys(names, Record))


PACKAGES = {
    "fiftyone": stand_in("Dataset", "Sample", "Classification"),
    "argilla": stand_in("Record", "Suggestion"),
}


def training() -> dict[str, Any]:
    import lightning
    from transformers import TrainingArguments

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 3)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

    known = digits()
    rows = [{"input_ids": torch.tensor([5, 6, 7]), "labels": torch.tensor(k % 2)} for k in range(6)]
    arguments = partial(TrainingArguments, "out", max_steps=2, report_to=[], use_cpu=True)
    ivon = blr.IVON(known["model"].parameters(), lr=0.1, ess=60, steps=6)
    return {
        **known,
        "ivon": ivon,
        "net": known["model"],
        "data": rows,
        "model": tiny_transformers.build("bert"),
        "training_arguments": arguments,
        "Module": Module,
    }


WORLDS: dict[str, Callable[[], dict[str, Any]]] = {
    "start.md": dict,
    "llm.md": language,
    "ways.md": tables,
    "training.md": training,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES if CODE.search(p.read_text("utf-8"))], ids=lambda page: page.name
)
@pytest.mark.filterwarnings("ignore")
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block after block, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    for name, package in PACKAGES.items():
        if find_spec(name) is None:
            monkeypatch.setitem(sys.modules, name, package)
    known = {"blr": blr, "torch": torch, "nn": nn, **WORLDS.get(page.name, digits)()}
    text = page.read_text("utf-8")
    for match in CODE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        exec(compile("\n" * line + match[1], str(page), "exec"), known)
    plt.close("all")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_to_files(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    expected = [page.parent / link for link in LINK.findall(prose)]
    assert [str(path) for path in expected if "_made" not in path.parts and not path.exists()] == []


@pytest.mark.parametrize("number", range(len(INCLUDES)), ids=[path for path, _ in INCLUDES])
def test_a_page_shows_lines_that_are_in_the_code(number: int) -> None:
    """The site's build takes minutes; a renamed variable is found here at once."""
    path, text = INCLUDES[number]
    options = dict(OPTION.findall(text))
    code = (ROOT / "docs" / path).read_text("utf-8")
    if "pyobject" in options:
        name = options["pyobject"].rpartition(".")[2]
        assert re.search(rf"^ *(def|class) {re.escape(name)}\b", code, re.MULTILINE)
        return
    start = code.index(options["start-at"])
    rest = code[start:]
    if "end-before" in options:
        rest = rest[rest.index("\n") :]
    assert options.get("end-at", options.get("end-before")) in rest


# Results, as the last line of a notebook's cell


def retrainable(task: blr.Task) -> blr.Task:
    recipe = blr.Recipe("sgd", lr=0.1, epochs=1, batch_size=60)
    return blr.Task(task.model, task.dataset, recipe=recipe, progress=False)


PICTURE = b"\x89PNG"
SHOWN = {
    "scores": ("<td", lambda t, v, q: blr.sensitivity(t, q)),
    "suspicions": ("<td", lambda t, v, q: blr.suspicious(t, q)),
    "influence": ("60 training × 20 test examples", lambda t, v, q: blr.influence(t, q, v)),
    "top influence": ("<td", lambda t, v, q: blr.influence(t, q, v, k=2)),
    "group influence": ("<td", lambda t, v, q: blr.influence(t, q, v).group()),
    "findings": ("<td", lambda t, v, q: investigate(t, q, test=v, by=None)),
    "prior": ("<td", lambda t, v, q: blr.select_prior_precision(t, [0.1, 1.0])),
    "predictions": ("<td", lambda t, v, q: q.predict(v, draws=2)),
    "mismatch": ("<td", lambda t, v, q: blr.gradient_mismatch(t, q.mean, models=[q.mean])),
    "what-if": (PICTURE, lambda t, v, q: blr.what_if(t, q, remove=[1, 2], evaluate=v)),
    "validation": ("<td", lambda t, v, q: blr.validate(retrainable(t), q, v, halves=4, seeds=1)),
    "Table 1": ("<td", lambda *_: blr.table1()),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_result_shows_itself_in_a_cell(name: str) -> None:
    part, make = SHOWN[name]
    known = digits()
    result = make(known["task"], known["test_task"], known["posterior"])
    if part == PICTURE:
        assert result._repr_png_().startswith(PICTURE)
    else:
        shown = result._repr_html_()
        assert part in shown
        assert "tensor(" not in shown
