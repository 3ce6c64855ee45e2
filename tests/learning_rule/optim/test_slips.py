"""What is easily forgotten: one clear error each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import blr_analysis as blr
from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.learning_rule.families import DiagonalGaussian, Gamma


@pytest.mark.parametrize("kind", [blr.VOGN, blr.OGN])
@pytest.mark.parametrize("forward", [True, False])
def test_a_forgotten_backward(kind: type, forward: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = kind(model.parameters(), lr=0.1, ess=10, model=model)
    before = model.weight.detach().clone()
    with (
        pytest.raises(OptimizerError, match=r"loss\.backward"),
        optimizer.sampled_params(train=True),
    ):
        if forward:
            model(torch.ones(3, 2))
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("kind", [blr.Vadam, blr.BSAM])
def test_ivon_refuses_the_state_of_another_row(kind: type) -> None:
    model = nn.Linear(2, 1)
    other = kind(model.parameters(), lr=0.1, ess=10)
    ours = blr.IVON(model.parameters(), lr=0.1, ess=10)
    with pytest.raises(OptimizerError, match="this is the state of"):
        ours.load_state_dict(other.state_dict())


@pytest.mark.parametrize("n", [-1, 0, 1.5])
def test_draws_are_counted_in_whole_numbers(n: object) -> None:
    for q in (
        DiagonalGaussian(torch.zeros(2), torch.ones(2)),
        Gamma(torch.tensor(2.0), torch.tensor(1.0)),
    ):
        with pytest.raises(InputError, match="n must be"):
            q.sample(n)
