"""One contract for every precision structure, compared with the dense matrix in float64.

A test class inherits :class:`StructureContract` and names its structure; the dense S is built by
hand from brute-force Jacobians and the structure's eigenbasis, the rest is plain linear algebra.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from oracles import dense_ggn, dense_jacobian, flatten, relative, rows, unflatten
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from blr_analysis.backprop.engine import chunks
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.posterior import Posterior, fit_laplace
from blr_analysis.posterior.structures import Full, Kronecker, LowRank, Structure
from blr_analysis.task import Task

EXACT = 1e-10
PRIOR = 0.7


def orthogonal_basis(form: Structure) -> Tensor:
    """The columns of the dense U of S = U diag(s) Uᵀ, block by block as an explicit ⊗.

    Of a low-rank matrix D + B C Bᵀ, the columns of B.
    """
    shapes = form.shapes
    if isinstance(form, LowRank):
        return rows(form.basis).mT
    size = sum(torch.Size(s).numel() for s in shapes.values())
    basis = torch.eye(size, dtype=torch.float64)
    if not isinstance(form, Kronecker):
        return basis
    place = unflatten(torch.arange(size), {n: torch.empty(s) for n, s in shapes.items()})
    for block in form.blocks:
        positions = block.join({n: place[n] for n in block.names})
        for k, group in enumerate(positions):
            index = group.flatten()
            left = torch.eye(len(group)) if block.left is None else block.left[k]
            product = torch.kron(left.to(basis).contiguous(), block.right[k].contiguous())
            basis[index.unsqueeze(1), index] = product
    return basis


def projected(form: Structure, matrix: Tensor) -> Tensor:
    """The part of a matrix that a structure stores: the diagonal in its basis; for low rank,
    everything within the span of its basis."""
    basis = orthogonal_basis(form)
    inside = basis.mT @ matrix @ basis
    if not isinstance(form, Full | LowRank):
        inside = inside.diagonal().diag()
    return basis @ inside @ basis.mT


def approximated(form: Structure, curvature: Tensor) -> Tensor:
    """The curvature as a fit stores it: its projection and, for low rank, the diagonal of what
    remains."""
    inside = projected(form, curvature)
    if isinstance(form, LowRank):
        inside = inside + (curvature - inside).diagonal().clamp_min(0).diag()
    return inside


@cache
def jacobian_of(task: Task) -> Tensor:
    """The task's brute-force Jacobians, taken once."""
    return dense_jacobian(task, task.parameters())


@cache
def fitted(task: Task, structure: str, rank: int | None) -> Posterior:
    """A posterior of this structure on the task, fitted once."""
    return fit_laplace(task, structure=structure, prior_precision=PRIOR, rank=rank)


@cache
def dense_of(task: Task, structure: str, rank: int | None) -> Tensor:
    """S by hand, from brute-force Jacobians and the structure's basis alone."""
    ggn = dense_ggn(task, jacobian_of(task))
    form = fitted(task, structure, rank).form
    return approximated(form, ggn) + PRIOR * torch.eye(len(ggn), dtype=ggn.dtype)


def close(actual: Tensor, truth: Tensor, tolerance: float = EXACT) -> None:
    assert relative(actual, truth) < tolerance


def same_tensors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def eye(dense: Tensor) -> Tensor:
    return torch.eye(len(dense), dtype=dense.dtype)


class StructureContract:
    """The promises of every structure; ``task`` is a fixture of the inheriting class."""

    structure: str
    rank: int | None = None  # of low rank

    @pytest.fixture
    def q(self, task: Task) -> Posterior:
        return fitted(task, self.structure, self.rank)

    @pytest.fixture
    def dense(self, task: Task) -> Tensor:
        return dense_of(task, self.structure, self.rank)

    @pytest.fixture
    def unit(self, q: Posterior, dense: Tensor) -> dict[str, Tensor]:
        """All unit vectors, as trees with one leading dimension."""
        return unflatten(eye(dense), q.mean)

    def test_products(self, q: Posterior, dense: Tensor, unit: dict[str, Tensor]) -> None:
        basis = orthogonal_basis(q.form)
        inverse = torch.linalg.inv(dense)
        close(basis.mT @ basis, eye(basis.mT))
        close(rows(q.form.times(unit)), dense)
        close(rows(q.form.solve(unit)), inverse)
        root = rows(q.form.root_solve(unit)).mT
        close(root @ root.mT, inverse)
        for product in (q.form.times, q.form.solve, q.form.root_solve):
            repeated = product({n: v.expand(2, *v.shape) for n, v in unit.items()})
            single = product({n: v[0] for n, v in unit.items()})
            for name, value in product(unit).items():
                close(repeated[name], value.expand(2, *value.shape))
                close(single[name], value[0])

    def test_what_is_wrong_is_named(self, q: Posterior) -> None:
        (name, _), *others = q.mean.items()
        word = name.replace(".", r"\.")
        missing = dict(others)
        with pytest.raises(InputError, match=word):
            q.form.solve(missing)
        with pytest.raises(InputError, match=word):
            q.form.times({**q.mean, name: torch.zeros(99)})
        with pytest.raises(InputError, match=word):
            q.form.plus_prior(dict.fromkeys(missing, 1.0))
        q.form.check()
        for bad in (float("nan"), float("inf"), -2.0):
            with pytest.raises(PosteriorError, match="precision"):
                q.form.plus(q.form, bad).check()

    def test_diagonals_and_logdet(self, q: Posterior, dense: Tensor) -> None:
        name = next(iter(q.mean))
        close(flatten({n: q.precision(n) for n in q.mean}), dense.diagonal())
        variances = {n: q.variance(n) for n in q.mean}
        close(flatten(variances), torch.linalg.inv(dense).diagonal())
        assert all(variances[n].shape == m.shape for n, m in q.mean.items())
        before = q.precision(name).clone()
        q.precision(name).fill_(-1)  # a copy
        assert torch.equal(q.precision(name), before)
        assert abs(float(q.form.logdet() - torch.logdet(dense))) < 1e-9 * len(dense)
        assert (q.form.per_weight is not None) == (self.structure == "diag")

    def test_the_basis_in_which_it_is_cheapest(
        self, task: Task, q: Posterior, dense: Tensor
    ) -> None:
        """Gradients that are turned into the basis, multiplied by Σ there and turned back are Σ g;
        squares add up."""
        jacobian = jacobian_of(task)
        (chunk,) = chunks(task, q.mean, size=100)
        terms = chunk.jacobian_terms()
        turned = {n: g for term in q.form.into_basis(terms) for n, g in term.jacobian().items()}
        shapes = q.form.basis_shapes()
        for name, shape in shapes.items():  # zero for a parameter that no term has
            turned.setdefault(name, dense.new_zeros(*jacobian.shape[:2], *shape))
        assert {n: tuple(g.shape[2:]) for n, g in turned.items()} == shapes
        solved = q.form.backward(q.form.basis_solve({n: turned[n] for n in shapes}))
        ours = torch.cat([solved[n].flatten(2) for n in q.mean], dim=-1)
        close(ours, jacobian @ torch.linalg.inv(dense))
        squares = q.form.square_sums(terms)
        for name, sums in squares.items():
            close(sums, turned[name].square().sum((0, 1)))
        total = sum(float(sums.sum()) for sums in squares.values())
        assert total == pytest.approx(float(jacobian.square().sum()), rel=1e-10)

    @pytest.mark.parametrize("chunk_size", [1, 4, 100])
    def test_gram(self, task: Task, q: Posterior, dense: Tensor, chunk_size: int) -> None:
        """Of all columns, and of one; the terms do not change."""
        jacobian = jacobian_of(task)
        truth = torch.einsum("ncp,pq,ndq->ncd", jacobian, torch.linalg.inv(dense), jacobian)
        grams = [
            q.form.gram(chunk.jacobian_terms()) for chunk in chunks(task, q.mean, size=chunk_size)
        ]
        close(torch.cat(grams), truth)
        generator = torch.Generator().manual_seed(1)
        c = torch.randn(jacobian.shape[:2], generator=generator, dtype=torch.float64)
        grams = [
            q.form.gram(chunk.terms(c[chunk.indices].unsqueeze(1))).flatten()
            for chunk in chunks(task, q.mean, size=chunk_size, columns=1)
        ]
        close(torch.cat(grams), torch.einsum("nc,ncd,nd->n", c, truth, c))
        terms = next(iter(chunks(task, q.mean, size=3))).jacobian_terms()
        first = q.form.gram(terms)
        q.form.zeros().add(terms)
        assert torch.equal(first, q.form.gram(terms))

    def test_sums(self, task: Task, q: Posterior, dense: Tensor, unit: dict[str, Tensor]) -> None:
        jacobian = jacobian_of(task)
        added = q.form.zeros()
        for chunk in chunks(task, q.mean, size=4):
            added = added.add(chunk.jacobian_terms())
        truth = projected(q.form, torch.einsum("ncp,ncq->pq", jacobian, jacobian))
        close(rows(added.times(unit)), truth)
        total = q.form.plus(added, 0.25)
        close(rows(total.times(unit)), dense + 0.25 * truth)
        close(rows(total.plus(added, -0.25).times(unit)), dense)
        close(rows(q.form.times(unit)), dense)  # nothing changed in place

    def test_priors_and_floors(self, q: Posterior, dense: Tensor, unit: dict[str, Tensor]) -> None:
        shifted = q.form.plus_prior({n: 0.5 for n in q.mean})
        close(rows(shifted.times(unit)), dense + 0.5 * eye(dense))
        unchanged, below = q.form.floored(PRIOR)
        assert below == 0
        close(rows(unchanged.times(unit)), dense)
        lowered = q.form.plus(q.form, -1.5).plus_prior(PRIOR)  # −S/2 + δ: at or below δ everywhere
        raised, below = lowered.floored(PRIOR)
        assert below == 1
        close(rows(raised.times(unit)), PRIOR * eye(dense))

    def test_a_matrix_at_the_prior_is_not_raised(
        self, q: Posterior, dense: Tensor, unit: dict[str, Tensor]
    ) -> None:
        """Nor is one that rounding left a little below, and no bit of it changes."""
        at_prior = q.form.zeros().plus_prior(PRIOR)
        for prior in (PRIOR, PRIOR * (1 + 1e-9)):
            unchanged, share = at_prior.floored(prior)
            assert share == 0
            close(rows(unchanged.times(unit)), PRIOR * eye(dense), 1e-8)
        unchanged, _ = at_prior.floored(PRIOR)
        same_tensors(unchanged.tensors(), at_prior.tensors())
        raised, share = at_prior.floored(2 * PRIOR)
        assert share > 0.5
        close(rows(raised.times(unit)), 2 * PRIOR * eye(dense))

    def test_eigenvalues_below_the_prior_are_raised_and_counted(
        self, q: Posterior, dense: Tensor, unit: dict[str, Tensor]
    ) -> None:
        eigenvalues, eigenvectors = torch.linalg.eigh(dense / 2)
        raised, share = q.form.plus(q.form, -0.5).floored(PRIOR)
        if isinstance(q.form, LowRank):  # its diagonal and its directions, one by one
            assert 0 < share < 1
            assert float(torch.linalg.eigvalsh(rows(raised.times(unit))).min()) > PRIOR - EXACT
            return
        is_below = eigenvalues < PRIOR * (1 - 1e-6)
        assert share == pytest.approx(float(is_below.double().mean()))
        truth = (eigenvectors * eigenvalues.clamp_min(PRIOR)) @ eigenvectors.mT
        close(rows(raised.times(unit)), truth)

    def test_a_rotation_costs_what_its_products_cost(self, q: Posterior) -> None:
        """Of a gradient as a matrix, and of its two factors; a multiplication is two operations."""
        blocks = q.form.blocks if isinstance(q.form, Kronecker) else ()
        with FlopCounterMode(display=False) as of_matrices:
            for block in blocks:
                block.turn(torch.zeros(block.shape, dtype=torch.float64))
        with FlopCounterMode(display=False) as of_factors:
            for block in blocks:
                for side in (block.left, block.right):
                    if side is not None:
                        _ = side @ side[..., :1]
        factored, explicit = q.form.rotation_cost()
        assert 2 * factored == of_factors.get_total_flops()
        assert 2 * explicit == of_matrices.get_total_flops()

    def test_samples(self, q: Posterior, dense: Tensor) -> None:
        n = 5_000
        size = len(dense)
        name = next(iter(q.mean))
        draws = rows(q.sample(generator=torch.Generator().manual_seed(0), n=n))
        # With S = R Rᵀ, Rᵀ(θ − m) is standard normal: P means within 5/√n, and the covariance's
        # distance from I is P/√n in Frobenius norm, up to a few per cent.
        white = (draws - flatten(q.mean)) @ torch.linalg.cholesky(dense)
        assert float(white.mean(0).abs().max()) < 5 / n**0.5
        distance = torch.linalg.matrix_norm(white.mT @ white / n - eye(dense))
        assert 0.9 < float(distance) / (size * (size + 1) / n) ** 0.5 < 1.1

        def draw(seed: int) -> Tensor:
            return q.sample(generator=torch.Generator().manual_seed(seed))[name]

        assert torch.equal(draw(3), draw(3))
        assert not torch.equal(draw(3), draw(4))
        assert draw(3).shape == q.mean[name].shape

    def test_save_and_load_to_the_bit(self, q: Posterior, dense: Tensor, tmp_path: Path) -> None:
        for place in (tmp_path / "q.safetensors", tmp_path / "folder"):
            q.save(place)
            loaded = Posterior.load(place)
            for field in ("structure", "n_data", "prior_precision"):
                assert getattr(loaded, field) == getattr(q, field)
            assert loaded.record.items() >= q.record.items()
            assert list(loaded.mean) == list(q.mean)
            assert loaded.form.shapes == q.form.shapes
            same_tensors(loaded.mean, q.mean)
            same_tensors(loaded.form.tensors(), q.form.tensors())
        unit = unflatten(eye(dense), q.mean)
        close(rows(loaded.form.times(unit)), dense)
        close(rows(loaded.form.solve(unit)), torch.linalg.inv(dense))

    def test_to_float32(self, q: Posterior) -> None:
        single = q.to("cpu", torch.float32)
        tensors = [*single.mean.values(), *single.form.tensors().values()]
        assert all(tensor.dtype == torch.float32 for tensor in tensors)
        for name in q.mean:
            assert single.variance(name).dtype == torch.float32
            close(single.variance(name).double(), q.variance(name), 1e-4)
        assert q.to("cpu") is q
        assert next(iter(q.mean.values())).dtype == torch.float64
