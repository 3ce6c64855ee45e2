"""One recipe by ``blr-analysis merge``, timed from after the imports.

python run_recipe.py RECIPE.yml OUT
"""

from __future__ import annotations

import json
import sys
import time

import pydantic

import blr_analysis.merging
from blr_analysis.cli import main as blr_analysis_command

assert blr_analysis.merging  # imported before the clock starts
assert pydantic  # typer imports it with the first command


def main() -> None:
    started = time.perf_counter()
    code = blr_analysis_command(["merge", *sys.argv[1:]])
    if code:
        raise SystemExit(code)
    print(json.dumps({"inner": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
