"""The demo: train a small network on handwritten digits with IVON, then audit its data.

Everything that it prints is computed while it runs: ``blr-analysis demo``, or

    from blr_analysis.demo import run
    run("blr-demo")
"""

from __future__ import annotations

from blr_analysis.demo.job import run
from blr_analysis.demo.training import Digits, load, network, recipe, train

__all__ = ["Digits", "load", "network", "recipe", "run", "train"]
