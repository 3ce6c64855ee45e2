"""What is trained, on what, and how: an ordinary loop; a case is one row of :data:`CASES`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import blr_analysis as blr
from benchmarks.merging import sentiment_data
from benchmarks.peers.problem import build
from benchmarks.truth import sources, tables
from benchmarks.truth.recipes import CASES as CONVERGED


class Data(NamedTuple):
    """Inputs and targets in float32, to train on and held out, and what is taken out together."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    groups: Tensor


def fashion() -> Data:
    """2,000 + 1,000 images of Fashion-MNIST, flat."""
    return _by_class(sources.fashion(CONVERGED["fashion_mlp"]))


def fashion_images() -> Data:
    """1,000 + 1,000 of them, as images."""
    return _by_class(sources.fashion_images(CONVERGED["fashion_lenet"]))


def digits() -> Data:
    """1,000 + 797 of scikit-learn's digits, flat, 0 … 1."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    x, y = torch.tensor(pixels[order] / 16), torch.tensor(labels[order])
    return _by_class(sources.Split(x[:1000], y[:1000], x[1000:], y[1000:]))


def digit_images() -> Data:
    """The same as images."""
    flat = digits()
    return flat._replace(x=flat.x.view(-1, 1, 8, 8), test_x=flat.test_x.view(-1, 1, 8, 8))


def breast_cancer() -> Data:
    """A table of two classes; the groups are sextiles of its first column, the mean radius."""
    split = sources.breast_cancer(CONVERGED["breast_cancer"])
    table = _by_class(split._replace(y=split.y.long(), y_test=split.y_test.long()))
    rank = table.x[:, 0].argsort().argsort()
    return table._replace(groups=rank * 6 // len(rank))


def concrete() -> Data:
    """A regression; the groups are six ages of concrete."""
    split = sources.concrete(CONVERGED["concrete"])
    age = torch.unique(split.x[:, 7], return_inverse=True)[1]
    x, y, test_x, test_y = (t.float() for t in split)
    return Data(x, y[:, None], test_x, test_y[:, None], age.clamp(1, 6) - 1)


def sentiment() -> Data:
    """300 + 150 texts of each of six domains, positive or negative, as frozen MiniLM features."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    splits = [sentiment_data.split(d, 0, 300, 0, 150) for d in sentiment_data.DOMAINS]
    for texts in ([s.train for s in splits], [s.test for s in splits]):
        flat = [(text, domain) for domain, some in enumerate(texts) for text in some]
        features = tables.features([text.text for text, _ in flat])
        labels = torch.tensor([int(text.positive) for text, _ in flat])
        parts.append((features, labels, torch.tensor([domain for _, domain in flat])))
    (x, y, domains), (test_x, test_y, _) = parts
    mean, scale = x.mean(0), x.std(0)
    x, test_x = (x - mean) / scale, (test_x - mean) / scale
    return Data(x.float(), y, test_x.float(), test_y, domains)


def _by_class(split: sources.Split) -> Data:
    return Data(split.x.float(), split.y, split.x_test.float(), split.y_test, split.y)


@dataclass(frozen=True)
class Case:
    """One recipe.

    Attributes:
        data: where they come from.
        network: as :func:`benchmarks.peers.problem.build` takes it.
        optimizer: "adamw", "ivon" or "sgd" (momentum 0.9).
        cosine: whether the learning rate falls to 0; else it stays.
        hess_init: of IVON, whose β₂ is 0.999.
        class_weights, smoothing: of the cross-entropy; targets that are no labels: squared error.
    """

    data: Callable[[], Data]
    network: dict[str, Any]
    optimizer: str
    lr: float
    weight_decay: float
    epochs: int
    batch: int = 50
    cosine: bool = False
    hess_init: float = 0.5
    class_weights: tuple[float, ...] = ()
    smoothing: float = 0.0

    def loss(self) -> nn.Module:
        """What is trained, and what the package is told."""
        if self.data is concrete:
            return nn.MSELoss()
        weight = torch.tensor(self.class_weights) if self.class_weights else None
        return nn.CrossEntropyLoss(weight, label_smoothing=self.smoothing)


def mlp(*widths: int) -> dict[str, Any]:
    return {"kind": "mlp", "widths": widths, "activation": "relu"}


FASHION = (fashion, mlp(784, 64, 10))
DIGITS = (digits, mlp(64, 32, 10))
CONVNET = (digit_images, {"kind": "convnet"})
CASES = {
    "digits convnet, AdamW": Case(*CONVNET, "adamw", 3e-3, 1e-2, 25),
    "digits convnet, IVON": Case(*CONVNET, "ivon", 0.3, 1e-3, 40, 100, True, 0.12),
    "table, class weights": Case(
        *(breast_cancer, mlp(30, 16, 2), "adamw", 3e-3, 1e-2, 30, 32), class_weights=(5.0, 1.0)
    ),
    "digits, SGD, smoothing": Case(*DIGITS, "sgd", 0.05, 0.0, 15, 32, True, smoothing=0.1),
    "texts, AdamW": Case(sentiment, mlp(384, 2), "adamw", 1e-3, 1e-2, 10, 32),
    "regression, AdamW": Case(concrete, mlp(8, 32, 1), "adamw", 5e-3, 1e-2, 40, 32),
    "fashion LeNet, AdamW": Case(
        fashion_images, {"kind": "lenet"}, "adamw", 2e-3, 1e-2, 12, cosine=True
    ),
    "digits, AdamW": Case(*DIGITS, "adamw", 3e-3, 1e-2, 30, 32),
    "digits, SGD": Case(*DIGITS, "sgd", 0.05, 0.0, 15, 32, True),
    "fashion, AdamW": Case(*FASHION, "adamw", 1e-3, 1e-2, 25),
    "fashion, IVON": Case(*FASHION, "ivon", 0.1, 1e-3, 25),
    "fashion, SGD": Case(*FASHION, "sgd", 0.05, 1e-3, 20, cosine=True),
}


SINGLES = ("table, class weights", "regression, AdamW", "digits, AdamW", "digits, SGD")
EachEpoch = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def train(
    case: Case,
    x: Tensor,
    y: Tensor,
    seed: int,
    each_epoch: EachEpoch | None = None,
    without: Tensor | None = None,
) -> nn.Module:
    """An ordinary loop; ``each_epoch`` gets the epochs done (from 0), model and optimizer.

    The minibatches of the examples left out (indices) are smaller, the others what they are with
    them: another order moves the model far more than any example does.
    """
    torch.manual_seed(seed)
    model, loss = build(case.network), case.loss()
    weights, decay = model.parameters(), case.weight_decay
    optimizer: torch.optim.Optimizer
    if case.optimizer == "ivon":
        optimizer = blr.IVON(
            *(weights, case.lr, len(x)), hess_init=case.hess_init, beta2=0.999, weight_decay=decay
        )
    elif case.optimizer == "adamw":
        optimizer = torch.optim.AdamW(weights, lr=case.lr, weight_decay=decay)
    else:
        optimizer = torch.optim.SGD(weights, lr=case.lr, momentum=0.9, weight_decay=decay)
    steps, step = case.epochs * math.ceil(len(x) / case.batch), 0

    def backward(chosen: Tensor) -> None:
        optimizer.zero_grad()
        loss(model(x[chosen]), y[chosen]).backward()

    look = each_epoch or (lambda *_: None)
    look(0, model, optimizer)
    for epoch in range(1, case.epochs + 1):
        for chosen in torch.randperm(len(x)).split(case.batch):
            chosen = chosen if without is None else chosen[~torch.isin(chosen, without)]
            if case.cosine:
                optimizer.param_groups[0]["lr"] = case.lr * (
                    0.5 + 0.5 * math.cos(math.pi * step / steps)
                )
            if isinstance(optimizer, blr.IVON):
                with optimizer.sampled_params(train=True):
                    backward(chosen)
            else:
                backward(chosen)
            optimizer.step()
            step += 1
        look(epoch, model, optimizer)
    optimizer.zero_grad()
    return model.eval()


def test_losses(outputs: Tensor, y: Tensor) -> Tensor:
    """The plain loss of every test example, ``[..., M]``, however it was trained."""
    if y.is_floating_point():
        return (outputs - y).square().sum(-1)
    flat = outputs.flatten(0, -2)
    each = cross_entropy(flat, y.repeat(len(flat) // len(y)), reduction="none")
    return each.view(outputs.shape[:-1])
