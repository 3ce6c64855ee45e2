"""How well estimates agree with retraining: ours beside other packages', in one run.

    python -m benchmarks.fidelity [--case NAME ...] [--peers DIR] [--only PEER ...]
        [--structure diag|kron|lowrank|full ...] [--table subsets|examples|classes ...]
        [--checkpoints K] [--limit SECONDS] [--quick]

DIR holds one virtual environment per peer (``make peers`` sets them up); those that are not there
are left out. Prints markdown tables: linear datamodeling score, leave-one-out, class removal,
with seconds and peak memory (above the model and data) of every row, on one thread.

* Linear datamodeling score: for each test example, Spearman's correlation over random halves of
  its true loss after retraining with minus the sum of the influences of the examples in the
  half; the mean over test examples, ± a standard error from resampling them. The last row is
  another set of first weights: the ceiling.
* Leave-one-out: Pearson, Spearman, and estimated over true total of the rises of the left-out
  examples' own losses. "calibrated" rows come after `blr.calibrate`.
* Class removal: test loss without each class, by `what_if`; Pearson, mean relative error, and
  passes over the data, as they are and as a share of what retraining took. A peer's influences
  are summed over the class.
* "At half weight": influences at the optimum where every example counts half, which is where a
  random half's mean is. "At effective weight": as much as a random half is worth, from the
  leverages.
* Peers are asked about the first 200 test examples; TRAK and TracIn get the same checkpoints as
  our row of several. A peer that fails is a row that says why.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.agreement import changes, from_truth, influences, metrics, runner
from benchmarks.agreement.cases import STRUCTURES, Case
from benchmarks.agreement.runner import Answer
from benchmarks.peers.problem import measured

T = TypeVar("T")
TESTS = 200  # test examples that influences are computed for
TABLES = ("subsets", "examples", "classes")
LIMIT = 400.0  # seconds that a peer may take, all its methods together


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__)
    parser.add_argument("--case", action="append", help="a case by name; default: all there are")
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments")
    parser.add_argument("--only", action="append", help="peers to run; default: all that are there")
    parser.add_argument("--quick", action="store_true", help="the small case alone")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds per peer")
    parser.add_argument(
        "--checkpoints", type=int, default=from_truth.CHECKPOINTS, help="of networks, for ensembles"
    )
    parser.add_argument(
        "--structure", action="append", choices=STRUCTURES, help="ours; default: all"
    )
    parser.add_argument(
        "--table", action="append", choices=TABLES, help="tables to print; default: all three"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # what a row warns of shows in its figures
    wanted = ["small"] if args.quick else args.case or from_truth.names()
    for name in wanted:
        case = from_truth.load(name, args.checkpoints)
        chosen = args.structure or STRUCTURES
        case = replace(case, structures=tuple(s for s in STRUCTURES if s in chosen))
        which = args.table or TABLES
        for line in tables(case, args.peers, args.only or runner.PEERS, args.limit, which):
            print(line, flush=True)  # at once: a long run that is stopped has shown something


def tables(
    case: Case, peers: Path | None, only: Any, limit: float, which: Sequence[str] = TABLES
) -> Iterator[str]:
    """The tables of one case, line by line."""
    x, y, own, tested = asked(case)
    answers = [a for n in only if peers for a in answer(peers, n, case, x, y, limit)]
    yield from (
        f"## {case.name}",
        "",
        f"{len(case.x):,} examples, {case.size:,} parameters, δ = {case.delta:g}, "
        f"{len(case.checkpoints)} trained models. " + " ".join(case.notes),
        "",
    )
    if "subsets" in which:
        yield from datamodeling(case, answers)
    if "examples" in which:
        yield from leaving_out(case, answers, own)
    if "classes" in which:
        yield from removing(case, answers, tested)


def asked(case: Case) -> tuple[Tensor, Tensor, slice, slice]:
    """Everything that a peer is asked about at once: test examples, then examples left out."""
    count = min(TESTS, len(case.x_test))
    x = case.x_test[:count]
    y = case.y_test[:count]
    if case.left_out is not None:
        chosen = case.left_out.indices
        x = torch.cat([x, case.x[chosen]])
        y = torch.cat([y, case.y[chosen]])
    return x, y, slice(count, len(x)), slice(0, count)


def answer(peers: Path, name: str, case: Case, x: Tensor, y: Tensor, limit: float) -> list[Answer]:
    """One peer's answers; none if it was not set up."""
    python = runner.interpreter(peers, name)
    if python is None:
        return []
    print(f"{case.name}: {name}", file=sys.stderr, flush=True)
    return runner.ask(python, runner.SCRIPTS / f"run_{name}.py", case, x, y, limit)


def attempt(name: str, call: Callable[[], T]) -> tuple[T | None, str]:
    """A result with "seconds | peak MB", or None with what went wrong."""
    print(f"  {name}", file=sys.stderr, flush=True)
    try:
        result, seconds, peak = measured(call)
    except Exception as error:  # one row must not take the table along
        lines = str(error).strip().splitlines() or [""]
        return None, f"{type(error).__name__}: {lines[0][:120]}".replace("|", "/")
    return result, f"{seconds:.2f} | {peak / 2**20:.0f}"


def cost(one: Answer) -> str:
    return f"{one.seconds:.2f} | {one.peak / 2**20:.0f}"


def datamodeling(case: Case, answers: list[Answer]) -> Iterator[str]:
    """Linear datamodeling scores."""
    truth = case.subsets
    if truth is None:
        return
    count = min(TESTS, len(case.x_test))
    kept = truth.kept
    losses = truth.losses[:, :count]
    yield from (
        f"**Linear datamodeling score**, {len(truth.kept)} random subsets of "
        f"{int(truth.kept[0].sum())} examples, {count} test examples",
        "",
        "| estimate | score | seconds | peak MB |",
        "|---|---|---|---|",
    )
    tests = case.test_task(case.task(), count)
    for name, call in influences.rows(case, tests).items():
        found, spent = attempt(f"LDS {name}", call)
        score = "" if found is None else metrics.linear_datamodeling(found, kept, losses)
        yield f"| **{name}** | {score} | {spent} |"
    for one in answers:
        if one.influence is None:
            yield f"| {one.name} | | {one.error.replace('|', '/')} | |"
            continue
        score = metrics.linear_datamodeling(one.influence[:, :count], kept, losses)
        yield f"| {one.name} | {score} | {cost(one)} |"
    if truth.again is not None:
        top = metrics.ceiling(losses, truth.again[:, :count])
        yield f"| *another seed's retrainings (ceiling)* | {top} | | |"
    yield ""


def leaving_out(case: Case, answers: list[Answer], own: slice) -> Iterator[str]:
    """Leave-one-out."""
    truth = case.left_out
    if truth is None:
        return
    yield from (
        f"**Leave-one-out**, {len(truth.indices)} examples retrained without; the first row of a "
        "structure includes its fit",
        "",
        "| estimate | Pearson | Spearman | estimated / true total | seconds | peak MB |",
        "|---|---|---|---|---|---|",
    )

    def row(name: str, found: Tensor, spent: str) -> str:
        c = metrics.changes(found, truth.rise)
        return f"| {name} | {c.pearson:.4f} | {c.spearman:.4f} | {c.total:.3f} | {spent} |"

    for name, call in changes.left_out(case).items():
        found, spent = attempt(f"LOO {name}", call)
        yield row(f"**{name}**", found, spent) if found is not None else failed(name, spent, 3)
    for one in answers:
        if one.influence is not None:
            alone = one.influence[:, own][truth.indices].diagonal()
            yield row(one.name, alone, cost(one))
    yield ""


def removing(case: Case, answers: list[Answer], tested: slice) -> Iterator[str]:
    """Class removal."""
    truth = case.removed
    if truth is None:
        return
    yield from (
        f"**Class removal**, test loss; {len(truth.names)} retrainings of {truth.passes:.0f} "
        "gradient evaluations each. "
        f"Influences: on the first {tested.stop} test examples.",
        "",
        "| estimate | Pearson | mean relative error | passes each | of retraining's | seconds "
        "| peak MB |",
        "|---|---|---|---|---|---|---|",
    )

    def row(name: str, found: Tensor, true: Tensor, passes: float | None, spent: str) -> str:
        c = metrics.changes(found, true)
        share = "| " if passes is None else f"{passes:.0f} | {passes / truth.passes:.0%}"
        return f"| {name} | {c.pearson:.3f} | {c.relative:.1%} | {share} | {spent} |"

    for name, call in changes.removals(case).items():
        found, spent = attempt(f"removal {name}", call)
        if found is None:
            yield failed(name, spent, 4)
            continue
        rise, passes = found
        yield row(f"**{name}**", rise, truth.rise(), passes, spent)
    for one in answers:
        if one.influence is not None:
            mean = one.influence[:, tested].mean(1)
            moved = torch.stack([mean[group].sum() for group in truth.indices])
            yield row(one.name, moved, truth.rise(tested.stop), None, cost(one))
    yield ""


def failed(name: str, why: str, columns: int) -> str:
    return f"| **{name}** |{' |' * columns} {why} | |"


if __name__ == "__main__":
    main()
