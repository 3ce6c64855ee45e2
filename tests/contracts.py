"""One contract for every precision structure, held against the dense matrix in float64.

A test class inherits :class:`StructureContract` and names its structure; the dense S is built by
hand from brute-force Jacobians and the structure's eigenbasis, the rest is plain linear algebra.
"""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from oracles import dense_ggn, dense_jacobian, flatten, relative, rows, unflatten
from torch import Tensor

from blr_analysis.backprop.engine import Chunking, chunks
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.posterior import Posterior, fit_laplace
from blr_analysis.posterior.structures import KINDS, Full, Kronecker, LowRank, Structure
from blr_analysis.task import Task

EXACT = 1e-10
PRIOR = 0.7


def orthogonal_basis(form: Structure) -> Tensor:
    """The columns of the dense U of S = U diag(s) Uᵀ, block by block as an explicit ⊗.

    Of a low-rank matrix D + B C Bᵀ, the columns of B.
    """
    shapes = form.shapes
    size = sum(torch.Size(s).numel() for s in shapes.values())
    basis = torch.eye(size, dtype=torch.float64)
    if isinstance(form, LowRank):
        return rows(form.basis).mT
    if not isinstance(form, Kronecker):
        return basis
    place = unflatten(torch.arange(size), {n: torch.empty(s) for n, s in shapes.items()})
    for block in form.blocks:
        where = block.join({n: place[n] for n in block.names})
        for k, group in enumerate(where):
            index = group.flatten()
            left = torch.eye(len(group)) if block.left is None else block.left[k]
            basis[index.unsqueeze(1), index] = torch.kron(
                left.to(basis).contiguous(), block.right[k].contiguous()
            )
    return basis


def projected(form: Structure, matrix: Tensor) -> Tensor:
    """What a structure keeps of a group's share: its diagonal in the structure's basis, or all
    of it within the span of a low-rank basis."""
    if isinstance(form, Full):
        return matrix
    basis = orthogonal_basis(form)
    if isinstance(form, LowRank):
        return basis @ (basis.mT @ matrix @ basis) @ basis.mT
    return basis @ (basis.mT @ matrix @ basis).diagonal().diag() @ basis.mT


def kept(form: Structure, matrix: Tensor) -> Tensor:
    """What a fit keeps of the whole curvature: its projection, and for low rank the rest's
    diagonal."""
    inside = projected(form, matrix)
    if isinstance(form, LowRank):
        inside = inside + (matrix - inside).diagonal().clamp_min(0).diag()
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
    return kept(form, ggn) + PRIOR * torch.eye(len(ggn), dtype=ggn.dtype)


class StructureContract:
    """What every structure promises; ``task`` is a fixture of the inheriting class."""

    structure: str
    rank: int | None = None  # of low rank

    @pytest.fixture
    def jacobian(self, task: Task) -> Tensor:
        return jacobian_of(task)

    @pytest.fixture
    def q(self, task: Task) -> Posterior:
        return fitted(task, self.structure, self.rank)

    @pytest.fixture
    def dense(self, task: Task) -> Tensor:
        return dense_of(task, self.structure, self.rank)

    @pytest.fixture
    def unit(self, q: Posterior, dense: Tensor) -> dict[str, Tensor]:
        """All unit vectors, as trees with one leading dimension."""
        return unflatten(torch.eye(len(dense), dtype=dense.dtype), q.mean)

    def test_basis_is_orthogonal(self, q: Posterior) -> None:
        basis = orthogonal_basis(q.form)
        eye = torch.eye(basis.shape[1], dtype=basis.dtype)
        assert relative(basis.mT @ basis, eye) < EXACT

    def test_times(self, q: Posterior, dense: Tensor, unit: dict[str, Tensor]) -> None:
        assert relative(rows(q.form.times(unit)), dense) < EXACT

    def test_solve(self, q: Posterior, dense: Tensor, unit: dict[str, Tensor]) -> None:
        assert relative(rows(q.form.solve(unit)), torch.linalg.inv(dense)) < EXACT

    def test_root_solve(self, q: Posterior, dense: Tensor, unit: dict[str, Tensor]) -> None:
        root = rows(q.form.root_solve(unit)).mT
        assert relative(root @ root.mT, torch.linalg.inv(dense)) < EXACT

    def test_products_take_any_leading_dimensions(self, q: Posterior) -> None:
        generator = torch.Generator().manual_seed(0)
        one = {
            n: torch.randn(m.shape, generator=generator, dtype=m.dtype) for n, m in q.mean.items()
        }
        many = {n: v.expand(2, 3, *v.shape) for n, v in one.items()}
        for product in (q.form.times, q.form.solve, q.form.root_solve):
            alone, together = product(one), product(many)
            for name, value in alone.items():
                assert value.shape == q.mean[name].shape
                assert relative(together[name], value.expand(2, 3, *value.shape)) < EXACT

    def test_wrong_vectors_are_named(self, q: Posterior) -> None:
        name = next(iter(q.mean))
        missing = {n: m for n, m in q.mean.items() if n != name}
        with pytest.raises(InputError, match=name.replace(".", r"\.")):
            q.form.solve(missing)
        with pytest.raises(InputError, match=name.replace(".", r"\.")):
            q.form.times({**q.mean, name: torch.zeros(99)})

    def test_diagonals(self, q: Posterior, dense: Tensor) -> None:
        inverse = torch.linalg.inv(dense)
        precisions = flatten({n: q.precision(n) for n in q.mean})
        variances = flatten({n: q.variance(n) for n in q.mean})
        assert relative(precisions, dense.diagonal()) < EXACT
        assert relative(variances, inverse.diagonal()) < EXACT
        assert all(q.variance(n).shape == m.shape for n, m in q.mean.items())

    def test_diagonals_are_copies(self, q: Posterior) -> None:
        name = next(iter(q.mean))
        before = q.precision(name).clone()
        q.precision(name).fill_(-1)
        assert torch.equal(q.precision(name), before)

    def test_logdet(self, q: Posterior, dense: Tensor) -> None:
        assert abs(float(q.form.logdet() - torch.logdet(dense))) < 1e-9 * len(dense)

    def test_the_basis_in_which_it_is_cheapest(
        self, task: Task, q: Posterior, dense: Tensor, jacobian: Tensor
    ) -> None:
        """Gradients turned into it, Σ applied there, and turned back, are Σ g; squares add up."""
        (chunk,) = chunks(task, q.mean, Chunking(chunk_size=100, progress=False))
        terms = chunk.jacobian_terms()
        turned = {n: g for term in q.form.into_basis(terms) for n, g in term.jacobian().items()}
        shapes = q.form.basis_shapes()
        for name, shape in shapes.items():  # a parameter that no term has
            turned.setdefault(name, dense.new_zeros(*jacobian.shape[:2], *shape))
        assert {n: tuple(g.shape[2:]) for n, g in turned.items()} == shapes
        solved = q.form.backward(q.form.basis_solve({n: turned[n] for n in shapes}))
        ours = torch.cat([solved[n].flatten(2) for n in q.mean], dim=-1)
        assert relative(ours, jacobian @ torch.linalg.inv(dense)) < EXACT
        squares = q.form.square_sums(terms)
        for name, sums in squares.items():
            assert relative(sums, turned[name].square().sum((0, 1))) < EXACT
        total = sum(float(sums.sum()) for sums in squares.values())
        assert total == pytest.approx(float(jacobian.square().sum()), rel=1e-10)
        one = {n: torch.ones((1, *s), dtype=dense.dtype) for n, s in shapes.items()}
        assert {n: tuple(v.shape[1:]) for n, v in q.form.basis_solve(one).items()} == shapes

    def test_to_a_record_and_back(
        self, q: Posterior, dense: Tensor, unit: dict[str, Tensor]
    ) -> None:
        record = json.loads(json.dumps(q.form.record()))
        back = KINDS[q.form.kind].read(q.form.tensors(), record, list(q.mean))
        assert back.shapes == q.form.shapes
        assert relative(rows(back.times(unit)), dense) < EXACT

    def test_one_number_per_weight(self, q: Posterior, dense: Tensor) -> None:
        values = q.form.per_weight
        assert (values is not None) == (self.structure == "diag")
        if values is not None:
            assert relative(flatten(values), dense.diagonal()) < EXACT

    @pytest.mark.parametrize("chunk_size", [1, 4, 100])
    def test_gram(
        self, task: Task, q: Posterior, dense: Tensor, jacobian: Tensor, chunk_size: int
    ) -> None:
        truth = torch.einsum("ncp,pq,ndq->ncd", jacobian, torch.linalg.inv(dense), jacobian)
        parts = chunks(task, q.mean, Chunking(chunk_size=chunk_size, progress=False))
        ours = torch.cat([q.form.gram(chunk.jacobian_terms()) for chunk in parts])
        assert relative(ours, truth) < EXACT

    def test_gram_of_one_column(
        self, task: Task, q: Posterior, dense: Tensor, jacobian: Tensor
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        c = torch.randn(jacobian.shape[:2], generator=generator, dtype=torch.float64)
        g = torch.einsum("ncp,nc->np", jacobian, c)
        truth = torch.einsum("np,pq,nq->n", g, torch.linalg.inv(dense), g)
        parts = chunks(task, q.mean, Chunking(chunk_size=3, progress=False), columns=1)
        ours = [
            q.form.gram(chunk.terms(c[chunk.indices].unsqueeze(1))).flatten() for chunk in parts
        ]
        assert relative(torch.cat(ours), truth) < EXACT

    def test_gram_leaves_the_terms_alone(self, task: Task, q: Posterior) -> None:
        chunk = next(iter(chunks(task, q.mean, Chunking(chunk_size=3, progress=False))))
        terms = chunk.jacobian_terms()
        first, added, second = q.form.gram(terms), q.form.zeros().add(terms), q.form.gram(terms)
        assert torch.equal(first, second)
        again = q.form.zeros().add(terms)
        for name, value in added.tensors().items():
            assert torch.equal(value, again.tensors()[name])

    def test_add_plus_zeros(
        self, task: Task, q: Posterior, dense: Tensor, jacobian: Tensor, unit: dict[str, Tensor]
    ) -> None:
        total = torch.einsum("ncp,ncq->pq", jacobian, jacobian)
        added = q.form.zeros()
        for chunk in chunks(task, q.mean, Chunking(chunk_size=4, progress=False)):
            added = added.add(chunk.jacobian_terms())
        truth = projected(q.form, total)
        assert relative(rows(added.times(unit)), truth) < EXACT
        both = q.form.plus(added, 0.25)
        assert relative(rows(both.times(unit)), dense + 0.25 * truth) < EXACT
        back = both.plus(added, -0.25)
        assert relative(rows(back.times(unit)), dense) < EXACT
        assert relative(rows(q.form.times(unit)), dense) < EXACT  # nothing changed in place

    def test_plus_prior(self, q: Posterior, dense: Tensor, unit: dict[str, Tensor]) -> None:
        shifted = q.form.plus_prior({n: 0.5 for n in q.mean})
        truth = dense + 0.5 * torch.eye(len(dense), dtype=dense.dtype)
        assert relative(rows(shifted.times(unit)), truth) < EXACT

    def test_prior_must_name_every_parameter(self, q: Posterior) -> None:
        names = list(q.mean)
        with pytest.raises(InputError, match=names[-1].replace(".", r"\.")):
            q.form.plus_prior(dict.fromkeys(names[:-1], 1.0))

    def test_floored(self, q: Posterior, dense: Tensor, unit: dict[str, Tensor]) -> None:
        same, below = q.form.floored(PRIOR)
        assert below == 0
        assert relative(rows(same.times(unit)), dense) < EXACT
        lowered = q.form.plus(q.form, -1.5).plus_prior(PRIOR)  # −S/2 + δ: at or below δ everywhere
        raised, below = lowered.floored(PRIOR)
        truth = PRIOR * torch.eye(len(dense), dtype=dense.dtype)
        assert below == 1
        assert relative(rows(raised.times(unit)), truth) < EXACT

    def test_samples(self, q: Posterior, dense: Tensor) -> None:
        n = 20_000
        draws = rows(q.sample(generator=torch.Generator().manual_seed(0), n=n))
        gap = draws - flatten(q.mean)
        # With S = R Rᵀ, Rᵀ(θ − m) is standard normal: P means within 5/√n, and the covariance's
        # distance from I is P/√n in Frobenius norm, up to a few per cent.
        white = gap @ torch.linalg.cholesky(dense)
        size = len(dense)
        assert float(white.mean(0).abs().max()) < 5 / n**0.5
        covariance = white.mT @ white / n
        distance = torch.linalg.matrix_norm(covariance - torch.eye(size, dtype=dense.dtype))
        assert 0.9 < float(distance) / (size * (size + 1) / n) ** 0.5 < 1.1

    def test_sampling_is_reproducible(self, q: Posterior) -> None:
        one, two, other = (q.sample(generator=torch.Generator().manual_seed(s)) for s in (3, 3, 4))
        name = next(iter(q.mean))
        assert torch.equal(one[name], two[name])
        assert not torch.equal(one[name], other[name])
        assert one[name].shape == q.mean[name].shape

    def test_save_and_load_to_the_bit(self, q: Posterior, tmp_path) -> None:
        for path in (tmp_path / "q.safetensors", tmp_path / "folder"):
            q.save(path)
            back = Posterior.load(path)
            assert back.structure == q.structure
            assert back.n_data == q.n_data
            assert back.prior_precision == q.prior_precision
            assert back.record.items() >= q.record.items()
            assert list(back.mean) == list(q.mean)
            for name, m in q.mean.items():
                assert torch.equal(back.mean[name], m)
                assert relative(back.variance(name), q.variance(name)) < 1e-14
            assert back.form.tensors().keys() == q.form.tensors().keys()
            for name, tensor in q.form.tensors().items():
                assert torch.equal(back.form.tensors()[name], tensor)

    def test_saved_posterior_answers_the_same(self, task: Task, q: Posterior, tmp_path) -> None:
        q.save(tmp_path / "q.safetensors")
        back = Posterior.load(tmp_path / "q.safetensors")
        for chunk in chunks(task, q.mean, Chunking(chunk_size=3, progress=False)):
            terms = chunk.jacobian_terms()
            assert relative(back.form.gram(terms), q.form.gram(terms)) < 1e-13

    def test_to_float32(self, q: Posterior) -> None:
        single = q.to("cpu", torch.float32)
        assert all(m.dtype == torch.float32 for m in single.mean.values())
        assert all(t.dtype == torch.float32 for t in single.form.tensors().values())
        for name in q.mean:
            assert single.variance(name).dtype == torch.float32
            assert relative(single.variance(name).double(), q.variance(name)) < 1e-4
        assert q.to("cpu") is q
        assert next(iter(q.mean.values())).dtype == torch.float64

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -2.0])
    def test_check(self, q: Posterior, bad: float) -> None:
        q.form.check()
        with pytest.raises(PosteriorError, match="precision"):
            q.form.plus(q.form, bad).check()
