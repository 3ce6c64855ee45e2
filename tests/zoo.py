"""Every way of using a parameter that the engine must read exactly, as tiny models with inputs.

The kinds of layers, each read by one of a few functions; then ordinary layers, used in every way
that hides from a hook or confuses a shape.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from models import HFConv1D, example_models, randomised
from parts import Case, D, graph, normal, tokens
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations as par
from torch.nn.utils import spectral_norm, weight_norm


def case(read: Callable[..., Tensor], layer: nn.Module, x: Tensor, width: int = 4) -> Case:
    """A model around one layer, read in one of the ways below."""
    first = {"conv": nn.Conv2d(2, 4, 2)} if read is normed else {}
    return Case(graph(read, layer=layer, out=nn.Linear(width, 2), **first), x)


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


def masked(m: Any, x: Tensor) -> Tensor:
    mask = torch.ones(3, 3, dtype=torch.bool, device=x.device).triu(1)
    return m.out(m.layer(x, x, x, attn_mask=mask, need_weights=False)[0].mean(1))


PLANES = normal(5, 2, 4, 4)
LAYERS: dict[str, Callable[[], Case]] = {
    "conv1d": lambda: case(spread, nn.Conv1d(2, 4, 3, stride=2, dilation=2), normal(5, 2, 9)),
    "conv1d_same_circular": lambda: case(
        spread, nn.Conv1d(2, 4, 4, padding="same", padding_mode="circular"), normal(5, 2, 7)),
    "conv1d_depthwise": lambda: case(
        spread, nn.Conv1d(2, 4, 2, groups=2, padding=3), normal(5, 2, 6)),
    "conv1d_pointwise": lambda: case(spread, nn.Conv1d(3, 4, 1, bias=False), normal(5, 3, 4)),
    "conv2d_strided": lambda: case(
        spread, nn.Conv2d(2, 4, (3, 2), stride=(2, 3), padding=(1, 2), dilation=(2, 1)),
        normal(5, 2, 7, 6)),
    "conv2d_groups_reflect": lambda: case(
        spread, nn.Conv2d(4, 4, 3, padding=2, groups=2, padding_mode="reflect"),
        normal(5, 4, 5, 5)),
    "conv2d_replicate": lambda: case(
        spread, nn.Conv2d(2, 4, 2, padding=(1, 0), padding_mode="replicate", bias=False),
        normal(5, 2, 4, 5)),
    "conv2d_one_position": lambda: case(spread, nn.Conv2d(2, 4, 3), normal(5, 2, 3, 3)),
    "conv3d": lambda: case(
        spread, nn.Conv3d(2, 4, (2, 1, 3), (1, 2, 1), (1, 0, 2), (2, 1, 1), groups=2),
        normal(5, 2, 3, 4, 4)),
    "conv3d_zeros_same": lambda: case(
        spread, nn.Conv3d(1, 4, 2, padding="same"), normal(5, 1, 2, 3, 2)),
    "conv_transpose1d": lambda: case(
        spread, nn.ConvTranspose1d(2, 4, 3, stride=2), normal(5, 2, 4)),
    "conv_transpose2d": lambda: case(
        spread, nn.ConvTranspose2d(2, 4, 2, groups=2), normal(5, 2, 3, 3)),
    "layernorm_two_dims": lambda: case(normed, nn.LayerNorm((3, 3)), PLANES),
    "layernorm_all_dims_no_bias": lambda: case(
        normed, nn.LayerNorm((4, 3, 3), bias=False), PLANES),
    "layernorm_no_affine": lambda: case(
        normed, nn.LayerNorm(3, elementwise_affine=False), PLANES),
    "rmsnorm_two_dims": lambda: case(normed, nn.RMSNorm((3, 3), eps=1e-3), PLANES),
    "rmsnorm_no_affine": lambda: case(normed, nn.RMSNorm(3, elementwise_affine=False), PLANES),
    "groupnorm": lambda: case(normed, nn.GroupNorm(2, 4), PLANES),
    "groupnorm_flat": lambda: case(spread, nn.GroupNorm(2, 4), normal(5, 4)),
    "groupnorm_no_affine": lambda: case(normed, nn.GroupNorm(4, 4, affine=False), PLANES),
    "batchnorm1d": lambda: case(spread, nn.BatchNorm1d(4), normal(5, 4)),
    "batchnorm1d_sequence": lambda: case(spread, nn.BatchNorm1d(3), normal(5, 3, 4), 3),
    "batchnorm2d": lambda: case(spread, nn.BatchNorm2d(3), normal(5, 3, 2, 3), 3),
    "batchnorm2d_no_affine": lambda: case(
        spread, nn.BatchNorm2d(3, affine=False), normal(5, 3, 2, 3), 3),
    "batchnorm3d": lambda: case(spread, nn.BatchNorm3d(3), normal(5, 3, 2, 1, 2), 3),
    "instancenorm": lambda: case(
        spread, nn.InstanceNorm2d(3, affine=True), normal(5, 3, 2, 3), 3),
    "prelu": lambda: case(spread, nn.PReLU(3), normal(5, 3, 2, 2), 3),
    "embedding_sparse": lambda: case(summed, nn.Embedding(5, 3, sparse=True), tokens(5, 4), 3),
    "embedding_padding": lambda: case(summed, nn.Embedding(5, 3, padding_idx=-1), tokens(5, 6), 3),
    "embedding_bag": lambda: case(
        lambda m, i: m.out(m.layer(i)), nn.EmbeddingBag(5, 3, mode="mean", padding_idx=0),
        tokens(5, 4), 3),
    "embedding_bag_offsets": lambda: case(
        offsets, nn.EmbeddingBag(5, 3, mode="sum"), tokens(5, 4), 3),
    "conv1d_of_hugging_face": lambda: case(
        pooled, nn.Sequential(HFConv1D(6, 3), nn.Tanh(), HFConv1D(4, 6)), normal(5, 4, 3)),
    "bilinear": lambda: case(
        lambda m, x: m.out(m.layer(x[:, :3], torch.tanh(x))), nn.Bilinear(3, 4, 2),
        normal(5, 4), 2),
    "lstm": lambda: case(
        last, nn.LSTM(3, 2, num_layers=2, batch_first=True, bidirectional=True),
        normal(5, 4, 3)),
    "lstm_projected": lambda: case(
        last, nn.LSTM(3, 4, num_layers=2, proj_size=2, batch_first=True), normal(5, 4, 3), 2),
    "lstm_with_states": lambda: case(
        states, nn.LSTM(4, 4, batch_first=True, bias=False), normal(5, 4, 4)),
    "gru": lambda: case(last, nn.GRU(3, 4, batch_first=True), normal(5, 3, 3)),
    "rnn_relu": lambda: case(
        last, nn.RNN(3, 4, nonlinearity="relu", bidirectional=True, batch_first=True),
        normal(5, 3, 3), 8),
    "attention_masked": lambda: case(
        masked, nn.MultiheadAttention(4, 2, batch_first=True), normal(5, 3, 4)),
    "attention_own_kv": lambda: case(
        lambda m, x: m.out(m.layer(x, x[..., :2], x[..., 2:])[0].mean(1)),
        nn.MultiheadAttention(4, 2, batch_first=True, kdim=2, vdim=2, add_bias_kv=True),
        normal(5, 3, 4)),
    "transformer_layer": lambda: case(
        pooled, nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, norm_first=True),
        normal(5, 3, 4)),
    "transformer_two_layers": lambda: case(
        pooled, nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), 2),
        normal(5, 4, 4)),
}  # fmt: skip


# Uses


def _position_table(length: int, consume: str) -> Case:
    """Position embeddings made once for all examples, and three ways of using them."""

    def call(m: Any, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        if consume == "row":
            places = m.places(positions.unsqueeze(0))
        elif consume == "repeat":
            places = m.places(positions)[None].repeat(len(ids), 1, 1)
        else:
            places = m.places(positions)
        return m.out(torch.tanh(m.words(ids) + places).mean(1))

    parts = dict(words=nn.Embedding(5, 3), places=nn.Embedding(9, 3), out=nn.Linear(3, 2))
    return Case(graph(call, **parts), tokens(7, length))


def _sequence_first(length: int, recurrent: bool) -> Case:
    def call(m: Any, x: Tensor) -> Tensor:
        h = m.inner(x.transpose(0, 1))
        h = h[0] if recurrent else torch.tanh(h).cumsum(0)
        return m.out(h)[-1]

    inner = nn.GRU(3, 4) if recurrent else nn.Linear(3, 4)
    return Case(graph(call, inner=inner, out=nn.Linear(4, 2)), normal(7, length, 3))


def _flattened(length: int, time_major: bool = False) -> Case:
    def call(m: Any, x: Tensor) -> Tensor:
        n = len(x)
        rows = (x.transpose(0, 1) if time_major else x).flatten(0, 1)
        h = m.out(m.norm(torch.tanh(m.inner(rows))))
        return h.view(-1, n, 2).mean(0) if time_major else h.view(n, -1, 2).mean(1)

    parts = dict(inner=nn.Linear(3, 4), norm=nn.BatchNorm1d(4), out=nn.Linear(4, 2))
    return Case(graph(call, **parts), normal(7, length, 3))


def _experts(m: Any, x: Tensor) -> Tensor:
    choice = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
    out = x.new_zeros(len(x), 4)
    for expert, layer in enumerate(m.experts):
        rows = (choice == expert).nonzero().flatten()
        if len(rows):
            out = out.index_put((rows,), torch.tanh(layer(x[rows])))
    return m.out(out)


def _routed(first: list[float]) -> Case:
    """Three experts, each called on the examples of its own choice, if there are any."""
    x = normal(7, 3)
    x[:, 0] = torch.tensor(first, dtype=D)
    experts = nn.ModuleList([nn.Linear(3, 4) for _ in range(3)])
    return Case(graph(_experts, experts=experts, out=nn.Linear(4, 2)), x)


def _class_token(m: Any, x: Tensor) -> Tensor:
    x = torch.cat([m.token.expand(len(x), -1, -1), m.patch(x)], dim=1) + m.places
    return m.head(m.layer(x)[:, 0])


def _lists() -> nn.Module:
    """Parameters in a list, a dict, and a number."""

    def call(m: Any, x: Tensor) -> Tensor:
        for weight in m.weights:
            x = torch.tanh(x @ weight + m.shifts["a"])
        return m.head(x) * m.gain

    return graph(
        call, weights=nn.ParameterList([torch.randn(3, 3) for _ in range(2)]),
        shifts=nn.ParameterDict({"a": torch.randn(3)}), gain=nn.Parameter(torch.randn(())),
        head=nn.Linear(3, 2),
    )  # fmt: skip


def _encoder(m: Any, batch: Any) -> tuple[Tensor, Any]:
    """Of a model whose ``forward`` nobody calls."""
    return m.head(torch.tanh(m.first(batch[0])) * m.gain), batch[1]


class Remembering(nn.Module):
    """A recurrent layer that goes on from its last call, unless the model lets it forget."""

    state: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.state is not None and self.state.shape != x.shape:
            raise RuntimeError("the state is of another batch")
        self.state = torch.zeros(x.shape)
        return torch.tanh(x * self.gain)


def _remembering(m: Any, x: Tensor) -> Tensor:
    m.inner.state = None
    return m.out(m.inner(m.one(x)))


def _two_modules_one_weight() -> Case:
    model = graph(
        lambda m, x: m.out(m.two(torch.tanh(m.one(x)))),
        one=nn.Linear(3, 3), two=nn.Linear(3, 3), out=nn.Linear(3, 2),
    )  # fmt: skip
    model.two.weight = model.one.weight
    return Case(model, normal(5, 3))


def _one_module_two_places() -> Case:
    shared = nn.Linear(3, 3)
    blocks = [nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Linear(3, 3), shared)]
    return Case(randomised(nn.Sequential(*blocks, nn.Linear(3, 2))), normal(5, 3))


def _hugging_face() -> Case:
    def call(m: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        words = m.words(input_ids) * attention_mask.unsqueeze(-1)
        return SimpleNamespace(logits=m.head(words.sum(1)), loss=None)

    ids = tokens(5, 4)
    mask = (torch.arange(4) < torch.tensor([1, 4, 2, 3, 4]).unsqueeze(1)).to(D)
    rows = [
        {"input_ids": ids[n], "attention_mask": mask[n], "labels": torch.tensor(n % 2)}
        for n in range(5)
    ]
    return Case(graph(call, words=nn.Embedding(5, 3), head=nn.Linear(3, 2)), rows)


def _frozen(*patterns: str) -> Case:
    model, x = example_models()["images"]
    for name, p in model.named_parameters():
        p.requires_grad_(not any(pattern in name for pattern in patterns))
    return Case(model, x)


def _in_place(m: Any, x: Tensor) -> Tensor:
    h = m.one(x)
    h.relu_()
    h = m.two(h)
    h[:, :2].mul_(3.0)
    h += 1
    return m.out(h)


def _hooked() -> Case:
    model = graph(lambda m, x: m.out(torch.tanh(m.one(x))), one=nn.Linear(3, 4), out=HEAD())
    model.one.register_forward_hook(lambda module, args, output: output * 2)
    return Case(model, normal(5, 3))


def _reparametrised(wrap: Any, out: int = 4, **options: Any) -> Case:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the old ones
        first = wrap(nn.Linear(3, out, **options))
    return Case(nn.Sequential(first, nn.Tanh(), nn.Linear(out, 2)).double().eval(), normal(5, 3))


def _unrolled(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 4)
    for step in x.unbind(1):
        h = m.cell(step, h)
    return m.out(h)


def _frames(m: Any, x: Tensor) -> Tensor:
    h = m.norm(torch.tanh(m.conv(x.flatten(0, 1))))
    return m.out(h.mean((2, 3)).view(len(x), -1, 4).mean(1))


def _functional(m: Any, x: Tensor) -> Tensor:
    doubled = {"weight": m.one.weight * 2, "bias": m.one.bias}
    return m.out(torch.tanh(functional_call(m.one, doubled, (x,))))


HEAD = partial(nn.Linear, 4, 2)
# Name → (the function of the parts, the parts by name, made anew each time, and the inputs).
GRAPHS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], Tensor]] = {
    "frames": (
        _frames, lambda: dict(conv=nn.Conv2d(1, 4, 2), norm=nn.GroupNorm(2, 4), out=HEAD()),
        normal(5, 3, 1, 3, 3)),
    "class_token": (
        _class_token,  # and positions, as a vision transformer's plain parameters
        lambda: dict(token=nn.Parameter(torch.randn(1, 1, 4)), patch=nn.Linear(3, 4),
                     places=nn.Parameter(torch.randn(1, 4, 4)), head=HEAD(),
                     layer=nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)),
        normal(5, 3, 3)),
    "called_twice": (
        lambda m, x: m.out(m.one(torch.tanh(m.one(x)))),
        lambda: dict(one=nn.Linear(3, 3), out=nn.Linear(3, 2)), normal(5, 3)),
    "state_between_calls": (
        _remembering, lambda: dict(one=nn.Linear(3, 4), inner=Remembering(), out=HEAD()),
        normal(5, 3)),
    "tied_transposed": (
        lambda m, x: F.linear(torch.tanh(m.one(x)), m.one.weight.t()),
        lambda: dict(one=nn.Linear(3, 4)), normal(5, 3)),
    "functional_call_inside": (
        _functional, lambda: dict(one=nn.Linear(3, 4), out=HEAD()), normal(5, 3)),
    "weights_from_a_network": (
        lambda m, x: torch.einsum("bi,io->bo", x, m.hyper(m.code).view(3, 2)),
        lambda: dict(hyper=nn.Linear(2, 6), code=nn.Parameter(torch.randn(2))), normal(5, 3)),
    "layer_on_a_shared_table": (
        lambda m, x: m.out(torch.tanh(m.one(x) + m.two(m.table)).mean(1)),
        lambda: dict(one=nn.Linear(3, 4), two=nn.Linear(2, 4), out=HEAD(),
                     table=nn.Parameter(torch.randn(5, 2))),
        normal(5, 5, 3)),
    "attention_keys_with_bias": (  # whose gradient is nought but rounding
        lambda m, x: (torch.softmax(m.q(x) @ m.k(x).mT, -1) @ m.v(x)).mean(1),
        lambda: dict(q=nn.Linear(3, 4), k=nn.Linear(3, 4), v=nn.Linear(3, 2)), normal(5, 4, 3)),
    "unrolled_cell": (_unrolled, lambda: dict(cell=nn.GRUCell(3, 4), out=HEAD()), normal(5, 3, 3)),
    "in_place": (
        _in_place, lambda: dict(one=nn.Linear(3, 4), two=nn.Linear(4, 4), out=HEAD()),
        normal(5, 3)),
    "unused": (
        lambda m, x: m.out(x), lambda: dict(idle=nn.Linear(3, 3), out=nn.Linear(3, 2)),
        normal(5, 3)),
    "dead_on_the_probe": (
        lambda m, x: m.out(F.relu(m.one(x) * (x > 5))),
        lambda: dict(one=nn.Linear(3, 3), out=nn.Linear(3, 2)),
        normal(5, 3) + torch.tensor([0.0, 9.0, 0.0, 9.0, 0.0], dtype=D).unsqueeze(1)),
    "single_output": (
        lambda m, x: m.one(x).squeeze(-1), lambda: dict(one=nn.Linear(3, 1)), normal(5, 3)),
}  # fmt: skip


def _of_graph(call: Callable[..., Any], parts: Callable[[], dict[str, Any]], x: Tensor) -> Case:
    return Case(graph(call, **parts()), x.clone())


MIXED = ("mlp", "images", "volumes", "words_tied", "words", "functional", "recurrent")
CASES: dict[str, Callable[[], Case]] = {
    **{name: lambda name=name: Case(*example_models()[name]) for name in MIXED},
    **LAYERS,
    **{f"positions_{c}_{t}": lambda t=t, c=c: _position_table(t, c)
       for t, c in [(1, "plain"), (3, "plain"), (4, "plain"), (6, "plain"), (7, "plain"),
                    (5, "row"), (5, "repeat")]},
    **{f"sequence_first_{t}": lambda t=t: _sequence_first(t, False) for t in (1, 2, 3, 7)},
    **{f"sequence_first_gru_{t}": lambda t=t: _sequence_first(t, True) for t in (1, 3)},
    **{f"flattened_{t}": lambda t=t: _flattened(t) for t in (1, 2, 3)},
    **{name: lambda name=name: _of_graph(*GRAPHS[name]) for name in GRAPHS},
    "flattened_time_major": lambda: _flattened(4, time_major=True),
    "experts": lambda: _routed([0.5, -1, 2, -1, 0.5, 2, -2]),
    "experts_unseen_by_the_probe": lambda: _routed([-1, -2, 0.5, -1, 2, 2, -1]),
    "parameter_lists": lambda: Case(_lists(), normal(5, 3)),
    "parameter_lists_inside": lambda: Case(
        randomised(nn.Sequential(nn.Linear(3, 3), _lists())), normal(5, 3)),
    "forward_never_called": lambda: Case(
        graph(None, first=nn.Linear(3, 4), head=HEAD(), gain=nn.Parameter(torch.ones(4))),
        normal(5, 3), _encoder),
    "weight_norm": lambda: _reparametrised(par.weight_norm),
    "weight_norm_square": lambda: _reparametrised(par.weight_norm, 3, bias=False),
    "orthogonal": lambda: _reparametrised(par.orthogonal),
    "spectral_norm": lambda: _reparametrised(par.spectral_norm),
    "old_weight_norm": lambda: _reparametrised(weight_norm),
    "old_spectral_norm": lambda: _reparametrised(spectral_norm),
    "two_modules_one_weight": _two_modules_one_weight,
    "one_module_two_places": _one_module_two_places,
    "hugging_face": _hugging_face,
    "in_place_on_the_input": lambda: Case(
        randomised(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 4), HEAD())),
        normal(5, 3)),
    "hooked_by_the_user": _hooked,
    "frozen_first_layers": lambda: _frozen("c1", "n1"),
    "frozen_weights": lambda: _frozen("weight"),
    "frozen_biases": lambda: _frozen("bias"),
    "model_is_a_layer": lambda: Case(randomised(nn.Linear(3, 2)), normal(5, 3)),
    "square": lambda: Case(randomised(nn.Linear(3, 3)), normal(3, 3)),
    "one_example": lambda: Case(
        randomised(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))), normal(1, 3)),
    "one_example_sequence_first": lambda: Case(_sequence_first(2, True).model, normal(1, 2, 3)),
    "two_examples": lambda: Case(_sequence_first(2, False).model, normal(2, 2, 3)),
}  # fmt: skip
