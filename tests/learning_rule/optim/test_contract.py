"""What every optimizer of the rule keeps, whatever row of Table 1 trains."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from learning_rule.optim.makers import (
    ALONE,
    BINARY,
    MAKERS,
    WHOLE,
    X,
    Y,
    advance,
    draw,
    flat,
    held,
    loss_of,
    make,
    network,
    same,
)
from learning_rule.optim.papers import START, STEPS, Run
from oracles import rows, unflatten
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.learning_rule.optim.row_optimizer import Draw

UNSCALED = ("bSAM", *ALONE)  # whose gradients must have their own size


def but(*names: str) -> list[str]:
    return [name for name in MAKERS if name not in names]


def learned(model: nn.Module, optimizer: Any) -> Tensor:
    """The precision or Hessian, dense where it is not diagonal."""
    states = [optimizer.state[p] for p in model.parameters()]
    if hasattr(optimizer, "form"):
        like = {n: torch.empty(shape) for n, shape in optimizer.form.shapes.items()}
        eye = torch.eye(len(START)).double()
        return rows(optimizer.form.times(unflatten(eye, like)))
    return states[0]["precision"] if len(states[-1]) == 0 else flat(s["hess"] for s in states)


@pytest.mark.parametrize("name", STEPS)
def test_takes_the_steps_of_its_paper(name: str) -> None:
    """Weights, and the precision or Hessian that it learns; see papers.py."""
    make, paper, draws = STEPS[name]
    model, run = network(), Run()
    optimizer, wanted = make(model, torch.Generator().manual_seed(3)), paper(run)
    for t in range(1, 13):
        for _ in range(draws):

            def loss(t: int = t) -> Tensor:
                run.seen.append(flat(model.parameters()))
                return loss_of(model, t)

            if name == "Newton":
                optimizer.step(lambda t=t: loss_of(model, t))
            else:
                draw(name, optimizer, loss)
        if name != "Newton":
            optimizer.step()
        weights, wanted_h = next(wanted)
        torch.testing.assert_close(flat(model.parameters()), weights, rtol=1e-10, atol=1e-12)
        if wanted_h is not None:
            torch.testing.assert_close(learned(model, optimizer), wanted_h, rtol=1e-9, atol=1e-11)
    assert (weights - START).norm() > 0.03  # it went somewhere


@pytest.mark.parametrize("name", [*MAKERS, "IVON, bfloat16", "NoisyKFAC, bfloat16"])
def test_resumes_to_the_bit(name: str) -> None:
    name, _, half = name.partition(", bf")
    dtype = torch.bfloat16 if half else torch.float32
    model, other = network(dtype), network(dtype)
    optimizer, resumed = make(name, model), make(name, other, seed=0)
    advance(name, model, optimizer, 0, 4)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    middle = model[0].weight.detach().clone()
    advance(name, model, optimizer, 4, 10)  # nothing of this may reach what was saved
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    if name not in WHOLE:
        advance(name, other, resumed, 0, 2)  # what was there is replaced
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    advance(name, other, resumed, 4, 10)
    assert not torch.equal(model[0].weight, middle)
    ends = [(m.state_dict(), o.state_dict()) for m, o in ((model, optimizer), (other, resumed))]
    (found, kinds), (wanted, same_kinds) = map(tree_flatten, ends)
    assert kinds == same_kinds
    for one, two in zip(found, wanted, strict=True):
        assert torch.equal(one, two) if isinstance(one, Tensor) else one == two
    foreign = make("STE" if name != "STE" else "BayesBiNN", network())
    with pytest.raises(OptimizerError, match="load a state_dict"):
        resumed.load_state_dict(foreign.state_dict())


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", but("Newton"))
def test_a_closure_is_a_context(name: str, own: bool) -> None:
    """Also one that opens the context itself, and several draws a step."""
    draws = 1 if name in WHOLE else 2
    ends = []
    for closed in (False, True):
        model = network()
        optimizer = make(name, model)
        optimizer.mc_samples = draws
        for t in range(3):

            def closure(t: int = t, model: Any = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, t)
                loss.backward()
                return loss

            def opening(optimizer: Any = optimizer, closure: Any = closure) -> Tensor:
                with optimizer.sampled_params(train=True):
                    return closure()

            if closed:
                assert float(optimizer.step(opening if own else closure).detach()) > 0
                continue
            for _ in range(draws):
                draw(name, optimizer, lambda t=t, model=model: loss_of(model, t))
            optimizer.step()
        ends.append(held(model, optimizer))
    assert same(*ends)


@pytest.mark.parametrize("name", ["SGD", "Adam", "OGN", "VOGN", "IVON", "bSAM", "dropout, SGD"])
def test_microbatches_make_one_minibatch(name: str) -> None:
    """As training loops accumulate: a context each, and the loss divided by their number."""
    ends = []
    first = (5, 1) if name == "bSAM" else (1, 1)  # its adversaries are those of the parts
    for parts, number in (first, (5, 5)):
        model = network()
        options = {"params": [*model.parameters()]} if name == "dropout, SGD" else {}
        optimizer = make(name, model, ess=1e30, **options)  # draws at the mean, so to speak
        for _ in range(3):
            for part in torch.arange(len(X)).chunk(parts):

                def loss(part: Tensor = part, model: Any = model, number: int = number) -> Tensor:
                    return nn.functional.cross_entropy(model(X[part].double()), Y[part]) / number

                draw(name, optimizer, loss, divided_by=number)
            total = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
        state = [optimizer.state[p].get("momentum", p) for p in model.parameters()]
        ends.append(flat([*model.parameters(), *state, *total]))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_a_loss_scale_changes_nothing(name: str, unscale: bool, draws: int) -> None:
    """Powers of two change no bit of a product. Rows that cannot take one say so."""
    ends = []
    for scaled in (False, True):
        model = network()
        optimizer = make(name, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        if name in UNSCALED:
            if scaled and name != "Newton":
                draw(name, optimizer, lambda m=model, s=scaler: s.scale(loss_of(m, 0)))
                before = held(model, optimizer)
                with pytest.raises(OptimizerError, match="GradScaler"):
                    scaler.step(optimizer)
                assert same(held(model, optimizer), before)
            continue
        for t in range(3):
            for _ in range(draws):
                draw(name, optimizer, lambda m=model, s=scaler, t=t: s.scale(loss_of(m, t)))
            if unscale and scaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        ends.append(held(model, optimizer))
    for one, other in zip(*ends, strict=True) if ends else ():
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", but(*UNSCALED))
def test_a_step_that_the_scaler_skips_changes_nothing(name: str) -> None:
    model = network(torch.float32)
    optimizer = make(name, model)
    advance(name, model, optimizer, 0, 2)
    before = held(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    draw(name, optimizer, lambda: scaler.scale(loss_of(model, 0) * 3e38))
    model[0].bias.grad[1] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert same(held(model, optimizer), before) and scaler.get_scale() == 2.0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, "restore"])
@pytest.mark.parametrize("name", MAKERS)
def test_the_mean_comes_back(name: str, error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, when the body of a context raises, or an interrupt comes while it ends."""
    model = network(torch.bfloat16 if name == "IVON" else torch.float32)
    optimizer = make(name, model)
    advance(name, model, optimizer, 0, 2)
    before = held(model, optimizer)
    if error == "restore":
        original, calls = Draw.restore, []

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
    assert same(held(model, optimizer), before)
    assert not any(p.grad is not None for p in model.parameters())
    with pytest.raises(OptimizerError):
        optimizer.step()
    advance(name, model, optimizer, 2, 4)
    assert not same(held(model, optimizer), before)


@pytest.mark.parametrize("name", but(*WHOLE))
def test_copies_train_alike(name: str) -> None:
    model = network()
    optimizer = make(name, model)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # which patches step()
    advance(name, model, optimizer, 0, 2)
    ends = []
    for m, o in (copy.deepcopy((model, optimizer)), (model, optimizer)):
        advance(name, m, o, 2, 4)
        ends.append(held(m, o))
    assert same(*ends) and not torch.equal(ends[0][0], network()[0].weight)
    if name != "Newton":
        draw(name, optimizer, lambda: loss_of(model, 0))
        with pytest.raises(OptimizerError, match="copy"):
            copy.deepcopy(optimizer)


@pytest.mark.parametrize("name", but(*ALONE))
def test_groups_have_settings_of_their_own(name: str) -> None:
    model = network()
    first, *rest = model.parameters()
    groups = [{"params": [first], "lr": 0.0}, {"params": rest, "weight_decay": 0.5}]
    optimizer = make(name, model, params=groups)
    frozen = rest[-1].requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    advance(name, model, optimizer, 0, 2)
    moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert moved == [False, True, True, False] and frozen not in optimizer.state
    for wrong in ({"ess": -1.0}, {"lr": "fast"}, {"beta1": 1.0}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], **wrong})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("name", but("Newton"))
def test_a_gradient_that_is_not_finite_moves_nothing(name: str, draws: int) -> None:
    model = network()
    optimizer = make(name, model)
    advance(name, model, optimizer, 0, 2)
    before = held(model, optimizer)
    for number in range(1 if name in WHOLE else draws):
        bad = torch.nan if number == 0 else 1.0
        draw(name, optimizer, lambda bad=bad: loss_of(model, 0) * bad)
    with pytest.raises(OptimizerError, match=r"shape .*NaN or inf"):
        optimizer.step()
    assert same(held(model, optimizer), before)


@pytest.mark.parametrize("name", but(*BINARY, "Newton"))
def test_half_precision_weights_keep_a_wide_state(name: str) -> None:
    model = network(torch.bfloat16)
    optimizer = make(name, model)
    before = flat(model.parameters())
    advance(name, model, optimizer, 0, 4)
    assert not torch.equal(flat(model.parameters()), before)
    for param in model.parameters():
        assert param.dtype == torch.bfloat16
        wide = [v for v in optimizer.state[param].values() if isinstance(v, Tensor)]
        assert all(v.dtype == torch.float32 and v.shape == param.shape for v in wide)


@pytest.mark.parametrize("name", MAKERS)
def test_a_user_may_look_at_draws_in_between(name: str) -> None:
    """Evaluation between draw and step, also in inference mode, changes nothing."""
    ends = []
    for looked in (False, True):
        model = network()
        optimizer = make(name, model)
        for t in range(0, 4, 2):
            if name != "Newton":
                draw(name, optimizer, lambda m=model, t=t: loss_of(m, t))
            if looked and (optimizer._own_scale or optimizer._sample is not None):
                generator, optimizer.generator = optimizer.generator, torch.Generator()
                before = flat(model.parameters())
                with torch.inference_mode(), optimizer.sampled_params():
                    assert not torch.equal(flat(model.parameters()), before)
                assert torch.equal(flat(model.parameters()), before)
                optimizer.generator = generator
            if name == "Newton":
                advance(name, model, optimizer, t, t + 1)
            else:
                optimizer.step()
        ends.append(held(model, optimizer))
    assert same(*ends)
