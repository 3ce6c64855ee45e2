"""Who takes part, and by what command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.merging.checkpoints_made import DELTA, WEIGHTS, Checkpoints

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MATCHING = "gradient_matching"
ARITHMETIC = "task_arithmetic"
SHARE = 0.4  # of the second model, in SLERP
SIMPLE = {  # of mergekit's methods: what ours and its recipes are told beside the weights
    "linear": {},
    "ties": {"density": 0.5},
    "dare_linear": {"density": 0.5},
    "slerp": {},
}


@dataclass(frozen=True)
class Contender:
    """A way to merge.

    Attributes:
        method: what is merged by.
        name: who does it.
        command: from the place of the result to the command.
        merges: it writes a merged model (the raw ones do not).
        path: folders of Python modules that it needs.
    """

    method: str
    name: str
    command: Callable[[Path], list[str | Path]]
    merges: bool = True
    path: tuple[Path, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.method}, {self.name}"


def contenders(made: Checkpoints, peers: Path) -> list[Contender]:
    """All that can run here, ours before its peers; writes the recipes that they read."""
    given = {"models": [m.name for m in made.models], "weights": WEIGHTS, "delta": DELTA}
    given |= {"simple": SIMPLE, "share": SHARE}
    (made.root / "merge.json").write_text(json.dumps(given))
    found = []
    for method in (MATCHING, ARITHMETIC, *SIMPLE):
        found += [_raw(made, method), _script("ours", "run_blr.py", made, method)]
        if method not in SIMPLE:
            found.append(_command(made, method))
        found += _mergekit(made, method, peers / "mergekit" / "bin" / "python")
    return found


def inputs(made: Checkpoints, method: str) -> tuple[Path, ...]:
    """The files that a method reads."""
    found = made.inputs(method == MATCHING)
    return found[1:3] if method == "slerp" else found[1:] if method == "linear" else found


def _raw(made: Checkpoints, method: str) -> Contender:
    """Read all inputs and write as much as a merge does; the paths are arguments, never text."""
    script = 'out=$1; base=$2; shift 2; cat "$@" > /dev/null && mkdir "$out" && cp "$base" "$out"'

    def command(out: Path) -> list[str | Path]:
        files = inputs(made, method)
        return ["sh", "-c", script, "raw", out, made.base / "model.safetensors", *files]

    return Contender(method, "raw", command, merges=False)


def _script(name: str, script: str, made: Checkpoints, method: str) -> Contender:
    def command(out: Path) -> list[str | Path]:
        return [sys.executable, "-W", "ignore", HERE / script, method, made.root, out]

    return Contender(method, name, command, path=(ROOT,))


def _command(made: Checkpoints, method: str) -> Contender:
    """``blr-analysis merge RECIPE.yml OUT``, through the command's own entry point."""
    precisions = method == MATCHING
    models: list[dict[str, Any]] = [
        {"model": str(m), "parameters": {"weight": a}}
        for m, a in zip(made.models, WEIGHTS, strict=True)
    ]
    recipe: dict[str, Any] = {"merge_method": method, "base_model": str(made.base)}
    if precisions:
        recipe["base_precision"] = str(made.precision(made.base))
        recipe["parameters"] = {"delta": DELTA}
        for entry, model in zip(models, made.models, strict=True):
            entry["precision"] = str(made.precision(model))
    path = _written(made.root / f"{method}_ours.yml", {**recipe, "models": models})
    entry_point = "from blr_analysis.cli import main; main()"

    def command(out: Path) -> list[str | Path]:
        return [sys.executable, "-W", "ignore", "-c", entry_point, "merge", path, out]

    return Contender(method, "ours, blr-analysis merge", command, path=(ROOT,))


def _mergekit(made: Checkpoints, method: str, python: Path) -> list[Contender]:
    """mergekit in float32 like ours; task arithmetic also in its recipes' usual bfloat16."""
    if not python.exists():
        return []
    models: list[dict[str, Any]] = [
        {"model": str(m), "parameters": {"weight": a}}
        for m, a in zip(made.models, WEIGHTS, strict=True)
    ]
    recipe: dict[str, Any] = {"merge_method": method, "base_model": str(made.base)}
    for entry in models:
        entry["parameters"] |= SIMPLE.get(method, {})
    if method == "linear":
        del recipe["base_model"]
    if method == "slerp":
        models = [{"model": str(m)} for m in made.models[:2]]
        recipe |= {"base_model": str(made.models[0]), "parameters": {"t": SHARE}}
    if method == MATCHING:
        models += [
            {"model": str(made.as_model(m)), "parameters": {"weight": 1.0}}
            for m in (made.base, *made.models)
        ]
        recipe["parameters"] = {"delta": DELTA}
    found = []
    for dtype in ("float32", "bfloat16") if method == ARITHMETIC else ("float32",):
        how = {"dtype": dtype, "out_dtype": "bfloat16"}
        path = _written(
            made.root / f"{method}_mergekit_{dtype}.yml", {**recipe, "models": models, **how}
        )

        def command(out: Path, path: Path = path) -> list[str | Path]:
            return [python, "-W", "ignore", HERE / "peers_mergekit.py", path, out]

        name = "mergekit" if dtype == "float32" else f"mergekit in {dtype}"
        found.append(Contender(method, name, command))
    return found


def _written(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(json.dumps(recipe, indent=2))  # JSON is YAML
    return path
