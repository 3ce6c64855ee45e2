"""Figures for a Trainer's evaluation: the perplexity, and the loss of averaged predictions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import positive_int
from blr_analysis.errors import InputError
from blr_analysis.huggingface.chats import IGNORED

# Losses that are a mean over tokens, and the first label of a row that counts.
BY_TOKEN = {"ForCausalLM": 1, "ForMaskedLM": 0, "ForTokenClassification": 0}
# Losses of one label for each example.
OF_CLASSES = ("ForSequenceClassification", "ForImageClassification")


def perplexity(loss: float) -> float:
    """exp of a mean loss per token; inf where it exceeds the largest float.

    >>> perplexity(0.0), perplexity(1e6)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def averaged_loss(
    model: nn.Module,
    batches: Iterable[Any],
    draw: Any,
    draws: int,
) -> float:
    """The mean loss of predictions that are averaged over weights drawn from the posterior,

        −1/M_b Σ_m log 1/K Σ_k p(y_m | x_m, θ_k),   θ_k ~ q

    over the M_b labels of a batch that count, in nats, and averaged over the batches as the
    Trainer averages ``eval_loss``: each counts as often as it has examples.

    Args:
        batches: read once for every draw.
        draw: a function that opens a context with drawn weights.
        draws: K.

    Raises:
        InputError: the model's answers are no classes or tokens.
    """
    totals: list[Tensor] = []
    sizes: list[int] = []
    for k in range(positive_int("draws", draws)):
        context: AbstractContextManager[Any] = draw()
        with context, torch.no_grad():
            for place, batch in enumerate(batches):
                likelihoods = log_probabilities(model, batch)
                if k == 0:
                    totals.append(likelihoods)
                    sizes.append(len(batch["labels"]))
                else:
                    totals[place] = torch.logaddexp(totals[place], likelihoods)
    losses = [math.log(draws) - float(total.mean()) for total in totals]
    weighted = sum(size * loss for size, loss in zip(sizes, losses, strict=True))
    return weighted / sum(sizes)


def log_probabilities(model: nn.Module, batch: Any) -> Tensor:
    """log p of every label that counts in a batch, in one row, in float64 on the CPU."""
    loss_type = getattr(model, "loss_type", "")
    inputs = {name: column for name, column in batch.items() if name != "labels"}
    labels = batch["labels"]
    is_known = loss_type in BY_TOKEN or (loss_type in OF_CLASSES and labels.ndim == 1)
    if not is_known or labels.is_floating_point():
        raise InputError(f"draws= averages predictions of classes or tokens, not of {loss_type}")
    logits = model(**inputs).logits
    if loss_type == "ForCausalLM":
        logits = logits[:, :-1]
    if loss_type in BY_TOKEN:
        labels = labels[:, BY_TOKEN[loss_type] :]
    counts = labels != IGNORED
    chosen = logits[counts].double().log_softmax(-1)
    return chosen.gather(-1, labels[counts].unsqueeze(-1)).squeeze(-1).cpu()
