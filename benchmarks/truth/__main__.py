"""Train and retrain; see :mod:`benchmarks.truth`. What is on disk already is kept."""

from __future__ import annotations

import argparse

import torch

from benchmarks.truth import plan, store
from benchmarks.truth.recipes import CASES
from benchmarks.truth.results import available
from benchmarks.truth.retrain import retrain, starting_memory, train

QUICK = 2  # retrainings of each kind


def run(case: str, kinds: list[str], few: int | None = None) -> None:
    """Everything that is missing of these kinds of one case."""
    recipe = CASES[case]
    trained = train(case, recipe)
    print(f"{case}: trained; {_said(trained.record)}", flush=True)
    memory, ready = None, False
    for kind in kinds:
        for job in plan.jobs(kind, recipe, trained.data.y, trained.influence, few):
            path = store.folder(case) / kind / f"{job.name}.safetensors"
            if store.record_of(path, recipe.hash) is not None:
                continue
            if not ready and kind in ("loo", "relabel"):
                memory, ready = starting_memory(trained), True
            tensors, record = retrain(trained, job, memory)
            store.write(path, tensors, record)
            nll = float(tensors["test_losses"].mean())
            print(f"{case} {kind} {job.name}: test nll {nll:.4f}; {_said(record)}", flush=True)


def _said(record: dict) -> str:
    return (
        f"{record['evaluations']} evaluations, gradient {record['gradient_norm']:.1e} of "
        f"{record['start_norm']:.1e}, {record['seconds']:.1f} s"
        + ("" if record["converged"] else ", NOT CONVERGED")
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--what", nargs="+", choices=plan.KINDS, default=list(plan.KINDS))
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} retrainings of each kind")
    parser.add_argument("--list", action="store_true", help="say what is on disk, and stop")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        for case, counts in available().items():
            print(case, *(f"{kind}: {count}" for kind, count in counts.items()))
        return
    torch.set_num_threads(1)
    for case in chosen.case:
        run(case, chosen.what, QUICK if chosen.quick else None)


if __name__ == "__main__":
    main()
