"""What optimizers learned, against hand-made second moments and against IVON's own noise."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ivon
import pytest
import torch
from torch import Tensor, nn

from blr_analysis.errors import (
    InitialPrecisionWarning,
    InputError,
    ModelError,
    OptimizerError,
    PosteriorError,
)
from blr_analysis.learning_rule.optim import IVON, OGN
from blr_analysis.posterior.capture import from_optimizer
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.task import Task

N, DELTA = 200, 3.0
Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """Two layers and a norm; in float64 unless said otherwise."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, dtype=dtype)
        self.norm = nn.LayerNorm(4, dtype=dtype)
        self.last = nn.Linear(4, 2, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(torch.tanh(self.first(x))))


def fixed_gradients(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64)
        for name, p in model.named_parameters()
    }


def step(optimizer: torch.optim.Optimizer, model: nn.Module, gradients: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        p.grad = gradients[name].to(p.dtype) if name in gradients and p.requires_grad else None
    optimizer.step()


def trained(make: Make, model: nn.Module, steps: int = 7) -> torch.optim.Optimizer:
    optimizer = make(model.parameters())
    for _ in range(steps):
        step(optimizer, model, fixed_gradients(model))
    return optimizer


SECOND_MOMENTS: dict[str, tuple[Make, str]] = {
    "Adam": (lambda p: torch.optim.Adam(p), "adam_v"),
    "Adam, foreach": (lambda p: torch.optim.Adam(p, foreach=True), "adam_v"),
    "Adam, fused": (lambda p: torch.optim.Adam(p, fused=True), "adam_v"),
    "Adam, tensor lr": (
        lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3), foreach=False),
        "adam_v",
    ),
    "Adam, amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), "adam_v"),
    "AdamW": (lambda p: torch.optim.AdamW(p, betas=(0.5, 0.99)), "adam_v"),
    "NAdam": (lambda p: torch.optim.NAdam(p), "adam_v"),
    "RAdam": (lambda p: torch.optim.RAdam(p), "adam_v"),
    "RMSprop": (lambda p: torch.optim.RMSprop(p), "rmsprop_v"),
    "RMSprop, centered": (lambda p: torch.optim.RMSprop(p, centered=True), "rmsprop_v"),
    "Adagrad": (lambda p: torch.optim.Adagrad(p), "adagrad_v"),
    "Adagrad, started": (
        lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.3),
        "adagrad_v",
    ),
}


# ---------------------------------------------------------------- second moments, exactly


@pytest.mark.parametrize("name", SECOND_MOMENTS)
def test_a_constant_gradient_is_its_own_root_mean_square(name: str) -> None:
    make, kind = SECOND_MOMENTS[name]
    model = Net()
    optimizer = trained(make, model)
    root = from_optimizer(optimizer, model, n_data=N, prior_precision=DELTA)
    square = from_optimizer(
        optimizer, model, n_data=N, prior_precision=DELTA, scaling="squared", batch_size=16
    )
    for key, g in fixed_gradients(model).items():
        torch.testing.assert_close(root.precision[key], N * g.abs() + DELTA, rtol=1e-12, atol=0)
        torch.testing.assert_close(
            square.precision[key], N * 16 * g.square() + DELTA, rtol=1e-12, atol=0
        )
        assert torch.equal(root.mean[key], model.get_parameter(key))
    assert (root.n_data, root.prior_precision) == (N, DELTA)
    assert root.record["kind"] == kind
    assert root.record["scaling"] == "sqrt"
    assert square.record["scaling"] == "squared"
    assert square.record["batch_size"] == 16
    assert root.record["definition"] != square.record["definition"]
    assert root.record["bias_corrected"] is True
    assert root.record["step"] == 7
    assert json.loads(json.dumps(root.record)) == root.record


@pytest.mark.parametrize(
    ("make", "beta"),
    [
        (lambda p: torch.optim.AdamW(p, betas=(0.9, 0.95)), 0.95),
        (lambda p: torch.optim.Adam(p, betas=(0.9, 0.95), amsgrad=True), 0.95),
        (lambda p: torch.optim.RMSprop(p, alpha=0.9), 0.9),
        (lambda p: torch.optim.Adagrad(p), 1.0),
    ],
)
def test_varying_gradients_are_averaged_with_the_weights_of_the_definition(
    make: Make, beta: float
) -> None:
    model = Net()
    optimizer = make(model.parameters())
    history = [fixed_gradients(model, seed) for seed in range(5)]
    history = [{k: g / (1 + 3 * t) for k, g in h.items()} for t, h in enumerate(history)]
    for gradients in history:
        step(optimizer, model, gradients)
    captured = from_optimizer(optimizer, model, n_data=N, prior_precision=DELTA)
    weights = [beta ** (4 - t) for t in range(5)]
    for name in captured.precision:
        mean_square = sum(w * h[name] ** 2 for w, h in zip(weights, history, strict=True))
        expected = N * torch.sqrt(torch.as_tensor(mean_square / sum(weights))) + DELTA
        torch.testing.assert_close(captured.precision[name], expected, rtol=1e-12, atol=0)


def test_parameters_with_different_numbers_of_steps_are_each_corrected() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    gradients = fixed_gradients(model)
    step(optimizer, model, gradients)
    only_last = {name: g for name, g in gradients.items() if name.startswith("last")}
    step(optimizer, model, only_last)
    captured = from_optimizer(optimizer, model, n_data=N, prior_precision=DELTA)
    for name, g in gradients.items():
        torch.testing.assert_close(captured.precision[name], N * g.abs() + DELTA)


# ------------------------------------------------------------------------------------ IVON


def precision_of_the_noise(
    optimizer: Any, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Tensor]:
    """1/σ² of the noise that ivon-opt itself adds, with every standard normal drawn as 1."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn", lambda *size, **kwargs: torch.ones(*size, **kwargs))
        with optimizer.sampled_params():
            after = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {name: (after[name] - before[name]) ** -2 for name in before}


def train_ivon(optimizer: Any, model: nn.Module, steps: int = 5) -> None:
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(8, 3, generator=generator, dtype=dtype)
        y = torch.randint(2, (8,), generator=generator)
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def two_groups(model: Net, **last: Any) -> list[dict[str, Any]]:
    """In an order that is not the model's."""
    return [
        {"params": [*model.last.parameters(), *model.norm.parameters()], **last},
        {"params": list(model.first.parameters())},
    ]


@pytest.fixture
def flat_ivon() -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net()
    groups = two_groups(model, weight_decay=0.05)
    optimizer = ivon.IVON(groups, lr=0.1, ess=N, weight_decay=0.01, beta2=0.9, hess_init=0.1)
    train_ivon(optimizer, model)
    return model, optimizer


def test_flat_ivon_with_two_groups_gives_every_tensor_its_own_precision(
    flat_ivon: tuple[Net, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = flat_ivon
    expected = precision_of_the_noise(optimizer, model, monkeypatch)
    captured = from_optimizer(optimizer, model)
    assert list(captured.precision) == [name for name, _ in model.named_parameters()]
    for name in expected:
        assert expected[name].unique().numel() == expected[name].numel()  # nothing to mix up
        torch.testing.assert_close(captured.precision[name], expected[name], rtol=1e-10, atol=0)
        assert torch.equal(captured.mean[name], model.get_parameter(name))
    assert captured.n_data == N
    assert isinstance(captured.prior_precision, dict)
    assert captured.prior_precision["last.bias"] == pytest.approx(N * 0.05)
    assert captured.prior_precision["first.weight"] == pytest.approx(N * 0.01)
    assert captured.record["kind"] == "ivon"
    assert json.loads(json.dumps(captured.record)) == captured.record


def test_flat_ivon_counts_frozen_parameters_but_leaves_them_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = Net()
    model.first.bias.requires_grad_(False)
    optimizer = ivon.IVON(two_groups(model), lr=0.1, ess=N, beta2=0.9, hess_init=0.1)
    train_ivon(optimizer, model)
    captured = from_optimizer(optimizer, model)
    expected = precision_of_the_noise(optimizer, model, monkeypatch)
    assert "first.bias" not in captured.precision
    assert captured.record["frozen"] == ["first.bias"]
    for name, precision in captured.precision.items():
        torch.testing.assert_close(precision, expected[name], rtol=1e-10, atol=0)


def test_ours_and_ivon_opt_give_the_same_posterior() -> None:
    captured = []
    for kind in (ivon.IVON, IVON):
        torch.manual_seed(0)
        model = Net()
        optimizer = kind(
            two_groups(model, weight_decay=0.05), lr=0.1, ess=N, beta2=0.9, hess_init=0.1
        )
        torch.manual_seed(1)
        train_ivon(optimizer, model)
        captured.append(from_optimizer(optimizer, model))
    theirs, ours = captured
    assert list(ours.precision) == list(theirs.precision)
    for name in ours.precision:
        torch.testing.assert_close(ours.precision[name], theirs.precision[name], rtol=1e-6, atol=0)
        torch.testing.assert_close(ours.mean[name], theirs.mean[name], rtol=1e-6, atol=1e-9)
    assert ours.prior_precision == theirs.prior_precision
    assert ours.record["step"] == 5


def test_our_ivon_is_not_captured_while_the_weights_are_a_sample() -> None:
    model = Net()
    optimizer = IVON(model.parameters(), lr=0.1, ess=N, beta2=0.9)
    train_ivon(optimizer, model)
    with optimizer.sampled_params(), pytest.raises(OptimizerError, match="are a sample"):
        from_optimizer(optimizer, model)
    captured = from_optimizer(optimizer, model)
    assert torch.equal(captured.mean["last.bias"], model.last.bias)


def test_our_ivon_gives_untouched_parameters_the_prior_alone() -> None:
    model = Net()
    idle = nn.Parameter(torch.ones(3, dtype=torch.float64))
    model.register_parameter("idle", idle)
    optimizer = IVON(model.parameters(), lr=0.1, ess=N, beta2=0.9, weight_decay=0.01)
    train_ivon(optimizer, model)
    captured = from_optimizer(optimizer, model)
    assert captured.precision["idle"].tolist() == pytest.approx([N * 0.01] * 3)
    assert captured.record["never_updated"] == ["idle"]


@pytest.mark.parametrize("kind", [ivon.IVON, IVON])
def test_ivon_knows_its_data_and_its_prior(kind: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = kind(model.parameters(), lr=0.1, ess=N, weight_decay=0.01, beta2=0.9)
    train_ivon(optimizer, model)
    captured = from_optimizer(optimizer, model, n_data=N, prior_precision=N * 0.01)
    assert captured.prior_precision == pytest.approx(2.0)
    with pytest.raises(OptimizerError, match=r"n_data=201 is inconsistent.*ess=\[200"):
        from_optimizer(optimizer, model, n_data=201)
    with pytest.raises(OptimizerError, match=r"prior_precision=0\.01 contradicts.* 2 for"):
        from_optimizer(optimizer, model, prior_precision=0.01)
    tempered = from_optimizer(optimizer, model, n_data=50, scaling="ess")
    assert tempered.n_data == 50
    assert torch.equal(tempered.precision["last.bias"], captured.precision["last.bias"])
    assert tempered.record["ess"] == [float(N)]


def test_ivon_with_a_different_ess_per_group(flat_ivon: tuple[Net, Any]) -> None:
    model, optimizer = flat_ivon
    before = from_optimizer(optimizer, model).precision
    optimizer.param_groups[0]["ess"] = 50
    with pytest.raises(OptimizerError, match="no number of examples"):
        from_optimizer(optimizer, model)
    captured = from_optimizer(optimizer, model, n_data=N, scaling="ess")
    torch.testing.assert_close(captured.precision["last.bias"], before["last.bias"] / 4)
    assert torch.equal(captured.precision["first.bias"], before["first.bias"])


def test_a_slightly_negative_hessian_is_allowed_and_a_negative_precision_is_not(
    flat_ivon: tuple[Net, Any],
) -> None:
    model, optimizer = flat_ivon
    optimizer.param_groups[1]["hess"][0] = -0.005  # weight_decay is 0.01
    captured = from_optimizer(optimizer, model)
    assert captured.precision["first.weight"][0, 0].item() == pytest.approx(N * 0.005)
    optimizer.param_groups[1]["hess"][0] = -0.02
    with pytest.raises(PosteriorError, match=r"'first\.weight' is not positive.*1 of 12"):
        from_optimizer(optimizer, model)
    optimizer.param_groups[1]["hess"][0] = math.nan
    with pytest.raises(PosteriorError, match=r"'first\.weight' is not finite in 1 of 12"):
        from_optimizer(optimizer, model)


def test_a_flat_hessian_of_another_length(flat_ivon: tuple[Net, Any]) -> None:
    model, optimizer = flat_ivon
    optimizer.param_groups[0]["hess"] = optimizer.param_groups[0]["hess"][:-1]
    with pytest.raises(OptimizerError, match=r"group 0's Hessian has 17 entries.* 18"):
        from_optimizer(optimizer, model)


# --------------------------------------------------------- groups, frozen, tied, untouched


def test_groups_in_another_order_and_a_missing_parameter() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(
        [
            {"params": model.last.parameters(), "weight_decay": 0.1},
            {"params": [model.first.weight], "weight_decay": 0.0},
        ]
    )
    step(optimizer, model, fixed_gradients(model))
    captured = from_optimizer(optimizer, model, n_data=N, prior_precision=DELTA)
    assert list(captured.precision) == ["first.weight", "last.weight", "last.bias"]
    for name, precision in captured.precision.items():
        torch.testing.assert_close(precision, N * fixed_gradients(model)[name].abs() + DELTA)
    left_out = ["first.bias", "norm.weight", "norm.bias"]
    assert captured.record["not_in_optimizer"] == left_out
    assert [group["weight_decay"] for group in captured.record["groups"]] == [0.0, 0.1]


def test_a_tied_tensor_comes_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model[2].weight = model[0].weight
    optimizer = trained(torch.optim.Adam, model)
    captured = from_optimizer(optimizer, model, n_data=N, prior_precision=DELTA)
    assert list(captured.precision) == ["0.weight", "0.bias", "2.bias"]
    assert captured.record["tied"] == {"0.weight": ["2.weight"]}


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop])
def test_parameters_that_never_got_a_gradient_have_the_prior_alone(make: Make) -> None:
    model = Net()
    optimizer = make(model.parameters())
    step(optimizer, model, {"last.bias": torch.ones(2, dtype=torch.float64)})
    captured = from_optimizer(optimizer, model, n_data=N, prior_precision=DELTA)
    assert captured.precision["last.bias"].tolist() == pytest.approx([N + DELTA] * 2)
    untouched = [name for name, _ in model.named_parameters() if name != "last.bias"]
    assert captured.record["never_updated"] == untouched
    for name in untouched:
        assert torch.equal(
            captured.precision[name], torch.full_like(model.get_parameter(name), DELTA)
        )
    with pytest.raises(PosteriorError, match=r"'first\.weight' is not positive.*positive prior"):
        from_optimizer(optimizer, model, n_data=N, prior_precision=0.0)


def test_the_result_does_not_follow_further_training() -> None:
    model = Net()
    optimizer = trained(torch.optim.Adam, model)
    captured = from_optimizer(optimizer, model, n_data=N, prior_precision=DELTA)
    mean = captured.mean["first.weight"].clone()
    precision = captured.precision["first.weight"].clone()
    step(optimizer, model, fixed_gradients(model, 5))
    assert torch.equal(captured.mean["first.weight"], mean)
    assert torch.equal(captured.precision["first.weight"], precision)
    assert not captured.mean["first.weight"].requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_with_a_warning(dtype: torch.dtype) -> None:
    model = Net(dtype)
    optimizer = trained(lambda p: torch.optim.Adam(p, eps=1e-4), model, steps=1)
    with pytest.warns(UserWarning, match=r"'first\.weight'.*half precision"):
        captured = from_optimizer(optimizer, model, n_data=N, prior_precision=DELTA)
    assert captured.precision["first.weight"].dtype == torch.float32
    assert captured.mean["first.weight"].dtype == dtype
    expected = N * fixed_gradients(model)["first.weight"].to(dtype).float().abs() + DELTA
    torch.testing.assert_close(captured.precision["first.weight"], expected, rtol=0.01, atol=0.1)
    assert captured.record["state_dtypes"] == [str(dtype)]


def test_a_subclass_and_a_wrapper_are_read_like_their_base() -> None:
    class Mine(torch.optim.AdamW):
        pass

    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    model = Net()
    inner = trained(Mine, model)
    wrapped: Any = Wrapper(inner)
    one = from_optimizer(inner, model, n_data=N, prior_precision=DELTA)
    two = from_optimizer(wrapped, model, n_data=N, prior_precision=DELTA)
    assert torch.equal(one.precision["last.bias"], two.precision["last.bias"])
    assert one.record["optimizer"].endswith("Mine")


# ------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.Adafactor(p),
    ],
)
def test_optimizers_without_a_known_precision_name_fit_laplace(make: Make) -> None:
    model = Net()
    with pytest.raises(OptimizerError, match="fit_laplace"):
        from_optimizer(trained(make, model), model, n_data=N, prior_precision=DELTA)


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adam,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        lambda p: ivon.IVON(p, lr=0.1, ess=N),
        lambda p: IVON(p, lr=0.1, ess=N),
    ],
)
def test_an_optimizer_that_has_not_stepped(make: Make) -> None:
    model = Net()
    with pytest.raises(OptimizerError, match="has not stepped"):
        from_optimizer(make(model.parameters()), model, n_data=N, prior_precision=DELTA)


def test_another_models_optimizer_lists_the_shapes() -> None:
    model = Net()
    optimizer = trained(torch.optim.Adam, model)
    with pytest.raises(OptimizerError, match=r"6 of the optimizer's 6 .*\(4, 3\), \(4,\)"):
        from_optimizer(optimizer, copy.deepcopy(model), n_data=N, prior_precision=DELTA)
    extra = nn.Parameter(torch.ones(5, dtype=torch.float64))
    optimizer.add_param_group({"params": [extra]})
    with pytest.raises(OptimizerError, match=r"1 of the optimizer's 7 .*\[\(5,\)\]"):
        from_optimizer(optimizer, model, n_data=N, prior_precision=DELTA)


@pytest.mark.parametrize("thing", [None, {"state": {}}, nn.Linear(1, 1)])
def test_what_is_no_optimizer(thing: Any) -> None:
    with pytest.raises(OptimizerError, match="expected a torch"):
        from_optimizer(thing, Net(), n_data=N, prior_precision=DELTA)


def test_missing_numbers_are_explained() -> None:
    model = Net()
    optimizer = trained(lambda p: torch.optim.AdamW(p, weight_decay=0.01), model)
    with pytest.raises(OptimizerError, match=r"n_data is missing.*len\(dataset\)"):
        from_optimizer(optimizer, model, prior_precision=DELTA)
    with pytest.raises(InputError, match="needs batch_size"):
        from_optimizer(optimizer, model, n_data=N, prior_precision=DELTA, scaling="squared")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_data": 0}, "n_data"),
        ({"n_data": 2.5}, "n_data"),
        ({"prior_precision": -1.0}, "prior_precision"),
        ({"prior_precision": math.nan}, "prior_precision"),
        ({"prior_precision": "strong"}, "prior_precision"),
        ({"scaling": "root"}, "scaling"),
        ({"scaling": "ess"}, "IVON"),
        ({"batch_size": 8}, "batch_size"),
        ({"scaling": "squared", "batch_size": 0}, "batch_size"),
    ],
)
def test_wrong_numbers_are_named(arguments: dict[str, Any], message: str) -> None:
    model = Net()
    optimizer = trained(torch.optim.Adam, model)
    with pytest.raises(InputError, match=message):
        from_optimizer(optimizer, model, **{"n_data": N, "prior_precision": DELTA, **arguments})


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_damaged_second_moment_names_its_parameter(value: float) -> None:
    model = Net()
    optimizer = trained(torch.optim.Adam, model)
    optimizer.state[model.norm.weight]["exp_avg_sq"][1] = value
    with pytest.raises(PosteriorError, match=r"'norm\.weight' is negative or not finite in 1 of 4"):
        from_optimizer(optimizer, model, n_data=N, prior_precision=DELTA)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_name_their_parameter(value: float) -> None:
    model = Net()
    optimizer = trained(torch.optim.Adam, model)
    with torch.no_grad():
        model.norm.weight[1] = value
    with pytest.raises(ModelError, match=r"'norm\.weight' has 1 entries"):
        from_optimizer(optimizer, model, n_data=N, prior_precision=DELTA)


# ---------------------------------------------------------------- how much of h is its start


@pytest.mark.parametrize("beta2", [0.9, 0.8, 1.0])
def test_the_share_of_the_start_is_how_much_h_moves_with_it(beta2: float) -> None:
    """OGN's h is linear in its start, and at lr = 0 its gradients do not depend on it."""
    learned = []
    for start in (1.0, 2.0):
        torch.manual_seed(0)
        model = Net()
        optimizer = OGN(
            model.parameters(), 0.0, N, model=model, hess_init=start, beta2=beta2, weight_decay=0.1
        )
        train_ivon(optimizer, model)
        learned.append(from_optimizer(optimizer, model))
    low, high = (torch.cat([s.flatten() / N - 0.1 for s in q.precision.values()]) for q in learned)
    left = high - low  # of a start of 1, in each weight
    torch.testing.assert_close(left, torch.full_like(left, beta2**5))
    shares = left.sum() / low.sum(), 2 * left.sum() / high.sum()
    for q, share in zip(learned, shares, strict=True):
        assert q.record["initial_share"] == pytest.approx(max(float(share), beta2**5))


@pytest.mark.parametrize("kind", [ivon.IVON, IVON])
@pytest.mark.parametrize(("start", "rounds"), [(1.0, 1), (1e4, 4), (1e-4, 1)])
def test_a_precision_that_is_mostly_its_start_is_said_to_be(
    kind: Any, start: float, rounds: int, tmp_path: Path
) -> None:
    """By what is left of it in h, for long of a large one; a small one by its weight."""
    torch.manual_seed(0)
    model = Net()
    optimizer = kind(model.parameters(), lr=1e-3, ess=N, beta2=0.9, hess_init=start)
    for _ in range(rounds):
        train_ivon(optimizer, model)  # 5 steps
    with pytest.warns(InitialPrecisionWarning, match="initial_share") as seen:
        q = Posterior.from_optimizer(optimizer, model)
    assert [w.filename for w in seen] == [__file__]
    share, weight = q.record["initial_share"], 0.9 ** (5 * rounds)
    hess = torch.cat([q.precision(n).flatten() / N - 1e-4 for n in q.mean])
    left = min(weight * start / float(hess.mean()), 1.0)
    assert share == pytest.approx(weight if start < 1 else left)
    assert f"initial_share={share:.2g}" in repr(q)
    q.save(tmp_path / "q.safetensors")
    assert repr(Posterior.load(tmp_path / "q.safetensors")) == repr(q)
    for _ in range(20):
        train_ivon(optimizer, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Posterior.from_optimizer(optimizer, model).record["initial_share"] < 0.1


def test_a_parameter_without_a_step_is_all_start() -> None:
    model = Net()
    model.register_parameter("idle", nn.Parameter(torch.ones(1000, dtype=torch.float64)))
    optimizer = IVON(model.parameters(), lr=0.1, ess=N, beta2=0.1)
    train_ivon(optimizer, model)
    share = from_optimizer(optimizer, model).record["initial_share"]
    assert share == pytest.approx(1000 / sum(p.numel() for p in model.parameters()), rel=1e-3)


# ---------------------------------------------------------------- sequences and their tokens


@pytest.mark.parametrize("kind", [IVON, torch.optim.Adam])
def test_tokens_scale_the_precision_and_sequences_are_counted(kind: Any, tmp_path: Path) -> None:
    """A mean over the tokens of 6 sequences, as of so many examples of one token each."""
    torch.manual_seed(0)
    ids = torch.randint(5, (6, 4))
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5)).double()
    tokens = ids.numel()
    given = {"ess": tokens, "weight_decay": 0.1, "beta2": 0.5} if kind is IVON else {}
    optimizer = kind(model.parameters(), lr=0.01, **given)
    for _ in range(3):
        looked = optimizer.sampled_params(train=True) if kind is IVON else nullcontext()
        with looked:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
    prior = {} if kind is IVON else {"prior_precision": 2.0}
    q = Posterior.from_optimizer(optimizer, model, n_data=6, tokens=tokens, **prior)
    one_by_one = Posterior.from_optimizer(optimizer, model, n_data=tokens, **prior)
    assert (q.n_data, q.record["tokens"]) == (6, tokens)
    for name in q.mean:
        assert torch.equal(q.precision(name), one_by_one.precision(name))
    task = Task(model, (ids, ids), likelihood="tokens")
    assert q.on(task).n_data == task.n_data
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    saved = Posterior.from_checkpoint(
        tmp_path / "state.pt", model, n_data=6, tokens=tokens, **prior
    )
    assert torch.equal(saved.precision("1.bias"), q.precision("1.bias"))
    with pytest.raises(InputError, match="tokens"):
        Posterior.from_optimizer(optimizer, model, n_data=6, tokens=0, **prior)
    if kind is IVON:
        for wrong in ({"n_data": 6}, {"n_data": 6, "tokens": 7}, {"tokens": tokens}):
            with pytest.raises(OptimizerError, match="tokens"):
                Posterior.from_optimizer(optimizer, model, **wrong)
    with pytest.raises(PosteriorError, match="tokens"):
        one_by_one.on(task)


def test_ivon_has_one_scaling(flat_ivon: tuple[Net, Any]) -> None:
    model, optimizer = flat_ivon
    with pytest.raises(InputError, match="second moments"):
        from_optimizer(optimizer, model, scaling="squared", batch_size=8)


def test_an_optimizer_with_a_known_name_and_another_state() -> None:
    class Adam(torch.optim.SGD.__mro__[1]):
        def step(self, closure: None = None) -> None: ...

    model = Net()
    optimizer = Adam(model.parameters(), {})
    optimizer.state[model.first.weight] = {"state1": torch.zeros(4, 3)}
    with pytest.raises(OptimizerError, match=r"'state1'"):
        from_optimizer(optimizer, model, n_data=N, prior_precision=DELTA)
