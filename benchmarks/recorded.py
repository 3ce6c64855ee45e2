"""What recording Kronecker factors in a training costs, and what it leaves behind is good for.

    python -m benchmarks.recorded cost     trainings with and without, of four networks
    python -m benchmarks.recorded merge    four turned digits tasks, three seeds
    python -m benchmarks.recorded llama    influence and an index of small Llamas

The cost is that of a training of 1,000 steps with ``blr.Checkpoints(structure="kron")``, in seconds
of the processor, beside the same training without, step by step in turn; and the part of it that is
in ``checkpoints.step()``. The merge is of four fine-tunes of one base, by the posteriors that were
recorded, beside fitted ones; the mean accuracy in per cent on held-out images of the four tasks;
"undamped" is the formula alone, ``method="gradient_matching"``.
The Llamas learn sequences of numbers. Their rank correlation is that of recorded with fitted
influence; passes are calls of the model.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import blr_analysis as blr
from benchmarks.agreement.metrics import spearman
from benchmarks.field.cases import mlp
from blr_analysis import Index

BATCH = 32
STEPS = 1000
TASKS = 4
TRAINED = 250  # examples of a task
BASE = 400
VOCABULARY = 40
LENGTH = 12  # of a sequence
SEQUENCES = 160
ASKED = 24  # sequences

State = dict[str, Tensor]


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 49, 10)),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "64-64-10": (lambda: mlp(64, 64, 10), (64,)),
    "784-64-10": (lambda: mlp(784, 64, 10), (784,)),
    "784-512-512-10": (lambda: mlp(784, 512, 512, 10), (784,)),
    "two convolutions, 28 x 28": (convolutions, (1, 28, 28)),
}


def timed_steps(name: str, is_recorded: bool) -> Iterator[tuple[float, float, int]]:
    """The steps of a training by AdamW: the seconds of the processor in each and in
    ``checkpoints.step()``, and the passes that were recorded so far."""
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(BATCH, *shape)
    y = torch.randint(10, (BATCH,))
    checkpoints = blr.Checkpoints(model, steps=STEPS, structure="kron") if is_recorded else None
    for step in range(1, STEPS + 1):
        start = time.process_time()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        middle = time.process_time()
        n_recorded = 0
        if checkpoints is not None:
            checkpoints.step()
            if step == STEPS:
                assert checkpoints.recordings is not None
                n_recorded = checkpoints.recordings.recorder.recorded
        yield middle - start, time.process_time() - middle, n_recorded


def cost() -> None:
    """Print what recording a training costs, for every network."""
    for name in NETWORKS:
        plain = 0.0
        watched = 0.0
        of_checkpoints = 0.0
        n_recorded = 0
        trainings = zip(timed_steps(name, False), timed_steps(name, True), strict=True)
        for without, with_record in trainings:
            plain += without[0]
            watched += with_record[0]
            of_checkpoints += with_record[1]
            n_recorded = with_record[2]
        print(
            f"{name}: {1e3 * plain / STEPS:.2f} ms a step, "
            f"+{(watched + of_checkpoints) / plain - 1:.1%}, of which checkpoints.step() "
            f"{of_checkpoints / plain:.1%}; {n_recorded} of {STEPS} passes recorded",
            flush=True,
        )


def turned(x: Tensor, quarters: int) -> Tensor:
    return x.view(-1, 8, 8).rot90(quarters, (1, 2)).reshape(-1, 64)


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    epochs: int,
    lr: float,
    checkpoints: blr.Checkpoints | None = None,
) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-2)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            if checkpoints is not None:
                checkpoints.step()
    return model.eval()


def accuracy(state: State, x: Tensor, y: Tensor) -> float:
    """The mean over the tasks, in per cent."""
    model = mlp(64, 64, 10)
    model.load_state_dict(state)
    hits = [(model(turned(x, k)).argmax(1) == y).float().mean() for k in range(TASKS)]
    return 100 * float(torch.stack(hits).mean())


def merges(seed: int) -> dict[str, float]:
    """Accuracies of one base's fine-tunes, merged."""
    torch.manual_seed(seed)
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(77))
    x = ((x[order] - 4.9) / 6).float()
    y = y[order]
    base = train(mlp(64, 64, 10), x[:BASE], y[:BASE], 15, 2e-3)
    first = base.state_dict()
    states: list[State] = []
    precisions: dict[str, list[blr.Posterior]] = {"recorded": [], "gram": [], "kron": []}
    for k in range(TASKS):
        own = slice(BASE + k * TRAINED, BASE + (k + 1) * TRAINED)
        data = (turned(x[own], k), y[own])
        model = copy.deepcopy(base)
        steps = 12 * -(-TRAINED // BATCH)
        checkpoints = blr.Checkpoints(model, steps=steps, structure="kron")
        train(model, *data, 12, 3e-3, checkpoints)
        task = blr.Task(model, data, progress=False)
        precisions["recorded"].append(checkpoints.posterior(n_data=TRAINED, initial=first))
        precisions["gram"].append(blr.fit_laplace(task, structure="gram"))
        precisions["kron"].append(blr.fit_laplace(task, initial=first))
        states.append(model.state_dict())
    held = slice(BASE + TASKS * TRAINED, None)
    average = {n: torch.stack([state[n] for state in states]).mean(0) for n in first}
    found = {"average": accuracy(average, x[held], y[held])}
    for name, posteriors in precisions.items():
        for method in ("gradient_matching", None):
            merged = dict(blr.merge(first, states, precisions=posteriors, method=method))
            key = name if method is None else f"{name} undamped"
            found[key] = accuracy(merged, x[held], y[held])
    return found


def merge() -> None:
    """Print the accuracies of three seeds, and their mean."""
    rows = [merges(seed) for seed in range(3)]
    for row in [*rows, {name: statistics.mean(r[name] for r in rows) for name in rows[0]}]:
        print(", ".join(f"{name} {value:.1f}" for name, value in row.items()))


def sequences(n: int, seed: int) -> Tensor:
    """Numbers that rise by one stride a sequence, a tenth of them at random, ``[n, LENGTH]``."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY, (n, 1), generator=generator)
    stride = torch.randint(1, 6, (n, 1), generator=generator)
    ids = (start + stride * torch.arange(LENGTH)) % VOCABULARY
    others = torch.randint(VOCABULARY, ids.shape, generator=generator)
    return torch.where(torch.rand(ids.shape, generator=generator) < 0.1, others, ids)


def trained_llama(is_tied: bool, ids: Tensor) -> tuple[nn.Module, blr.Checkpoints]:
    """A Llama of 25,000 weights, all of them trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=is_tied,
        )
    ).train()
    epochs = 25
    batch = 16
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    checkpoints = blr.Checkpoints(model, steps=epochs * SEQUENCES // batch, structure="kron")
    for _ in range(epochs):
        for chosen in torch.randperm(SEQUENCES).split(batch):
            optimizer.zero_grad()
            model(input_ids=ids[chosen], labels=ids[chosen]).loss.backward()
            optimizer.step()
            checkpoints.step()
    return model.eval(), checkpoints


def llama() -> None:
    """Print the agreement of recorded and fitted influence, and the passes of an index."""
    for is_tied in (False, True):
        ids = sequences(SEQUENCES, 1)
        model, checkpoints = trained_llama(is_tied, ids)
        n_passes = 0

        def count(*_: Any) -> None:
            nonlocal n_passes
            n_passes += 1

        model.register_forward_pre_hook(count)
        recorded = checkpoints.posterior(n_data=SEQUENCES)
        of_posterior = n_passes
        task = text_task(model, ids, checkpoints=checkpoints)
        with tempfile.TemporaryDirectory() as folder:
            Index.build(task, recorded, Path(folder) / "index")
        of_index = n_passes - of_posterior
        fitted = blr.fit_laplace(task)
        of_fit = n_passes - of_posterior - of_index
        test = text_task(model, sequences(ASKED, 2))
        by_record = blr.influence(task, recorded, test).as_subclass(Tensor)
        by_fit = blr.influence(task, fitted, test).as_subclass(Tensor)
        ranks = spearman(by_record, by_fit)  # of every test sequence
        print(
            f"{'tied' if is_tied else 'untied'} Llama: rank correlation with fitted influence "
            f"{float(ranks.mean()):.3f}; passes of the posterior {of_posterior}, of an index by "
            f"it {of_index}, of a fit {of_fit}; {len(recorded.mean)} of "
            f"{len([*model.parameters()])} parameters",
            flush=True,
        )


def text_task(model: nn.Module, ids: Tensor, **about: Any) -> blr.Task:
    texts = [{"input_ids": row, "labels": row} for row in ids]
    return blr.Task(model, texts, likelihood="causal_lm", progress=False, batch_size=32, **about)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Recorded factors")
    parser.add_argument("what", choices=("cost", "merge", "llama"))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    {"cost": cost, "merge": merge, "llama": llama}[parser.parse_args().what]()
