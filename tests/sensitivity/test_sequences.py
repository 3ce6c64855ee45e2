"""Sequences: self-influence, left-out losses and single tokens against one gradient per token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import tiny_transformers
import torch
from oracles import dense_precision, fit_at_rest, flatten, relative, unflatten
from snapshots import peak_bytes
from tiny_lm import (
    IGNORED,
    TinyLM,
    sequences,
    tags,
    task_of,
    tiny_lm,
    token_gradients,
    with_prompts,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401  (slow to import)

import blr_analysis as blr
from blr_analysis.backprop.plan import plan_for
from blr_analysis.errors import InputError, ModelError
from blr_analysis.posterior import Posterior
from blr_analysis.posterior.facts import Calibration
from blr_analysis.posterior.structures import Diagonal
from blr_analysis.sensitivity import token_sensitivity
from blr_analysis.sensitivity.calibrate import _tenth
from blr_analysis.task import Task

N = 8
PRIOR = 0.7
EXACT = 1e-10
MODELS = {
    "plain": dict(),
    "tied": dict(tied=True),
    "library_attention": dict(library=True),
}
TAGGER = dict(causal=False, classes=3)  # without a shift
each_model = pytest.mark.parametrize("name", MODELS)
FIT = dict(prior_precision=PRIOR)


class World:
    """A task with its posterior, and the truth about it by brute force."""

    def __init__(self, model: TinyLM, *, likelihood: str = "causal_lm"):
        self.model = model
        self.shift = likelihood == "causal_lm"
        self.ids = sequences(N)
        self.labels = with_prompts(self.ids) if self.shift else tags(self.ids)
        self.task = task_of(model, self.ids, self.labels, likelihood=likelihood)
        rows = [
            token_gradients(model, x, y, self.shift)
            for x, y in zip(self.ids, self.labels, strict=True)
        ]
        self.token_losses = [losses for losses, _ in rows]
        self.token_gradients = [grads for _, grads in rows]
        self.losses = torch.stack([losses.sum() for losses in self.token_losses])
        self.gradients = torch.stack([grads.sum(0) for grads in self.token_gradients])


@cache
def world_of(name: str) -> World:
    if name == "tagger":
        return World(tiny_lm(**TAGGER), likelihood="tokens")
    return World(tiny_lm(**MODELS[name]))


@pytest.mark.parametrize("name", [*MODELS, "tagger"])
@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_self_influence_and_left_out_losses(name: str, structure: str) -> None:
    world = world_of(name)
    q = fit_at_rest(world.task, structure=structure, curvature="empirical_fisher", **FIT)
    sigma = torch.linalg.inv(dense_precision(q))
    truth = torch.einsum("np,pq,nq->n", world.gradients, sigma, world.gradients)
    scores = blr.sensitivity(world.task, q)
    assert relative(scores.losses, world.losses) < EXACT
    assert relative(scores.self_influence, truth) < EXACT
    assert scores.tokens.tolist() == [len(x) for x in world.token_losses]
    loo = blr.leave_one_out(world.task, q)
    assert relative(loo.losses, world.losses + truth) < EXACT
    assert loo.correction == ["first_order"] * N


def dense_parts(world: World, q: Posterior) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """e_i, V_i and Λ_i of each sequence at the tokens that count."""
    like = {n: p.detach() for n, p in world.model.named_parameters()}
    sigma = torch.linalg.inv(dense_precision(q))
    for ids, labels in zip(world.ids, world.labels, strict=True):
        counted = labels[1:] != IGNORED

        def logits(flat: Tensor, ids: Tensor = ids, counted: Tensor = counted) -> Tensor:
            params = {n: x[0] for n, x in unflatten(flat.unsqueeze(0), like).items()}
            output = torch.func.functional_call(world.model, params, (ids.unsqueeze(0),))
            return output.logits[0, :-1][counted]

        p = logits(flatten(like)).softmax(-1)
        j = torch.func.jacrev(logits)(flatten(like)).flatten(0, 1)
        targets = torch.nn.functional.one_hot(labels[1:][counted], p.shape[-1])
        error = (p - targets).flatten()
        height = torch.block_diag(*(row.diag() - row.outer(row) for row in p))
        yield error, j @ sigma @ j.T, height


def test_variances_and_unfamiliarity_are_estimated_without_bias() -> None:
    """By four random cotangents of each sequence; over all of them within a third."""
    world = world_of("plain")
    q = fit_at_rest(world.task, structure="kron", curvature="mc_fisher", **FIT)
    errors, variances, heights = zip(*dense_parts(world, q), strict=True)
    truth = torch.stack([v.trace() for v in variances])
    scores = blr.sensitivity(world.task, q, variance=True)
    assert float(scores.variance.sum() / truth.sum()) == pytest.approx(1, abs=0.3)
    apart = (scores.variance - truth).square() / scores.variance_error.square()
    assert 0.1 < float(apart.median()) < 4
    assert relative(scores.error, torch.stack([e.norm() for e in errors])) < EXACT
    memory = blr.memory_map(scores)
    assert relative(memory.variance, scores.variance / scores.tokens) < EXACT
    wrong = blr.suspicious(world.task, q, samples=8)
    freedom = sum(float((h * v).sum()) for h, v in zip(heights, variances, strict=True))
    assert float(wrong.unfamiliarity.sum()) == pytest.approx(freedom, rel=0.3)
    loo = blr.leave_one_out(world.task, q)
    assert relative(wrong.left_out, loo.losses / loo.tokens) < EXACT
    assert relative(wrong.losses, world.losses / loo.tokens) < EXACT
    assert "target" not in wrong.table
    assert wrong.targets is None


def test_left_out_tokens_that_lose_more_than_a_guess_are_no_estimate() -> None:
    """By how often each token stands in the data."""
    world = world_of("plain")
    loose, tight = (
        Posterior(
            world.task.parameters(),
            {name: torch.full_like(p, size) for name, p in world.task.parameters().items()},
            prior_precision=1e-4,
            n_data=N,
        )
        for size in (1e-3, 1e5)
    )
    tokens = torch.cat([row[row != IGNORED] for row in world.labels])
    shares = torch.bincount(tokens).double() / len(tokens)
    wild = blr.leave_one_out(world.task, loose)
    assert wild.chance == pytest.approx(float(-torch.special.xlogy(shares, shares).sum()))
    assert "no estimate" in repr(wild)
    assert "no estimate" in wild.note
    tame = blr.leave_one_out(world.task, tight)
    assert tame.is_below_chance == (tame.nll_per_token > tame.chance)


@pytest.mark.parametrize("above", [0.15, 1.0])
def test_a_loss_worse_than_a_guess_is_an_estimate_where_calibration_measured_it(
    above: float,
) -> None:
    """By two standard errors of the measurement."""
    world = world_of("plain")
    precision = {n: torch.full_like(p, 1e-3) for n, p in world.task.parameters().items()}
    q = Posterior(world.task.parameters(), precision, prior_precision=1e-4, n_data=N)
    unmeasured = blr.leave_one_out(world.task, q)
    assert unmeasured.is_below_chance
    measured = Calibration(
        1.0, left_out_loss=unmeasured.nll_per_token - above, left_out_loss_error=0.1
    )
    left_out = blr.leave_one_out(world.task, q.changed(calibration=measured))
    assert left_out.is_below_chance == (above > 0.2)
    assert ("no estimate" in left_out.note) == (above > 0.2)


def test_calibration_records_the_left_out_loss_of_a_token() -> None:
    """Of the sequences that a training leaves out: here that training returns another model."""
    world = world_of("plain")
    other = tiny_lm(**MODELS["plain"])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))

    def train(data: object, seed: int) -> nn.Module:
        return other

    loader = task_of(world.model, world.ids, world.labels, likelihood="causal_lm").dataset
    recipe = blr.Recipe(train=train)
    task = blr.Task(world.model, loader, likelihood="causal_lm", recipe=recipe)
    q = blr.fit_laplace(task, structure="diag", curvature="mc_fisher", **FIT)
    losses = [
        token_gradients(other, x, y, True)[0] for x, y in zip(world.ids, world.labels, strict=True)
    ]
    left_out = _tenth(task, seed=0)
    per_text = torch.stack([losses[i].sum() for i in left_out.tolist()])
    n_tokens = torch.stack([(losses[i] != 0).sum() for i in left_out.tolist()]).double()
    calibration = blr.calibrate(task, q).calibration
    mean = per_text.sum() / n_tokens.sum()
    assert calibration.left_out_loss == pytest.approx(float(mean))
    spread = (per_text - mean * n_tokens).std()
    error = 2**0.5 * spread / n_tokens.sum()
    assert calibration.left_out_loss_error == pytest.approx(float(error))


def test_texts_are_suspected_by_their_loss_above_a_guess_of_the_words() -> None:
    world = world_of("plain")
    q = fit_at_rest(world.task, structure="diag", curvature="mc_fisher", **FIT)
    tokens = torch.cat([row[row != IGNORED] for row in world.labels])
    shares = torch.bincount(tokens).double() / len(tokens)
    counted = [row[1:][row[1:] != IGNORED] for row in world.labels]
    guess = torch.stack([-shares[labels].log().mean() for labels in counted])
    suspicions = blr.suspicious(world.task, q, duplicates=False, share=0.5)
    torch.testing.assert_close(suspicions.guess, guess)
    in_table = suspicions.table["guessed_loss"].tolist()
    assert in_table == suspicions.guess[suspicions.order].tolist()
    excess = suspicions.losses - guess
    first = excess.argsort(descending=True)[: N // 2]
    assert suspicions.order[: N // 2].tolist() == first.tolist()
    torch.testing.assert_close(suspicions.score("label"), excess)
    tagger = world_of("tagger")
    q = fit_at_rest(tagger.task, structure="diag", curvature="mc_fisher", **FIT)
    suspicions = blr.suspicious(tagger.task, q, duplicates=False)
    assert suspicions.guess is None and "guessed_loss" not in suspicions.table


def test_copies_of_a_sequence_are_twins() -> None:
    world = world_of("plain")
    ids = [*world.ids, world.ids[2]]
    labels = [*world.labels, world.labels[2]]
    again = task_of(world.model, ids, labels)
    q = fit_at_rest(again, structure="kron", curvature="mc_fisher", **FIT)
    actual = blr.suspicious(again, q, samples=8)
    assert actual.twin[2] == N
    assert actual.twin[N] == 2
    assert float(actual.closeness[2]) == pytest.approx(1, abs=1e-6)


def test_monitored_sequences() -> None:
    world = world_of("plain")
    q = fit_at_rest(world.task, structure="diag", curvature="mc_fisher", **FIT)
    monitor = blr.Monitor(world.task, examples=[1, 3], test=world.task)
    row = monitor(q, 1)
    loo = blr.leave_one_out(world.task, q)
    assert row["loo_nll"] == pytest.approx(float(loo.losses[[1, 3]].mean()), rel=EXACT)
    assert row["test_nll"] == pytest.approx(float(world.losses.mean()), rel=EXACT)
    assert math.isnan(row["max_leverage"])


@each_model
@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_single_tokens(name: str, structure: str) -> None:
    world = world_of(name)
    q = fit_at_rest(world.task, structure=structure, curvature="empirical_fisher", **FIT)
    sigma = torch.linalg.inv(dense_precision(q))
    actual = token_sensitivity(world.task, q, sequences=[1, 4, 6])
    scores = blr.sensitivity(world.task, q)
    for i in (1, 4, 6):
        mine = actual.sequence == i
        change = world.token_gradients[i] @ sigma @ world.gradients[i]
        assert relative(actual.losses[mine], world.token_losses[i]) < EXACT
        assert relative(actual.change[mine], change) < EXACT
        assert relative(actual.change[mine].sum(), scores.self_influence[i]) < EXACT
        targets = world.labels[i][1:]
        (counted,) = (targets != IGNORED).nonzero(as_tuple=True)
        assert actual.position[mine].tolist() == counted.tolist()
        assert actual.target[mine].tolist() == targets[counted].tolist()
    assert actual.sequence.unique().tolist() == [1, 4, 6]


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_padding_changes_nothing(left: bool) -> None:
    world = world_of("plain")
    q = fit_at_rest(world.task, structure="kron", curvature="empirical_fisher", **FIT)
    truth = blr.sensitivity(world.task, q)
    wider = task_of(world.model, world.ids, world.labels, n_extra=3, left=left)
    for chunk_size, budget in ((None, None), (1, None), (3, None), (None, 1)):
        wider.chunk_size = chunk_size
        wider.memory_budget = budget
        actual = blr.sensitivity(wider, q)
        assert relative(actual.losses, truth.losses) < EXACT
        assert relative(actual.self_influence, truth.self_influence) < EXACT
        assert actual.tokens.tolist() == truth.tokens.tolist()
    again = fit_at_rest(wider, structure="kron", curvature="empirical_fisher", **FIT)
    assert relative(flatten(again.form.diagonal()), flatten(q.form.diagonal())) < EXACT
    tokens = token_sensitivity(wider, q, sequences=[2])
    narrow = token_sensitivity(world.task, q, sequences=[2])
    assert relative(tokens.change, narrow.change) < EXACT


class Unpadded(NamedTuple):
    """A language model on sequences, each by itself, and what the analyses say of it."""

    model: Any
    ids: list[Tensor]
    losses: Tensor
    q: Posterior
    by_fit: list[Posterior]
    influence: Tensor


FITS: list[dict[str, Any]] = [
    {"structure": "diag", "curvature": "empirical_fisher"},
    {"structure": "gram"},
]


@cache
def unpadded(kind: str) -> Unpadded:
    model = tiny_transformers.build(kind, "causal_lm").double()
    ids = sequences(6, vocabulary=model.config.vocab_size)
    alone = [cross_entropy(model(x[None]).logits[0, :-1], x[1:], reduction="sum") for x in ids]
    task = task_of(model, ids, batch_size=1)
    by_fit = [fit_at_rest(task, **options, **FIT) for options in FITS]
    q = by_fit[0]
    influence = blr.influence(task, q, task.subset([1, 4])).matrix
    return Unpadded(model, ids, torch.stack(alone).detach(), q, by_fit, influence)


@pytest.mark.parametrize("batch_size", [1, 2, 6])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_left_padding_as_hugging_face_collates_it(kind: str, batch_size: int) -> None:
    """A label on every token, positions that count from the first column: all numbers are those of
    sequences by themselves, whatever shares their batch."""
    truth = unpadded(kind)
    ids = truth.ids
    q = truth.q
    task = task_of(truth.model, ids, left=True, batch_size=batch_size)
    scores = blr.sensitivity(task, q)
    assert scores.tokens.tolist() == [len(x) - 1 for x in ids]
    assert relative(scores.losses, truth.losses) < 1e-6
    tokens = token_sensitivity(task, q, sequences=range(6))
    assert relative(tokens.losses.sum(), truth.losses.sum()) < 1e-6
    for options, expected in zip(FITS, truth.by_fit, strict=True):
        actual = fit_at_rest(task, **options, **FIT)
        for name in q.mean:
            assert relative(actual.precision(name), expected.precision(name)) < EXACT
    influence = blr.influence(task, q, task.subset([1, 4])).matrix
    assert relative(influence, truth.influence) < EXACT


def test_what_if_takes_sequences_out() -> None:
    world = world_of("plain")
    q = fit_at_rest(world.task, structure="diag", curvature="empirical_fisher", **FIT)
    test_ids = sequences(5)
    test = task_of(world.model, test_ids, batch_size=2)
    removed = [0, 3]
    result = blr.what_if(world.task, q, remove=removed, evaluate=test, solver="posterior")
    gradients = world.gradients[removed]
    precision = flatten(q.form.values) - gradients.square().sum(0)
    move = gradients.sum(0) / precision
    assert relative(flatten(result.parameters), flatten(q.mean) + move) < EXACT
    after = unflatten(flatten(q.mean) + move, q.mean)
    changed = tiny_lm()
    result.apply(changed)
    losses = [token_gradients(changed, x, x)[0] for x in test_ids]
    truth = torch.stack([part.sum() for part in losses])
    assert relative(result.after.losses, truth) < EXACT
    assert result.nll == pytest.approx(float(truth.mean()), rel=EXACT)
    per_token = float(torch.cat(losses).mean())
    assert result.after.nll_per_token == pytest.approx(per_token, rel=EXACT)
    assert result.after.perplexity == pytest.approx(math.exp(per_token), rel=EXACT)
    of_test = Posterior(q.mean, q.form, prior_precision=PRIOR, n_data=5)
    expected = blr.sensitivity(test, of_test).perplexity
    assert result.before.perplexity == pytest.approx(expected, rel=EXACT)
    assert set(after) == set(result.parameters)
    is_right = []
    for ids in test_ids:
        answers = changed(ids.unsqueeze(0)).logits[0, :-1].argmax(-1)
        is_right.append(answers == ids[1:])
    accuracy = float(torch.cat(is_right).double().mean())
    assert result.accuracy == pytest.approx(accuracy, rel=EXACT)
    with pytest.raises(InputError, match="table by class"):
        _ = result.by_class


def test_tables_and_groups() -> None:
    world = world_of("plain")
    speaker = list("aabbccdd")
    task = task_of(world.model, world.ids, world.labels, metadata={"speaker": speaker})
    q = fit_at_rest(task, structure="diag", curvature="empirical_fisher", **FIT)
    scores = blr.sensitivity(task, q)
    table = scores.table
    names = ["index", "tokens", "loss", "loss_per_token", "error", "self_influence", "speaker"]
    assert list(table) == names
    total = table.groupby("speaker").self_influence.sum()
    assert total["b"] == pytest.approx(float(scores.self_influence[2:4].sum()), rel=EXACT)
    counts = scores.losses / scores.tokens
    assert relative(torch.tensor(table.loss_per_token.to_numpy()), counts) < EXACT
    loo = blr.leave_one_out(task, q)
    assert (
        relative(torch.tensor(loo.table.loss.to_numpy()), scores.losses + scores.self_influence)
        < EXACT
    )
    tokens = token_sensitivity(task, q, sequences=lambda row: row.speaker == "c")
    assert set(tokens.table.speaker) == {"c"}
    assert tokens.table.loss_without.sum() == pytest.approx(float(loo.losses[4:6].sum()), rel=EXACT)
    by_speaker = blr.what_if_each(task, q, by="speaker", solver="posterior")
    assert by_speaker.group.tolist() == list("abcd")
    alone = blr.what_if(task, q, remove=[2, 3], solver="posterior")
    assert by_speaker.nll_after[1] == pytest.approx(alone.nll, rel=EXACT)
    chosen = blr.what_if(task, q, remove=lambda row: row.tokens > 5, solver="posterior")
    assert chosen.removed == int((scores.tokens > 5).sum())


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g: Tensor) -> Tensor:
        return g * 2


class Twice(nn.Sequential):
    def forward(self, ids: Tensor) -> Tensor:
        return self[1](Once.apply(self[0](ids)))


def test_what_is_refused_of_sequences() -> None:
    task = world_of("plain").task
    fisher = {"structure": "diag", "curvature": "empirical_fisher"}
    q = fit_at_rest(task, **fisher, **FIT)
    with pytest.raises(InputError, match=r"remove= and add="):
        blr.what_if(task, q, relabel={0: 1}, solver="posterior")
    with pytest.raises(InputError, match=r"no column 'target'.*tokens"):
        blr.what_if_each(task, q)
    with pytest.raises(InputError, match="first_order"):
        blr.leave_one_out(task, q, correction="cavity")
    ids = torch.arange(12).view(4, 3) % 7
    once = Task(Twice(nn.Embedding(7, 3), nn.Linear(3, 7)), (ids, ids), likelihood="causal_lm")
    with pytest.raises(ModelError, match="eager"):
        token_sensitivity(once, fit_at_rest(once, **fisher, **FIT))


MB = 2**20


def peak_of(n: int, budget: int, *, tied: bool) -> tuple[int, int]:
    """Of a model whose vocabulary outweighs everything else, in bytes; and its weights."""
    model = tiny_lm(vocabulary=1500, width=16, longest=32, tied=tied).float()
    ids = torch.randint(0, 1500, (n, 32), generator=torch.Generator().manual_seed(0))
    task = Task(model, (ids, ids), likelihood="causal_lm", memory_budget=budget)
    params = task.parameters()
    form = Diagonal({name: torch.full_like(p, 2.0) for name, p in params.items()})
    q = Posterior(params, form, prior_precision=1.0, n_data=n)
    plan_for(task, q.mean)
    return peak_bytes(lambda: blr.sensitivity(task, q)), sum(p.nbytes for p in params.values())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.slow
def test_peak_is_within_the_budget_and_flat_in_the_number_of_sequences(tied: bool) -> None:
    budget = 6 * MB
    bytes_of_few, weights = peak_of(24, budget, tied=tied)
    bytes_of_many, _ = peak_of(96, budget, tied=tied)
    outputs = 96 * 31 * 1500 * 4
    assert bytes_of_many <= budget + 3 * weights < outputs
    assert bytes_of_many <= bytes_of_few + 3 * 8 * 96
