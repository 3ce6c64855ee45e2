"""Truth, by brute force: models trained to convergence, and retrained without parts of their data.

python -m benchmarks.truth [--case NAME ...] [--what loo class subset relabel] [--quick]

from benchmarks import truth
case = truth.load("digits")
case.classes.test_nll          # [10] after each class was removed
case.model(), case.task()      # what was trained, on what
case.subsets("A").test_losses  # [32, M] random halves from first weights "A"; "B"; "warm"

The objective is Σ ℓ_i + δ/2 ‖θ‖², full batch, by L-BFGS in float64 (the Fashion-MNIST cases
begin in float32), until the gradient's norm has fallen to a share of that at its start, checked
and stored as ``converged``: 1e-9 for the first training, 1e-6 from fresh weights, 1e-5 from the
trained weights. δ is the best of three or four by test NLL (digits_mlp: it was set).
Leave-one-out and relabelling are preconditioned by the inverse Hessian at the trained weights:
their counts of evaluations are not what retraining costs; those of class removals and halves
are.
"""

from benchmarks.truth.recipes import CASES, Recipe
from benchmarks.truth.results import Retrained, Truth, available, load

__all__ = ["CASES", "Recipe", "Retrained", "Truth", "available", "load"]
