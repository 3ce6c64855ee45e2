"""Every quantity of the engine equals the brute-force Jacobian's, in float64 to 1e-10."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from contracts import projected
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from models import Case, Graph, graph, normal, seeded
from oracles import dense_jacobian, fit_at_rest, flatten, outputs_of, relative, rows, unflatten
from readings import EXACT, example, jacobian_of, task_of, ways
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from zoo import CASES

from blr_analysis import sensitivity
from blr_analysis.backprop import plan
from blr_analysis.posterior import Posterior
from blr_analysis.sensitivity.results import Scores
from blr_analysis.task import Task

STRUCTURES = ("diag", "kron", "full")
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


@pytest.mark.parametrize("name", CASES)
def test_jacobians_for_any_chunk_size(name: str) -> None:
    """Chunks of one and all at once; of three (the probe's size; the last is smaller) below."""
    task, jacobian, _ = example(name)
    assert float(torch.linalg.vector_norm(jacobian)) > 0
    for chunk_size in {1, task.n_data}:
        assert relative(jacobian_of(task, chunk_size), jacobian) < EXACT, chunk_size


def swapping(_: pytest.MonkeyPatch) -> nn.Module:
    """Swaps a layer's forward for the length of its own."""

    def call(m: Graph, x: Tensor) -> Tensor:
        plain = m.first.forward
        m.first.forward = lambda z: plain(z) * 2
        try:
            return m.last(m.first(x).tanh())
        finally:
            del m.first.forward

    return Graph(call, first=nn.Linear(3, 3), last=nn.Linear(3, 2))


def patched_class(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    plain = nn.Linear.forward

    def residual(self: nn.Linear, x: Tensor) -> Tensor:
        return plain(self, x) + (x if x.shape[-1] == self.out_features else 0)

    monkeypatch.setattr(nn.Linear, "forward", residual)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))


def patched_function(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    product = nn.functional.linear
    monkeypatch.setattr(
        nn.functional, "linear", lambda x, w, b: product(x, w, b) + product(x, w * 0 + 1)
    )
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))


@pytest.mark.parametrize("patched", [patched_class, patched_function, swapping])
def test_layers_that_were_patched(patched, monkeypatch: pytest.MonkeyPatch) -> None:
    with seeded(0):
        task = task_of(Case(patched(monkeypatch).double(), normal(6, 3)))
    assert relative(jacobian_of(task, None), dense_jacobian(task, task.parameters())) < EXACT
    assert not any("forward" in vars(module) for module in task.model.modules())


def test_a_gpus_plan_is_checked_in_single_precision(monkeypatch) -> None:
    """Whatever torch may round products to; and torch is left as it was."""
    places = torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul
    before = [place.fp32_precision for place in places]
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        precisions = [place.fp32_precision for place in places]
        with plan._single_precision(torch.device("cuda")):
            assert {place.fp32_precision for place in places} == {"ieee"}
        assert [place.fp32_precision for place in places] == precisions
        task = task_of(Case(nn.Sequential(nn.Linear(3, 2)).double(), normal(5, 3)))
        jacobian_of(task, None)
        assert [place.fp32_precision for place in places] == precisions
    finally:
        for place, kind in zip(places, before, strict=True):
            place.fp32_precision = kind


@dataclass
class Twice:
    """Equal to its like, so that it has no hash."""

    layer: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * type(self.layer).forward(self.layer, x)


CHANGES = {
    "a forward without a hash": lambda m: setattr(m[0], "forward", Twice(m[0])),
    "weights in place": lambda m: [p.data.mul_(2) for p in m.parameters()],
    "another parameter": lambda m: setattr(m[0], "weight", nn.Parameter(2 * m[0].weight.detach())),
    "another layer": lambda m: m.__setitem__(0, nn.Linear(3, 4).double()),
    "another activation": lambda m: m.__setitem__(1, nn.ReLU()),
    "a forward of its own": lambda m: setattr(
        m[0], "forward", lambda x: nn.functional.linear(3 * x, m[0].weight, m[0].bias)
    ),
    "another dtype": lambda m: m.float(),
    "training mode": lambda m: m.train(),
    "frozen weights": lambda m: m[0].requires_grad_(False),
    "a hook": lambda m: m[0].register_forward_hook(lambda module, args, output: 2 * output),
}


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_kept_of_a_model_that_changed(change: str) -> None:
    with seeded(0):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(), nn.Linear(4, 2)).double()
    task = Task(model, (normal(6, 3), torch.arange(6) % 2))
    jacobian_of(task, None)
    CHANGES[change](model)
    assert relative(jacobian_of(task, None), dense_jacobian(task, task.parameters())) < (
        1e-5 if change == "another dtype" else EXACT
    )


@cache
def scored(name: str, structure: str) -> tuple[Posterior, Scores]:
    """A posterior of a case, and its scores, computed once."""
    task, _, _ = example(name)
    q = fit_at_rest(task, structure=structure, prior_precision=0.7)
    return q, sensitivity(task, q)


# "full" keeps the Jacobians as they are, which the test above compares for every case
@pytest.mark.parametrize(
    ("name", "structure"),
    [(n, s) for k, n in enumerate(CASES) for s in STRUCTURES[: 2 + (k % 4 == 0)]],
)
def test_variances_and_curvature_sums(name: str, structure: str) -> None:
    """S = δ + Σ J'ΛJ in the structure; V = J Σ J'; e; g'Σg from one backward pass; leverage."""
    task, jacobian, ggn = example(name)
    q, scores = scored(name, structure)
    size = jacobian.shape[-1]
    unit = unflatten(torch.eye(size, dtype=jacobian.dtype), q.mean)
    dense = projected(q.form, ggn) + 0.7 * torch.eye(size, dtype=ggn.dtype)
    assert relative(rows(q.form.times(unit)), dense) < EXACT

    sigma = torch.linalg.inv(dense)
    variance = torch.einsum("ncp,pq,ndq->ncd", jacobian, sigma, jacobian)
    error = _autograd_error(task)
    assert relative(scores.error, error) < EXACT
    assert relative(scores.variance, variance) < EXACT
    influence = torch.einsum("nc,ncd,nd->n", error, variance, error)
    assert relative(scores.self_influence, influence) < EXACT
    alone = sensitivity(task, q, variance=False)
    assert alone.variance is None
    assert relative(alone.self_influence, influence) < EXACT
    hessian = task.likelihood.hessian(outputs_of(task), scores.targets)
    leverage = torch.linalg.eigvals(variance @ hessian).real.amax(-1)
    assert relative(scores.leverage, leverage) < 1e-8  # of a matrix that is not symmetric


def _autograd_error(task: Task) -> Tensor:
    outputs = outputs_of(task).requires_grad_()
    targets = torch.cat([task.run(b, task.parameters())[1] for _, b in task.batches()])
    return torch.autograd.grad(task.likelihood.nll(outputs, targets).sum(), outputs)[0]


@pytest.mark.parametrize("name", CASES)
def test_float32(name: str) -> None:
    """The same plan in single precision, and numbers that agree to single precision."""
    task, _, _ = example(name)
    q, double = scored(name, "diag")
    with seeded(0):
        case = CASES[name]()
    inputs = tree_map(lambda x: x.float() if x.is_floating_point() else x, case.inputs)
    single = task_of(Case(case.model.float(), inputs, case.forward))
    scores = sensitivity(single, q.to("cpu", torch.float32))
    assert scores.variance.dtype == torch.float32
    assert relative(scores.variance.double(), double.variance) < 1e-4
    assert relative(scores.self_influence.double(), double.self_influence) < 1e-4
    assert ways(single) == ways(task), "rounding must not send a parameter the slow way"


RULES = {
    **{n: {"convolution", "norm", "linear"} for n in ("images", "volumes", "resnet", "mobilenet")},
    **{n: {"convolution", "linear"} for n in ("conv1d_pointwise", "conv2d_strided")},
    **{f"{n}norm_two_dims": {"convolution", "norm", "linear"} for n in ("layer", "rms")},
    "conv1d_of_hugging_face": {"transposed_linear", "linear"},
    "embedding_padding": {"embedding", "linear"},
    "embedding_sparse": {"embedding", "linear"},
    **{
        f"positions_{w}": {"embedding", "linear"}
        for w in ("plain_3", "plain_6", "plain_7", "row_5")
    },
    **{f"sequence_first_{t}": {"linear"} for t in (1, 2, 3, 7)},
    **{f"flattened_{t}": {"linear", "norm"} for t in (1, 2, 3)},
    **{n: {"recurrence", "linear"} for n in ("lstm_projected", "lstm_with_states")},
    **{n: {"recurrence", "linear"} for n in ("rnn_relu", "sequence_first_gru_3", "unrolled_cell")},
    "called_twice": {"linear"},
    "two_modules_one_weight": {"linear"},
    "in_place": {"linear"},
    "attention_keys_with_bias": {"linear"},
    "dead_on_the_probe": {"linear"},
}


@pytest.mark.parametrize("name", RULES)
def test_fast_rules_are_used(name: str) -> None:
    """No shape that can be told apart sends an ordinary layer to a slower way."""
    assert set(ways(example(name)[0]).values()) == RULES[name]


class FirstOutput(nn.Module):
    def forward(self, x: Any) -> Tensor:
        return (x[0] if isinstance(x, tuple) else x).flatten(1)


ORDINARY: dict[str, tuple[type[nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (nn.Linear, (4, 2), (4,)),
    "conv1d": (nn.Conv1d, (4, 2, 3), (4, 5)),
    "conv2d": (nn.Conv2d, (4, 2, 3), (4, 5, 4)),
    "conv3d": (nn.Conv3d, (4, 2, 2), (4, 3, 2, 2)),
    "rnn": (nn.RNN, (4, 3), (2, 4)),
    "lstm": (nn.LSTM, (4, 3), (2, 4)),
    "gru_cell": (nn.GRUCell, (4, 3), (4,)),
}


@pytest.mark.parametrize("kind", ["plain", "subclass"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ORDINARY)
def test_a_bias_or_a_subclass_makes_no_difference(name: str, bias: bool, kind: str) -> None:
    """The layer's own rule reads it, and no module around it is differentiated in its place."""
    layer, sizes, shape = ORDINARY[name]
    layer = layer if kind == "plain" else type("Renamed", (layer,), {})
    options = {"bias": bias}
    if name in ("rnn", "lstm"):
        options["batch_first"] = True
    with seeded(0):
        parts = (nn.Tanh(), layer(*sizes, **options), FirstOutput())
        model = nn.Sequential(nn.Sequential(*parts), nn.LazyLinear(2)).double()
        task = task_of(Case(model, normal(5, *shape)))
    assert "0" not in ways(task).values()
    assert "0.1" not in ways(task).values()
    assert relative(jacobian_of(task, 3), dense_jacobian(task, task.parameters())) < EXACT


def test_a_subclass_with_a_forward_pass_of_its_own_has_no_rule() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Standardised(nn.Conv2d):
        def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super()._conv_forward(x, weight - weight.mean(), bias)

    for layer in (Doubled(3, 4), Standardised(3, 4, 1)):
        x = normal(5, 3, *[1] * (layer.weight.ndim - 2))
        with seeded(0):
            task = task_of(Case(nn.Sequential(layer, nn.Flatten(), nn.Linear(4, 2)).double(), x))
        assert ways(task)["0.weight"] == "0"
        assert relative(jacobian_of(task, 3), dense_jacobian(task, task.parameters())) < EXACT


def test_the_whole_model_is_the_last_resort() -> None:
    slow = {n for n in CASES if "whole model" in ways(example(n)[0]).values()}
    assert slow == {"forward_never_called"}


@pytest.mark.parametrize("name", ["images", "words_tied", "experts", "positions_plain_4"])
def test_any_indices_in_any_order(name: str) -> None:
    task, jacobian, _ = example(name)
    order = torch.tensor([4, 0, 3, 3, 1])
    assert relative(jacobian_of(task, 2, order), jacobian[order]) < EXACT


def test_posterior_over_some_parameters_only() -> None:
    task, jacobian, _ = example("mlp")
    params = task.parameters()
    mean = {n: p.clone() for n, p in params.items() if n.startswith("2")}
    ones = {n: torch.ones_like(p) for n, p in mean.items()}
    record = {"fixed": [n for n in params if n not in mean]}
    q = Posterior(mean, ones, prior_precision=1.0, n_data=7, record=record)
    columns = torch.cat([torch.full((p.numel(),), n in mean) for n, p in params.items()])
    columns_of_mean = jacobian[..., columns]
    assert relative(sensitivity(task, q).variance, columns_of_mean @ columns_of_mean.mT) < EXACT


@settings(max_examples=25, deadline=None)
@given(
    kernel_size=st.integers(1, 3),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    padding=st.integers(0, 2),
    groups=st.sampled_from([1, 2]),
    bias=st.booleans(),
    padding_mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    kind=st.sampled_from([nn.Conv1d, nn.Conv2d, nn.Conv3d]),
    extra=st.integers(0, 2),
    batch=st.integers(1, 4),
    chunk=st.integers(1, 4),
)
def test_any_convolution(kind: type, extra: int, batch: int, chunk: int, **shape: Any) -> None:
    span = shape["dilation"] * (shape["kernel_size"] - 1) + 1
    length = max(span, shape["padding"] + 1) + extra
    with seeded(0):
        parts = dict(conv=kind(2, 4, **shape), out=nn.Linear(4, 2))
        model = graph(lambda m, x: m.out(torch.tanh(m.conv(x)).flatten(2).mean(-1)), **parts)
    dims = (nn.Conv1d, nn.Conv2d, nn.Conv3d).index(kind) + 1
    _check_variance(model, normal(batch, 2, *[length] * dims), chunk)


def _check_variance(model: nn.Module, x: Tensor, chunk: int) -> None:
    """Jacobians and diagonal and Kronecker variances of a Gaussian task on these inputs."""
    task = task_of(Case(model, x), "gaussian")
    params = task.parameters()
    jacobian = dense_jacobian(task, params)
    assert relative(jacobian_of(task, chunk), jacobian) < EXACT
    sigma = {
        n: torch.rand(p.shape, generator=torch.Generator().manual_seed(0)).double() + 0.1
        for n, p in params.items()
    }
    q = Posterior(params, {n: 1 / s for n, s in sigma.items()}, prior_precision=0.1, n_data=len(x))
    truth = (jacobian * flatten(sigma)) @ jacobian.mT
    assert relative(sensitivity(task, q).variance, truth) < EXACT


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: nn.Linear(width, width),
    "layernorm": nn.LayerNorm,
    "rmsnorm": lambda width: nn.RMSNorm(width, eps=1e-2),
    "groupnorm": lambda width: nn.GroupNorm(1, width),
    "batchnorm": nn.BatchNorm1d,
    "embedding": lambda width: nn.Embedding(5, width),
}


@settings(max_examples=25, deadline=None)
@given(
    layer=st.sampled_from(list(LAYERS)),
    batch=st.integers(1, 5),
    time=st.integers(1, 5),
    width=st.integers(1, 4),
    outputs=st.integers(1, 4),
    chunk=st.integers(1, 5),
    sequence_first=st.booleans(),
)
def test_any_layer_at_any_size(
    layer: str, batch: int, time: int, width: int, outputs: int, chunk: int, sequence_first: bool
) -> None:
    """Sequences of any length, batch first or not, through any layer, to any number of outputs."""
    assume(layer != "groupnorm" or width * time > 1)  # torch refuses to normalise one number
    channels = layer in ("groupnorm", "batchnorm")
    turn = (1, 2) if channels else (0, int(sequence_first))

    def call(m: Graph, x: Tensor) -> Tensor:
        h = m.layer(x.transpose(*turn)).transpose(*turn)
        return m.out(torch.tanh(h).mean(1))

    with seeded(0):
        model = graph(call, layer=LAYERS[layer](width), out=nn.Linear(width, outputs))
    words = torch.arange(batch * time).view(batch, time) % 5
    x = words if layer == "embedding" else normal(batch, time, width)
    _check_variance(model, x, chunk)
