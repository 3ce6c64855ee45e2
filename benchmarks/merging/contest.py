"""Which merge is best? Ours beside what people use, on cases whose truth is known.

    python -m benchmarks.merging.contest --case turned lenet --seeds 1 2 3 \
        | python -m benchmarks.results contest_summary contest_mismatch

The cases are in :mod:`benchmarks.merging.cases`. Accuracy on test data in per
cent: the mean over the tasks, the worst task, and the standard error
of both over the seeds. ``way`` is how far a merge gets from the average to joint training on
everything. Nothing is tuned but the rows that say so: ``auto, by validation`` chooses on data that
nothing else sees, ``best α`` on the test data themselves, which flatters task arithmetic. RegMean
and RegMean++ are written here from their papers, with fusion-bench's settings
(:mod:`benchmarks.merging.regmean`). The last table holds Spearman's correlation, over the merges,
of the gradient mismatch with the gap in training loss, and of the gap that diagonal precisions
predict.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import torch
from scipy.stats import spearmanr
from torch import Tensor

import blr_analysis as blr
from benchmarks.merging.cases import Case, turned_images, turned_lenet
from benchmarks.merging.regmean import regmean, regmean_plus_plus

DAMPINGS = (1.0, 0.1, 10.0)
STRUCTURES = ("diag", "gram", "kron")
State = dict[str, Tensor]
CASES = {
    "turned": turned_images,
    "lenet": turned_lenet,
}


def merges(c: Case) -> Iterator[tuple[str, State]]:
    """Every row of the table but the first two and the last."""
    models, tasks = list(c.models.values()), list(c.train.values())
    fit = {s: [fitted(t, s) for t in tasks] for s in STRUCTURES}

    def made(method: str, base: Any = None, **how: Any) -> Any:
        return blr.merge(base, models, method=method, progress=False, **how)

    yield "average", made("linear")
    yield from plain(c, made)
    yield "Fisher average, diag", made("fisher", precisions=fit["diag"])
    how = {"precisions": fit["diag"], "base_precision": fitted(c.start, "diag")}
    yield "gradient matching, diag, α = 1", made("gradient_matching", c.base, **how)
    for damping in DAMPINGS:
        how = {"precisions": fit["kron"], "damping": damping}
        yield f"kron, damping {damping:g}", made("fisher", **how)
    yield "gram", made("fisher", precisions=fit["gram"])
    yield "gram, shrink 0.95", made("fisher", precisions=fit["gram"], shrink=0.95)
    how = {"precisions": fit["gram"], "tasks": tasks}
    chosen = made("auto", c.base, **how)
    print(f"auto took {chosen.choice!r}", file=sys.stderr)
    yield "auto, gram, by the tasks' losses", chosen
    same = chosen.choice.name == "propagated"  # which takes a while
    yield "propagated", chosen if same else made("fisher", tasks=tasks)
    yield "propagated, shrink 0.95", made("fisher", tasks=tasks, shrink=0.95)
    chosen = made("auto", c.base, **how, validate=c.validate)
    print(f"auto took {chosen.choice!r}", file=sys.stderr)
    yield "auto, gram, by validation", chosen


def plain(c: Case, made: Callable[..., State]) -> Iterator[tuple[str, State]]:
    """What needs no precisions."""
    share = 1 / len(c.models)
    tried = (made("task_arithmetic", c.base, weights=a) for a in c.grid)
    yield "task arithmetic, best α on test data", max(tried, key=lambda s: sum(c.scores(s)))
    yield "TIES, density 0.2", made("ties", c.base, density=0.2)
    yield "DARE, density 0.5", made("dare_linear", c.base, density=0.5, weights=share)
    yield "DARE-TIES, density 0.5", made("dare_ties", c.base, density=0.5, weights=share)
    yield "RegMean (paper, 0.95)", regmean(c)
    yield "RegMean++ (paper, 0.95)", regmean_plus_plus(c)


def fitted(task: blr.Task, structure: str) -> blr.Posterior:
    """δ is 1, and merging takes it off."""
    return blr.fit_laplace(task, structure=structure, prior_precision=1.0).to("cpu")


def judged(c: Case, name: str, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Scores by merge and task, and how the merges disturb the training losses."""
    own = [c.scores(m, only=task)[0] for task, m in c.models.items()]
    rows = [("own models", own), ("base", c.scores(c.base))]
    states, started = {}, time.perf_counter()
    for merge, state in merges(c):
        states[merge] = state
        rows.append((merge, c.scores(state)))
        took = time.perf_counter() - started
        print(f"{name} {seed}: {merge}: {rows[-1][1]}, {took:.0f} s", file=sys.stderr, flush=True)
    rows.append(("joint training", c.scores(c.joint)))
    scored = [
        {"case": name, "seed": seed, "merge": merge, "task": task, "score": round(score, 3)}
        for merge, scores in rows
        for task, score in zip(c.test, scores, strict=True)
    ]
    precisions = [fitted(t, "diag") for t in c.train.values()]
    disturbed = blr.gradient_mismatch(
        c.train, {**states, "joint": c.joint}, models=c.models, precisions=precisions,
        progress=False,
    )  # fmt: skip
    found = pd.DataFrame(disturbed.rows)
    return scored, [
        {"case": name, "seed": seed, "task": task, **_followed(part)}
        for task, part in [*found.groupby("task", sort=False), ("all", _summed(found))]
    ]


def _summed(found: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(found.groupby("merge")[["mismatch", "gap", "gap_by_precision"]].sum())


def _followed(part: pd.DataFrame) -> dict[str, float]:
    return {
        f"Spearman of {what} and gap": round(float(spearmanr(part[what], part["gap"])[0]), 2)  # type: ignore[arg-type]
        for what in ("mismatch", "gap_by_precision")
    }


def markdown(table: pd.DataFrame) -> str:
    """A table as results.py reads it."""
    head = [" | ".join(table.columns), "|".join(["---"] * table.shape[1])]
    rows = [" | ".join(map(str, row)) for row in table.itertuples(index=False)]
    return "\n".join(f"| {row} |" for row in [*head, *rows])


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Mean and worst task, with standard errors over the seeds, and the way to joint training."""
    keys = ["case", "merge"]
    scores = table.groupby([*keys, "seed"], sort=False)["score"].agg(mean="mean", worst="min")
    scores = scores.reset_index()
    ends = scores.pivot(index=["case", "seed"], columns="merge", values="mean")
    ends = ends[["average", "joint training"]].set_axis(["low", "high"], axis=1)
    scores = scores.join(ends, on=["case", "seed"])
    scores["way"] = (scores["mean"] - scores["low"]) / (scores["high"] - scores["low"])
    by_case = scores.groupby(keys, sort=False)[["mean", "worst", "way"]]
    found = by_case.agg(["mean", "sem"]).round(3)
    found.columns = [a if b == "mean" else f"± {a}" for a, b in found.columns]
    found.insert(0, "seeds", scores.groupby(keys, sort=False)["seed"].nunique())
    return found.reset_index()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, followed = [], []
    for name in options.case:
        for seed in options.seeds:
            case = CASES[name](seed, options.device)
            scores, correlations = judged(case, name, seed)
            rows += scores
            followed += correlations
    table = pd.DataFrame(rows)
    print(*map(markdown, (summary(table), pd.DataFrame(followed))), sep="\n\n")


if __name__ == "__main__":
    main()
