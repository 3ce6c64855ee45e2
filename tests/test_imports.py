"""Imports run downward only: the order of the package, held by reading its source.

Nothing is imported here: every file is parsed, and what it imports is compared with the order
below. An import inside a function or under ``TYPE_CHECKING`` counts like any other, because
what is held is who knows of whom, not what is loaded when.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "blr_analysis"

# From the bottom up. A module imports from the lines above its own, and from its own unit;
# units on one line have never heard of each other. `__init__` stands on top of all.
LAYERS = (
    {"errors"},
    {"progress", "views", "checks", "ranks"},
    {"likelihoods", "files", "half"},
    {"recipe", "snapshots"},
    {"terminal"},
    {"data", "estimators"},
    {"task"},
    {"backprop"},
    {"posterior"},
    {"checkpoints", "sensitivity", "merging", "learning_rule"},
    {"memory_map"},
    {"tables", "huggingface"},
    {"plots", "lightning"},
    {"audit"},
    {"report"},
    {"demo"},
    {"cli"},
    {"__main__"},
)
HEIGHT = {unit: height for height, layer in enumerate(LAYERS) for unit in layer}

# These come into the posterior's room by its doors, and know no module behind them.
BY_THE_DOOR = {"merging", "huggingface"}
DOORS = {f"{PACKAGE}.posterior", f"{PACKAGE}.posterior.capture"}

# The lowest unit that may import each of these.
LOWEST = {"pandas": "tables", "matplotlib": "plots"}
# Imported inside the one function that needs them, never when a module is loaded …
DEFERRED = {"transformers", "lightning", "pytorch_lightning", "peft"}
# … except by modules that exist for nothing else, by their full name.
ADAPTERS = frozenset(
    f"{PACKAGE}.{name}"
    for name in (
        "huggingface.trainer", "huggingface.lightning",
    )
)  # fmt: skip
# Imports by name (`importlib.import_module`) hide from this test: `views` is the one door
# from results to tables and plots, `recipe` finds the optimizers that stand above it, and the
# command line loads the user's own script.
DYNAMIC = {"views", "audit", "cli", "recipe"}
# Where a distribution's name is not what one imports.
DISTRIBUTION = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "pytorch_lightning": "lightning",
    "ruamel": "ruamel.yaml",
    "huggingface_hub": "huggingface-hub",
}


@dataclass(frozen=True)
class Import:
    """One imported module: its full name, its line, and whether a function defers it."""

    name: str
    line: int
    deferred: bool


def modules(root: Path) -> dict[str, Path]:
    """Every module below ``root/blr_analysis`` by its dotted name."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules(ROOT)


def unit_of(module: str) -> str:
    """The part of the package that a module belongs to; "" for the package's ``__init__``."""
    return module.removeprefix(PACKAGE).removeprefix(".").partition(".")[0]


def imports_of(
    source: str, module: str, *, is_package: bool = False, known: set[str]
) -> tuple[list[Import], list[int]]:
    """What a source text imports, and the lines on which it imports by a computed name."""
    package = module if is_package else module.rpartition(".")[0]
    found: list[Import] = []
    dynamic: list[int] = []

    def visit(node: ast.AST, deferred: bool) -> None:
        match node:
            case ast.Import(names=names):
                found.extend(Import(alias.name, node.lineno, deferred) for alias in names)
            case ast.ImportFrom(module=target, names=names, level=level):
                above = package.split(".")[: len(package.split(".")) - level + 1]
                base = ".".join([*(above if level else []), *([target] if target else [])])
                for alias in names:
                    full = f"{base}.{alias.name}"
                    name = full if full in known else base
                    found.append(Import(name, node.lineno, deferred))
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
                if name in ("import_module", "__import__"):
                    dynamic.append(node.lineno)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, deferred or inside)

    visit(ast.parse(source), False)
    return found, dynamic


@cache
def read(module: str) -> tuple[list[Import], list[int]]:
    """What a module of the package imports."""
    path = MODULES[module]
    package, source = path.name == "__init__.py", path.read_text("utf-8")
    return imports_of(source, module, is_package=package, known=set(MODULES))


def complaints(source: str, module: str, known: set[str]) -> list[str]:
    """What is wrong with the imports of a source text."""
    return judged(module, *imports_of(source, module, known=known))


def judged(module: str, found: list[Import], dynamic: list[int]) -> list[str]:
    """What is wrong with these imports of a module, a sentence each; empty if nothing is."""
    unit = unit_of(module)
    if unit == "":
        return []
    if unit not in HEIGHT:
        return [f"{module}: say where {unit!r} stands by adding it to LAYERS in this test"]
    wrong = []
    for imported in found:
        top = imported.name.partition(".")[0]
        where = f"{module}, line {imported.line}: "
        if top == PACKAGE:
            other = unit_of(imported.name)
            if other == "":
                wrong.append(f"{where}imports the package itself, which stands above it")
            elif other not in HEIGHT:
                wrong.append(f"{where}say where {other!r} stands by adding it to LAYERS")
            elif other != unit and HEIGHT[other] >= HEIGHT[unit]:
                wrong.append(f"{where}imports {imported.name}, but {other!r} is not below {unit!r}")
            if unit in BY_THE_DOOR and other == "posterior" and imported.name not in DOORS:
                wrong.append(f"{where}import {imported.name} by a door: {' or '.join(DOORS)}")
        if top in LOWEST and HEIGHT[unit] < HEIGHT[LOWEST[top]]:
            wrong.append(f"{where}only {LOWEST[top]!r} and what stands above it import {top}")
        if top in DEFERRED and not imported.deferred and module not in ADAPTERS:
            wrong.append(f"{where}import {top} inside the function that needs it")
    if unit not in DYNAMIC:
        wrong += [f"{module}, line {line}: imports by a computed name" for line in dynamic]
    return wrong


def distributions(specifiers: list[str]) -> set[str]:
    """The bare names of requirements such as ``"numpy>=2.0"``."""
    return {re.split(r"[\s\[<>=!~;]", text, maxsplit=1)[0].lower() for text in specifiers}


def test_imports_run_downward() -> None:
    wrong = [complaint for module in MODULES for complaint in judged(module, *read(module))]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_through_others() -> None:
    below = {
        module: {
            one.name
            for one in read(module)[0]
            # of its own package it may take names: those are no module
            if one.name in MODULES and not module.startswith(f"{one.name}.")
        }
        for module in MODULES
    }
    TopologicalSorter(below).prepare()  # CycleError names the circle


def test_third_party_imports_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    required = distributions(project["dependencies"])
    optional = distributions(
        [name for extra in project["optional-dependencies"].values() for name in extra]
    )
    for module in MODULES:
        for one in read(module)[0]:
            top = one.name.partition(".")[0]
            if top in sys.stdlib_module_names or top in (PACKAGE, "__future__"):
                continue
            name = DISTRIBUTION.get(top, top)
            allowed = required | optional if one.deferred or module in ADAPTERS else required
            assert name in allowed, f"{module}, line {one.line}: {name} is not in pyproject.toml"


def test_the_package_was_found() -> None:
    assert f"{PACKAGE}.errors" in MODULES


@pytest.mark.parametrize(
    ("module", "source", "word"),
    [
        ("likelihoods", "from blr_analysis.task import Task", "not below"),
        ("backprop.record", "from ..posterior.gaussian import Posterior", "not below"),
        ("posterior.gaussian", "from ..learning_rule import optim", "not below"),
        ("sensitivity.scores", "from blr_analysis.learning_rule import rule", "not below"),
        ("sensitivity.scores", "def f():\n    import blr_analysis.learning_rule", "not below"),
        ("learning_rule.rule", "from blr_analysis.sensitivity import scores", "not below"),
        ("memory_map", "if TYPE_CHECKING:\n    from .tables import frame", "not below"),
        ("task", "from blr_analysis import sensitivity", "not below"),
        ("task", "from blr_analysis import Posterior", "package itself"),
        ("task", "import blr_analysis", "package itself"),
        ("task", "from . import Posterior", "package itself"),
        ("sensitivity.scores", "def table(self):\n    import pandas", "import pandas"),
        ("tables", "from matplotlib import pyplot", "import matplotlib"),
        ("posterior.capture", "try:\n    import transformers\nexcept E:\n    pass", "inside"),
        ("cli", "from lightning.pytorch import Trainer", "inside"),
        ("merging.recipe", "from importlib import import_module\nimport_module('x')", "computed"),
        ("merging.plan", "from blr_analysis.posterior.prior import Prior", "by a door"),
        ("newcomer", "import torch", "LAYERS"),
        ("cli", "from blr_analysis.newcomer import thing", "LAYERS"),
    ],
)
def test_what_the_rule_forbids(module: str, source: str, word: str) -> None:
    known = {f"{PACKAGE}.sensitivity", f"{PACKAGE}.newcomer"}
    (complaint,) = complaints(source, f"{PACKAGE}.{module}", known=known)
    assert word in complaint
