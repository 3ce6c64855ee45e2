"""Seeds that learn as one batched network learn as they would alone; intervals are Student's."""

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

pytest.importorskip("gymnasium")

from benchmarks import exploration
from benchmarks.exploration import QNetworks


def alone(networks: QNetworks, seed: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for weight, bias in zip(networks.weights, networks.biases, strict=True):
        layers += [nn.Linear(*weight.shape[1:]), nn.ReLU()]
        layers[-2].weight.data, layers[-2].bias.data = weight[seed].T.clone(), bias[seed, 0].clone()
    return nn.Sequential(*layers[:-1])


def test_each_seed_has_the_gradient_of_double_q_learning_alone() -> None:
    networks, target = (QNetworks(seeds, 4, 3) for seeds in ((0, 1), (2, 3)))
    state, after = torch.randn(2, 2, 5, 4)
    batch = [state, torch.randint(3, (2, 5)), torch.randn(2, 5), after, torch.rand(2, 5) < 0.7]
    exploration.td_loss(networks, target, batch).backward()
    for seed in range(2):
        one, other = alone(networks, seed), alone(target, seed)
        loss = torch.zeros(())
        for s, a, r, n, on in zip(*(part[seed] for part in batch), strict=True):
            value = other(n)[one(n).argmax()].detach() if on else 0.0
            loss = loss + F.smooth_l1_loss(one(s)[a], r + exploration.DISCOUNT * value) / 5
        loss.backward()
        for k, layer in enumerate(one[::2]):
            weight: Tensor = layer.weight.grad.T
            torch.testing.assert_close(networks.weights[k].grad[seed], weight)


def test_draws_of_a_wide_posterior_explore_and_those_of_a_narrow_one_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exploration, "EVERY", 60)
    chosen: list[Tensor] = []
    add = exploration.Memory.add
    monkeypatch.setattr(
        exploration.Memory, "add", lambda self, *row: (chosen.append(row[1]), add(self, *row))[1]
    )

    def actions(kind: str, **settings: float) -> list[int]:
        chosen.clear()
        found = exploration.learn("MountainCar-v0", kind, {"lr": 0.01, **settings}, [0], 60)
        assert found["return"].tolist() == [-200.0]
        return torch.stack(chosen).flatten().tolist()

    greedy = actions("Adam, greedy")
    assert actions("IVON", ess=1e12) == greedy != actions("IVON", ess=1.0)


def test_intervals_are_students() -> None:
    values = np.array([[1.0, 2.0, 4.0], [3.0, 5.0, 9.0]])  # seeds × evaluations
    rows = [
        ("T", "K", "S", seed, step * exploration.EVERY, values[seed, step - 1])
        for seed in range(2)
        for step in (1, 2, 3)
    ]
    frame = pd.DataFrame(rows, columns=["task", "kind", "settings", "seed", "step", "return"])
    (row,) = exploration.table(frame).itertuples(index=False)
    means = values.mean(1)
    low, high = stats.t.interval(0.95, 1, means.mean(), stats.sem(means))
    assert row.all == pytest.approx(means.mean(), abs=0.05)
    assert row[4] == pytest.approx((high - low) / 2, abs=0.05)


def test_the_table_is_that_of_the_evaluations_that_were_kept() -> None:
    kept = pd.read_csv(exploration.RESULTS / "exploration_curves.csv")
    shown = pd.read_csv(exploration.RESULTS / "exploration.csv")
    made = exploration.table(kept).set_index(["task", "kind"])
    for row in shown.itertuples(index=False):
        assert tuple(made.loc[(row.task, row.kind)]) == tuple(row)[2:]


def test_settings_of_another_task_are_those_of_the_table() -> None:
    assert exploration.chosen_before("CartPole-v1")["Vadam"] == {"lr": 1e-3, "ess": 1e6}
