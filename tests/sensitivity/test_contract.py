"""Every analysis against dense algebra: of one posterior, of a run and of several runs, at a
minimum and off it, with a temperature that multiplies V in three of them and in nothing else.

The oracle knows Jacobians J and errors e by autograd and torch's distributions, Σ = S⁻¹ densely:

    sensitivity     e = mean_t e_t,  τV,  V = J Σ Jᵀ at the end
    leave_one_out   f + τ V e,  at a minimum f + (I − VΛ)⁻¹ V e for the whole curvature
    influence       τ mean_t (J_j e_j)ᵀ Σ_t (J_i e_i)
    suspicious      mean_t ℓ_t,  tr ΛV
    what_if         m + (S − S_G)⁻¹ Σ_{i∈G} J_iᵀ e_i
"""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

import pytest
import torch
from models import mlp
from oracles import dense_jacobian, dense_precision, flatten, outputs_of, rows, unflatten
from snapshots import untouched
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import DataError, InputError, ModelError, PosteriorError
from blr_analysis.posterior.facts import Calibration, Rerun
from blr_analysis.posterior.minimum import Stationarity
from blr_analysis.sensitivity import token_sensitivity

N = 14
M = 6
DELTA = 0.7
GROUP = [1, 4, 5]
STRUCTURES = ("diag", "kron", "full")


def normal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def targets(kind: str, n: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    if kind == "categorical":
        return torch.randint(3, (n,), generator=g)
    if kind == "bernoulli":
        return torch.randint(2, (n, 1), generator=g).double()
    if kind == "poisson":
        return torch.poisson(torch.full((n, 1), 2.0, dtype=torch.float64), generator=g)
    return torch.randn(n, 2, generator=g, dtype=torch.float64)


def loss(kind: str, f: Tensor, y: Tensor) -> Tensor:
    """ℓ of each example, from torch's own distributions."""
    d = torch.distributions
    if kind == "categorical":
        return -d.Categorical(logits=f).log_prob(y)
    if kind == "bernoulli":
        return -d.Bernoulli(logits=f).log_prob(y).sum(-1)
    if kind == "poisson":
        return -d.Poisson(f.exp()).log_prob(y).sum(-1)
    return -d.Normal(f, 1.0).log_prob(y).sum(-1)


def slope(kind: str, f: Tensor, y: Tensor) -> Tensor:
    """e of each example."""
    f = f.clone().requires_grad_()
    return torch.autograd.grad(loss(kind, f, y).sum(), f)[0]


def height(kind: str, f: Tensor, y: Tensor) -> Tensor:
    """Λ of each example, ``[N, C, C]``."""
    each = [
        torch.func.hessian(lambda out, t=t: loss(kind, out[None], t[None]).sum())(out)
        for out, t in zip(f, y, strict=True)
    ]
    return torch.stack(each)


def weights_of(seed: int, outputs: int) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in mlp(outputs=outputs, seed=seed).named_parameters()}


class At:
    """What dense algebra knows of a posterior: f, e, J, Σ at its mean."""

    def __init__(self, kind: str, task: blr.Task, test: blr.Task, q: blr.Posterior) -> None:
        self.f = outputs_of(task, q.mean)
        self.g = outputs_of(test, q.mean)
        self.y = task.dataset.tensors[1]
        self.z = test.dataset.tensors[1]
        self.e = slope(kind, self.f, self.y)
        self.h = slope(kind, self.g, self.z)
        self.j = dense_jacobian(task, q.mean)
        self.k = dense_jacobian(test, q.mean)
        self.s = dense_precision(q)
        self.q = q
        self.sigma = torch.linalg.inv(self.s)
        self.losses = loss(kind, self.f, self.y)
        self.v = self.j @ self.sigma @ self.j.mT


class AnalysisContract:
    """Inherit and say which model: every analysis then has to agree with the oracle."""

    kind = "categorical"
    run = 1  # posteriors of one run
    several = 1  # runs
    at_rest = False
    tau: float | None = None

    @pytest.fixture(params=STRUCTURES)
    def world(self, request: pytest.FixtureRequest) -> World:
        return World(self, request.param)

    def test_sensitivity(self, world: World) -> None:
        scores = blr.sensitivity(world.task, world.given)
        each = []
        for ends in world.ends:
            v = world.tau * ends.at[-1].v
            e = world.error(ends)
            move = torch.einsum("ncd,nd->nc", v, e)
            each.append((e, v, (e * move).sum(-1), world.distance(ends.at[-1].f, move)))
        names = ("error", "variance", "self_influence", "deviation")
        for name, actual in zip(names, zip(*each, strict=True), strict=True):
            world.close(getattr(scores, name), torch.stack(actual).mean(0))
        world.close(scores.outputs, world.ends[-1].at[-1].f)
        world.close(scores.losses, world.ends[-1].at[-1].losses)
        light = blr.sensitivity(world.task, world.given, variance=False)
        world.close(light.self_influence, scores.self_influence)
        assert light.variance is None
        assert light.deviation is None
        assert light.table.variance.isna().all()

    def test_leave_one_out(self, world: World) -> None:
        loo = blr.leave_one_out(world.task, world.given)
        moves = [world.left_out(ends) for ends in world.ends]
        f = world.ends[-1].at[-1].f
        after = f + torch.stack(moves).mean(0)
        world.close(loo.logits, after)
        world.close(loo.losses, loss(self.kind, after, world.task.dataset.tensors[1]))
        world.close(loo.losses_before, world.ends[-1].at[-1].losses)
        word = "cavity" if self.at_rest and world.structure == "full" else "first_order"
        assert set(loo.correction) <= {word, "bounded"}

    def test_influence(self, world: World) -> None:
        actual = blr.influence(world.task, world.given, world.test)
        each = []
        for ends in world.ends:
            for at in ends.at:
                e = at.e if len(ends.at) > 1 else world.error(ends)
                own = torch.einsum("nc,ncp->np", e, at.j)
                theirs = torch.einsum("nc,ncp->np", at.h, at.k)
                each.append(world.tau * own @ at.sigma @ theirs.mT)
        truth = torch.stack(each).mean(0)
        world.close(actual, truth)
        top = blr.influence(world.task, world.given, world.test, k=4)
        world.close(top.helpful_values, truth.mT.topk(4).values)

    def test_suspicious(self, world: World) -> None:
        actual = blr.suspicious(world.task, world.given, duplicates=False)
        losses = [torch.stack([at.losses for at in ends.at]).mean(0) for ends in world.ends]
        world.close(actual.losses, torch.stack(losses).mean(0))
        world.close(actual.left_out, blr.leave_one_out(world.task, world.given).losses)
        end = world.ends[-1].at[-1]
        world.close(actual.unfamiliarity, (height(self.kind, end.f, end.y) * end.v).sum((1, 2)))
        suspected = self.contradicted(world, actual)
        assert all(suspected[i] for i, kind in enumerate(actual.kind) if kind == "label")
        first = actual.order[: int(suspected.sum())]
        assert suspected[first].all()
        world.close(actual.losses[first], actual.losses[suspected].sort(descending=True).values)
        kinds = [actual.kind[i] for i in actual.order[len(first) :]]
        assert kinds == sorted(kinds, key=["unfamiliar", "none"].index)
        assert actual.table["index"].tolist() == actual.order.tolist()

    def contradicted(self, world: World, actual: Any) -> Tensor:
        """Where most of the run, or the left-out prediction, answers otherwise; of regression the
        twentieth with the largest loss."""
        left_out = blr.leave_one_out(world.task, world.given).logits
        targets = world.ends[-1].at[-1].y
        if self.kind == "categorical":
            votes = [at.f.argmax(1) != targets for at in world.ends[-1].at]
            without = left_out.argmax(1) != targets
        elif self.kind == "bernoulli":
            votes = [((at.f > 0) != (targets > 0.5)).any(1) for at in world.ends[-1].at]
            without = ((left_out > 0) != (targets > 0.5)).any(1)
        else:
            rank = actual.losses.argsort(descending=True).argsort()
            return rank < round(0.05 * len(rank))
        return (torch.stack(votes).double().mean(0) > 0.5) | without

    def test_what_if(self, world: World) -> None:
        result = blr.what_if(
            world.task, world.given, remove=GROUP, solver="posterior", evaluate=world.test
        )
        changes = []
        for ends in world.ends:
            at = ends.at[-1]
            j = at.j[GROUP]
            lam = height(self.kind, at.f, at.y)[GROUP]
            share = torch.einsum("ncp,ncd,ndq->pq", j, lam, j)
            left = at.s - world.projected(at.q, share)
            mean = flatten(at.q.mean) + torch.linalg.solve(
                left, torch.einsum("ncp,nc->p", j, at.e[GROUP])
            )
            moved = unflatten(mean, at.q.mean)
            after = outputs_of(world.test, moved)
            changes.append(loss(self.kind, after, at.z) - loss(self.kind, at.g, at.z))
        world.close(flatten(result.parameters), mean)
        world.close(result.after.losses, loss(self.kind, at.g, at.z) + torch.stack(changes).mean(0))
        applied = result.apply(copy.deepcopy(world.task.model))
        own = loss(self.kind, applied(world.test.dataset.tensors[0]).detach(), at.z)
        assert result.applied_nll == pytest.approx(float(own.mean()))
        assert result.solver == "posterior"
        assert result.removed == 3

    def test_nothing_of_the_model_changes(self) -> None:
        world = World(self, "kron")
        world.task.model.train()
        world.task.model(world.task.dataset.tensors[0]).sum().backward()
        with untouched(world.task.model), torch.inference_mode():
            blr.sensitivity(world.task, world.given)
            blr.leave_one_out(world.task, world.given)
            blr.influence(world.task, world.given, world.test)
            blr.suspicious(world.task, world.given)
            blr.what_if(world.task, world.given, remove=GROUP, solver="posterior")


class Ends:
    """One run."""

    def __init__(self, at: list[At]) -> None:
        self.at = at


class World:
    """A task, what is given to the analyses, and the oracle of each posterior behind it."""

    def __init__(self, about: AnalysisContract, structure: str) -> None:
        self.about = about
        self.structure = structure
        outputs = {"categorical": 3, "gaussian": 2}.get(about.kind, 1)
        x = normal(N, 4)
        y = targets(about.kind, N, 1)
        model = mlp(outputs=outputs, seed=3)
        self.task = blr.Task(model, (x, y), likelihood=about.kind, progress=False)
        data = normal(M, 4, seed=5), targets(about.kind, M, 6)
        self.test = blr.Task(model, data, likelihood=about.kind, progress=False)
        posteriors = []
        for s in range(about.several):
            each = [self._fitted(weights_of(3 + 10 * s + t, outputs)) for t in range(about.run)]
            last = each.pop()
            posteriors.append(self._said(last, each, about.several > 1))
        self.given: Any = posteriors if about.several > 1 else posteriors[0]
        self.posteriors = posteriors
        model.load_state_dict(posteriors[-1].mean)

    @cached_property
    def ends(self) -> list[Ends]:
        about = self.about.kind, self.task, self.test
        return [Ends([At(*about, p) for p in q.run]) for q in self.posteriors]

    def _fitted(self, weights: dict[str, Tensor]) -> blr.Posterior:
        model = copy.deepcopy(self.task.model)
        model.load_state_dict(weights)
        task = self.task.under(model, self.task.device)
        return blr.fit_laplace(task, structure=self.structure, prior_precision=DELTA)

    def _said(self, q: blr.Posterior, earlier: list[blr.Posterior], rerun: bool) -> blr.Posterior:
        far = 0.0 if self.about.at_rest else 1e9
        measured = Stationarity(far, far, 1.0, N, self.task.likelihood.recorded)
        tau = self.about.tau
        return q.changed(
            stationarity=measured,
            saturated=0.0,
            calibration=None if tau is None else Calibration(tau, error=0.1),
            rerun=Rerun(seed=0) if rerun else None,
            earlier=tuple(earlier),
        )

    @property
    def tau(self) -> float:
        """Measured, or 1; a guess of .15 for Kronecker fits of classifiers off a minimum."""
        if self.about.tau is not None:
            return self.about.tau
        classes = self.about.kind in ("categorical", "bernoulli")
        return 0.15 if self.structure == "kron" and classes and not self.about.at_rest else 1.0

    def error(self, ends: Ends) -> Tensor:
        """ē: the mean over the run; of the end of a classifier's alone, at .7 of the logits."""
        end = ends.at[-1]
        classes = self.about.kind in ("categorical", "bernoulli")
        if len(ends.at) == 1 and classes and not self.about.at_rest:
            return slope(self.about.kind, 0.7 * end.f, end.y)
        return torch.stack([at.e for at in ends.at]).mean(0)

    def left_out(self, ends: Ends) -> Tensor:
        end = ends.at[-1]
        v = self.tau * end.v
        e = self.error(ends)
        if not (self.about.at_rest and self.structure == "full"):
            return torch.einsum("ncd,nd->nc", v, e)
        lam = height(self.about.kind, end.f, end.y)
        eye = torch.eye(v.shape[-1], dtype=torch.float64)
        return torch.linalg.solve(eye - v @ lam, v @ e.unsqueeze(-1)).squeeze(-1)

    def distance(self, f: Tensor, move: Tensor) -> Tensor:
        if self.about.kind in ("gaussian", "poisson"):
            return move.norm(dim=-1)
        act = torch.sigmoid if self.about.kind == "bernoulli" else nn.Softmax(-1)
        return (act(f + move) - act(f)).abs().sum(-1)

    def projected(self, q: blr.Posterior, share: Tensor) -> Tensor:
        """What a structure keeps of a group's curvature."""
        if self.structure == "full":
            return share
        if self.structure == "diag":
            return share.diagonal().diag()
        turned = rows(q.form.forward(unflatten(torch.eye(len(share)).double(), q.mean)))
        return turned @ (turned.T @ share @ turned).diagonal().diag() @ turned.T

    @staticmethod
    def close(actual: Any, truth: Tensor) -> None:
        torch.testing.assert_close(torch.as_tensor(actual), truth, rtol=1e-8, atol=1e-10)


class TestClassesAlone(AnalysisContract):
    """The end of a training alone is known: errors at .7 of the logits, a temperature guessed."""


class TestClassesOfARun(AnalysisContract):
    run = 4
    tau = 0.3


class TestClassesOfSeveralRuns(AnalysisContract):
    run = 2
    several = 2
    tau = 0.4


class TestClassesAtAMinimum(AnalysisContract):
    at_rest = True


class TestBernoulliAtAMinimum(AnalysisContract):
    kind = "bernoulli"
    at_rest = True


class TestRegressionAtAMinimum(AnalysisContract):
    kind = "gaussian"
    at_rest = True


class TestRegressionOffIt(AnalysisContract):
    kind = "gaussian"
    run = 3


class TestCountsOfSeveral(AnalysisContract):
    kind = "poisson"
    several = 3


def test_the_temperature_multiplies_v_and_nothing_else() -> None:
    one = AnalysisContract()
    four = AnalysisContract()
    one.run = four.run = 3
    one.tau = 0.2
    four.tau = 0.8
    small = World(one, "kron")
    large = World(four, "kron")
    task = small.task
    test = small.test
    q = small.given
    p = large.given
    close = World.close
    a = blr.sensitivity(task, q)
    b = blr.sensitivity(task, p)
    close(b.variance, 4 * a.variance)
    close(b.self_influence, 4 * a.self_influence)
    close(b.error, a.error)
    a = blr.leave_one_out(task, q)
    b = blr.leave_one_out(task, p)
    f = outputs_of(task, q.mean)
    close(b.logits - f, 4 * (a.logits - f))
    close(b.leverage, 4 * a.leverage)
    close(b.unfamiliarity, a.unfamiliarity)
    close(blr.influence(task, p, test), 4 * torch.as_tensor(blr.influence(task, q, test)))
    for normalize in (True, "cosine"):
        plain = blr.influence(task, q, test, normalize=normalize)
        close(blr.influence(task, p, test, normalize=normalize), torch.as_tensor(plain))
    a = blr.suspicious(task, q, seed=1)
    b = blr.suspicious(task, p, seed=1)
    close(b.losses, a.losses)
    close(b.closeness, a.closeness)
    for how in ({"solver": "posterior"}, {"solver": "cg", "passes": 3}):
        actual = [blr.what_if(task, each, remove=GROUP, **how) for each in (q, p)]
        close(flatten(actual[1].parameters), flatten(actual[0].parameters))
    close(
        flatten(p.sample(generator=torch.Generator().manual_seed(0))),
        flatten(q.sample(generator=torch.Generator().manual_seed(0))),
    )


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_single_precision_is_near(kind: str) -> None:
    about = AnalysisContract()
    about.kind = kind
    about.at_rest = True
    exact = World(about, "full")
    x, y = exact.task.dataset.tensors
    y = y.float() if y.is_floating_point() else y
    task = blr.Task(copy.deepcopy(exact.task.model).float(), (x.float(), y), likelihood=kind)
    for ask in (
        lambda t: blr.sensitivity(t, exact.given).variance,
        lambda t: blr.leave_one_out(t, exact.given).logits,
        lambda t: torch.as_tensor(blr.influence(t, exact.given, t)),
        lambda t: flatten(blr.what_if(t, exact.given, remove=GROUP, solver="posterior").parameters),
    ):
        ours = ask(task)
        truth = ask(exact.task)
        assert ours.dtype == torch.float32
        assert ours.device.type == "cpu"
        assert float((ours.double() - truth).norm() / truth.norm()) < 5e-4


def test_frozen_parameters_carry_no_variance() -> None:
    model = mlp(outputs=2, seed=3)
    model[0].requires_grad_(False)
    x = normal(N, 4)
    task = blr.Task(model, (x, targets("gaussian", N, 1)), likelihood="gaussian")
    q = blr.fit_laplace(task, structure="full", prior_precision=DELTA)
    assert set(q.mean) == {"2.weight", "2.bias"}
    z = torch.cat([torch.tanh(model[0](x)).detach(), torch.ones(N, 1)], 1)
    gram = z.T @ z + DELTA * torch.eye(z.shape[1], dtype=torch.float64)
    hat = (z @ torch.linalg.inv(gram) * z).sum(1)
    World.close(blr.sensitivity(task, q).variance, hat[:, None, None] * torch.eye(2).double())


# One table of what is refused: call, error, a word.


class Bad:
    """A task, its posterior, and things that do not belong to them."""

    def __init__(self) -> None:
        about = AnalysisContract()
        about.at_rest = True
        world = World(about, "kron")
        self.task = world.task
        self.test = world.test
        self.q = world.given
        q = self.q
        self.other = blr.Posterior(q.mean, q.form, prior_precision=DELTA, n_data=N + 1)
        w = {"w": torch.ones(2)}
        self.foreign = blr.Posterior(w, w, prior_precision=1.0, n_data=N)
        self.wide = blr.Task(mlp(outputs=4), (normal(M, 4), targets("categorical", M, 0)))
        self.real = blr.Task(self.task.model, (normal(M, 4), normal(M, 3)), likelihood="gaussian")
        nan = normal(M, 4)
        nan[2, 1] = torch.nan
        self.nan = blr.Task(self.task.model, (nan, targets("categorical", M, 0)))
        self.two = self.task.subset([0, 1])
        self.many = blr.Task(self.task.model, (normal(M, 4), torch.full((M,), 9)))


@pytest.fixture(scope="module")
def bad() -> Bad:
    return Bad()


ANALYSES = {
    "sensitivity": lambda t, q: blr.sensitivity(t, q),
    "leave_one_out": lambda t, q: blr.leave_one_out(t, q),
    "influence": lambda t, q: blr.influence(t, q, t if isinstance(t, blr.Task) else None),
    "suspicious": lambda t, q: blr.suspicious(t, q),
    "what_if": lambda t, q: blr.what_if(t, q, remove=[0]),
    "calibrate": lambda t, q: blr.calibrate(t, q),
}


@pytest.mark.parametrize("analysis", ANALYSES)
def test_what_belongs_to_something_else(bad: Bad, analysis: str) -> None:
    ask = ANALYSES[analysis]
    for posterior, error, word in (
        (None, InputError, "posterior"),
        (3, InputError, "got int"),
        ([], InputError, "empty list"),
        (bad.other, PosteriorError, f"n_data={N + 1}"),
        ([bad.q, bad.other], PosteriorError, r"posterior\[1\].*n_data"),
        (bad.foreign, PosteriorError, "another model"),
    ):
        with pytest.raises(error, match=word):
            ask(bad.task, posterior)
    with pytest.raises(InputError, match="Task"):
        ask(bad.task.model, None)


OPTIONS: list[tuple[Any, type, str]] = [
    (lambda b: blr.leave_one_out(b.task, b.q, refine=-1), InputError, "refine"),
    (lambda b: blr.leave_one_out(b.task, b.q, refine=N + 1), InputError, "at most 14"),
    (lambda b: blr.leave_one_out(b.task, b.q, refine=1.5), InputError, "refine"),
    (lambda b: blr.leave_one_out(b.task, [b.q, b.q], refine=1), InputError, "one posterior"),
    (lambda b: blr.influence(b.task, b.q, b.test, measure="margins"), InputError, "measure"),
    (lambda b: blr.influence(b.task, b.q, b.test, measure=lambda f, y: f), InputError, "measure"),
    (
        lambda b: blr.influence(
            b.task, b.q, b.test, measure=lambda f, y: (f.argmax(-1) == y).float()
        ),
        InputError,
        "no gradient",
    ),
    (lambda b: blr.influence(b.task, b.q, b.test, normalize="self"), InputError, "normalize"),
    (lambda b: blr.influence(b.task, b.q, b.test, k=0), InputError, "k"),
    (lambda b: blr.influence(b.task, b.q, b.test, k=N + 1), InputError, "k=15"),
    (lambda b: blr.influence(b.task, b.q, b.test).top(True), InputError, "k"),
    (lambda b: blr.influence(b.task, b.q, b.test).group([]), InputError, "selects none"),
    (lambda b: blr.influence(b.task, b.q, b.test).group([1], by="target"), InputError, "not both"),
    (lambda b: blr.influence(b.task, b.q, b.test).group(by="colour"), InputError, "no column"),
    (lambda b: blr.influence(b.task, b.q, b.test, normalize=True).group(), InputError, "add up"),
    (lambda b: blr.influence(b.task, b.q, b.test).plot(M), InputError, "test"),
    (lambda b: blr.influence(b.task, b.q, b.test).plot(True), InputError, "test"),
    (lambda b: blr.influence(b.task, b.q, b.test).plot(0, k=0), InputError, "k"),
    (lambda b: blr.influence(b.task, b.q, b.wide), PosteriorError, "another model"),
    (lambda b: blr.influence(b.task, b.q, b.real), InputError, "likelihood"),
    (lambda b: blr.influence(b.task, b.q, b.many), DataError, "target|class"),
    (lambda b: blr.influence(b.task, b.q, b.nan), DataError, "index 2"),
    (lambda b: blr.influence(b.task, b.q, b.test.dataset), InputError, "test_task"),
    (lambda b: blr.suspicious(b.two, blr.fit_laplace(b.two)), InputError, "or more, got 2"),
    (lambda b: blr.suspicious(b.task, b.q, share=0), InputError, "share"),
    (lambda b: blr.suspicious(b.task, b.q, share=True), InputError, "share"),
    (lambda b: blr.suspicious(b.task, b.q, samples=0), InputError, "samples"),
    (lambda b: blr.suspicious(b.task, b.q, duplicates=1), InputError, "duplicates"),
    (
        lambda b: blr.suspicious(b.task, b.q, duplicates=False).score("duplicate"),
        InputError,
        "duplicates=True",
    ),
    (lambda b: blr.suspicious(b.task, b.q, duplicates=False).score("odd"), InputError, "'odd'"),
    (lambda b: blr.what_if(b.task, b.q, remove=[0]).apply(nn.Linear(4, 2)), ModelError, "apply"),
    (lambda b: blr.what_if(b.task, b.q, remove=[0]).apply(None), InputError, "model must be"),
    (lambda b: blr.what_if_each(b.task, b.q, by="colour"), InputError, "no column"),
    (lambda b: blr.what_if_each(b.task, b.q, by=None), InputError, "by must be"),
    (lambda b: blr.calibrate(b.task, b.q, probe=0), InputError, "probe"),
    (lambda b: blr.rerun(b.task, seeds=0), InputError, "seeds"),
    (lambda b: blr.select_prior_precision(b.task, []), InputError, "empty"),
    (lambda b: blr.select_prior_precision(b.task, [-1.0]), InputError, "positive"),
    (lambda b: blr.select_prior_precision(b.task, [torch.inf]), InputError, "finite"),
    (lambda b: blr.select_prior_precision(b.task, 3.0), InputError, "sequence"),
    (lambda b: blr.select_prior_precision(b.task, [1.0], structure="x"), InputError, "structure"),
    (lambda b: blr.select_prior_precision(b.task, [1.0], test=3), InputError, "test must be"),
    (lambda b: blr.select_prior_precision(b.task, [1.0], test=b.wide), PosteriorError, "model"),
    (lambda b: blr.select_prior_precision(b.task, [1.0], fit="x"), InputError, "fit must be"),
    (
        lambda b: blr.select_prior_precision(b.task, [1.0], fit=lambda t, d: None),
        InputError,
        "must return",
    ),
    (
        lambda b: blr.select_prior_precision(
            b.task, [1.0], fit=lambda t, d: blr.fit_laplace(t, prior_precision=7.0)
        ),
        InputError,
        "prior_precision=7 for δ=1",
    ),
    (lambda b: token_sensitivity(b.task, b.q), InputError, '"tokens" or "causal_lm"'),
]


@pytest.mark.parametrize("case", range(len(OPTIONS)))
def test_what_is_refused(bad: Bad, case: int) -> None:
    call, error, word = OPTIONS[case]
    with pytest.raises(error, match=word):
        call(bad)


def test_what_overflows_is_named() -> None:
    model = mlp().float()
    task = blr.Task(model, (1e3 * normal(6, 4).float(), targets("categorical", 6, 0)))
    tiny = {n: torch.full_like(p, 1e-38) for n, p in model.named_parameters()}
    q = blr.Posterior(task.parameters(), tiny, prior_precision=1e-38, n_data=6)
    for ask in (blr.sensitivity, blr.leave_one_out, lambda t, q: blr.influence(t, q, t)):
        with pytest.raises(ModelError, match="overflows"):
            ask(task, q)
