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


def check_draws(optimizer: Dropout, weight: nn.Parameter) -> None:
    """Whole units are dropped, each with probability 1 − KEEP; afterwards the weight is back."""
    before = weight.detach().clone()
    masks = []
    for _ in range(400):
        with optimizer.sampled_params():
            units = (weight != 0).double().movedim(1, 0).flatten(1)
            assert torch.equal(units, units[:, :1].expand_as(units))
            masks.append(units[:, 0])
    assert torch.equal(weight, before)
    share = torch.stack(masks).mean(0)
    error = math.sqrt(KEEP * (1 - KEEP) / 400)
    assert ((share - KEEP).abs() < 4 * error).all()


def test_prediction_at_the_mean_and_by_draws() -> None:
    """Of a linear layer, and of a convolution, whose units are its channels."""
    model = network()
    before = values(model)
    optimizer = dropout(model, torch.Generator().manual_seed(3), "SGD")
    with optimizer.mean_params():
        expected = [*before]
        expected[2] = KEEP * before[2]  # the last layer's weight
        assert distance(values(model), expected) == 0
    assert torch.equal(model[2].weight, before[2])
    check_draws(optimizer, model[2].weight)
    kernel = nn.Parameter(torch.ones(3, 4, 2, 2))
    generator = torch.Generator().manual_seed(3)
    check_draws(Dropout([kernel], 0.1, keep=KEEP, generator=generator), kernel)
    draw("SGD", optimizer, lambda: loss_of(model, 0))
    optimizer.step()
    with pytest.raises(OptimizerError, match="dropout"):  # no Gaussian
        Posterior.from_optimizer(optimizer, model)
