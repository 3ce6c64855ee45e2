"""Recurrent layers: matrix products over time, read by the equations of their gates.

    RNN    h' = φ(z^x + z^h)
    LSTM   c' = σ(f) c + σ(i) tanh(g),  h' = σ(o) tanh(c'),  (i, f, g, o) = z^x + z^h
    GRU    h' = (1 − σ(u)) n + σ(u) h,  n = tanh(n^x + σ(r) n^h),
           (r^x, u^x, n^x) = z^x,  (r^h, u^h, n^h) = z^h,  r = r^x + r^h,  u = u^x + u^h

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
    """One matrix of the layer, with what it is multiplied with and what comes out, step by step.

    Attributes:
        suffix: what the names of its weight and bias end in: ``"ih_l0"``, ``"hh_l1_reverse"``.
        inputs: x of every step, or of all steps in one tensor.
        outputs: tensors at which the gradient is the gradient at W x + b, in the same order.
    """

    suffix: str
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def times(self, x: Tensor, values: dict[str, Tensor]) -> Tensor:
        """W x + b, with the layer's ``values`` by name; x is noted."""
        self.inputs.append(x.detach())
        return F.linear(x, values[f"weight_{self.suffix}"], values.get(f"bias_{self.suffix}"))


def _watched(z: Tensor, *products: StepProduct) -> Tensor:
    """Note z as an output of these products, and ask autograd for the gradient at z."""
    if not z.requires_grad:
        z.requires_grad_()
    for product in products:
        product.outputs.append(z)
    return z


def recurrence(call: Call, grads: list[Tensor]) -> list[Term]:
    """The rule for :data:`RECURRENT`, with any number of layers, in one direction or both."""
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
    grads_of: dict[tuple[int, ...], list[Tensor]] = {}  # two matrices may share their gradients
    for product in products:
        joint = _joint(call, product.suffix, values)
        if not joint.names:
            continue
        steps = tuple(map(id, product.outputs))
        if steps not in grads_of:
            grads_of[steps] = [_positions(call, [column[z] for z in steps]) for column in columns]
        terms.append(Outer(joint, _positions(call, product.inputs), grads_of[steps]))
    return terms


def _gradients_at_steps(
    call: Call, outputs: list[Tensor], products: list[StepProduct]
) -> list[dict[int, Tensor]]:
    """For every column the gradients at the products' outputs, by the ids of the outputs."""
    steps = list({id(z): z for product in products for z in product.outputs}.values())
    columns = []
    for column in zip(*call.every_grad, strict=True):
        gradients: Any = torch.autograd.grad(
            outputs, steps, [upcast(g) for g in column], retain_graph=True, materialize_grads=True
        )
        columns.append({id(z): g for z, g in zip(steps, gradients, strict=True)})
    return columns


def _joint(call: Call, suffix: str, values: dict[str, Tensor]) -> Joint:
    """The weight and the bias of one matrix, those that are analysed."""
    rows, columns = values[f"weight_{suffix}"].shape
    weight = call.names.get(f"weight_{suffix}")
    bias = call.names.get(f"bias_{suffix}")
    return Joint(weight, bias, MatrixShape(1, rows, columns, (rows, columns)))


def _positions(call: Call, steps: list[Tensor]) -> Tensor:
    """T tensors ``[R, D]`` of one step, or one tensor ``[T, R, D]`` of all, as ``[B, 1, T, D]``."""
    if steps[0].ndim == 3:
        sequences = steps[0].transpose(0, 1)
    else:
        sequences = torch.stack(steps, dim=1)
    return call.fold(sequences.unsqueeze(1))


def _run(
    module: Any, values: dict[str, Tensor], inputs: list[Tensor]
) -> tuple[list[Tensor], list[StepProduct]]:
    """Run a layer or a cell: its outputs as the module returns them, and its products.

    ``inputs``: the sequences, and the first states if the module was called with them.
    """
    x, *starts = inputs
    is_cell = isinstance(module, nn.RNNCellBase)
    if x.ndim != (2 if is_cell else 3):
        raise ValueError("no batch of sequences")
    if is_cell:
        return _run_cell(module, values, x, starts)
    return _run_layers(module, values, x, starts)


def _run_cell(
    module: Any, values: dict[str, Tensor], x: Tensor, starts: list[Tensor]
) -> tuple[list[Tensor], list[StepProduct]]:
    """:func:`_run` for one step x ``[B, I]``."""
    start = starts or [state[0] for state in _zero_states(module, 1, x)]
    cell = _Direction(module, values, "", start)
    cell.run(x.unsqueeze(0))
    return cell.state, cell.products


def _run_layers(
    module: Any, values: dict[str, Tensor], x: Tensor, starts: list[Tensor]
) -> tuple[list[Tensor], list[StepProduct]]:
    """:func:`_run` for all steps of x, all layers and both directions."""
    if module.batch_first:
        x = x.transpose(0, 1)
    reverses = ("", "_reverse") if module.bidirectional else ("",)
    if not starts:
        starts = _zero_states(module, module.num_layers * len(reverses), x[0])
    directions: list[_Direction] = []
    for layer in range(module.num_layers):
        of_layer = []
        for reverse in reverses:
            number = len(directions) + len(of_layer)
            start = [state[number] for state in starts]
            of_layer.append(_Direction(module, values, f"_l{layer}{reverse}", start))
        x = torch.cat([direction.run(x) for direction in of_layer], dim=-1)
        directions += of_layer
    last_states = zip(*(direction.state for direction in directions), strict=True)
    if module.batch_first:
        x = x.transpose(0, 1)
    products = [product for direction in directions for product in direction.products]
    return [x, *map(torch.stack, last_states)], products


def _zero_states(module: Any, n: int, x: Tensor) -> list[Tensor]:
    """States of 0 before the first step of inputs x ``[B, I]``: h, and c of an LSTM, ``[n, B, H]``
    each."""
    sizes = [getattr(module, "proj_size", 0) or module.hidden_size]
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        sizes.append(module.hidden_size)
    return [x.new_zeros(n, len(x), size) for size in sizes]


class _Direction:
    """One layer in one direction, or a cell.

    Attributes:
        state: h after the last step that was run, and c of an LSTM.
        ih, hh, hr: the products with the inputs, with h, and of an LSTM's projection, if any.
    """

    def __init__(
        self, module: Any, values: dict[str, Tensor], suffix: str, start: list[Tensor]
    ) -> None:
        self.module = module
        self.values = values
        self.is_reverse = suffix.endswith("_reverse")
        self.state = start
        self.ih = StepProduct(f"ih{suffix}")
        self.hh = StepProduct(f"hh{suffix}")
        self.hr = StepProduct(f"hr{suffix}")

    @property
    def products(self) -> list[StepProduct]:
        return [product for product in (self.ih, self.hh, self.hr) if product.outputs]

    def run(self, x: Tensor) -> Tensor:
        """Outputs ``[T, B, H]`` for inputs ``[T, B, I]``."""
        ordered = x.flip(0) if self.is_reverse else x
        outputs: list[Tensor] = []
        for zx in self.ih.times(ordered, self.values).unbind():
            self.state = self._step(zx)
            outputs.append(self.state[0])
        return torch.stack(outputs[::-1] if self.is_reverse else outputs)

    def _step(self, zx: Tensor) -> list[Tensor]:
        """The next state, from z^x of the step and the last state."""
        h = self.state[0]
        zh = self.hh.times(h, self.values)
        if isinstance(self.module, nn.GRU | nn.GRUCell):
            rx, ux, nx = _watched(zx, self.ih).chunk(3, dim=-1)
            rh, uh, nh = _watched(zh, self.hh).chunk(3, dim=-1)
            n = (nx + (rx + rh).sigmoid() * nh).tanh()
            u = (ux + uh).sigmoid()
            return [n + u * (h - n)]
        z = _watched(zx + zh, self.ih, self.hh)
        if isinstance(self.module, nn.LSTM | nn.LSTMCell):
            i, f, g, o = z.chunk(4, dim=-1)
            c = f.sigmoid() * self.state[1] + i.sigmoid() * g.tanh()
            return [self._projected(o.sigmoid() * c.tanh()), c]
        return [z.tanh() if self.module.nonlinearity == "tanh" else z.relu()]

    def _projected(self, h: Tensor) -> Tensor:
        """h itself, or its projection in an LSTM that has one."""
        if not getattr(self.module, "proj_size", 0):
            return h
        return _watched(self.hr.times(h, self.values), self.hr)
