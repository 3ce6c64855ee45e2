"""The page in a real browser: it loads, answers a hover, a brush, a search, a key, and saves.

Skipped where no Chromium is installed (Debian: ``apt-get install chromium``; elsewhere name one
in the environment variable ``BLR_CHROMIUM``).
"""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

import blr_analysis as blr
from blr_analysis.report.contents import _cell
from blr_analysis.report.decisions import read_decisions

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
CHROMIUM = os.environ.get("BLR_CHROMIUM") or next(filter(None, map(shutil.which, PROGRAMS)), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium: install one, or name it in BLR_CHROMIUM"
    ),
]
N = 300
HEIGHTS = [100 + i % 7 for i in range(N)]
NAMES = [f"a species of long name, number {k}{' or so' * 9 * k}" for k in range(3)]
CELLS = [_cell(name) for name in NAMES]  # the last is cut off
TEXTS = ("</script><script>window.hacked = 1</script>", "<img src=x onerror='window.hacked=1'>",
         "\"it's\", he said", "שלום \u202eabc", "long " * 2_000)  # fmt: skip
PIXEL = """(k) => {
  const points = Bokeh.documents.map((d) => d.get_model_by_name("points")).find((m) => m);
  const { frame, el } = [...Bokeh.index.roots].find((v) => v.model.name === "map");
  const box = el.getBoundingClientRect(), { x, y } = points.data;
  return [box.x + frame.x_scale.compute(x[k]), box.y + frame.y_scale.compute(y[k])];
}"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A page with images, hostile texts and sources, open in a browser that logs its faults."""
    api = pytest.importorskip("playwright.sync_api")
    g = torch.Generator().manual_seed(0)
    x, y = torch.rand(N, 1, 8, 8, generator=g), torch.arange(N) % 3
    x[:, 0, 0, 0] += y
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    metadata = {"source": [f"<i>{i % 4}</i>" for i in range(N)], "height": HEIGHTS}
    task = blr.Task(model, (x, y), metadata=metadata)
    posterior = blr.fit_laplace(task, structure="kron", prior_precision=1.0)
    test = blr.Task(model, (x[:20] + 0.1, y[:20]))
    path = tmp_path_factory.mktemp("page") / "report.html"
    texts = [f"{i}: {TEXTS[i % len(TEXTS)]}" for i in range(N)]
    monitor = blr.Monitor(task, test=test, examples=20)
    for epoch in (1, 2):
        monitor(posterior, epoch)
    blr.report(
        task, posterior, path, test=test, texts=texts, classes=NAMES, monitor=monitor, passes=1,
    )  # fmt: skip
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        window = browser.new_page(viewport={"width": 1280, "height": 1000})
        faults: list[str] = []
        asked: list[str] = []
        window.on("console", lambda m: m.type in ("error", "warning") and faults.append(m.text))
        window.on("pageerror", lambda error: faults.append(str(error)))
        window.on("request", lambda request: asked.append(request.url))
        window.goto(path.as_uri())
        window.wait_for_selector("html[data-ready]")
        memory = blr.memory_map(blr.sensitivity(task, posterior))
        wrong = blr.suspicious(task, posterior)
        yield SimpleNamespace(
            window=window, faults=faults, asked=asked, memory=memory, texts=texts, monitor=monitor,
            wrong=wrong,
        )  # fmt: skip
        browser.close()


@pytest.fixture(autouse=True)
def fresh(page: SimpleNamespace) -> Iterator[None]:
    """Every test starts from the whole page, and none may leave a fault in the console."""
    page.window.click("#clear")
    yield
    assert page.faults == []
    assert page.window.evaluate("window.hacked") is None


def pixel(page: SimpleNamespace, k: int) -> tuple[float, float]:
    page.window.evaluate("document.getElementById('chart-map').scrollIntoView({block: 'center'})")
    return tuple(page.window.evaluate(PIXEL, k))


def saved(page: SimpleNamespace, button: str) -> str:
    with page.window.expect_download() as download:
        page.window.click(button)
    return Path(download.value.path()).read_text("utf-8")


def test_nothing_is_fetched(page: SimpleNamespace) -> None:
    assert all(url.startswith(("file:", "data:", "blob:")) for url in page.asked)
    assert sum(url.startswith("file:") for url in page.asked) == 1


def test_a_hover_shows_that_example_at_once(page: SimpleNamespace) -> None:
    k = int(page.memory.product.argmax())
    x, y = pixel(page, k)
    page.window.mouse.move(x - 60, y + 60)
    began = time.perf_counter()
    page.window.mouse.move(x, y)
    page.window.wait_for_selector("#card:not([hidden])")
    assert time.perf_counter() - began < 2  # a stalled page, not a slow machine
    assert page.window.inner_text("#card h4") == f"Example {k}"
    assert page.texts[k][:40] in page.window.inner_text("#card")
    tile = "t => ['--column', '--row'].map(name => Number(t.style.getPropertyValue(name)))"
    place = page.window.eval_on_selector("#card .tile", tile)
    assert place == [k % 18, k // 18]  # 320 tiles, 18 in a row
    picture = "t => getComputedStyle(t).backgroundImage.length"
    assert page.window.eval_on_selector("#card .tile", picture) > 1000
    row = dict(zip(*(page.window.locator(f"#card {e}").all_inner_texts() for e in ("dt", "dd")),
                   strict=True))  # fmt: skip
    assert (row["target"], row["source"]) == (CELLS[k % 3], f"<i>{k % 4}</i>")
    assert row["region"] == page.memory.region[k]
    assert row["height"] == str(HEIGHTS[k])
    assert float(row["loss"]) == pytest.approx(float(page.memory.scores.losses[k]), rel=1e-3)
    page.window.mouse.move(5, 5)


def test_a_brush_lists_what_lies_inside_and_saves_it(page: SimpleNamespace) -> None:
    places = torch.tensor([pixel(page, k) for k in range(N)])
    low, high = places.quantile(0.3, dim=0), places.quantile(0.8, dim=0)
    inside = ((places > low) & (places < high)).all(1).nonzero().flatten().tolist()
    page.window.mouse.move(*low.tolist())
    page.window.mouse.down()
    page.window.mouse.move(*high.tolist(), steps=4)
    page.window.mouse.up()
    page.window.locator("#count", has_text="inside").wait_for()
    assert page.window.inner_text("#count").startswith(f"{len(inside)} of {N}")
    table = pd.read_csv(io.StringIO(saved(page, "#export")))
    assert table["deviation"].is_monotonic_decreasing  # as listed
    table = table.sort_values("index", ignore_index=True)
    assert table["index"].tolist() == inside
    assert table["source"].tolist() == [f"<i>{k % 4}</i>" for k in inside]
    short = [k for k in range(len(inside)) if inside[k] % 5 != 4]
    assert [table["text"][k] for k in short] == [page.texts[inside[k]] for k in short]


def test_search_choice_and_order(page: SimpleNamespace) -> None:
    window = page.window
    window.fill("#search", "he said")
    window.locator("#count", has_text="60 of").wait_for()
    window.select_option("#by label:has-text('source') select", "<i>2</i>")
    expected = [i for i in range(N) if i % 5 == 2 and i % 4 == 2]
    assert window.inner_text("#count").startswith(f"{len(expected)} of {N}")
    window.click("#table thead button[data-name=loss]")
    rows = "rows => rows.map(row => Number(row.dataset.k))"
    shown = window.eval_on_selector_all("#table tbody tr", rows)
    losses = page.memory.scores.losses
    assert shown == sorted(expected, key=lambda k: -losses[k])[:25]
    head = window.locator("#table th:has(button[data-name=loss])")
    assert head.get_attribute("aria-sort") == "descending"


def test_the_first_rows_are_those_that_shape_the_model_most(page: SimpleNamespace) -> None:
    rows = "rows => rows.map(row => Number(row.dataset.k))"
    shown = page.window.eval_on_selector_all("#table tbody tr", rows)
    deviation = page.memory.scores.deviation
    largest = deviation.sort(descending=True).values[:25].tolist()
    assert deviation[shown].tolist() == pytest.approx(largest, rel=1e-3)  # of four digits


def test_the_keyboard_walks_the_rows(page: SimpleNamespace) -> None:
    window = page.window
    window.keyboard.press("Escape")
    window.focus("#table tbody tr")
    window.keyboard.press("ArrowDown")
    row = int(window.evaluate("document.activeElement.dataset.k"))
    assert window.inner_text("#card h4") == f"Example {row}"
    window.keyboard.press("Escape")
    assert window.is_hidden("#card")
    window.focus("#gallery > li >> nth=0 >> input[value=drop]")
    window.keyboard.press("Space")
    assert window.locator("#gallery > li >> nth=0").get_attribute("data-action") == "drop"
    window.focus("#save")
    with window.expect_download():
        window.keyboard.press("Enter")


def test_decisions_come_back_as_a_question(page: SimpleNamespace, tmp_path: Path) -> None:
    window = page.window
    cards = window.eval_on_selector_all(
        "#gallery > li h4", "list => list.map(h => Number(h.textContent.split(/[ :]/)[1]))"
    )
    window.check("#gallery > li >> nth=0 >> input[value=drop]")
    window.select_option("#gallery > li >> nth=1 >> select", "2")
    window.check("#gallery > li >> nth=2 >> input[value=keep]")
    for radio in window.locator("#gallery input[value=relabel]").all()[3:]:
        radio.check()  # to what is proposed
    (tmp_path / "d.csv").write_text(saved(page, "#save"))
    assert cards == page.wrong.order.tolist()[: len(cards)]
    relabel = {cards[1]: 2, **{k: int(page.wrong.proposed[k]) for k in cards[3:]}}
    assert read_decisions(tmp_path / "d.csv") == {"remove": [cards[0]], "relabel": relabel}
    assert {*relabel.values()} == {0, 1, 2}


@pytest.mark.parametrize("by", ["target", "source", "region"])
def test_each_class_source_and_region_has_a_colour_and_a_shape(
    page: SimpleNamespace, by: str
) -> None:
    """Both of its own: told apart by a colour-blind reader, and in grey."""
    of = {
        "target": [CELLS[k % 3] for k in range(N)],
        "source": [f"<i>{k % 4}</i>" for k in range(N)],
        "region": list(page.memory.region),
    }[by]
    window = page.window
    window.select_option("#colour", by)
    drawn = window.evaluate(
        "Bokeh.documents.map((d) => d.get_model_by_name('points')).find((m) => m).data"
    )
    looks = {name: {(c, m) for n, c, m in zip(of, drawn["colour"], drawn["mark"], strict=True)
                    if n == name} for name in of}  # fmt: skip
    assert all(len(look) == 1 for look in looks.values())
    colours, marks = zip(*(look.pop() for look in looks.values()), strict=True)
    assert len({*colours}) == len({*marks}) == len({*of})
    legend = window.inner_text("#legend").split("\n")
    assert {*of} <= {*legend}
    shown = "list => list.map(p => [p.getAttribute('fill'), p.getAttribute('d')])"
    keys = window.eval_on_selector_all("#legend path", shown)
    assert {legend[i]: keys[i][0] for i in range(len(legend)) if legend[i] in looks} == dict(
        zip(looks, colours, strict=True)
    )
    assert len({d for _, d in keys}) == len(legend)
    window.select_option("#colour", "region")


def test_what_was_monitored_and_the_groups_are_drawn(page: SimpleNamespace) -> None:
    widths = "list => list.map(img => img.naturalWidth)"
    assert min(page.window.eval_on_selector_all("img.drawn", widths)) > 400
    assert page.window.locator("img.drawn").count() == 2


def test_the_next_test_example(page: SimpleNamespace) -> None:
    window = page.window
    before = window.inner_text("#tested h4")
    window.click("#later")
    assert window.inner_text("#tested h4") != before
    assert window.locator("#helpful > li").count() == 5


@pytest.mark.parametrize("media", [{"color_scheme": "dark"}, {"media": "print"}])
def test_paper_and_ink_differ_in_the_dark_and_in_print(page: SimpleNamespace, media: dict) -> None:
    window = page.window
    window.emulate_media(**media)
    paper, ink = window.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    light = [sum(map(int, colour[4:-1].split(","))) for colour in (paper, ink)]
    assert abs(light[0] - light[1]) > 550
    assert (light[0] < light[1]) == (media.get("color_scheme") == "dark")
    window.emulate_media(media="screen", color_scheme="light")


LIGHT = """() => {
  dispatchEvent(new Event("beforeprint"));
  return [...document.querySelectorAll(".picture")].map((canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let [light, dark] = [0, 0];
    for (let k = 0; k < data.length; k += 4) if (data[k + 3] > 200) {
      light += Math.min(data[k], data[k + 1], data[k + 2]) > 225;
      dark += Math.max(data[k], data[k + 1], data[k + 2]) < 30;
    }
    return [dark > 100 + 10 * light, canvas.getBoundingClientRect().width];
  });
}"""


def test_charts_are_ink_on_paper_at_once_when_a_dark_page_is_printed(page: SimpleNamespace) -> None:
    """No frame is drawn between the event and the print."""
    page.window.emulate_media(color_scheme="dark")
    page.window.wait_for_timeout(200)
    assert page.window.evaluate(LIGHT) == [[True, 690]]
    page.window.evaluate("dispatchEvent(new Event('afterprint'))")
    page.window.emulate_media(color_scheme="light")
    assert page.window.locator(".picture").count() == 0
    ends = (
        "list => list.map((v) => [v, v.closest('li')].map((e) => e.getBoundingClientRect().right))"
    )
    assert all(a < b for a, b in page.window.eval_on_selector_all("#gallery select", ends))


def test_a_narrow_window_needs_no_sideways_scrolling(page: SimpleNamespace) -> None:
    page.window.set_viewport_size({"width": 390, "height": 800})
    page.window.wait_for_timeout(200)
    assert page.window.evaluate("document.documentElement.scrollWidth") <= 390
    widths = "list => list.map(value => value.clientWidth)"
    assert min(page.window.eval_on_selector_all("#gallery dd", widths)) > 90  # words stay whole
    page.window.set_viewport_size({"width": 1280, "height": 1000})
    page.window.wait_for_timeout(200)
