"""Imports run downward only: every file is read, and what it imports compared with the order below.
One inside a function or under ``TYPE_CHECKING`` counts like any other: what is held is who knows of
whom, not what is loaded when."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "blr_analysis"

# From the bottom up. A module imports from the lines above its own, and from its own unit;
# units on one line have never heard of each other. `__init__` stands on top of all.
LAYERS = (
    {"errors"},
    {"progress", "views", "checks", "ranks"},
    {"likelihoods", "files", "half", "modes"},
    {"adapters", "recipe", "snapshots", "padding"},
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
# Every module by its dotted name.
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / PACKAGE).rglob("*.py"))
}


def unit_of(module: str) -> str:
    """The part of the package that a module belongs to; "" for the package's ``__init__``."""
    return module.removeprefix(PACKAGE).removeprefix(".").partition(".")[0]


def imports_of(source: str, package: str) -> Iterator[tuple[str, int]]:
    """What a source text imports, and on which line."""
    for node in ast.walk(ast.parse(source)):
        found: list[str] = []
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names]
            case ast.ImportFrom(module=target, names=names, level=level):
                base = resolve_name("." * level + (target or ""), package)
                full = [f"{base}.{alias.name}" for alias in names]
                found = [name if name in MODULES else base for name in full]
        for name in found:
            yield name, node.lineno  # type: ignore[attr-defined]


@cache
def read(module: str) -> list[tuple[str, int]]:
    """What a module of the package imports."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return [*imports_of(path.read_text("utf-8"), package)]


def complaints(module: str, imports: Iterable[tuple[str, int]]) -> list[str]:
    """What is wrong with the imports of a module, a sentence each."""
    unit, wrong = unit_of(module), []
    height = HEIGHT.get(unit, -1)
    for name, line in imports if unit else ():
        top, _, below = name.partition(".")
        other = unit_of(name) if top == PACKAGE else ""
        foreign = other not in ("", unit)
        by_a_door = unit in BY_THE_DOOR and other == "posterior"
        faults = {
            "say in LAYERS where it stands": height < 0 or (foreign and other not in HEIGHT),
            "the package itself stands above it": top == PACKAGE and not below,
            f"{other!r} is not below {unit!r}": 0 <= height <= HEIGHT.get(other, -1) and foreign,
            f"go by a door, {DOORS}": by_a_door and name not in DOORS,
            f"only from {LOWEST.get(top)!r} upward": height < HEIGHT.get(LOWEST.get(top, ""), -1),
        }
        wrong += [
            f"{module}, line {line}, {name}: {what}" for what, is_so in faults.items() if is_so
        ]
    return wrong


def test_imports_run_downward() -> None:
    assert f"{PACKAGE}.errors" in MODULES
    wrong = [complaint for module in MODULES for complaint in complaints(module, read(module))]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_through_others() -> None:
    # Of its own package a module may take names: those are no module.
    TopologicalSorter(
        {
            module: {n for n, *_ in read(module) if n in MODULES and not module.startswith(f"{n}.")}
            for module in MODULES
        }
    ).prepare()  # CycleError names the circle


def test_third_party_imports_are_declared() -> None:
    """Whatever their distribution is called."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = str(project["dependencies"]) + str(project["optional-dependencies"])
    given = set(re.findall(r"'([\w.-]+)", declared.lower().replace("_", "-")))
    known, names = sys.stdlib_module_names | {PACKAGE}, packages_distributions()
    for module in MODULES:
        for name, line in read(module):
            top = name.partition(".")[0].removeprefix("pytorch_")  # lightning has two
            wanted = {name.lower().replace("_", "-") for name in names.get(top, ())}
            assert top in known or wanted & given, f"{module}, line {line}: {top} is undeclared"


FORBIDDEN = [
    ("likelihoods", "from blr_analysis.task import Task", "not below"),
    ("backprop.record", "from ..posterior.gaussian import Posterior", "not below"),
    ("sensitivity.scores", "def f():\n    import blr_analysis.learning_rule", "not below"),
    ("task", "if TYPE_CHECKING:\n    from blr_analysis import sensitivity", "not below"),
    ("task", "from . import Posterior", "package itself"),
    ("tables", "from matplotlib import pyplot", "only from"),
    ("merging.plan", "from blr_analysis.posterior.prior import Prior", "by a door"),
    ("cli", "from blr_analysis.newcomer import thing", "LAYERS"),
]


@pytest.mark.parametrize(("module", "source", "word"), FORBIDDEN)
def test_what_the_rule_forbids(module: str, source: str, word: str) -> None:
    package = f"{PACKAGE}.{module}".rpartition(".")[0]
    (complaint,) = complaints(f"{PACKAGE}.{module}", imports_of(source, package))
    assert word in complaint
