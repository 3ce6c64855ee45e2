"""Every analysis beside retraining, of models trained as people train them.

    python -m benchmarks.field [CASE ...] [--truths DIR]
    python -m benchmarks.field [CASE ...] --calibrate [--truths DIR]
    python -m benchmarks.field --widening [--truths DIR]

Truth is retraining by the same recipe from other seeds, three for the halves and two else (of the
converged model a descent from its weights), kept in DIR (``field`` in ``$BLR_CACHE`` or
``~/.cache/blr_analysis``). 4 % of the training targets are wrong, of wine and breast cancer 10 and
12 %. Printed of each case:

* linear datamodeling score: over 32 random halves, of 150 test examples; by four checkpoints, two
  runs, Kronecker factors recorded while it trained, and the end alone.
* leave-one-out: the mean loss, in parts of that of 20-fold cross-validation (of the converged model
  the rises of 40 single examples, in total), and rank correlations with one seed's truth; "seeds":
  of the two seeds with each other.
* groups: the test loss without each, Pearson's r, mean relative error, truths in the interval; and
  what two seeds of retraining have of them.
* calibrate: τ's error, and whether the cross-validated loss lies between the left-out losses at
  τ · exp(± error).
* wrong labels: the share of planted ones among the first k of ``suspicious``; how many labels it
  calls wrong, the share of them that are, and the share that it expects.

``--calibrate`` prints that row alone, beside one seed of cross-validation.

``--widening`` tells, of the cases run before, the factor by which intervals must be widened for
four of five truths, and what it covers of a case that had no part in it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import blr_analysis as blr
from benchmarks.agreement.cases import retrained
from benchmarks.agreement.metrics import ceiling, linear_datamodeling, pearson, spearman
from benchmarks.field.cases import CASES, Data, losses, trained
from benchmarks.field.truth import FEW_SEEDS, SEEDS, Truths, by_recipe, halves, to_the_minimum
from benchmarks.truth import store
from blr_analysis.likelihoods import resolve
from blr_analysis.sensitivity.calibrate import left_out_losses
from blr_analysis.sensitivity.solvers import WIDENED


class Field:
    """One case: its model, what is told of it, and the truth."""

    def __init__(self, name: str, folder: Path, seeds: Mapping[str, int] = SEEDS) -> None:
        self.name = name
        self.folder = folder
        case = CASES[name]
        data = case.data()
        self.started = time.process_time()
        if case.delta:
            data = data._replace(x=data.x.double(), x_test=data.x_test.double())
            torch.manual_seed(0)
            model = retrained(case.network(), data.x, data.y, resolve("categorical"), case.delta)
            self.told: dict[str, Any] = {}
            retrain = to_the_minimum(case, data, model.state_dict())
        else:
            model, self.checkpoints, recipe = trained(case, data)
            self.told = {"checkpoints": self.checkpoints, "recipe": recipe}
            print(f"{recipe}, {self.checkpoints}", flush=True)
        self.model = model.eval()
        self.data = data
        self.case = case
        # of the log density of a normal, which is no part of the error
        self.constant = 0.5 * math.log(2 * math.pi) if case.likelihood == "gaussian" else 0.0
        self.task, self.bare = self._task(**self.told), self._task()
        self.test = self._task((data.x_test, data.y_test))
        if not case.delta:
            retrain = by_recipe(case, self.task)
        self.truths = Truths(name, case, data, retrain, repr(self.task.recipe), folder, seeds)
        own = losses(model, data.x, data.y)
        unseen = losses(model, data.x_test, data.y_test)
        self.row("trained", f"loss {own.mean():.3f}, test {unseen.mean():.3f}")

    def _task(self, given: Any = None, **told: Any) -> blr.Task:
        data: Data = self.data
        about = {} if given else {"metadata": {"group": data.groups.tolist()}}
        pair = given or (data.x, data.y)
        kind = self.case.likelihood
        return blr.Task(self.model, pair, likelihood=kind, progress=False, **about, **told)

    def row(self, what: str, found: str) -> None:
        print(f"| {self.name} | {what} | {found} |", flush=True)

    def fitted(self) -> dict[str, tuple[blr.Task, Any]]:
        """What is compared, by name."""
        delta: Any = {"structure": "full", "prior_precision": self.case.delta}
        if self.case.delta:
            return {"the end": (self.task, blr.fit_laplace(self.task, **delta))}
        run = blr.fit_laplace(self.task)
        n = len(self.data.x)
        initial = self.told["recipe"].initial
        recorded = self.checkpoints.posterior(n_data=n, initial=initial)
        return {
            "four checkpoints": (self.task, run),
            "two runs": (self.task, [*blr.rerun(self.task, seeds=1), run]),
            "recorded": (self.task, recorded),
            "the end alone": (self.bare, blr.fit_laplace(self.bare)),
        }

    def influence(self, fits: dict[str, tuple[blr.Task, Any]]) -> None:
        kept = halves(len(self.data.x))
        true = self.truths.halves.mean(0)
        asked = self.test.subset(range(true.shape[1]))
        other = ceiling(self.truths.halves[0], self.truths.halves[1:].mean(0))
        self.row("influence, one seed of the others", str(other))
        for name, (task, q) in fits.items():
            start = time.process_time()
            matrix = blr.influence(task, q, asked).as_subclass(Tensor).double()
            taken = time.process_time() - start
            score = linear_datamodeling(matrix, kept, true)
            self.row(f"influence, {name}", f"{score}, {taken:.1f} s")

    def left_out(self, fits: dict[str, tuple[blr.Task, Any]]) -> None:
        truths = self.truths.folds
        seen = self.truths.folds.isfinite().all(0)
        both = float(spearman(truths[0, seen], truths[-1, seen]))
        for name, (task, q) in fits.items():
            loo = blr.leave_one_out(task, q)
            found, before = (
                t.double()[seen] - self.constant for t in (loo.losses, loo.losses_before)
            )
            true = truths[:, seen].mean(0)
            base = torch.zeros_like(before)
            if self.case.delta:
                base = before  # rises, of single examples
            ratio = float((found - base).sum() / (true - base).sum())
            ranked = torch.stack([spearman(found - base, t - base) for t in truths[:, seen]])
            plain = torch.stack([spearman(before, t) for t in truths[:, seen]]).mean()
            self.row(
                f"leave-one-out, {name}",
                f"{ratio:.2f} of {float(true.mean()):.3f}, ranks {float(ranked.mean()):.3f} "
                f"(seeds {both:.3f}, training loss {float(plain):.3f}), τ {q.temperature:.3f}",
            )

    def inside(self, task: blr.Task, q: Any) -> str:
        """Whether the truth lies in the left-out losses at both ends of the temperature."""
        if q.temperature_error is None:
            return "not calibrated"
        asked = self.truths.folds.isfinite().all(0).nonzero().flatten()
        at_scale = left_out_losses(task, q, asked)
        ends = [q.temperature * math.exp(sign * q.temperature_error) for sign in (-1, 1)]
        low, high = (float(at_scale(end).mean()) - self.constant for end in ends)
        true = float(self.truths.folds[:, asked].mean())
        said = "inside" if low <= true <= high else "outside"
        error = f"error of log τ {q.temperature_error:.2f}"
        return f"{error}; truth {true:.3f} {said} {low:.3f} to {high:.3f}"

    def groups(self, fits: dict[str, tuple[blr.Task, Any]]) -> list[dict[str, Any]]:
        true = self.truths.groups.mean(0).double()
        kept = []
        for name, (task, q) in fits.items():
            start = time.process_time()
            table = blr.what_if_each(task, q, by="group", evaluate=self.test)
            taken = time.process_time() - start
            columns = ("nll_after", "nll_low", "nll_high")
            guess, low, high = (torch.tensor(table[c].to_numpy()) - self.constant for c in columns)
            inside = int(((low <= true) & (true <= high)).sum())
            error = float(((guess - true).abs() / true).mean())
            seeds = self.truths.groups.double()
            apart = float(((seeds[0] - seeds[-1]).abs() / true).mean())
            self.row(
                f"groups, {name}",
                f"r {float(pearson(guess, true)):.3f}, error {error:.1%}, {inside} of {len(true)} "
                f"inside; truths {true.min():.2f} to {true.max():.2f}, seeds "
                f"r {float(pearson(seeds[0], seeds[-1])):.2f}, {apart:.1%} apart; {taken:.0f} s; "
                f"{table.note[0]!r}",
            )
            half = (high - low) / 2 / WIDENED
            kept.append({"how": name, "off": (guess - true).abs().tolist(), "half": half.tolist()})
        return kept

    def suspects(self, fits: dict[str, tuple[blr.Task, Any]]) -> None:
        wrong = set(self.data.wrong.tolist())

        def share(order: Tensor) -> str:
            return f"{len(wrong & set(order[: len(wrong)].tolist())) / len(wrong):.2f}"

        for name, (task, q) in fits.items():
            found = blr.suspicious(task, q)
            called = [i for i, kind in enumerate(found.kind) if kind == "label"]
            right = len(wrong.intersection(called)) / max(len(called), 1)
            calls = f"calls {len(called)}, {right:.2f} wrong"
            if found.precision is not None:
                calls += f", expected {found.precision:.2f}"
            self.row(f"wrong labels, {name}", f"{share(found.order)}; {calls}")
        own = losses(self.model, self.data.x, self.data.y)
        held = self.truths.folds.mean(0).nan_to_num(-torch.inf)
        self.row("wrong labels, training loss alone", share(own.argsort(descending=True)))
        self.row("wrong labels, cross-validated", share(held.argsort(descending=True)))

    def calibrated(self, task: blr.Task, q: Any) -> tuple[blr.Task, Any]:
        start = time.process_time()
        calibrated = (task, blr.calibrate(task, q))
        self.row("calibrate", f"{time.process_time() - start:.1f} s; {self.inside(*calibrated)}")
        return calibrated

    def calibrate(self) -> None:
        """The one row alone."""
        if self.case.delta:
            q = blr.fit_laplace(self.task, structure="full", prior_precision=self.case.delta)
        else:
            q = blr.fit_laplace(self.task)
        self.calibrated(self.task, q)

    def run(self) -> None:
        fits = self.fitted()
        if not self.case.delta:
            self.influence(fits)
        first, *_ = fits.values()
        some = {n: fit for n, fit in fits.items() if n in ("four checkpoints", "the end alone")}
        some = some or fits
        calibrated = self.calibrated(*first)
        left_out = {"calibrated": calibrated, **some}
        by_record = {}
        if "recorded" in fits:
            task, recorded = fits["recorded"]
            by_record["recorded, calibrated"] = (task, blr.calibrate(task, recorded))
        self.left_out({**left_out, **by_record})
        kept = self.groups(some)
        if by_record:
            self.groups(by_record)
        (self.folder / f"{self.name.replace(' ', '_')}.json").write_text(json.dumps(kept))
        self.suspects({"calibrated": calibrated, **some, **by_record})
        self.row("a training", f"{self.truths.seconds:.2f} s")
        self.row("all", f"{time.process_time() - self.started:.0f} s")


def widening(folder: Path) -> None:
    """The factor for four of five, and its coverage of each case left out of it."""
    found: dict[str, dict[str, Tensor]] = {}
    for path in sorted(folder.glob("*.json")):
        for row in json.loads(path.read_text()):
            ratio = torch.tensor(row["off"]) / torch.tensor(row["half"])
            if bool(ratio.isfinite().all()):
                found.setdefault(path.stem, {})[row["how"]] = ratio
    factor: Callable[[list[Tensor]], Tensor] = lambda some: torch.cat(some).quantile(0.8)  # noqa: E731
    for case, rows in found.items():
        others = factor([r for name, two in found.items() if name != case for r in two.values()])
        inside = {how: f"{int((r <= others).sum())} of {len(r)}" for how, r in rows.items()}
        print(f"{case}: by the others {float(others):.2f}, inside {inside}")
    print(f"of all: {float(factor([r for two in found.values() for r in two.values()])):.2f}")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.field", None, __doc__, formatter_class=raw
    )
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--truths", type=Path, default=store.root() / "field")
    parser.add_argument("--widening", action="store_true")
    parser.add_argument("--calibrate", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    given.truths.mkdir(parents=True, exist_ok=True)
    if given.widening:
        return widening(given.truths)
    for name in given.cases:
        if given.calibrate:
            Field(name, given.truths, FEW_SEEDS).calibrate()
        else:
            Field(name, given.truths).run()


if __name__ == "__main__":
    main()
