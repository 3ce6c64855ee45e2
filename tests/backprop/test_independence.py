"""A model whose outputs depend on the batch is refused, and one that rounds otherwise is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Graph, seeded
from torch import Tensor, nn
from torch.utils.data import DataLoader

from blr_analysis.backprop.plan import plan_for
from blr_analysis.errors import ModelError
from blr_analysis.task import Task

REFUSED = "output changes with its batch"


def sentences(lengths: list[int]) -> DataLoader:
    """Words by number, each batch padded with zeros to its longest sentence."""
    source = torch.Generator().manual_seed(0)
    sentences = [torch.randint(1, 6, (length,), generator=source) for length in lengths]
    rows = [(words, number % 2) for number, words in enumerate(sentences)]

    def collate(batch: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        words, labels = zip(*batch, strict=True)
        return nn.utils.rnn.pad_sequence(words, batch_first=True), torch.tensor(labels)

    return DataLoader(rows, collate_fn=collate, batch_size=4)


def mean_over_all(m: Any, words: Tensor) -> Tensor:
    return m.out(torch.tanh(m.words(words)).mean(1))


def mean_over_words(m: Any, words: Tensor) -> Tensor:
    mask = (words > 0).unsqueeze(-1).to(m.words.weight.dtype)
    hidden = torch.tanh(m.words(words)) * mask
    return m.out(hidden.sum(1) / mask.sum(1))


def reader(call: Callable[..., Tensor], lengths: list[int]) -> Task:
    with seeded(0):
        model = Graph(call, words=nn.Embedding(6, 4), out=nn.Linear(4, 2))
    return Task(model.eval(), sentences(lengths))


LENGTHS = {
    "the shortest first": [2, 5, 5, 5, 5, 5, 5],
    "the shortest last": [5, 5, 5, 5, 5, 5, 2],
    "the longest first": [6, 5, 5, 5, 5, 5, 5],
    "the longest in the middle": [5, 5, 5, 6, 5, 5, 5],
    "the probe of one length": [5, 5, 4, 5, 6, 3, 5],
    "all but one of one length": [5, 5, 5, 5, 5, 4, 5],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_mean_over_padding_is_refused(lengths: list[int]) -> None:
    task = reader(mean_over_all, lengths)
    with pytest.raises(ModelError, match=rf"{REFUSED}.*mask the padding"):
        plan_for(task, task.parameters())


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_mean_over_words_is_read(lengths: list[int]) -> None:
    task = reader(mean_over_words, lengths)
    assert plan_for(task, task.parameters()).outputs == 2


def network(depth: int, mixed: float = 0.0) -> nn.Module:
    """Layers of 64, and the batch's mean output as a small part of each."""

    def call(m: Any, x: Tensor) -> Tensor:
        outputs = m.layers(x)
        return outputs + mixed * (outputs.mean(0) - outputs)

    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()]
    with seeded(0):
        return Graph(call, layers=nn.Sequential(*layers, nn.Linear(64, 3))).eval()


def task_with(model: nn.Module, dtype: torch.dtype) -> Task:
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    return Task(model.to(dtype), (x.to(dtype), torch.arange(40) % 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mixed", [1e-4, 1e-3, 1e-2, 1.0])
def test_small_mixing_is_refused(mixed: float, dtype: torch.dtype) -> None:
    task = task_with(network(2, mixed), dtype)
    with pytest.raises(ModelError, match=REFUSED):
        plan_for(task, task.parameters())


@pytest.mark.parametrize("holder", [0, 20, 39])
def test_a_scale_by_the_largest_number_of_a_batch_is_refused(holder: int) -> None:
    """Whichever example of the probe holds it."""

    def call(m: Any, x: Tensor) -> Tensor:
        return m.out(x / x.abs().max())

    with seeded(0):
        model = Graph(call, out=nn.Linear(64, 3))
    task = task_with(model.eval(), torch.float32)
    task.dataset.tensors[0][holder] *= 10
    with pytest.raises(ModelError, match=REFUSED):
        plan_for(task, task.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("depth", [0, 2, 24])
def test_rounding_is_not_taken_for_mixing(depth: int, dtype: torch.dtype) -> None:
    """One example alone is multiplied by another kernel than many are, in another order."""
    task = task_with(network(depth), dtype)
    assert plan_for(task, task.parameters()).outputs == 3


def test_sums_of_an_example_in_another_order_are_no_mixing() -> None:
    """Numbers of very different sizes, whose sums depend on their order in float32."""

    def call(m: Any, x: Tensor) -> Tensor:
        order = torch.arange(x.shape[1]).roll(len(x))
        numbers = m.layer(x)[:, order] * 1e3
        sums = numbers.cumsum(1)[:, -1:]
        return m.out(sums / 1e3)

    with seeded(0):
        model = Graph(call, layer=nn.Linear(64, 4096), out=nn.Linear(1, 3)).eval()
    task = task_with(model, torch.float32)
    assert plan_for(task, task.parameters()).outputs == 3
