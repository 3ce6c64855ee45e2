"""The page as a file: whole, self-contained, harmless whatever the data say."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import blr_analysis as blr
from blr_analysis.audit import Findings, in_text, investigate, sections
from blr_analysis.audit.section import two_digits
from blr_analysis.audit.suspects import main_supplier
from blr_analysis.errors import BLRError, DataError, InputError, StorageError
from blr_analysis.report.contents import MAX_ROWS, MAX_TEXT
from blr_analysis.report.decisions import cleaned, read_decisions
from blr_analysis.report.page import write_page
from blr_analysis.report.thumbnails import picture_of, sheet_of
from blr_analysis.terminal import as_text

HOSTILE = (
    "</script><script>alert(1)</script>",
    "\"quotes' and <!-- <b>bold</b> & $$x^2$$ \\(y\\)",
    "\u202eright to left \u2028 שלום",
    "word " * 200_000,
    "\ud800 half",
)
SCRIPTS = re.compile(r"<script([^>]*)>(.*?)</script", re.DOTALL)
NAMES = ["cat", "<b>dog</b>", "owl"]


def data_of(path: Path) -> dict:
    return json.loads(SCRIPTS.findall(path.read_text("utf-8"))[0][1])


def column(data: dict, name: str) -> list:
    return next(c["values"] for c in data["columns"] if c["name"] == name)


def problem(n: int = 40, outputs: int = 3, likelihood: Any = "categorical", **options: Any):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=g)
    y = torch.randn(n, outputs, generator=g)
    k = torch.arange(n)
    targets = {"categorical": k % outputs, "poisson": (k % 4).float(), "bernoulli": (k % 2).float()}
    y = targets.get(likelihood, y)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, outputs)
    task = blr.Task(model, (x, y), likelihood=likelihood, **options)
    test = blr.Task(model, (x[:9] + 0.1, y[:9]), likelihood=likelihood)
    return task, test, blr.fit_laplace(task, structure="kron", prior_precision=1.0)


def trust_in_words(page: str) -> str:
    """The two sentences on trust."""
    return re.findall(r"<h2>How far to trust it</h2>\s*<p>(.*?)</p>", page)[0]


def written(folder: Path, task: Any, test: Any, posterior: Any, **options: Any) -> Path:
    arguments = {"test": test, "by": None, **options}  # groups are trained for
    return blr.report(task, posterior, folder / "r.html", **arguments)


def test_scripts_are_those_the_policy_allows_whatever_the_data_say(tmp_path: Path) -> None:
    texts = [HOSTILE[i % len(HOSTILE)] for i in range(40)]
    subject = problem(metadata={"</script>": [HOSTILE[i % 3] for i in range(40)]})
    path = written(tmp_path, *subject, by="</script>", texts=texts)
    page = path.read_text("utf-8")
    shown_texts = data_of(path)["texts"]
    assert tuple(shown_texts[:3]) == HOSTILE[:3]
    assert path.stat().st_size < 2e6
    assert len(shown_texts[3]) < MAX_TEXT + 40
    assert "1,000,000 characters" in shown_texts[3]
    scripts = SCRIPTS.findall(page)
    rest = SCRIPTS.sub("", page)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', rest)
    assert len(scripts) == 3
    assert "type=" in scripts[0][0]
    for _, script in scripts[1:]:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"&#39;sha256-{digest}&#39;" in policy
    assert "default-src &#39;none&#39;" in policy
    assert "unsafe-eval" not in policy
    addresses = re.findall(r'(?<![-\w])(?:src|href|action)="([^"]+)"', rest)
    assert addresses
    assert all(address.startswith(("#", "data:")) for address in addresses)


def test_every_row_holds_what_the_analyses_say(tmp_path: Path) -> None:
    task, test, posterior = problem(metadata={"source": ["web", "book"] * 20})
    data = data_of(written(tmp_path, task, test, posterior))
    scores = blr.sensitivity(task, posterior)
    loo = blr.leave_one_out(task, posterior)
    assert column(data, "index") == list(range(40))
    assert column(data, "source") == ["web", "book"] * 20
    assert column(data, "deviation") == pytest.approx(scores.deviation.tolist(), rel=1e-3)
    assert column(data, "left_out_loss") == pytest.approx(loo.losses.tolist(), rel=1e-3)
    assert column(data, "region") == blr.memory_map(scores).region.tolist()
    wrong = blr.suspicious(task, posterior).table.query("kind != 'none'")
    actual = [(s["row"], s["kind"]) for s in data["suspects"]]
    assert actual == [*zip(wrong["index"], wrong["kind"], strict=True)][:60]
    labels = [s["proposed"] for s in data["suspects"] if s["kind"] == "label"]
    assert labels == wrong["proposed"].tolist()[: len(labels)]
    influence = blr.influence(task, posterior, test)
    for example in data["tests"]:
        best = influence[:, example["index"]].topk(5)
        assert [k for k, _ in example["helpful"]] == best.indices.tolist()
        assert [v for _, v in example["helpful"]] == pytest.approx(best.values.tolist(), rel=1e-3)


@pytest.mark.parametrize(
    ("outputs", "likelihood"),
    [(1, "gaussian"), (3, "gaussian"), (1, "poisson"), (1, "bernoulli"), (3, torch.nn.MSELoss())],
)
def test_every_likelihood_has_a_page(tmp_path: Path, outputs: int, likelihood: Any) -> None:
    task, test, posterior = problem(24, outputs, likelihood)
    path = written(tmp_path, task, test, posterior)
    data = data_of(path)
    text = path.read_text("utf-8")
    assert len(data["suspects"]) > 0
    is_squared = not isinstance(likelihood, str)
    assert ("squared error, summed over 3 outputs" in SCRIPTS.sub("", text)) == is_squared
    for symbol in ("nats", "NLL"):
        assert symbol not in SCRIPTS.sub("", text)
    proposed = {s["row"]: s["proposed"] for s in data["suspects"]}
    if not task.likelihood.is_classification:  # the model's own prediction is no new label
        assert set(proposed.values()) == {None}
    else:  # a label is proposed only where the present one is called wrong
        with_proposal = [s["kind"] for s in data["suspects"] if s["proposed"] is not None]
        assert set(with_proposal) <= {"label"}


def test_classes_have_their_names(tmp_path: Path) -> None:
    task, test, posterior = problem()
    path = written(tmp_path, task, test, posterior, classes=NAMES)
    data = data_of(path)
    assert column(data, "target")[:3] == NAMES
    assert data["classes"] == [[0, "cat"], [1, "<b>dog</b>"], [2, "owl"]]
    assert data["tests"][0]["target"] in NAMES
    task.model.config = SimpleNamespace(id2label=dict(enumerate(NAMES)))
    assert column(data_of(written(tmp_path, task, test, posterior)), "target")[:3] == NAMES


def test_classes_that_were_not_seen_and_no_test_data(tmp_path: Path) -> None:
    task = problem(24, 100)[0].subset(range(3))
    posterior = blr.fit_laplace(task, structure="diag", prior_precision=1.0)
    path = written(tmp_path, task, None, posterior)
    proposed = blr.suspicious(task, posterior).proposed
    assert data_of(path)["classes"] == [[c, c] for c in sorted({0, 1, 2, *proposed.tolist()})]
    assert proposed.max() <= 2
    assert "No test data" in path.read_text("utf-8")


def test_a_ranking_is_shown_without_sizes(tmp_path: Path) -> None:
    """Off the minimum and uncalibrated: no left-out figures, no influence in numbers."""
    task, test, _ = problem(likelihood=torch.nn.MSELoss(), outputs=1)
    posterior = blr.fit_laplace(task, structure="kron", prior_precision=1.0)
    assert not posterior.at_minimum
    path = written(tmp_path, task, test, posterior)
    data = data_of(path)
    names = {c["name"] for c in data["columns"]}
    assert not names & {"left_out_prediction", "left_out_loss"}
    links = [link for example in data["tests"] for link in example["helpful"]]
    assert links
    assert all(rise is None for _, rise in links)
    page = path.read_text("utf-8").split("<script")[0]
    for word in ("NLL", "nats", "temperature", "leverage of 1"):
        assert word not in page
    summary = as_text(in_text(*sections(investigate(task, posterior, test=test)).values()))
    assert "left-out loss" not in summary


def test_texts_that_are_metadata_too_are_shown_once(tmp_path: Path) -> None:
    texts = [f"{i}: a sentence of more than forty characters, for a card" for i in range(40)]
    task, test, posterior = problem(metadata={"words": texts})
    data = data_of(written(tmp_path, task, test, posterior, texts=texts))
    assert data["texts"] == texts
    assert "words" not in {c["name"] for c in data["columns"]}


def test_rows_of_a_table_are_shown_by_their_columns(tmp_path: Path) -> None:
    g = np.random.default_rng(0)
    frame = pd.DataFrame({"age": g.integers(18, 90, 40), "loss": g.normal(50, 9, 40)})
    rows = frame.assign(y=np.arange(40) % 2, text="words")
    model = torch.nn.Linear(2, 2)
    task = blr.Task(model, rows, target="y")
    test = blr.Task(model, rows.iloc[30:].reset_index(drop=True), target="y")
    data = data_of(written(tmp_path, task, test, blr.fit_laplace(task, structure="full")))
    assert data["inputs"] == ["age", "loss (input)"]
    assert "age" not in data["colours"]
    assert column(data, "age") == frame["age"].tolist()
    assert column(data, "loss (input)") == pytest.approx(frame["loss"].tolist(), rel=1e-3)
    for example in data["tests"]:
        row = frame.iloc[30 + example["index"]]
        assert dict(example["inputs"]) == pytest.approx(dict(row), rel=1e-3)


def test_groups_their_ranges_and_what_cannot_be_trusted(tmp_path: Path) -> None:
    task, test, _ = problem()
    posterior = blr.fit_laplace(task, structure="diag", prior_precision=0.01)
    actual = investigate(task, posterior, test=test, passes=1)
    removals = actual.removals.assign(note=["<far> off", "", "<far> off"])
    findings = Findings(**{**vars(actual), "removals": removals})
    page = write_page(findings, tmp_path / "r.html", classes=NAMES).read_text("utf-8")
    assert "Without cat, owl: &lt;far&gt; off." in page
    summary = as_text(in_text(*sections(findings).values()))
    words = " ".join(summary.split())
    assert "Without 0, 2: <far> off." in words
    assert len(removals) == 3
    shown = ("cat", "&lt;b&gt;dog&lt;/b&gt;", "owl")
    for row, name in zip(removals.to_dict("records"), shown, strict=True):
        (line,) = re.findall(rf'<tr><th scope="row" dir="auto">{name}</th>(.*?)</tr>', page)
        is_trusted = row["note"] == ""
        assert ("order only" in line) != is_trusted
        assert ("<circle" in line) == is_trusted
        for figure in (two_digits(row["nll_after"]), two_digits(row["nll_change"], "+")):
            assert (f">{figure}<" in line) == is_trusted
    assert trust_in_words(page).startswith("This model was stopped before its loss was minimal.")
    for word in ("diagonal", "until blr.calibrate measures"):
        assert word in page
        assert word in words
    assert "BSD 3-Clause" in page
    assert "Anaconda, Inc., and Bokeh Contributors" in page


@pytest.mark.parametrize(
    ("eve", "sentence"),
    [(0.5, "Annotator eve supplied"), (0.0, "")],
)
def test_a_source_that_supplied_most_suspects_is_named(eve: float, sentence: str) -> None:
    """Half of eve's labels are wrong, or none."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, generator=g)
    y = (x[:, 0] > 0).long()
    who = ["ann", "bob", "eve"] * 100
    is_wrong = (torch.rand(300, generator=g) < eve) & torch.tensor([name == "eve" for name in who])
    y[is_wrong] = 1 - y[is_wrong]
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    task = blr.Task(model, (x, y), metadata={"annotator": who})
    posterior = blr.fit_laplace(task, structure="full", prior_precision=1.0)
    actual = investigate(task, posterior, by=None)
    supplier = main_supplier(actual)
    assert supplier.startswith(sentence)
    assert bool(supplier) == bool(sentence)
    if sentence:
        suspects = actual.suspects["index"]
        count = sum(who[i] == "eve" for i in suspects)
        assert f"{count} of {len(suspects)} suspects" in supplier


def test_a_class_that_no_training_example_has_is_named(tmp_path: Path) -> None:
    task, test, _ = problem()
    trained_on = task.subset([i for i in range(40) if i % 3 != 2])
    posterior = blr.fit_laplace(trained_on, structure="diag", prior_precision=1.0)
    page = written(tmp_path, trained_on, test, posterior).read_text("utf-8")
    assert "classes that no training example has: 2." in page


# Images


PIXELS = np.arange(8 * 6, dtype=np.uint8).reshape(8, 6) * 5
RGB = np.stack([PIXELS, 255 - PIXELS, PIXELS], -1)
ALPHA = np.dstack([RGB, np.full_like(PIXELS, 255)])


def test_thumbnails_of_every_kind_of_image_keep_their_pixels() -> None:
    grey = [PIXELS, PIXELS / 255, PIXELS[None], Image.fromarray(PIXELS)]
    rgb = [torch.tensor(RGB), np.moveaxis(RGB, -1, 0), ALPHA, Image.fromarray(RGB)]
    for image, expected in [*((x, PIXELS) for x in grey), *((x, RGB) for x in rgb)]:
        sheet = sheet_of([picture := picture_of([image], 0)] * 3)
        shown = Image.open(io.BytesIO(base64.b64decode(sheet.uri.partition(",")[2])))
        tile = np.asarray(shown.convert("L" if expected.ndim == 2 else "RGB"))[:8, 1:7]
        assert (sheet.edge, sheet.across, sheet.down) == (8, 2, 2)
        assert np.array_equal(picture, expected)
        assert np.array_equal(tile, expected)
    assert picture_of([PIXELS.astype(float) - 100], 0).max() == 255  # stretched to 0 … 1


@pytest.mark.slow
def test_of_many_examples_the_telling_ones_are_shown_in_a_small_page(tmp_path: Path) -> None:
    task, _, posterior = problem(n := MAX_ROWS + 500)
    path = written(tmp_path, task, None, posterior, images=torch.rand(n, 3, 16, 16))
    data = data_of(path)
    table = blr.sensitivity(task, posterior).table
    shown = column(data, "index")
    assert len(shown) == MAX_ROWS
    assert data["n"] == n
    assert shown == sorted(shown)
    assert set(table["deviation"].nlargest(100).index) <= set(shown)
    assert "10,500 examples, 10,000 are shown" in path.read_text("utf-8")
    assert path.stat().st_size < 15e6
    assert data["across"] > 90


REFUSED: list[tuple[dict[str, Any], type[BLRError], str]] = [
    ({"classes": NAMES[:2]}, InputError, "names 2 classes of 3"),
    ({"classes": NAMES, "likelihood": "gaussian"}, InputError, "classes="),
    ({"path": "file/r.html"}, StorageError, "file"),
    ({"path": "."}, StorageError, "is a folder"),
    *(({name: ["a"] * 39}, DataError, f"39 {name} for 40") for name in ("images", "texts")),
    *(({"images": [x] * 40}, InputError, "no image") for x in ("words", ALPHA[None])),
]


@pytest.mark.parametrize(("options", "error", "word"), REFUSED)
def test_refusals(tmp_path: Path, options: Any, error: type[BLRError], word: str) -> None:
    (tmp_path / "file").touch()
    options = {"likelihood": "categorical", "path": "r.html", **options}
    task, test, posterior = problem(40, 3, options.pop("likelihood"))
    with pytest.raises(error, match=word):
        blr.report(task, posterior, tmp_path / options.pop("path"), test=test, by=None, **options)


def test_decisions_that_are_none(tmp_path: Path) -> None:
    rows = {
        "1,burn,": "decision",
        "x,drop,": "decision",
        "1,relabel,cat": "cat",
        "1,keep,": "nothing",
        "1,drop,\n1,relabel,2": "example 1 twice",
    }
    texts = {f"index,action,label\n{row}": word for row, word in rows.items()}
    for text, word in {"": "cannot read", "index,action\n1,drop": "label", **texts}.items():
        (tmp_path / "d.csv").write_text(text)
        with pytest.raises(InputError, match=word):
            read_decisions(tmp_path / "d.csv")


@pytest.mark.parametrize("label", ["3", "-1", "1.5"])
def test_cleaned_data_have_only_labels_of_the_task(tmp_path: Path, label: str) -> None:
    task, _, _ = problem(40, 3, "categorical")
    (tmp_path / "d.csv").write_text(f"index,action,label\n1,relabel,{label}\n")
    with pytest.raises(DataError, match="targets"):
        cleaned(task, tmp_path / "d.csv")


def test_cleaned_targets_of_a_regression_are_numbers(tmp_path: Path) -> None:
    task, _, _ = problem(40, 1, "gaussian")
    (tmp_path / "d.csv").write_text("index,action,label\n1,relabel,1.5\n2,drop,\n")
    expected = task.dataset.tensors[1].flatten().clone()
    expected[1] = 1.5
    actual = torch.tensor(cleaned(task, tmp_path / "d.csv")["target"])
    assert torch.allclose(actual.float(), expected[torch.arange(40) != 2])
