"""IVON in training loops as people write them: accumulation, mixed precision, failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.optim import IVON

SCALE = 2.0**12


class Problem:
    """A small network, its data, and an optimizer whose noise is always the same."""

    def __init__(self, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
        ).to(dtype)
        self.x, self.y = torch.randn(24, 5, dtype=dtype), torch.randn(24, 3, dtype=dtype)
        options = {"lr": 0.1, "ess": 24, "beta2": 0.9, **options}
        self.optimizer = IVON(
            self.model.parameters(), generator=torch.Generator().manual_seed(1), **options
        )

    def loss(self, rows: slice = slice(None)) -> Tensor:
        return torch.nn.functional.mse_loss(self.model(self.x[rows]), self.y[rows])

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def everything(self) -> list[Tensor]:
        state = [self.optimizer.state[p] for p in self.model.parameters()]
        kept = [entry[name] for entry in state for name in ("hess", "momentum")]
        return self.weights() + [tensor.clone() for tensor in kept]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def draw_and_step(problem: Problem, draws: int = 1, steps: int = 3) -> None:
    """The reference: zero_grad inside the context."""
    for _ in range(steps):
        for _ in range(draws):
            with problem.optimizer.sampled_params(train=True):
                problem.optimizer.zero_grad()
                problem.loss().backward()
        problem.optimizer.step()


# Accumulation


def test_several_backward_passes_in_a_context_add_up() -> None:
    whole, parts = Problem(torch.float64), Problem(torch.float64)
    draw_and_step(whole)
    for _ in range(3):
        with parts.optimizer.sampled_params(train=True):
            parts.optimizer.zero_grad()
            for start in (0, 8, 16):
                (parts.loss(slice(start, start + 8)) / 3).backward()
        parts.optimizer.step()
    for one, other in zip(whole.everything(), parts.everything(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("hess_approx", ["price", "gradsq"])
@pytest.mark.parametrize("where", ["never", "before each", "once", "zeros before each", "manual"])
def test_several_contexts_average_wherever_gradients_are_cleared(
    where: str, hess_approx: str
) -> None:
    expected, problem = Problem(hess_approx=hess_approx), Problem(hess_approx=hess_approx)
    draw_and_step(expected, draws=3)
    optimizer = problem.optimizer
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(3):
            if where == "before each":
                problem.model.zero_grad()
            elif where == "zeros before each":
                optimizer.zero_grad(set_to_none=False)
            with optimizer.sampled_params(train=True):
                if where == "manual":
                    gradients = torch.autograd.grad(problem.loss(), [*problem.model.parameters()])
                    for param, gradient in zip(problem.model.parameters(), gradients, strict=True):
                        param.grad = gradient
                else:
                    problem.loss().backward()
        optimizer.step()
        if where == "never":  # the first context of a step starts from what is there, as in torch
            optimizer.zero_grad()
    assert equal(problem.everything(), expected.everything())


def test_p_grad_holds_the_mean_gradient_of_the_draws() -> None:
    problem = Problem()
    gradients = []
    for _ in range(3):
        with problem.optimizer.sampled_params(train=True):
            problem.optimizer.zero_grad()
            problem.loss().backward()
            gradients.append(problem.model[0].weight.grad.clone())
    mean = torch.stack(gradients).mean(0)
    torch.testing.assert_close(problem.model[0].weight.grad, mean, rtol=1e-6, atol=1e-7)
    assert not torch.equal(gradients[0], gradients[1])


def test_zeroing_the_first_draw_behind_our_back_is_an_error() -> None:
    problem = Problem()
    with problem.optimizer.sampled_params(train=True):
        problem.loss().backward()
    problem.model.zero_grad(set_to_none=False)
    with pytest.raises(OptimizerError, match="set_to_none"), problem.optimizer.sampled_params(True):
        pass


def test_evaluation_between_draw_and_step_changes_nothing() -> None:
    expected, problem = Problem(), Problem()
    draw_and_step(expected, steps=1)
    with problem.optimizer.sampled_params(train=True):
        problem.loss().backward()
    generator = problem.optimizer.generator
    problem.optimizer.generator = torch.Generator()
    with torch.inference_mode(), problem.optimizer.sampled_params():
        assert not equal(problem.weights(), expected.weights())
    problem.optimizer.generator = generator
    problem.optimizer.step()
    assert equal(problem.everything(), expected.everything())
    draw_and_step(expected, steps=1)
    draw_and_step(problem, steps=1)
    assert equal(problem.everything(), expected.everything())


def test_buffers_made_in_inference_mode_serve_in_training() -> None:
    expected, problem = Problem(), Problem()
    with torch.inference_mode(), problem.optimizer.sampled_params():
        problem.loss()
    problem.optimizer.generator = torch.Generator().manual_seed(1)
    draw_and_step(problem)
    draw_and_step(expected)
    assert equal(problem.everything(), expected.everything())


# Closures


@pytest.mark.parametrize("own_context", [True, False])
@pytest.mark.parametrize("mc_samples", [1, 2])
def test_closure(own_context: bool, mc_samples: int) -> None:
    expected, problem = Problem(), Problem(mc_samples=mc_samples)
    draw_and_step(expected, draws=mc_samples)
    losses: list[float] = []

    def plain() -> Tensor:
        problem.optimizer.zero_grad()
        loss = problem.loss()
        loss.backward()
        losses.append(loss.item())
        return loss

    def sampled() -> Tensor:
        with problem.optimizer.sampled_params(train=True):
            return plain()

    for _ in range(3):
        mean = problem.optimizer.step(sampled if own_context else plain)
        assert mean.item() == pytest.approx(sum(losses[-mc_samples:]) / mc_samples, rel=1e-6)
    assert len(losses) == 3 * mc_samples
    assert equal(problem.everything(), expected.everything())


def test_a_closure_that_raises_leaves_no_trace() -> None:
    expected, problem = Problem(), Problem(mc_samples=2)
    before = problem.weights()
    calls = []

    def fail_at_second_call() -> Tensor:
        calls.append(None)
        loss = problem.loss()
        loss.backward()
        if len(calls) == 2:
            raise RuntimeError("out of data")
        return loss

    with pytest.raises(RuntimeError, match="out of data"):
        problem.optimizer.step(fail_at_second_call)
    assert equal(problem.weights(), before)
    assert not problem.optimizer.state
    problem.optimizer.zero_grad()
    problem.optimizer.generator = torch.Generator().manual_seed(1)
    draw_and_step(problem)
    draw_and_step(expected)
    assert equal(problem.everything(), expected.everything())


# Mixed precision


def run_scaled(
    problem: Problem, draws: int, unscale: bool, change: Callable[[], object] = lambda: None
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    for _ in range(4):
        for _ in range(draws):
            with problem.optimizer.sampled_params(train=True):
                problem.optimizer.zero_grad()
                scaler.scale(problem.loss()).backward()
        if unscale:
            scaler.unscale_(problem.optimizer)
            change()
        scaler.step(problem.optimizer)
        scaler.update()
    assert scaler.get_scale() == 4 * SCALE


@pytest.mark.parametrize("hess_approx", ["price", "gradsq"])
@pytest.mark.parametrize("draws", [1, 2, 3])
@pytest.mark.parametrize("unscale", [True, False])
def test_grad_scaler(draws: int, unscale: bool, hess_approx: str) -> None:
    """Scales are powers of two, so nothing but the last bits may differ."""
    plain, scaled = Problem(hess_approx=hess_approx), Problem(hess_approx=hess_approx)
    draw_and_step(plain, draws=draws, steps=4)
    run_scaled(scaled, draws, unscale)
    for one, other in zip(plain.everything(), scaled.everything(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert not hasattr(scaled.optimizer, "grad_scale")


@pytest.mark.parametrize("way", ["in place", "foreach", "data"])
@pytest.mark.parametrize("draws", [1, 2])
def test_clipping_acts_on_gradient_and_curvature(draws: int, way: str) -> None:
    """Gradients divided by ten, after the draws, are the gradients of a tenth of the loss."""
    tenth, clipped = Problem(torch.float64), Problem(torch.float64)
    tenth_loss = tenth.loss
    tenth.loss = lambda *rows: tenth_loss(*rows) / 10  # type: ignore[method-assign]
    draw_and_step(tenth, draws, steps=4)

    def divide() -> None:
        gradients = [p.grad for p in clipped.model.parameters() if p.grad is not None]
        if way == "foreach":
            torch._foreach_div_(gradients, 10)  # pyright: ignore[reportPrivateImportUsage]
        for gradient in gradients:
            if way == "in place":
                gradient.div_(10)
            elif way == "data":
                gradient.data.div_(10)

    run_scaled(clipped, draws, True, divide)
    for one, other in zip(tenth.everything(), clipped.everything(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("draws", [1, 2])
def test_a_step_that_the_scaler_skips_changes_nothing(unscale: bool, draws: int) -> None:
    problem = Problem()
    draw_and_step(problem)
    before = problem.everything()
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for number in range(draws):
        with problem.optimizer.sampled_params(train=True):
            problem.optimizer.zero_grad()
            scaler.scale(problem.loss()).backward()
            if number == 0:
                problem.model[0].bias.grad[1] = torch.inf
    if unscale:
        scaler.unscale_(problem.optimizer)
    scaler.step(problem.optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2
    assert equal(problem.everything(), before)
    assert problem.optimizer.state[problem.model[0].bias]["step"] == 3
    with pytest.raises(OptimizerError, match="without a draw"):
        problem.optimizer.step()


def test_unscaling_inside_a_single_context() -> None:
    plain, scaled = Problem(), Problem()
    draw_and_step(plain, steps=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    with scaled.optimizer.sampled_params(train=True):
        scaler.scale(scaled.loss()).backward()
        scaler.unscale_(scaled.optimizer)
    scaler.step(scaled.optimizer)
    for one, other in zip(plain.everything(), scaled.everything(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("draws", [1, 2])
def test_half_precision_weights(dtype: torch.dtype, draws: int) -> None:
    """State in float32; each step is the float32 step from the same point, rounded once."""
    half = Problem(dtype)
    draw_and_step(half, draws, steps=1)
    for param in half.model.parameters():
        assert param.dtype == dtype
        assert half.optimizer.state[param]["hess"].dtype == torch.float32
        assert half.optimizer.state[param]["momentum"].dtype == torch.float32
        assert (half.optimizer.state[param]["hess"] != 1).any()  # lost at once in half precision
    before = half.weights()
    params = list(half.model.parameters())
    hess = {p: half.optimizer.state[p]["hess"].clone() for p in params}
    momentum = {p: half.optimizer.state[p]["momentum"].clone() for p in params}
    half.optimizer.generator = torch.Generator().manual_seed(3)
    gradients = []
    for _ in range(draws):
        with half.optimizer.sampled_params(train=True):
            half.optimizer.zero_grad()
            half.loss().backward()
            gradients.append([p.grad.float() for p in params if p.grad is not None])
    half.optimizer.step()
    normals = torch.Generator().manual_seed(3)
    noise = [torch.empty(sum(p.numel() for p in params)) for _ in range(draws)]
    for flat in noise:
        flat.normal_(generator=normals)
    for index, (param, mean) in enumerate(zip(params, before, strict=True)):
        g = torch.stack([sample[index] for sample in gradients]).mean(0)
        s = hess[param] + 1e-4
        pieces = [flat.split([p.numel() for p in params])[index].view(s.shape) for flat in noise]
        eps = [piece / (24 * s).sqrt() for piece in pieces]
        products = [e * sample[index] for e, sample in zip(eps, gradients, strict=True)]
        h_hat = 24 * s * torch.stack(products).mean(0)
        h = 0.9 * hess[param] + 0.1 * h_hat + 0.005 * (hess[param] - h_hat) ** 2 / s
        u = 0.9 * momentum[param] + 0.1 * g
        step = 0.1 * 1.0001 * (u / (1 - 0.9**2) + 1e-4 * mean.float()) / (h + 1e-4)
        state = half.optimizer.state[param]
        torch.testing.assert_close(state["hess"], h, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state["momentum"], u, rtol=1e-5, atol=1e-6)
        ulp = torch.finfo(dtype).eps
        error = (param.detach().float() - (mean.float() - step)).abs()
        assert (error <= 0.51 * ulp * 2 * param.detach().float().abs() + 1e-6).all()


def test_mixed_dtypes_are_trained_side_by_side() -> None:
    """Each parameter as if its dtype were the only one: same gradients, same noise."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32]

    def train(kinds: list[torch.dtype]) -> list[Tensor]:
        params = [torch.nn.Parameter(torch.full((4,), 0.5, dtype=kind)) for kind in kinds]
        optimizer = IVON(params, lr=0.1, ess=1e12, hess_approx="gradsq")  # no noise to speak of
        for step in range(4):
            with optimizer.sampled_params(train=True):
                for param in params:
                    param.grad = torch.full_like(param, 1e-6 * (step + 1))
            optimizer.step()
        return [param.detach() for param in params]

    mixed = train(dtypes)
    for param, kind in zip(mixed, dtypes, strict=True):
        assert param.dtype == kind
        torch.testing.assert_close(param, train([kind])[0], rtol=1e-5, atol=1e-5)


def test_the_noise_of_each_parameter_has_its_precision() -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    params = [torch.nn.Parameter(torch.zeros(64, dtype=dtype)) for dtype in dtypes]
    with IVON(params, lr=0.1, ess=10).sampled_params():
        single, double, half = (param.detach().clone() for param in params)
    assert single.unique().numel() == 64
    assert not torch.equal(double, double.float().double())
    assert half.abs().max() > 0


# Failures


def fail_in_context(problem: Problem, train: bool, error: type[BaseException]) -> None:
    with problem.optimizer.sampled_params(train):
        problem.loss().backward()
        raise error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_weights_come_back_bit_for_bit(
    dtype: torch.dtype, train: bool, error: type[BaseException]
) -> None:
    problem = Problem(dtype)
    draw_and_step(problem)
    with torch.no_grad():
        problem.model[0].bias[0] = -0.0
        problem.model[0].bias[1] = 1e-38
    before = problem.weights()
    with problem.optimizer.sampled_params():
        assert not any(map(torch.equal, problem.weights(), before))
    assert equal(problem.weights(), before)
    with pytest.raises(error):
        fail_in_context(problem, train, error)
    assert equal(problem.weights(), before)
    assert torch.signbit(problem.model[0].bias[0])
    if train:
        with pytest.raises(OptimizerError, match="without a draw"):
            problem.optimizer.step()


@pytest.mark.parametrize("position", [0, 1, 2])
def test_only_the_failed_draw_is_dropped(position: int) -> None:
    expected, problem = Problem(), Problem()
    draw_and_step(expected, draws=2, steps=1)
    optimizer = problem.optimizer
    for number in range(3):
        if number == position:
            state = optimizer.generator.get_state()
            with pytest.raises(RuntimeError):
                fail_in_context(problem, True, RuntimeError)
            optimizer.generator.set_state(state)
        else:
            with optimizer.sampled_params(train=True):
                problem.loss().backward()
    optimizer.step()
    assert equal(problem.everything(), expected.everything())


def test_parameters_that_share_memory_come_back() -> None:
    one = torch.nn.Parameter(torch.arange(4.0))
    other = torch.nn.Parameter(one.detach())
    optimizer = IVON([one, other], lr=0.1, ess=1.0)
    with optimizer.sampled_params():
        assert not torch.equal(one, torch.arange(4.0))
    assert torch.equal(one, torch.arange(4.0))


def test_misuse_is_named() -> None:
    problem = Problem()
    optimizer = problem.optimizer
    before = problem.weights()
    with pytest.raises(OptimizerError, match="without a draw"):
        optimizer.step()
    with (
        pytest.raises(OptimizerError, match="sampled_params\\(\\) inside"),
        optimizer.sampled_params(),
        optimizer.sampled_params(),
    ):
        pass
    for method in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with (
            pytest.raises(OptimizerError, match="inside sampled_params"),
            optimizer.sampled_params(),
        ):
            method()
    with (
        pytest.raises(OptimizerError, match="no parameter has a gradient"),
        optimizer.sampled_params(train=True),
    ):
        problem.loss()
    assert equal(problem.weights(), before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("draws", [1, 2])
def test_non_finite_gradient(bad: float, draws: int) -> None:
    problem = Problem()
    draw_and_step(problem)
    before = problem.everything()
    for _ in range(draws):
        with problem.optimizer.sampled_params(train=True):
            problem.optimizer.zero_grad()
            problem.loss().backward()
            problem.model[2].bias.grad[1] = bad
    with pytest.raises(OptimizerError, match=r"parameter 3 of group 0 .*NaN or inf"):
        problem.optimizer.step()
    assert equal(problem.everything(), before)
    problem.optimizer.zero_grad()
    draw_and_step(problem)
    assert all(tensor.isfinite().all() for tensor in problem.everything())


@pytest.mark.parametrize("value", [1e20, 3e38])
def test_gradients_whose_squares_overflow_are_refused(value: float) -> None:
    """They would make the precision infinite, and the weights NaN one step later."""
    theta = torch.nn.Parameter(torch.zeros(64))
    optimizer = IVON([theta], lr=0.1, ess=60_000)
    with optimizer.sampled_params(train=True):
        theta.grad = torch.full((64,), value)
    with pytest.raises(OptimizerError, match="overflow"):
        optimizer.step()
    assert not theta.any() and theta not in optimizer.state


def test_large_gradients_are_no_error() -> None:
    theta = torch.nn.Parameter(torch.zeros(64))
    optimizer = IVON([theta], lr=0.1, ess=60_000)
    for _ in range(3):
        with optimizer.sampled_params(train=True):
            theta.grad = torch.full((64,), 1e10)
        optimizer.step()
    assert theta.isfinite().all() and optimizer.state[theta]["hess"].isfinite().all()


# Left alone


def test_frozen_and_unused_parameters_are_left_alone() -> None:
    torch.manual_seed(0)
    used, frozen, unused = (torch.nn.Linear(3, 3) for _ in range(3))
    frozen.requires_grad_(False)
    modules = torch.nn.ModuleList([used, frozen, unused])
    optimizer = IVON(modules.parameters(), lr=0.1, ess=10, weight_decay=0.1)
    before = {name: p.detach().clone() for name, p in modules.named_parameters()}
    for draws in (1, 2):
        for _ in range(draws):
            with optimizer.sampled_params(train=True):
                assert torch.equal(frozen.weight, before["1.weight"])
                frozen(used(torch.ones(2, 3))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {p for p in optimizer.state} == {used.weight, used.bias}
    for name, p in modules.named_parameters():
        assert torch.equal(p, before[name]) == (not name.startswith("0."))
    frozen.requires_grad_(True)  # thawed: it joins, with a step count of its own
    with optimizer.sampled_params(train=True):
        frozen(used(torch.ones(2, 3))).square().sum().backward()
    optimizer.step()
    assert optimizer.state[frozen.weight]["step"] == 1
    assert optimizer.state[used.weight]["step"] == 3


def test_a_gradient_in_some_draws_only_counts_as_zero_in_the_others() -> None:
    for first in (True, False):
        theta = torch.nn.Parameter(torch.zeros(3))
        other = torch.nn.Parameter(torch.zeros(3))
        optimizer = IVON([theta, other], lr=0.1, ess=10)
        for has_gradient in (first, not first):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                other.grad = torch.ones(3)
                if has_gradient:
                    theta.grad = torch.full((3,), 4.0)
        assert theta.grad is not None
        assert torch.equal(theta.grad, torch.full((3,), 2.0))
        optimizer.step()
        torch.testing.assert_close(optimizer.state[theta]["momentum"], torch.full((3,), 0.2))


def test_memory_formats_and_large_parameters() -> None:
    """Cutting into blocks, or not being able to, makes no difference."""
    torch.manual_seed(0)
    start = torch.randn(3, 5, 7, 6)
    gradient = torch.randn(3, 5, 7, 6)
    generator = torch.Generator()
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        theta = torch.nn.Parameter(start.clone(memory_format=layout))
        optimizer = IVON([theta], lr=0.1, ess=10, generator=generator.manual_seed(0))
        for _ in range(3):
            with optimizer.sampled_params(train=True):
                theta.grad = gradient.clone(memory_format=layout)
            optimizer.step()
        results.append(theta.detach().contiguous())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)
    assert not torch.equal(results[0], start)
