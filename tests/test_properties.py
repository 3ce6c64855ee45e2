"""What must hold whatever the shapes, the structure of the posterior and the likelihood."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import blr_analysis as blr

KINDS = ("categorical", "bernoulli", "gaussian", "poisson")
STRUCTURES = ("diag", "kron", "full")
often = settings(deadline=None, max_examples=15)
seldom = settings(deadline=None, max_examples=8)


def targets(kind: str, n: int, c: int, g: torch.Generator) -> Tensor:
    if kind == "categorical":
        return torch.randint(c, (n,), generator=g)
    if kind == "gaussian":
        return torch.randn(n, c, generator=g, dtype=torch.float64)
    return torch.randint(2 if kind == "bernoulli" else 5, (n, c), generator=g)


def network(d: int, h: int, c: int, g: torch.Generator) -> nn.Module:
    model = nn.Sequential(nn.Linear(d, h), nn.Tanh(), nn.LayerNorm(h), nn.Linear(h, c)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=g, dtype=torch.float64))
    return model


@st.composite
def audits(draw, structures=STRUCTURES, kinds=KINDS):
    """A task on a small network, a posterior of any structure, and the way it was made."""
    kind = draw(st.sampled_from(kinds))
    structure = draw(st.sampled_from(structures))
    n = draw(st.integers(1, 10))
    d = draw(st.integers(1, 4))
    h = draw(st.integers(2, 4))
    c = draw(st.integers(2 if kind == "categorical" else 1, 4))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    y = targets(kind, n, c, g)
    task = blr.Task(
        network(d, h, c, g), (x, y), likelihood=kind, batch_size=draw(st.integers(1, n))
    )
    delta = draw(st.floats(0.05, 20))
    return task, blr.fit_laplace(task, structure=structure, prior_precision=delta)


@often
@given(audits())
def test_variance_is_symmetric_and_positive_and_influence_its_quadratic_form(audit) -> None:
    task, q = audit
    scores = blr.sensitivity(task, q)
    v = scores.variance
    e = scores.error
    torch.testing.assert_close(v, v.mT, rtol=1e-10, atol=1e-13)
    smallest = torch.linalg.eigvalsh(v)[:, 0]
    assert bool((smallest >= -1e-12 * v.diagonal(dim1=1, dim2=2).amax(1)).all())
    influence = torch.einsum("nc,ncd,nd->n", e, v, e)
    torch.testing.assert_close(scores.self_influence, influence, rtol=1e-9, atol=1e-14)
    assert bool((scores.self_influence >= 0).all())
    assert bool((scores.deviation >= 0).all())
    if q.structure == "full":  # S contains the example's own share: the cavity always exists
        assert float(scores.leverage.max()) < 1
        assert float(scores.leverage.min()) > -1e-12
        assert torch.isfinite(blr.leave_one_out(task, q).logits).all()


@pytest.mark.slow
@often
@given(audits(), st.randoms(use_true_random=False), st.integers(1, 12))
def test_neither_order_nor_chunks_matter(audit, random, size: int) -> None:
    task, q = audit
    order = list(range(task.n_data))
    random.shuffle(order)
    x, y = task.dataset.tensors
    how = {"likelihood": task.likelihood, "batch_size": size}
    turned = blr.Task(task.model, (x[order], y[order]), **how)
    a, b = (blr.sensitivity(t, q) for t in (task, turned))
    for name in ("error", "variance", "deviation", "self_influence", "losses"):
        torch.testing.assert_close(getattr(b, name), getattr(a, name)[order], rtol=1e-9, atol=1e-12)
    for correction in ("cavity", "first_order"):
        a, b = (blr.leave_one_out(t, q, correction=correction) for t in (task, turned))
        assert b.correction == [a.correction[i] for i in order]
        # near its pole the cavity multiplies rounding, by 1 / (1 − leverage)
        torch.testing.assert_close(b.logits, a.logits[order], rtol=1e-7, atol=1e-9)
    again = blr.fit_laplace(turned, structure=q.structure, prior_precision=q.prior_precision)
    for name in q.mean:
        torch.testing.assert_close(again.variance(name), q.variance(name), rtol=1e-7, atol=1e-12)


@seldom
@given(audits(), st.data())
@pytest.mark.slow
def test_relabelling_is_linear_in_the_labels(audit, data) -> None:
    """Two relabellings move the weights by the sum of what each does alone."""
    task, q = audit
    y = task.dataset.tensors[1]
    assume(task.n_data >= 2)
    i = 0
    j = task.n_data - 1
    new = {
        "categorical": lambda k: (int(y[k]) + 1) % 2,
        "bernoulli": lambda k: 1 - y[k],
        "gaussian": lambda k: y[k] + 2,
        "poisson": lambda k: y[k] + 3,
    }[task.likelihood.name]
    both, one, two = (
        blr.what_if(task, q, relabel={k: new(k) for k in ks}, solver="posterior").parameters
        for ks in ((i, j), (i,), (j,))
    )
    for name, m in q.mean.items():
        torch.testing.assert_close(
            both[name] - m, one[name] + two[name] - 2 * m, rtol=1e-8, atol=1e-10
        )
