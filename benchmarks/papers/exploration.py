"""Noise in the parameters as exploration: deep Q-learning on gymnasium's CartPole.

    python -m benchmarks.papers.exploration [--small]

Khan et al., "Fast and scalable Bayesian deep learning by weight-perturbation in Adam", ICML 2018.
Vadam and IVON act greedily by weights drawn from their posterior, one draw an episode. Printed:
returns at the mean, of all evaluations and the last three, ± standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.papers import averaged, train
from blr_analysis.learning_rule.optim import Vadam

TASK = "CartPole-v1"
BATCH = 64
START = 500
EVERY = 1000
DISCOUNT = 0.99
IVON: dict[str, Any] = {"ess": 1e4, "weight_decay": 1e-4, "hess_init": 0.1, "beta2": 0.999}
KINDS: dict[str, Any] = {
    "Adam, ε-greedy": lambda weights, steps: torch.optim.Adam(weights, lr=1e-3),
    "Vadam": lambda weights, steps: Vadam(weights, lr=1e-3, ess=1e6, weight_decay=1e-6),
    "IVON": lambda weights, steps: blr.IVON(weights, lr=0.03, steps=steps, **IVON),
}


def td_loss(model: nn.Module, target: nn.Module, seen: list[tuple[Tensor, ...]]) -> Tensor:
    """One network chooses actions, the other values them."""
    state, action, reward, after, goes_on = map(torch.stack, zip(*seen, strict=True))
    with torch.no_grad():
        best = model(after).argmax(-1, keepdim=True)
        wanted = reward + DISCOUNT * goes_on * target(after).gather(-1, best).squeeze(-1)
    return F.smooth_l1_loss(model(state).gather(-1, action[:, None]).squeeze(-1), wanted)


def played(model: nn.Module, seed: int) -> float:
    """Mean length, which is the return, of three greedy episodes."""
    env = gymnasium.make(TASK)
    steps = 0
    for episode in range(3):
        state = env.reset(seed=10**6 + seed + episode)[0]
        over = False
        while not over:
            state, _, ended, cut, _ = env.step(int(model(torch.as_tensor(state)).argmax()))
            steps = steps + 1
            over = ended or cut
    return steps / 3


def learn(kind: str, seed: int, steps: int) -> list[float]:
    """The returns at the mean, every thousandth step."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    env = gymnasium.make(TASK)
    state = torch.as_tensor(env.reset(seed=seed)[0])
    found = []
    layers = nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    model = nn.Sequential(*layers)
    target = copy.deepcopy(model)
    acting = copy.deepcopy(model)
    optimizer = KINDS[kind](model.parameters(), steps)
    memory = []
    fresh = True
    noise = [torch.zeros_like(p) for p in model.parameters()]
    by_chance = kind.startswith("Adam")
    for step in range(1, steps + 1):
        with torch.no_grad():
            if fresh and not by_chance:
                mean = [p.clone() for p in model.parameters()]
                with optimizer.sampled_params():
                    noise = [p - m for p, m in zip(model.parameters(), mean, strict=True)]
            for p, m, gap in zip(acting.parameters(), model.parameters(), noise, strict=True):
                p.copy_(m + gap)
            action = int(acting(state).argmax())
        if by_chance and random.random() < max(0.05, 1 - 5 * step / steps):
            action = int(random.integers(2))
        after, reward, ended, cut, _ = env.step(action)
        told = (state, action, float(reward), after, float(not ended))
        fresh = ended or cut
        memory.append(tuple(map(torch.as_tensor, told)))
        state = torch.as_tensor(env.reset()[0] if fresh else after)
        if step > START:
            loss = lambda i: td_loss(model, target, [memory[k] for k in i])  # noqa: E731
            train(optimizer, loss, step, 1, BATCH, seed=step)
            with torch.no_grad():
                for old, new in zip(target.parameters(), model.parameters(), strict=True):
                    old.lerp_(new, 0.01)
        if step % EVERY == 0:
            found.append(played(model, step))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="2,000 steps, one seed")
    steps, seeds = (2000, 1) if parser.parse_args().small else (10_000, 3)
    torch.set_num_threads(1)
    for kind in KINDS:
        runs = np.array([learn(kind, s, steps) for s in range(seeds)])
        rows = [{"all": r.mean(), "last": r[-3:].mean()} for r in runs]
        print(f"| {kind} | {averaged(rows)} |", flush=True)


if __name__ == "__main__":
    main()
