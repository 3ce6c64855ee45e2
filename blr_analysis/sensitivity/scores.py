"""Prediction error, prediction variance and deviation of every training example.

The memory-perturbation equation (Nickl et al., NeurIPS 2023): without example i the model's
output there would move by

    f_i^{\\i} − f_i ≈ τ V_i ē_i,    ē_i = mean_t ∂ℓ_i/∂f (t),    V_i = J_i Σ J_iᵀ

prediction variance times prediction error, averaged over the posterior's run; τ its temperature.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.engine import Chunk, chunks, n_outputs
from blr_analysis.backprop.record import shared
from blr_analysis.checks import instance
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.stationarity import recognise, stationarity
from blr_analysis.sensitivity.corrections import leverage, prediction_variances, self_influence
from blr_analysis.sensitivity.results import NetworkScores
from blr_analysis.sensitivity.run import mean_errors
from blr_analysis.sensitivity.sequences import sequence_scores
from blr_analysis.sensitivity.sites import SumOfSites, site_sensitivity, sum_of_sites
from blr_analysis.task import Task

AVERAGED = ("error", "variance", "deviation", "self_influence")  # over several posteriors
MOST_OUTPUTS = 256  # beyond, C backward passes and N·C² numbers are not asked for by themselves
MOST_NUMBERS = 2**28  # N·C² of the variances that are kept: 1 GiB in float32


@dataclass(frozen=True, kw_only=True)
class Scores(NetworkScores):
    """What :func:`sensitivity` gives; tensors on the CPU, in the order of the dataset.

    Attributes:
        error: e_i, ``[N, C]``; its direction is from the target to the prediction.
        variance: V_i, ``[N, C, C]``, example i included in the posterior; None for large C.
        deviation: how far the prediction would move without the example, ``[N]``; larger is
            more influential. ‖softmax(f_i + V_i e_i) − softmax(f_i)‖₁ for classification
            (between 0 and 2), ‖V_i e_i‖₂ in units of f for regression; None for large C.
        self_influence: g_iᵀ Σ g_i = e_iᵀ V_i e_i, ``[N]``: the first-order rise of the example's
            own loss, in nats, when it is left out.
        outputs, targets, losses, predictions: f_i, y_i, ℓ_i in nats, and what the model answers.
        table: all of it as a DataFrame, one row per example, with the task's metadata columns.
    """

    error: Tensor
    variance: Tensor | None
    deviation: Tensor | None
    outputs: Tensor
    targets: Tensor
    predictions: Tensor

    def __repr__(self) -> str:
        n, c = self.error.shape
        held = "" if self.variance is not None else ", without V"
        return (
            f"Scores(N={n}, C={c}, {self.likelihood.name}{held}; see .table, .plot(){self._noted})"
        )

    @cached_property
    @torch.inference_mode(False)
    def leverage(self) -> Tensor | None:
        """The largest eigenvalue of V_i Λ_i, ``[N]``; at 1 and above, removal is undefined."""
        if self.variance is None:
            return None
        return leverage(self.variance, self.outputs, self.targets, self.likelihood)


@torch.inference_mode(False)  # also where the caller switched it on
def sensitivity(
    task: Task,
    posterior: Posterior | Sequence[Posterior] = None,  # type: ignore[assignment]
    *,
    variance: bool | None = None,
) -> Scores | Any:  # of sequences and of sums of sites their own
    """How much each training example shapes the model.

    One forward pass and C backward passes that stop at the layers' outputs; no per-example
    gradient of the model is formed. The model runs at the posterior's mean, in eval mode, and is
    left as it is.

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data. A fitted probabilistic model of
            :mod:`blr_analysis.learning_rule.inference` keeps its data and stands alone,
            ``sensitivity(fitted)`` or ``sensitivity(None, fitted)``: its sites are subtracted.
            A list of those of several runs (:func:`blr_analysis.rerun`): error, variance,
            deviation and self-influence are means over them; outputs, losses and predictions are
            the last one's.
        variance: whether to compute V_i; None: where C ≤ 256 and N·C² fits in 1 GiB. Without it
            one backward pass gives the self-influence. Of sequences: whether to estimate tr V_i,
            by four more backward passes.

    Returns:
        The scores; of sequences (likelihood "tokens", "causal_lm")
        :class:`~blr_analysis.sensitivity.sequences.SequenceScores`; of a sum of sites
        :class:`~blr_analysis.sensitivity.sites.SiteScores`.

    Raises:
        PosteriorError: a posterior of another model, or of another number of examples.
        ModelError: NaN or inf outputs, BatchNorm in training mode, half precision.
        DataError: NaN or inf inputs, targets out of range.

    Source: Nickl et al., NeurIPS 2023, Eqs. 5–8. V_i is summed layer by layer, for a diagonal Σ as
    Σ_o d_co d_c'o Σ_k σ²_ok a_k².

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(30, 2), torch.randint(3, (30,))
        >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y))
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
        >>> scores = sensitivity(task, q)
        >>> scores.error.shape, scores.variance.shape, scores.deviation.shape
        (torch.Size([30, 3]), torch.Size([30, 3, 3]), torch.Size([30]))
    """
    if (sites := sum_of_sites(task, posterior)) is not None:
        return site_sensitivity(sites, variance=variance)
    if variance is not None:
        instance("variance", variance, bool, "True, False or None")
    several = all_fitted(task, posterior)
    if len(several) > 1:
        return _averaged((_scores(where, q, variance) for where, q in several), len(several))
    return _scores(*several[0], variance)


def _scores(task: Task, q: Posterior, variance: bool | None) -> Any:
    """Those under one posterior: τ V at its mean, errors averaged over its run."""
    if task.likelihood.is_sequence:
        return sequence_scores(task, q, variance=bool(variance))
    c = n_outputs(task, q.mean)
    if variance is None:
        variance = bool(c <= MOST_OUTPUTS and task.n_data * c * c <= MOST_NUMBERS)
    columns = c if variance else 1
    kept: list[Tensor] = []  # [N, ...] each, filled chunk by chunk: nothing is held twice
    own = shared(task, q.mean)
    errors = mean_errors(task, q)
    make = torch.empty if len(own) == task.n_data else torch.zeros  # where others fill rows, too
    swept = chunks(task, q.mean, columns=columns, by_parts=variance, indices=own,
                   label="sensitivity")  # fmt: skip
    for chunk in swept:
        for indices, parts in _chunk_scores(q, chunk, errors(task, chunk), variance):
            kept = kept or [make(task.n_data, *t.shape[1:], dtype=t.dtype) for t in parts]
            for whole, part in zip(kept, parts, strict=True):
                whole[ranks.rows(indices)] = part
    ranks.total(kept)
    error, outputs, targets, influence, *rest = kept
    likelihood = task.likelihood
    return Scores(
        error=error,
        variance=rest[0] if variance else None,
        deviation=likelihood.distance(outputs, outputs + rest[1]) if variance else None,
        self_influence=influence,
        outputs=outputs,
        targets=targets,
        losses=likelihood.nll(outputs, targets),
        predictions=likelihood.prediction(outputs),
        likelihood=likelihood,
        metadata=task.metadata,
        note=q.note,
    )


def _averaged(each: Iterable[Any], count: int) -> Any:
    """The last of these scores with the means over all of what depends on the posterior."""
    sums: dict[str, Tensor] = {}
    scores: Any = None
    for scores in each:
        for name in AVERAGED:
            if (part := getattr(scores, name, None)) is not None:
                sums[name] = sums[name].add_(part) if name in sums else part.clone()
    return replace(scores, **{name: total.div_(count) for name, total in sums.items()})


def _chunk_scores(
    q: Posterior, chunk: Chunk, error: Tensor, variance: bool
) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """ē, f, y, ēᵀ τV ē (and τV, τV ē) of some examples at a time, and which they are."""
    if not variance:
        influence = q.temperature * self_influence(q, chunk, error, last=True)
        yield chunk.indices, (error, chunk.outputs, chunk.targets, influence)
        return
    for rows, v in prediction_variances(q, chunk):
        v, e = v.mul_(q.temperature), error[rows]
        move = torch.bmm(v, e.unsqueeze(-1)).squeeze(-1)
        numbers = (move * e).sum(-1), v, move
        yield chunk.indices[rows], (e, chunk.outputs[rows], chunk.targets[rows], *numbers)


def fitted(task: Task, posterior: Posterior, *, own_weights: bool = True) -> Posterior:
    """The posterior, checked against the task; whether it is at a minimum is measured, once.

    Warns:
        PosteriorWarning: it was learned with another model or other data; with ``own_weights``
            also where the model does not stand at its mean.
    """
    if isinstance(task, SumOfSites):
        kind = type(task).__name__
        raise InputError(f"a fitted {kind} is no network: ask fitted.without([...])")
    if posterior is None and not isinstance(task, Task):
        got = type(task).__name__
        raise InputError(f"give a Task and its Posterior; got {got} and no posterior")
    wanted = "a blr_analysis.Posterior (from_optimizer, from_checkpoint, load, or fit_laplace)"
    instance("posterior", posterior, Posterior, wanted)
    q = posterior.on(task)
    recognise(task, posterior, q, own_weights=own_weights)
    if q.stationarity is None and not task.likelihood.is_sequence:
        posterior.record["stationarity"] = asdict(stationarity(task, q))
        q.record["stationarity"] = posterior.record["stationarity"]
    return q


def all_fitted(task: Task, posterior: Any) -> list[tuple[Task, Posterior]]:
    """The posteriors of one or several runs, each checked, and the task with its buffers.

    Raises:
        InputError, PosteriorError: an empty list; as :func:`fitted`, naming which of them it is.
    """
    given = list(posterior) if isinstance(posterior, list | tuple) else [posterior]
    if not given:
        raise InputError("posterior is an empty list; give that of one run or more")
    found = []
    for k, q in enumerate(given):
        try:
            both = isinstance(q, Posterior) and isinstance(task, Task)
            where = task.holding(q.buffers) if both else task
            own = len(given) == 1 and "rerun" not in getattr(q, "record", ())
            found.append((where, fitted(where, q, own_weights=own)))
        except (InputError, PosteriorError) as error:
            raise type(error)(f"posterior[{k}]: {error}" if len(given) > 1 else error) from error
    return found


def check_outputs(task: Any, who: str) -> None:
    """Raise :class:`InputError` unless this is a task with one output vector per example."""
    instance("task", task, Task, "a blr_analysis.Task")
    if task.likelihood.is_sequence:
        name = task.likelihood.name
        raise InputError(f"{who} takes one output vector per example, {name!r} has one per token")


def check_test(test: Any, task: Task, name: str = "test") -> Task:
    """The held-out examples under the trained model (buffers, frozen weights and all).

    Raises:
        InputError: no task, or one of another likelihood.
        PosteriorError: its model has other parameters.
    """
    instance(name, test, Task, "a blr_analysis.Task with the held-out examples")
    shapes = [{n: p.shape for n, p in t.model.named_parameters()} for t in (task, test)]
    if shapes[0] != shapes[1]:
        raise PosteriorError(f"{name} is of another model, with other parameters")
    test = test.with_model(task)
    mine, theirs = task.likelihood, test.likelihood
    if not mine.judged_by(theirs):
        raise InputError(f"{name} has the likelihood {theirs!r}, the training task {mine!r}")
    return test
