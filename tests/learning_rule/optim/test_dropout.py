"""Dropout as a row: the mixture that it comes from, and how to predict."""

from __future__ import annotations

import math

import pytest
import torch
from optimizer_makers import N, advance, draw, dropout, loss_of, network
from optimizers import distance, values
from torch import nn

from blr_analysis import Posterior
from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.optim import RowOptimizer
from blr_analysis.learning_rule.optim.dropout import Dropout

KEEP = 0.6


@pytest.mark.parametrize("row", ["SGD with momentum", "RMSprop", "Adam", "AdamW", "Vadam", "IVON"])
def test_nothing_dropped_is_the_row_itself(row: str) -> None:
    ends = []
    for kind in (Dropout, RowOptimizer):
        model = network()
        generator = torch.Generator().manual_seed(3)
        settings = {"ess": N, "weight_decay": 0.01, "hess_init": 0.1, "generator": generator}
        optimizer = kind(model.parameters(), row=row, lr=0.01, **settings)
        advance("", model, optimizer, 0, 20)
        ends.append(values(model))
    assert distance(*ends) == 0


def test_prediction_at_the_mean_and_by_draws() -> None:
    """Units along the channels of a convolution, too."""
    model = network()
    before = values(model)
    optimizer = dropout(model, torch.Generator().manual_seed(3), "SGD")
    with optimizer.mean_params():
        last = model[2].weight
        expected = [
            KEEP * b if p is last else b for p, b in zip(model.parameters(), before, strict=True)
        ]
        assert distance(values(model), expected) == 0
    kernel = nn.Parameter(torch.ones(3, 4, 2, 2))
    other = Dropout([kernel], 0.1, keep=KEEP, generator=torch.Generator().manual_seed(3))
    for seen, weight, kind in ((model[2].weight, before[2], optimizer), (kernel, kernel, other)):
        kept = []
        weight = weight.detach().clone()
        for _ in range(400):
            with kind.sampled_params():
                units = (seen != 0).double().movedim(1, 0).flatten(1)
                assert torch.equal(units, units[:, :1].expand_as(units))
                kept.append(units[:, 0])
        assert torch.equal(seen, weight)
        share = torch.stack(kept).mean(0)
        error = math.sqrt(KEEP * (1 - KEEP) / 400)
        assert ((share - KEEP).abs() < 4 * error).all()
    draw("SGD", optimizer, lambda: loss_of(model, 0))
    optimizer.step()
    with pytest.raises(OptimizerError, match="dropout"):  # no Gaussian
        Posterior.from_optimizer(optimizer, model)
