"""The command line: ``blr-analysis demo | audit | map | loo | what-if | fisher | merge``."""

from __future__ import annotations

from blr_analysis.cli.run import main

__all__ = ["main"]
