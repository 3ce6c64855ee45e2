"""Train and retrain; see :mod:`benchmarks.truth`. What is on disk already is kept."""

from __future__ import annotations

import argparse

import torch

from benchmarks.truth.cases import CASES
from benchmarks.truth.retrain import KINDS, Truth, available

QUICK = 2  # retrainings of each kind


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--what", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} retrainings of each kind")
    parser.add_argument("--list", action="store_true", help="say what is on disk, and stop")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        for case, counts in available().items():
            print(case, *(f"{kind}: {count}" for kind, count in counts.items()))
        return
    torch.set_num_threads(1)
    for case in chosen.case:
        truth = Truth(case)
        truth.train()
        for kind in chosen.what:
            for line in truth.retrain(kind, QUICK if chosen.quick else None):
                print(line, flush=True)


if __name__ == "__main__":
    main()
