"""Does IVON by the docs train as well as AdamW? Three rates each, the same data, the same order.

    python -m benchmarks.papers.recipe [--small] [--seeds 1] [--case digits clothes ...]

Both try the rates 0.001, 0.003 and 0.01 (fine-tuned: a tenth of these), and the one with the least
loss on validation data is taken; every rate falls to 0 as a cosine. All other settings are the
docs'. From fresh weights: scikit-learn's digits (1,000, an MLP, 25 epochs), Fashion-MNIST (2,000,
an MLP, 25 epochs; 55,000, the same MLP, 5 epochs), an LSTM of characters (800 passages, 12 epochs).
Fine-tuned: a small Llama of characters (400 passages, 10 epochs), MiniLM's last layer to the
sentiment of 400 sentences (3 epochs). Test loss in nats, of AdamW at its weights, of IVON averaged
over ten draws.
"""

from __future__ import annotations

import argparse
import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import blr_analysis as blr
from benchmarks.recipe_cases import CASES, Case, Data

DRAWS = 10
ROWS = 500  # at a time, where nothing is trained


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, -2), y.flatten())


def optimizer_of(kind: str, model: nn.Module, lr: float, case: Case, steps: int) -> Any:
    if kind == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=lr)
    n_terms = case.train[1].numel()
    return blr.IVON(
        model.parameters(),
        lr=lr,
        rescale_lr="gradient",
        ess=n_terms,
        weight_decay=1 / n_terms,
        steps=steps,
        hess_init=case.hess_init,
    )


def trained(kind: str, lr: float, case: Case, seed: int) -> tuple[nn.Module, Any]:
    """The network and its optimizer, after a training with a rate that falls to 0 as a cosine."""
    torch.manual_seed(seed)
    model = case.network()
    x, y = case.train
    steps = case.epochs * math.ceil(len(x) / case.batch)
    optimizer = optimizer_of(kind, model, lr, case, steps)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(case.epochs):
        for rows in torch.randperm(len(x), generator=generator).split(case.batch):
            with optimizer.sampled_params(train=True) if kind == "IVON" else nullcontext():
                optimizer.zero_grad()
                loss_of(model(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    return model.eval(), optimizer


@torch.no_grad()
def averaged_loss(model: nn.Module, optimizer: Any, data: Data, draws: int) -> float:
    """Of probabilities averaged over draws; of 0 draws at the weights."""
    x, y = data
    total = torch.zeros(())
    for _ in range(max(draws, 1)):
        with optimizer.sampled_params() if draws else nullcontext():
            outputs = torch.cat([model(part) for part in x.split(ROWS)])
            total = total + outputs.softmax(-1) / max(draws, 1)
    return float(-total.gather(-1, y.unsqueeze(-1)).clamp_min(1e-30).log().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="little data, one or two epochs")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--case", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--optimizer", nargs="+", default=["AdamW", "IVON"])
    args = parser.parse_args()
    print("| case, seed | optimizer | rate | validation | test | ten draws |\n|" + "---|" * 6)
    for name in args.case:
        case = CASES[name](args.small)
        for seed in range(args.seeds):
            for kind in args.optimizer:
                compare(f"{name}, {seed}", kind, case, seed)


def compare(title: str, kind: str, case: Case, seed: int) -> None:
    """A row for each rate, and the chosen one in bold."""
    rows = {}
    for rate in case.rates:
        model, optimizer = trained(kind, rate, case, seed)
        losses = [averaged_loss(model, optimizer, data, 0) for data in (case.validation, case.test)]
        if kind == "IVON":
            losses.append(averaged_loss(model, optimizer, case.test, DRAWS))
        rows[rate] = losses
        cells = " | ".join(f"{loss:.3f}" for loss in losses)
        print(f"| {title} | {kind} | {rate:g} | {cells} |", flush=True)
    best = min(rows, key=lambda rate: rows[rate][0])
    print(f"| **{title}** | {kind} | **{best:g}** | | | **{rows[best][-1]:.3f}** |", flush=True)


if __name__ == "__main__":
    main()
