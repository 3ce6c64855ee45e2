"""The modes in which modules train by a recipe, against loops of plain torch in those modes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import normal
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import blr_analysis as blr
from blr_analysis.sensitivity.training import trained, whole_data

N = 24
EPOCHS = 5
LR = 0.1


class Block(nn.Module):
    """A norm without parameters of its own, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = Block(), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)
    model = nn.Sequential(*layers).double()
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 2.0)
    return model


def data() -> tuple[Tensor, Tensor]:
    return 3 * normal(N, 4) + 1, torch.arange(N) % 3


def all_training(model: nn.Module) -> None:
    model.train()


def norm_evaluates(model: Any) -> None:
    model.train()
    model[3].eval()


def everything_evaluates(model: nn.Module) -> None:
    model.eval()


def freeze_norm(model: Any) -> None:
    model[3].requires_grad_(False)


def freeze_block(model: Any) -> None:
    model[0].requires_grad_(False)


def nothing(model: nn.Module) -> None:
    """Leave the model as it is."""


def block_evaluates(model: Any) -> None:
    model.train()
    model[0].norm.eval()


def by_hand(frozen: Callable[[Any], None], mode: Callable[[Any], None]) -> dict[str, Tensor]:
    model = network()
    x, y = data()
    frozen(model)
    mode(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=LR)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def by_recipe(
    frozen: Callable[[Any], None], arrives: Callable[[Any], None], **options: Any
) -> dict[str, Tensor]:
    model = network()
    frozen(model)
    arrives(model)
    first = copy.deepcopy(network().state_dict())
    recipe = blr.Recipe("sgd", lr=LR, epochs=EPOCHS, batch_size=N, initial=first, **options)
    task = blr.Task(model, data(), recipe=recipe, progress=False)
    return trained(task, whole_data(task), recipe, 0)


CASES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    # what is frozen, as the model arrives, as it trained, what the recipe says
    "in training mode": (nothing, all_training, all_training, {}),
    "a norm in eval mode": (nothing, norm_evaluates, norm_evaluates, {}),
    "a norm of a block in eval mode": (nothing, block_evaluates, block_evaluates, {}),
    "frozen, and in training mode": (freeze_norm, all_training, all_training, {}),
    "unknown": (nothing, everything_evaluates, all_training, {}),
    "unknown, frozen": (freeze_norm, everything_evaluates, norm_evaluates, {}),
    "unknown, frozen around it": (freeze_block, everything_evaluates, block_evaluates, {}),
    "frozen, said to train": (freeze_norm, everything_evaluates, all_training, {"mode": "train"}),
    "said not to train": (nothing, all_training, everything_evaluates, {"mode": "eval"}),
    "by a function": (nothing, everything_evaluates, norm_evaluates, {"mode": norm_evaluates}),
}


@pytest.fixture(scope="module", autouse=True)
def _first_training() -> None:
    """torch imports its compiler when the first optimizer is made."""
    by_hand(nothing, all_training)


@pytest.mark.parametrize("name", CASES)
def test_modules_train_in_the_mode_in_which_they_were(name: str) -> None:
    """Weights and running statistics, of those that move."""
    frozen, arrives, mode, options = CASES[name]
    actual = by_recipe(frozen, arrives, **options)
    expected = by_hand(frozen, mode)
    for key, value in actual.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)


def test_checkpoints_know_the_modes_of_their_training() -> None:
    model = network()
    x, y = data()
    norm_evaluates(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    checkpoints = blr.Checkpoints(model)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        checkpoints.step()
    first = copy.deepcopy(network().state_dict())
    recipe = blr.Recipe("sgd", lr=LR, epochs=EPOCHS, batch_size=N, initial=first)
    task = blr.Task(model.eval(), data(), checkpoints=checkpoints, recipe=recipe, progress=False)
    for name, tensor in trained(task, whole_data(task), recipe, 0).items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("spatial", [False, True])
def test_a_last_minibatch_of_one_example_is_a_step_where_torch_takes_it(spatial: bool) -> None:
    """BatchNorm over the places of an image has a variance in one example; over one value none."""

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(4, 3), nn.BatchNorm1d(3)]
        if spatial:
            layers = [nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(9, 3)]
        return nn.Sequential(*layers).double()

    x, y = data()
    x = x[:5, None] if spatial else x[:5]
    recipe = blr.Recipe("sgd", lr=LR, epochs=2, batch_size=4, initial=made().state_dict())
    task = blr.Task(made().eval(), (x, y[:5]), recipe=recipe, progress=False)
    actual = trained(task, whole_data(task), recipe, 0)
    model = made()
    order = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(2):
        rank = torch.randperm(5, generator=order).argsort()
        for rows in (rank < 4, rank == 4):
            if spatial or int(rows.sum()) > 1:
                optimizer.zero_grad()
                cross_entropy(model(x[rows]), y[:5][rows]).backward()
                optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(actual[name], value, rtol=1e-9, atol=1e-12)


def test_the_tasks_model_keeps_its_modes() -> None:
    model = network().eval()
    recipe = blr.Recipe("sgd", lr=LR, epochs=1, batch_size=N, mode="train")
    task = blr.Task(model, data(), recipe=recipe, progress=False)
    trained(task, whole_data(task), recipe, 0)
    assert not any(module.training for module in model.modules())
