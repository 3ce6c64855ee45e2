"""IVON's state: what is in it, and that training resumes from it bit for bit."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.optim import IVON


class Run:
    """A training run that can be stopped after any draw and taken up elsewhere."""

    def __init__(self, dtype: torch.dtype, draws: int, own_generator: bool, **options: Any) -> None:
        torch.manual_seed(0)
        self.draws = draws
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh()).to(dtype)
        self.x = torch.randn(30, 4).to(dtype)
        first, second = self.model[0].weight, self.model[0].bias
        self.optimizer = IVON(
            [{"params": [first]}, {"params": [second], "lr": 0.01, "ess": 7}],
            lr=0.1,
            ess=30,
            beta2=0.9,
            generator=torch.Generator().manual_seed(1) if own_generator else None,
            **options,
        )
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def advance(self, start: int, stop: int) -> None:
        """Draws ``start`` to ``stop``, with a step after each ``self.draws`` of them."""
        for number in range(start, stop):
            with self.optimizer.sampled_params(train=True):
                self.optimizer.zero_grad()
                self.model(self.x[number % 5 :: 5]).square().sum().backward()
            if (number + 1) % self.draws == 0:
                self.optimizer.step()
                self.schedule.step()

    def save(self) -> bytes:
        file = io.BytesIO()
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**states, "rng": torch.get_rng_state()}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])
        self.schedule.load_state_dict(states["schedule"])
        torch.set_rng_state(states["rng"])

    def tensors(self) -> list[Tensor]:
        params = list(self.model.parameters())
        state = self.optimizer.state
        return [*params, *(state[p][name] for p in params for name in ("hess", "momentum"))]


@pytest.mark.parametrize("stop", [1, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hess_approx", ["price", "gradsq"])
@pytest.mark.parametrize("own_generator", [True, False])
def test_resumes_to_the_bit(
    stop: int, dtype: torch.dtype, hess_approx: str, own_generator: bool
) -> None:
    """Three draws a step; stopped before, between and after the draws of a step."""
    straight = Run(dtype, 3, own_generator, hess_approx=hess_approx)
    straight.advance(0, 15)
    stopped = Run(dtype, 3, own_generator, hess_approx=hess_approx)
    stopped.advance(0, stop)
    saved = stopped.save()
    stopped.advance(stop, 15)  # nothing of this may reach what was saved
    resumed = Run(dtype, 3, own_generator, hess_approx=hess_approx)
    resumed.advance(0, 2)  # what was gathered here is replaced
    resumed.load(saved)
    resumed.advance(stop, 15)
    for run in (stopped, resumed):
        for tensor, expected in zip(run.tensors(), straight.tensors(), strict=True):
            assert torch.equal(tensor, expected)
            assert tensor.dtype == expected.dtype
    param = resumed.model[0].weight
    assert resumed.optimizer.state[param]["step"] == 5


def test_what_was_done_to_the_gradients_is_saved() -> None:
    """Clipped after two of three draws, saved, resumed."""
    runs = [Run(torch.float32, 3, True) for _ in range(2)]
    for run in runs:
        run.advance(0, 2)
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
    resumed = Run(torch.float32, 3, True)
    resumed.load(runs[0].save())
    for run in (*runs, resumed):
        run.advance(2, 3)
    for run in (runs[0], resumed):
        for tensor, expected in zip(run.tensors(), runs[1].tensors(), strict=True):
            assert torch.equal(tensor, expected)


def test_loading_copies() -> None:
    one, other = Run(torch.float32, 1, False), Run(torch.float32, 1, False)
    one.advance(0, 3)
    state = one.optimizer.state_dict()
    before = state["state"][0]["hess"].clone()
    other.optimizer.load_state_dict(state)
    other.advance(3, 6)
    assert torch.equal(state["state"][0]["hess"], before)


def test_loading_goes_through_the_hooks_of_the_user() -> None:
    one, other = Run(torch.bfloat16, 1, False), Run(torch.bfloat16, 1, False)
    one.advance(0, 3)

    def double(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        entries = {k: {**v, "hess": v["hess"] * 2} for k, v in state["state"].items()}
        return {**state, "state": entries}

    other.optimizer.register_load_state_dict_pre_hook(double)
    other.optimizer.load_state_dict(one.optimizer.state_dict())
    loaded = other.optimizer.state[other.model[0].weight]["hess"]
    assert torch.equal(loaded, one.optimizer.state[one.model[0].weight]["hess"] * 2)


def test_deep_copies_train_alike() -> None:
    run = Run(torch.float32, 1, True)
    run.advance(0, 2)
    twin = copy.deepcopy(run)
    run.advance(2, 5)
    twin.advance(2, 5)
    for tensor, expected in zip(twin.tensors(), run.tensors(), strict=True):
        assert torch.equal(tensor, expected)
        assert tensor is not expected
    with run.optimizer.sampled_params(train=True):
        run.model(run.x).sum().backward()
    with pytest.raises(OptimizerError, match=r"after step\(\)"):
        copy.deepcopy(run.optimizer)


def state_of(make: Any, shape: tuple[int, ...] = (6, 4)) -> dict[str, Any]:
    params = [torch.nn.Parameter(torch.ones(shape)), torch.nn.Parameter(torch.ones(6))]
    optimizer = make([{"params": [p]} for p in params])
    for param in params:
        param.grad = torch.ones_like(param)
    if isinstance(optimizer, IVON):
        with optimizer.sampled_params(train=True):
            pass
    optimizer.step()
    return optimizer.state_dict()


def broken(name: str, value: Any) -> dict[str, Any]:
    state = copy.deepcopy(state_of(lambda groups: IVON(groups, lr=0.1, ess=10)))
    state["state"][1][name] = value
    return state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda: {"weights": 1}, "no optimizer state"),
        (
            lambda: state_of(lambda groups: torch.optim.AdamW(groups)),
            "state of another optimizer",
        ),
        (lambda: state_of(lambda groups: IVON(groups[:1], lr=0.1, ess=10)), "groups of"),
        (
            lambda: state_of(lambda groups: IVON(groups, lr=0.1, ess=10), (4, 6)),
            r"shape \(4, 6\), the parameter \(6, 4\)",
        ),
        (lambda: broken("hess", torch.full((6,), -1.0)), "not positive and finite"),
        (lambda: broken("hess", torch.full((6,), torch.nan)), "not positive and finite"),
        (lambda: broken("momentum", [0.0]), "momentum of parameter 1 has"),
    ],
)
def test_foreign_states_are_refused_whole(state: Any, message: str) -> None:
    run = Run(torch.float32, 1, True)
    run.advance(0, 2)
    before = [tensor.clone() for tensor in run.tensors()]
    with pytest.raises(OptimizerError, match=message):
        run.optimizer.load_state_dict(state())
    assert all(map(torch.equal, run.tensors(), before))
    run.advance(2, 3)


def test_a_damaged_entry_is_named() -> None:
    state = broken("exp_avg", torch.ones(6))
    del state["state"][1]["hess"]
    run = Run(torch.float32, 1, True)
    with pytest.raises(OptimizerError, match=r"parameter 1 holds .*exp_avg"):
        run.optimizer.load_state_dict(state)
