"""The packages come first: pytest runs a module a second time that its parents have imported."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

LIMIT = 5.0  # twice and more what a fast test may take where nothing else runs: 2 s
# What the package and torch import when something is first used.
LAZY = ("matplotlib.figure", "pandas", "scipy.optimize", "scipy.special")
LAZY += ("sklearn.datasets", "sklearn.linear_model", "sklearn.pipeline")

gc.disable()  # what is imported to collect the tests stays: no need to look for garbage in it


def pytest_configure(config: pytest.Config) -> None:
    """Import the packages, but in the process that only hands tests to others."""
    is_worker = hasattr(config, "workerinput")
    if config.getoption("numprocesses", None) and not is_worker:
        return
    import torch

    import blr_analysis

    _ = [*walk_packages(blr_analysis.__path__, "blr_analysis.")]  # it imports each of them
    if is_worker:  # workers share the cores among them
        torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Some packages are imported when they are first used, and torch imports much at the first
    comparison and at the first ``torch.func.grad``: no test's time includes these seconds."""
    import torch

    for name in LAZY:
        import_module(name)
    torch.testing.assert_close(torch.zeros(1), torch.zeros(1))
    torch.func.grad(torch.square)(torch.zeros(()))
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """A module without tests and examples is not imported to look for some."""
    other = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if other and ">>>" not in collection_path.read_text("utf-8") else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """A test that takes more than LIMIT seconds of a processor is marked slow, or fails."""
    before = _seconds()
    yield
    spent = _seconds() - before
    if spent > LIMIT and item.get_closest_marker("slow") is None:
        pytest.fail(f"takes {spent:.1f} s of a processor: mark it slow, or make it smaller")


def _seconds() -> float:
    """Of a processor, for this process and those that it started."""
    return sum(os.times()[:4])
