"""Influence against dense Gaussians, retraining in closed form, and its own other forms."""

from __future__ import annotations

import copy
import functools
import io
import math

import numpy as np
import pandas as pd
import pytest
import torch
from models import example_models, mlp
from oracles import dense_jacobian, dense_precision, fit_at_rest, relative
from oracles_retraining import leave_one_out_weights, linear, retrained, trained
from scipy.stats import spearmanr
from snapshots import peak_bytes
from tiny_lm import sequences, task_of, tiny_lm, token_gradients, with_prompts
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.sensitivity import Influence
from blr_analysis.sensitivity.influence.results import ProjectionError

STRUCTURES = ("diag", "kron", "lowrank", "full")
EXACT = 1e-10
MODELS = sorted(example_models())


def normal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def labels(n: int, classes: int = 3, seed: int = 0) -> Tensor:
    return torch.randint(classes, (n,), generator=torch.Generator().manual_seed(seed))


class World:
    """A model with training and test data, and their gradients one by one."""

    def __init__(self, model: nn.Module, x: Tensor, classes: int, n_test: int):
        n = len(x) - n_test
        y = labels(len(x), classes)
        source = ["web", "book"] * n
        self.y = y[:n]
        self.task = blr.Task(model, (x[:n], self.y), metadata={"source": source[:n]})
        self.test = blr.Task(model, (x[n:], y[n:]))
        self.gradients = self._gradients(self.task)
        self.test_gradients = self._gradients(self.test)

    def _gradients(self, task: blr.Task) -> Tensor:
        """∇ℓ of every example, ``[N, P]``."""
        jacobian = dense_jacobian(task, task.parameters())
        x, y = task.dataset.tensors
        outputs = task.model(x).detach()
        error = outputs.softmax(-1) - nn.functional.one_hot(y, outputs.shape[-1])
        return torch.einsum("nc,ncp->np", error, jacobian)

    def posterior(self, structure: str) -> blr.Posterior:
        return fitted(self.task, structure)

    def truth(self, q: blr.Posterior) -> Tensor:
        return self.gradients @ covariance(q) @ self.test_gradients.mT


@functools.cache
def fitted(task: blr.Task, structure: str) -> blr.Posterior:
    return fit_at_rest(task, structure=structure, prior_precision=0.7)


@functools.cache
def covariance(q: blr.Posterior) -> Tensor:
    """Σ by inverting S."""
    return torch.linalg.inv(dense_precision(q))


@pytest.fixture(scope="module")
def world() -> World:
    return World(mlp(), normal(47, 4), 3, 7)


@pytest.fixture(scope="module")
def posterior(world: World) -> blr.Posterior:
    return world.posterior("kron")


@functools.cache
def of_kind(name: str) -> World:
    """Every kind of layer: convolutions, groups, embeddings, attention, shared and unknown ones."""
    model, x = example_models()[name]
    with torch.no_grad():
        classes = model(x).shape[-1]
    return World(model, x, classes, 3)


def bounded(task: blr.Task, memory_budget: int | None) -> blr.Task:
    """A few test gradients at a time, or all of them."""
    part = task.subset(range(task.n_data))
    part.memory_budget = memory_budget
    return part


@pytest.mark.parametrize(
    ("structure", "memory_budget"),
    [("diag", 4096), ("kron", None), ("kron", 4096), ("lowrank", 4096), ("full", None)],
)
@pytest.mark.parametrize("name", MODELS)
def test_influence_is_the_dense_product(
    name: str, structure: str, memory_budget: int | None
) -> None:
    world = of_kind(name)
    q = world.posterior(structure)
    actual = blr.influence(bounded(world.task, memory_budget), q, world.test)
    assert actual.dtype == torch.float64
    assert relative(actual, world.truth(q)) < EXACT


@pytest.mark.parametrize(
    ("structure", "memory_budget"),
    [("diag", None), ("kron", 3000), ("lowrank", 3000), ("full", None)],
)
@pytest.mark.slow
def test_normalized_influence(world: World, structure: str, memory_budget: int | None) -> None:
    q = world.posterior(structure)
    task = bounded(world.task, memory_budget)
    norms, test_norms = (
        (g @ covariance(q) * g).sum(1).sqrt() for g in (world.gradients, world.test_gradients)
    )
    relative_influence = world.truth(q) / norms[:, None]
    actual = blr.influence(task, q, world.test, normalize=True)
    assert relative(actual, relative_influence) < EXACT
    cosine = blr.influence(task, q, world.test, normalize="cosine")
    assert relative(cosine, relative_influence / test_norms) < EXACT
    assert float(cosine.abs().max()) <= 1
    top = blr.influence(task, q, world.test, k=3, normalize=True)
    torch.testing.assert_close(top.helpful_values, relative_influence.mT.topk(3).values)
    assert "normalized_influence" in repr(actual)
    assert "normalized_influence" in top.table
    assert "normalized_influence" in repr(top)
    assert len(repr(top)) < 300
    assert "normalized" in top.plot().get_xlabel()


@pytest.mark.parametrize("normalize", [True, "cosine"])
def test_an_example_without_a_gradient_has_no_influence(normalize: bool | str) -> None:
    x = normal(6, 4)
    model = nn.Linear(4, 3, bias=False).double()
    x[2] = 0
    task = blr.Task(model, (x, labels(6)))
    q = fit_at_rest(task, prior_precision=1.0)
    actual = blr.influence(task, q, task, normalize=normalize)
    assert not actual[2].any()
    assert not actual[:, 2].any()
    assert bool(actual[0, :2].all())


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_it_is_retraining_to_first_order_in_the_leverage(kind: str) -> None:
    """With every example there r times, the gap to exact retraining falls as 1/r."""
    classes = 1 if kind == "gaussian" else 3
    x = normal(12, 2)
    x_test = normal(5, 2, seed=1)
    y = normal(12, 1, seed=2) if kind == "gaussian" else labels(12)
    y_test = normal(5, 1, seed=3) if kind == "gaussian" else labels(5, seed=1)

    def loss(model: nn.Module) -> Tensor:
        f = model(x_test).detach()
        if kind == "gaussian":
            return (f - y_test).square().sum(1) / 2
        return nn.functional.cross_entropy(f, y_test, reduction="none")

    gaps = []
    for copies in (8, 32):
        copies_of_x = x.repeat(copies, 1)
        targets = y.repeat(copies, *([1] * (y.ndim - 1)))
        model = trained(kind, copies_of_x, targets, 0.7, classes)
        task = blr.Task(model, (copies_of_x, targets), likelihood=kind)
        test = blr.Task(model, (x_test, y_test), likelihood=kind)
        q = fit_at_rest(task, structure="full", prior_precision=0.7)
        actual = blr.influence(task, q, test)[:12]
        weights = leave_one_out_weights(len(copies_of_x))[:12]
        parameters = retrained(kind, copies_of_x, targets, weights, 0.7, classes)
        truth = torch.stack([loss(linear(theta)) - loss(model) for theta in parameters])
        gaps.append(relative(actual, truth))
    assert gaps[1] < 0.1
    assert gaps[1] < gaps[0] / 3


def test_groups_are_sums(world: World, posterior: blr.Posterior) -> None:
    actual = blr.influence(world.task, posterior, world.test)
    by_target = actual.group()
    assert by_target.groups == (0, 1, 2)
    for row, label in enumerate(by_target.groups):
        member = world.y == label
        assert int(by_target.sizes[row]) == int(member.sum())
        torch.testing.assert_close(by_target.values[row], actual[member].sum(0))
    assert actual.group(by="source").groups == ("book", "web")
    torch.testing.assert_close(
        actual.group(lambda row: row.source == "web").values, actual.group(by="source").values[1:]
    )
    torch.testing.assert_close(actual.group([3, 1]).values[0], actual[1] + actual[3])
    table = by_target.table
    assert list(table) == ["group", "n", "influence", "influence_per_example"]
    np.testing.assert_allclose(table.influence * 1.0, by_target.mean.numpy())
    np.testing.assert_allclose(table.influence_per_example * table.n, table.influence)


def test_arithmetic_on_it_gives_plain_tensors(world: World, posterior: blr.Posterior) -> None:
    influence = blr.influence(world.task, posterior, world.test)
    truth = world.truth(posterior)
    assert isinstance(influence, Tensor)
    assert influence.shape == (40, 7)
    assert not influence.requires_grad
    v = normal(7)
    is_one = world.y == 1
    for actual, expected in (
        (influence[3], truth[3]),
        (influence @ v, truth @ v),
        (2 * influence, 2 * truth),
        (influence.T, truth.T),
        (torch.stack([influence, influence]), torch.stack([truth, truth])),
        (influence[is_one], truth[is_one]),
        (influence.matrix, truth),
    ):
        assert type(actual) is Tensor
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert np.asarray(influence).dtype == np.float64
    assert pd.DataFrame(influence).shape == (40, 7)


def test_it_is_copied_and_saved(world: World, posterior: blr.Posterior) -> None:
    influence = blr.influence(world.task, posterior, world.test)
    twin = copy.deepcopy(influence)
    assert isinstance(twin, Influence)
    assert twin.data_ptr() != influence.data_ptr()
    assert torch.equal(twin.top(2).helpful, influence.top(2).helpful)
    file = io.BytesIO()
    torch.save(influence, file)
    file.seek(0)
    for plain in (torch.load(file, weights_only=True), copy.copy(influence)):
        assert type(plain) is Tensor
        assert torch.equal(plain, influence)


def test_it_is_drawn_with_the_best_and_the_worst(world: World, posterior: blr.Posterior) -> None:
    influence = blr.influence(world.task, posterior, world.test)
    best = influence[:, 4].topk(3).values
    worst = (-influence[:, 4]).topk(3).values
    for result in (influence, influence.top(3)):
        axes = result.plot(4, k=3, names=["cat", "dog", "cow"])
        lengths = [bar.get_width() for bar in axes.patches]
        np.testing.assert_allclose(lengths, best.tolist() + (-worst).flip(0).tolist())


@pytest.mark.parametrize("memory_budget", [None, 3_000])
@pytest.mark.parametrize("k", [1, 5, 40])
def test_the_top_is_that_of_the_matrix(
    world: World, posterior: blr.Posterior, k: int, memory_budget: int | None
) -> None:
    truth = world.truth(posterior)
    order = truth.argsort(0, descending=True).mT
    matrix = blr.influence(world.task, posterior, world.test)
    streamed = blr.influence(bounded(world.task, memory_budget), posterior, world.test, k=k)
    for top in (matrix.top(k), streamed):
        assert top.k == k
        assert torch.equal(top.helpful, order[:, :k])
        assert torch.equal(top.harmful, order.flip(1)[:, :k])
        for indices, values in (
            (top.helpful, top.helpful_values),
            (top.harmful, top.harmful_values),
        ):
            torch.testing.assert_close(values, truth.mT.gather(1, indices), rtol=1e-9, atol=1e-12)


def test_the_table_names_the_strongest_pairs(world: World, posterior: blr.Posterior) -> None:
    actual = blr.influence(world.task, posterior, world.test)
    table = actual.table
    assert len(table) == 7 * 10
    assert actual.table is table
    first = table.iloc[0]
    assert (first.test, first.effect, first["rank"]) == (0, "helpful", 1)
    assert first.train == int(actual[:, 0].argmax())
    worst = table[(table.test == 4) & (table.effect == "harmful")].iloc[0]
    assert worst.train == int(actual[:, 4].argmin())
    for _, row in table.iloc[::7].iterrows():
        assert row.influence == pytest.approx(float(actual[row.train, row.test]), rel=1e-12)
        assert row.train_target == int(world.y[row.train])
        assert row.source == world.task.metadata["source"][row.train]
        f = world.test.model(world.test.dataset.tensors[0][row.test])
        assert row.test_prediction == int(f.argmax())
    assert len(actual.top(2).table) == 7 * 4
    whole = actual.top(40).table  # each example once, on the side of its sign
    assert whole.groupby("test").train.nunique().tolist() == [40] * 7
    assert len(whole) == 7 * 40
    assert ((whole.influence > 0) == (whole.effect == "helpful")).all()


def test_another_measure(world: World, posterior: blr.Posterior) -> None:
    """The rise of a probability, against a finite step along Σ∇ℓ_i."""
    actual = blr.influence(
        world.task, posterior, world.test, measure=lambda f, y: f.softmax(-1)[:, 1]
    )
    x = world.test.dataset.tensors[0]
    step = 1e-5
    for i in (0, 9):
        move = covariance(posterior) @ world.gradients[i]
        parts = move.split([m.numel() for m in posterior.mean.values()])
        sides = []
        for sign in (1, -1):
            weights = {
                n: m + sign * step * part.view_as(m)
                for (n, m), part in zip(posterior.mean.items(), parts, strict=True)
            }
            f = torch.func.functional_call(world.task.model, weights, (x,))
            sides.append(f.softmax(-1)[:, 1].detach())
        assert relative(actual[i], (sides[0] - sides[1]) / (2 * step)) < 1e-7
    assert "lambda" in actual.pairs.measure


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_sequences(structure: str) -> None:
    """Of a language model: one gradient per sequence, the sum over its tokens."""
    model = tiny_lm()
    ids = sequences(8)
    task = task_of(model, ids, with_prompts(ids))
    rows = [token_gradients(model, x, y)[1] for x, y in zip(ids, with_prompts(ids), strict=True)]
    gradients = torch.stack([row.sum(0) for row in rows])
    q = fit_at_rest(task, structure=structure, prior_precision=0.7, curvature="empirical_fisher")
    actual = blr.influence(task, q, task.subset([5, 2]))
    truth = gradients @ covariance(q) @ gradients[[5, 2]].mT
    assert relative(actual, truth) < EXACT
    assert list(actual.top(1).table.train[:2]) == [
        int(truth[:, 0].argmax()),
        int(truth[:, 0].argmin()),
    ]


def test_the_error_of_two_tensors() -> None:
    exact = normal(50, 4)
    no_error = ProjectionError.between(exact, exact)
    assert (no_error.relative_rms, no_error.pairs) == (0.0, 200)
    assert no_error.spearman == pytest.approx(1.0)
    assert ProjectionError.between(-2 * exact, exact).relative_rms == pytest.approx(3.0)
    assert ProjectionError.between(-2 * exact, exact).spearman == pytest.approx(-1.0)
    assert math.isinf(ProjectionError.between(exact, 0 * exact).relative_rms)


@pytest.mark.parametrize("levels", [1, 2, 5])
def test_the_rank_correlation_of_two_tensors_with_ties(levels: int) -> None:
    exact = normal(200)
    estimate = (levels * exact).clamp(0, levels).floor()
    error = ProjectionError.between(estimate, exact)
    assert error.spearman == pytest.approx(spearmanr(estimate, exact).statistic)
    for constant in (torch.zeros(200), torch.ones(200)):
        assert ProjectionError.between(exact, constant).spearman == 0.0
        assert ProjectionError.between(constant, exact).spearman == 0.0


@pytest.mark.slow
def test_the_top_stays_within_the_budget() -> None:
    """The matrix alone would take three times the budget."""
    n = 1000
    m = 800
    budget = 7 * 2**20 // 8
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3)).eval()
    x = normal(n, 30).float()
    y = labels(n)
    task = blr.Task(model, (x, y), memory_budget=budget)
    test = blr.Task(model, (x[:m], y[:m]))
    small_fit = fit_at_rest(task.subset(range(50)), structure="kron", prior_precision=1.0)
    q = blr.Posterior(small_fit.mean, small_fit.form, prior_precision=1.0, n_data=n)
    blr.influence(task, q, test.subset([0]))

    def run() -> None:
        blr.influence(task, q, test, k=3)

    answers = 2 * m * 3 * (4 + 8) * 3
    vectors = (4 * 40 * (30 + 3 + 2) + 12 * (8 * (40 + 31 + 43))) * 4
    assert n * m * 4 > 3 * budget
    assert peak_bytes(run) < budget + answers + vectors + n * 16


def test_what_no_memory_holds_is_named_before_it_is_allocated() -> None:
    """A million squared, of a data set whose rows are one and the same."""
    n = 10**6
    x = torch.zeros(1, 4, dtype=torch.float64)
    y = torch.zeros(1, dtype=torch.long)
    task = blr.Task(mlp(), (x.expand(n, 4), y.expand(n)), likelihood="categorical")
    precision = {name: torch.ones_like(p) for name, p in task.parameters().items()}
    q = blr.Posterior(task.parameters(), precision, prior_precision=1.0, n_data=n)
    with pytest.raises(InputError, match=r"1,000,000.*use k="):
        blr.influence(task, q, task)
