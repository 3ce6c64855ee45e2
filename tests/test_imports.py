"""Imports run downward only: every file is read, and its imports are compared with the order below.

An import inside a function, under ``TYPE_CHECKING`` or of a name in a string (``import_module``)
counts like any other: the order says who knows of whom, not what is loaded when.
"""

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
    {"progress", "views", "checks", "ranks", "regression"},
    {"likelihoods", "files", "half", "modes", "schedules", "frozen", "sharded"},
    {"adapters", "models", "recipe", "snapshots", "padding"},
    {"runs"},
    {"terminal"},
    {"data", "estimators"},
    {"task"},
    {"backprop"},
    {"posterior"},
    {"recordings"},
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

# The ways up, and why. Nobody below may follow another way.
WAYS_UP = {
    # A result shows itself: its table and picture are made above pandas and matplotlib, and are
    # imported when somebody asks for them.
    ("blr_analysis.views", "blr_analysis.tables.TABLES"),
    ("blr_analysis.views", "blr_analysis.plots.PICTURES"),
    # A recipe names an optimizer of the rule, which registers itself when it is imported.
    ("blr_analysis.recipe", "blr_analysis.learning_rule.optim"),
}

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


IMPORTERS = {"import_module", "__import__"}  # functions that import what a string names
UNREADABLE = "a name that is made while the program runs"


def imports_of(source: str, package: str) -> Iterator[tuple[str, int]]:
    """What a source text imports, and on which line; a name of a module with the module."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield alias.name, node.lineno
            case ast.ImportFrom(module=target, names=names, level=level):
                base = resolve_name("." * level + (target or ""), package)
                for alias in names:
                    yield f"{base}.{alias.name}", node.lineno
            case ast.Call(
                func=ast.Name(id=name) | ast.Attribute(attr=name), args=[argument, *_]
            ) if name in IMPORTERS:
                yield _named_by(argument, package), node.lineno


def _named_by(argument: ast.expr, package: str) -> str:
    """The module that the first argument of ``import_module`` names."""
    if isinstance(argument, ast.Constant):
        return resolve_name(str(argument.value), package)
    return UNREADABLE


def module_of(name: str) -> str:
    """The module of what is imported: itself, or the one that it is a name of."""
    if name in MODULES or name.partition(".")[0] != PACKAGE:
        return name
    parent = name.rpartition(".")[0]
    return parent or name


@cache
def read(module: str) -> list[tuple[str, int]]:
    """What a module of the package imports."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return [*imports_of(path.read_text("utf-8"), package)]


def complaints(module: str, imports: Iterable[tuple[str, int]]) -> list[str]:
    """What is wrong with the imports of a module, a sentence each."""
    if module == PACKAGE:
        return []  # it stands above all
    return [
        f"{module}, line {line}, {name}: {fault}"
        for name, line in imports
        if (module, name) not in WAYS_UP
        for fault in faults_of(unit_of(module), name)
    ]


def faults_of(unit: str, name: str) -> Iterator[str]:
    """What is wrong with one import by a unit."""
    if unit not in HEIGHT:
        yield "say in LAYERS where it stands"
        return
    if name == UNREADABLE:
        yield "import by a name that can be read"
    top = name.partition(".")[0]
    lowest = LOWEST.get(top)
    if lowest is not None and HEIGHT[unit] < HEIGHT[lowest]:
        yield f"only from {lowest!r} upward"
    if top != PACKAGE:
        return
    target = module_of(name)
    other = unit_of(target)
    if target == PACKAGE and unit_of(name) not in HEIGHT:
        yield "the package itself stands above it"
    elif other == unit:
        return
    elif other not in HEIGHT:
        yield "say in LAYERS where it stands"
    elif HEIGHT[other] >= HEIGHT[unit]:
        yield f"{other!r} is not below {unit!r}"
    elif unit in BY_THE_DOOR and other == "posterior" and target not in DOORS:
        yield f"go by a door, {DOORS}"


def test_imports_run_downward() -> None:
    assert f"{PACKAGE}.errors" in MODULES
    wrong = [complaint for module in MODULES for complaint in complaints(module, read(module))]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_through_others() -> None:
    """But for the ways up."""
    modules_below = {
        module: {
            module_of(name)
            for name, _ in read(module)
            if (module, name) not in WAYS_UP and _is_another(module_of(name), module)
        }
        for module in MODULES
    }
    TopologicalSorter(modules_below).prepare()  # CycleError names the circle


def _is_another(other: str, module: str) -> bool:
    """Whether it is a module of the package; one may take names of the packages around it."""
    return other in MODULES and not module.startswith(f"{other}.")


def test_every_way_up_is_used() -> None:
    imports = {(module, name) for module in MODULES for name, _ in read(module)}
    assert imports >= WAYS_UP


def test_third_party_imports_are_declared() -> None:
    """Whatever their distribution is called."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = str(project["dependencies"]) + str(project["optional-dependencies"])
    dependencies = set(re.findall(r"'([\w.-]+)", declared.lower().replace("_", "-")))
    distributions = packages_distributions()
    without_distribution = sys.stdlib_module_names | {PACKAGE, UNREADABLE}
    for module in MODULES:
        for name, line in read(module):
            top = name.partition(".")[0].removeprefix("pytorch_")  # lightning has two
            providers = {d.lower().replace("_", "-") for d in distributions.get(top, ())}
            is_declared = top in without_distribution or bool(providers & dependencies)
            assert is_declared, f"{module}, line {line}: {top} is undeclared"


FORBIDDEN = [
    ("likelihoods", "from blr_analysis.task import Task", "not below"),
    ("backprop.record", "from ..posterior.posterior import Posterior", "not below"),
    ("sensitivity.scores", "def f():\n    import blr_analysis.learning_rule", "not below"),
    ("task", "if TYPE_CHECKING:\n    from blr_analysis import sensitivity", "not below"),
    ("task", "from . import Posterior", "package itself"),
    ("tables", "from matplotlib import pyplot", "only from"),
    ("merging.plan", "from blr_analysis.posterior.prior import Prior", "by a door"),
    ("cli", "from blr_analysis.newcomer import thing", "LAYERS"),
    ("newcomer", "from blr_analysis.errors import InputError", "LAYERS"),
    ("views", "def f():\n    from blr_analysis.tables import example_table", "not below"),
    (
        "views",
        "from importlib import import_module\nimport_module('blr_analysis.tables')",
        "not below",
    ),
    (
        "task",
        "import importlib\nimportlib.import_module('.posterior', 'blr_analysis')",
        "not below",
    ),
    ("task", "def f(name):\n    __import__(name)", "can be read"),
]


@pytest.mark.parametrize(("module", "source", "word"), FORBIDDEN)
def test_what_the_rule_forbids(module: str, source: str, word: str) -> None:
    package = f"{PACKAGE}.{module}".rpartition(".")[0]
    (complaint,) = complaints(f"{PACKAGE}.{module}", imports_of(source, package))
    assert word in complaint
