"""How fast an index answers, at 32 kB an example.

    python -m benchmarks.query_cost [--texts 50000] [--questions 20] [--threads 2]

The index is built by its own writer. Its examples are of a linear layer, so that their gradients
take no time; what is stored, read and compared is as much as of a language model's texts. Printed
are seconds of the clock and of all processors: to open the index, for the best 50 of each question
by the index alone, and with those 50 compared by their exact influence. A question's own gradient
is in it; of a language model it takes longer. The folder takes 1.6 GB.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

import blr_analysis as blr
from blr_analysis.sensitivity import Index

INPUTS = 512
CLASSES = 128
BEST = 50


def task_of(model: nn.Module, n_examples: int, seed: int) -> blr.Task:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n_examples, INPUTS, generator=generator)
    labels = torch.randint(CLASSES, (n_examples,), generator=generator)
    return blr.Task(model, (inputs, labels), progress=False)


@contextmanager
def timed(label: str) -> Iterator[None]:
    """Print how long the block took."""
    start = time.perf_counter()
    processors = time.process_time()
    yield
    seconds = time.perf_counter() - start
    of_processors = time.process_time() - processors
    print(f"{label:<28}{seconds:6.1f} s, {of_processors:6.1f} s of processors", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=50_000)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(asked.threads)
    model = nn.Linear(INPUTS, CLASSES)
    task = task_of(model, asked.texts, seed=1)
    questions = task_of(model, asked.questions, seed=2)
    mean = task.parameters()
    precision = {name: torch.ones_like(m) for name, m in mean.items()}
    q = blr.Posterior(mean, precision, prior_precision=1.0, n_data=asked.texts)
    with tempfile.TemporaryDirectory() as folder:
        with timed("build"):
            built = Index.build(task, q, f"{folder}/index")
        print(f"{built.n_data:,} examples of {built.numbers:,} bytes")
        with timed("open"):
            index = Index.open(f"{folder}/index")
        with timed(f"best {BEST} of {asked.questions}"):
            index.top(questions, BEST, harmful=False)
        with timed("open with the data"):
            index = Index.open(f"{folder}/index", task=task)
        with timed(f"best {BEST}, refined"):
            index.top(questions, BEST, refine=BEST, harmful=False)


if __name__ == "__main__":
    main()
