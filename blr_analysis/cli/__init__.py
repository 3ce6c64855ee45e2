"""The command line: ``blr-analysis demo | audit | what-if | index | query | fisher | merge |
algorithms``."""

from __future__ import annotations

from blr_analysis.cli.run import main

__all__ = ["main"]
