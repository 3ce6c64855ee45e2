"""G_i of the layers of a recorded pass, from the gradients at their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from blr_analysis.backprop.fallback import pulled
from blr_analysis.backprop.record import Visit, leaves_of
from blr_analysis.backprop.tape import (
    Gradients,
    LayerCall,
    LayerFailed,
    Pass,
    leaves_with_gradient,
    terms_of,
    unlike_autograd,
)
from blr_analysis.backprop.terms import Term
from blr_analysis.checks import some
from blr_analysis.errors import ModelError
from blr_analysis.half import working
from blr_analysis.posterior.recorder.rows import axes_of, rows_stand_for


def scaled(gradients: Gradients, factor: float) -> Gradients:
    """The gradients times a factor, in a precision that bears it."""
    return [None if g is None else g.to(working(g.dtype)) * factor for g in gradients]


class LayerTerms:
    """G_i of the layers of a model.

    Modules without a rule are differentiated by themselves. The first time, the sum of their G_i
    is compared with the gradient of all examples at once.

    Args:
        model: the model that is recorded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._checked: set[str] = set()  # paths of modules without a rule that were compared

    @torch.no_grad()
    def of_examples(self, forward: Pass, counts: Tensor, factor: float) -> list[Term]:
        """G_i of the examples that count, ``factor`` times the gradients that came back.

        Raises:
            ModelError: a layer cannot be differentiated by itself, or its rows are not of examples.
        """
        if not bool(counts.all()):
            forward = forward.of_examples(counts.nonzero().flatten())
        calls = forward.differentiated
        gradients = [scaled(call.gradients, factor) for call in calls]
        with torch.autocast(counts.device.type, enabled=False):
            axes = partial(axes_of, forward.batch)
            try:
                terms = terms_of(self._model, calls, gradients, axes, forward.batch)
            except LayerFailed as failure:
                path = failure.unit.path
                raise ModelError(
                    f"layer {path!r} cannot be recorded: {failure}; freeze it, or use fit_laplace"
                ) from failure
            self._check_without_rule(calls, gradients, terms)
            return terms

    def of_drawn(self, forward: Pass, n_passes: int) -> list[Term]:
        """G_i of the layers that have a row for each example, or one row for each pass.

        Layers with other rows have no G_i and are skipped.

        Args:
            forward: so many passes with drawn labels, joined.
            n_passes: their number.
        """
        terms: list[Term] = []
        for batch in dict.fromkeys((forward.batch, n_passes)):
            calls = [call for call in forward.calls if rows_stand_for(call.visit, batch)]
            if batch == n_passes != forward.batch:
                calls = [call for call in calls if len(call.visit.outputs[0]) == n_passes]
            counts = torch.ones(batch, dtype=torch.bool)
            terms += self.of_examples(Pass(batch, calls), counts, factor=1.0)
        return terms

    def _check_without_rule(
        self, calls: Sequence[LayerCall], gradients: Sequence[Gradients], terms: Sequence[Term]
    ) -> None:
        """Raise :class:`ModelError` unless Σ_i G_i of modules without a rule is the gradient of
        all examples at once, when they are recorded first."""
        unchecked = [
            (call, cotangents)
            for call, cotangents in zip(calls, gradients, strict=True)
            if call.visit.unit.rule is None and call.visit.unit.path not in self._checked
        ]
        if not unchecked:
            return
        totals: dict[str, Tensor] = {}
        for call, cotangents in unchecked:
            for name, total in _gradient_of_module(call.visit, cotangents).items():
                totals[name] = totals[name] + total if name in totals else total
        outputs = [output for call, _ in unchecked for output in call.visit.outputs]
        terms_of_modules = [term for term in terms if not totals.keys().isdisjoint(term.names)]
        if names := unlike_autograd(terms_of_modules, totals, outputs):
            raise ModelError(
                f"{some(names)} cannot be recorded: their module is random or mixes examples; "
                "freeze them, or use fit_laplace"
            )
        self._checked.update(call.visit.unit.path for call, _ in unchecked)


def _gradient_of_module(visit: Visit, cotangents: Gradients) -> dict[str, Tensor]:
    """The gradient of a module's own parameters for all examples at once, by name."""
    module = visit.unit.module
    wide = {a: p.to(working(p.dtype)) for a, p in module.named_parameters()}
    leaves = leaves_of({attribute: wide[attribute] for attribute in visit.unit.names})
    with torch.enable_grad():
        output = functional_call(module, {**wide, **leaves}, visit.args, visit.kwargs)
    outputs = leaves_with_gradient(output)
    shaped = [
        torch.zeros_like(f) if cotangent is None else cotangent.to(f.dtype)
        for f, cotangent in zip(outputs, cotangents, strict=True)
    ]
    gradients = pulled(outputs, shaped, leaves, last=True)
    return dict(zip(visit.unit.names.values(), gradients, strict=True))
