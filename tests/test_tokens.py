"""Likelihoods of tokens against cross-entropy and automatic differentiation; bad sequences."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from oracles import relative
from parts import normal
from tiny_lm import IGNORED, sequences, task_of, tiny_lm
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import DataError, InputError, ModelError
from blr_analysis.likelihoods import CausalLM, TokenCategorical
from blr_analysis.task import Task

B, T, C = 4, 5, 6
W = (2.0, 0.5, 1.0, 3.0, 0.0, 1.5)
KINDS = (
    TokenCategorical(),
    CausalLM(),
    TokenCategorical(ignore_index=0),
    TokenCategorical(weight=W, label_smoothing=0.2),
    CausalLM(label_smoothing=0.1),
)
every = pytest.mark.parametrize("likelihood", KINDS, ids=repr)


def world(likelihood: TokenCategorical) -> tuple[Tensor, Tensor, Tensor]:
    """Raw outputs and labels, and the labels as torch's cross-entropy takes them."""
    f = normal(B, T, C)
    y = torch.arange(B * T).view(B, T) % (C - 1) + 1
    y[0, 2:], y[1, 0], y[3, 4] = likelihood.ignore_index, likelihood.ignore_index, 5
    return f, y, y


def cross_entropy(likelihood: TokenCategorical, f: Tensor, y: Tensor) -> Tensor:
    """Each sequence's summed cross-entropy by torch, from raw outputs and labels."""
    if isinstance(likelihood, CausalLM):
        f, y = f[:, :-1], y[:, 1:]
    settings = {"ignore_index": likelihood.ignore_index, "reduction": "none"}
    settings["label_smoothing"] = likelihood.label_smoothing
    if likelihood.weight is not None:
        settings["weight"] = torch.tensor(likelihood.weight).to(f)
    return F.cross_entropy(f.transpose(1, 2), y, **settings).sum(1)  # type: ignore[arg-type]


@every
def test_loss_error_and_hessian_are_those_of_cross_entropies(likelihood: TokenCategorical) -> None:
    f, y, _ = world(likelihood)
    f.requires_grad_()
    v = normal(B, T, C, seed=5)
    outputs, targets = likelihood.prepare(f, y)
    ignored, raw = ~likelihood.counted(targets), outputs.detach()
    wanted = cross_entropy(likelihood, f, y)
    assert relative(likelihood.nll(raw, targets), wanted) < 1e-12
    per_token = likelihood.token_nll(raw, targets)
    assert per_token.shape == targets.shape and (per_token[ignored] == 0).all()
    slope = torch.func.grad(lambda x: cross_entropy(likelihood, x, y).sum())
    error = likelihood.error(raw, targets)
    assert (error[ignored] == 0).all()
    (back,) = torch.autograd.grad(outputs, f, error, retain_graph=True)
    assert relative(back, slope(f.detach())) < 1e-12
    truth = torch.func.vjp(slope, f.detach())[1](v)[0]  # a Hessian is symmetric
    along, _ = likelihood.prepare(v, y)
    (found,) = torch.autograd.grad(outputs, f, likelihood.hessian_times(raw, targets, along))
    assert relative(found, truth) < 1e-12
    for method in (likelihood.hessian, likelihood.hessian_root):
        with pytest.raises(InputError, match="empirical_fisher"):
            method(raw, targets)


@every
def test_predictions_hits_and_means(likelihood: TokenCategorical) -> None:
    f, y, _ = world(likelihood)
    outputs, targets = likelihood.prepare(f, y)
    assert torch.equal(likelihood.prediction(outputs), outputs.argmax(-1))
    assert relative(likelihood.mean(outputs), outputs.softmax(-1)) < 1e-15
    for i, hits in enumerate(likelihood.correct(outputs, targets)):
        kept = targets[i] != likelihood.ignore_index
        right = (outputs[i].argmax(-1) == targets[i])[kept]
        assert float(hits) == pytest.approx(float(right.double().mean()), rel=1e-12)


@every
def test_samples_follow_the_model_and_keep_what_is_ignored(likelihood: TokenCategorical) -> None:
    f, y, _ = world(likelihood)
    outputs, targets = likelihood.prepare(f, y)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([likelihood.resample(outputs, targets, generator) for _ in range(4000)])
    ignored = ~likelihood.counted(targets)
    assert (drawn[:, ignored] == likelihood.ignore_index).all()
    counts = F.one_hot(drawn[:, ~ignored], C).double().mean(0)
    assert float((counts - outputs.softmax(-1)[~ignored]).abs().max()) < 5 * 0.5 / math.sqrt(4000)


def test_drawn_errors_have_the_hessian_as_mean_square() -> None:
    likelihood = TokenCategorical(weight=W, label_smoothing=0.2)
    f, y = normal(1, 2, C).expand(20_000, 2, C), torch.tensor([[1, -100]]).expand(20_000, 2)
    outputs, targets = likelihood.prepare(f, y)
    drawn = likelihood.resample(outputs, targets, torch.Generator().manual_seed(0))
    e = likelihood.drawn_error(outputs, targets, drawn).flatten(1)
    eye = torch.eye(2 * C).double().view(-1, 1, 2, C)
    hessian = likelihood.hessian_times(outputs[:1], targets[:1], eye).flatten(1)
    products = e.unsqueeze(2) * e.unsqueeze(1)
    spread = products.std(0) / len(e) ** 0.5
    assert float(((products.mean(0) - hessian) / spread.clamp_min(1e-9)).abs().max()) < 4.5


def test_settings_of_tokens_are_checked_and_compared() -> None:
    assert TokenCategorical(weight=W).same(TokenCategorical(weight=list(W)))
    assert not CausalLM(label_smoothing=0.1).same(CausalLM())
    assert CausalLM(label_smoothing=0.1).judged_by(CausalLM())
    assert "label_smoothing=0.1" in CausalLM(label_smoothing=0.1).recorded
    task = Task(torch.nn.Linear(3, C), (normal(2, T, 3).float(), torch.zeros(2, T).long()),
                likelihood=TokenCategorical(weight=[1.0, 2.0]))  # fmt: skip
    with pytest.raises(DataError, match="2 entries for 6"):
        blr.fit_laplace(task, curvature="empirical_fisher", prior_precision=1.0)


@pytest.mark.parametrize("wrong", [None, 1.5, True, "-100"])
def test_ignore_index_is_a_whole_number(wrong: object) -> None:
    with pytest.raises(InputError, match="ignore_index"):
        TokenCategorical(wrong)  # type: ignore[arg-type]


IDS = torch.arange(24).view(6, 4) % 7


def losses(y: Tensor, *, likelihood: str = "causal_lm", model: nn.Module | None = None) -> Tensor:
    """The losses of a task with these labels, or what is wrong with them."""
    task = Task(model or tiny_lm(), (IDS, y), likelihood=likelihood)
    outputs, targets = task.run(task.fetch(torch.arange(6)), task.parameters(), torch.arange(6))
    return task.likelihood.nll(outputs, targets)


def changed(place: object, value: int) -> Tensor:
    y = IDS.clone()
    y[place] = value
    return y


def poisoned() -> nn.Module:
    model = tiny_lm()
    with torch.no_grad():
        model.words.weight[int(IDS[3, 0])] = torch.nan
    return model


FLAT = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(12, 7)).double()
BAD: list[tuple[Tensor, nn.Module | None, type[Exception], str]] = [
    (changed(4, IGNORED), None, DataError, r"every label is ignored in 1 examples.* index 4"),
    (changed((2, 3), 7), None, DataError, "0 … 6, or be -100 .*found 7"),
    (changed((2, 3), -1), None, DataError, "0 … 6, or be -100 .*found -1"),
    (IDS[:, :3], None, DataError, r"shape \[6, 4\]"),
    (IDS.unsqueeze(-1), None, DataError, r"shape \[6, 4\]"),
    (IDS.double(), None, DataError, "integers"),
    (IDS.bool(), None, DataError, "integers"),
    (IDS, FLAT, DataError, r"\[batch, tokens, C\].*categorical"),
    (IDS, poisoned(), ModelError, "NaN or inf"),
]


@pytest.mark.parametrize("likelihood", ["tokens", "causal_lm"])
@pytest.mark.parametrize(("y", "model", "error", "match"), BAD)
def test_bad_sequences(likelihood, y, model, error, match) -> None:
    with pytest.raises(error, match=match):
        losses(y, likelihood=likelihood, model=model)


@pytest.mark.parametrize("likelihood", ["tokens", "causal_lm"])
def test_nan_at_ignored_tokens_is_no_matter(likelihood: str) -> None:
    class Late(nn.Module):
        """NaN where there is nothing to attend to, as some attentions make on padding."""

        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(7, 7, dtype=torch.float64)

        def forward(self, ids: Tensor) -> Tensor:
            f = self.words(ids)
            return torch.cat([f[:, :-1], f[:, -1:] * torch.nan], dim=1)

    y = IDS.clone()
    y[:, -1] = IGNORED
    found = losses(y, likelihood=likelihood, model=Late())
    assert bool(torch.isfinite(found).all())


def test_single_tokens_have_no_successor() -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7))
    task = Task(model, (IDS[:, :1], IDS[:, :1]), likelihood="causal_lm")
    with pytest.raises(DataError, match="at least 2 tokens"):
        task.run(task.fetch(torch.arange(2)), task.parameters())


def test_categorical_says_what_to_use_for_sequences() -> None:
    with pytest.raises(DataError, match=r'"tokens" or "causal_lm"'):
        losses(IDS[:, 0], likelihood="categorical")


def test_unequal_lengths_without_padding_are_the_datasets_fault() -> None:
    class Ragged:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            return {"input_ids": torch.arange(i + 2), "labels": torch.arange(i + 2)}

    with pytest.raises(DataError, match="collate"):
        Task(tiny_lm(), Ragged(), likelihood="causal_lm")


class Mixing(nn.Module):
    """Each sequence's outputs hold the mean over its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 7)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        return x + x.mean(0, keepdim=True)


class Blind(nn.Module):
    """Padded sequences without their mask: attention sees the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_lm(causal=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> object:
        return self.inner(input_ids)


def test_models_that_mix_sequences_are_refused() -> None:
    ids = sequences(6)
    assert len({len(ids[i]) for i in (0, 3, 5)}) > 1
    mixing = Task(Mixing(), (IDS, IDS), likelihood="causal_lm")
    for task in (mixing, task_of(Blind(), ids, likelihood="tokens")):
        with pytest.raises(ModelError, match=r"with its batch.*pad on the right"):
            blr.fit_laplace(
                task, structure="diag", curvature="empirical_fisher", prior_precision=1.0,
            )  # fmt: skip


@pytest.mark.parametrize("batch_size", [1, 5])
def test_the_gram_of_inputs_knows_padding_without_a_mask(batch_size: int) -> None:
    """By the labels: the causal model's counted tokens do not see what follows them."""
    ids = sequences(5)
    fitted = [
        blr.fit_laplace(
            task_of(tiny_lm(), ids, mask=mask, batch_size=size, more=3),
            structure="gram", prior_precision=1.0,
        )
        for mask, size in ((True, 4), (False, batch_size))
    ]  # fmt: skip
    for name in fitted[0].mean:
        assert relative(fitted[1].precision(name), fitted[0].precision(name)) < 1e-6, name
