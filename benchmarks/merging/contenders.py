"""Who takes part, and by what command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.merging.checkpoints_made import DELTA, WEIGHTS, Checkpoints

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MATCHING = "gradient_matching"
ARITHMETIC = "task_arithmetic"


@dataclass(frozen=True)
class Inputs:
    """What a method of mergekit's merges, in a recipe that both read.

    Attributes:
        models: how many of the fine-tuned models.
        base: "base", or "first" for the first of the models, or "" for none.
        weighted: whether every model has a weight.
        each: parameters of every model.
        whole: parameters of the recipe.
    """

    models: int = 3
    base: str = "base"
    weighted: bool = True
    each: dict[str, float] = field(default_factory=dict)
    whole: dict[str, float] = field(default_factory=dict)


HALF = {"density": 0.5}
BY_RANK = {"density": 0.5, "epsilon": 0.1}
WITHOUT_LARGEST = {"density": 0.5, "gamma": 0.01}
METHODS_OF_MERGEKIT = {
    "linear": Inputs(base=""),
    "slerp": Inputs(models=2, base="first", weighted=False, whole={"t": 0.4}),
    "nuslerp": Inputs(models=2),
    "multislerp": Inputs(),
    "karcher": Inputs(base="", weighted=False),
    "model_stock": Inputs(weighted=False),
    "ties": Inputs(each=HALF),
    "dare_linear": Inputs(each=HALF),
    "dare_ties": Inputs(each=HALF),
    "della": Inputs(each=BY_RANK),
    "della_linear": Inputs(each=BY_RANK),
    "breadcrumbs": Inputs(each=WITHOUT_LARGEST),
    "breadcrumbs_ties": Inputs(each=WITHOUT_LARGEST),
    "sce": Inputs(weighted=False, whole={"select_topk": 0.5}),
    "nearswap": Inputs(models=1, weighted=False, whole={"t": 0.001}),
    "arcee_fusion": Inputs(models=1, weighted=False),
    "ram": Inputs(weighted=False, whole={"epsilon": 1e-4}),
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
    settings = {"models": [m.name for m in made.models], "weights": WEIGHTS, "delta": DELTA}
    (made.root / "merge.json").write_text(json.dumps(settings))
    mergekit = peers / "mergekit" / "bin" / "python"
    everybody = []
    for method in (MATCHING, ARITHMETIC):
        everybody.append(_raw(made, method))
        everybody.append(_script("ours", "run_blr.py", method, made.root, method=method))
        everybody.append(_command(made, method))
        everybody += _mergekit(made, method, mergekit)
    for method in METHODS_OF_MERGEKIT:
        recipe = recipe_file(made, method)
        everybody.append(_raw(made, method))
        everybody.append(_script("ours", "run_recipe.py", recipe, method=method))
        if mergekit.exists():
            everybody.append(_peer(mergekit, recipe, method, "mergekit"))
    return everybody


def recipe_file(made: Checkpoints, method: str) -> Path:
    """Write a recipe that both read; it computes in float32 and writes bfloat16."""
    way = METHODS_OF_MERGEKIT.get(method, Inputs())
    models = []
    for model, weight in zip(made.models[: way.models], WEIGHTS, strict=False):
        parameters: dict[str, float] = dict(way.each)
        if way.weighted:
            parameters["weight"] = weight
        models.append({"model": str(model), "parameters": parameters})
    recipe: dict[str, Any] = {"merge_method": method, "models": models, "parameters": way.whole}
    if way.base == "base":
        recipe["base_model"] = str(made.base)
    if way.base == "first":
        recipe["base_model"] = str(made.models[0])
    recipe |= {"dtype": "float32", "out_dtype": "bfloat16"}
    return _written(made.root / f"{method}.yml", recipe)


def inputs(made: Checkpoints, method: str) -> tuple[Path, ...]:
    """The files that a method reads."""
    if method not in METHODS_OF_MERGEKIT:
        return made.inputs(method == MATCHING)
    way = METHODS_OF_MERGEKIT[method]
    base, *models = made.inputs(False)
    read = models[: way.models]
    return (base, *read) if way.base == "base" else tuple(read)


def _raw(made: Checkpoints, method: str) -> Contender:
    """Read all inputs and write as much as a merge does; the paths are arguments, never text."""
    script = 'out=$1; base=$2; shift 2; cat "$@" > /dev/null && mkdir "$out" && cp "$base" "$out"'

    def command(out: Path) -> list[str | Path]:
        files = inputs(made, method)
        return ["sh", "-c", script, "raw", out, made.base / "model.safetensors", *files]

    return Contender(method, "raw", command, merges=False)


def _script(name: str, script: str, *arguments: str | Path, method: str) -> Contender:
    def command(out: Path) -> list[str | Path]:
        return [sys.executable, "-W", "ignore", HERE / script, *arguments, out]

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
    if method == MATCHING:
        models += [
            {"model": str(made.as_model(m)), "parameters": {"weight": 1.0}}
            for m in (made.base, *made.models)
        ]
        recipe["parameters"] = {"delta": DELTA}
    peers = []
    for dtype in ("float32", "bfloat16") if method == ARITHMETIC else ("float32",):
        how = {"dtype": dtype, "out_dtype": "bfloat16"}
        path = _written(
            made.root / f"{method}_mergekit_{dtype}.yml", {**recipe, "models": models, **how}
        )
        name = "mergekit" if dtype == "float32" else f"mergekit in {dtype}"
        peers.append(_peer(python, path, method, name))
    return peers


def _peer(python: Path, recipe: Path, method: str, name: str) -> Contender:
    """mergekit, in an environment of its own."""

    def command(out: Path) -> list[str | Path]:
        return [python, "-W", "ignore", HERE / "peers_mergekit.py", recipe, out]

    return Contender(method, name, command)


def _written(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(json.dumps(recipe, indent=2))  # JSON is YAML
    return path
