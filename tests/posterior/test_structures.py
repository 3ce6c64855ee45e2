"""Every structure on models with every kind of term: the contract, and what each has alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from contracts import PRIOR, StructureContract
from hypothesis import given, settings
from hypothesis import strategies as st
from models import example_models, mlp
from oracles import dense_gram, flatten, relative, unflatten
from torch import Tensor

from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.posterior import fit_laplace
from blr_analysis.posterior.structures import Diagonal, Full, Kronecker
from blr_analysis.task import Task


@pytest.fixture(scope="module", params=["mlp", "images", "words_tied"])
def task(request: pytest.FixtureRequest) -> Task:
    model, x = example_models()[request.param]
    with torch.no_grad():
        classes = model(x).shape[-1]
    return Task(model, (x, torch.arange(len(x)) % classes))


class TestDiagonal(StructureContract):
    structure = "diag"


class TestKronecker(StructureContract):
    structure = "kron"

    def test_blocks_are_the_matrix_products(self, q) -> None:
        joined = {n for block in q.form.blocks for n in block.names}
        assert joined, "some layers must have factors"
        assert joined.isdisjoint(q.form.plain)
        assert joined | set(q.form.plain) == set(q.mean)


@cache
def gram_of(task: Task) -> Tensor:
    """Σ a aᵀ ⊗ 1 by hooks of its own, layer by layer; counts and N for the rest."""
    dense = dense_gram(task, task.parameters())
    return dense + PRIOR * torch.eye(len(dense)).double()


class TestGram(StructureContract):
    structure = "gram"

    @pytest.fixture
    def dense(self, task: Task) -> Tensor:
        return gram_of(task)


class TestLowRank(StructureContract):
    structure = "lowrank"


class TestLowRankOfFewDirections(StructureContract):
    structure, rank = "lowrank", 4


class TestFull(StructureContract):
    structure = "full"


def fitted(structure: str, prior: object = 1.0):
    model = mlp()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return fit_laplace(
        Task(model, (x, torch.arange(8) % 3)), structure=structure, prior_precision=prior
    )


def test_kronecker_prior_must_be_one_number_per_layer() -> None:
    names = list(mlp().state_dict())
    layerwise = {n: 2.0 if n.startswith("0") else 3.0 for n in names}
    q = fitted("kron", layerwise)
    assert isinstance(q.form, Kronecker)
    flat = q.form.zeros().plus_prior(layerwise)
    for name in names:
        assert torch.allclose(flat.diagonal()[name], torch.tensor(layerwise[name]).double())
    with pytest.raises(InputError, match=r"0\.weight.*0\.bias"):
        fitted("kron", {**layerwise, "0.bias": 4.0})
    per_weight = torch.rand(5, 4, dtype=torch.float64) + 1
    with pytest.raises(InputError, match="one prior precision"):
        fitted("kron", {**layerwise, "0.weight": per_weight})


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_prior_per_weight(structure: str) -> None:
    generator = torch.Generator().manual_seed(1)
    prior = {
        n: torch.rand(v.shape, generator=generator, dtype=torch.float64) + 0.5
        for n, v in mlp().state_dict().items()
    }
    flat = fitted(structure, 1.0)
    own = fitted(structure, prior)
    gap = flatten({n: own.precision(n) - flat.precision(n) for n in prior})
    assert relative(gap, flatten(prior) - 1) < 1e-10


def test_full_with_a_negative_direction() -> None:
    matrix = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    direction = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    form = Full(matrix - torch.outer(direction, direction), {"w": (3,)})
    with pytest.raises(PosteriorError, match="not positive definite"):
        form.check()
    raised, below = form.floored(0.1)
    assert below == pytest.approx(1 / 3)
    assert float(torch.linalg.eigvalsh(raised.matrix)[0]) >= 0.1 - 1e-12
    raised.check()


def test_full_floor_with_a_prior_per_weight() -> None:
    """What is raised is S − diag(δ), so a floor that S respects changes nothing."""
    prior = {"w": torch.tensor([0.1, 5.0, 1.0], dtype=torch.float64)}
    curvature = torch.ones(3, 3, dtype=torch.float64)  # rank one
    form = Full(curvature + prior["w"].diag(), {"w": (3,)})
    same, below = form.floored(prior)
    assert below == 0
    assert relative(same.matrix, form.matrix) < 1e-12
    lower = Full(prior["w"].diag() - 0.05 * curvature, {"w": (3,)})
    raised, below = lower.floored(prior)
    assert below == pytest.approx(1 / 3)
    assert relative(raised.matrix, prior["w"].diag()) < 1e-12


shapes = st.lists(
    st.lists(st.integers(1, 3), max_size=3).map(tuple), min_size=1, max_size=4
)  # scalars and ones included


@settings(max_examples=40, deadline=None)
@given(shapes=shapes, seed=st.integers(0, 2**20), lead=st.lists(st.integers(1, 3), max_size=2))
def test_any_shapes(shapes: list[tuple[int, ...]], seed: int, lead: list[int]) -> None:
    """Diagonal and full of the same diagonal matrix agree on everything, for any shapes."""
    generator = torch.Generator().manual_seed(seed)
    values = {
        f"p{i}": torch.rand(s, generator=generator, dtype=torch.float64) + 0.1
        for i, s in enumerate(shapes)
    }
    diagonal = Diagonal(values)
    full = Full(flatten(values).diag(), diagonal.shapes)
    assert full.shapes == diagonal.shapes
    size = flatten(values).numel()
    v = unflatten(torch.randn(*lead, size, generator=generator, dtype=torch.float64), values)
    for name in ("times", "solve", "root", "root_solve"):
        one, two = getattr(diagonal, name)(v), getattr(full, name)(v)
        for key, value in one.items():
            assert value.shape == (*lead, *values[key].shape)
            assert relative(two[key], value) < 1e-12
    assert float(diagonal.logdet()) == pytest.approx(float(full.logdet()), abs=1e-10)
    for inverse in (False, True):
        one, two = diagonal.diagonal(inverse=inverse), full.diagonal(inverse=inverse)
        assert relative(flatten(two), flatten(one)) < 1e-12
