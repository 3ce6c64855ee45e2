"""The package comes first: pytest runs a module a second time whose parents it has to import."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import blr_analysis

PACKAGE = Path(blr_analysis.__file__).parent

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores among them
    torch.set_num_threads(1)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """A module without an example is not imported to look for one."""
    ours = collection_path.suffix == ".py" and collection_path.is_relative_to(PACKAGE)
    return True if ours and ">>>" not in collection_path.read_text("utf-8") else None
