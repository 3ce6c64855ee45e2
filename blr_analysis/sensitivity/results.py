"""The results of analyses, one class for each analysis and for all kinds of models.

A result has one row per example (or sequence), losses in nats, and tensors on the CPU in the order
of the dataset. An attribute is None where a kind of model does not have it: a sequence has no
matrix of prediction variances, and a mixture model has no outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis import regression
from blr_analysis.backprop.loss import Evaluation
from blr_analysis.checks import instance, one_of, positive_int
from blr_analysis.errors import InputError, ModelError
from blr_analysis.likelihoods import Gaussian, Likelihood
from blr_analysis.models import unwrapped
from blr_analysis.sensitivity.chance import agreement_beyond_chance
from blr_analysis.sensitivity.corrections import CORRECTION_NAMES, leverage
from blr_analysis.sensitivity.sizes import error_size, variance_size
from blr_analysis.views import Plottable, Tabular, make_table

FAULTS = ("label", "unfamiliar", "duplicate")
NO_FAULT = "none"


@dataclass(frozen=True, kw_only=True)
class Noted:
    """A result with a ``note``: one line on why it cannot be trusted, or "". The repr shows it."""

    note: str = ""

    @property
    def _note_in_repr(self) -> str:
        return f"; {self.note}" if self.note else ""


@dataclass(frozen=True, kw_only=True)
class PerExample(Noted, Tabular):
    """A result with one row per example (or sequence), in the order of the dataset."""

    losses: Tensor
    tokens: Tensor | None = None
    metadata: Mapping[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.losses)

    @property
    def nll_per_token(self) -> float:
        """Σ losses / Σ tokens of sequences, in nats.

        Raises:
            InputError: the examples are no sequences.
        """
        return per_token(self.losses, self.tokens)

    @property
    def perplexity(self) -> float:
        """exp(Σ losses / Σ tokens) of sequences."""
        return exponential(self.nll_per_token)


@dataclass(frozen=True, kw_only=True)
class Scores(PerExample, Plottable):
    """The result of :func:`blr_analysis.sensitivity`.

    =============== ================== ======================== ================================
    attribute       of a network       of sequences             of a sum of sites
    =============== ================== ======================== ================================
    losses          ℓ_i ``[N]``        Σ over tokens ``[N]``    −log p(y_i | λ) ``[N]``
    error           e_i ``[N, C]``     ‖e_i‖₂ ``[N]``           E_q[∂ℓ_i/∂f] ``[N, 1]`` of latent
                                                                models, else None
    variance        V_i ``[N, C, C]``  tr V_i, estimated        Var_q[f_i] ``[N, 1, 1]`` of latent
                                       ``[N]``                  models, else None
    variance_error  None               its standard error       None
    deviation       ``[N]``            None                     log p(y_i|λ) − log p(y_i|λ − λ̃_i)
    self_influence  g_iᵀΣg_i ``[N]``   g_iᵀΣg_i ``[N]``         None
    outputs         f_i ``[N, C]``     None                     None
    targets         y_i                None                     y_i where there are targets
    predictions     what it answers    None                     None
    tokens          None               that count ``[N]``       None
    =============== ================== ======================== ================================

    Attributes:
        losses: in nats; for a sequence, the SUM over the tokens that count.
        error: it points from the target to the prediction.
        variance: under the posterior that includes example i; None if it was not computed, as for
            large C.
        deviation: how far the prediction would move without the example. For classification it is
            ‖softmax(f_i + V_i e_i) − softmax(f_i)‖₁, between 0 and 2; for regression ‖V_i e_i‖₂ in
            units of f; for a sum of sites the fall of the example's log-predictive, in nats, which
            is NaN where nothing was observed.
        self_influence: g_iᵀ Σ g_i = e_iᵀ V_i e_i, the first-order rise of the example's own loss,
            in nats, when it is left out. For a sequence it grows with the length, as ℓ_i does.
        table: all columns as a DataFrame, one row per example, with the task's metadata.
    """

    error: Tensor | None = None
    variance: Tensor | None = None
    variance_error: Tensor | None = None
    deviation: Tensor | None = None
    self_influence: Tensor | None = None
    outputs: Tensor | None = None
    targets: Tensor | None = None
    predictions: Tensor | None = None
    likelihood: Likelihood | None = None

    @cached_property
    @torch.inference_mode(False)
    def leverage(self) -> Tensor | None:
        """The largest eigenvalue of V_i Λ_i, ``[N]``; from 1 on, left-out outputs are undefined."""
        if self.variance is None or self.outputs is None or self.targets is None:
            return None
        assert self.likelihood is not None
        return leverage(self.variance, self.outputs, self.targets, self.likelihood)

    @property
    def loss_per_token(self) -> float:
        """Σ losses / Σ tokens of sequences, in nats."""
        return self.nll_per_token

    def table_columns(self) -> dict[str, Any]:
        """Columns of the table in order; None becomes NaN."""
        columns: dict[str, Any] = {}
        if self.targets is not None:
            columns["target"] = self.targets
        if self.outputs is not None:
            columns["prediction"] = self.predictions
        columns |= columns_of_losses(self.losses, self.tokens)
        if self.error is not None:
            columns["error"] = error_size(self.error)
        is_network = self.outputs is not None
        if is_network or self.variance is not None:
            columns["variance"] = variance_size(self.variance)
        if self.variance_error is not None:
            columns["variance_error"] = self.variance_error
        if is_network or self.deviation is not None:
            columns["deviation"] = self.deviation
        if self.self_influence is not None:
            columns["self_influence"] = self.self_influence
        if is_network:
            columns["leverage"] = self.leverage
        return columns

    def top(self, k: int = 10) -> Tensor:
        """The indices of the k examples that shape the model most, in falling order.

        They are ranked by their deviation, or by their self-influence where there is no deviation.

        Raises:
            InputError: k is below 1, or above the number of examples with a deviation.
        """
        measure = self.self_influence if self.deviation is None else self.deviation
        assert measure is not None
        n_finite = int(measure.isfinite().sum())
        if positive_int("k", k) > n_finite:
            raise InputError(
                f"k must be at most {n_finite}, the examples with a deviation, got {k}"
            )
        finite_first = measure.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        return finite_first.argsort(descending=True, stable=True)[:k]

    def __repr__(self) -> str:
        facts = [f"N={len(self):,}"]
        if self.error is not None and self.error.ndim == 2:
            facts.append(f"C={self.error.shape[1]}")
        if self.likelihood is not None:
            facts.append(self.likelihood.name)
        if self.tokens is not None:
            facts.append(f"{int(self.tokens.sum()):,} tokens")
            facts.append(f"perplexity={self.perplexity:.4g}")
        elif self.outputs is not None and self.variance is None:
            facts.append("without V")
        elif self.outputs is None and self.deviation is not None:
            facts.append(f"mean deviation {float(self.deviation.nanmean()):.4g} nats")
        return f"Scores({', '.join(facts)}; see .table, .plot(){self._note_in_repr})"


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut(PerExample, Plottable):
    """The result of :func:`blr_analysis.leave_one_out`.

    For sequences and sums of sites, ``losses`` and ``losses_before`` exist, and other attributes
    are None. Sums of sites are exact for conjugate models; for others, the sites of the other
    examples stay as they are.

    Attributes:
        losses: ℓ(y_i, f_i^{\\i}) in nats, ``[N]``. For a sequence it is the SUM over its tokens, to
            first order; for a sum of sites −log p(y_i | λ − λ̃_i), NaN where nothing was observed.
        losses_before: the losses with the example, ``[N]``.
        logits: f_i^{\\i}, ``[N, C]`` (means or log-rates for regression).
        deviation: how far each prediction moves, as in :class:`Scores`.
        leverage: the largest eigenvalue of V_i Λ_i, ``[N]``. Near or above 1 the posterior's
            structure overstates V_i, and there is no cavity.
        unfamiliarity: tr(Λ_i V_i), ``[N]``, the part of the model's parameters that the example
            determines.
        chance: for sequences, the loss in nats per token of guessing by the tokens' frequencies.
        measured: for sequences, the highest loss per token that agrees with what
            :func:`blr_analysis.calibrate` measured; None where nothing was measured.
        correction: one word for each example: "first_order", "cavity", "bounded" (a cavity whose
            leverage is near or above 1), "descent" (a refined example), or "subtraction" of a site.
    """

    losses_before: Tensor
    correction: list[str]
    logits: Tensor | None = None
    predictions: Tensor | None = None
    predictions_before: Tensor | None = None
    targets: Tensor | None = None
    deviation: Tensor | None = None
    leverage: Tensor | None = None
    unfamiliarity: Tensor | None = None
    chance: float | None = None
    measured: float | None = None
    likelihood: Likelihood | None = None

    @property
    def nll(self) -> float:
        """The mean of ``losses`` over the examples that count: it estimates the loss on new data.

        For sequences it is in nats per SEQUENCE. With class weights or example weights it is the
        mean of w_i ℓ_i over examples; torch divides by Σ w_i instead.
        """
        counted = self._evaluation.counted
        if self.likelihood is None:  # a sum of sites has NaN where nothing was observed
            counted = counted[~counted.isnan()]
        return float(counted.double().mean())

    @property
    def accuracy(self) -> float | None:
        """The share of left-out predictions that are right; None where there are no classes."""
        return self._evaluation.accuracy

    @property
    def _evaluation(self) -> Evaluation:
        """The losses with the correctness of left-out predictions."""
        if self.logits is None or self.targets is None:
            return Evaluation(self.losses, None)
        assert self.likelihood is not None
        return Evaluation(self.losses, self.likelihood.correct(self.logits, self.targets))

    @property
    def is_below_chance(self) -> bool:
        """Whether the left-out predictions are worse than chance, so that they are no estimate.

        Predictions agree less with their targets than shuffled ones would, and some leverage is 1
        or more: then the moves are too long. For sequences, the loss per token is above ``chance``,
        and above what a calibration measured: a model that memorises may do worse than a guess.
        """
        if self.chance is not None:
            highest_loss = self.chance
            if self.measured is not None:
                highest_loss = max(self.chance, self.measured)
            return self.nll_per_token > highest_loss
        if self.leverage is None or not bool((self.leverage >= 1).any()):
            return False
        assert self.predictions is not None and self.targets is not None
        return agreement_beyond_chance(self._evaluation, self.predictions, self.targets) < 0

    @property
    def mse(self) -> float | None:
        """The mean squared left-out error; None for other than Gaussian likelihoods."""
        if self.likelihood is None or not isinstance(self.likelihood.kind, Gaussian):
            return None
        assert self.logits is not None and self.targets is not None
        return float((self.logits - self.targets).double().square().mean())

    @property
    def rmse(self) -> float | None:
        """The root of ``mse``, in the targets' units; None where ``mse`` is."""
        return None if self.mse is None else math.sqrt(self.mse)

    @property
    def r2(self) -> float | None:
        """The share of the targets' variance that left-out predictions explain, or None."""
        if self.mse is None:
            return None
        assert self.logits is not None and self.targets is not None
        return regression.r2(self.logits, self.targets)

    @property
    def nll_per_token_before(self) -> float:
        """Σ losses_before / Σ tokens of sequences, in nats."""
        return per_token(self.losses_before, self.tokens)

    @property
    def perplexity_before(self) -> float:
        """exp of :attr:`nll_per_token_before`."""
        return exponential(self.nll_per_token_before)

    def table_columns(self) -> dict[str, Any]:
        """Columns of the table in order; None becomes NaN."""
        columns: dict[str, Any] = {}
        if self.targets is not None:
            columns["target"] = self.targets
        if self.logits is not None:
            columns["prediction"] = self.predictions
            columns["prediction_before"] = self.predictions_before
        columns |= columns_of_losses(self.losses, self.tokens)
        columns |= columns_of_losses(self.losses_before, self.tokens, "_before")
        if self.logits is not None:
            columns["deviation"] = self.deviation
            columns["leverage"] = self.leverage
        columns["correction"] = self.correction
        return columns

    def __repr__(self) -> str:
        if self.is_below_chance:
            facts = ["no estimate", f"N={len(self):,}"]
        elif self.tokens is not None:
            facts = [
                f"perplexity {self.perplexity_before:.4g} -> {self.perplexity:.4g}",
                f"N={len(self):,}",
                f"{int(self.tokens.sum()):,} tokens",
            ]
        else:
            facts = [f"nll={self.nll:.4f}"]
            if self.accuracy is not None:
                facts.append(f"accuracy={self.accuracy:.4f}")
            facts.append(f"N={len(self):,}")
        if self.leverage is not None:
            facts += self._corrections_in_words()
        return f"LeaveOneOut({', '.join(facts)}{self._note_in_repr})"

    def _corrections_in_words(self) -> list[str]:
        """How many examples have a correction, and how many a leverage of 1 or more."""
        assert self.leverage is not None
        counts = {f"{name} for": self.correction.count(name) for name in CORRECTION_NAMES[1:]}
        counts["leverage of 1 or more for"] = int((self.leverage >= 1).sum())
        return [f"{words} {count}" for words, count in counts.items() if count > 0]


def per_token(losses: Tensor, tokens: Tensor | None) -> float:
    """Σ losses / Σ tokens in nats; an InputError without tokens."""
    if tokens is None:
        raise InputError("only sequences have a loss per token; use nll or losses")
    return float(losses.double().sum() / tokens.sum())


def columns_of_losses(losses: Tensor, tokens: Tensor | None, suffix: str = "") -> dict[str, Any]:
    """The columns ``loss`` and, of sequences, ``tokens`` and ``loss_per_token``."""
    if tokens is None:
        return {f"loss{suffix}": losses}
    return {
        "tokens": tokens,
        f"loss{suffix}": losses,
        f"loss_per_token{suffix}": losses / tokens,
    }


def exponential(value: float) -> float:
    """exp(value); infinite where it overflows."""
    return float(torch.tensor(value, dtype=torch.float64).exp())


@dataclass(frozen=True, kw_only=True)
class WhatIf(Noted, Plottable):
    """The result of :func:`blr_analysis.what_if`.

    Attributes:
        before, after: losses and correctness on ``evaluate`` without and with the change.
        solver: "posterior", "cg", "replay", "retrain", or "subtraction" of sites.
        interval: (low, high), between which the nll after retraining lies in four of five cases,
            by the spread over seeds; None for a single answer.
        error: for a sum of sites, an estimate in nats of how far ``nll`` is from that of a new fit.
            It is no bound; with few ``passes=`` it misses slow changes. It is 0 for conjugate
            models, infinite where steps do not shrink, and None where there was no step and for
            networks.
        parameters, buffers: those of the changed model by name, from the first of several
            trainings; empty for a sum of sites.
        applied_nll: the loss of this model on ``evaluate``; None for a sum of sites.
        passes: forward and backward passes over the data; for a sum of sites, steps of the rule
            after the subtraction.
        converged: for "cg" and steps of the rule, whether nothing was left to gain.
        targets: the targets of ``evaluate``; None for a sum of sites.
        removed, added, relabelled: the numbers of examples.
    """

    before: Evaluation
    after: Evaluation
    solver: str
    posterior_after: Callable[[], Any] = field(repr=False)
    removed: int
    added: int
    relabelled: int = 0
    interval: tuple[float, float] | None = None
    error: float | None = None
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    applied_nll: float | None = None
    passes: float = 0.0
    converged: bool = True
    targets: Tensor | None = None

    @cached_property
    @torch.inference_mode(False)
    def posterior(self) -> Any:
        """The posterior of the changed model and data, computed when it is first needed.

        Further changes and trainings can start from it. For trainings, its mean are the weights of
        the first one, and its precision is the old one without the removed and with the added
        examples.
        """
        return self.posterior_after()

    @property
    def nll(self) -> float:
        """The mean loss on ``evaluate`` after the change, in nats, over examples that count."""
        return self.after.nll

    @property
    def accuracy(self) -> float | None:
        """Accuracy on ``evaluate`` after the change; None where there are no classes."""
        return self.after.accuracy

    @property
    def losses(self) -> Tensor:
        """The losses on ``evaluate`` after the change, ``[M]``."""
        return self.after.losses

    @property
    def change(self) -> float:
        """The rise of the nll by the change."""
        return self.after.nll - self.before.nll

    @property
    def by_class(self) -> Any:
        """A DataFrame with one row per class of ``evaluate``, before and after the change.

        Raises:
            InputError: the model is a sum of sites, or the targets are no classes.
        """
        if self.targets is None:
            raise InputError("a sum of sites has no classes to divide the answer by")
        return make_table(ByClass(self.targets, self.before, self.after))

    def row(self, group: Any) -> dict[str, Any]:
        """The row of a removed group in the table of :func:`blr_analysis.what_if_each`."""
        interval = self.interval or (math.nan, math.nan)
        return {
            "group": group,
            "n": self.removed,
            "nll_before": self.before.nll,
            "nll_after": self.nll,
            "nll_low": interval[0],
            "nll_high": interval[1],
            "accuracy_before": self.before.accuracy,
            "accuracy_after": self.accuracy,
            "solver": self.solver,
            "passes": self.passes,
            "converged": self.converged,
            "note": self.note,
        }

    def apply(self, model: nn.Module) -> nn.Module:
        """Write :attr:`parameters` and :attr:`buffers` into ``model`` (in place) and return it.

        Raises:
            InputError: the answer is of a sum of sites, which has no weights.
            ModelError: the model lacks one of them or has another shape; nothing is written.
        """
        instance("model", model, nn.Module, "a torch.nn.Module")
        if not self.parameters:
            raise InputError("a sum of sites has no weights to apply; take .posterior")
        inner_model = unwrapped(model)
        tensors = dict(inner_model.named_parameters()) | dict(inner_model.named_buffers())
        values = {**self.parameters, **self.buffers}
        for name, value in values.items():
            if name not in tensors:
                difference = "no such parameter"
            elif tensors[name].shape != value.shape:
                difference = str(tuple(tensors[name].shape))
            else:
                continue
            shape = tuple(value.shape)
            raise ModelError(f"cannot apply {name!r} of shape {shape}: the model has {difference}")
        with torch.no_grad():
            for name, value in values.items():
                tensors[name].copy_(value)
        return model

    def __repr__(self) -> str:
        counts = {"removed": self.removed, "added": self.added, "relabelled": self.relabelled}
        change = ", ".join(f"{count} {word}" for word, count in counts.items() if count > 0)
        losses = f"nll {self.before.nll:.4f} -> {self.nll:.4f}"
        if self.interval is not None:
            low, high = self.interval
            losses += f" ({low:.2f} to {high:.2f})"
        if self.error is not None:
            losses += f" ± {self.error:.2g}"
        facts = [losses]
        if self.accuracy is not None:
            facts.append(f"accuracy {self.before.accuracy:.4f} -> {self.accuracy:.4f}")
        solver = "one step" if self.solver == "posterior" else self.solver
        if self.passes > 0:
            solver += f", {self.passes:.0f} passes"
        return f"WhatIf({change}: {', '.join(facts)}; {solver}{self._note_in_repr})"


@dataclass(frozen=True)
class ByClass:
    """Losses and correctness before and after a change, with the targets of the examples."""

    targets: Tensor
    before: Evaluation
    after: Evaluation


@dataclass(frozen=True, kw_only=True)
class Suspicions(PerExample, Plottable):
    """The result of :func:`blr_analysis.suspicious`; larger scores are more suspicious.

    Attributes:
        losses: the mean unweighted loss over the training, in nats ``[N]``; per token for texts.
        training: the unweighted loss at the end of the training, ``[N]``.
        left_out: the unweighted left-out loss, ``[N]``.
        wrong: P(y_i is wrong), ``[N]``, from the left-out predictions. If their scale was not
            measured, it is from the mean of their logits and those of the checkpoints, which makes
            probabilities smaller. None for regression, sequences and sums of sites.
        proposed: the best other label by the left-out prediction, among the labels that occur in
            the data; None for regression, sequences and sums of sites.
        unfamiliarity: tr(Λ_i V_i), ``[N]``: the number of the model's parameters that the example
            determines, whatever its label. It is the expected rise of the example's loss without
            it, for a label drawn from the model's prediction. For sequences it is estimated with
            four such draws; None for sums of sites without latent numbers.
        closeness: how near the nearest other example is, compared with the tenth, from 0 to 1 (a
            copy), ``[N]``; None where it was not computed, and for sums of sites.
        twin: the index of the nearest other example, ``[N]``, or None.
        kind: the suspected fault: "label" (more likely wrong than right), "unfamiliar",
            "duplicate" or "none".
        order: all indices, most suspicious first: contradicted labels by loss, then unfamiliar
            examples, duplicates, and the rest.
        targets, predictions: None for sequences; a sum of sites has no predictions.
        guess: the loss per token of a guess by the tokens' frequencies, ``[N]``. Texts of a causal
            language model are suspected by ``losses - guess``, whatever words they use. None for
            all else.
        no_label_called: one line on why no label is called wrong although the model contradicts
            some; "" where one is called wrong, or none is contradicted.
        table: one row per example, the most suspicious first.
    """

    training: Tensor
    left_out: Tensor
    kind: list[str]
    order: Tensor
    wrong: Tensor | None = None
    proposed: Tensor | None = None
    unfamiliarity: Tensor | None = None
    closeness: Tensor | None = None
    twin: Tensor | None = None
    targets: Tensor | None = None
    predictions: Tensor | None = None
    likelihood: Likelihood | None = None
    guess: Tensor | None = None
    no_label_called: str = ""

    def table_columns(self) -> dict[str, Any]:
        """Columns of the table in order; None becomes NaN."""
        columns: dict[str, Any] = {"kind": self.kind}
        if self.targets is not None:
            columns["target"] = self.targets
        if self.predictions is not None:
            columns["prediction"] = self.predictions
        columns["proposed"] = self.proposed
        if self.wrong is not None:
            columns["wrong"] = self.wrong
        columns["loss"] = self.losses
        if self.guess is not None:
            columns["guessed_loss"] = self.guess
        columns["training_loss"] = self.training
        columns["left_out_loss"] = self.left_out
        columns["unfamiliarity"] = self.unfamiliarity
        columns["closeness"] = self.closeness
        columns["twin"] = -torch.ones(len(self)).long() if self.twin is None else self.twin
        return columns

    def score(self, kind: str) -> Tensor:
        """The score by which a kind of fault is found, ``[N]``.

        Raises:
            InputError: the kind is unknown, duplicates were not looked for, or this kind of model
                does not have the score.
        """
        one_of("kind", kind, FAULTS)
        if kind == "label":
            return self.losses if self.guess is None else self.losses - self.guess
        score = self.unfamiliarity if kind == "unfamiliar" else self.closeness
        if score is None and kind == "duplicate":
            raise InputError("no twins were looked for; call suspicious(..., duplicates=True)")
        if score is None:
            raise InputError("this kind of model has no unfamiliarity")
        return score

    @property
    def precision(self) -> float | None:
        """The expected share of truly wrong labels among those that are called wrong.

        It is the mean of ``wrong``; None where no label is called wrong, and without ``wrong``.
        """
        is_called_wrong = torch.tensor([kind == "label" for kind in self.kind])
        if self.wrong is None or not bool(is_called_wrong.any()):
            return None
        return float(self.wrong[is_called_wrong].mean())

    def __repr__(self) -> str:
        counts = {kind: f"{self.kind.count(kind)} {kind}" for kind in FAULTS}
        if self.precision is not None:
            counts["label"] += f" ({self.precision:.0%} of them wrong)"
        text = ", ".join(counts.values())
        return f"Suspicions(N={len(self):,}: {text}; see .table, .plot(){self._note_in_repr})"
