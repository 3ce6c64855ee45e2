"""One recipe, merged after a small one that loads what merging loads.

    python one_recipe.py ours|mergekit SMALL.yml RECIPE.yml OUT

Prints the processor seconds of the merge without start-up.
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
    from mergekit.scripts.run_yaml import (  # pyright: ignore[reportMissingImports]
        main as mergekit_yaml,
    )

    return lambda recipe, out: mergekit_yaml([str(recipe), str(out), *FLAGS], standalone_mode=False)


def main() -> None:
    package = sys.argv[1]
    small, recipe, out = map(Path, sys.argv[2:])
    merge = merger(package)
    merge(small, out)
    shutil.rmtree(out)
    started = time.process_time()
    merge(recipe, out)
    seconds = time.process_time() - started
    if not (out / "model.safetensors").is_file():
        raise SystemExit("nothing was written")
    print("\n" + json.dumps({"inner": seconds}))


if __name__ == "__main__":
    main()
