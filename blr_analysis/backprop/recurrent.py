"""Recurrent layers: matrix products over time, read by the equations of their gates.

    RNN    h' = φ(z^x + z^h)
    LSTM   c' = σ(f) c + σ(i) tanh(g),  h' = σ(o) tanh(c'),  (i, f, g, o) = z^x + z^h
    GRU    n = tanh(n^x + σ(r) n^h),  h' = (1 − σ(z)) n + σ(z) h

with z^x_t = W_ih x_t + b_ih and z^h_t = W_hh h_{t−1} + b_hh. The layer is run again for the whole
chunk by these equations. One backward pass per column then gives the gradients at z^x and z^h, and

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
    """One matrix of the layer: its factors and its products, step by step."""

    suffix: str  # of its parameters' names: "ih_l0", "hh_l1_reverse"
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def of(self, x: Tensor, values: dict[str, Tensor]) -> Tensor:
        self.inputs.append(x.detach())
        return F.linear(x, values[f"weight_{self.suffix}"], values.get(f"bias_{self.suffix}"))


def _watched(z: Tensor, *products: StepProduct) -> Tensor:
    """Add z to these products' outputs, so that the gradient at z will be computed."""
    if not z.requires_grad:
        z.requires_grad_()
    for product in products:
        product.outputs.append(z)
    return z


def recurrence(call: Call, grads: list[Tensor]) -> list[Term]:
    """The rule of :data:`RECURRENT`, any number of layers, both directions."""
    module: Any = call.module
    has_batch_first = isinstance(module, nn.RNNCellBase) or module.batch_first
    if call.input_axis.shared or call.input_axis.dim != (0 if has_batch_first else 1):
        raise ValueError("examples are not where the layer has them")
    parameters = {name: p.detach() for name, p in module._parameters.items() if p is not None}
    values = {name: upcast(value) for name, value in (parameters | call.values).items()}
    inputs = [upcast(leaf.detach()) for leaf in tree_leaves((call.args, call.kwargs))]
    with torch.enable_grad():
        outputs, products = _run(module, values, inputs)
    columns = _gradients_at_steps(call, outputs, products)
    terms: list[Term] = []
    positions: dict[tuple[int, ...], list[Tensor]] = {}  # two matrices may share their gradients
    for product in products:
        joint = _joint(call, product.suffix, values)
        if not joint.names:
            continue
        steps = tuple(map(id, product.outputs))
        if steps not in positions:
            positions[steps] = [_positions(call, [column[z] for z in steps]) for column in columns]
        terms.append(Outer(joint, _positions(call, product.inputs), positions[steps]))
    return terms


def _gradients_at_steps(
    call: Call, outputs: list[Tensor], products: list[StepProduct]
) -> list[dict[int, Tensor]]:
    """For every column the gradients at the products' outputs, by their ids."""
    steps = list({id(z): z for product in products for z in product.outputs}.values())
    columns = []
    for column in zip(*call.every_grad, strict=True):
        gradients: Any = torch.autograd.grad(
            outputs, steps, [upcast(g) for g in column], retain_graph=True, materialize_grads=True
        )
        columns.append({id(z): g for z, g in zip(steps, gradients, strict=True)})
    return columns


def _joint(call: Call, suffix: str, values: dict[str, Tensor]) -> Joint:
    rows, columns = values[f"weight_{suffix}"].shape
    weight = call.names.get(f"weight_{suffix}")
    bias = call.names.get(f"bias_{suffix}")
    return Joint(weight, bias, MatrixShape(1, rows, columns, (rows, columns)))


def _positions(call: Call, steps: list[Tensor]) -> Tensor:
    """Steps ``[R, D]``, or one tensor of all ``[T, R, D]``, as ``[B, 1, T, D]``."""
    whole = steps[0].transpose(0, 1) if steps[0].ndim == 3 else torch.stack(steps, dim=1)
    return call.fold(whole.unsqueeze(1))


def _run(
    module: Any, values: dict[str, Tensor], inputs: list[Tensor]
) -> tuple[list[Tensor], list[StepProduct]]:
    """Outputs as the module returns them, and its products: a cell's one step, or all steps, layers
    and directions."""
    x, *starts = inputs
    is_cell = isinstance(module, nn.RNNCellBase)
    if x.ndim != (2 if is_cell else 3):
        raise ValueError("no batch of sequences")
    if is_cell:
        start = starts or [state[0] for state in _zero_states(module, 1, x)]
        cell = _Direction(module, values, "", start)
        cell.run(x.unsqueeze(0))
        return cell.state, cell.products
    if module.batch_first:
        x = x.transpose(0, 1)
    ways = 2 if module.bidirectional else 1
    starts = starts or _zero_states(module, module.num_layers * ways, x[0])
    directions = []
    for layer in range(module.num_layers):
        pair = [
            _Direction(module, values, suffix, [state[layer * ways + way] for state in starts])
            for way, suffix in enumerate([f"_l{layer}", f"_l{layer}_reverse"][:ways])
        ]
        x = torch.cat([direction.run(x) for direction in pair], dim=-1)
        directions += pair
    last = [torch.stack(states) for states in zip(*(d.state for d in directions), strict=True)]
    if module.batch_first:
        x = x.transpose(0, 1)
    return [x, *last], [product for direction in directions for product in direction.products]


def _zero_states(module: Any, n: int, x: Tensor) -> list[Tensor]:
    """States 0, ``[n, B, H]`` each, before the first step of inputs x ``[B, I]``."""
    sizes = [getattr(module, "proj_size", 0) or module.hidden_size]
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        sizes.append(module.hidden_size)
    return [x.new_zeros(n, len(x), size) for size in sizes]


class _Direction:
    """One layer in one direction, or a cell."""

    def __init__(
        self, module: Any, values: dict[str, Tensor], suffix: str, start: list[Tensor]
    ) -> None:
        self.module = module
        self.values = values
        self.is_reverse = suffix.endswith("_reverse")
        self.state = start
        self.ih = StepProduct(f"ih{suffix}")
        self.hh = StepProduct(f"hh{suffix}")
        self.hr = StepProduct(f"hr{suffix}")  # the projection, of an LSTM that has one

    @property
    def products(self) -> list[StepProduct]:
        return [product for product in (self.ih, self.hh, self.hr) if product.outputs]

    def run(self, x: Tensor) -> Tensor:
        """Outputs ``[T, B, H]`` for inputs ``[T, B, I]``."""
        outputs: list[Tensor] = []
        for zx in self.ih.of(x.flip(0) if self.is_reverse else x, self.values).unbind():
            self.state = _step(self.module, zx, self.state, self.ih, self.hh, self.values)
            if getattr(self.module, "proj_size", 0):
                self.state[0] = _watched(self.hr.of(self.state[0], self.values), self.hr)
            outputs.append(self.state[0])
        return torch.stack(outputs[::-1] if self.is_reverse else outputs)


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
        rx, ux, nx = _watched(zx, ih).chunk(3, dim=-1)
        rh, uh, nh = _watched(zh, hh).chunk(3, dim=-1)
        n = (nx + (rx + rh).sigmoid() * nh).tanh()
        u = (ux + uh).sigmoid()
        return [n + u * (state[0] - n)]
    z = _watched(zx + zh, ih, hh)
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        i, f, g, o = z.chunk(4, dim=-1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return [o.sigmoid() * c.tanh(), c]
    return [z.tanh() if module.nonlinearity == "tanh" else z.relu()]
