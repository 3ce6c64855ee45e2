"""Products of the layers' factored gradients with r stacked vectors, both ways.

    products   T_ick = ⟨G_ic, U_k⟩             J_i Uᵀ, ``[B, K, r]``
    combined   W_k = Σ_i Σ_c t_ick G_ic        Σ_i J_iᵀ T_i, ``[r, *shape]`` by name

``stack`` holds U by parameter name, ``[r, *shape]``. No P-vector of an example is formed where a
layer is a matrix product: ⟨Σ_t d_ct a_tᵀ, U_k⟩ = Σ_t d_ctᵀ (U_k a_t).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from blr_analysis.backprop.outer import Outer
from blr_analysis.backprop.terms import Dense, Rows, Term

Tree = dict[str, Tensor]
HELD = 2**21  # numbers of an intermediate result: rows of the stack are taken in slices


def products(
    terms: Sequence[Term],
    stack: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    scale: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """⟨G_ic, s ∘ U_k⟩ summed over the layers, ``[B, K, r]``, computed in ``dtype``.

    ``scale`` s is one number per weight, by name. Parameters of the stack that no term has count
    as zero gradients.
    """
    some = next(iter(stack.values()))
    found = some.new_zeros(_examples(terms[0]), columns_of(terms[0]), len(some), dtype=dtype)
    for term in terms:
        term = cast(_readable(term, len(some)), dtype)
        for rows in _slices(term, stack):
            part = {n: stack[n][rows].to(dtype) for n in term.names}
            if scale is not None:
                part = {n: u * scale[n].to(dtype) for n, u in part.items()}
            found[..., rows] += _products(term, part)
    return found


def combined(terms: Sequence[Term], weights: Tensor, into: Tree) -> None:
    """Add Σ_i Σ_c t_ick G_ic to ``into`` (``[r, *shape]`` by name) for t ``[B, K, r]``."""
    for term in terms:
        term = cast(_readable(term, weights.shape[-1]), weights.dtype)
        for rows in _slices(term, into):
            for name, value in _combined(term, weights[..., rows]).items():
                into[name][rows] += value


def pieces(terms: Sequence[Term], size: int) -> Iterator[list[Term]]:
    """The same terms for at most ``size`` examples at a time."""
    examples = _examples(terms[0])
    if examples <= size:
        yield list(terms)
        return
    for start in range(0, examples, size):
        yield [_part(term, slice(start, start + size)) for term in terms]


def cast(term: Term, dtype: torch.dtype) -> Term:
    """The term with its numbers in another precision."""
    if isinstance(term, Outer):
        return replace(term, inputs=term.inputs.to(dtype), grads=[d.to(dtype) for d in term.grads])
    if isinstance(term, Rows):
        return replace(term, grads=[d.to(dtype) for d in term.grads])
    return Dense({n: g.to(dtype) for n, g in term.jacobian().items()})


def _readable(term: Term, r: int) -> Term:
    """The term, or its gradients as they are where that multiplies less."""
    if isinstance(term, Outer):
        t, i, k = term.positions, term.inputs.shape[-1], len(term.grads)
        if term.weight is None or t * (i + k) > k * i + k * t * i / max(r, 1):
            return Dense(term.jacobian())
    return term


def columns_of(term: Term) -> int:
    """K, how many gradients each example has."""
    if isinstance(term, (Outer, Rows)):
        return len(term.grads)
    return next(iter(term.jacobian().values())).shape[1]


def _examples(term: Term) -> int:
    if isinstance(term, Outer):
        return len(term.inputs)
    if isinstance(term, Rows):
        return len(term.ids)
    return len(next(iter(term.jacobian().values())))


def _part(term: Term, chosen: slice) -> Term:
    if isinstance(term, Outer):
        grads = [d[chosen] for d in term.grads]
        return replace(term, inputs=term.inputs[chosen], grads=grads)
    if isinstance(term, Rows):
        return replace(term, ids=term.ids[chosen], grads=[d[chosen] for d in term.grads])
    return Dense({n: g[chosen] for n, g in term.jacobian().items()})


def _slices(term: Term, stack: Mapping[str, Tensor]) -> Iterator[slice]:
    """Rows of the stack such that nothing made of them is large."""
    if isinstance(term, Outer):
        g, o, i = term.layout.groups, term.layout.rows, term.layout.columns
        each = g * o * max(len(term.inputs) * term.positions, i)
    elif isinstance(term, Rows):
        each = max(term.grads[0].numel(), stack[term.name][0].numel())
    else:
        each = max(stack[n][0].numel() for n in term.names)
    r = len(stack[term.names[0]])
    size = max(1, HELD // max(1, each))
    for start in range(0, r, size):
        yield slice(start, min(r, start + size))


def _products(term: Term, stack: Tree) -> Tensor:
    if isinstance(term, Outer):
        assert term.weight is not None
        b, g, t, i = term.inputs.shape
        matrices = term.layout.matrix(stack[term.weight])  # [r, g, O, I]
        r, _, o, _ = matrices.shape
        a = term.inputs.transpose(0, 1).reshape(g, b * t, i)
        x = a @ matrices.transpose(0, 1).reshape(g, r * o, i).mT
        if term.bias is not None:
            x += stack[term.bias].view(r, g, o).transpose(0, 1).reshape(g, 1, r * o)
        return torch.einsum("bgkto,gbtro->bkr", term.stacked(), x.view(g, b, t, r, o))
    if isinstance(term, Rows):
        d = torch.stack(term.grads, dim=1)
        return torch.einsum("bkto,rbto->bkr", d, stack[term.name][:, term.ids])
    shares = [
        columns.reshape(*columns.shape[:2], -1) @ stack[n].reshape(len(stack[n]), -1).mT
        for n, columns in term.jacobian().items()
    ]
    return torch.stack(shares).sum(0)


def _combined(term: Term, weights: Tensor) -> Tree:
    r = weights.shape[-1]
    if isinstance(term, Outer):
        assert term.weight is not None
        b, g, t, i = term.inputs.shape
        d = torch.einsum("bkr,bgkto->gbtro", weights, term.stacked())
        o = d.shape[-1]
        a = term.inputs.transpose(0, 1).reshape(g, b * t, i)
        matrices = (d.reshape(g, b * t, r * o).mT @ a).view(g, r, o, i).transpose(0, 1)
        found = {term.weight: term.layout.parameter(matrices)}
        if term.bias is not None:
            found[term.bias] = d.sum((1, 2)).transpose(0, 1).reshape(r, g * o)
        return found
    if isinstance(term, Rows):
        d = torch.einsum("bkr,bkto->rbto", weights, torch.stack(term.grads, dim=1))
        table = d.new_zeros(r, *term.shape)
        return {term.name: table.index_add_(1, term.ids.flatten(), d.flatten(1, 2))}
    flat = weights.flatten(0, 1).mT
    return {
        n: (flat @ columns.reshape(flat.shape[1], -1)).view(r, *columns.shape[2:])
        for n, columns in term.jacobian().items()
    }
