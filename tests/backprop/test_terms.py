"""Every kind of term against its own dense gradients: one contract for all of them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from models import normal
from oracles import relative
from torch import Tensor

from blr_analysis.backprop import matmul
from blr_analysis.backprop.matrices import Basis, Joint, MatrixShape
from blr_analysis.backprop.outer import Outer
from blr_analysis.backprop.rows import Rows
from blr_analysis.backprop.terms import Dense, Term, Tree, merged

EXACT = 1e-12
B = 5  # examples


def outer(
    g: int = 1,
    t: int = 1,
    o: int = 3,
    i: int = 4,
    k: int = 2,
    *,
    names=("w", "b"),
    turned=False,
    patches=False,
    alike=False,
    units=False,
) -> tuple[Term, Tree]:
    """Σ_t d_ct a_tᵀ, group by group, written out; ``patches`` have positions last in memory, d may
    be ``alike`` for all examples, or ``units`` too."""
    shape = (i, o) if turned else (g * o, i)
    a = normal(B, g, t, i)
    d = [normal(B, g, t, o, seed=c + 1) for c in range(k)]
    if patches:
        a = a.mT.contiguous().mT
    if units:
        d = list(torch.eye(o, dtype=a.dtype)[:k].view(k, 1, 1, 1, o))
    if alike:
        d = [x[:1].expand(B, g, t, o) for x in d]
    stacked = torch.stack(d, dim=1)  # [B, K, g, T, O]
    weight = torch.einsum("bkgto,bgti->bkgoi", stacked, a)
    weight = weight.squeeze(2).mT if turned else weight.reshape(B, k, *shape)
    bias = stacked.sum(3).reshape(B, k, g * o)
    gradients = {"w": weight, "b": bias}
    weight_name = "w" if "w" in names else None
    bias_name = "b" if "b" in names else None
    joint = Joint(weight_name, bias_name, MatrixShape(g, o, i, shape, turned))
    return Outer(joint, a, d), {n: gradients[n] for n in names}


def rows(k: int = 2, first: int = 0) -> tuple[Term, Tree]:
    ids = torch.arange(B * 4).view(B, 4) % 3 + first
    d = [normal(B, 4, 2, seed=c + 1) for c in range(k)]
    table = torch.zeros(B, k, 6, 2, dtype=torch.float64)
    for b in range(B):
        for position, v in enumerate(ids[b]):
            for c in range(k):
                table[b, c, v] += d[c][b, position]
    return Rows.collect("w", (6, 2), ids, d), {"w": table}


def dense(k: int = 2) -> tuple[Term, Tree]:
    columns = {"w": normal(B, k, 3, 2), "b": normal(B, k, 3, seed=1)}
    return Dense(columns), {n: g.clone() for n, g in columns.items()}


def tied(k: int = 2, *, names=("w", "b"), first: bool = True) -> tuple[Term, Tree]:
    """A table of 6 words that is the read-out too, over 5 positions."""
    table, of_table = rows(k, first=1)
    matrix, truth = outer(t=5, o=6, i=2, k=k, names=names)
    (term,) = merged([table, matrix] if first else [matrix, table])
    assert not isinstance(term, Dense)  # no table for each example
    return term, {n: of_table[n] + g if n in of_table else g for n, g in truth.items()}


TIED = ("tied", "tied with a bias", "tied, of one column")
KINDS = {
    "dense": dense,
    "rows": rows,
    "linear": outer,
    "wide": partial(outer, o=2, i=9),
    "tall": partial(outer, o=9, i=2),
    "one column": partial(outer, o=9, i=2, k=1),
    "few positions": partial(outer, t=2, o=6, i=7),
    "positions": partial(outer, t=20),
    "groups": partial(outer, g=2, t=3),
    "groups of one position": partial(outer, g=2),
    "transposed": partial(outer, t=2, turned=True),
    "no bias": partial(outer, t=3, names=("w",)),
    "tied": partial(tied, names=("w",)),
    "tied with a bias": tied,
    "tied, of one column": partial(tied, k=1, first=False),
    "positions of one column": partial(outer, t=20, o=9, i=5, k=1),
    "columns alike": partial(outer, k=3, alike=True),
    "unit columns": partial(outer, o=3, k=3, alike=True, units=True),
    "unit columns in groups": partial(outer, g=2, o=3, k=3, alike=True, units=True),
    "patches": partial(outer, t=9, o=9, i=2, patches=True),
    "patches, no bias": partial(outer, t=9, o=9, i=2, patches=True, names=("w",)),
    "bias alone": partial(outer, t=3, names=("b",)),
}


@pytest.fixture(params=KINDS)
def case(request) -> tuple[Term, Tree]:
    return KINDS[request.param]()


def like(truth: Tree, *lead: int, seed: int = 7) -> Tree:
    return {n: normal(*lead, *g.shape[2:], seed=seed + j) for j, (n, g) in enumerate(truth.items())}


def flat(tree: Tree, lead: int) -> Tensor:
    return torch.cat([x.flatten(lead) for x in tree.values()], dim=-1)


def same(ours: Tree, truth: Tree) -> None:
    assert ours.keys() == truth.keys()
    for name, x in truth.items():
        assert ours[name].shape == x.shape
        assert relative(ours[name], x) < EXACT


def test_what_it_holds(case: tuple[Term, Tree]) -> None:
    term, truth = case
    assert set(term.names) == set(truth)
    assert (term.n_examples, term.n_columns) == next(iter(truth.values())).shape[:2]
    same(term.jacobian(), truth)


def test_sums(case: tuple[Term, Tree]) -> None:
    term, truth = case
    same(term.sum(), {n: g.sum((0, 1)) for n, g in truth.items()})
    squares = {n: g.square().sum((0, 1)) for n, g in truth.items()}
    same(term.square_sum(), squares)
    into = like(truth)
    expected = {n: x + squares[n] for n, x in into.items()}
    term.add_square_sum(into)
    same(into, expected)


@pytest.fixture(params=["all examples at once", "one at a time"])
def together(request, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "one at a time":
        monkeypatch.setattr("blr_analysis.backprop.factored_gram.STACKED_GRADS", 1)


@pytest.mark.usefixtures("together")
def test_gram(case: tuple[Term, Tree]) -> None:
    term, truth = case
    variance = {n: x.exp() for n, x in like(truth).items()}
    j = flat(truth, 2)
    expected = torch.einsum("bkp,p,blp->bkl", j, flat(variance, 0), j)
    assert relative(term.gram(variance), expected) < EXACT
    into = normal(*expected.shape, seed=9)
    expected = expected + into
    assert relative(term.gram(variance, into), expected) < EXACT
    torch.testing.assert_close(into, expected)  # in its place


@pytest.mark.parametrize("r", [1, 3, 40])
@pytest.mark.parametrize("room", [None, 1])
def test_products_and_combinations(case: tuple[Term, Tree], r: int, room: int | None) -> None:
    term, truth = case
    stack = like(truth, r)
    scale = like(truth, seed=20)
    j = flat(truth, 2)
    plain = flat(stack, 1)
    scaled = flat(stack, 1) * flat(scale, 0)
    ours = term.products(stack, dtype=torch.float64, room=room)
    assert relative(ours, torch.einsum("bkp,rp->bkr", j, plain)) < EXACT
    ours = term.products(stack, dtype=torch.float64, scale=scale, room=room)
    assert relative(ours, torch.einsum("bkp,rp->bkr", j, scaled)) < EXACT
    weights = normal(*j.shape[:2], r, seed=30)
    into = {n: torch.zeros_like(u) for n, u in stack.items()}
    term.combined(weights, into)
    assert relative(flat(into, 1), torch.einsum("bkr,bkp->rp", weights, j)) < EXACT


def test_parts_and_precision(case: tuple[Term, Tree]) -> None:
    term, truth = case
    same(term.part(slice(1, 3)).jacobian(), {n: g[1:3] for n, g in truth.items()})
    sizes = range(0, term.n_examples, 2)
    for start, part in zip(sizes, term.divided(2), strict=True):
        same(part.jacobian(), {n: g[start : start + 2] for n, g in truth.items()})
    single = term.cast(torch.float32).jacobian()
    assert all(g.dtype == torch.float32 for g in single.values())
    for name, g in truth.items():
        assert relative(single[name].double(), g) < 1e-5


def test_shared_parameters_are_added_before_any_square(case: tuple[Term, Tree]) -> None:
    term, truth = case
    (doubled,) = merged([term, term])
    same(doubled.jacobian(), {n: 2 * g for n, g in truth.items()})
    (mixed,) = merged([term, Dense(truth)])
    same(mixed.jacobian(), {n: 2 * g for n, g in truth.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_projections_on_matrices_of_rank_one(kind: str) -> None:
    term, truth = KINDS[kind](k=1)
    covered = 0.0
    for joint in term.joints():
        gradient = joint.join(truth)[:, 0]  # [B, g, O, I]
        g, o, i = gradient.shape[1:]
        left = normal(g, o, 6, seed=3)
        right = normal(g, i, 6, seed=4)
        expected = torch.einsum("bgoi,gok,gik->bk", gradient, left, right)
        assert relative(term.projected(joint, left, right, 10), expected) < EXACT
        covered += float(gradient.square().sum())
    assert covered == pytest.approx(float(flat(truth, 2).square().sum()))


@pytest.mark.usefixtures("together")
def test_rotation(case: tuple[Term, Tree]) -> None:
    """U_Gᵀ G U_A in any orthogonal basis, and its gram."""
    term, truth = case
    if isinstance(term, Outer):
        joint = term.joint
    else:  # a weight with its bias as the last column, or a table
        rest = "b" if "b" in truth else None
        shape = tuple(truth["w"].shape[2:])
        joint = Joint("w", rest, MatrixShape(1, *shape, shape))
    matrices = joint.join(truth).movedim(1, 2)  # [B, g, K, O, I']
    _, g, _, o, i = matrices.shape
    right = torch.linalg.qr(normal(g, i, i, seed=i))[0]
    left = torch.linalg.qr(normal(g, o, o, seed=o))[0]
    basis = Basis(joint.weight, joint.bias, joint.layout, right, left)
    turned = torch.einsum("gpo,bgkpq,gqi->bkgoi", left, matrices, right)
    same(term.rotated(basis).jacobian(), {basis.key: turned})
    variance = normal(g, o, i, seed=9).exp()
    expected = torch.einsum("bkgoi,goi,blgoi->bkl", turned, variance, turned)
    assert relative(term.rotated_gram(basis, variance), expected) < EXACT
    into = normal(*expected.shape, seed=9)
    assert relative(term.rotated_gram(basis, variance, into.clone()), expected + into) < EXACT


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("dense", "rows", *TIED)])
def test_factors_of_an_outer_product(kind: str) -> None:
    term, truth = KINDS[kind]()
    assert isinstance(term, Outer)
    actual = term.factors()
    assert actual is not None
    joint, right, left = actual
    a = term.inputs
    if term.bias is not None:
        a = torch.cat([a, torch.ones_like(a[..., :1])], dim=-1)
    a = a if term.weight is not None else a[..., -1:]
    d = torch.stack(term.grads)
    assert set(joint.names) == set(truth)
    assert relative(right, torch.einsum("bgti,bgtj->gij", a, a)) < EXACT
    assert relative(left, torch.einsum("kbgto,kbgtp->gop", d, d)) < EXACT
    assert KINDS["rows"]()[0].factors() is None


@pytest.mark.skipif(not matmul.slow_mkl(), reason="MKL's own processor")
@pytest.mark.parametrize("turned", ["plain", "left", "right", "both"])
@pytest.mark.parametrize("lead", [(), (1,)])
def test_single_precision_products(turned: str, lead: tuple[int, ...], monkeypatch) -> None:
    """Those of oneDNN are torch's, whichever way their operands lie in memory."""
    monkeypatch.setattr(matmul, "MULTIPLICATIONS", 1)
    monkeypatch.setattr(matmul, "MULTIPLICATIONS_IN_BATCH", 1)
    a = normal(*lead, 40, 30).float()
    b = normal(*lead, 30, 20).float()
    a = a.mT.contiguous().mT if turned in ("left", "both") else a
    b = b.mT.contiguous().mT if turned in ("right", "both") else b
    truth = a.double() @ b.double()
    assert relative(matmul.product(a, b).double(), truth) < 1e-6
    part = matmul.product(a[..., 3:27, :17], b[..., :17, 5:])
    assert relative(part.double(), a[..., 3:27, :17].double() @ b[..., :17, 5:].double()) < 1e-6
    a_stack = a.expand(3, *a.shape[-2:])
    b_stack = b.expand(3, *b.shape[-2:])
    assert relative(matmul.batch_product(a_stack, b_stack).double(), truth.expand(3, 40, 20)) < 1e-6
    if not lead:
        bias = normal(20, seed=2).float()
        assert relative(matmul.product(a, b, bias).double(), truth + bias.double()) < 1e-6
        apart = normal(20, 2, seed=2).float()[:, 0]
        assert relative(matmul.product(a, b, apart).double(), truth + apart.double()) < 1e-6
        assert matmul.product(a.requires_grad_(), b).requires_grad
