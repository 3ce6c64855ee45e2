"""Does `Monitor` see a network overfit, without test data?

    python -m benchmarks.overfitting [--seeds 2] [--epochs 40]

scikit-learn's digits, 500 to train on, a fifth of their labels wrong; 64-128-10, trained by SGD
with momentum, AdamW and IVON. The test loss is that on 1,297 others, expected over labels that are
wrong as often (in brackets: with right labels). Printed are Pearson's r with that test loss over
all epochs, and the best epoch, by the left-out loss and by the training loss.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import blr_analysis as blr
from benchmarks.agreement.metrics import pearson

N = 500
WRONG = 0.2
CLASSES = 10
BATCH = 32


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, targets = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    x = ((torch.tensor(images) - 4.9) / 6).float()[order]
    y = torch.tensor(targets)[order]
    labels = y[:N].clone()
    wrong = torch.randperm(N, generator=generator)[: round(WRONG * N)]
    shift = torch.randint(1, CLASSES, wrong.shape, generator=generator)
    labels[wrong] = (labels[wrong] + shift) % CLASSES
    return x[:N], labels, x[N:], y[N:]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2),
    "IVON": lambda model: blr.IVON(model.parameters(), lr=0.2, ess=N, weight_decay=1 / N),
}


def epoch_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    for batch in torch.randperm(N).split(BATCH):

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


def test_losses(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Expected over wrong labels, and of right ones."""
    with torch.no_grad():
        losses = -model(x).log_softmax(1)
    right = losses.gather(1, y[:, None]).squeeze(1)
    wrong = (losses.sum(1) - right) / (CLASSES - 1)
    return float(((1 - WRONG) * right + WRONG * wrong).mean()), float(right.mean())


def watched(name: str, seed: int, epochs: int) -> dict[str, list[float]]:
    """The losses of every epoch."""
    x, y, test_x, test_y = digits(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    optimizer = OPTIMIZERS[name](model)
    monitor = blr.Monitor(blr.Task(model, (x, y), progress=False))
    expected: list[float] = []
    right: list[float] = []
    for epoch in range(1, epochs + 1):
        epoch_of(model, optimizer, x, y)
        monitor(None, epoch)
        losses = test_losses(model, test_x, test_y)
        expected.append(losses[0])
        right.append(losses[1])
    table = monitor.table
    return {
        "left out": table.loo_nll.tolist(),
        "training": table.train_nll.tolist(),
        "test": expected,
        "right": right,
    }


def correlation(a: list[float], b: list[float]) -> float:
    return float(pearson(torch.tensor(a), torch.tensor(b)))


def best(losses: list[float]) -> int:
    return 1 + losses.index(min(losses))


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.overfitting", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(
        "| optimizer, seed | r left out | training loss | best epoch: test | left out | training |"
    )
    for name in OPTIMIZERS:
        for seed in range(options.seeds):
            found = watched(name, seed, options.epochs)
            cells = [f"{name}, {seed}"]
            for way in ("left out", "training"):
                r = correlation(found[way], found["test"])
                cells.append(f"{r:.3f} ({correlation(found[way], found['right']):.3f})")
            cells.append(f"{best(found['test'])} ({best(found['right'])})")
            cells += [str(best(found[way])) for way in ("left out", "training")]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
