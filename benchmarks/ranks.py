"""Two processes of one thread beside one process of two: seconds of what `torchrun` shares out.

    python -m benchmarks.ranks [--sequences 32] [--tokens 64] [--rounds 3] [--model FOLDER]

Wall seconds, of the slower process, the least of ``--rounds`` turns that are taken alternately,
each in processes of its own and after the model's plan was made. The model is that of
``benchmarks.language``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.language import load, task_of


def rows(args: argparse.Namespace, folder: str) -> dict[str, float]:
    """Seconds of every row, in this process or all of them."""
    import blr_analysis as blr
    from blr_analysis import ranks
    from blr_analysis.backprop.plan import plan_for

    model = load(args.model, torch.float32)
    task, test = (
        task_of(model, n, k, None, args.tokens) for k, n in enumerate((args.sequences, 8))
    )
    quiet: dict[str, Any] = {"progress": False}
    plan_for(task, task.parameters())
    fit_laplace, build = blr.fit_laplace, blr.Index.build  # imported before they are timed
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        ranks.wait()
        start = time.perf_counter()
        result = call()
        ranks.wait()
        seconds[name] = time.perf_counter() - start
        return result

    fit: dict[str, Any] = {"curvature": "mc_fisher", "prior_precision": 1e3, **quiet}
    q = timed("fit_laplace, diag", lambda: fit_laplace(task, structure="diag", **fit))
    timed("fit_laplace, kron", lambda: fit_laplace(task, structure="kron", **fit))
    timed("sensitivity", lambda: blr.sensitivity(task, q, **quiet))
    timed("leave_one_out", lambda: blr.leave_one_out(task, q, **quiet))
    timed("influence, 8 questions", lambda: blr.influence(task, q, test, **quiet))
    index = f"{folder}/index"
    timed("Index.build", lambda: build(task, q, index, rank=2048, **quiet))
    return seconds


def started(args: argparse.Namespace, processes: int) -> dict[str, float]:
    """The same in new processes, two threads all in all."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    given = [f"--{name}={value}" for name, value in vars(args).items() if value is not None]
    with tempfile.TemporaryDirectory() as folder:
        place = ["-m", "benchmarks.ranks", "--folder", folder, *given]
        command = [sys.executable, *(launcher if processes == 2 else []), *place]
        env = {**os.environ, "OMP_NUM_THREADS": str(2 // processes)}
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        each = [json.loads(p.read_text()) for p in Path(folder).glob("rank*.json")]
    return {name: max(seconds[name] for seconds in each) for name in each[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        from blr_analysis import ranks

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        with ranks.opened():
            place = Path(args.folder, f"rank{ranks.rank()}.json")
            place.write_text(json.dumps(rows(args, args.folder)))
        return
    turns = [[started(args, processes) for processes in (1, 2)] for _ in range(args.rounds)]
    print("| | one process, 2 threads | two processes | ratio |\n| --- | --- | --- | --- |")
    for name in turns[0][0]:
        one, two = (min(turn[k][name] for turn in turns) for k in (0, 1))
        print(f"| {name} | {one:.2f} s | {two:.2f} s | {two / one:.2f} |")


if __name__ == "__main__":
    main()
