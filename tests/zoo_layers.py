"""Tiny models around one kind of layer each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import HFConv1D
from parts import Case, graph, normal, tokens
from torch import Tensor, nn


def _convolution(kind: type[nn.Module], shape: tuple[int, ...], **options: Any) -> Case:
    def call(m: Any, x: Tensor) -> Tensor:
        return m.out(torch.tanh(m.conv(x)).flatten(2).mean(-1))

    conv = kind(shape[1], 4, **options)
    return Case(graph(call, conv=conv, out=nn.Linear(4, 2)), normal(*shape))


def _normed(norm: nn.Module, *shape: int) -> Case:
    def call(m: Any, x: Tensor) -> Tensor:
        return m.out(torch.tanh(m.norm(m.conv(x))).flatten(2).mean(-1))

    return Case(
        graph(call, conv=nn.Conv2d(2, 4, 2), norm=norm, out=nn.Linear(4, 2)), normal(*shape)
    )


def _channels(norm: nn.Module, *shape: int) -> Case:
    def call(m: Any, x: Tensor) -> Tensor:
        x = torch.tanh(m.norm(x))
        return m.out(x.flatten(2).mean(-1) if x.ndim > 2 else x)

    return Case(graph(call, norm=norm, out=nn.Linear(shape[1], 2)), normal(*shape))


def _last_step(layer: nn.Module, width: int, *shape: int) -> Case:
    def call(m: Any, x: Tensor) -> Tensor:
        return m.out(m.layer(x)[0][:, -1])

    return Case(graph(call, layer=layer, out=nn.Linear(width, 2)), normal(*shape))


def _pooled(layer: nn.Module, *shape: int, width: int = 4) -> Case:
    def call(m: Any, x: Tensor) -> Tensor:
        return m.out(m.layer(x).mean(1))

    return Case(graph(call, layer=layer, out=nn.Linear(width, 2)), normal(*shape))


def layers() -> dict[str, Callable[[], Case]]:
    """One kind of layer each."""
    c1, c2, c3 = nn.Conv1d, nn.Conv2d, nn.Conv3d
    return {
        "conv1d": lambda: _convolution(c1, (5, 2, 9), kernel_size=3, stride=2, dilation=2),
        "conv1d_same_circular": lambda: _convolution(
            c1, (5, 2, 7), kernel_size=4, padding="same", padding_mode="circular"
        ),
        "conv1d_depthwise": lambda: _convolution(c1, (5, 2, 6), kernel_size=2, groups=2, padding=3),
        "conv1d_pointwise": lambda: _convolution(c1, (5, 3, 4), kernel_size=1, bias=False),
        "conv2d_strided": lambda: _convolution(
            c2, (5, 2, 7, 6), kernel_size=(3, 2), stride=(2, 3), padding=(1, 2), dilation=(2, 1)
        ),
        "conv2d_groups_reflect": lambda: _convolution(
            c2, (5, 4, 5, 5), kernel_size=3, padding=2, groups=2, padding_mode="reflect"
        ),
        "conv2d_replicate": lambda: _convolution(
            c2, (5, 2, 4, 5), kernel_size=2, padding=(1, 0), padding_mode="replicate", bias=False
        ),
        "conv2d_one_position": lambda: _convolution(c2, (5, 2, 3, 3), kernel_size=3),
        "conv3d": lambda: _convolution(
            c3,
            (5, 2, 3, 4, 4),
            kernel_size=(2, 1, 3),
            stride=(1, 2, 1),
            padding=(1, 0, 2),
            dilation=(2, 1, 1),
            groups=2,
        ),
        "conv3d_zeros_same": lambda: _convolution(
            c3, (5, 1, 2, 3, 2), kernel_size=2, padding="same"
        ),
        "conv_transpose1d": lambda: _convolution(
            nn.ConvTranspose1d, (5, 2, 4), kernel_size=3, stride=2
        ),
        "conv_transpose2d": lambda: _convolution(
            nn.ConvTranspose2d, (5, 2, 3, 3), kernel_size=2, groups=2
        ),
        "layernorm_two_dims": lambda: _normed(nn.LayerNorm((3, 3)), 5, 2, 4, 4),
        "layernorm_all_dims_no_bias": lambda: _normed(
            nn.LayerNorm((4, 3, 3), bias=False), 5, 2, 4, 4
        ),
        "layernorm_no_affine": lambda: _normed(
            nn.LayerNorm(3, elementwise_affine=False), 5, 2, 4, 4
        ),
        "rmsnorm_two_dims": lambda: _normed(nn.RMSNorm((3, 3), eps=1e-3), 5, 2, 4, 4),
        "rmsnorm_no_affine": lambda: _normed(nn.RMSNorm(3, elementwise_affine=False), 5, 2, 4, 4),
        "groupnorm": lambda: _normed(nn.GroupNorm(2, 4), 5, 2, 4, 4),
        "groupnorm_flat": lambda: _channels(nn.GroupNorm(2, 4), 5, 4),
        "groupnorm_no_affine": lambda: _normed(nn.GroupNorm(4, 4, affine=False), 5, 2, 4, 4),
        "batchnorm1d": lambda: _channels(nn.BatchNorm1d(4), 5, 4),
        "batchnorm1d_sequence": lambda: _channels(nn.BatchNorm1d(3), 5, 3, 4),
        "batchnorm2d": lambda: _channels(nn.BatchNorm2d(3), 5, 3, 2, 3),
        "batchnorm2d_no_affine": lambda: _channels(nn.BatchNorm2d(3, affine=False), 5, 3, 2, 3),
        "batchnorm3d": lambda: _channels(nn.BatchNorm3d(3), 5, 3, 2, 1, 2),
        "instancenorm": lambda: _channels(nn.InstanceNorm2d(3, affine=True), 5, 3, 2, 3),
        "prelu": lambda: _channels(nn.PReLU(3), 5, 3, 2, 2),
        "embedding_sparse": lambda: Case(
            graph(
                lambda m, i: m.out(torch.tanh(m.words(i)).sum(1)),
                words=nn.Embedding(5, 3, sparse=True),
                out=nn.Linear(3, 2),
            ),
            tokens(5, 4),
        ),
        "embedding_padding": lambda: Case(
            graph(
                lambda m, i: m.out(torch.tanh(m.words(i)).sum(1)),
                words=nn.Embedding(5, 3, padding_idx=-1),
                out=nn.Linear(3, 2),
            ),
            tokens(5, 6),
        ),
        "embedding_bag": lambda: Case(
            graph(
                lambda m, i: m.out(m.bag(i)),
                bag=nn.EmbeddingBag(5, 3, mode="mean", padding_idx=0),
                out=nn.Linear(3, 2),
            ),
            tokens(5, 4),
        ),
        "embedding_bag_offsets": lambda: Case(
            graph(
                lambda m, i: m.out(
                    m.bag(i.flatten(), torch.arange(len(i), device=i.device) * i.shape[1])
                ),
                bag=nn.EmbeddingBag(5, 3, mode="sum"),
                out=nn.Linear(3, 2),
            ),
            tokens(5, 4),
        ),
        "conv1d_of_hugging_face": lambda: _pooled(
            nn.Sequential(HFConv1D(6, 3), nn.Tanh(), HFConv1D(4, 6)), 5, 4, 3
        ),
        "bilinear": lambda: Case(
            graph(lambda m, x: m.layer(x[:, :3], torch.tanh(x)), layer=nn.Bilinear(3, 4, 2)),
            normal(5, 4),
        ),
        "lstm": lambda: _last_step(
            nn.LSTM(3, 2, num_layers=2, batch_first=True, bidirectional=True), 4, 5, 4, 3
        ),
        "lstm_projected": lambda: _last_step(
            nn.LSTM(3, 4, num_layers=2, proj_size=2, batch_first=True), 2, 5, 4, 3
        ),
        "lstm_with_states": lambda: Case(
            graph(
                lambda m, x: m.out(
                    m.layer(x[:, :3], (x[None, :, 3].tanh(), x[None, :, 0].tanh()))[1][1][0]
                ),
                layer=nn.LSTM(4, 4, batch_first=True, bias=False),
                out=nn.Linear(4, 2),
            ),
            normal(5, 4, 4),
        ),
        "gru": lambda: _last_step(nn.GRU(3, 4, batch_first=True), 4, 5, 3, 3),
        "rnn_relu": lambda: _last_step(
            nn.RNN(3, 4, nonlinearity="relu", bidirectional=True, batch_first=True), 8, 5, 3, 3
        ),
        "attention_masked": lambda: Case(
            graph(
                lambda m, x: m.out(
                    m.layer(
                        x,
                        x,
                        x,
                        attn_mask=torch.ones(3, 3, dtype=torch.bool, device=x.device).triu(1),
                        need_weights=False,
                    )[0].mean(1)
                ),
                layer=nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=False),
                out=nn.Linear(4, 2),
            ),
            normal(5, 3, 4),
        ),
        "attention_own_kv": lambda: Case(
            graph(
                lambda m, x: m.out(m.layer(x, x[..., :2], x[..., 2:])[0].mean(1)),
                layer=nn.MultiheadAttention(
                    4, 2, batch_first=True, kdim=2, vdim=2, add_bias_kv=True
                ),
                out=nn.Linear(4, 2),
            ),
            normal(5, 3, 4),
        ),
        "transformer_layer": lambda: _pooled(
            nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, norm_first=True), 5, 3, 4
        ),
        "transformer_two_layers": lambda: _pooled(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), 2), 5, 4, 4
        ),
    }
