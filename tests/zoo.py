"""Every way of using a parameter that the engine must read exactly, as tiny models with inputs.

Here stand the kinds of layers, each read by one of a few functions; what hides from a hook or
confuses a shape is in ``zoo_uses.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import HFConv1D, example_models
from parts import Case, graph, normal, tokens
from torch import Tensor, nn
from zoo_uses import uses


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
MIXED = ("mlp", "images", "volumes", "words_tied", "words", "functional", "recurrent")
CASES: dict[str, Callable[[], Case]] = {
    **{name: lambda name=name: Case(*example_models()[name]) for name in MIXED},
    **LAYERS,
    **uses(),
}
