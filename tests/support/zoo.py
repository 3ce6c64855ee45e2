"""Every way of using a parameter that the engine must read exactly, as tiny models with inputs.

The kinds of layers, each read by one of a few functions; then ordinary layers, used in every way
that hides from a hook or confuses a shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from models import Case, D, HFConv1D, example_models, graph, normal, randomised, tokens
from torch import Tensor, nn
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrizations import weight_norm


def spread(m: Any, x: Tensor) -> Tensor:
    """Channels come second, positions behind them."""
    h = torch.tanh(m.layer(x))
    return m.out(h.flatten(2).mean(-1) if h.ndim > 2 else h)


def normed(m: Any, x: Tensor) -> Tensor:
    return spread(m, m.conv(x))


def last(m: Any, x: Tensor) -> Tensor:
    return m.out(m.layer(x)[0][:, -1])


def pooled(m: Any, x: Tensor) -> Tensor:
    return m.out(m.layer(x).mean(1))


def summed(m: Any, ids: Tensor) -> Tensor:
    return m.out(torch.tanh(m.layer(ids)).sum(1))


def offsets(m: Any, ids: Tensor) -> Tensor:
    return m.out(m.layer(ids.flatten(), torch.arange(len(ids), device=ids.device) * ids.shape[1]))


def states(m: Any, x: Tensor) -> Tensor:
    return m.out(m.layer(x[:, :3], (x[None, :, 3].tanh(), x[None, :, 0].tanh()))[1][1][0])


def case(layer: nn.Module, shape: tuple[int, ...], read: Any = spread, width: int = 4) -> Case:
    """A model around one layer, read in one of the ways above."""
    parts = dict(layer=layer, out=nn.Linear(width, 2))
    if read is normed:
        parts["conv"] = nn.Conv2d(2, 4, 2)
    takes_tokens = isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    inputs = tokens(*shape) if takes_tokens else normal(*shape)
    return Case(graph(read, **parts), inputs)


PLANES = (5, 2, 4, 4)
LAYERS: dict[str, Callable[[], Case]] = {
    "conv1d_pointwise": lambda: case(nn.Conv1d(3, 4, 1, bias=False), (5, 3, 4)),
    "conv2d_strided": lambda: case(
        nn.Conv2d(2, 4, (3, 2), stride=(2, 3), padding=(1, 2), dilation=(2, 1)), (5, 2, 7, 6)
    ),
    "conv3d_zeros_same": lambda: case(nn.Conv3d(1, 4, 2, padding="same"), (5, 1, 2, 3, 2)),
    "conv_transpose2d": lambda: case(nn.ConvTranspose2d(2, 4, 2, stride=2, groups=2), (5, 2, 3, 3)),
    "layernorm_two_dims": lambda: case(nn.LayerNorm((3, 3)), PLANES, normed),
    "layernorm_all_dims_no_bias": lambda: case(nn.LayerNorm((4, 3, 3), bias=False), PLANES, normed),
    "rmsnorm_two_dims": lambda: case(nn.RMSNorm((3, 3), eps=1e-3), PLANES, normed),
    "groupnorm_flat": lambda: case(nn.GroupNorm(2, 4), (5, 4)),
    "batchnorm3d": lambda: case(nn.BatchNorm3d(3), (5, 3, 2, 1, 2), width=3),
    "instancenorm": lambda: case(nn.InstanceNorm2d(3, affine=True), (5, 3, 2, 3), width=3),
    "prelu": lambda: case(nn.PReLU(3), (5, 3, 2, 2), width=3),
    "embedding_sparse": lambda: case(nn.Embedding(5, 3, sparse=True), (5, 4), summed, width=3),
    "embedding_padding": lambda: case(nn.Embedding(5, 3, padding_idx=-1), (5, 6), summed, width=3),
    "embedding_bag": lambda: case(
        nn.EmbeddingBag(5, 3, mode="mean", padding_idx=0),
        (5, 4),
        lambda m, i: m.out(m.layer(i)),
        width=3,
    ),
    "embedding_bag_offsets": lambda: case(
        nn.EmbeddingBag(5, 3, mode="sum"), (5, 4), offsets, width=3
    ),
    "conv1d_of_hugging_face": lambda: case(
        nn.Sequential(HFConv1D(6, 3), nn.Tanh(), HFConv1D(4, 6)), (5, 4, 3), pooled
    ),
    "bilinear": lambda: case(
        nn.Bilinear(3, 4, 2), (5, 4), lambda m, x: m.out(m.layer(x[:, :3], torch.tanh(x))), width=2
    ),
    "lstm_projected": lambda: case(
        nn.LSTM(3, 4, num_layers=2, proj_size=2, batch_first=True, bidirectional=True),
        (5, 4, 3),
        last,
    ),
    "lstm_with_states": lambda: case(
        nn.LSTM(4, 4, batch_first=True, bias=False), (5, 4, 4), states
    ),
    "rnn_relu": lambda: case(
        nn.RNN(3, 4, nonlinearity="relu", bidirectional=True, batch_first=True),
        (5, 3, 3),
        last,
        width=8,
    ),
    "attention_own_kv": lambda: case(
        nn.MultiheadAttention(4, 2, batch_first=True, kdim=2, vdim=2, add_bias_kv=True),
        (5, 3, 4),
        lambda m, x: m.out(m.layer(x, x[..., :2], x[..., 2:])[0].mean(1)),
    ),
    "transformer_two_layers": lambda: case(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), 2),
        (5, 4, 4),
        pooled,
    ),
}


# Ordinary layers, used in every way that hides from a hook or confuses a shape


def made(call: Any, shape: tuple[int, ...], **parts: Any) -> Case:
    return Case(graph(call, **parts), normal(*shape))


def stacked(shape: tuple[int, ...], *layers: nn.Module) -> Case:
    return Case(randomised(nn.Sequential(*layers)), normal(*shape))


def positions(length: int, use: Any = lambda layer, at, n: layer(at)) -> Case:
    """Position embeddings made once for all examples."""

    def call(m: Any, ids: Tensor) -> Tensor:
        places = use(m.places, torch.arange(ids.shape[1], device=ids.device), len(ids))
        return m.out(torch.tanh(m.words(ids) + places).mean(1))

    parts = dict(words=nn.Embedding(5, 3), places=nn.Embedding(9, 3), out=nn.Linear(3, 2))
    return Case(graph(call, **parts), tokens(7, length))


def sequence_first(length: int, recurrent: bool = False, n: int = 7) -> Case:
    def call(m: Any, x: Tensor) -> Tensor:
        h = m.inner(x.transpose(0, 1))
        h = h[0] if recurrent else torch.tanh(h).cumsum(0)
        return m.out(h)[-1]

    inner = nn.GRU(3, 4) if recurrent else nn.Linear(3, 4)
    return made(call, (n, length, 3), inner=inner, out=HEAD())


def flattened(length: int, time_major: bool = False) -> Case:
    def call(m: Any, x: Tensor) -> Tensor:
        n = len(x)
        rows = (x.transpose(0, 1) if time_major else x).flatten(0, 1)
        h = m.out(m.norm(torch.tanh(m.inner(rows))))
        return h.view(-1, n, 2).mean(0) if time_major else h.view(n, -1, 2).mean(1)

    return made(call, (7, length, 3), inner=nn.Linear(3, 4), norm=nn.BatchNorm1d(4), out=HEAD())


def routed(first: list[float]) -> Case:
    """Three experts, each called on the examples of its own choice, if there are any."""

    def call(m: Any, x: Tensor) -> Tensor:
        choice = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
        features = x.new_zeros(len(x), 4)
        for expert, layer in enumerate(m.experts):
            rows = (choice == expert).nonzero().flatten()
            if len(rows):
                features = features.index_put((rows,), torch.tanh(layer(x[rows])))
        return m.out(features)

    x = normal(7, 3)
    x[:, 0] = torch.tensor(first, dtype=D)
    experts = nn.ModuleList([nn.Linear(3, 4) for _ in range(3)])
    return Case(graph(call, experts=experts, out=HEAD()), x)


def class_token(m: Any, x: Tensor) -> Tensor:
    x = torch.cat([m.token.expand(len(x), -1, -1), m.patch(x)], dim=1) + m.places
    return m.head(m.layer(x)[:, 0])


def lists() -> Case:
    """Parameters in a list, a dict, and a number, of a model's part."""

    def call(m: Any, x: Tensor) -> Tensor:
        for weight in m.weights:
            x = torch.tanh(x @ weight + m.shifts["a"])
        return m.head(x) * m.gain

    weights = nn.ParameterList([torch.randn(3, 3) for _ in range(2)])
    shifts = nn.ParameterDict({"a": torch.randn(3)})
    gain = nn.Parameter(torch.randn(()))
    inner = graph(call, weights=weights, shifts=shifts, gain=gain, head=nn.Linear(3, 2))
    return stacked((5, 3), nn.Linear(3, 3), inner)


def going_on(m: Any, x: Tensor) -> Tensor:
    """A recurrent layer that goes on from its last call, unless the model lets it forget."""
    if m.state is not None and m.state.shape != x.shape:
        raise RuntimeError("the state is of another batch")
    m.state = torch.zeros(x.shape)
    return torch.tanh(x * m.gain)


def remembering(m: Any, x: Tensor) -> Tensor:
    m.inner.state = None
    return m.out(m.inner(m.one(x)))


def two_modules_one_weight() -> Case:
    case = stacked((5, 3), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2))
    case.model[2].weight = case.model[0].weight
    return case


def one_module_two_places() -> Case:
    shared = nn.Linear(3, 3)
    blocks = [nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Linear(3, 3), shared)]
    return stacked((5, 3), *blocks, nn.Linear(3, 2))


def frozen(pattern: str) -> Case:
    model, x = example_models()["images"]
    for name, p in model.named_parameters():
        p.requires_grad_(pattern not in name)
    return Case(model, x)


def in_place(m: Any, x: Tensor) -> Tensor:
    h = m.one(x)
    h.relu_()
    h = m.two(h)
    h[:, :2].mul_(3.0)
    h += 1
    return m.out(h)


def reparametrised(wrap: Any) -> Case:
    model = nn.Sequential(wrap(nn.Linear(3, 4)), nn.Tanh(), HEAD())
    return Case(model.double().eval(), normal(5, 3))


def unrolled(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 4)
    for step in x.unbind(1):
        h = m.cell(step, h)
    return m.out(h)


def dead_on_the_probe() -> Case:
    def call(m: Any, x: Tensor) -> Tensor:
        return m.out(F.relu(m.one(x) * (x > 5)))

    case = made(call, (5, 3), one=nn.Linear(3, 3), out=nn.Linear(3, 2))
    case.inputs[1::2] += 9.0
    return case


def conv_norm(i: int, o: int, kernel: int, activation: Any = None, **shape: Any) -> nn.Sequential:
    """A convolution without a bias, in front of its norm, as vision models have it."""
    conv = nn.Conv2d(i, o, kernel, padding=kernel // 2, bias=False, **shape)
    layers = [conv, nn.BatchNorm2d(o)]
    if activation is not None:
        layers.append(activation())
    return nn.Sequential(*layers)


INPLACE = partial(nn.ReLU, inplace=True)


def basic_block(i: int, o: int, stride: int) -> nn.Module:
    """ResNet's: two convolutions and a skip connection, projected where the shape changes."""

    def call(m: Any, x: Tensor) -> Tensor:
        return F.relu_(m.second(m.first(x)) + m.skip(x))

    first = conv_norm(i, o, 3, INPLACE, stride=stride)
    skip = nn.Identity() if (i, stride) == (o, 1) else conv_norm(i, o, 1, stride=stride)
    return graph(call, first=first, second=conv_norm(o, o, 3), skip=skip)


def resnet() -> Case:
    stem = conv_norm(2, 3, 3, INPLACE)
    blocks = [basic_block(3, 3, 1), basic_block(3, 4, 2)]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return stacked((5, 2, 4, 4), stem, *blocks, *pool, HEAD())


def mobilenet() -> Case:
    """An inverted residual with squeeze and excitation, as of MobileNet V3."""

    def call(m: Any, x: Tensor) -> Tensor:
        h = m.depthwise(m.expand(x))
        return m.out((x + m.project(h * m.gate(h))).mean((2, 3)))

    gate = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 2, 1), nn.ReLU(), nn.Conv2d(2, 6, 1), nn.Hardsigmoid()
    )
    parts = dict(expand=conv_norm(4, 6, 1, nn.Hardswish), gate=gate, project=conv_norm(6, 4, 1))
    depthwise = conv_norm(6, 6, 3, nn.Hardswish, groups=6)
    return made(call, (5, 4, 3, 3), depthwise=depthwise, out=HEAD(), **parts)


def convnext() -> Case:
    """Depthwise 7 x 7, LayerNorm over channels behind, two Linears, a scale per channel."""

    def call(m: Any, x: Tensor) -> Tensor:
        h = m.norm(m.depthwise(x).permute(0, 2, 3, 1))
        h = m.scale * m.narrow(F.gelu(m.widen(h)))
        return m.out((x + h.permute(0, 3, 1, 2)).mean((2, 3)))

    depthwise = nn.Conv2d(4, 4, 7, padding=3, groups=4)
    parts = dict(norm=nn.LayerNorm(4), widen=nn.Linear(4, 6), narrow=nn.Linear(6, 4))
    scale = nn.Parameter(torch.full((4,), 0.1))
    return made(call, (5, 4, 3, 3), depthwise=depthwise, scale=scale, out=HEAD(), **parts)


HEAD = partial(nn.Linear, 4, 2)
USES: dict[str, Callable[[], Case]] = {
    **{f"positions_plain_{t}": lambda t=t: positions(t) for t in (1, 3, 4, 6, 7)},
    "positions_row_5": lambda: positions(5, lambda m, at, n: m(at[None])),
    "positions_repeat_5": lambda: positions(5, lambda m, at, n: m(at)[None].repeat(n, 1, 1)),
    **{f"sequence_first_{t}": lambda t=t: sequence_first(t) for t in (1, 2, 3, 7)},
    **{f"sequence_first_gru_{t}": lambda t=t: sequence_first(t, True) for t in (1, 3)},
    **{f"flattened_{t}": lambda t=t: flattened(t) for t in (1, 2, 3)},
    "flattened_time_major": lambda: flattened(4, time_major=True),
    "experts": lambda: routed([0.5, -1, 2, -1, 0.5, 2, -2]),
    "experts_unseen_by_the_probe": lambda: routed([-1, -2, 0.5, -1, 2, 2, -1]),
    "class_token": lambda: made(  # and positions, as a vision transformer's plain parameters
        class_token,
        (5, 3, 3),
        token=nn.Parameter(torch.randn(1, 1, 4)),
        patch=nn.Linear(3, 4),
        places=nn.Parameter(torch.randn(1, 4, 4)),
        head=HEAD(),
        layer=nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, norm_first=True),
    ),
    "parameter_lists": lists,
    "forward_never_called": lambda: Case(
        graph(None, first=nn.Linear(3, 4), head=HEAD(), gain=nn.Parameter(torch.ones(4))),
        normal(5, 3),
        lambda m, b: (m.head(torch.tanh(m.first(b[0])) * m.gain), b[1]),
    ),
    "weight_norm": lambda: reparametrised(weight_norm),
    "spectral_norm_by_hooks": lambda: reparametrised(spectral_norm),
    "called_twice": lambda: made(
        lambda m, x: m.out(m.one(torch.tanh(m.one(x)))),
        (5, 3),
        one=nn.Linear(3, 3),
        out=nn.Linear(3, 2),
    ),
    "state_between_calls": lambda: made(
        remembering,
        (5, 3),
        one=nn.Linear(3, 4),
        out=HEAD(),
        inner=graph(going_on, gain=nn.Parameter(torch.randn(4))),
    ),
    "two_modules_one_weight": two_modules_one_weight,
    "one_module_two_places": one_module_two_places,
    "weights_from_a_network": lambda: made(
        lambda m, x: torch.einsum("bi,io->bo", x, m.hyper(m.code).view(3, 2)),
        (5, 3),
        hyper=nn.Linear(2, 6),
        code=nn.Parameter(torch.randn(2)),
    ),
    "layer_on_a_shared_table": lambda: made(
        lambda m, x: m.out(torch.tanh(m.one(x) + m.two(m.table)).mean(1)),
        (5, 5, 3),
        one=nn.Linear(3, 4),
        two=nn.Linear(2, 4),
        table=nn.Parameter(torch.randn(5, 2)),
        out=HEAD(),
    ),
    "attention_keys_with_bias": lambda: made(  # whose gradient is nought but rounding
        lambda m, x: (torch.softmax(m.q(x) @ m.k(x).mT, -1) @ m.v(x)).mean(1),
        (5, 4, 3),
        q=nn.Linear(3, 4),
        k=nn.Linear(3, 4),
        v=nn.Linear(3, 2),
    ),
    "unrolled_cell": lambda: made(unrolled, (5, 3, 3), cell=nn.GRUCell(3, 4), out=HEAD()),
    "in_place": lambda: made(
        in_place, (5, 3), one=nn.Linear(3, 4), two=nn.Linear(4, 4), out=HEAD()
    ),
    "in_place_on_the_input": lambda: stacked((5, 3), nn.ReLU(True), nn.Linear(3, 4), HEAD()),
    "frozen_first_layers": lambda: frozen("1"),
    "frozen_weights": lambda: frozen("weight"),
    "frozen_biases": lambda: frozen("bias"),
    "unused": lambda: made(
        lambda m, x: m.out(x), (5, 3), idle=nn.Linear(3, 3), out=nn.Linear(3, 2)
    ),
    "dead_on_the_probe": dead_on_the_probe,
    "single_output": lambda: made(lambda m, x: m.one(x).squeeze(-1), (5, 3), one=nn.Linear(3, 1)),
    "model_is_a_square_layer": lambda: Case(randomised(nn.Linear(3, 3)), normal(3, 3)),
    "one_example": lambda: stacked((1, 3), nn.Linear(3, 3), nn.LayerNorm(3)),
    "one_example_sequence_first": lambda: sequence_first(2, True, 1),
    "two_examples": lambda: sequence_first(2, n=2),
}
VISION: dict[str, Callable[[], Case]] = {
    "resnet": resnet,
    "mobilenet": mobilenet,
    "convnext": convnext,
}
CASES: dict[str, Callable[[], Case]] = {
    **{name: lambda name=name: Case(*example_models()[name]) for name in example_models()},
    **LAYERS,
    **USES,
    **VISION,
}
