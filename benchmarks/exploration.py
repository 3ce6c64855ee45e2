"""Noise in the parameters as exploration: deep Q-learning on gymnasium's classic control.

    python -m benchmarks.exploration [TASK ...] [--kinds IVON ...] [--seeds 10] [--steps 10000]
        [--workers 8] | python -m benchmarks.results exploration
    python -m benchmarks.exploration Acrobot-v1 --steps 6000 --settings-of CartPole-v1

Adam explores by ε-greedy actions, or not at all; Vadam and IVON act greedily with weights drawn
from their posterior: the noise of a draw is held through an episode, while the mean it is added to
learns on. All else is one program: two hidden layers of 64, double Q-learning, Huber loss, 64
transitions a step, a target network that follows by 1/100.

Settings are chosen on seeds 1000 to 1002 by the mean return of all evaluations, or are those of
another task in results/exploration.csv; the table is about seeds 0, …. Evaluations are of the
network at the mean, without noise: three episodes of each seed every thousandth step. All seeds
learn at once, as one network with a dimension for seeds, whose loss is the sum of theirs: an
elementwise optimizer keeps them apart.

"all" is the mean of a seed's evaluations, "last" that of its last three; ± is half a 95 % interval
of Student's t over seeds. ``--out FILE`` keeps every evaluation, for the figure "exploration" of
benchmarks.figures.
"""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

import blr_analysis as blr

RESULTS = Path(__file__).with_name("results")
TASKS = ("CartPole-v1", "Acrobot-v1")
HIDDEN, BATCH, START, EVERY, EPISODES, DISCOUNT = 64, 64, 500, 1000, 3, 0.99
LOOK = range(1000, 1003)
"""Seeds that settings are chosen on."""
Settings = dict[str, float]
GRID: dict[str, tuple[Settings, ...]] = {
    "Adam, ε-greedy": ({"lr": 1e-3}, {"lr": 3e-3}),
    "Adam, greedy": ({"lr": 1e-3}, {"lr": 3e-3}),
    "Vadam": tuple({"lr": 1e-3, "ess": ess} for ess in (1e4, 1e5, 1e6)),
    "IVON": tuple({"lr": lr, "ess": 1e4} for lr in (0.01, 0.03)),
}


class QNetworks(nn.Module):
    """A network for each of S seeds: ``[S, B, state]`` to ``[S, B, actions]``."""

    def __init__(self, seeds: Sequence[int], state: int, actions: int) -> None:
        super().__init__()
        sizes = [state, HIDDEN, HIDDEN, actions]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        for before, after in pairwise(sizes):
            width = before**-0.5
            for kept, shape in ((self.weights, (before, after)), (self.biases, (1, after))):
                drawn = [torch.rand(shape, generator=g) * 2 - 1 for g in draws]
                kept.append(nn.Parameter(torch.stack(drawn) * width))

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = torch.baddbmm(bias, x, weight)
            x = x.relu() if weight is not self.weights[-1] else x
        return x


class Memory:
    """The transitions of every seed: state, action, reward, next state, whether it went on."""

    def __init__(self, seeds: int, steps: int, state: int) -> None:
        self.states, self.next = torch.zeros(2, seeds, steps, state).unbind()
        self.actions = torch.zeros(seeds, steps, dtype=torch.long)
        self.rewards, self.goes_on = torch.zeros(2, seeds, steps).unbind()
        self.held = 0

    def add(self, *row: Tensor) -> None:
        kept = (self.states, self.actions, self.rewards, self.next, self.goes_on)
        for tensor, values in zip(kept, row, strict=True):
            tensor[:, self.held] = values
        self.held += 1

    def batch(self, generator: torch.Generator) -> list[Tensor]:
        kept = (self.states, self.actions, self.rewards, self.next, self.goes_on)
        seeds = torch.arange(len(self.actions))[:, None]
        rows = torch.randint(self.held, (len(seeds), BATCH), generator=generator)
        return [tensor[seeds, rows] for tensor in kept]


def td_loss(network: nn.Module, target: nn.Module, batch: list[Tensor]) -> Tensor:
    """Σ over seeds of the mean Huber loss; one network chooses actions, the other values them."""
    state, action, reward, after, goes_on = batch
    with torch.no_grad():
        best = network(after).argmax(-1, keepdim=True)
        wanted = reward + DISCOUNT * goes_on * target(after).gather(-1, best).squeeze(-1)
    q = network(state).gather(-1, action[..., None]).squeeze(-1)
    return F.smooth_l1_loss(q, wanted, reduction="none").mean(-1).sum()


def make_optimizer(kind: str, network: nn.Module, settings: Settings, steps: int) -> Any:
    if kind.startswith("Adam"):
        return torch.optim.Adam(network.parameters(), **settings)
    given = {"weight_decay": 1 / settings["ess"], **settings}
    if kind == "IVON":
        return blr.IVON(network.parameters(), hess_init=0.1, beta2=0.999, steps=steps, **given)
    return blr.Vadam(network.parameters(), **given)


def learn(
    task: str, kind: str, settings: Settings, seeds: Sequence[int], steps: int
) -> pd.DataFrame:
    """Returns at the mean: a row for each evaluation and seed."""
    torch.set_num_threads(1)
    envs = [gymnasium.make(task) for _ in seeds]
    states = torch.tensor(np.stack([e.reset(seed=s)[0] for e, s in zip(envs, seeds, strict=True)]))
    actions = int(envs[0].action_space.n)  # type: ignore[attr-defined]
    network = QNetworks(seeds, states.shape[1], actions)
    target, acting = copy.deepcopy(network), copy.deepcopy(network)
    noise = [torch.zeros_like(p) for p in network.parameters()]
    optimizer = make_optimizer(kind, network, settings, steps)
    memory = Memory(len(seeds), steps, states.shape[1])
    generator = torch.Generator().manual_seed(seeds[0])
    torch.manual_seed(seeds[0])
    fresh, rows = torch.ones(len(seeds), dtype=torch.bool), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = td_loss(network, target, memory.batch(generator))
        loss.backward()
        return loss

    for step in range(1, steps + 1):
        with torch.no_grad():
            if fresh.any() and not kind.startswith("Adam"):
                with optimizer.sampled_params():
                    drawn = [p.clone() for p in network.parameters()]
                for kept, d, p in zip(noise, drawn, network.parameters(), strict=True):
                    kept[fresh] = (d - p)[fresh]
            for p, mean, gap in zip(acting.parameters(), network.parameters(), noise, strict=True):
                torch.add(mean, gap, out=p)
            chosen = acting(states[:, None]).squeeze(1).argmax(-1)
        if kind == "Adam, ε-greedy":
            epsilon = max(0.05, 1 - step / (0.2 * steps))
            random = torch.randint(actions, chosen.shape, generator=generator)
            chosen = torch.where(
                torch.rand(chosen.shape, generator=generator) < epsilon, random, chosen
            )
        found = [e.step(a) for e, a in zip(envs, chosen.tolist(), strict=True)]
        after = torch.tensor(np.stack([f[0] for f in found]))
        over = torch.tensor([f[2] for f in found])
        fresh = over | torch.tensor([f[3] for f in found])
        memory.add(states, chosen, torch.tensor([float(f[1]) for f in found]), after, ~over)
        states = after
        for i in fresh.nonzero().flatten().tolist():
            states[i] = torch.tensor(envs[i].reset()[0])
        if step > START:
            optimizer.step(closure)
            with torch.no_grad():
                for old, new in zip(target.parameters(), network.parameters(), strict=True):
                    old.lerp_(new, 0.01)
        if step % EVERY == 0:
            for seed, value in zip(seeds, returns(task, network, len(seeds), step), strict=True):
                rows.append((task, kind, seed, step, value))
    return pd.DataFrame(rows, columns=["task", "kind", "seed", "step", "return"])


@torch.no_grad()
def returns(task: str, network: nn.Module, seeds: int, step: int) -> list[float]:
    """Mean return of the greedy policy in three episodes of each seed."""
    envs = [[gymnasium.make(task) for _ in range(EPISODES)] for _ in range(seeds)]
    states = np.stack(
        [
            [e.reset(seed=10**6 + step + 7919 * i + j)[0] for j, e in enumerate(row)]
            for i, row in enumerate(envs)
        ]
    )
    total, going = np.zeros((seeds, EPISODES)), np.ones((seeds, EPISODES), dtype=bool)
    while going.any():
        chosen = network(torch.tensor(states)).argmax(-1).numpy()
        for i, j in zip(*going.nonzero(), strict=True):
            states[i, j], reward, over, cut, _ = envs[i][j].step(int(chosen[i, j]))
            total[i, j] += float(reward)
            going[i, j] = not (over or cut)
    return total.mean(1).tolist()


def chosen_before(task: str) -> dict[str, Settings]:
    """The settings of each kind in the table of results."""
    rows = pd.read_csv(RESULTS / "exploration.csv").query("task == @task")
    parts = {row.kind: str(row.settings).split(", ") for row in rows.itertuples()}
    return {k: {n: float(v) for n, v in map(str.split, given)} for k, given in parts.items()}


def compared(
    tasks: Sequence[str], kinds: Sequence[str], seeds: int, steps: int, workers: int = 1,
    settings_of: str | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Every evaluation of every kind at the settings that other seeds chose."""
    grid = {k: (v,) for k, v in chosen_before(settings_of).items()} if settings_of else GRID
    tried = [(task, kind, given) for task in tasks for kind in kinds for given in grid[kind]]
    best: dict[tuple[str, str], tuple[float, Settings]] = {}
    if settings_of:
        best, tried = {(task, kind): (0.0, given) for task, kind, given in tried}, []
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        runs = [pool.submit(learn, *trial, LOOK, steps) for trial in tried]
        for (task, kind, given), run in zip(tried, runs, strict=True):
            score = run.result()["return"].mean()
            if score > best.get((task, kind), (-math.inf, {}))[0]:
                best[task, kind] = (score, given)
        runs = [
            pool.submit(learn, *key, given, range(seeds), steps) for key, (_, given) in best.items()
        ]
        said = [", ".join(f"{k} {v:g}" for k, v in given.items()) for _, given in best.values()]
        return pd.concat(r.result().assign(settings=s) for r, s in zip(runs, said, strict=True))


def interval(values: pd.Series) -> float:
    """Half of Student's 95 % interval of the mean."""
    return float(stats.t.ppf(0.975, len(values) - 1) * values.sem())


def table(found: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds and their intervals: of all evaluations, and of the last three."""
    last = found[found["step"] > found.groupby("task")["step"].transform("max") - 3 * EVERY]
    keys, rows = ["task", "kind", "settings"], {}
    for name, part in (("all", found), ("last", last)):
        by_seed = part.groupby([*keys, "seed"], sort=False)["return"].mean()
        grouped = by_seed.groupby(level=keys, sort=False)
        rows[name], rows[f"± {name}"] = grouped.mean(), grouped.agg(interval)
    return pd.DataFrame(rows).round(1).reset_index()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--kinds", nargs="+", default=list(GRID), choices=list(GRID))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--settings-of", choices=TASKS)
    args = parser.parse_args()
    given = (args.tasks, args.kinds, args.seeds, args.steps, args.workers, args.settings_of)
    found = compared(*given)
    shown = table(found)
    print(f"| {' | '.join(shown.columns)} |\n|{'---|' * len(shown.columns)}")
    for row in shown.itertuples(index=False):
        print("|", " | ".join(map(str, row)), "|")
    if args.out:
        found.to_csv(args.out, index=False)


if __name__ == "__main__":
    main()
