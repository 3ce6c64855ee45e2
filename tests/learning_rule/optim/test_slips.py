"""What is easily forgotten: one clear error each."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import blr_analysis as blr
from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.learning_rule.families import DiagonalGaussian, Gamma
from blr_analysis.learning_rule.optim import Newton


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


def make(kind: type, params: Any, **settings: Any) -> Any:
    return kind(params, lr=0.1, ess=10, **settings)


KINDS = [blr.IVON, blr.Vadam, blr.BSAM, Newton]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "params", [None, 3, nn.Linear(2, 1), [], set(nn.Linear(2, 1).parameters())]
)
def test_params_that_are_none(kind: type, params: object) -> None:
    with pytest.raises(InputError, match="params"):
        make(kind, params)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [None, 3, {}, [nn.Parameter(torch.ones(1))]])
def test_a_group_that_is_none(kind: type, group: object) -> None:
    optimizer = make(kind, nn.Linear(2, 1).parameters())
    with pytest.raises(InputError, match="a group of parameters"):
        optimizer.add_param_group(group)


@pytest.mark.parametrize("kind", [blr.IVON, blr.Vadam, blr.BSAM])
def test_a_generator_that_is_none(kind: type) -> None:
    with pytest.raises(InputError, match=r"torch\.Generator"):
        make(kind, nn.Linear(2, 1).parameters(), generator=3)


@pytest.mark.parametrize("kind", [blr.IVON, blr.Vadam, blr.BSAM])
@pytest.mark.parametrize("state", [None, 3, {}, torch.optim.Adam([torch.ones(1)]).state_dict()])
def test_a_state_that_is_none(kind: type, state: object) -> None:
    with pytest.raises(OptimizerError, match=r"load a state_dict\(\) of this class"):
        make(kind, nn.Linear(1, 1, bias=False).parameters()).load_state_dict(state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_closure_that_is_none(kind: type) -> None:
    with pytest.raises(OptimizerError, match=r"step\(closure\)"):
        make(kind, nn.Linear(2, 1).parameters()).step(3)


BROKEN = {"lr": math.nan, "ess": -5, "weight_decay": -3, "beta1": 1.0, "hess_init": "much"}


@pytest.mark.parametrize("kind", [blr.IVON, blr.Vadam, blr.BSAM, Newton])
@pytest.mark.parametrize("name", BROKEN)
def test_a_setting_that_is_broken_later(kind: type, name: str) -> None:
    """Weights stay as they are."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = make(kind, model.parameters())
    if name not in optimizer.param_groups[0]:
        pytest.skip(f"{kind.__name__} has no {name}")
    before = model.weight.detach().clone()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).square().mean()
        if kind is not Newton:
            loss.backward()
        return loss

    optimizer.param_groups[0][name] = BROKEN[name]
    with pytest.raises(InputError, match=f"{name} must be"):
        optimizer.step(closure)
    assert torch.equal(model.weight, before)


def test_a_schedule_may_end_at_zero_less_rounding() -> None:
    model = nn.Linear(2, 1)
    optimizer = blr.IVON(model.parameters(), lr=0.1, ess=10)
    optimizer.param_groups[0]["lr"] = -1e-18
    with optimizer.sampled_params(train=True):
        model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    assert model.weight.isfinite().all()


@pytest.mark.parametrize("lr", [0, -1, 2, math.nan, None])
def test_newtons_rho(lr: object) -> None:
    with pytest.raises(InputError, match="lr must be above 0 and at most 1"):
        Newton(nn.Linear(2, 1).parameters(), lr=lr)  # type: ignore[arg-type]


def test_newton_has_one_group_of_full_precision() -> None:
    optimizer = Newton(nn.Linear(2, 1).parameters())
    with pytest.raises(InputError, match="one group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(InputError, match="float32 or float64"):
        Newton(nn.Linear(2, 1).half().parameters())


@pytest.mark.parametrize("loss", [None, 0.3, torch.ones(2), torch.tensor(math.nan)])
def test_a_loss_that_newton_cannot_use(loss: object) -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    with pytest.raises(OptimizerError, match="loss"):
        Newton(model.parameters()).step(lambda: loss)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("n", [-1, 0, 1.5])
def test_draws_are_counted_in_whole_numbers(n: object) -> None:
    for q in (
        DiagonalGaussian(torch.zeros(2), torch.ones(2)),
        Gamma(torch.tensor(2.0), torch.tensor(1.0)),
    ):
        with pytest.raises(InputError, match="n must be"):
            q.sample(n)
