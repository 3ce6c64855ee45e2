"""A user's own training on the changed data: exact answers, and what a few teach the others."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from blr_analysis.backprop.loss import Evaluation
from blr_analysis.checks import positive_int
from blr_analysis.errors import InputError, ModelError
from blr_analysis.files.placing import drafted
from blr_analysis.files.shards import save_file
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.structures import Tree
from blr_analysis.sensitivity.groups.perturbed import SPREADS, Answer, interval, measured
from blr_analysis.sensitivity.groups.solving import Change
from blr_analysis.sensitivity.objective import changed, with_labels_inside
from blr_analysis.task import Task

Train = Callable[[Any, int], "nn.Module | Mapping[str, Tensor]"]


@dataclass(frozen=True)
class Retraining:
    """Trainings of one task on other data; ``train``, ``seeds`` and ``cache`` as in
    :func:`blr_analysis.what_if`."""

    task: Task
    q: Posterior
    train: Train | None
    seeds: int
    cache: str | Path | None

    def answer(self, change: Change, where: Task, before: Evaluation) -> tuple[Answer, Tree]:
        """How the runs do, and the weights of the first: means over them, and the interval that
        the next one likely falls into.

        Raises:
            InputError: no function ``train``.
            DataError: new targets for items in which the old ones are not found.
        """
        if self.train is None:
            raise InputError("solver='retrain' needs train=, a function (data, seed) -> model")
        task, q = self.task, self.q
        labels = change.labels or {}
        gone = torch.cat([change.leaving, torch.tensor(list(labels), dtype=torch.long)])
        parts = list(changed(task, q.prior, leaving=gone, added=change.new).parts)
        if labels:
            parts.append((with_labels_inside(task, labels), torch.arange(len(labels))))
        runs = retrained(parts, q.mean, self.train, self.seeds, self.cache)
        measures = [measured(where, weights) for weights in runs]
        hits = [e.correct for e in measures if e.correct is not None]
        after = replace(
            before,
            losses=torch.stack([e.losses for e in measures]).mean(0),
            correct=torch.stack(hits).double().mean(0) if hits else None,
        )
        half = SPREADS["calibrated"][1] * abs(after.nll)
        if (n := len(runs)) > 1:
            from scipy.special import stdtrit  # 0.3 s: not every import of the package pays for it

            each = torch.tensor([e.nll for e in measures], dtype=torch.float64)
            half = float(stdtrit(n - 1, 0.9)) * float(each.std()) * math.sqrt(1 + 1 / n)
        answer = Answer(
            before=before,
            after=after,
            interval=(after.nll - half, after.nll + half),
            solver="retrain",
            passes=math.nan,
        )
        return answer, runs[0]


def calibrated(
    answers: Sequence[Answer], exact: Callable[[int], Answer], count: int
) -> list[Answer]:
    """The same with ``count`` exact ones, of the largest and the smallest predicted nll first; the
    others' changes are scaled by the mean log ratio of true to predicted change, of those groups
    whose range comes less than half of the way back to no change."""
    order = sorted(range(len(answers)), key=lambda k: answers[k].nll)
    turns = [order[-1 - k // 2] if k % 2 == 0 else order[k // 2] for k in range(len(order))]
    true = {k: exact(k) for k in turns[:count]}
    ratios = []
    for k, answer in true.items():
        predicted, (low, high) = answers[k].change, answers[k].interval
        back = answers[k].nll - low if predicted > 0 else high - answers[k].nll
        if 2 * back < abs(predicted) and predicted * answer.change > 0:
            ratios.append(math.log(answer.change / predicted))
    scale = math.exp(sum(ratios) / len(ratios)) if ratios else 1.0
    spread = float(torch.tensor(ratios).std()) if len(ratios) > 1 else 0.0

    def scaled(answer: Answer) -> Answer:
        before = answer.before
        losses = before.losses + scale * (answer.after.losses.double() - before.losses)
        after = replace(answer.after, losses=losses)
        ends = interval(before.nll, after.nll, "calibrated", spread * abs(after.nll - before.nll))
        solver = f"{answer.solver}, calibrated"
        return replace(answer, after=after, interval=ends, solver=solver)

    others = [scaled(answer) if ratios else answer for answer in answers]
    for k, answer in true.items():
        others[k] = replace(
            answers[k], after=answer.after, interval=answer.interval, solver="retrain", note=""
        )
    return others


def retrained(
    parts: Sequence[tuple[Task, Tensor]],
    like: Mapping[str, Tensor],
    train: Train,
    seeds: int,
    cache: str | Path | None = None,
) -> list[Tree]:
    """Weights by name after ``train(data, seed)`` for the seeds 0, 1, …, which returns the model or
    its state dict.

    Args:
        parts: a task and the examples of it that count; ``data`` is the dataset of them all.
        like: weights by name, whose names and shapes the answer must have.
        cache: a folder; what the same ``train`` made there of the same examples and seed is read.

    Raises:
        InputError: no function, or a bad number of seeds.
        ModelError: the training returns another model, or something else.
    """
    if not callable(train):
        raise InputError("train must be a function (data, seed) -> model or state dict")
    positive_int("seeds", seeds)
    key = "" if cache is None else _key(parts, train)
    sets = [Subset(task.dataset, indices.tolist()) for task, indices in parts]
    data: Dataset[Any] = sets[0] if len(sets) == 1 else ConcatDataset(sets)
    runs = []
    for seed in range(seeds):
        place = None if cache is None else Path(cache, f"{key}-{seed}.safetensors")
        if place is not None and place.exists():
            runs.append(_fitting(load_file(place), like))
            continue
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            result = train(data, seed)
        state = result.state_dict() if isinstance(result, nn.Module) else result
        _same_buffers(state, parts[0][0].model)
        weights = _fitting(state, like)
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            with drafted(place) as draft:
                save_file(weights, draft, {"format": "pt"})
        runs.append(weights)
    return runs


def _key(parts: Sequence[tuple[Task, Tensor]], train: Train) -> str:
    """Of every example, of the source of ``train``, and of the plain values that it reads."""
    made: Any = getattr(train, "func", train)  # of a partial
    read = [getattr(train, "args", ()), getattr(train, "keywords", {})]
    known = dict(getattr(getattr(made, "__self__", made), "__dict__", {}))
    if inspect.isfunction(made) or inspect.ismethod(made):
        outside = inspect.getclosurevars(made)
        known |= {**outside.globals, **outside.nonlocals}
        read += [made.__defaults__, getattr(made, "__kwdefaults__", None)]
    else:
        made = type(made)
    read.append({n: v for n, v in known.items() if isinstance(v, int | float | str)})
    try:
        code: Any = inspect.getsource(made)
    except (OSError, TypeError):
        code = getattr(getattr(made, "__code__", None), "co_code", b"")
    about = {"train": [made.__module__, made.__qualname__, code, read]}
    each = [task.examples.subset(i.tolist()).sha256(about) for task, i in parts]
    return hashlib.sha256("".join(each).encode()).hexdigest()[:24]


def _same_buffers(state: Any, model: nn.Module) -> None:
    """Answers are measured with the model's own buffers: running statistics must not differ."""
    for name, buffer in model.named_buffers():
        new = state.get(name) if isinstance(state, Mapping) else None
        if new is not None and not torch.equal(new.to(buffer), buffer):
            raise ModelError(f"train changed the buffer {name!r}; only parameters are compared")


def _fitting(result: Any, like: Mapping[str, Tensor]) -> Tree:
    if not isinstance(result, Mapping):
        raise ModelError(f"train must return a model or a state dict, got {type(result).__name__}")
    for name, tensor in like.items():
        if name not in result or tuple(result[name].shape) != tuple(tensor.shape):
            raise ModelError(f"train returned another model: no {name!r} of this shape")
    return {n: result[n].detach().to(t) for n, t in like.items()}
