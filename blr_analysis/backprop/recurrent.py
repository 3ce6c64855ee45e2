"""Recurrent layers: matrix products over time, read by the equations of their gates.

    RNN    h' = φ(z^x + z^h)
    LSTM   c' = σ(f) c + σ(i) tanh(g),  h' = σ(o) tanh(c'),  (i, f, g, o) = z^x + z^h
    GRU    n = tanh(n^x + σ(r) n^h),  h' = (1 − σ(z)) n + σ(z) h

with z^x_t = W_ih x_t + b_ih and z^h_t = W_hh h_{t−1} + b_hh. The layer is run again for the whole
chunk with those two in sight; one backward pass per column then gives their gradients, and

    G_ih = Σ_t ∂z^x_t x_tᵀ,    G_hh = Σ_t ∂z^h_t h_{t−1}ᵀ
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from blr_analysis.backprop.layers import Call, upcast
from blr_analysis.backprop.matrices import Joint, MatrixShape
from blr_analysis.backprop.outer import Outer
from blr_analysis.backprop.terms import Term

RECURRENT = (nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)


@dataclass
class StepProduct:
    """One matrix of the layer: what it was multiplied with and what came of it, step by step."""

    ends: str  # of its parameters' names: "ih_l0", "hh_l1_reverse"
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def of(self, x: Tensor, values: dict[str, Tensor]) -> Tensor:
        self.inputs.append(x.detach())
        return F.linear(x, values[f"weight_{self.ends}"], values.get(f"bias_{self.ends}"))


def _seen(z: Tensor, *products: StepProduct) -> Tensor:
    """Have the gradient at z taken, for these products."""
    z = z if z.requires_grad else z.requires_grad_()
    for product in products:
        product.outputs.append(z)
    return z


def recurrence(call: Call, grads: list[Tensor]) -> list[Term]:
    """The rule of :data:`RECURRENT`, any number of layers, both directions."""
    module: Any = call.module
    cell = isinstance(module, nn.RNNCellBase)
    if call.input_axis.shared or call.input_axis.dim != (0 if cell or module.batch_first else 1):
        raise ValueError("examples are not where the layer has them")
    plain = {a: p.detach() for a, p in module._parameters.items() if p is not None}
    values = {a: upcast(v) for a, v in {**plain, **call.values}.items()}
    given = [upcast(t.detach()) for t in tree_leaves((call.args, call.kwargs))]
    with torch.enable_grad():
        outputs, products = _run(module, values, given)
    steps = list({id(z): z for product in products for z in product.outputs}.values())
    columns = []
    for column in zip(*call.every_grad, strict=True):
        cotangents = [upcast(g) for g in column]
        at: Any = torch.autograd.grad(
            outputs, steps, cotangents, retain_graph=True, materialize_grads=True
        )
        columns.append({id(z): d for z, d in zip(steps, at, strict=True)})
    terms: list[Term] = []
    made: dict[tuple[int, ...], list[Tensor]] = {}  # two matrices may share their gradients
    for product in products:
        joint, key = _joint(call, product.ends, values), tuple(map(id, product.outputs))
        if joint.names:
            if key not in made:
                made[key] = [_positions(call, [column[z] for z in key]) for column in columns]
            terms.append(Outer(joint, _positions(call, product.inputs), made[key]))
    return terms


def _joint(call: Call, ends: str, values: dict[str, Tensor]) -> Joint:
    rows, columns = values[f"weight_{ends}"].shape
    weight, bias = (call.names.get(f"{kind}_{ends}") for kind in ("weight", "bias"))
    return Joint(weight, bias, MatrixShape(1, rows, columns, (rows, columns)))


def _positions(call: Call, steps: list[Tensor]) -> Tensor:
    """Steps ``[R, D]``, or one tensor of all ``[T, R, D]``, as ``[B, 1, T, D]``."""
    whole = steps[0].transpose(0, 1) if steps[0].ndim == 3 else torch.stack(steps, dim=1)
    return call.fold(whole.unsqueeze(1))


def _run(
    module: Any, values: dict[str, Tensor], given: list[Tensor]
) -> tuple[list[Tensor], list[StepProduct]]:
    """All layers and directions, or a cell's one step; outputs as the module returns them."""
    x, *starts = given
    cell = isinstance(module, nn.RNNCellBase)
    if x.ndim != 3 - cell:
        raise ValueError("no batch of sequences")
    layers, ways = (1, 1) if cell else (module.num_layers, 1 + module.bidirectional)
    projected = 0 if cell else module.proj_size
    turned = not cell and module.batch_first
    x = x.unsqueeze(0) if cell else x.transpose(0, 1) if turned else x
    if not starts:
        sizes = [projected or module.hidden_size]
        sizes += [module.hidden_size] * isinstance(module, nn.LSTM | nn.LSTMCell)
        starts = [x.new_zeros(layers * ways, x.shape[1], s) for s in sizes]
    elif cell:
        starts = [s.unsqueeze(0) for s in starts]
    products: list[StepProduct] = []
    last: list[list[Tensor]] = [[] for _ in starts]
    for layer in range(layers):
        directions = []
        for way in range(ways):
            ends = "" if cell else f"_l{layer}" + "_reverse" * way
            ih, hh, hr = (StepProduct(f"{k}{ends}") for k in ("ih", "hh", "hr"))
            state, seen = [s[layer * ways + way] for s in starts], []
            for zx in ih.of(x.flip(0) if way else x, values).unbind():
                state = _step(module, zx, state, ih, hh, values)
                if projected:
                    state[0] = _seen(hr.of(state[0], values), hr)
                seen.append(state[0])
            directions.append(torch.stack(seen[::-1] if way else seen))
            products += [p for p in (ih, hh, hr) if p.outputs]
            for kept, end in zip(last, state, strict=True):
                kept.append(end)
        x = torch.cat(directions, dim=-1)
    if cell:
        return [end for (end,) in last], products
    return [x.transpose(0, 1) if turned else x, *map(torch.stack, last)], products


def _step(
    module: Any,
    zx: Tensor,
    state: list[Tensor],
    ih: StepProduct,
    hh: StepProduct,
    values: dict[str, Tensor],
) -> list[Tensor]:
    """The next state, from the input's product and the last state."""
    zh = hh.of(state[0], values)
    if isinstance(module, (nn.GRU, nn.GRUCell)):
        rx, ux, nx = _seen(zx, ih).chunk(3, dim=-1)
        rh, uh, nh = _seen(zh, hh).chunk(3, dim=-1)
        n = (nx + (rx + rh).sigmoid() * nh).tanh()
        u = (ux + uh).sigmoid()
        return [n + u * (state[0] - n)]
    z = _seen(zx + zh, ih, hh)
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        i, f, g, o = z.chunk(4, dim=-1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return [o.sigmoid() * c.tanh(), c]
    return [z.tanh() if module.nonlinearity == "tanh" else z.relu()]
