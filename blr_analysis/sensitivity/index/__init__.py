"""Gradients of the training data on disk, small enough to be searched without another pass."""
