"""The page in a real browser: it loads, answers a hover, a brush, a search, a key, and saves.

Skipped where no Chromium is installed (Debian: ``apt-get install chromium``; elsewhere name one
in the environment variable ``BLR_CHROMIUM``).
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

import blr_analysis as blr
from blr_analysis.report.contents import _cell
from blr_analysis.report.decisions import read_decisions

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
CHROMIUM = os.environ.get("BLR_CHROMIUM") or next(filter(None, map(shutil.which, PROGRAMS)), None)
WHY = "no Chromium: install one, or name it in BLR_CHROMIUM"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=WHY)]
N = 300
NAMES = [f"a species of long name, number {k}{' or so' * 9 * k}" for k in range(3)]
TEXTS = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked=1'>",
    '"it\'s", he said',
    "שלום \u202eabc",
    "long " * 2_000,
)
COLUMNS: dict[str, list[Any]] = {  # the last name is cut off
    "target": [_cell(NAMES[k % 3]) for k in range(N)],
    "source": [f"<i>{k % 4}</i>" for k in range(N)],
}
POINTS = "Bokeh.documents.map((d) => d.get_model_by_name('points')).find((m) => m).data"
PIXEL = f"""(k) => {{
  const {{ frame, el }} = [...Bokeh.index.roots].find((v) => v.model.name === "map");
  const box = el.getBoundingClientRect(), {{ x, y }} = {POINTS};
  return [box.x + frame.x_scale.compute(x[k]), box.y + frame.y_scale.compute(y[k])];
}}"""
INK = "['backgroundColor', 'color'].map((name) => getComputedStyle(document.body)[name])"
ROWS = "rows => rows.map(row => Number(row.dataset.k))"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A page with images, hostile texts and sources, open in a browser that logs its faults."""
    api = pytest.importorskip("playwright.sync_api")
    x = torch.rand(N, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(N) % 3
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    task = blr.Task(model, (x, y), metadata={"source": COLUMNS["source"]})
    posterior = blr.fit_laplace(task, structure="kron", prior_precision=1.0)
    test = blr.Task(model, (x[:20] + 0.1, y[:20]))
    texts = [f"{i}: {TEXTS[i % len(TEXTS)]}" for i in range(N)]
    monitor = blr.Monitor(task, test=test, examples=20)
    for epoch in (1, 2):
        monitor(posterior, epoch)
    path = tmp_path_factory.mktemp("page") / "report.html"
    shown = {"texts": texts, "classes": NAMES, "monitor": monitor}
    blr.report(task, posterior, path, test=test, passes=1, **shown)
    scores = blr.sensitivity(task, posterior)
    wrong = blr.suspicious(task, posterior)
    memory = blr.memory_map(scores)
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        window = browser.new_page(viewport={"width": 1280, "height": 1000})
        faults = []
        requests = []
        window.on("console", lambda m: m.type in ("error", "warning") and faults.append(m.text))
        window.on("pageerror", lambda error: faults.append(str(error)))
        window.on("request", lambda request: requests.append(request.url))
        window.goto(path.as_uri())
        window.wait_for_selector("html[data-ready]")
        folded = {"height": window.evaluate("document.documentElement.scrollHeight")}
        folded["cards"] = window.locator("#gallery > li").count()
        folded["map"] = window.locator("#chart-map canvas").count()
        window.click("nav a[href='#examples']")
        window.click("nav a[href='#influence']")
        window.wait_for_selector("html[data-map=yes]")
        yield SimpleNamespace(**locals())
        browser.close()


@pytest.fixture
def page(whole: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """Every test starts from the whole page, and none may leave a fault or fetch anything."""
    whole.window.click("#clear")
    yield whole
    assert whole.faults == []
    assert whole.window.evaluate("window.hacked") is None
    fetched = [url for url in whole.requests if not url.startswith(("data:", "blob:"))]
    assert fetched == [whole.path.as_uri()]


def pixel(page: SimpleNamespace, k: int) -> tuple[float, float]:
    page.window.evaluate("document.getElementById('chart-map').scrollIntoView({block: 'center'})")
    return tuple(page.window.evaluate(PIXEL, k))


def saved(page: SimpleNamespace, button: str) -> str:
    with page.window.expect_download() as download:
        page.window.click(button)
    return Path(download.value.path()).read_text("utf-8")


def test_a_hover_shows_that_example_at_once(page: SimpleNamespace) -> None:
    k = int(page.memory.product.argmax())
    window = page.window
    x, y = pixel(page, k)
    window.mouse.move(x - 60, y + 60)
    window.mouse.move(x, y)
    window.wait_for_selector("#card:not([hidden])", timeout=4000)  # ms
    assert window.inner_text("#card h4") == f"Example {k}"
    assert page.texts[k][:40] in window.inner_text("#card")
    tile = "t => ['--column', '--row'].map(name => Number(t.style.getPropertyValue(name)))"
    assert window.eval_on_selector("#card .tile", tile) == [k % 18, k // 18]  # of 320 tiles
    names, values = (window.locator(f"#card {e}").all_inner_texts() for e in ("dt", "dd"))
    row = dict(zip(names, values, strict=True))
    assert [row[name] for name in COLUMNS] == [column[k] for column in COLUMNS.values()]
    assert row["region"] == page.memory.region[k]
    assert float(row["loss"]) == pytest.approx(float(page.scores.losses[k]), rel=0.05)
    window.mouse.move(5, 5)


def test_a_brush_lists_what_lies_inside_and_saves_it(page: SimpleNamespace) -> None:
    places = torch.tensor([pixel(page, k) for k in range(N)])
    low = places.quantile(0.3, dim=0)
    high = places.quantile(0.8, dim=0)
    inside = ((places > low) & (places < high)).all(1).nonzero().flatten().tolist()
    page.window.mouse.move(*low.tolist())
    page.window.mouse.down()
    page.window.mouse.move(*high.tolist(), steps=4)
    page.window.mouse.up()
    page.window.locator("#count", has_text="inside").wait_for()
    assert page.window.inner_text("#count").startswith(f"{len(inside)} of {N}")
    table = pd.read_csv(io.StringIO(saved(page, "#export")))
    assert table["rank"].is_monotonic_increasing  # as listed
    table = table.sort_values("index", ignore_index=True)
    assert table["index"].tolist() == inside
    assert table["source"].tolist() == [f"<i>{k % 4}</i>" for k in inside]
    short = [k for k in range(len(inside)) if inside[k] % 5 != 4]
    assert [table["text"][k] for k in short] == [page.texts[inside[k]] for k in short]


def test_search_choice_order_and_keys(page: SimpleNamespace) -> None:
    window = page.window
    scores = page.scores
    shown = window.eval_on_selector_all("#table tbody tr", ROWS)
    assert shown == page.wrong.order[:25].tolist()  # the most suspicious first
    window.fill("#search", "he said")
    window.locator("#count", has_text="60 of").wait_for()
    window.select_option("#by label:has-text('source') select", "<i>2</i>")
    expected = [i for i in range(N) if i % 5 == 2 and i % 4 == 2]
    assert window.inner_text("#count").startswith(f"{len(expected)} of {N}")
    window.click("#table thead button[data-name=loss]")
    shown = window.eval_on_selector_all("#table tbody tr", ROWS)
    assert shown == sorted(expected, key=lambda k: -scores.losses[k])[:25]
    head = window.locator("#table th:has(button[data-name=loss])")
    assert head.get_attribute("aria-sort") == "descending"
    window.focus("#table tbody tr")
    window.keyboard.press("ArrowDown")
    assert window.inner_text("#card h4") == f"Example {shown[1]}"
    window.keyboard.press("Escape")
    assert window.is_hidden("#card")


def test_decisions_come_back_as_a_question(page: SimpleNamespace, tmp_path: Path) -> None:
    window = page.window
    assert page.folded["cards"] == 10
    while window.is_visible("#more"):
        window.click("#more")
    titles = window.locator("#gallery > li h4").all_inner_texts()
    cards = [int(title.split()[1].rstrip(":")) for title in titles]
    window.focus("#gallery > li >> nth=0 >> input[value=drop]")
    window.keyboard.press("Space")
    window.select_option("#gallery > li >> nth=1 >> select", "2")
    window.check("#gallery > li >> nth=2 >> input[value=keep]")
    for radio in window.locator("#gallery input[value=relabel]").all()[3:]:
        radio.check()  # to what is proposed, which is nothing unless the label is called wrong
    (tmp_path / "d.csv").write_text(saved(page, "#save"))
    suspects = [i for i in page.wrong.order.tolist() if page.wrong.kind[i] != "none"]
    assert cards
    assert cards == suspects[: len(cards)]
    called_wrong = [k for k in cards[3:] if page.wrong.kind[k] == "label"]
    relabel = {cards[1]: 2, **{k: int(page.wrong.proposed[k]) for k in called_wrong}}
    assert read_decisions(tmp_path / "d.csv") == {"remove": [cards[0]], "relabel": relabel}


def test_each_class_source_and_region_has_a_colour_and_a_shape(page: SimpleNamespace) -> None:
    """Both of its own: told apart by a colour-blind reader, and in grey."""
    window = page.window
    for by, of in {**COLUMNS, "region": list(page.memory.region)}.items():
        window.select_option("#colour", by)
        drawn = window.evaluate(POINTS)
        looks = {*zip(of, drawn["colour"], drawn["mark"], strict=True)}
        assert {len({*each}) for each in zip(*looks, strict=True)} == {len({*of})} == {len(looks)}
        legend = window.inner_text("#legend").split("\n")
        fills = window.eval_on_selector_all(
            "#legend path", "l => l.map(p => p.attributes.fill.value)"
        )
        shown = dict(zip(legend, fills, strict=True))
        assert shown.items() >= {name: colour for name, colour, _ in looks}.items()


def test_pictures_in_the_dark_in_print_and_in_a_narrow_window(page: SimpleNamespace) -> None:
    window = page.window
    (width,) = window.eval_on_selector_all("img.drawn", "list => list.map(img => img.naturalWidth)")
    assert width > 400  # what was monitored
    assert window.locator(".bars circle").count() == 3  # a drawing of each class
    before = window.inner_text("#tested h4")
    window.click("#later")
    assert window.inner_text("#tested h4") != before
    assert window.locator("#helpful > li").count() == 5
    for media in ({"media": "print"}, {"media": "screen", "color_scheme": "dark"}):
        window.emulate_media(**media)
        paper, ink = (sum(map(int, c[4:-1].split(","))) for c in window.evaluate(INK))
        assert abs(paper - ink) > 550
        assert (paper < ink) == ("color_scheme" in media)
    for event, pictures in (("beforeprint", 1), ("afterprint", 0)):
        window.evaluate(f"dispatchEvent(new Event('{event}'))")
        assert window.locator(".picture").count() == pictures
    window.emulate_media(color_scheme="light")
    window.set_viewport_size({"width": 390, "height": 800})
    window.wait_for_timeout(200)
    assert window.evaluate("document.documentElement.scrollWidth") <= 390
    widths = "list => list.map(value => value.clientWidth)"
    assert min(window.eval_on_selector_all("#gallery dd", widths)) > 90  # words stay whole
    window.set_viewport_size({"width": 1280, "height": 1000})


def test_what_to_do_comes_first_and_the_rest_is_folded(page: SimpleNamespace) -> None:
    window = page.window
    order = window.eval_on_selector_all("main > section", "list => list.map(part => part.id)")
    assert order == ["suspects", "removals", "new", "trust", "examples", "influence"]
    assert page.folded["cards"] == 10
    assert page.folded["map"] == 0
    assert page.folded["height"] < 6000


def test_words_explain_themselves_to_pointer_and_keyboard(page: SimpleNamespace) -> None:
    window = page.window
    word = window.locator("#new abbr").first
    assert len(word.get_attribute("title") or "") > 20
    word.focus()
    window.keyboard.press("Tab")
    window.keyboard.press("Shift+Tab")
    shown = "word => getComputedStyle(word, '::after').content"
    assert word.evaluate(shown) == f'"{word.get_attribute("title")}"'


def test_tables_wider_than_the_page_say_so(page: SimpleNamespace) -> None:
    window = page.window
    hints = window.locator("#examples .hint")
    for width in (390, 1280):
        window.set_viewport_size({"width": width, "height": 1000})
        window.wait_for_timeout(200)
        wide = window.eval_on_selector_all(
            "#examples .scroll", "list => list.map(box => box.scrollWidth > box.clientWidth + 1)"
        )
        assert [hints.nth(k).is_visible() for k in range(hints.count())] == wide
        assert window.evaluate("document.documentElement.scrollWidth") <= width
