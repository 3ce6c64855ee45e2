"""The README's picture of a report: ``python docs/picture.py``, with a Chromium on the PATH."""

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from blr_analysis import demo

HERE = Path(__file__).parent

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        demo.run(folder)
        chromium = shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        window = browser.new_page(viewport={"width": 1180, "height": 900})
        window.goto((Path(folder) / "report.html").as_uri())
        window.wait_for_selector("html[data-ready]")
        window.screenshot(path=HERE / "report.png")
        browser.close()
