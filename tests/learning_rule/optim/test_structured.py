"""What noisy K-FAC, SLANG and VOGGN learn, beyond their steps."""

from __future__ import annotations

import pytest
import torch
from optimizer_makers import BATCH, N, advance, draw, flat, loss_of, network, whole
from optimizer_papers import Run, learned
from torch import Tensor

from blr_analysis.learning_rule.optim import OGGN, SLANG, VOGGN, NoisyKFAC


@pytest.mark.parametrize(
    ("kind", "rows_of"), [(SLANG, "each"), (VOGGN, "curved"), (OGGN, "curved")]
)
def test_low_rank_has_the_right_diagonal(kind: type, rows_of: str) -> None:
    model = network()
    run = Run()
    optimizer = whole(kind)(model, torch.Generator().manual_seed(3), rank=2, hess_init=0.3)
    diagonal = torch.full_like(flat(model.parameters()), 0.3 * N)
    for t in range(3):
        before = flat(model.parameters())

        def loss(t: int = t) -> Tensor:
            run.drawn_weights.append(flat(model.parameters()))
            return loss_of(model, t)

        draw("", optimizer, loss)
        optimizer.step()
        assert torch.equal(run.drawn_weights[-1], before) == (kind is OGGN)
        rows = getattr(run, rows_of)(run.drawn_weights[-1], t)
        diagonal = 0.8 * diagonal + 0.2 * N / BATCH * rows.square().sum(0)
        torch.testing.assert_close(learned(model, optimizer).diagonal(), diagonal + N * 0.05)
    assert optimizer.posterior().structure == "lowrank"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NoisyKFAC, SLANG, VOGGN])
def test_draws_come_from_q(kind: type) -> None:
    model = network()
    optimizer = whole(kind)(model, torch.Generator().manual_seed(0))
    advance(kind.__name__, model, optimizer, 0, 2)
    mean = flat(model.parameters())
    inverse = torch.linalg.inv(learned(model, optimizer))
    draws = []
    for _ in range(3000):
        with optimizer.sampled_params():
            draws.append(flat(model.parameters()) - mean)
    actual = torch.stack(draws)
    covariance = actual.mT @ actual / len(actual)
    assert (covariance - inverse).norm() < 0.2 * inverse.norm()
