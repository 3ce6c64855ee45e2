"""What users type and what lies on their disks: signatures, and states written by version 0.x."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from blr_analysis.learning_rule import optim

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
    "IVON, before groups were named": (
        lambda p: optim.IVON(p, lr=1, ess=1),
        IVONS,
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
