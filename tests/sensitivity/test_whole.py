"""Influence takes more of a small model's curvature than the posterior it is asked with."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, vmap

import blr_analysis as blr
from blr_analysis.backprop.engine import Chunking
from blr_analysis.errors import PosteriorWarning
from blr_analysis.posterior.structures import LowRank
from blr_analysis.sensitivity.influence import whole

DELTA = 0.3
QUIET = dict(progress=False)


def data(seed: int, n: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=g, dtype=torch.float64)
    noise = 0.5 * torch.randn(n, generator=g, dtype=torch.float64)
    return x, (x[:, 0] * x[:, 1] + noise > 0).long()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()


def flat(model: nn.Module) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """The weights as one vector, and the outputs of one example at such a vector."""
    names = [n for n, _ in model.named_parameters()]
    shapes = [p.shape for _, p in model.named_parameters()]
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])

    def outputs(w: Tensor, x: Tensor) -> Tensor:
        parts = w.split([s.numel() for s in shapes])
        tree = {n: v.view(s) for n, v, s in zip(names, parts, shapes, strict=True)}
        return functional_call(model, tree, (x[None],))[0]

    return theta, outputs


def converged(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    """At the minimum of the losses' sum and DELTA's penalty."""
    descent = torch.optim.LBFGS(
        model.parameters(), max_iter=1000, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        descent.zero_grad()
        weights = sum(p.square().sum() for p in model.parameters())
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum") + DELTA / 2 * weights
        loss.backward()
        return loss

    descent.step(objective)  # pyright: ignore[reportArgumentType]
    return model


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
@pytest.mark.parametrize("named", [False, True])
def test_at_the_minimum_with_the_exact_hessian_unless_delta_was_named(
    structure: str, named: bool
) -> None:
    x, y = data(0, 40)
    asked = data(1, 5)
    model = converged(network(), x, y)
    task, test = blr.Task(model, (x, y)), blr.Task(model, asked)
    task.prior_precision = DELTA  # as an estimator's
    options = {"prior_precision": DELTA} if named else {}
    q = blr.fit_laplace(task, structure=structure, **options, **QUIET)
    theta, outputs = flat(model)

    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs(w, x)[None], y[None])

    each = vmap(grad(loss), (None, 0, 0))
    total = hessian(lambda w: sum(loss(w, *pair) for pair in zip(x, y, strict=True)))(theta)
    total += DELTA * torch.eye(len(theta), dtype=torch.float64)
    known = each(theta, x, y) @ torch.linalg.solve(total, each(theta, *asked).mT)
    taken = blr.influence(task, q, test, **QUIET)
    own = blr.influence(task, q, test, solver="posterior", **QUIET)
    assert own.note == "" and float((own.matrix - known).norm() / known.norm()) > 0.05
    assert taken.note in repr(taken)
    if named:
        assert torch.equal(taken.matrix, own.matrix)
        assert ("nearer" in taken.note) == (structure != "full")
    else:
        assert float((taken.matrix - known).norm() / known.norm()) < 1e-8
        assert "Hessian" in taken.note
        top = blr.top_influence(task, q, test, k=2, **QUIET)
        assert top.table.attrs["note"] == taken.note


def test_a_layer_without_a_hessian_is_taken_with_the_curvature_that_it_has() -> None:
    """An EmbeddingBag cannot be differentiated twice."""
    g = torch.Generator().manual_seed(0)
    words, y = torch.randint(0, 9, (40, 3), generator=g), torch.randint(0, 2, (40,), generator=g)
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(9, 2), nn.Linear(2, 2)).double().eval()
    task = blr.Task(converged(model, words, y), (words, y))
    task.prior_precision = DELTA
    found = blr.influence(task, blr.fit_laplace(task, **QUIET), task, **QUIET)
    full = blr.fit_laplace(task, structure="full", prior_precision=DELTA, **QUIET)
    own = blr.influence(task, full, task, solver="posterior", **QUIET)
    assert "Hessian" not in found.note and "curvature" in found.note
    assert torch.equal(found.matrix, own.matrix)


@pytest.fixture(scope="module")
def stopped() -> nn.Module:
    """Trained for a few epochs of minibatches."""
    model, (x, y) = network(), data(0, 120)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(20):
        for rows in torch.randperm(len(x)).split(20):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.eval()


def test_off_the_minimum_damped_as_far_as_training_came(stopped: nn.Module) -> None:
    x, y = data(0, 120)
    task = blr.Task(stopped, (x, y))
    q = blr.fit_laplace(task, **QUIET)
    found = blr.influence(task, q, task, expected=False, **QUIET)
    theta, outputs = flat(stopped)
    with torch.no_grad():
        after = nn.functional.cross_entropy(stopped(x), y, reduction="sum")
    before = len(x) * torch.tensor(2.0).log()  # weights of 0 know nothing
    damping = float((before - after) / theta.square().sum())
    assert f"{damping:.3g}" in found.note
    plain = blr.fit_laplace(task, structure="full", prior_precision=damping, **QUIET)
    jacobians = vmap(jacrev(outputs), (None, 0))(theta, x)  # [N, C, P]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(32, 2, generator=generator, dtype=torch.float64)
    curvature = damping * torch.eye(len(theta), dtype=torch.float64)
    sigma = torch.linalg.inv(plain.form.matrix)
    for j, f in zip(jacobians, stopped(x).detach(), strict=True):
        values, turn = torch.linalg.eigh(j @ sigma @ j.mT)
        moves = drawn @ (turn * values.clamp_min(0).sqrt() @ turn.mT)
        p = torch.cat([f + moves, f - moves]).softmax(-1)
        mean = torch.diag_embed(p).mean(0) - (p[:, :, None] * p[:, None]).mean(0)
        curvature += j.mT @ mean @ j
    p = stopped(x).detach().softmax(-1) - nn.functional.one_hot(y)
    gradients = torch.einsum("ncp,nc->np", jacobians, p)
    known = gradients @ torch.linalg.solve(curvature, gradients.mT)
    assert float((found.matrix - known).norm() / known.norm()) < 1e-6
    assert not torch.allclose(blr.influence(task, q, task, **QUIET).matrix, found.matrix)


def test_off_the_minimum_the_mean_over_networks_of_other_draws(stopped: nn.Module) -> None:
    """Each where the influences of the examples, times random numbers, would take the model."""
    x = data(0, 120)[0]
    noise = torch.randn(120, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    target = 1.2 * stopped(x).detach() + 0.5 * noise
    task = blr.Task(stopped, (x, target), likelihood="gaussian")
    taken, note = whole.whole(
        task, blr.fit_laplace(task, **QUIET), Chunking(progress=False), None, drawn=True
    )
    assert f"mean of {whole.DRAWS[1]} draws" in note
    matrices = []
    for q in taken:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PosteriorWarning)  # the model stands elsewhere
            matrices.append(blr.influence(task, q, task, solver="posterior", **QUIET).matrix)
    found = torch.stack(matrices).mean(0)
    theta, outputs = flat(stopped)

    def gradients(w: Tensor) -> tuple[Tensor, Tensor]:
        jacobians = vmap(jacrev(outputs), (None, 0))(w, x)  # [N, C, P]
        errors = vmap(outputs, (None, 0))(w, x) - target
        curvature = torch.einsum("ncp,ncq->pq", jacobians, jacobians)
        pulls = torch.einsum("ncp,nc->np", jacobians, errors)
        return pulls, curvature + damping * torch.eye(len(theta), dtype=torch.float64)

    gained = target.square().sum() - (stopped(x).detach() - target).square().sum()
    damping = float(gained / 2 / theta.square().sum())
    pulls, curvature = gradients(theta)
    generator, known = torch.Generator().manual_seed(0), torch.zeros(120, 120).double()
    for _ in range(whole.DRAWS[1]):
        weights = torch.randn(120, 1, generator=generator).double()
        there, matrix = gradients(theta - torch.linalg.solve(curvature, (weights * pulls).sum(0)))
        known += there @ torch.linalg.solve(matrix, there.mT) / whole.DRAWS[1]
    assert float((found - known).norm() / known.norm()) < 1e-6
    assert "draws" not in blr.influence(task, blr.fit_laplace(task, **QUIET), task, **QUIET).note
    classes = blr.Task(stopped, data(0, 120), likelihood="categorical")
    q = blr.fit_laplace(classes, **QUIET)
    result = blr.influence(classes, q, classes, **QUIET)
    assert "draws of the data" in result.note and "checkpoints" not in repr(result)
    bound = blr.influence(classes, q, classes, memory_budget=2**24, **QUIET)
    assert "draws" not in bound.note


def test_where_a_drawn_network_fails_the_note_says_so(
    stopped: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = blr.Task(stopped, data(0, 120))
    q = blr.fit_laplace(task, **QUIET)
    single = blr.influence(task, q, task, memory_budget=2**24, **QUIET)  # takes one network

    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(whole, "write", full)
    found = blr.influence(task, q, task, **QUIET)
    assert "of one network" in found.note and "OutOfMemoryError" in repr(found)
    assert torch.allclose(found.matrix, single.matrix)


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_of_a_large_network_the_errors_alone(
    stopped: nn.Module, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = data(0, 120)
    y = y if kind == "categorical" else nn.functional.one_hot(y).double()
    task = blr.Task(stopped, (x, y), likelihood=kind)
    q = blr.fit_laplace(task, **QUIET)
    monkeypatch.setattr(whole, "exact_structure", lambda task: None)  # as above 4,096 parameters
    own = blr.influence(task, q, task, solver="posterior", **QUIET)
    taken = blr.influence(task, q, task, **QUIET)
    plain = blr.influence(task, q, task, expected=False, **QUIET)
    assert torch.equal(plain.matrix, own.matrix)
    assert torch.equal(taken.matrix, own.matrix) == (kind == "gaussian")
    assert ("averaged" in taken.note) == (kind == "categorical")


def test_what_was_chosen_stays(stopped: nn.Module) -> None:
    """A δ that was given, one of the gradients' posteriors among several."""
    task = blr.Task(stopped, data(0, 120))
    q = blr.fit_laplace(task, prior_precision=DELTA, **QUIET)
    own = blr.influence(task, q, task, solver="posterior", **QUIET)
    assert torch.equal(blr.influence(task, q, task, **QUIET).matrix, own.matrix)
    found = blr.fit_laplace(task, **QUIET)
    own = blr.influence(task, found, task, solver="posterior", **QUIET)
    assert torch.equal(blr.influence(task, [found, found], task, **QUIET).matrix, own.matrix)


def test_low_rank_says_what_it_lacks(stopped: nn.Module) -> None:
    task = blr.Task(stopped, data(0, 120))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        few = dict(structure="lowrank", prior_precision=1e-3, rank=2, **QUIET)
        q = blr.fit_laplace(task, **few)
    assert isinstance(q.form, LowRank)
    assert "rank 2" in blr.influence(task, q, task, **QUIET).note
    own = blr.Posterior.from_optimizer(torch_adam(stopped), stopped, n_data=120)
    assert "fit_laplace" in blr.influence(task, own, task, **QUIET).note


def torch_adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam after a step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, weight_decay=0.01)
    x, y = data(0, 120)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    return optimizer
