"""Noisy K-FAC, SLANG, OGGN and VOGGN against dense matrices, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from oracles import rows, unflatten
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.learning_rule.optim import OGGN, SLANG, VOGGN, NoisyKFAC

N, LR, DECAY, BETA2, DAMPING = 40, 0.1, 0.05, 0.8, 0.02


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(6, 3, generator=g).double(), torch.randint(2, (6,), generator=g)


def settings() -> dict:
    return {
        "lr": LR, "ess": N, "weight_decay": DECAY, "beta1": 0.5, "beta2": BETA2,
        "damping": DAMPING, "generator": torch.Generator().manual_seed(0),
    }  # fmt: skip


def flat(tree: dict | nn.Module) -> Tensor:
    held = dict(tree.named_parameters()) if isinstance(tree, nn.Module) else tree
    return torch.cat([t.detach().reshape(-1) for t in held.values()])


def dense(form: object) -> Tensor:
    """S + δ, from its products with unit vectors."""
    like = {n: torch.empty(s) for n, s in form.shapes.items()}
    eye = torch.eye(sum(t.numel() for t in like.values())).double()
    return rows(form.times(unflatten(eye, like)))


def each_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    rows = []
    for xi, yi in zip(x, y, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(xi[None]), yi[None]).backward()
        rows.append(flat({n: p.grad for n, p in model.named_parameters()}))
    return torch.stack(rows)


def jacobian_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Rows R with RᵀR = Σ_i J_iᵀ (diag p_i − p_i p_iᵀ) J_i."""
    params = dict(model.named_parameters())
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(params)
    each = torch.cat([j.flatten(2) for j in jacobian.values()], 2).detach()
    p = model(x).softmax(-1).detach()
    values, turn = torch.linalg.eigh(torch.diag_embed(p) - p[:, :, None] * p[:, None])
    root = turn * values.clamp_min(0).sqrt()[:, None]
    return (root.mT @ each).flatten(0, 1)


def run(optimizer: NoisyKFAC | SLANG, model: nn.Module, t: int) -> nn.Module:
    """The model at the draw of the t-th step."""
    x, y = data(t)
    with optimizer.sampled_params(train=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        at = copy.deepcopy(model)
    optimizer.step()
    return at


def mean_after(before: Tensor, matrix: Tensor, gradient: Tensor) -> Tensor:
    damped = matrix + N * DAMPING * torch.eye(len(before)).double()
    return before - LR * torch.linalg.solve(damped, N * (gradient + DECAY * before))


def clean(model: nn.Module) -> nn.Module:
    """Without hooks."""
    fresh = network()
    fresh.load_state_dict(model.state_dict())
    return fresh


@pytest.mark.parametrize(
    ("kind", "rows_of"), [(SLANG, each_gradient), (VOGGN, jacobian_rows), (OGGN, jacobian_rows)]
)
def test_low_rank_has_the_average_of_outer_products(kind: type, rows_of: Callable) -> None:
    """Exact at full memory; at low rank with the leading directions and the right diagonal."""
    model, small = network(), network()
    optimizer = kind(model, rank=25, hess_init=0.3, **settings())
    low = kind(small, rank=2, hess_init=0.3, **settings())
    size = len(flat(model))
    wanted = 0.3 * N * torch.eye(size).double()
    diagonal, momentum = wanted.diagonal().clone(), torch.zeros(size).double()
    for t in range(3):
        x, y = data(t)
        before = flat(model)
        at = run(optimizer, model, t)
        assert torch.equal(flat(at), before) == (kind is OGGN)
        rows = rows_of(clean(at), x, y)
        wanted = BETA2 * wanted + (1 - BETA2) * N / 6 * rows.mT @ rows
        found = dense(optimizer.form)
        prior = N * DECAY * torch.eye(size).double()
        momentum = 0.5 * momentum + 0.5 * each_gradient(clean(at), x, y).mean(0)
        u = momentum / (1 - 0.5 ** (t + 1))
        torch.testing.assert_close(found, wanted + prior)
        torch.testing.assert_close(flat(model), mean_after(before, found, u))
        at = run(low, small, t)
        rows = rows_of(clean(at), x, y)
        diagonal = BETA2 * diagonal + (1 - BETA2) * N / 6 * rows.square().sum(0)
        torch.testing.assert_close(dense(low.form).diagonal(), diagonal + N * DECAY)
    assert low.posterior().structure == "lowrank"


def test_noisy_kfac_has_the_factors_of_its_draws() -> None:
    """A ⊗ G by hand, from single examples' inputs and output gradients at the drawn weights."""
    model = network()
    optimizer = NoisyKFAC(model, **settings())
    moments: dict[str, list[Tensor]] = {}
    momentum = torch.zeros(len(flat(model))).double()
    for t in range(3):
        x, y = data(t)
        before = flat(model)
        at = clean(run(optimizer, model, t))
        hidden = at[1](at[0](x)).detach()
        logits = at[2](hidden)
        error = (torch.softmax(logits, 1) - nn.functional.one_hot(y, 2)).detach()
        inner = error @ at[2].weight.detach() * (1 - hidden**2)
        weight = (1 - BETA2) / (1 - BETA2 ** (t + 1))
        for key, a, d in (("0", x, inner), ("2", hidden, error)):
            a = torch.cat([a, torch.ones(6, 1).double()], 1)
            new = [a.mT @ a / 6, d.mT @ d / 6]
            old = moments.get(key, new)
            moments[key] = [o + weight * (n - o) for o, n in zip(old, new, strict=True)]
        blocks = []
        for a, g in moments.values():
            outs, ins = len(g), len(a) - 1
            block = N * torch.kron(g, a).reshape(outs, ins + 1, outs, ins + 1)
            order = [(o, i) for o in range(outs) for i in range(ins)]
            order += [(o, ins) for o in range(outs)]
            o, i = torch.tensor(order).mT
            blocks.append(block[o[:, None], i[:, None], o[None], i[None]])
        wanted = torch.block_diag(*blocks)
        wanted = wanted + N * DECAY * torch.eye(len(wanted)).double()
        torch.testing.assert_close(dense(optimizer.form), wanted)
        momentum = 0.5 * momentum + 0.5 * each_gradient(at, x, y).mean(0)
        u = momentum / (1 - 0.5 ** (t + 1))
        torch.testing.assert_close(flat(model), mean_after(before, wanted, u))
    same = blr.Posterior.from_recorder(
        optimizer.recorder, model, n_data=N, prior_precision=N * DECAY
    )
    torch.testing.assert_close(dense(same.form), dense(optimizer.posterior().form))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NoisyKFAC, SLANG, VOGGN])
def test_draws_come_from_q_and_the_mean_comes_back(kind: type) -> None:
    model = network()
    optimizer = kind(model, **settings())
    for t in range(2):
        run(optimizer, model, t)
    mean, inverse = flat(model), torch.linalg.inv(dense(optimizer.form))
    draws = []
    for _ in range(1500):
        with optimizer.sampled_params():
            draws.append(flat(model) - mean)
    assert torch.equal(flat(model), mean)
    found = torch.stack(draws)
    covariance = found.mT @ found / len(found)
    assert (covariance - inverse).norm() < 0.2 * inverse.norm()
