"""One merge of folders by this package, timed from after the imports.

    python run_blr.py METHOD ROOT OUT

ROOT is what :mod:`benchmarks.merging.checkpoints_made` made.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from blr_analysis import merge


def main() -> None:
    method = sys.argv[1]
    root = Path(sys.argv[2])
    out = Path(sys.argv[3])
    given = json.loads((root / "merge.json").read_text())
    started = time.perf_counter()
    models = [root / name for name in given["models"]]
    extra: dict[str, Any] = {}
    if method == "gradient_matching":
        extra = {
            "precisions": [model / "precision" for model in models],
            "base_precision": root / "base" / "precision",
            "delta": given["delta"],
        }
    merge(root / "base", models, weights=given["weights"], method=method, out=out, **extra)
    print(json.dumps({"inner": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
