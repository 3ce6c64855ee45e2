"""Truth, by brute force: models trained to convergence, and retrained without parts of their data.

python -m benchmarks.truth [--case NAME ...] [--what loo class A B] [--quick] [--list]

The objective is Σ ℓ_i + δ/2 ‖θ‖², full batch, by L-BFGS in float64, until the gradient's norm has
fallen to a share of that at its start, checked and stored as ``converged``. Leave-one-out may be
preconditioned by the inverse Hessian at the trained weights: its counts of evaluations are not
what retraining costs; those of class removals and halves are.
"""
