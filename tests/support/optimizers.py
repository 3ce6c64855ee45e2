"""The rows of Table 1 that train networks, each with a generator of its own; what they leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.learning_rule import optim
from blr_analysis.learning_rule.optim import Dropout, RowOptimizer

Make = Callable[[nn.Module, int, torch.Generator], Any]


def _of(kind: Any, **options: Any) -> Make:
    return lambda m, n, g: kind(m.parameters(), ess=n, generator=g, **{"lr": 0.05, **options})


def _by_example(kind: Any) -> Make:
    return lambda m, n, g: kind(m.parameters(), lr=0.05, ess=n, model=m, generator=g)


def _row(name: str) -> Make:
    return lambda m, n, g: RowOptimizer(m.parameters(), name, lr=0.01)


def _dropout(model: nn.Module, n: int, generator: torch.Generator) -> Any:
    matrices, vectors = (
        [p for p in model.parameters() if (p.ndim > 1) == is_so] for is_so in (1, 0)
    )
    groups = [{"params": matrices, "keep": 0.8}, {"params": vectors}]
    return Dropout(groups, lr=0.05, generator=generator)


ROWS: dict[str, Make] = {
    "IVON": _of(blr.IVON, beta2=0.9),
    "VOGN": _by_example(blr.VOGN),
    "OGN": _by_example(optim.OGN),
    "Vadam": _of(optim.Vadam),
    "Vprop": _of(optim.Vprop),
    "BSAM": _of(optim.BSAM),
    "BayesBiNN": _of(optim.BayesBiNN, lr=1e-3),
    "Dropout": _dropout,
    "STE": lambda m, n, g: optim.STE(m.parameters(), lr=1e-3),
    "SGD": _row("SGD"),
    "RMSprop": _row("RMSprop"),
    "AdamW": _row("AdamW"),
}


def make(row: str, model: nn.Module, n: int) -> Any:
    """One of them over all of a model's parameters; "torch" is torch's own AdamW."""
    if row == "torch":
        return torch.optim.AdamW(model.parameters())
    return ROWS[row](model, n, torch.Generator().manual_seed(3))


def float16_on_a_cpu(accelerator: Any, monkeypatch: Any) -> Any:
    """Autocast to float16 and a scaled loss, which accelerate sets up for GPUs only; the scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=3)
    monkeypatch.setattr(accelerator.state, "_mixed_precision", "fp16")
    monkeypatch.setattr(accelerator, "native_amp", True)
    monkeypatch.setattr(accelerator, "scaler", scaler)
    return scaler


def values(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [p.detach().clone() for p in model.parameters()]


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    """The largest difference of two lists of tensors."""
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))
