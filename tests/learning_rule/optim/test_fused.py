"""Parameters that are moved during the backward pass, and states of ivon-opt."""

from __future__ import annotations

import inspect
from typing import Any

import ivon
import pytest
import torch
from optimizers import ROWS, make
from torch import nn

import blr_analysis as blr
from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule import optim

N = 20
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 3, generator=G), torch.randint(2, (N,), generator=G)
ALL_AT_ONCE = ("VOGN", "OGN", "BSAM")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(row: str, fused: Any, steps: int = 5) -> tuple[nn.Module, Any]:
    """``fused``: the indices of the parameters that are moved in the backward pass."""
    model = network()
    optimizer = make(row, model, N)
    for k, p in enumerate(model.parameters()):
        if k in fused:
            p.register_post_accumulate_grad_hook(optimizer.step_param)
    for _ in range(steps):
        with optimizer.sampled_params(train=True):
            nn.functional.cross_entropy(model(X), Y).backward()
        assert all(p.grad is None for k, p in enumerate(model.parameters()) if k in fused)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("fused", [range(4), (1, 2)])
@pytest.mark.parametrize("row", [row for row in ROWS if row not in ALL_AT_ONCE])
def test_the_steps_are_those_of_step(row: str, fused: Any) -> None:
    (model, one), (other, two) = train(row, fused), train(row, ())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        for name, value in two.state[q].items():
            assert torch.equal(torch.as_tensor(one.state[p][name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("row", ALL_AT_ONCE)
def test_rows_that_need_all_gradients_refuse(row: str) -> None:
    with pytest.raises(OptimizerError, match="all gradients"):
        train(row, range(4))


def test_a_second_draw_and_none_are_refused() -> None:
    model = network()
    optimizer = make("IVON", model, N)
    with pytest.raises(OptimizerError, match="inside the one"):
        optimizer.step_param(model[0].weight)
    with optimizer.sampled_params(train=True):
        nn.functional.cross_entropy(model(X), Y).backward()
    again = optimizer.sampled_params(train=True)
    with pytest.raises(OptimizerError, match="inside the one"), again:
        optimizer.step_param(model[0].weight)


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    model = network()
    optimizer = make("IVON", model, N)
    before = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(optimizer.step_param)
    with pytest.raises(OptimizerError, match="NaN"), optimizer.sampled_params(train=True):
        (nn.functional.cross_entropy(model(X), Y) * float("nan")).backward()
    assert all(map(torch.equal, before, model.parameters()))


# ------------------------------------------------------------------------- ivon-opt's states


def theirs(model: nn.Module, steps: int) -> Any:
    optimizer = ivon.IVON(model.parameters(), lr=0.05, ess=N, beta2=0.9)
    go_on(model, optimizer, steps)
    return optimizer


def go_on(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X), Y).backward()
        optimizer.step()


def go_on_alike(model: nn.Module, whole: Any, other: nn.Module, resumed: Any) -> None:
    """Both draw the same noise, so that every later step is the same."""
    draws = torch.get_rng_state()
    go_on(model, whole, 3)
    torch.set_rng_state(draws)
    go_on(other, resumed, 3)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_a_run_of_ivon_opt_goes_on_here() -> None:
    model, other = network(), network()
    torch.manual_seed(5)
    whole = theirs(model, 3)
    torch.manual_seed(5)
    part = theirs(other, 3)
    ours = blr.IVON(other.parameters(), lr=1.0, ess=1.0)
    ours.load_state_dict({**part.state_dict(), "current_step": part.current_step})
    assert ours.param_groups[0]["lr"] == 0.05 and ours.param_groups[0]["ess"] == N
    go_on_alike(model, whole, other, ours)


def test_a_run_of_ours_goes_on_there() -> None:
    model, other = network(), network()
    torch.manual_seed(5)
    whole = theirs(model, 3)
    torch.manual_seed(5)
    ours = blr.IVON(other.parameters(), lr=0.05, ess=N, beta2=0.9)
    go_on(other, ours, 3)
    there = ivon.IVON(other.parameters(), lr=1.0, ess=1.0)
    state = ours.ivon_opt_state()
    there.load_state_dict(state)
    there.current_step = state["current_step"]
    torch.testing.assert_close(
        there.param_groups[0]["hess"], whole.param_groups[0]["hess"], rtol=1e-5, atol=0
    )
    go_on_alike(model, whole, other, there)


def test_what_their_states_do_not_say() -> None:
    model = network()
    there = theirs(model, 2)
    ours = blr.IVON(model.parameters(), lr=0.05, ess=N, foreach=True)
    with pytest.warns(UserWarning, match="current_step"):
        ours.load_state_dict(there.state_dict())
    assert ours.state[model[0].weight]["step"] > 300
    ours.load_state_dict(ivon.IVON(model.parameters(), lr=0.1, ess=N).state_dict())
    assert not ours.state
    with pytest.raises(OptimizerError, match="groups of"):
        blr.IVON(network()[0].parameters(), lr=0.1, ess=N).load_state_dict(there.state_dict())
    with there.sampled_params(train=True):
        nn.functional.cross_entropy(model(X), Y).backward()
    with pytest.raises(OptimizerError, match="without a step"):
        ours.load_state_dict(there.state_dict())
    with pytest.raises(OptimizerError, match="step"):
        blr.IVON(model.parameters(), lr=0.1, ess=N).ivon_opt_state()


# What users type and what lies on their disks: signatures, and states written by version 0.x.


LEARNED = "hess_init=1.0, beta1=0.9, beta2=0.999, weight_decay=0.0001"
DRAWN = "mc_samples=1, *, sync=False, generator=None, foreach=None"
READ = "mc_samples=1, *, model, loss_reduction='mean', sync=False, generator=None, foreach=None"
ADAMS = "beta1=0.9, beta2=0.999, eps=1e-08"
TAIL = "sync=False, generator=None, foreach=None, model=None, loss_reduction='mean'"
SIGNATURES = {
    "BSAM": f"(params, lr, ess, {LEARNED}, radius=0.05, damping=0.1, {DRAWN})",
    "IVON": "(params, lr, ess, hess_init=1.0, beta1=0.9, beta2=0.99999, weight_decay=0.0001, "
    "mc_samples=1, hess_approx='price', clip_radius=inf, sync=False, debias=True, "
    "rescale_lr=True, *, generator=None, foreach=None, steps=None)",
    "OGN": f"(params, lr, ess, {LEARNED}, {READ})",
    "VOGN": f"(params, lr, ess, {LEARNED}, {READ})",
    "Vadam": f"(params, lr, ess, {LEARNED.replace('1.0', '0.0', 1)}, {DRAWN})",
    "Vprop": f"(params, lr, ess, {LEARNED.replace('1.0', '0.0', 1)}, {DRAWN})",
    "STE": f"(params, lr, row='SGD', *, clip=inf, weight_decay=0.0, {ADAMS}, mc_samples=1, "
    "sync=False, foreach=None)",
    "BayesBiNN": "(params, lr, ess, *, temperature=1.0, floor=1e-10, beta1=0.0, prior=0.0, "
    "noise=1.0, mc_samples=1, sync=False, generator=None, foreach=None)",
    "Dropout": "(params, lr, row='SGD', *, keep=1.0, dim=1, keep_lr=0.0, keep_prior=0.5, "
    f"temperature=0.1, ess=1.0, weight_decay=0.0, hess_init=0.0, {ADAMS}, mc_samples=1, {TAIL})",
    "Mixture": "(optimizers)",
    "NoisyKFAC": "(model, lr, ess, *, refresh=1, **settings)",
    "SLANG": "(model, lr, ess, *, rank=10, **settings)",
    "OGGN": "(model, lr, ess, *, likelihood='categorical', rank=10, **settings)",
    "VOGGN": "(model, lr, ess, *, likelihood='categorical', rank=10, **settings)",
    "Newton": "(params, lr=1.0, ess=1.0, weight_decay=0.0, hess_init=1.0)",
    "RowOptimizer": "(params, row, lr, ess=1.0, *, weight_decay=0.0, hess_init=0.0, "
    f"{ADAMS}, radius=0.05, damping=0.1, mc_samples=1, {TAIL})",
}


def test_every_optimizer_has_its_name() -> None:
    assert {kind.__name__ for kind in optim.BY_NAME.values()} | {"Mixture", "RowOptimizer"} == {
        *optim.__all__
    }
    assert all(kind.__name__.lower() == name for name, kind in optim.BY_NAME.items())


@pytest.mark.parametrize("name", optim.__all__)
def test_signatures_stay(name: str) -> None:
    signature = inspect.signature(getattr(optim, name))
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


def entry(step: int, **tensors: float) -> dict[str, Any]:
    return {"step": step, **{name: torch.full((2,), value) for name, value in tensors.items()}}


GROUP = {"lr": 0.1, "ess": 10, "weight_decay": 0.5, "hess_init": 1.0, "beta1": 0.9, "beta2": 0.9}
IVONS = {"hess_approx": "price", "clip_radius": 1.0, "debias": True, "rescale_lr": True}
STATES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], int]] = {
    "IVON, a draw later": (
        lambda p: optim.IVON(p, lr=1, ess=1),
        {**IVONS, "algorithm": "IVON"},
        entry(3, hess=1.5, momentum=0.2, sample_grad=0.3, sample_noise=0.1),
        1,
    ),
    "IVON, two draws later": (
        lambda p: optim.IVON(p, lr=1, ess=1),
        {**IVONS, "algorithm": "IVON"},
        entry(3, hess=1.5, momentum=0.2, sample_grad=0.3, sample_curvature=0.1),
        2,
    ),
    "Adam": (
        lambda p: optim.RowOptimizer(p, "Adam", lr=1),
        {"hess_approx": "gradsq", "eps": 1e-8, "algorithm": "Adam"},
        entry(2, hess=0.5, momentum=0.2),
        0,
    ),
    "BayesBiNN": (
        lambda p: optim.BayesBiNN(p, lr=1, ess=1),
        {
            "hess_approx": "none",
            "algorithm": "BayesBiNN",
            "temperature": 0.5,
            "floor": 0.0,
            "prior": 0.1,
            "noise": 1.0,
        },
        entry(2, momentum=0.2),
        0,
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_states_of_earlier_versions_are_read(case: str) -> None:
    make, own, held, count = STATES[case]
    group = {**GROUP, **own, "params": [0]}
    state = {"state": {0: held}, "param_groups": [group], "sampling": {"count": count}}
    param = nn.Parameter(torch.ones(2))
    optimizer = make([param])
    optimizer.load_state_dict(state)
    again = optimizer.state_dict()
    assert again["param_groups"] == [group] and again["sampling"] == {"count": count}
    assert again["state"][0].keys() == held.keys()
    for name, value in held.items():
        torch.testing.assert_close(again["state"][0][name], value, rtol=0, atol=0)
    if count:
        optimizer.step()
        assert optimizer.state[param]["step"] == held["step"] + 1
        assert (param != 1).all()
