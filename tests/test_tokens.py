"""Sequences: what the model says of their tokens, what is ignored, and bad ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
            "pairs": lambda: (self.layer(x[:, None] + x[:, :, None]) * ~hidden[..., None]).sum(2),
            "beside a prefix": lambda: self.layer(F.pad(x, (0, 0, 1, 0), value=1.0))[:, 1:],
            "every second": lambda: self.layer(x[:, ::2]).repeat_interleave(2, 1)[:, : len(t)],
            "some of all": lambda: self.routed(x.flatten(0, 1)).view_as(x),
        }
        return SimpleNamespace(logits=self.read(x + read[self.reads]()))

    def routed(self, rows: Tensor) -> Tensor:
        """An expert's share of the rows, which does not tell which tokens they are of."""
        chosen = (rows[:, 0] > rows[:, 1]).nonzero()[:, 0]
        return rows.index_add(0, chosen, self.layer(rows[chosen]))


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


class Latents(nn.Module):
    """Learned vectors read the tokens, as in a Perceiver, and a layer reads what they have read."""

    def __init__(self, n_latents: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 4)
        self.latents = nn.Parameter(torch.randn(n_latents, 4))
        self.layer = nn.Linear(4, 4)
        self.read = nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids)
        scores = self.latents @ x.mT
        scores = scores.masked_fill(attention_mask[:, None] == 0, -torch.inf)
        return self.read(self.layer(scores.softmax(-1) @ x).tanh().mean(1))


def test_latents_as_many_as_tokens_are_no_tokens() -> None:
    """Of every text all of them count: the same moments as of texts without padding."""
    ids = sequences(6)
    longest = max(map(len, ids))
    with seeded(0):
        model = randomised(Latents(longest))

    def rows(length: int | None) -> list[dict[str, Tensor]]:
        padded = [F.pad(x, (0, (length or len(x)) - len(x))) for x in ids]
        return [
            {
                "input_ids": y,
                "attention_mask": (torch.arange(len(y)) < len(x)).long(),
                "labels": torch.tensor(0),
            }
            for x, y in zip(ids, padded, strict=True)
        ]

    alone = Task(model, rows(None), batch_size=1)
    expected = input_moments(alone, alone.parameters()).tensors()
    padded = Task(model, rows(longest), batch_size=3)
    for name, total in input_moments(padded, padded.parameters()).tensors().items():
        torch.testing.assert_close(total, expected[name], msg=f"{name}: {{}}".format)


@pytest.mark.parametrize("reads", ["pairs", "beside a prefix", "every second", "some of all"])
def test_rows_that_may_be_padding(reads: str) -> None:
    """They are read text by text; where a text by itself is padded too, a warning names them."""
    with seeded(0):
        model = randomised(Reads(reads))
    ids = sequences(9)
    alone = task_of(model, ids, batch_size=1)
    expected = input_moments(alone, alone.parameters()).tensors()
    for batch_size in (9, 4):
        task = task_of(model, ids, batch_size=batch_size)
        for name, total in input_moments(task, task.parameters()).tensors().items():
            torch.testing.assert_close(total, expected[name], msg=f"{name}: {{}}".format)
    padded = task_of(model, ids, n_extra=4)
    with pytest.warns(UserWarning, match="'layer'.* read rows that may be padding"):
        input_moments(padded, padded.parameters())


class Attends(nn.Module):
    """Attention to fewer keys than queries, whose arguments have names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        read = self.layer(value=2 * x[:, :2], need_weights=False, key=x[:, :2] + 1, query=x)
        return read[0].mean(1)


def test_the_gram_of_attention_is_that_of_queries_keys_and_values() -> None:
    with seeded(0):
        x = torch.randn(5, 3, 4, dtype=torch.float64)
        model = randomised(Attends())
    task = Task(model, (x, torch.arange(5) % 4))
    _, moments = input_moments(task, task.parameters()).moments["layer.in_proj_weight"]
    for total, rows in zip(moments, (x, x[:, :2] + 1, 2 * x[:, :2]), strict=True):
        joined = F.pad(rows.flatten(0, 1), (0, 1), value=1.0)
        torch.testing.assert_close(total, joined.mT @ joined)


def test_a_decoder_as_long_as_its_encoder() -> None:
    """Its layers' rows are those of the labels, not those of the inputs."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 4, "d_kv": 2, "d_ff": 6, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, **sizes)
    with seeded(0):
        model = randomised(T5ForConditionalGeneration(config))
    ids = [row[:5] for row in sequences(6)]
    labels = ids[1:] + ids[:1]  # shorter than their inputs, or longer
    rows = [
        {"input_ids": x, "labels": y, "attention_mask": torch.ones_like(x)}
        for x, y in zip(ids, labels, strict=True)
    ]
    sums = []
    for batch_size in (1, 4):
        task = Task(model, rows, likelihood="tokens", batch_size=batch_size)
        sums.append(input_moments(task, task.parameters()).tensors())
    for name, total in sums[1].items():
        torch.testing.assert_close(total, sums[0][name], msg=f"{name}: {{}}".format)
