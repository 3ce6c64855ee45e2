"""A report in headless Chromium: its size, how fast it opens, how fast it answers a hover.

    python -m benchmarks.page [--examples 10000 100000] [--out FOLDER]

Each training example is an image of 32 × 32 in colour with a thumbnail; a linear model, so that
the page and not the network is measured. Opening: from the address to the last chart drawn, the
median of five. A hover: from the pointer's event to the frame in which the card shows that
example, over twenty of them. Needs a Chromium on the PATH (Debian: chromium).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import blr_analysis as blr

PIXEL = """(k) => {
  const points = Bokeh.documents.map((d) => d.get_model_by_name("points")).find((m) => m);
  const { frame, el } = [...Bokeh.index.roots].find((v) => v.model.name === "map");
  const box = el.getBoundingClientRect(), { x, y } = points.data;
  return [box.x + frame.x_scale.compute(x[k]), box.y + frame.y_scale.compute(y[k])];
}"""
WATCH = """() => {
  document.getElementById("chart-map").scrollIntoView({ block: "center" });
  const note = () => { window.seen = performance.now(); };
  const drawn = () => requestAnimationFrame(() => setTimeout(note));
  new MutationObserver(drawn).observe(document.getElementById("card"), { childList: true });
  addEventListener("pointermove", (event) => { window.moved = event.timeStamp; }, true);
}"""
SHOWN = "JSON.parse(document.getElementById('data').textContent).columns[0].values.length"


def page(n: int, folder: Path) -> Path:
    """The report of n images."""
    g = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 10
    x = torch.rand(n, 3, 32, 32, generator=g) / 2
    x[:, 0, :4, :4] += y[:, None, None] / 20
    torch.manual_seed(0)
    model = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 10))
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(100):
        batch = torch.randint(n, (1000,), generator=g)
        adam.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        adam.step()
    metadata = {"source": [f"camera {i % 7}" for i in range(n)]}
    task, test = blr.Task(model, (x, y), metadata=metadata), blr.Task(model, (x[:200], y[:200]))
    q = blr.fit_laplace(task, structure="kron", prior_precision=1.0)
    return blr.report(task, q, folder / f"{n}.html", by=None, test=test)


def opened(browser: Any, path: Path) -> tuple[Any, float]:
    """The page in a window, and the seconds until it was ready."""
    window = browser.new_page(viewport={"width": 1280, "height": 1000})
    began = time.perf_counter()
    window.goto(path.as_uri())
    window.wait_for_selector("html[data-ready]")
    return window, time.perf_counter() - began


def hovers(window: Any, count: int = 20) -> list[float]:
    """Milliseconds from the pointer's move onto an example to its card."""
    window.evaluate(WATCH)
    n = window.evaluate(SHOWN)
    lags = []
    for k in torch.randperm(n, generator=torch.Generator().manual_seed(0))[:count].tolist():
        x, y = window.evaluate(PIXEL, k)
        window.mouse.move(x - 37, y + 43)
        window.wait_for_timeout(100)
        window.evaluate("window.seen = null")
        window.mouse.move(x, y)
        window.wait_for_timeout(300)
        if (lag := window.evaluate("window.seen && window.seen - window.moved")) is not None:
            lags.append(lag)
    return lags


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--examples", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    from shutil import which

    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=which("chromium"), args=["--no-sandbox"])
        for n in args.examples:
            path = page(n, args.out or Path(folder))
            windows, seconds = zip(*(opened(browser, path) for _ in range(5)), strict=True)
            lags = hovers(windows[-1])
            open_s = (
                f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"
            )
            hover = f"{statistics.median(lags):.0f} ms (at most {max(lags):.0f}, of {len(lags)})"
            size = f"{path.stat().st_size / 1e6:.2f} MB"
            print(f"{n:,} examples: {size}, opens in {open_s}, a hover in {hover}", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
