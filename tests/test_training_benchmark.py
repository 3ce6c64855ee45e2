"""The comparison of optimizers: its scores, its steps, and what it keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

from benchmarks.training_parts import scores


def probabilities(n: int, seed: int) -> torch.Tensor:
    """``[n, 4]`` in float64, rounded so that some confidences tie."""
    draws = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rough = (draws.softmax(-1) * 20).round() + 1
    return rough / rough.sum(-1, keepdim=True)


def test_scores_against_scikit_learn() -> None:
    probs, other = probabilities(200, 0), probabilities(150, 1)
    y = torch.randint(4, (200,), generator=torch.Generator().manual_seed(2))
    found = scores(probs, y, other)
    confidence = np.concatenate([probs.amax(-1), other.amax(-1)])
    kind = np.repeat([1, 0], [200, 150])
    brier = np.mean(np.sum((probs.numpy() - np.eye(4)[y.numpy()]) ** 2, axis=1))
    expected = {
        "accuracy": accuracy_score(y, probs.argmax(-1)),
        "nll": log_loss(y, probs.numpy(), labels=range(4)),
        "brier": brier,
        "auroc": roc_auc_score(kind, confidence),
    }
    assert {k: found[k] for k in expected} == pytest.approx(expected, abs=1e-12)


def test_scores_by_hand() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.3, 0.7], [0.3, 0.7]], dtype=torch.float64)
    found = scores(probs, torch.tensor([0, 1, 1, 1]), torch.tensor([[0.5, 0.5], [0.8, 0.2]]))
    # one of the two at 0.9 is right, both at 0.7 are
    assert found["ece"] == pytest.approx((2 * abs(0.5 - 0.9) + 2 * abs(1 - 0.7)) / 4, abs=1e-12)
    assert found["brier"] == pytest.approx((0.02 + 1.62 + 0.18 + 0.18) / 4, abs=1e-12)
    assert found["auroc"] == pytest.approx((2 + 2 + 1 + 1) / 8, abs=1e-12)
