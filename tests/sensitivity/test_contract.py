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
from dataclasses import dataclass
from functools import cache, cached_property
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

    def loss_of_example(output: Tensor, target: Tensor) -> Tensor:
        return loss(kind, output[None], target[None]).sum()

    hessian = torch.func.hessian(loss_of_example)
    return torch.stack([hessian(output, target) for output, target in zip(f, y, strict=True)])


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
    n_runs = 1  # runs
    at_rest = False
    tau: float | None = None

    @pytest.fixture(params=STRUCTURES)
    def world(self, request: pytest.FixtureRequest) -> World:
        return world_of(type(self), request.param)

    def test_sensitivity(self, world: World) -> None:
        scores = blr.sensitivity(world.task, world.given)
        by_run = [self.scores_of_run(world, ends) for ends in world.ends]
        for name in ("error", "variance", "self_influence", "deviation"):
            expected = torch.stack([of_run[name] for of_run in by_run]).mean(0)
            world.close(getattr(scores, name), expected)
        world.close(scores.outputs, world.ends[-1].at[-1].f)
        world.close(scores.losses, world.ends[-1].at[-1].losses)
        light = blr.sensitivity(world.task, world.given, variance=False)
        world.close(light.self_influence, scores.self_influence)
        assert light.variance is None
        assert light.deviation is None
        assert light.table.variance.isna().all()

    def scores_of_run(self, world: World, ends: Ends) -> dict[str, Tensor]:
        """e, V, eᵀ V e, and how far V e moves the prediction."""
        v = world.tau * ends.at[-1].v
        e = world.error(ends)
        move = torch.einsum("ncd,nd->nc", v, e)
        return {
            "error": e,
            "variance": v,
            "self_influence": (e * move).sum(-1),
            "deviation": world.distance(ends.at[-1].f, move),
        }

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
        by_checkpoint = []
        for ends in world.ends:
            for at in ends.at:
                e = at.e if len(ends.at) > 1 else world.error(ends)
                moves = torch.einsum("nc,ncp->np", e, at.j)
                test_slopes = torch.einsum("nc,ncp->np", at.h, at.k)
                by_checkpoint.append(world.tau * moves @ at.sigma @ test_slopes.mT)
        truth = torch.stack(by_checkpoint).mean(0)
        world.close(actual, truth)
        top = blr.influence(world.task, world.given, world.test, k=4)
        world.close(top.helpful_values, truth.mT.topk(4).values)

    def test_suspicious(self, world: World) -> None:
        actual = blr.suspicious(world.task, world.given, duplicates=False)
        losses = [torch.stack([at.losses for at in ends.at]).mean(0) for ends in world.ends]
        world.close(actual.losses, torch.stack(losses).mean(0))
        world.close(actual.left_out, blr.leave_one_out(world.task, world.given).losses)
        end = world.ends[-1].at[-1]
        traces = (height(self.kind, end.f, end.y) * end.v).sum((1, 2))  # tr(Λ V)
        world.close(actual.unfamiliarity, traces)
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
            is_one = targets > 0.5
            votes = [((at.f > 0) != is_one).any(1) for at in world.ends[-1].at]
            without = ((left_out > 0) != is_one).any(1)
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
            gradient = torch.einsum("ncp,nc->p", j, at.e[GROUP])
            mean = flatten(at.q.mean) + torch.linalg.solve(left, gradient)
            moved = unflatten(mean, at.q.mean)
            after = outputs_of(world.test, moved)
            changes.append(loss(self.kind, after, at.z) - loss(self.kind, at.g, at.z))
        world.close(flatten(result.parameters), mean)
        losses_after = loss(self.kind, at.g, at.z) + torch.stack(changes).mean(0)
        world.close(result.after.losses, losses_after)
        applied = result.apply(copy.deepcopy(world.task.model))
        losses = loss(self.kind, applied(world.test.dataset.tensors[0]).detach(), at.z)
        assert result.applied_nll == pytest.approx(float(losses.mean()))
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

    def __init__(self, contract: AnalysisContract, structure: str) -> None:
        self.contract = contract
        self.structure = structure
        outputs = {"categorical": 3, "gaussian": 2}.get(contract.kind, 1)
        x = normal(N, 4)
        y = targets(contract.kind, N, 1)
        model = mlp(outputs=outputs, seed=3)
        self.task = blr.Task(model, (x, y), likelihood=contract.kind, progress=False)
        data = normal(M, 4, seed=5), targets(contract.kind, M, 6)
        self.test = blr.Task(model, data, likelihood=contract.kind, progress=False)
        posteriors = []
        for s in range(contract.n_runs):
            seeds = [3 + 10 * s + t for t in range(contract.run)]
            checkpoints = [self._fitted(weights_of(seed, outputs)) for seed in seeds]
            last = checkpoints.pop()
            posteriors.append(self._with_facts(last, checkpoints, contract.n_runs > 1))
        self.given: Any = posteriors if contract.n_runs > 1 else posteriors[0]
        self.posteriors = posteriors
        model.load_state_dict(posteriors[-1].mean)

    @cached_property
    def ends(self) -> list[Ends]:
        problem = self.contract.kind, self.task, self.test
        return [Ends([At(*problem, p) for p in q.run]) for q in self.posteriors]

    def _fitted(self, weights: dict[str, Tensor]) -> blr.Posterior:
        model = copy.deepcopy(self.task.model)
        model.load_state_dict(weights)
        task = self.task.under(model, self.task.device)
        return blr.fit_laplace(task, structure=self.structure, prior_precision=DELTA)

    def _with_facts(
        self, q: blr.Posterior, earlier: list[blr.Posterior], rerun: bool
    ) -> blr.Posterior:
        far = 0.0 if self.contract.at_rest else 1e9
        measured = Stationarity(far, far, 1.0, N, self.task.likelihood.recorded)
        tau = self.contract.tau
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
        if self.contract.tau is not None:
            return self.contract.tau
        classes = self.contract.kind in ("categorical", "bernoulli")
        is_guessed = self.structure == "kron" and classes and not self.contract.at_rest
        return 0.15 if is_guessed else 1.0

    def error(self, ends: Ends) -> Tensor:
        """ē: the mean over the run; of the end of a classifier's alone, at .7 of the logits."""
        end = ends.at[-1]
        classes = self.contract.kind in ("categorical", "bernoulli")
        if len(ends.at) == 1 and classes and not self.contract.at_rest:
            return slope(self.contract.kind, 0.7 * end.f, end.y)
        return torch.stack([at.e for at in ends.at]).mean(0)

    def left_out(self, ends: Ends) -> Tensor:
        end = ends.at[-1]
        v = self.tau * end.v
        e = self.error(ends)
        if not (self.contract.at_rest and self.structure == "full"):
            return torch.einsum("ncd,nd->nc", v, e)
        lam = height(self.contract.kind, end.f, end.y)
        eye = torch.eye(v.shape[-1], dtype=torch.float64)
        return torch.linalg.solve(eye - v @ lam, v @ e.unsqueeze(-1)).squeeze(-1)

    def distance(self, f: Tensor, move: Tensor) -> Tensor:
        if self.contract.kind in ("gaussian", "poisson"):
            return move.norm(dim=-1)
        act = torch.sigmoid if self.contract.kind == "bernoulli" else nn.Softmax(-1)
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


@cache
def world_of(contract: type[AnalysisContract], structure: str) -> World:
    """One for all tests of a contract, which leave it as it is."""
    return World(contract(), structure)


class TestClassesAlone(AnalysisContract):
    """The end of a training alone is known: errors at .7 of the logits, a temperature guessed."""


class TestClassesOfARun(AnalysisContract):
    run = 4
    tau = 0.3


class TestClassesOfSeveralRuns(AnalysisContract):
    run = 2
    n_runs = 2
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
    n_runs = 3


@dataclass
class Tempered:
    """A task, and one posterior at the temperatures .2 and .8."""

    task: blr.Task
    test: blr.Task
    cold: blr.Posterior
    warm: blr.Posterior


@pytest.fixture(scope="module")
def tempered() -> Tempered:
    worlds = []
    for temperature in (0.2, 0.8):
        contract = AnalysisContract()
        contract.run = 3
        contract.tau = temperature
        worlds.append(World(contract, "kron"))
    cold, warm = worlds
    return Tempered(cold.task, cold.test, cold.given, warm.given)


def test_a_temperature_multiplies_variances(tempered: Tempered) -> None:
    cold = blr.sensitivity(tempered.task, tempered.cold)
    warm = blr.sensitivity(tempered.task, tempered.warm)
    World.close(warm.variance, 4 * cold.variance)
    World.close(warm.self_influence, 4 * cold.self_influence)
    World.close(warm.error, cold.error)


def test_a_temperature_multiplies_left_out_moves(tempered: Tempered) -> None:
    cold = blr.leave_one_out(tempered.task, tempered.cold)
    warm = blr.leave_one_out(tempered.task, tempered.warm)
    f = outputs_of(tempered.task, tempered.cold.mean)
    World.close(warm.logits - f, 4 * (cold.logits - f))
    World.close(warm.leverage, 4 * cold.leverage)
    World.close(warm.unfamiliarity, cold.unfamiliarity)


@pytest.mark.parametrize(("normalize", "factor"), [(False, 4), (True, 1), ("cosine", 1)])
def test_a_temperature_multiplies_influence_that_is_not_normalized(
    tempered: Tempered, normalize: bool | str, factor: int
) -> None:
    task = tempered.task
    cold = blr.influence(task, tempered.cold, tempered.test, normalize=normalize)
    warm = blr.influence(task, tempered.warm, tempered.test, normalize=normalize)
    World.close(warm, factor * torch.as_tensor(cold))


def test_a_temperature_suspects_nothing_else(tempered: Tempered) -> None:
    cold = blr.suspicious(tempered.task, tempered.cold, seed=1)
    warm = blr.suspicious(tempered.task, tempered.warm, seed=1)
    World.close(warm.losses, cold.losses)
    World.close(warm.closeness, cold.closeness)


@pytest.mark.parametrize("options", [{"solver": "posterior"}, {"solver": "cg", "passes": 3}])
def test_a_temperature_moves_no_removal(tempered: Tempered, options: dict[str, Any]) -> None:
    cold = blr.what_if(tempered.task, tempered.cold, remove=GROUP, **options)
    warm = blr.what_if(tempered.task, tempered.warm, remove=GROUP, **options)
    World.close(flatten(warm.parameters), flatten(cold.parameters))


def test_a_temperature_changes_no_draw(tempered: Tempered) -> None:
    cold = tempered.cold.sample(generator=torch.Generator().manual_seed(0))
    warm = tempered.warm.sample(generator=torch.Generator().manual_seed(0))
    World.close(flatten(warm), flatten(cold))


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_single_precision_is_near(kind: str) -> None:
    contract = AnalysisContract()
    contract.kind = kind
    contract.at_rest = True
    exact = World(contract, "full")
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
    variance = hat[:, None, None] * torch.eye(2, dtype=torch.float64)
    World.close(blr.sensitivity(task, q).variance, variance)


# One table of what is refused: call, error, a word.


class Bad:
    """A task, its posterior, and things that do not belong to them."""

    def __init__(self) -> None:
        contract = AnalysisContract()
        contract.at_rest = True
        world = World(contract, "kron")
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
