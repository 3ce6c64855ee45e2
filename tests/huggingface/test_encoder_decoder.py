"""T5: a decoder that answers an encoder, read by ``blr.Task(model, rows, likelihood="tokens")``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import randomised, seeded
from oracles import relative
from torch import Tensor

import blr_analysis as blr

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
N = 5


def task_of(*, columns: tuple[str, ...] = ("input_ids", "labels")) -> blr.Task:
    """Questions of 2 to 6 tokens, answers of 1 to 3."""
    config = transformers.T5Config(**SIZES, decoder_start_token_id=0, dropout_rate=0.0)
    with seeded(0):
        model: Any = randomised(transformers.T5ForConditionalGeneration(config)).double().eval()
    source = torch.Generator().manual_seed(0)
    rows = []
    for number in range(N):
        question = torch.randint(2, 16, (2 + number,), generator=source)
        answer = torch.randint(2, 16, (1 + number % 3,), generator=source)
        row = {"input_ids": question, "labels": answer}
        rows.append({name: row[name].tolist() for name in columns})
    return blr.Task(model, rows, likelihood="tokens", batch_size=2)


def loss_alone(task: blr.Task, number: int) -> Tensor:
    """By transformers, of one unpadded row, summed over the tokens of its answer."""
    row = task.dataset[number]
    labels = torch.as_tensor(row["labels"]).unsqueeze(0)
    ids = torch.as_tensor(row["input_ids"]).unsqueeze(0)
    return task.model(input_ids=ids, labels=labels).loss * labels.numel()


def test_losses_and_squared_gradients_are_transformers() -> None:
    """The rows are padded to batches here, and alone there."""
    task = task_of()
    settings: dict[str, Any] = {"curvature": "empirical_fisher", "prior_precision": 1.0}
    q = blr.fit_laplace(task, structure="diag", **settings)
    scores = blr.sensitivity(task, q)
    trained = dict(task.model.named_parameters())
    sums = {name: torch.ones_like(p) for name, p in trained.items()}
    losses = []
    for number in range(N):
        loss = loss_alone(task, number)
        losses.append(loss.detach())
        gradients = torch.autograd.grad(loss, list(trained.values()))
        for name, gradient in zip(trained, gradients, strict=True):
            sums[name] += gradient.square()
    assert relative(scores.losses, torch.stack(losses)) < 1e-6
    for name, expected in sums.items():
        assert relative(q.precision(name), expected) < 1e-5, name
