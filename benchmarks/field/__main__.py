"""Models as people train them: minibatches, a fixed number of epochs, AdamW, IVON or SGD.

    python -m benchmarks.field [--case NAME ...] [--table NAME ...] [--peers DIR] [--quick]
        [--models 3] [--cache FOLDER]
        | python -m benchmarks.results field_groups field_relabelled field_halves field_singles

Truth is retraining by the same recipe (benchmarks/field/cases.py), the mean over five seeds (three
for halves); the ceiling is one seed against the mean of the others. It is kept in FOLDER, one file
per seed, so that an interrupted run goes on where it stopped. Nothing is told to the package but
the model, its data and its loss: ``prior_precision=None``, kron, defaults. Figures are means over
the models of the first seeds, every one compared with the mean of the retrainings.

* Groups: the test loss without each class (of the table: six ranges of its first column; of the
  regression: six ages; of the texts: six domains), by ``what_if_each``. r is Pearson's over the
  groups, error the mean of |loss − true| / true, "nothing" that of the loss before, "covered" how
  often the interval holds the truth. Where two groups are retrained, they are not counted.
* Relabelled: the same where a tenth of a group has other labels, by ``what_if``.
* Singles (of four small cases): 48 examples left out one at a time, the minibatches otherwise the
  same; what their own losses rise by ("total": Σ estimated / Σ true), and 200 test losses.
* Halves: the linear datamodeling score of 32 random halves and 200 test examples. Peers see the
  first model, each at its default and at every damping of a grid, of which hindsight may take the
  best; TRAK also the models of three seeds.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch

from benchmarks.field import tables, truth
from benchmarks.field.cases import CASES, SINGLES
from benchmarks.truth import store

KINDS = ("groups", "relabelled", "halves", "singles")
COLUMNS = "| r | error | nothing | covered | passes |\n|---|---|---|---|---|---|"
HEADS = {
    "groups": "| without a group " + COLUMNS,
    "relabelled": "| a tenth relabelled " + COLUMNS,
    "halves": "| linear datamodeling score | mean | first model |\n|---|---|---|",
    "singles": "| an example left out | own loss: r | own: ranks | own: total | mean test loss: r "
    "| mean: ranks | each test loss: ranks |\n|---|---|---|---|---|---|---|",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.field", description=__doc__)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--table", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments")
    parser.add_argument("--cache", type=Path, default=store.root() / "field")
    parser.add_argument("--models", type=int, default=3, help="how many are analysed")
    parser.add_argument("--quick", action="store_true", help="two seeds of a small case")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # what they warn of shows in the figures
    names, seeds, models = args.case, 5, args.models
    if args.quick:
        names, seeds, models = ["table, class weights"], 2, 1
    for name in names:
        print(f"\n## {name}", flush=True)
        kinds = [kind for kind in args.table if kind != "singles" or name in SINGLES]
        known = truth.of(name, args.cache, seeds, ["models", *kinds])
        folder = truth.place(args.cache, name)
        rows = {
            "groups": lambda t=known, f=folder: tables.groups(t, models, f),
            "relabelled": lambda t=known: tables.relabellings(t, models),
            "halves": lambda t=known, f=folder: tables.datamodeling(t, models, f, args.peers),
            "singles": lambda t=known: tables.left_out(t, models),
        }
        for kind in kinds:
            print("", HEADS[kind], sep="\n", flush=True)
            began = time.process_time()
            for row in rows[kind]():
                print("|", " | ".join(row), "|", flush=True)
                taken = time.process_time() - began
                print(f"{name}, {kind}, {row[0]}: {taken:.0f} s", file=sys.stderr, flush=True)
                began = time.process_time()


if __name__ == "__main__":
    main()
