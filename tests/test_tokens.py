"""Sequences: what the model says of their tokens, what is ignored, and bad ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from likelihood_cases import MEMBERS, SEQUENCES
from models import randomised, seeded
from oracles import relative
from tiny_lm import IGNORED, VOCABULARY, sequences, task_of, tiny_lm
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.backprop.inputs import input_moments
from blr_analysis.errors import DataError, ModelError
from blr_analysis.likelihoods import TokenCategorical
from blr_analysis.task import Task


@pytest.mark.parametrize("likelihood", SEQUENCES, ids=repr)
def test_hits_and_losses_token_by_token(likelihood: TokenCategorical) -> None:
    """What is ignored stays so, in draws too."""
    outputs, targets = likelihood.prepare(*MEMBERS[repr(likelihood)][1:3])
    ignored = targets == likelihood.ignore_index
    best = outputs.argmax(-1)
    assert torch.equal(likelihood.prediction(outputs), best)
    assert relative(likelihood.mean(outputs), outputs.softmax(-1)) < 1e-15
    shares = ((best == targets) & ~ignored).sum(1) / (~ignored).sum(1)
    assert likelihood.correct(outputs, targets).tolist() == pytest.approx(shares.tolist())
    each = likelihood.token_nll(outputs, targets)
    assert each.shape == targets.shape
    assert bool((each[ignored] == 0).all())
    assert ignored.any()
    assert bool((likelihood.error(outputs, targets)[ignored] == 0).all())
    drawn = likelihood.resample(outputs, targets, torch.Generator().manual_seed(0))
    assert (drawn[ignored] == likelihood.ignore_index).all()


IDS = torch.arange(24).view(6, 4) % 7


def losses(y: Tensor, *, likelihood: str = "causal_lm", model: nn.Module | None = None) -> Tensor:
    """The losses of a task with these labels, or what is wrong with them."""
    task = Task(model or tiny_lm(), (IDS[: len(y), : y.shape[1]], y), likelihood=likelihood)
    every = torch.arange(len(y))
    return task.likelihood.nll(*task.run(task.fetch(every), task.parameters(), every))


def changed(place: object, value: int) -> Tensor:
    y = IDS.clone()
    y[place] = value
    return y


class Words(nn.Module):
    """A read-out of each word, which something happens to."""

    def __init__(self, then: object) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 7)
        self.then = then

    def forward(self, ids: Tensor) -> Tensor:
        return self.then(self.words(ids))


EARLY, LATE = (
    Words(lambda f, k=k: f * torch.ones(4, 1).index_fill_(0, torch.tensor(k), torch.nan))
    for k in (0, 3)
)
FLAT = Words(lambda f: f.flatten(1))
BAD: list[tuple[Tensor, nn.Module | None, type[Exception], str]] = [
    (changed(4, IGNORED), None, DataError, r"every label is ignored in the example at index 4"),
    (changed((2, 3), 7), None, DataError, "0 … 6, or be -100 .*found 7"),
    (changed((2, 3), -1), None, DataError, "0 … 6, or be -100 .*found -1"),
    (IDS.unsqueeze(-1), None, DataError, r"shape \[6, 4\]"),
    (IDS.double(), None, DataError, "integers"),
    (IDS.bool(), None, DataError, "integers"),
    (IDS, FLAT, DataError, r"\[batch, tokens, C\].*categorical"),
    (IDS, EARLY, ModelError, "NaN or inf"),
]


@pytest.mark.parametrize("likelihood", ["tokens", "causal_lm"])
@pytest.mark.parametrize(("y", "model", "error", "match"), BAD)
def test_bad_sequences(likelihood, y, model, error, match) -> None:
    with pytest.raises(error, match=match):
        losses(y, likelihood=likelihood, model=model)
    padded = losses(changed((..., -1), IGNORED), likelihood=likelihood, model=LATE)
    assert bool(torch.isfinite(padded).all())  # where it is ignored, NaN is no matter


def test_other_tasks_and_sequences_that_do_not_fit() -> None:
    with pytest.raises(DataError, match="at least 2 tokens"):
        losses(IDS[:, :1])
    with pytest.raises(DataError, match=r'"tokens" or "causal_lm"'):
        losses(IDS, likelihood="categorical")
    ids = torch.arange(2)
    uneven = [{"input_ids": ids, "labels": ids}, {"input_ids": ids}]
    with pytest.raises(DataError, match="collate"):
        Task(tiny_lm(), uneven, likelihood="causal_lm")  # type: ignore[arg-type]


def test_models_that_mix_sequences_are_refused() -> None:
    ids = sequences(6)
    assert len({len(ids[i]) for i in (0, 3, 5)}) > 1
    mixing = Task(Words(lambda x: x + x.mean(0, keepdim=True)), (IDS, IDS), likelihood="causal_lm")
    blind = tiny_lm(causal=False)  # padded without their mask: attention sees the padding
    tagged = task_of(blind, ids, likelihood="tokens", mask=False)
    for task in (mixing, tagged):
        with pytest.raises(ModelError, match=r"with its batch.*pad on the right"):
            blr.fit_laplace(task, structure="diag", curvature="empirical_fisher")


@pytest.mark.parametrize("batch_size", [1, 5])
def test_the_gram_of_inputs_knows_padding_without_a_mask(batch_size: int) -> None:
    """By the labels: the causal model's counted tokens do not see what follows them."""
    ids = sequences(5)
    tasks = [
        task_of(tiny_lm(), ids, mask=mask, batch_size=size, n_extra=3)
        for mask, size in ((True, 4), (False, batch_size))
    ]
    masked, plain = (blr.fit_laplace(t, structure="gram", prior_precision=1.0) for t in tasks)
    for name in masked.mean:
        assert relative(plain.precision(name), masked.precision(name)) < 1e-6, name


class Reads(nn.Module):
    """Words and one more layer, which reads the tokens or their places in its own way."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        width = 4
        self.words = nn.Embedding(VOCABULARY, width)
        tables = ("shared places", "places of one row", "distances")
        self.layer: Any = nn.Linear(width, width)
        if reads in tables:
            self.layer = nn.Embedding(24, width)
        if reads == "attention":
            self.layer = nn.MultiheadAttention(width, 2, batch_first=True)
        if reads == "channels first":
            self.layer = nn.Conv1d(width, width, 1)
        self.read = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        x = self.words(input_ids)
        t = torch.arange(input_ids.shape[1])
        hidden = torch.ones(len(t), len(t), dtype=torch.bool).triu(1)
        read = {
            "shared places": lambda: self.layer(t.unsqueeze(0)),
            "places of one row": lambda: self.layer(t),
            "distances": lambda: (self.layer((t - t[:, None]).abs()) * ~hidden[..., None]).sum(1),
            "tokens": lambda: self.layer(x),
            "time first": lambda: self.layer(x.transpose(0, 1)).transpose(0, 1),
            "rows": lambda: self.layer(x.flatten(0, 1)).view_as(x),
            "by head": lambda: self.layer(torch.stack([x, x + 1], 1)).sum(1),
            "channels first": lambda: self.layer(x.mT).mT,
            "attention": lambda: self.layer(x, x, x, attn_mask=hidden, need_weights=False)[0],
        }
        return SimpleNamespace(logits=self.read(x + read[self.reads]()))


WAYS = ("shared places", "places of one row", "distances", "tokens", "time first", "rows")


@pytest.mark.parametrize("reads", [*WAYS, "by head", "channels first", "attention"])
def test_the_gram_of_inputs_counts_no_padding(reads: str) -> None:
    """Whatever reads it: moments and counts are those of sequences by themselves. In one batch
    there are as many sequences as tokens."""
    with seeded(0):
        model = randomised(Reads(reads))
    ids = sequences(9)
    alone = task_of(model, ids, batch_size=1)
    as_many = len(ids) - max(len(x) for x in ids)
    expected = input_moments(alone, alone.parameters())
    for batch_size, n_extra in ((9, as_many), (9, 4), (4, 0)):
        task = task_of(model, ids, batch_size=batch_size, n_extra=n_extra)
        sums = input_moments(task, task.parameters())
        assert sums.tensors().keys() == expected.tensors().keys()
        for name, total in sums.tensors().items():
            torch.testing.assert_close(total, expected.tensors()[name], msg=f"{name}: {{}}".format)


def test_rows_that_may_be_padding_are_named() -> None:
    """An expert's rows do not tell which tokens they are of."""

    class Routed(Reads):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            x = self.words(input_ids).flatten(0, 1)
            read = x.index_add(0, torch.arange(0, len(x), 2), self.layer(x[::2]))
            return SimpleNamespace(logits=self.read(read.view(*input_ids.shape, -1)))

    with seeded(0):
        model = randomised(Routed("tokens"))
    task = task_of(model, sequences(6), batch_size=6)
    with pytest.warns(UserWarning, match="'layer' reads rows that may be padding"):
        input_moments(task, task.parameters())
