"""The promises of every optimizer of the rule, whatever its row of Table 1."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from optimizer_makers import (
    ALONE,
    BINARY,
    BY_CLOSURE,
    MAKERS,
    WHOLE,
    X,
    Y,
    advance,
    draw,
    flat,
    loss_of,
    make,
    network,
    same,
    state_of,
    step,
    trained,
)
from optimizer_papers import START, STEPS, Run, learned
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.learning_rule.optim.draws import Draw

UNSCALED = ("bSAM", "SAM", *ALONE)  # they refuse a scaled loss


def but(*names: str) -> list[str]:
    """All optimizers but these."""
    return [name for name in MAKERS if name not in names]


@pytest.mark.parametrize("name", STEPS)
def test_takes_the_steps_of_its_paper(name: str) -> None:
    """Weights, and the precision or Hessian that it learns; see
    tests/support/optimizer_papers.py."""
    make, paper, draws = STEPS[name]
    model = network()
    run = Run()
    optimizer = make(model, torch.Generator().manual_seed(3))
    expected = paper(run)
    for t in range(1, 7 if name == "Newton" else 13):

        def loss(t: int = t) -> Tensor:
            run.drawn_weights.append(flat(model.parameters()))
            return loss_of(model, t)

        step(name, optimizer, loss, draws)
        weights, precision = next(expected)
        torch.testing.assert_close(flat(model.parameters()), weights, rtol=1e-10, atol=1e-12)
        if precision is not None:
            torch.testing.assert_close(learned(model, optimizer), precision, rtol=1e-9, atol=1e-11)
    assert (weights - START).norm() > 0.03  # it went somewhere


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAKERS)
def test_resumes_to_the_bit(name: str, dtype: torch.dtype) -> None:
    """Half-precision weights have a wide state."""
    if dtype == torch.bfloat16 and name in (*BINARY, "Newton"):
        return
    model, optimizer = trained(name, dtype, 4)
    draws_before = 0 if name in WHOLE else 2  # of a state that the loaded one replaces
    resumed_model, resumed = trained(name, dtype, draws_before, seed=0)
    state = tree_leaves({**optimizer.state})
    assert all(v.dtype == torch.float32 for v in state if isinstance(v, Tensor))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    middle = model[0].weight.detach().clone()
    advance(name, model, optimizer, 4, 10)  # these steps may not reach the saved state
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    resumed_model.load_state_dict(weights)
    resumed.load_state_dict(state)
    advance(name, resumed_model, resumed, 4, 10)
    assert not torch.equal(model[0].weight, middle)
    expected, tree = tree_flatten((model.state_dict(), optimizer.state_dict()))
    actual, resumed_tree = tree_flatten((resumed_model.state_dict(), resumed.state_dict()))
    assert resumed_tree == tree
    for ours, theirs in zip(actual, expected, strict=True):
        if isinstance(ours, Tensor):
            assert torch.equal(ours, theirs)
        else:
            assert ours == theirs
    foreign = make("STE" if name != "STE" else "BayesBiNN", network())
    with pytest.raises(OptimizerError, match="load a state_dict"):
        resumed.load_state_dict(foreign.state_dict())


@pytest.mark.parametrize("opens_context", [False, True])
@pytest.mark.parametrize("name", but(*BY_CLOSURE))
def test_a_closure_is_a_context(name: str, opens_context: bool) -> None:
    """Also one that opens the context itself, and several draws a step."""
    draws = 1 if name in WHOLE else 2
    model, optimizer = trained(name, stop=0)
    twin_model, twin = trained(name, stop=0)
    optimizer.mc_samples = draws
    for t in range(3):

        def closure(t: int = t) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, t)
            loss.backward()
            return loss

        def opening(closure: Any = closure) -> Tensor:
            with optimizer.sampled_params(train=True):
                return closure()

        loss = optimizer.step(opening if opens_context else closure)
        assert float(loss.detach()) > 0
        step(name, twin, lambda t=t: loss_of(twin_model, t), draws)
    assert same(state_of(model, optimizer), state_of(twin_model, twin))


@pytest.mark.parametrize("name", ["SGD", "Adam", "OGN", "VOGN", "IVON", "bSAM", "dropout, SGD"])
def test_microbatches_make_one_minibatch(name: str) -> None:
    """Each microbatch has a context, and its loss is divided by their number, as training loops
    do."""
    ends = []
    first = 5 if name == "bSAM" else 1  # bSAM has an adversary for each part
    for parts, number in ((first, 1), (5, 5)):
        model = network()
        options: dict[str, Any] = {"ess": 1e30}  # so large that draws are the mean
        if name == "dropout, SGD":
            options["params"] = [*model.parameters()]
        optimizer = make(name, model, **options)
        for _ in range(3):
            for rows in torch.arange(len(X)).chunk(parts):

                def loss(rows: Tensor = rows, model: Any = model, number: int = number) -> Tensor:
                    return nn.functional.cross_entropy(model(X[rows].double()), Y[rows]) / number

                draw(name, optimizer, loss, divided_by=number)
            total = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
        state = [optimizer.state[p].get("momentum", p) for p in model.parameters()]
        ends.append(flat([*model.parameters(), *state, *total]))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("unscale", "draws"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("name", but(*BY_CLOSURE))
def test_a_loss_scale_changes_nothing(name: str, unscale: bool, draws: int) -> None:
    """Powers of two change no bit of a product. Rows that cannot take one say so."""
    model, optimizer = trained(name, stop=0)
    twin_model, twin = trained(name, stop=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if name in UNSCALED:
        draw(name, optimizer, lambda: scaler.scale(loss_of(model, 0)))
        before = state_of(model, optimizer)
        with pytest.raises(OptimizerError, match="GradScaler"):
            scaler.step(optimizer)
        assert same(state_of(model, optimizer), before)
        return
    for t in range(3):
        for _ in range(draws):
            draw(name, optimizer, lambda t=t: scaler.scale(loss_of(model, t)))
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        step(name, twin, lambda t=t: loss_of(twin_model, t), draws)
    pairs = zip(state_of(model, optimizer), state_of(twin_model, twin), strict=True)
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("error", [KeyboardInterrupt, "restore"])
@pytest.mark.parametrize("name", MAKERS)
def test_the_mean_comes_back(name: str, error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, when the body of a context raises, or an interrupt comes while it ends."""
    model, optimizer = trained(name, torch.bfloat16 if name == "IVON" else torch.float32)
    before = state_of(model, optimizer)
    if error == "restore":
        original = Draw.restore
        calls = []

        def interrupted(*args: Any) -> None:
            calls.append(1)
            if len(calls) == 1:
                raise KeyboardInterrupt
            original(*args)

        monkeypatch.setattr(Draw, "restore", interrupted)
    kind = KeyboardInterrupt if error == "restore" else error
    with pytest.raises(kind), optimizer.sampled_params(train=True):
        loss_of(model, 0).backward()
        if error != "restore":
            raise error
    assert same(state_of(model, optimizer), before)
    assert not any(p.grad is not None for p in model.parameters())
    with pytest.raises(OptimizerError):
        optimizer.step()
    advance(name, model, optimizer, 2, 4)
    assert not same(state_of(model, optimizer), before)


@pytest.mark.parametrize("name", but(*WHOLE))
def test_copies_train_alike(name: str) -> None:
    model, optimizer = trained(name, stop=0)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # it patches step()
    advance(name, model, optimizer, 0, 2)
    ends = []
    for m, o in (copy.deepcopy((model, optimizer)), (model, optimizer)):
        advance(name, m, o, 2, 4)
        ends.append(state_of(m, o))
    assert same(*ends)
    assert not torch.equal(ends[0][0], network()[0].weight)


@pytest.mark.parametrize("name", but(*ALONE))
def test_groups_have_settings_of_their_own(name: str) -> None:
    model = network()
    first, *later = model.parameters()
    groups = [{"params": [first], "lr": 0.0}, {"params": later, "weight_decay": 0.5}]
    optimizer = make(name, model, params=groups)
    frozen = later[-1].requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    advance(name, model, optimizer, 0, 2)
    moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert moved == [False, True, True, False]
    assert frozen not in optimizer.state
    with pytest.raises(InputError, match="beta1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "beta1": 1.0})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize(("scaled", "draws"), [(False, 2), (True, 1)])
@pytest.mark.parametrize("name", but(*BY_CLOSURE))
def test_a_gradient_that_is_not_finite_moves_nothing(name: str, draws: int, scaled: bool) -> None:
    """It raises an error; with a scaler, the step is skipped."""
    model, optimizer = trained(name)
    before = state_of(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", 4.0, enabled=scaled)
    for number in range(1 if name in WHOLE else draws):
        factor = torch.nan if number == 0 else 1.0
        draw(name, optimizer, lambda factor=factor: scaler.scale(loss_of(model, 0)) * factor)
    if scaled and name not in UNSCALED:
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
    else:
        with pytest.raises(OptimizerError, match="GradScaler" if scaled else r"shape .*NaN or inf"):
            scaler.step(optimizer)
    assert same(state_of(model, optimizer), before)


@pytest.mark.parametrize("name", MAKERS)
def test_a_user_may_look_at_draws_in_between(name: str) -> None:
    """Evaluation between draw and step, also in inference mode, changes nothing."""
    model, optimizer = trained(name, stop=0)
    twin_model, twin = trained(name, stop=0)
    for t in range(2):

        def loss(t: int = t) -> Tensor:
            return loss_of(model, t)

        if name not in BY_CLOSURE:
            draw(name, optimizer, loss)
        if optimizer._hess_is_precision or optimizer._posterior_look is not None:
            generator = optimizer.generator
            optimizer.generator = torch.Generator()
            before = flat(model.parameters())
            with torch.inference_mode(), optimizer.sampled_params():
                assert not torch.equal(flat(model.parameters()), before)
            assert torch.equal(flat(model.parameters()), before)
            optimizer.generator = generator
        optimizer.step(loss if name in BY_CLOSURE else None)
        step(name, twin, lambda t=t: loss_of(twin_model, t))
    assert same(state_of(model, optimizer), state_of(twin_model, twin))
