"""Merges of one seed's fine-tunes, tested in every domain; rows are kept on disk as they come.

α is one number for all fine-tunes of a merge. "best" has the least loss on validation texts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.merging import sentiment_train as training
from benchmarks.merging.sentiment_ties import ties_step
from benchmarks.merging.sentiment_train import (
    BASE,
    DOMAINS,
    JOINT,
    TASKS,
    THEN,
    WITHOUT,
    Recipe,
    Texts,
    Weights,
    evaluate,
    load,
    new_model,
    texts,
)
from benchmarks.truth import store
from blr_analysis.merging import gradient_mismatch, merge, merge_curve

ALPHAS = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.3)
N_SEARCH = 50  # validation texts of each domain that choose α
N_GRADIENT = 50  # training texts of each domain for the gradient mismatch
REMOVALS = [("task_arithmetic", alpha, 0.0) for alpha in (-1.0, -2.0)]
REMOVALS += [("gradient_matching", -1.0, delta) for delta in (0.0, 1.0)]
N_TEST = 250  # test texts of each domain
VERSION = 1  # of what is computed here; another one computes the rows again
Row = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A base, its fine-tunes and their precisions, of one seed and one optimizer."""

    seed: int
    how: str
    recipe: Recipe

    def weights(self, domain: str) -> Weights:
        found = training.read(self.seed, self.how, domain, self.recipe)
        assert found is not None, f"seed {self.seed}: no {self.how} fine-tune on {domain}"
        return found.tensors

    @cached_property
    def base(self) -> Weights:
        return self.weights(BASE)

    @cached_property
    def models(self) -> dict[str, Weights]:
        return {d: self.weights(d) for d in TASKS}

    @cached_property
    def ties_step(self) -> Weights:
        return ties_step(self.base, list(self.models.values()))

    def precision(self, domain: str, kind: str) -> Weights:
        """The data part, stored; ``ivon, start off`` is IVON's without what it began with."""
        name = kind.partition(",")[0]
        found = training.read_precision(self.seed, self.how, domain, name)
        if name == kind:
            return found
        kept = self.recipe.ivon_kept
        start = self.recipe.ivon_precision * kept
        return {n: ((h - start) / (1 - kept)).clamp_min(0) for n, h in found.items()}

    def merger(self, method: str, kind: str | None) -> Callable[..., Weights]:
        """``(base, models, weights=[α, …]) -> weights``, as ``merge_curve`` takes it."""
        if method == "ties":
            return lambda base, models, weights: {
                n: base[n] + weights[0] * step for n, step in self.ties_step.items()
            }
        settings: Row = {}
        if kind is not None:
            settings["precisions"] = [self.precision(d, kind) for d in TASKS]
        if method == "gradient_matching":
            settings["base_precision"] = self.precision(BASE, kind or "")

        def made(base: Weights, models: list[Weights], weights: list[float]) -> Weights:
            return merge(base, models, method=method, weights=weights, progress=False, **settings)

        return made

    def merged(self, method: str, kind: str | None, alpha: float) -> Weights:
        merger = self.merger(method, kind)
        return merger(self.base, list(self.models.values()), weights=[alpha] * len(TASKS))


def plan(how: str) -> Iterator[tuple[str, str | None, float | None]]:
    """Method, precision and α (None: the best) of every merge of a family."""
    yield "task_arithmetic", None, 1 / len(TASKS)
    yield "task_arithmetic", None, 1.0
    yield "task_arithmetic", None, None
    kinds = training.PRECISIONS[how]
    if how == "adamw":
        yield "ties", None, 1.0
        yield "ties", None, None
    else:
        kinds = (*kinds, "ivon, start off")
    for kind in kinds:
        yield "fisher", kind, 1.0
        yield "gradient_matching", kind, 1.0
        yield "gradient_matching", kind, None


class Table:
    """The rows of one seed and one optimizer, on disk as they come."""

    def __init__(self, seed: int, how: str, recipe: Recipe) -> None:
        self.path = store.root() / "merging" / f"seed{seed}" / how / "rows.json"
        key = [VERSION, ALPHAS, N_SEARCH, N_GRADIENT, N_TEST, recipe.hash(how)]
        self.key, self.rows = json.loads(json.dumps(key)), {}
        if self.path.is_file():
            found = json.loads(self.path.read_text())
            self.rows = found["rows"] if found["key"] == self.key else {}

    def add(self, name: str, make: Callable[[], Row]) -> Row:
        """The row of this name, made if it is not there."""
        if name not in self.rows:
            start = time.perf_counter()
            self.rows[name] = make()
            print(
                f"{self.path.parent.name}: {name}, {time.perf_counter() - start:.0f} s", flush=True
            )
            beside = self.path.with_name(f".rows.json.{os.getpid()}")
            beside.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps({"key": self.key, "rows": self.rows}, indent=1))
            beside.replace(self.path)
        return self.rows[name]


class Judge:
    """One model, into which weights are loaded, and the texts of one seed."""

    def __init__(self, seed: int, recipe: Recipe) -> None:
        self.model = new_model(seed)
        self.texts = {d: texts(d, seed, recipe) for d in DOMAINS}

    def test(self, weights: Weights, domains: tuple[str, ...] = DOMAINS) -> Row:
        """Accuracy and mean loss on the test texts of every domain."""
        load(self.model, weights)
        found = {d: evaluate(self.model, self.texts[d]["test"].first(N_TEST)) for d in domains}
        return {
            **{f"accuracy {d}": right for d, (right, _) in found.items()},
            **{f"loss {d}": loss for d, (_, loss) in found.items()},
        }

    def tasks(self, part: str, count: int) -> dict[str, blr.Task]:
        return {d: task(self.model, self.texts[d][part].first(count)) for d in DOMAINS}


def task(model: nn.Module, data: Texts) -> blr.Task:
    """These texts as a task of the package, texts of like length in one batch."""
    order = sorted(range(len(data)), key=lambda i: len(data.ids[i]))

    def padded(chosen: list[int]) -> tuple[dict[str, Tensor], Tensor]:
        return data.padded([order[i] for i in chosen])

    def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(**batch[0]).logits, batch[1]

    loader = torch.utils.data.DataLoader(
        range(len(data)),  # type: ignore[arg-type]
        batch_size=16,
        collate_fn=padded,
    )
    return blr.Task(model, loader, forward=forward, batch_size=16)


def best_alpha(family: Family, judge: Judge, method: str, kind: str | None) -> float:
    """The α, shared by all fine-tunes, whose merge has the least loss on validation texts."""
    curve = merge_curve(
        family.base,
        family.models,
        judge.tasks("validation", N_SEARCH),
        method={method: family.merger(method, kind)},
        weights=ALPHAS,
        progress=False,
    )
    return curve.best.weights[0]


def run(seed: int, recipe: Recipe, hows: tuple[str, ...] = tuple(training.PRECISIONS)) -> None:
    """Every row of one seed that is missing."""
    judge = Judge(seed, recipe)
    for how in hows:
        table, family = Table(seed, how, recipe), Family(seed, how, recipe)
        table.add(f"{how}|base", lambda f=family: judge.test(f.base))
        table.add(f"{how}|each on its own", lambda f=family: _own(f, judge))
        for method, kind, alpha in plan(how):
            name = f"{how}|{method}|{kind or ''}|{'best' if alpha is None else alpha}"
            made = (family, judge, method, kind, alpha)
            table.add(name, lambda made=made: _merge_row(*made))
        if how != "adamw":
            continue
        table.add(f"{how}|joint", lambda f=family: judge.test(f.weights(JOINT)))
        made = (family, judge, table)
        table.add("mismatch", lambda made=made: {"rows": _mismatch(*made)})
        for domain in TASKS:
            models = family.models
            table.add(f"{how}|fine-tune on {domain}", lambda d=domain, m=models: judge.test(m[d]))
        for method, alpha, delta in REMOVALS:
            made = (family, judge, method, alpha, delta)
            table.add(f"{how}|removal|{method}|{alpha}|{delta}", lambda m=made: _removal(*m))
        table.add(f"{how}|{WITHOUT}", lambda f=family: judge.test(f.weights(WITHOUT)))


def _own(family: Family, judge: Judge) -> Row:
    found: Row = {}
    for domain in DOMAINS:
        weights = family.base if domain == BASE else family.models[domain]
        found.update(judge.test(weights, (domain,)))
    return found


def _merge_row(
    family: Family, judge: Judge, method: str, kind: str | None, alpha: float | None
) -> Row:
    if alpha is None:
        alpha = best_alpha(family, judge, method, kind)
    start = time.perf_counter()
    weights = family.merged(method, kind, alpha)
    return {"alpha": alpha, "seconds": time.perf_counter() - start, **judge.test(weights)}


def _removal(family: Family, judge: Judge, method: str, alpha: float, delta: float) -> Row:
    """Joint training, and the same trained further on the tweets alone, taken off with α < 0."""
    settings: Row = {"method": method, "weights": alpha, "progress": False}
    if method == "gradient_matching":
        settings["precisions"] = [family.precision(THEN, "fisher")]
        settings |= {"base_precision": family.precision(JOINT, "fisher"), "delta": delta}
    weights = merge(family.weights(JOINT), [family.weights(THEN)], **settings)
    return {"alpha": alpha, "delta": delta, **judge.test(weights)}


def _mismatch(family: Family, judge: Judge, table: Table) -> list[Row]:
    """Per merge and domain: gradient mismatch and losses, of what AdamW trained."""
    merges = {"base": lambda: family.base, "joint": lambda: family.weights(JOINT)}
    for method, kind, alpha in plan(family.how):
        row = table.rows[f"{family.how}|{method}|{kind or ''}|{'best' if alpha is None else alpha}"]
        made = (method, kind, row["alpha"])
        label = f"{method}|{kind or ''}|{'best' if alpha is None else alpha}"
        merges[label] = lambda made=made: family.merged(*made)
    models = {d: family.base if d == BASE else family.models[d] for d in DOMAINS}
    found = gradient_mismatch(
        judge.tasks("train", N_GRADIENT), merges, models=models, progress=False
    )
    return [dict(row) for row in found.rows]
