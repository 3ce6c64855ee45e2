"""The page as a file: whole, self-contained, harmless whatever the data say."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from tiny_lm import TinyLM

import blr_analysis as blr
from blr_analysis.audit import Findings, in_text, investigate, sections
from blr_analysis.errors import DataError, InputError, StorageError
from blr_analysis.report.contents import MOST_SINGLE, TEXT, picture_of, sheet_of
from blr_analysis.report.decisions import read_decisions
from blr_analysis.report.page import write_page
from blr_analysis.terminal import as_text

HOSTILE = (
    "</script><script>alert(1)</script>",
    "\"quotes' and <!-- <b>bold</b> & $$x^2$$ \\(y\\)",
    "\u202eright to left \u2028 שלום",
    "word " * 2_000,
    "=cmd|' /C calc'!A0",
    "\ud800 half a pair",
)


class Parts(HTMLParser):
    """The scripts of a page by their type, and every address that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[tuple[dict, str]] = []
        self.meta: list[dict] = []
        self.addresses: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list) -> None:
        given = dict(attrs)
        self.addresses += [v for k, v in attrs if k in ("src", "href", "action") and v]
        if tag == "meta":
            self.meta.append(given)
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append((given, ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            about, text = self.scripts[-1]
            self.scripts[-1] = about, text + data


def parts(path: Path) -> Parts:
    read = Parts()
    read.feed(path.read_text("utf-8"))
    return read


def data_of(path: Path) -> dict:
    return json.loads(parts(path).scripts[0][1])


def column(data: dict, name: str) -> list:
    return next(c["values"] for c in data["columns"] if c["name"] == name)


def problem(n: int = 40, outputs: int = 3, likelihood: str = "categorical", **options):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=g)
    y = {
        "categorical": torch.arange(n) % outputs,
        "gaussian": torch.randn(n, outputs, generator=g),
        "poisson": (torch.arange(n) % 4).float(),
        "bernoulli": (torch.arange(n) % 2).float(),
    }[likelihood]
    torch.manual_seed(0)
    model = torch.nn.Linear(4, outputs)
    task = blr.Task(model, (x, y), likelihood=likelihood, **options)
    test = blr.Task(model, (x[:9] + 0.1, y[:9]), likelihood=likelihood)
    return task, test, blr.fit_laplace(task, structure="kron", prior_precision=1.0)


def written(tmp_path: Path, *problem_and_test, **options) -> Path:
    task, test, posterior = problem_and_test
    given = {"test": test, "by": None, **options}  # groups are trained for
    return blr.report(task, posterior, tmp_path / "r.html", **given)


def test_scripts_are_those_the_policy_allows_and_nothing_is_fetched(tmp_path: Path) -> None:
    page = parts(written(tmp_path, *problem()))
    (policy,) = (m["content"] for m in page.meta if "http-equiv" in m)
    run = [text for about, text in page.scripts if "type" not in about]
    assert len(run) == 2 and len(page.scripts) == 3
    for script in run:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy
    assert all(address.startswith("#") for address in page.addresses)


def test_what_speaks_against_a_group_is_told_on_page_and_in_summary(tmp_path: Path) -> None:
    task, test, posterior = problem()
    found = investigate(task, posterior, test=test, passes=1)
    removals = found.removals.assign(note=["<far> off", "", "<far> off"])
    findings = Findings(**{**vars(found), "removals": removals})
    page = write_page(findings, tmp_path / "r.html", classes=["a", "b", "c"])
    assert "Without a, c: &lt;far&gt; off." in page.read_text("utf-8")
    assert "Without 0, 2: <far> off." in as_text(in_text(*sections(findings).values()))


def test_texts_are_data_whatever_they_say(tmp_path: Path) -> None:
    texts = [HOSTILE[i % len(HOSTILE)] for i in range(40)]
    task, test, posterior = problem(metadata={"</script>": [HOSTILE[i % 3] for i in range(40)]})
    options = {"by": "</script>", "texts": texts}
    path = written(tmp_path, task, test, posterior, **options)
    page = parts(path)
    assert len(page.scripts) == 3
    texts = data_of(path)["texts"]
    assert texts[0] == HOSTILE[0] and texts[1] == HOSTILE[1] and texts[2] == HOSTILE[2]
    assert len(texts[3]) < TEXT[1] + 40 and "10,000 characters" in texts[3]


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
    wrong = blr.suspicious(task, posterior)
    first = wrong.table[wrong.table["kind"] != "none"]
    assert [s["row"] for s in data["suspects"]] == first["index"].tolist()[:60]
    assert [s["kind"] for s in data["suspects"]] == first["kind"].tolist()[:60]
    labels = [s["proposed"] for s in data["suspects"] if s["kind"] == "label"]
    assert labels == first["proposed"].tolist()[: len(labels)]
    influence = blr.influence(task, posterior, test)
    for told in data["tests"]:
        best = influence[:, told["index"]].topk(5)
        assert [k for k, _ in told["helpful"]] == best.indices.tolist()
        assert [v for _, v in told["helpful"]] == pytest.approx(best.values.tolist(), rel=1e-3)


@pytest.mark.parametrize(
    ("outputs", "likelihood"), [(1, "gaussian"), (3, "gaussian"), (1, "poisson"), (1, "bernoulli")]
)
def test_every_likelihood_has_a_page(tmp_path: Path, outputs: int, likelihood: str) -> None:
    path = written(tmp_path, *problem(24, outputs, likelihood))
    data = data_of(path)
    assert len(data["suspects"]) > 0
    if outputs == 1:  # what the page proposes is a target
        relabel = {s["row"]: s["proposed"] for s in data["suspects"]}
        task, _, posterior = problem(24, outputs, likelihood)
        asked = {"relabel": relabel, "solver": "posterior"}
        assert blr.what_if(task, posterior, **asked).relabelled == len(relabel) > 0


def test_a_hundred_classes_and_no_test_data(tmp_path: Path) -> None:
    task, _, posterior = problem(200, 100)
    path = written(tmp_path, task, None, posterior)
    data = data_of(path)
    assert len(data["classes"]) == 100 and data["tests"] == []
    assert "No test data" in path.read_text("utf-8")


def test_classes_have_their_names(tmp_path: Path) -> None:
    task, test, posterior = problem()
    names = ["cat", "<b>dog</b>", "owl"]
    path = written(tmp_path, task, test, posterior, classes=names, by="target")
    data = data_of(path)
    assert column(data, "target")[:3] == names
    assert data["classes"] == [[0, "cat"], [1, "<b>dog</b>"], [2, "owl"]]
    assert data["tests"][0]["target"] in names
    assert ">&lt;b&gt;dog&lt;/b&gt;<" in path.read_text("utf-8")  # among the classes taken out
    task.model.config = SimpleNamespace(id2label=dict(enumerate(names)))
    assert column(data_of(written(tmp_path, task, test, posterior)), "target")[:3] == names
    with pytest.raises(InputError, match="names 2 classes of 3"):
        written(tmp_path, task, test, posterior, classes=names[:2])
    regression = problem(24, 1, "gaussian")
    with pytest.raises(InputError, match="classes="):
        written(tmp_path, *regression, classes=names)


def test_one_class(tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = blr.Task(torch.nn.Linear(4, 3), (torch.randn(20, 4), torch.zeros(20, dtype=torch.long)))
    posterior = blr.fit_laplace(task, prior_precision=1.0)
    data = data_of(blr.report(task, posterior, tmp_path / "r.html"))
    proposed = blr.suspicious(task, posterior).proposed.tolist()
    assert data["classes"] == [[c, c] for c in sorted({0, *proposed})] and max(proposed) > 0
    test = blr.Task(task.model, (torch.randn(3, 4), torch.arange(3)))  # of classes not seen
    path = written(tmp_path, task, test, posterior, classes=["a", "b", "c"])
    assert {told["target"] for told in data_of(path)["tests"]} == {"a", "b", "c"}


def test_of_three_examples_none_helps_and_harms(tmp_path: Path) -> None:
    for told in data_of(written(tmp_path, *problem(3)))["tests"]:
        helpful, harmful = (dict(told[side]) for side in ("helpful", "harmful"))
        assert {*helpful, *harmful} == {0, 1, 2} and not {*helpful} & {*harmful}
        assert min(helpful.values(), default=1) > 0 > max(harmful.values(), default=-1)


def test_texts_of_a_megabyte(tmp_path: Path) -> None:
    path = written(tmp_path, *problem(), texts=["word " * 200_000] * 40)
    assert path.stat().st_size < 2e6
    assert "1,000,000 characters" in data_of(path)["texts"][0]


def test_texts_of_a_language_model(tmp_path: Path) -> None:
    ids = torch.randint(7, (9, 5), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    loader = torch.utils.data.DataLoader(rows, batch_size=3)
    texts = [f"passage {i}: {HOSTILE[i % len(HOSTILE)]}" for i in range(9)]
    task = blr.Task(TinyLM(), loader, likelihood="causal_lm")
    posterior = blr.fit_laplace(
        task, structure="diag", curvature="empirical_fisher", prior_precision=1.0
    )
    test = task.subset([0, 1])
    data = data_of(written(tmp_path, task, test, posterior, texts=texts))
    assert data["texts"][1] == texts[1]
    loo = blr.leave_one_out(task, posterior)
    assert column(data, "left_out_loss") == pytest.approx(loo.losses.tolist(), rel=1e-3)
    assert len(data["tests"]) == 2 and len(data["tests"][0]["helpful"]) == 5


@pytest.mark.slow
def test_many_examples_are_counted_and_the_telling_ones_shown(tmp_path: Path) -> None:
    task, _, posterior = problem(MOST_SINGLE + 500)
    path = blr.report(task, posterior, tmp_path / "r.html", by=None)
    data, table = data_of(path), blr.sensitivity(task, posterior).table
    shown = column(data, "index")
    assert len(shown) == MOST_SINGLE and data["n"] == MOST_SINGLE + 500
    assert set(table["deviation"].nlargest(100).index) <= set(shown)
    assert shown == sorted(shown)
    assert "10,500 examples, 10,000 are shown" in path.read_text("utf-8")


def test_rows_of_a_table_are_shown_by_their_columns(tmp_path: Path) -> None:
    g = np.random.default_rng(0)
    frame = pd.DataFrame({"age": g.integers(18, 90, 40), "loss": g.normal(50, 9, 40)})
    own = frame.assign(y=np.arange(40) % 2, text="words")
    model = torch.nn.Linear(2, 2)
    task = blr.Task(model, own, target="y")
    test = blr.Task(model, own.iloc[30:].reset_index(drop=True), target="y")
    posterior = blr.fit_laplace(task, structure="full")
    data = data_of(written(tmp_path, task, test, posterior))
    assert data["inputs"] == ["age", "loss (input)"] and "age" not in data["colours"]
    assert column(data, "age") == frame["age"].tolist()
    assert column(data, "loss (input)") == pytest.approx(frame["loss"].tolist(), rel=1e-3)
    for told in data["tests"]:
        row = frame.iloc[30 + told["index"]]
        assert dict(told["inputs"]) == pytest.approx(dict(row), rel=1e-3)


def test_what_cannot_be_trusted_stands_on_the_page(tmp_path: Path) -> None:
    task, _, _ = problem()
    posterior = blr.fit_laplace(task, structure="diag", prior_precision=0.01)
    path = blr.report(task, posterior, tmp_path / "r.html")
    said = path.read_text("utf-8")
    assert "ranking only" in said and "diagonal" in said and "a ranking, no scale" in said
    assert "BSD 3-Clause" in said and "Anaconda, Inc., and Bokeh Contributors" in said


def test_groups_are_told_with_their_ranges_and_how_far_from_the_minimum(tmp_path: Path) -> None:
    task, test, posterior = problem()
    findings = investigate(task, posterior, test=test, passes=1)
    page = write_page(findings, tmp_path / "r.html").read_text("utf-8")
    assert findings.removals is not None and len(findings.removals) == 3
    for row in findings.removals.to_dict("records"):
        cells = (f"{row['n']}", f"{row['nll_after']:.3f}", f"{row['nll_change']:+.3f}",
                 f"{row['nll_low']:.2f} and {row['nll_high']:.2f}")  # fmt: skip
        said = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        assert f'<th scope="row" dir="auto">{row["group"]}</th>{said}' in page
    assert 'src="data:image/png;base64,' in page  # the picture of them
    assert posterior.stationarity is not None
    assert f"The model is {posterior.stationarity.verdict}." in page


def test_a_page_that_cannot_be_written_is_found_out_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    task, _, posterior = problem()
    for folder in (tmp_path / "file", Path("/proc/self")):  # none, and one that is read-only
        with pytest.raises(StorageError):
            blr.report(task, posterior, folder / "r.html")
    with pytest.raises(StorageError, match="is a folder"):
        blr.report(task, posterior, tmp_path)
    for nothing in (None, ""):
        with pytest.raises(InputError, match="path"):
            blr.report(task, posterior, nothing)  # type: ignore[arg-type]


PIXELS = np.arange(8 * 6, dtype=np.uint8).reshape(8, 6) * 5
RGB = np.stack([PIXELS, 255 - PIXELS, PIXELS], -1)
ALPHA = np.dstack([RGB, np.full_like(PIXELS, 255)])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (PIXELS, PIXELS),
        (PIXELS / 255, PIXELS),
        (PIXELS[None], PIXELS),
        (torch.tensor(RGB), RGB),
        (np.moveaxis(RGB, -1, 0), RGB),
        (ALPHA, RGB),
        (Image.fromarray(RGB), RGB),
        (Image.fromarray(PIXELS), PIXELS),
    ],
)
def test_images_of_every_kind_keep_their_pixels(given, expected) -> None:
    picture = picture_of([given], 0)
    assert np.array_equal(picture, expected)
    sheet = sheet_of([picture] * 3)
    shown = Image.open(io.BytesIO(base64.b64decode(sheet.uri.partition(",")[2])))
    tile = np.asarray(shown.convert("L" if expected.ndim == 2 else "RGB"))[:8, 1:7]
    assert (sheet.edge, sheet.across, sheet.down) == (8, 2, 2)
    assert np.array_equal(tile, expected)


def test_floats_outside_0_to_1_are_stretched() -> None:
    assert picture_of([PIXELS.astype(float) - 100], 0).max() == 255


@pytest.mark.parametrize("given", ["images", "texts"])
def test_one_for_each_example(tmp_path: Path, given: str) -> None:
    with pytest.raises(DataError, match=f"39 {given} for 40"):
        written(tmp_path, *problem(), **{given: ["a"] * 39})


def test_metadata_of_another_length() -> None:
    with pytest.raises(InputError, match="source"):
        problem(metadata={"source": ["web"] * 39})


@pytest.mark.parametrize(
    "bad",
    [np.zeros((2, 3, 4, 5)), "words"],
    ids=["four dimensions", "words"],
)
def test_what_is_no_image_is_named(bad) -> None:
    with pytest.raises((DataError, InputError), match="no image"):
        picture_of([bad], 0)


def test_a_sheet_keeps_to_its_budget() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 96, 96, 3), dtype=np.uint8)
    sheet = sheet_of(list(noise))
    assert sheet.edge == 64 and len(sheet.uri) * 3 / 4 <= 1_500_000


@pytest.mark.slow
def test_thousands_of_examples_with_thumbnails_stay_small(tmp_path: Path) -> None:
    n, edge = 12_000, 16
    images = torch.rand(n, 3, edge, edge, generator=torch.Generator().manual_seed(0))
    pool = torch.nn.AvgPool2d(edge // 4)
    model = torch.nn.Sequential(pool, torch.nn.Flatten(), torch.nn.Linear(48, 10))
    task = blr.Task(model, (images, torch.arange(n) % 10))
    posterior = blr.fit_laplace(task, structure="kron", prior_precision=1.0)
    path = written(tmp_path, task, None, posterior)
    assert path.stat().st_size < 15e6
    shown = data_of(path)
    assert len(column(shown, "index")) == 10_000 and shown["n"] == n and shown["across"] > 90


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("index,action\n1,drop\n", "label"),
        ("index,action,label\n1,burn,\n", "decision"),
        ("index,action,label\nx,drop,\n", "decision"),
        ("index,action,label\n1,relabel,cat\n", "cat"),
        ("index,action,label\n1,keep,\n", "nothing"),
        ("", "cannot read"),
    ],
)
def test_decisions_that_are_none(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "d.csv").write_text(text)
    with pytest.raises(InputError, match=word):
        read_decisions(tmp_path / "d.csv")


def test_losses_have_their_names_and_classes_are_of_classes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(12, 4), torch.nn.Linear(4, 3)
    labels = blr.Task(model, (x, (x[:, :3] > 0).float()), likelihood="bernoulli")
    numbers = blr.Task(model, (x, torch.randn(12, 3)), likelihood=torch.nn.MSELoss())
    fits = [blr.fit_laplace(t, prior_precision=1.0) for t in (labels, numbers)]
    assert ">NLL<" in blr.report(labels, fits[0], tmp_path / "l.html").read_text("utf-8")
    with pytest.raises(InputError, match="not"):
        blr.report(labels, fits[0], tmp_path / "l.html", classes=["a", "b", "c"])
    text = blr.report(numbers, fits[1], tmp_path / "n.html").read_text("utf-8")
    assert "squared error, summed over 3 outputs" in text and ">NLL<" not in text
