"""A training run: checkpoints, recipes, temperatures, and what the analyses make of them."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.functional import cross_entropy, one_hot

import blr_analysis as blr
from blr_analysis.errors import BLRError, InputError, ModelError, PosteriorWarning
from blr_analysis.posterior.facts import Calibration
from blr_analysis.sensitivity.solvers import WIDENED
from blr_analysis.sensitivity.training import trained, whole_data
from blr_analysis.snapshots import read, state_of, thinned

N = 120
EPOCHS = 16
BATCH = 20
TAU = 0.3


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 10)
    return nn.Sequential(*layers).double()


def digits(start: int = 0, count: int = N) -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    rows = slice(start, start + count)
    return torch.from_numpy((x[rows] - 4.9) / 6.0), torch.from_numpy(y[rows]).long()


def run(seed: int = 0, **options: Any) -> tuple[nn.Sequential, blr.Checkpoints]:
    """A training in a loop of one's own, stopped off the minimum."""
    model = network(seed)
    x, y = digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = EPOCHS * N // BATCH
    checkpoints = blr.Checkpoints(model, steps=steps, **options)
    for _ in range(EPOCHS):
        for batch in torch.randperm(N).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            checkpoints.step()
    return model.eval(), checkpoints


RECIPE: dict[str, Any] = {"lr": 1e-2, "epochs": EPOCHS, "batch_size": BATCH}


@pytest.fixture(scope="module")
def fit() -> tuple[blr.Task, blr.Posterior]:
    model, checkpoints = run()
    task = blr.Task(
        model,
        digits(),
        checkpoints=checkpoints,
        recipe=blr.Recipe("adamw", **RECIPE),
        progress=False,
    )
    return task, blr.fit_laplace(task)


def at(task: blr.Task, q: blr.Posterior) -> nn.Module:
    """A copy of the model at a posterior's weights and buffers."""
    model = copy.deepcopy(task.model)
    model.load_state_dict({**model.state_dict(), **q.mean, **q.buffers})
    return model.eval()


def jacobians(model: nn.Module, q: blr.Posterior, x: Tensor) -> dict[str, Tensor]:
    buffers = dict(model.named_buffers())

    def f(params: dict[str, Tensor]) -> Tensor:
        return functional_call(model, {**params, **buffers}, (x,))

    return jacrev(f)(dict(q.mean))


def test_steps_near_an_eighth_a_quarter_and_a_half_are_kept() -> None:
    model, checkpoints = run()
    assert checkpoints._thinned(model) == [12, 24, 48]
    assert thinned([1, 2, 4, 8, 16, 32], 32) == [4, 8, 16]
    assert thinned([5], 5) == []


def test_a_run_ends_where_its_weights_were_put_back(tmp_path: Path) -> None:
    """Early stopping: what came later is no part of the run."""
    model, checkpoints = run(folder=tmp_path)
    model.load_state_dict({**model.state_dict(), **read(checkpoints.snapshots[48])})
    task = blr.Task(model, digits(), checkpoints=checkpoints)
    assert checkpoints._thinned(model) == [6, 12, 24]
    assert len(task.checkpoints) == 3
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".safetensors"] * 6


def test_checkpoints_from_dicts_files_and_a_trainers_folder(tmp_path: Path) -> None:
    model, checkpoints = run()
    states: list[Any] = checkpoints.states(model)
    for k, state in enumerate([*states, state_of(model)]):
        place = tmp_path / f"checkpoint-{2**k}"
        place.mkdir()
        save_file({n: t.contiguous() for n, t in state.items()}, place / "model.safetensors")
    files = [tmp_path / f"checkpoint-{2**k}" / "model.safetensors" for k in range(3)]
    with_last = [*states, state_of(model)]
    for source in (with_last, files, tmp_path):
        checkpoints = blr.Task(model, digits(), checkpoints=source).checkpoints
        assert len(checkpoints) == 3
        for actual, expected in zip(checkpoints, states, strict=True):
            for name, tensor in expected.items():
                assert torch.equal(actual[name], tensor)


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        (lambda s: {}, ModelError, "another model"),
        (lambda s: {n: t / 0 * 0 if t.ndim else t for n, t in s.items()}, ModelError, "NaN"),
        (lambda s: 3, InputError, "state dict"),
        (lambda s: "no/such/place", BLRError, "no"),
    ],
)
def test_bad_checkpoints_are_one_clear_error(change: Any, error: type, word: str) -> None:
    model = network()
    with pytest.raises(error, match=word):
        blr.Task(model.eval(), digits(), checkpoints=[change(state_of(model))])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lr": 0.1, "epochs": 3}, "needs epochs= and batch_size="),
        ({"epochs": 3, "batch_size": 4}, "needs lr="),
        ({**RECIPE, "lr": -1.0}, "lr must be positive"),
        ({**RECIPE, "schedule": "warm"}, "schedule must be None"),
        ({**RECIPE, "optimizer": "nothing"}, "optimizer must be one of"),
        ({**RECIPE, "no_setting": 1}, "no_setting"),
        ({**RECIPE, "epochs": math.inf}, "epochs must be positive and finite"),
        ({**RECIPE, "warmup": 1}, "warmup must be a share"),
        ({**RECIPE, "warmup": 0.1, "schedule": [(0, 1)]}, "warmup= goes with a schedule's name"),
        ({**RECIPE, "schedule": [(0.5, 1), (0.1, 1)]}, "parts rising from 0 to 1"),
        ({**RECIPE, "schedule": [(0, 1), (1, -1)]}, "factors 0 or more"),
        ({**RECIPE, "schedule": []}, "points of a schedule are pairs"),
        ({**RECIPE, "max_grad_norm": 0}, "max_grad_norm must be positive"),
        ({**RECIPE, "groups": ["*.bias"]}, "groups must be dicts"),
        ({**RECIPE, "groups": [{"params": ["*.bias"], "no_setting": 1}]}, "no setting no_setting"),
        ({"train": 3}, "train must be a function"),
    ],
)
def test_what_a_recipe_refuses(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        blr.Recipe(**arguments)


def test_a_recipe_trains_as_torch_does() -> None:
    """Against a loop of plain torch on the same minibatches, to the bit of rounding."""
    task = blr.Task(network().eval(), digits(), progress=False)
    initial = copy.deepcopy(network(3).state_dict())
    recipe = blr.Recipe("sgd", momentum=0.9, schedule="cosine", initial=initial, **RECIPE)
    state = trained(task, whole_data(task), recipe, seed=4)
    model = network(3)
    x, y = digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    order = torch.Generator().manual_seed(8)
    k = 0
    steps = EPOCHS * N // BATCH
    for _ in range(EPOCHS):
        rank = torch.randperm(N, generator=order).argsort()
        for part in range(N // BATCH):
            rows = (rank // BATCH == part).nonzero().flatten()
            optimizer.param_groups[0]["lr"] = 1e-2 * (0.5 + 0.5 * math.cos(math.pi * k / steps))
            optimizer.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            k += 1
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)


def test_a_shortened_recipe_makes_half_of_the_rate_times_steps() -> None:
    recipe = blr.Recipe("adam", lr=0.01, epochs=40, batch_size=10, schedule="linear")
    short = recipe.shortened(8)
    optimizer = short.made(nn.Linear(1, 1), n_data=10, steps=100)
    total = 0.0
    for k in range(1000):
        short.set_rate(optimizer, (k + 0.5) / 1000)
        total += optimizer.param_groups[0]["lr"] / 1000
    assert total * 8 == pytest.approx(0.5 * (0.01 * 0.5 * 40), rel=1e-3)
    assert recipe.shortened(40) is recipe


@pytest.mark.parametrize("name", ["ivon", "vogn", "adamw"])
def test_optimizers_are_known_by_name(name: str) -> None:
    torch.manual_seed(0)
    x, y = digits()
    model = nn.Linear(64, 10).double()
    recipe = blr.Recipe(name, lr=0.05, epochs=2, batch_size=30)
    task = blr.Task(model, (x, y), recipe=recipe, progress=False)
    state = trained(task, whole_data(task), recipe, 0)
    after = cross_entropy(nn.functional.linear(x, state["weight"], state["bias"]), y)
    assert float(after) < math.log(10)


def test_buffers_and_earlier_ones_are_saved(fit: Any, tmp_path: Path) -> None:
    task, q = fit
    assert len(q.run) == 4
    assert q.at_minimum is False
    q.save(tmp_path / "q.safetensors")
    loaded = blr.Posterior.load(tmp_path / "q.safetensors")
    assert len(loaded.earlier) == 3
    for posterior, expected in zip(q.run, loaded.run, strict=True):
        assert (
            posterior.buffers.keys()
            == expected.buffers.keys()
            == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
        )
        assert all(torch.equal(b, expected.buffers[n]) for n, b in posterior.buffers.items())
        assert all(torch.equal(m, expected.mean[n]) for n, m in posterior.mean.items())
        assert torch.equal(posterior.precision("0.weight"), expected.precision("0.weight"))
    matrix = blr.influence(task, loaded, task)
    torch.testing.assert_close(
        torch.as_tensor(matrix), torch.as_tensor(blr.influence(task, q, task))
    )


def with_temperature(q: blr.Posterior) -> blr.Posterior:
    return q.changed(calibration=Calibration(TAU, error=0.1))


def test_influence_is_the_mean_over_the_run(fit: Any) -> None:
    """τ · mean_t ∇ℓ_jᵀ Σ ∇ℓ_i, each at its own weights and buffers, by autograd."""
    task, q = fit
    q = with_temperature(q)
    x, y = digits()
    a, b = digits(300, 7)
    total = torch.zeros(N, 7, dtype=torch.float64)
    for p in q.run:
        model = at(task, p)
        g, h = (_loss_gradients(model, p, *pair) for pair in ((x, y), (a, b)))
        solved = p.form.solve(h)
        total += sum(g[n].flatten(1) @ solved[n].flatten(1).T for n in g)
    actual = blr.influence(task, q, blr.Task(task.model, (a, b)))
    torch.testing.assert_close(torch.as_tensor(actual), TAU * total / 4, rtol=1e-7, atol=1e-10)
    top = blr.influence(task, q, blr.Task(task.model, (a, b)), k=3)
    assert top.helpful.tolist() == actual.top(3).helpful.tolist()


def _loss_gradients(model: nn.Module, q: blr.Posterior, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    buffers = dict(model.named_buffers())

    def losses(params: dict[str, Tensor]) -> Tensor:
        return cross_entropy(
            functional_call(model, {**params, **buffers}, (x,)), y, reduction="none"
        )

    return jacrev(losses)(dict(q.mean))


@pytest.mark.parametrize("alone", [False, True])
def test_leave_one_out_averages_the_errors(fit: Any, alone: bool) -> None:
    """f + τ V ē; of the end alone the errors are at .7 of the logits."""
    task, q = fit
    q = with_temperature(q)
    x, y = digits()
    if alone:
        q = blr.Posterior(
            q.mean, q.form, prior_precision=q.prior, n_data=N, record=q.record, buffers=q.buffers
        )
    f = at(task, q)(x).detach()
    errors = [at(task, p)(x).detach().softmax(1) - one_hot(y, 10) for p in q.run]
    error = torch.stack(errors).mean(0)
    if alone:
        error = (0.7 * f).softmax(1) - one_hot(y, 10)
    jacobian = jacobians(at(task, q), q, x)
    flat = {n: j.flatten(0, 1) for n, j in jacobian.items()}
    solved = q.form.solve(flat)
    v = torch.zeros(len(x), 10, 10, dtype=f.dtype)
    for name, j in jacobian.items():
        v += torch.einsum("ncp,ndp->ncd", j.flatten(2), solved[name].view_as(j).flatten(2))
    after = f + TAU * torch.einsum("ncd,nd->nc", v, error)
    loo = blr.leave_one_out(task, q)
    scores = blr.sensitivity(task, q)
    torch.testing.assert_close(loo.logits, after, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(scores.error, error, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(scores.variance, TAU * v, rtol=1e-6, atol=1e-9)


def test_the_temperature_makes_the_tenth_as_a_retraining_has_it(fit: Any) -> None:
    """The root, and its standard error by the delta method, from the losses themselves."""
    task, q = fit
    better = blr.calibrate(task, q, seed=1)
    tenth = torch.randperm(N, generator=torch.Generator().manual_seed(1))[:12].sort().values
    keep = torch.ones(N, dtype=torch.bool)
    keep[tenth] = False
    rest = keep.nonzero().flatten()
    state = trained(task, [(task, rest, rest)], task.recipe, 1)
    model = copy.deepcopy(task.model)
    model.load_state_dict({**model.state_dict(), **state})
    x, y = digits()
    truth = cross_entropy(model.eval()(x[tenth]), y[tenth], reduction="none").detach()
    loo = blr.leave_one_out(task, better)
    assert float(loo.losses[tenth].mean()) == pytest.approx(float(truth.mean()), rel=1e-6)
    f = at(task, q)(x).detach()
    move = None
    move = (loo.logits - f) / better.temperature

    def gap(log: float) -> Tensor:
        after = cross_entropy(f + math.exp(log) * move, y, reduction="none")
        return after[tenth] - truth

    log = math.log(better.temperature)
    slope = float((gap(log + 1e-5) - gap(log - 1e-5)).mean()) / 2e-5
    before = cross_entropy(f, y, reduction="none")[tenth]
    spread = math.hypot(float(gap(log).std()), float((truth - before).std()))
    expected = spread / math.sqrt(12) / slope
    assert better.temperature_error == pytest.approx(expected, rel=1e-2)
    assert "guess" in q.note
    assert "guess" not in better.note


def test_without_a_recipe_nothing_is_calibrated(fit: Any) -> None:
    task, q = fit
    bare = blr.Task(task.model, digits(), progress=False)
    q = blr.fit_laplace(bare)
    with pytest.warns(PosteriorWarning, match="recipe"):
        assert blr.calibrate(bare, q) is q


def test_a_replay_is_the_difference_of_two_trainings(fit: Any) -> None:
    task, q = fit
    _, y = digits()
    test = blr.Task(task.model, digits(300, 60))
    result = blr.what_if(task, q, remove=y == 3, evaluate=test, passes=2, seeds=2)
    assert result.solver == "replay"
    rest = (y != 3).nonzero().flatten()
    short = task.recipe.shortened(2)
    changes = []
    first = 0.0
    for seed in range(2):
        losses = []
        for parts in ([(task, rest, rest)], whole_data(task)):
            model = copy.deepcopy(task.model)
            model.load_state_dict({**model.state_dict(), **trained(task, parts, short, seed)})
            a, b = digits(300, 60)
            losses.append(float(cross_entropy(model.eval()(a), b)))
        changes.append(losses[0] - losses[1])
        first = first or losses[0]
    expected = result.before.nll + sum(changes) / 2
    assert result.nll == pytest.approx(expected, rel=1e-9)
    assert result.applied_nll == pytest.approx(first, rel=1e-9)
    applied = result.apply(copy.deepcopy(task.model)).eval()
    a, b = digits(300, 60)
    assert float(cross_entropy(applied(a), b)) == pytest.approx(first, rel=1e-9)
    low, high = result.interval or (0.0, 0.0)
    spread = torch.tensor(changes).std()
    half_width = WIDENED * 3.0776835 * float(spread)
    assert high == pytest.approx(result.nll + half_width, rel=1e-5)
    assert low == pytest.approx(max(0.0, result.nll - half_width), rel=1e-5)
    assert blr.what_if(task, q, remove=y == 3, passes=2, seeds=1).interval is None


def test_a_minibatch_is_one_forward_pass_whatever_was_relabelled(fit: Any) -> None:
    """BatchNorm sees relabelled examples among the others, alone in no batch of their own."""
    task, q = fit
    x, y = digits()
    y[[3, 50]] = torch.tensor([1, 2])
    relabelled = blr.Task(task.model, (x, y), recipe=task.recipe)
    truth = trained(relabelled.quiet, whole_data(relabelled), task.recipe.shortened(2), 0)
    options: dict[str, Any] = {"solver": "replay", "seeds": 1, "passes": 2}
    actual = blr.what_if(task, q, relabel={3: 1, 50: 2}, **options)
    for name, tensor in {**actual.parameters, **actual.buffers}.items():
        torch.testing.assert_close(tensor, truth[name])


def test_solvers_are_chosen_by_size_and_minimum(fit: Any) -> None:
    task, q = fit
    single = blr.what_if(task, q, remove=[3])
    assert single.solver == "posterior"
    assert "off the minimum" in repr(single)
    x, y = digits()
    model = nn.Linear(64, 10).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=300, tolerance_grad=1e-9)

    def closure() -> Tensor:
        optimizer.zero_grad()
        decay = sum(p.square().sum() for p in model.parameters())
        loss = cross_entropy(model(x), y, reduction="sum") + 0.5 * decay
        loss.backward()
        return loss

    optimizer.step(closure)
    convex = blr.Task(model, (x, y), progress=False)
    at_rest = blr.fit_laplace(convex, prior_precision=1.0)
    assert at_rest.at_minimum
    assert at_rest.temperature == 1
    assert blr.what_if(convex, at_rest, remove=y == 3).solver == "cg"


def test_retraining_by_a_function_of_ones_own(fit: Any) -> None:
    task, q = fit
    calls = []

    def train(data: Any, seed: int) -> nn.Module:
        calls.append((len(data), seed))
        return network(seed)

    retrainable = blr.Task(task.model, digits(), recipe=blr.Recipe(train=train), progress=False)
    _, y = digits()
    result = blr.what_if(retrainable, q, remove=y == 3, solver="retrain", seeds=2)
    left = int((y != 3).sum())
    # These end elsewhere than the model: three trainings on all data show if the recipe does.
    assert calls == [(left, 0), (left, 1), *((len(y), seed) for seed in range(3))]
    assert "another training" in result.note
    losses = [cross_entropy(network(s).eval()(digits()[0]), y) for s in range(2)]
    assert result.nll == pytest.approx(float(torch.stack(losses).mean()), rel=1e-9)
    assert blr.what_if(retrainable, q, remove=y == 3, seeds=1).solver == "retrain"
    with pytest.raises(InputError, match="retrain"):
        blr.what_if(retrainable, q, remove=y == 3, solver="replay")


@pytest.mark.parametrize(("epochs", "solver"), [(2, "retrain"), (17, "replay")])
def test_a_recipe_that_makes_no_more_passes_is_run_as_it_is(epochs: int, solver: str) -> None:
    """Than short trainings with and without the group."""
    x = torch.randn(40, 2)
    y = torch.randint(3, (40,))
    recipe = blr.Recipe("sgd", lr=0.1, epochs=epochs, batch_size=20)
    task = blr.Task(torch.nn.Linear(2, 3), (x, y), recipe=recipe, progress=False)
    q = blr.fit_laplace(task, prior_precision=1.0)
    result = blr.what_if(task, q, remove=y == 1, seeds=1)
    assert result.solver == solver
    chosen = blr.what_if(task, q, remove=y == 1, seeds=1, solver=solver)
    assert result.nll == chosen.nll
    assert result.passes == chosen.passes <= 2 * 8


def test_without_a_recipe_the_answer_says_that_it_is_rough(fit: Any) -> None:
    task, _ = fit
    bare = blr.Task(task.model, digits(), progress=False)
    q = blr.fit_laplace(bare)
    result = blr.what_if(bare, q, remove=digits()[1] == 3, seeds=2)
    assert result.solver == "replay"
    assert "rough" in result.note
    assert "rough" in repr(result)
    assert "default recipe" in blr.rerun(bare, seeds=1)[0].note


def test_a_training_that_diverges_is_one_error(fit: Any) -> None:
    task, q = fit
    wild = blr.Recipe("sgd", lr=1e308, epochs=EPOCHS, batch_size=BATCH)
    task = blr.Task(task.model, digits(), recipe=wild, progress=False)
    for solver, remedy in (("replay", "lr=.*passes="), ("retrain", "lr=")):
        with pytest.raises(ModelError, match=remedy):
            blr.what_if(task, q, remove=digits()[1] == 3, solver=solver)


@pytest.mark.slow
def test_reruns_have_weights_buffers_and_runs_of_their_own(fit: Any) -> None:
    task, _ = fit
    again = blr.rerun(task, seeds=2)
    assert [len(p.run) for p in again] == [4, 4]
    assert not torch.equal(again[0].buffers["1.running_mean"], again[1].buffers["1.running_mean"])
    alone = [torch.as_tensor(blr.influence(task, p, task)) for p in again]
    of_both = torch.as_tensor(blr.influence(task, again, task))
    torch.testing.assert_close(of_both, sum(alone) / 2, rtol=1e-9, atol=1e-12)
    f = blr.leave_one_out(task, again[1]).logits
    assert blr.leave_one_out(task, again).logits.shape == f.shape
    scores = [blr.sensitivity(task, p).error for p in again]
    torch.testing.assert_close(blr.sensitivity(task, again).error, sum(scores) / 2)


def test_wrong_labels_are_ranked_by_their_loss_over_the_run(fit: Any) -> None:
    task, q = fit
    actual = blr.suspicious(task, q)
    x, y = digits()
    losses = [cross_entropy(at(task, p)(x), y, reduction="none").detach() for p in q.run]
    torch.testing.assert_close(actual.losses, torch.stack(losses).mean(0), rtol=1e-9, atol=1e-12)
    wrong = [i for i in actual.order.tolist() if actual.kind[i] == "label"]
    assert wrong == sorted(wrong, key=lambda i: -float(actual.losses[i]))
    assert actual.table["index"].tolist() == actual.order.tolist()


@pytest.mark.parametrize("kind", ["optimizer", "kron"])
def test_a_posterior_learned_while_training(kind: str) -> None:
    torch.manual_seed(0)
    x, y = digits()
    model = nn.Sequential(nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10)).double()
    steps = 40
    optimizer = blr.IVON(model.parameters(), lr=0.1, ess=N)
    options: Any = {"optimizer": optimizer} if kind == "optimizer" else {"structure": "kron"}
    checkpoints = blr.Checkpoints(model, steps=steps, **options)
    precisions = {}
    for k in range(1, steps + 1):
        rows = torch.randperm(N)[:BATCH]
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        checkpoints.step()
        if kind == "optimizer":
            precisions[k] = blr.Posterior.from_optimizer(optimizer, model).precision("0.weight")
    q = checkpoints.posterior(n_data=N)
    assert [len(q.earlier), q.structure] == [3, "diag" if kind == "optimizer" else "kron"]
    for p, k in zip(q.run, (5, 10, 20, 40), strict=True):
        if precisions:
            assert torch.equal(p.precision("0.weight"), precisions[k])
    assert torch.equal(q.mean["0.weight"], model[0].weight)
    assert not torch.equal(q.earlier[0].mean["0.weight"], model[0].weight)
    task = blr.Task(model, (x, y), progress=False)
    assert blr.influence(task, q, task).shape == (N, N)


def test_a_query_selects_as_in_the_shell(fit: Any) -> None:
    task, q = fit
    named = blr.Task(
        task.model,
        digits(),
        recipe=task.recipe,
        metadata={"who": ["eve", "bob"] * 60},
        progress=False,
    )
    result = blr.what_if(named, q, remove="who == 'eve'", passes=1, seeds=1)
    assert result.removed == 60
    with pytest.raises(InputError, match="query"):
        blr.what_if(named, q, remove="nobody ==")
