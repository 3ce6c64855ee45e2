"""Influence of training examples on test examples."""
