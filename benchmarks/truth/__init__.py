"""Truth, by brute force: models trained to convergence, and retrained without parts of their data.

python -m benchmarks.truth [--case NAME ...] [--what loo class subset relabel] [--quick]

from benchmarks import truth
case = truth.load("digits")
case.classes.test_nll          # [10] after each class was removed
case.model(), case.task()      # what was trained, on what
"""

from benchmarks.truth.recipes import CASES, Recipe
from benchmarks.truth.results import Retrained, Truth, available, load

__all__ = ["CASES", "Recipe", "Retrained", "Truth", "available", "load"]
