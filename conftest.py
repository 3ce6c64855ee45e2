"""The package comes first: pytest runs a module a second time whose parents it has to import."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch

import blr_analysis  # noqa: F401

gc.disable()  # what is imported to collect the tests stays: no need to look for garbage in it


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores among them
    torch.set_num_threads(1)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """A module without tests and examples is not imported to look for some."""
    other = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if other and ">>>" not in collection_path.read_text("utf-8") else None
