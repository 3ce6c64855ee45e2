"""Several recipes one after the other in one process, each timed by itself.

    python all_recipes.py ours|mergekit OUT RECIPE.yml ...

Prints a line for each recipe: its name, and the processor seconds of its merge.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

FLAGS = ("--allow-crimes", "--lazy-unpickle", "--no-write-model-card", "--quiet")


def merger(package: str) -> Callable[[Path, Path], object]:
    """The function that merges by a recipe into a folder."""
    if package == "ours":
        from blr_analysis.cli import main as command

        return lambda recipe, out: command(["merge", str(recipe), str(out)])
    from mergekit.scripts.run_yaml import main as mergekit_yaml

    return lambda recipe, out: mergekit_yaml([str(recipe), str(out), *FLAGS], standalone_mode=False)


def main() -> None:
    package = sys.argv[1]
    out = Path(sys.argv[2])
    recipes = [Path(argument) for argument in sys.argv[3:]]
    merge = merger(package)
    merge(recipes[0], out)  # imports what the first merge imports
    for recipe in recipes:
        shutil.rmtree(out, ignore_errors=True)
        started = time.process_time()
        merge(recipe, out)
        seconds = time.process_time() - started
        print("\n" + json.dumps({"method": recipe.stem, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
