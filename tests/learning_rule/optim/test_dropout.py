"""Dropout as a row: the mixture that it comes from, and how to predict."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from learning_rule.optim.makers import N, draw, dropout, loss_of, network
from looks import distance, values
from torch import Tensor, nn

from blr_analysis import Posterior
from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.optim import RowOptimizer
from blr_analysis.learning_rule.optim.dropout import Dropout

KEEP = 0.6


@pytest.mark.parametrize("row", ["SGD with momentum", "RMSprop", "Adam", "AdamW", "Vadam", "IVON"])
def test_nothing_dropped_is_the_row_itself(row: str) -> None:
    ends = []
    for kind in (Dropout, RowOptimizer):
        model, generator = network(), torch.Generator().manual_seed(3)
        settings = {"ess": N, "weight_decay": 0.01, "hess_init": 0.1, "generator": generator}
        optimizer = kind(model.parameters(), row=row, lr=0.01, **settings)
        for t in range(20):
            draw(row, optimizer, lambda t=t, m=model: loss_of(m, t))
            optimizer.step()
        ends.append(values(model))
    assert distance(*ends) == 0


@pytest.mark.slow
def test_the_mean_gradient_is_that_of_the_mixture() -> None:
    """(1/π₁) ∇_m E_q[ℓ], by enumeration of all masks (App. G, Eq. 84)."""
    m = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)

    def loss(w: Tensor) -> Tensor:
        return (w.sum(-1) - 1) ** 2 + torch.sin(w[..., 0] * w[..., 1])

    copies = nn.Parameter(m.expand(1, 3).clone())
    found = []
    optimizer = Dropout([copies], lr=0.1, keep=KEEP, generator=torch.Generator().manual_seed(3))
    for _ in range(1000):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            loss(copies).sum().backward()
        assert copies.grad is not None
        found.append(copies.grad.clone())
        optimizer.drop_draws()
    drawn = torch.cat(found)
    count = len(drawn)
    leaf = m.clone().requires_grad_()
    expected = torch.zeros(())
    for z in itertools.product([0.0, 1.0], repeat=3):
        share = math.prod(KEEP if kept else 1 - KEEP for kept in z)
        expected = expected + share * loss(leaf * torch.tensor(z).double())
    (wanted,) = torch.autograd.grad(expected / KEEP, leaf)
    assert ((drawn.mean(0) - wanted).abs() < 4 * drawn.std(0) / math.sqrt(count)).all()


def test_prediction_at_the_mean_and_by_draws() -> None:
    """Units along the channels of a convolution, too."""
    model = network()
    before, optimizer = values(model), dropout(model, torch.Generator().manual_seed(3), "SGD")
    with optimizer.mean_params():
        last = model[2].weight
        wanted = [
            KEEP * b if p is last else b for p, b in zip(model.parameters(), before, strict=True)
        ]
        assert distance(values(model), wanted) == 0
    kernel = nn.Parameter(torch.ones(3, 4, 2, 2))
    other = Dropout([kernel], 0.1, keep=KEEP, generator=torch.Generator().manual_seed(3))
    for seen, weight, kind in ((model[2].weight, before[2], optimizer), (kernel, kernel, other)):
        kept, weight = [], weight.detach().clone()
        for _ in range(400):
            with kind.sampled_params():
                units = (seen != 0).double().movedim(1, 0).flatten(1)
                assert torch.equal(units, units[:, :1].expand_as(units))
                kept.append(units[:, 0])
        assert torch.equal(seen, weight)
        share, error = torch.stack(kept).mean(0), math.sqrt(KEEP * (1 - KEEP) / 400)
        assert ((share - KEEP).abs() < 4 * error).all()
    draw("SGD", optimizer, lambda: loss_of(model, 0))
    optimizer.step()
    with pytest.raises(OptimizerError, match="dropout"):  # no Gaussian
        Posterior.from_optimizer(optimizer, model)
