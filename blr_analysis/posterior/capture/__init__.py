"""Where a posterior comes from: a live optimizer, a recorder, or what a training run saved.

The precision S of q(θ) = N(m, S⁻¹), entry by entry:

* IVON, VOGN, OGN, Vadam, Vprop, bSAM: S = ess·(ĥ + weight_decay). ĥ is h without its start,
  (h − β₂ᵗ h₀) / (1 − β₂ᵗ). Where IVON's ĥ is too noisy, it is B times the mean of squared gradients
  that the optimizer stores beside it: :mod:`blr_analysis.posterior.capture.learned`. (During
  training weights are drawn with the start in h: ``optimizer.sampled_params()``.)
* second moments (Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad): S = N·√v̂ + δ by default, or
  N·B·v̂ + δ with ``scaling="squared"``. v̂ is the bias-corrected mean of squared gradients of the
  minibatch-MEAN loss, N the number of training examples, B the batch size.

Sources: Shen et al., ICML 2024 (IVON); Khan & Rue, "The Bayesian Learning Rule", section 4.2, and
Nickl et al., NeurIPS 2023 (the square root). Near a minimum E[v] = F/B, F the average squared
gradient of one example, which is what ``"squared"`` undoes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from blr_analysis.errors import OptimizerError
from blr_analysis.posterior.capture.assemble import HALF_REASON as HALF_REASON
from blr_analysis.posterior.capture.assemble import Captured, Slot, assemble, tied_names
from blr_analysis.posterior.capture.checkpoints import from_checkpoint as from_checkpoint
from blr_analysis.posterior.capture.readers import is_flat, reader_of, split_flat
from blr_analysis.posterior.capture.scale import TrainingFacts
from blr_analysis.posterior.prior import Prior, n_data_of
from blr_analysis.posterior.prior_choice import by_evidence, chosen_prior
from blr_analysis.posterior.recorder import KroneckerRecorder
from blr_analysis.ranks import divided, whole


def from_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    *,
    facts: TrainingFacts | None = None,
    gather: bool = True,
    **options: Any,
) -> Captured:
    """The posterior that a trained model's optimizer holds.

    The mean is the model's present weights, so call this outside of ``sampled_params``, where the
    weights are a sample.
    Frozen parameters are not in the result, and neither are trainable ones that the optimizer does
    not train (the record's ``not_in_optimizer`` names them). A parameter that never got a gradient
    has the prior precision alone (``never_updated``).

    Args:
        optimizer: after training: IVON (what is said of IVON here holds for VOGN, OGN, Vadam, Vprop
            and BSAM as well, and for the IVON of ivon-opt), or torch's Adam, AdamW (with
            ``amsgrad``, v̂ is read, not its maximum), NAdam, RAdam, RMSprop (with ``centered``,
            E[g²] is read) or Adagrad.
        model: the model whose parameters it trained.
        n_data: N, the number of training examples. IVON has it as its ``ess``. Another number is
            refused, unless ``scaling="ess"`` says that ``ess`` differs from N on purpose (a
            tempered posterior). All others need ``n_data``.
        prior_precision: δ of the objective Σᵢ ℓᵢ + (δ/2)‖θ‖². IVON has it, as
            ``ess * weight_decay``, and refuses another. For the others it is a number, or one per
            parameter name. An L2 penalty ``weight_decay`` on the mean loss is
            δ = n_data·weight_decay (for C outputs C times that, see ``tokens``). None: the penalty
            of the training, if there was one (torch's Adam and RMSprop have one; AdamW's decoupled
            decay is none). Else δ is a guess from the weights and the diagonal by the evidence
            (:mod:`blr_analysis.posterior.prior_choice`), because an optimizer's state has no
            gradient of all the data. ``record["prior_choice"]`` says which.
        scaling: ``"sqrt"`` or ``"squared"``, see above; for IVON only ``"ess"`` has an effect.
        batch_size: B, for ``scaling="squared"`` and for IVON's squared gradients: the examples of a
            step, with gradient accumulation (tokens, if the loss was averaged over tokens). None:
            IVON's own ``batch_size``, or an estimate from the sum of h.
        tokens: T, the number of terms of the mean loss, where it differs from the number of
            examples: for sequences all tokens that counted in training, for C outputs with a loss
            each (``MSELoss()``, ``BCEWithLogitsLoss()``) N·C. Then S = T·√v̂ + δ and
            δ = T·weight_decay, or IVON's ess is T. n_data stays the number of examples.
        initial: θ₀, the prior's mean: the state dict of the first weights, or of the base model of
            a fine-tune; None: 0. IVON's prior has the mean 0, or is its own ``prior=``.
        bare: whether a prior that the optimizer does not know is left out of S, for files to merge
            models with. S is then the data's part and may be 0; ``prior_precision`` is optional,
            and only recorded.
        facts: all arguments from ``n_data`` to ``bare`` as one value, in their place.
        gather: for a model that ``fully_shard`` divides, whether every process gets whole tensors;
            else each gets its rows, for :func:`blr_analysis.posterior.write_captured`.

    Raises:
        OptimizerError: the optimizer has no precision (SGD), has not stepped, or trained another
            model; ``n_data`` is missing, or an argument contradicts the optimizer.
        PosteriorError: ``initial`` is of another model; no δ can be found; a second moment or a
            precision is negative, zero or not finite.
        ModelError: the weights are not finite.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> model(torch.ones(5, 2)).mean().backward()     # gradient: 1 everywhere
        >>> optimizer.step()
        >>> captured = from_optimizer(optimizer, model, n_data=100, prior_precision=3.0)
        >>> captured.precision["weight"].round()
        tensor([[103., 103.]])
    """
    facts = facts or TrainingFacts(**options)
    optimizer = unwrap(optimizer)
    reader = reader_of(optimizer)
    if getattr(optimizer, "_open", None) is not None:
        raise OptimizerError(
            "inside sampled_params the weights are a sample: call this after the block"
        )
    divided(model)
    slots = _slots(optimizer, model, reader.key, gather)
    kind = type(optimizer)
    record = {"source": "optimizer", "optimizer": f"{kind.__module__}.{kind.__qualname__}"}
    return assemble(slots, reader, model, facts, record)


def _slots(
    optimizer: torch.optim.Optimizer, model: nn.Module, key: str, gather: bool
) -> list[Slot]:
    """Each trainable parameter of the optimizer with its value, its state and its group.

    Args:
        key: of the estimate in the state, which is gathered as the parameter is.
        gather: see :func:`from_optimizer`.
    """
    gathered = whole if gather else torch.Tensor.detach
    slots = []
    names_by_group = parameter_order(optimizer, model)
    for group, names in zip(optimizer.param_groups, names_by_group, strict=True):
        states = _states(optimizer, group)
        for parameter, name, state in zip(group["params"], names, states, strict=True):
            if not parameter.requires_grad:
                continue
            for entry in (key, "squares"):
                if entry in state:
                    state[entry] = gathered(state[entry])
            slots.append(Slot(name, gathered(parameter.detach()), state, group))
    return slots


def _states(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[dict[str, Any]]:
    """A copy of the optimizer's state of each parameter of a group."""
    parameters = group["params"]
    if is_flat(group):
        shapes = [p.shape for p in parameters]
        return split_flat(group, shapes, getattr(optimizer, "current_step", None))
    return [dict(optimizer.state.get(p, {})) for p in parameters]


def from_recorder(
    recorder: KroneckerRecorder, model: nn.Module, *, facts: TrainingFacts
) -> Captured:
    """The posterior of the factors that a recorder collected while a model trained.

    See :meth:`blr_analysis.Posterior.from_recorder`.
    """
    n_data = n_data_of(facts.n_data)
    form = recorder.structure(model, n_data)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    mean = {name: p.detach().clone() for name, p in trainable.items()}
    delta = facts.prior_precision
    choice: dict[str, Any] = {}
    gradient = recorder.gradient
    if delta is None and gradient is None:
        delta, choice = by_evidence(form, mean, facts.initial)
    elif delta is None and gradient is not None:
        gradient_of_all_data = {name: n_data * g for name, g in gradient.items()}
        gap = Prior({}).around(facts.initial, mean).gap(mean)
        delta, rule = chosen_prior(form, gap, gradient_of_all_data)
        choice = {"prior_choice": {"delta": delta, **rule}}
    prior = Prior.read(delta, form.shapes, positive=True)
    record = {
        "kind": "kron_recorded",
        "source": "recorder",
        "definition": "S = N * mean of a a^T x mean of d d^T + diag(prior_precision)",
        "labels": recorder.labels_used,
        "recorded": recorder.recorded,
        "passes": recorder.passes,
        "beta2": recorder.beta2,
        "tied": tied_names(model),
        **choice,
    }
    return Captured(mean, form.plus_prior(prior), prior, n_data, record)


def parameter_order(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """The parameters' names, group by group, in the optimizer's order.

    Raises:
        OptimizerError: it has parameters that are not the model's.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    groups = unwrap(optimizer).param_groups
    shapes = {id(p): tuple(p.shape) for group in groups for p in group["params"]}
    foreign = [shape for key, shape in shapes.items() if key not in names]
    if foreign:
        raise OptimizerError(
            f"{len(foreign)} of the optimizer's {len(shapes)} parameters are not the model's, of "
            f"shapes {foreign[:8]}: pass the model that it trained"
        )
    return [[names[id(p)] for p in group["params"]] for group in groups]


def unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside a wrapper such as accelerate's or Lightning's."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise OptimizerError(f"expected an optimizer that has trained, not {kind}: train first")
    return optimizer
