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
from blr_analysis.learning_rule.optim import Newton, RowOptimizer
from blr_analysis.learning_rule.optim.draws import Draw


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


def looked(optimizer: Any, model: nn.Module, scale: float = 1.0) -> None:
    """One draw with its gradients."""
    with optimizer.sampled_params(train=True):
        optimizer.zero_grad()
        (scale * model(torch.ones(3, 2)).square().mean()).backward()


@pytest.mark.parametrize("draws", [1, 2])
def test_gradients_that_are_replaced_hold(draws: int) -> None:
    """Clipping out of place is clipping."""
    moved = []
    for in_place in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = make(blr.IVON, model.parameters(), hess_init=0.5)
        for _ in range(draws):
            looked(optimizer, model)
        for p in model.parameters():
            assert p.grad is not None
            if in_place:
                p.grad.mul_(0.01)
            else:
                p.grad = p.grad * 0.01
        optimizer.step()
        moved.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*moved)


def test_draws_can_be_dropped() -> None:
    moved = []
    for spike in (True, False):
        model = nn.Linear(2, 1)
        nn.init.ones_(model.weight)
        optimizer = make(blr.IVON, model.parameters())
        if spike:
            looked(optimizer, model, 1e6)
            optimizer.drop_draws()
        optimizer.generator = torch.Generator().manual_seed(0)
        nn.init.zeros_(model.bias)
        looked(optimizer, model)
        optimizer.step()
        moved.append(model.weight.detach().clone())
    assert torch.equal(*moved)


def test_bsam_drops_a_sample_without_its_adversary() -> None:
    model = nn.Linear(2, 1)
    optimizer = make(blr.BSAM, model.parameters())
    looked(optimizer, model)
    optimizer.drop_draws()
    looked(optimizer, model)
    with optimizer.adversarial_params():
        model(torch.ones(3, 2)).square().mean().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["step"] == 1


@pytest.mark.parametrize("kind", [blr.IVON, blr.BSAM, blr.STE])
@pytest.mark.parametrize("where", ["restore", "_close"])
def test_an_interrupt_while_the_means_are_put_back(
    kind: type, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The means come back, and the optimizer can go on."""
    model = nn.Linear(2, 1)
    settings = {} if kind is blr.STE else {"ess": 10}
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    before = [p.detach().clone() for p in model.parameters()]
    owner = Draw if where == "restore" else type(optimizer)
    original, calls = getattr(owner, where), []

    def interrupted(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        original(*args)

    monkeypatch.setattr(owner, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        looked(optimizer, model)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    optimizer.state_dict()
    with optimizer.sampled_params():
        pass


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_loss_scale_and_two_draws_of_rows_at_the_mean(name: str) -> None:
    moved = []
    for scaled in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = RowOptimizer(model.parameters(), name, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
        for _ in range(2):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(3, 2)).square().mean()).backward()
        scaler.step(optimizer)
        moved.append(model.weight.detach().clone())
    torch.testing.assert_close(*moved)


def test_newton_forgets_the_precision_of_other_parameters() -> None:
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    scales = torch.tensor([1.0, 10.0, 100.0])

    def loss() -> torch.Tensor:
        return 0.5 * (scales * (a - 1) ** 2).sum() + 0.5 * ((b - 2) ** 2).sum()

    optimizer = Newton([a, b], lr=0.5)
    b.requires_grad_(False)
    for _ in range(6):
        optimizer.step(loss)
    a.requires_grad_(False)
    b.requires_grad_(True)
    fresh = nn.Parameter(torch.zeros(3))
    other = Newton([fresh], lr=0.5)
    optimizer.step(loss)
    other.step(lambda: 0.5 * ((fresh - 2) ** 2).sum())
    torch.testing.assert_close(b, fresh)


@pytest.mark.parametrize("state", [None, {}, torch.optim.Adam([torch.ones(1)]).state_dict()])
def test_newton_refuses_the_state_of_another(state: Any) -> None:
    with pytest.raises(OptimizerError, match="state of Newton"):
        Newton(nn.Linear(2, 1).parameters()).load_state_dict(state)


def test_newton_refuses_a_state_of_another_size() -> None:
    model = nn.Linear(2, 1)
    optimizer = Newton(model.parameters(), weight_decay=0.1)
    optimizer.step(lambda: model(torch.ones(3, 2)).square().mean())
    Newton(nn.Linear(2, 1).parameters()).load_state_dict(optimizer.state_dict())
    with pytest.raises(OptimizerError, match="does not fit"):
        Newton(nn.Linear(3, 1).parameters()).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("kind", [blr.VOGN, blr.OGN])
def test_several_calls_of_the_model_in_one_backward(kind: type) -> None:
    """Are its rows the same examples, or others? Nobody can tell."""
    model = nn.Linear(2, 1)
    optimizer = kind(model.parameters(), lr=0.1, ess=10, model=model)
    x = torch.randn(4, 2)
    with (
        pytest.raises(OptimizerError, match="one backward per call"),
        optimizer.sampled_params(train=True),
    ):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), model(x + 1)).backward()
