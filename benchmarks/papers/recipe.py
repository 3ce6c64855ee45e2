"""Does IVON by the docs train as well as AdamW? Three rates each, the same data, the same order.

    python -m benchmarks.papers.recipe [--small] [--case digits clothes letters llama]

From fresh weights IVON tries 0.1, 0.3 and 1 (``hess_init=1``), AdamW 0.001, 0.003 and 0.01;
fine-tuned the same (``hess_init="weights"``). All other settings are the docs'; every rate falls to
0 as a cosine. Test loss in nats, of AdamW at its weights, of IVON at the mean and averaged over ten
draws; the cases were not used to find the rates.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import blr_analysis as blr
from benchmarks.cases import mlp
from benchmarks.merging.texts import LETTERS, passages
from benchmarks.papers import clothes

DRAWS = 10
RATES = {"AdamW": (0.001, 0.003, 0.01), "IVON": (0.1, 0.3, 1.0)}
Data = tuple[Tensor, Tensor]
Case = tuple[Callable[[], nn.Module], Data, Data, int, int]


class Letters(nn.Module):
    """A language model of characters: one LSTM."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 24)
        self.lstm = nn.LSTM(24, 64, batch_first=True)
        self.output = nn.Linear(64, characters)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.lstm(self.embedding(x))[0])


class Llama(nn.Module):
    """Logits of a small Llama."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=characters, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                num_attention_heads=4, max_position_embeddings=64,
            )
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def mlp_of_digits() -> nn.Module:
    return mlp(64, 48, 24, 10)


def mlp_of_images() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def digits(small: bool) -> Case:
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x = ((x - 4.9) / 6).float()[order]
    y = y[order]
    return mlp_of_digits, (x[:1000], y[:1000]), (x[1000:], y[1000:]), 2 if small else 25, 50


def images(small: bool) -> Case:
    x, y, x_test, y_test = clothes(200 if small else 2000)
    return mlp_of_images, (x, y), (x_test[:4000], y_test[:4000]), 2 if small else 25, 50


def rows(sort: str, part: slice) -> Data:
    """Letters of passages, and the next letters."""
    ids = passages(sort)[part]
    return ids[:, :-1], ids[:, 1:]


def letters(small: bool) -> Case:
    train_part = slice(64 if small else 800)
    test = rows("films", slice(-600, None))
    return partial(Letters, len(LETTERS)), rows("films", train_part), test, 2 if small else 12, 32


def llama(small: bool) -> Case:
    """Fine-tuned to editorials after films."""
    torch.manual_seed(0)
    base = Llama(len(LETTERS))
    films = rows("films", slice(64 if small else 1500))
    train(base, "AdamW", 0.003, films, 2 if small else 5, 32, tuned=False)
    train_part = slice(32 if small else 400)
    test = rows("editorials", slice(-600, None))
    made = partial(copy.deepcopy, base)
    return made, rows("editorials", train_part), test, 2 if small else 10, 16


CASES = {"digits": digits, "clothes": images, "letters": letters, "llama": llama}


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, -2), y.flatten())


def train(
    model: nn.Module, kind: str, lr: float, data: Data, epochs: int, batch: int,
    tuned: bool,
) -> Any:  # fmt: skip
    """The optimizer, after a training with a rate that falls to 0 as a cosine."""
    x, y = data
    steps = epochs * math.ceil(len(x) / batch)
    if kind == "AdamW":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=lr)
    else:
        ess = y.numel()
        start: Any = "weights" if tuned else 1.0
        optimizer = blr.IVON(
            model.parameters(), lr=lr, ess=ess, weight_decay=1 / ess, steps=steps, hess_init=start
        )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x), generator=generator).split(batch):
            with optimizer.sampled_params(train=True) if kind == "IVON" else nullcontext():
                optimizer.zero_grad()
                loss_of(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
            schedule.step()
    return optimizer


@torch.no_grad()
def averaged_loss(model: nn.Module, optimizer: Any, data: Data, draws: int) -> float:
    """Of probabilities averaged over draws; of 0 draws at the weights."""
    x, y = data
    total = torch.zeros(())
    for _ in range(max(draws, 1)):
        with optimizer.sampled_params() if draws else nullcontext():
            total = total + model(x).softmax(-1) / max(draws, 1)
    return float(-total.gather(-1, y.unsqueeze(-1)).clamp_min(1e-30).log().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="little data, two epochs")
    parser.add_argument("--case", nargs="+", choices=CASES, default=[*CASES])
    args = parser.parse_args()
    print("| case | optimizer | rate | at the weights | ten draws |\n|---|---|---|---|---|")
    for case in args.case:
        make, data, test, epochs, batch = CASES[case](args.small)
        tuned = case == "llama"
        for kind, rates in RATES.items():
            for rate in rates:
                torch.manual_seed(0)
                model = make()
                optimizer = train(model, kind, rate, data, epochs, batch, tuned)
                losses = [f"{averaged_loss(model, optimizer, test, 0):.3f}", ""]
                if kind == "IVON":
                    losses[1] = f"{averaged_loss(model, optimizer, test, DRAWS):.3f}"
                print(f"| {case} | {kind} | {rate:g} | {' | '.join(losses)} |", flush=True)


if __name__ == "__main__":
    main()
