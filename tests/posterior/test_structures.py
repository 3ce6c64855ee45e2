"""Every structure on models with every kind of term: the contract, and what each has alone."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from contracts import PRIOR, StructureContract
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Graph, example_models, mlp, normal
from oracles import dense_gram, flatten, relative, unflatten
from torch import Tensor, nn

from blr_analysis.posterior import Posterior, fit_laplace
from blr_analysis.posterior.structures import Diagonal, Full
from blr_analysis.sensitivity import sensitivity
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
    structure = "lowrank"
    rank = 4


class TestFull(StructureContract):
    structure = "full"


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
    for name in ("times", "solve", "root_solve"):
        of_diagonal = getattr(diagonal, name)(v)
        of_full = getattr(full, name)(v)
        for key, value in of_diagonal.items():
            assert value.shape == (*lead, *values[key].shape)
            assert relative(of_full[key], value) < 1e-12
    assert float(diagonal.logdet()) == pytest.approx(float(full.logdet()), abs=1e-10)
    for inverse in (False, True):
        of_diagonal = diagonal.diagonal(inverse=inverse)
        of_full = full.diagonal(inverse=inverse)
        assert relative(flatten(of_full), flatten(of_diagonal)) < 1e-12


def wrapped(name: str, inside: nn.Module) -> nn.Module:
    """As torch.compile, FSDP and checkpoint wrappers name what is inside of them."""
    return Graph(lambda m, x: getattr(m, name)(x), **{name: inside})


@pytest.mark.parametrize("structure", ["diag", "kron", "lowrank", "full"])
@pytest.mark.parametrize("name", ["_orig_mod", "_fsdp_wrapped_module", "module"])
def test_posteriors_fit_wrapped_models_and_bare_ones(structure: str, name: str) -> None:
    bare = mlp()
    whole = nn.Sequential(*bare.children())
    first = nn.Sequential(wrapped(name, bare[0]), *bare[1:])
    models = bare, wrapped(name, whole) if name == "module" else first
    tasks = [Task(model, (normal(8, 4), torch.arange(8) % 3)) for model in models]
    assert list(tasks[0].parameters()) != list(tasks[1].parameters())
    settings = dict(structure=structure, prior_precision=0.7)
    for fitted_task, wrapped_task in (tasks, tasks[::-1]):
        initial = {n: p + 0.1 for n, p in fitted_task.parameters().items()}
        q = fit_laplace(fitted_task, initial=initial, **settings)
        influence = sensitivity(fitted_task, q).self_influence
        assert relative(sensitivity(wrapped_task, q).self_influence, influence) < 1e-10
        moved = q.on(wrapped_task)
        assert list(moved.mean) == list(moved.initial) == list(wrapped_task.parameters())


def test_tied_weights_are_held_and_saved_once(tmp_path) -> None:
    model, ids = example_models()["words_tied"]
    task = Task(model, (ids, torch.arange(len(ids)) % 7))
    q = fit_laplace(task, structure="kron", prior_precision=1.0)
    assert "words.weight" in q.mean
    assert "read.weight" not in q.mean
    q.save(tmp_path / "q")
    names = json.loads(next((tmp_path / "q").glob("*.index.json")).read_text())["weight_map"]
    assert not any(name.startswith("read.weight") for name in names)
    loaded = Posterior.load(tmp_path / "q")
    assert relative(flatten(loaded.mean), flatten(q.mean)) == 0
    assert loaded.on(task) is loaded
