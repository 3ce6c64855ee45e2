"""A step of IVON after several draws, several backward passes, and changes of ``p.grad``."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from optimizer_makers import draw, flat, loss_of, same, state_of, step, trained
from torch import Tensor, nn

from blr_analysis.learning_rule.optim import IVON

IVONS = ("IVON itself", "IVON, gradsq")


run = partial(trained, stop=0)


def usual(name: str, draws: int, steps: int = 3, by: float = 1.0) -> list[Tensor]:
    """The reference: the state after steps with zero_grad inside the context."""
    model, optimizer = run(name)
    for _ in range(steps):
        for k in range(draws):
            draw(name, optimizer, lambda k=k: loss_of(model, k) * by)
        optimizer.step()
    return state_of(model, optimizer)


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-13)


def test_several_backward_passes_in_a_context_add_up() -> None:
    model, optimizer = run("IVON itself")
    twin_model, twin = run("IVON itself")
    with optimizer.sampled_params(train=True):
        for k in range(5):  # the five minibatches
            (loss_of(model, k) / 5).backward()
    optimizer.step()
    step("IVON", twin, lambda: sum(loss_of(twin_model, k) for k in range(5)) / 5)
    assert_close(state_of(model, optimizer), state_of(twin_model, twin))


@pytest.mark.parametrize("name", IVONS)
@pytest.mark.parametrize("cleared", ["never", "before each", "manual"])
def test_several_contexts_average_wherever_gradients_are_cleared(cleared: str, name: str) -> None:
    model, optimizer = run(name)
    for _ in range(3):
        optimizer.zero_grad()
        for k in range(3):
            if cleared == "before each":
                model.zero_grad()
            with optimizer.sampled_params(train=True):
                if cleared == "manual":
                    gradients = torch.autograd.grad(loss_of(model, k), [*model.parameters()])
                    for param, gradient in zip(model.parameters(), gradients, strict=True):
                        param.grad = gradient
                else:
                    loss_of(model, k).backward()
        optimizer.step()
    assert same(state_of(model, optimizer), usual(name, 3))


@pytest.mark.parametrize("way", ["in place", "foreach", "data", "replaced", "unscaled", "inside"])
@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("name", IVONS)
def test_clipping_acts_on_gradient_and_curvature(name: str, draws: int, way: str) -> None:
    """Gradients divided by ten, after the draws, are the gradients of a tenth of the loss."""
    model, optimizer = run(name)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, enabled=way == "unscaled")

    def divide() -> None:
        for p in model.parameters():
            if way == "foreach":
                torch._foreach_div_([p.grad], 10)  # pyright: ignore[reportPrivateImportUsage]
            elif way == "data":
                p.grad.data.div_(10)
            elif way == "replaced":
                p.grad = p.grad / 10
            else:
                p.grad.div_(10)

    for _ in range(4):
        for k in range(draws):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, k)).backward()
                if way == "inside":
                    divide()
        scaler.unscale_(optimizer)
        if way != "inside":
            divide()
        scaler.step(optimizer)
        scaler.update()
    assert_close(state_of(model, optimizer), usual(name, draws, 4, by=0.1))


@pytest.mark.parametrize("position", [0, 1, 2])
def test_only_the_failed_or_dropped_draw_is_missing(position: int) -> None:
    model, optimizer = run("IVON itself")
    for number in range(3):
        state = optimizer.generator.get_state()
        if number == position:
            with pytest.raises(KeyError), optimizer.sampled_params(train=True):
                loss_of(model, 0).backward()
                raise KeyError
            optimizer.generator.set_state(state)
        else:
            draw("IVON", optimizer, lambda k=number - (number > position): loss_of(model, k))
    optimizer.step()
    assert same(state_of(model, optimizer), usual("IVON itself", 2, 1))
    for name in ("IVON itself", "bSAM", "dropout, SGD"):
        model, optimizer = run(name)
        twin_model, twin = run(name)
        with optimizer.sampled_params(train=True):
            (1e6 * loss_of(model, 0)).backward()
        optimizer.drop_draws()
        for m, o in ((model, optimizer), (twin_model, twin)):
            o.generator.manual_seed(0)
            draw(name, o, lambda m=m: loss_of(m, 1))
            o.step()
        assert same(state_of(model, optimizer), state_of(twin_model, twin))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("draws", [1, 2])
def test_half_precision_weights(dtype: torch.dtype, draws: int) -> None:
    """Each step is the float32 step from the same point, rounded once."""
    start = torch.linspace(-2, 2, 40).to(dtype)
    slope = torch.linspace(0.5, 3, 40)
    theta = nn.Parameter(start.clone())
    optimizer = IVON([theta], 0.1, 24, beta2=0.9, generator=torch.Generator().manual_seed(3))
    normals = torch.Generator().manual_seed(3)
    eps = []
    grads = []
    for _ in range(draws):
        noise = torch.empty(40).normal_(0.0, 24**-0.5, generator=normals) * 1.0001**-0.5
        with optimizer.sampled_params(train=True):
            assert torch.equal(theta.detach(), (start.float() + noise).to(dtype))
            theta.grad = (slope * theta.detach().float()).to(dtype)
            grads.append(theta.grad.float())
        eps.append(noise)
    optimizer.step()
    g = torch.stack(grads).mean(0)
    products = [e * x for e, x in zip(eps, grads, strict=True)]
    h_hat = 24 * 1.0001 * torch.stack(products).mean(0)
    h = 0.9 + 0.1 * h_hat + 0.005 * (1 - h_hat) ** 2 / 1.0001
    moved = start.float() - 0.1 * 1.0001 * (g + 1e-4 * start.float()) / (h + 1e-4)
    torch.testing.assert_close(optimizer.state[theta]["hess"], h, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(optimizer.state[theta]["momentum"], 0.1 * g, rtol=1e-5, atol=1e-6)
    ulp = torch.finfo(dtype).eps
    assert ((theta.detach().float() - moved).abs() <= 0.51 * ulp * 2 * moved.abs() + 1e-6).all()


def test_mixed_dtypes_are_trained_side_by_side() -> None:
    """Each parameter as if its dtype were the only one: same gradients, same noise."""

    def train(*kinds: torch.dtype) -> list[nn.Parameter]:
        params = [nn.Parameter(torch.full((4,), 0.5, dtype=kind)) for kind in kinds]
        optimizer = IVON(params, lr=0.1, ess=1e12, hess_approx="gradsq")  # no noise to speak of
        for t in range(4):
            with optimizer.sampled_params(train=True):
                for param in params:
                    param.grad = torch.full_like(param, 1e-6 * (t + 1))
            optimizer.step()
        return params

    for param in train(torch.float32, torch.float64, torch.bfloat16, torch.float32):
        torch.testing.assert_close(param, *train(param.dtype), rtol=1e-5, atol=1e-5)


def test_thawed_and_unused_parameters() -> None:
    """A parameter joins with its first gradient and counts its own steps."""
    used, frozen, unused = (nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = IVON([used, frozen.requires_grad_(False), unused], lr=0.1, ess=10)
    _ = optimizer.state[unused]  # looking at it makes torch create an empty entry
    for t in range(3):
        frozen.requires_grad_(t == 2)
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            (used * frozen).square().sum().backward()
        optimizer.step()
        assert torch.equal(frozen.detach(), torch.ones(3)) == (t < 2)
    assert [optimizer.state[p].get("step") for p in (used, frozen, unused)] == [3, 1, None]
    assert torch.equal(unused.detach(), torch.ones(3))


def test_a_gradient_in_some_draws_only_counts_as_zero_in_the_others() -> None:
    for first in (True, False):
        theta = nn.Parameter(torch.zeros(3))
        always = nn.Parameter(torch.zeros(3))
        optimizer = IVON([theta, always], lr=0.1, ess=10)
        for has_gradient in (first, not first):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                always.grad = torch.ones(3)
                theta.grad = torch.full((3,), 4.0) if has_gradient else None
        assert torch.equal(theta.grad, torch.full((3,), 2.0))
        optimizer.step()
        torch.testing.assert_close(optimizer.state[theta]["momentum"], torch.full((3,), 0.2))


def test_memory_formats_make_no_difference() -> None:
    generator = torch.Generator().manual_seed(0)
    start, gradient = torch.randn(2, 3, 5, 7, 6, generator=generator)
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        theta = nn.Parameter(start.clone(memory_format=layout))
        optimizer = IVON([theta], 0.1, 10, generator=torch.Generator().manual_seed(0))
        for _ in range(3):
            with optimizer.sampled_params(train=True):
                theta.grad = gradient.clone(memory_format=layout)
            optimizer.step()
        ends.append(flat([theta.contiguous()]))
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-7)
    assert not torch.equal(ends[0], start.flatten())
