"""A language model's influence beside retraining, and beside other methods' scores.

    python -m benchmarks.language [CASE ...] [--truths DIR] [--peers DIR] [--what-if]

300 passages of ten presidents' speeches train a Llama of 1.2 M parameters by the case's recipe, 60
other passages test it. Truth is retraining by the same recipe from other seeds, kept in DIR
(``field`` in ``$BLR_CACHE`` or ``~/.cache/blr_analysis``): on 24 random halves (two seeds), without
each of the ten presidents and of ten folds (one seed): about 14 minutes of one processor. The peers
are those of ``make peers``, of which kronfluence reads language models.
Printed of each method:

* halves: the linear datamodeling score over the 24 halves and 60 test passages, against the mean of
  two seeds; "one seed": of the retrainings of one as a foretelling of the other's.
* presidents: Pearson's correlation of the rises of the test loss of each president's passages
  without each president, 10 · 10 rises; each column less its mean, which retraining does not tell
  well.
* seconds of a processor, its fit or its gradients included.

Then the left-out perplexity beside that of the folds, and which of the shuffled passages are among
the first of ``suspicious``; with ``--what-if`` the loss without each president by short trainings,
which take some minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.agreement.metrics import ceiling, linear_datamodeling, pearson
from benchmarks.agreement.runner import interpreter
from benchmarks.language import cases
from benchmarks.language.truth import HALVES, SEEDS, Kind, Truths, task_of
from benchmarks.truth import store

K = 1.5  # of BM25: how often a word counts
B = 0.75  # of BM25: how far long passages count less
PEER = Path(__file__).with_name("run_kronfluence.py")


class Language:
    """One case: its model, its texts and the truth."""

    def __init__(self, name: str, truths: Path) -> None:
        self.name = name
        self.model, checkpoints, recipe = cases.trained(cases.CASES[name])
        self.train, self.test = cases.texts()
        self.task = task_of(self.model, self.train, checkpoints, recipe)
        self.bare = task_of(self.model, self.train)
        self.test_task = task_of(self.model, self.test)
        self.truths = Truths(name, self.task, truths)
        print(f"{name}: {recipe}, {checkpoints}, {self.size:,} parameters", flush=True)

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def methods(self, python: Path | None) -> dict[str, Callable[[], Tensor]]:
        """What gives a score to each pair of a training and a test passage, by name."""

        def influence(task: blr.Task) -> Tensor:
            influences: Any = blr.influence(task, blr.fit_laplace(task), self.test_task)
            return influences.matrix

        methods: dict[str, Callable[[], Tensor]] = {
            "**influence, four checkpoints**": lambda: influence(self.task),
            "**influence, the end alone**": lambda: influence(self.bare),
            "gradient dot product": lambda: self.gradients(self.end),
            "gradient dot product, four checkpoints (TracIn)": self.tracin,
            "gradient cosine": lambda: self.gradients(self.end, cosine=True),
            "BM25": lambda: bm25(self.train.ids, self.test.ids),
        }
        if python is not None:
            methods["kronfluence 1.0.1, EK-FAC"] = lambda: self.kronfluence(python)
        return methods

    @property
    def end(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def tracin(self) -> Tensor:
        """Dot products at the checkpoints and the end, added up."""
        names = self.end.keys()
        states = [{name: state[name] for name in names} for state in self.task.checkpoints]
        return torch.stack([self.gradients(state) for state in [*states, self.end]]).sum(0)

    def gradients(self, weights: dict[str, Tensor], *, cosine: bool = False) -> Tensor:
        """∇ℓ_iᵀ ∇ℓ_j of a plain loop over the passages, ``[N, M]``."""
        model = cases.llama()
        model.load_state_dict(weights, strict=False)
        model.eval()
        of_test = torch.stack([gradient(model, ids, cosine) for ids in self.test.ids])
        rows = [of_test @ gradient(model, ids, cosine) for ids in self.train.ids]
        return torch.stack(rows)

    def kronfluence(self, python: Path) -> Tensor:
        """A peer's scores, by its own environment."""
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            model: Any = self.model
            model.save_pretrained(place / "model")
            texts = {"train": self.train.ids, "test": self.test.ids}
            (place / "texts.json").write_text(json.dumps(texts))
            subprocess.run([python, str(PEER), folder], check=True, capture_output=True)
            return torch.from_numpy(np.load(place / "scores.npy"))

    def compare(self, python: Path | None) -> None:
        """The table of all methods."""
        halves = self.truths.read("halves")
        sources = self.truths.read("sources")
        print(
            f"| {self.name}: method | halves | presidents | seconds |\n|---|---|---|---|",
            flush=True,
        )
        again = ceiling(halves.losses[0], halves.losses[1:].mean(0))
        print(f"| one seed | {again} | | {halves.seconds:.1f} for a half |", flush=True)
        for name, method in self.methods(python).items():
            start = processor_seconds()
            matrix = method().double()
            spent = processor_seconds() - start
            score = linear_datamodeling(matrix, halves.subsets, halves.losses.mean(0))
            rises = self.by_source(matrix)
            r = centred_correlation(rises, self.true_rises(sources))
            print(f"| {name} | {score} | {r:.2f} | {spent:.0f} |", flush=True)

    def by_source(self, matrix: Tensor) -> Tensor:
        """Foretold rises of each source's mean test loss without each source, ``[10, 10]``."""
        without = torch.stack([matrix[members(self.train, s)].sum(0) for s in cases.SOURCES])
        return self.of_tests(without)

    def of_tests(self, losses: Tensor) -> Tensor:
        """The mean over each source's test passages, ``[…, 10]``."""
        return torch.stack(
            [losses[..., members(self.test, s)].mean(-1) for s in cases.SOURCES], dim=-1
        )

    def true_rises(self, sources: Kind) -> Tensor:
        return self.of_tests(sources.losses.mean(0))

    def left_out(self) -> None:
        """Perplexities of the training passages, left out and not."""
        folds = self.truths.read("folds")
        held_out = torch.stack(
            [
                folds.own_losses[:, k, ~subset].mean(0).sum()
                for k, subset in enumerate(folds.subsets)
            ]
        )
        n_tokens = sum(len(ids) - 1 for ids in self.train.ids)
        true = float((held_out.sum() / n_tokens).exp())
        for name, task in {"four checkpoints": self.task, "the end alone": self.bare}.items():
            q = blr.fit_laplace(task)
            loo = blr.leave_one_out(task, q)
            print(f"left-out perplexity, {name}: {loo.perplexity:.0f} of {true:.0f}; {loo!r}")
            if task is self.task:
                start = time.process_time()
                calibrated = blr.calibrate(task, q)
                spent = time.process_time() - start
                loo = blr.leave_one_out(task, calibrated)
                print(
                    f"left-out perplexity, calibrated in {spent:.0f} s: {loo.perplexity:.0f} of "
                    f"{true:.0f}; τ {calibrated.temperature:.3g}, {loo!r}",
                    flush=True,
                )

    def shuffled(self) -> None:
        """How many of the shuffled passages are among the first of each order."""
        folds = self.truths.read("folds")
        cross_validated = torch.empty(len(self.train), dtype=torch.float64)
        for k, subset in enumerate(folds.subsets):
            cross_validated[~subset] = folds.own_losses[:, k, ~subset].mean(0)
        n_tokens = torch.tensor([len(ids) - 1.0 for ids in self.train.ids]).double()
        suspicions = blr.suspicious(self.task, blr.fit_laplace(self.task))
        guess = guessed_losses(self.train.ids) / n_tokens
        assert suspicions.unfamiliarity is not None
        scores = {
            "loss a token, mean of the run": suspicions.losses,
            "the same above a guess by frequency": suspicions.losses - guess,
            "loss a token, the end": suspicions.training,
            "the same above a guess by frequency, the end": suspicions.training - guess,
            "left-out loss a token": suspicions.left_out,
            "unfamiliarity": suspicions.unfamiliarity,
            "cross-validated loss a token": cross_validated / n_tokens,
            "the same above a guess by frequency, cross-validated": (
                cross_validated / n_tokens - guess
            ),
        }
        wrong = set(self.train.shuffled)
        first = set(suspicions.order[: len(wrong)].tolist())
        print(f"shuffled: {len(wrong & first)} of {len(wrong)} by {suspicions!r}", flush=True)
        for name, score in scores.items():
            first = set(score.argsort(descending=True)[: len(wrong)].tolist())
            area = area_under_curve(score, self.train.shuffled)
            print(f"shuffled, {name}: {len(wrong & first)}, area {area:.2f}", flush=True)

    def what_if(self) -> None:
        """The loss without each president, by short trainings."""
        sources = self.truths.read("sources")
        true = sources.losses.mean(0).mean(1)
        start = time.process_time()
        table = blr.what_if_each(
            self.task,
            blr.fit_laplace(self.task),
            by="source",
            evaluate=self.test_task,
            solver="replay",
            seeds=2,
            passes=3,
        )
        spent = time.process_time() - start
        after = torch.tensor(
            [float(table.set_index("group").loc[s, "nll_after"]) for s in cases.SOURCES]
        )
        r = float(pearson(after, true))
        error = float(((after - true).abs() / true).mean())
        print(f"what-if by replay: r {r:.2f}, error {error:.1%}, {spent:.0f} s", flush=True)


def guessed_losses(texts: list[list[int]]) -> Tensor:
    """What a guess by the words' frequencies loses at each text, ``[N]`` in nats."""
    counts = Counter(word for text in texts for word in text[1:])
    total = sum(counts.values())
    return torch.tensor(
        [sum(-math.log(counts[word] / total) for word in text[1:]) for text in texts],
        dtype=torch.float64,
    )


def area_under_curve(scores: Tensor, wrong: list[int]) -> float:
    """How often a wrong text has a larger score than another one."""
    is_wrong = torch.zeros(len(scores), dtype=torch.bool)
    is_wrong[wrong] = True
    above = scores[is_wrong][:, None] > scores[~is_wrong]
    return float(above.double().mean())


def processor_seconds() -> float:
    """Of this process and of those that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def members(texts: cases.Texts, source: str) -> Tensor:
    """The passages of a source."""
    return torch.tensor([i for i, name in enumerate(texts.sources) if name == source])


def centred_correlation(foretold: Tensor, true: Tensor) -> float:
    """Pearson's, of entries less the means of their columns."""
    return float(pearson(*((t - t.mean(0)).double().flatten() for t in (foretold, true))))


def gradient(model: nn.Module, ids: list[int], cosine: bool) -> Tensor:
    """The gradient of a passage's summed loss, ``[P]``; of unit length for cosines."""
    batch = torch.tensor([ids])
    loss = model(input_ids=batch, labels=batch).loss * (len(ids) - 1)
    parts = torch.autograd.grad(loss, list(model.parameters()))
    flat = torch.cat([part.flatten() for part in parts])
    return flat / flat.norm() if cosine else flat


def bm25(texts: list[list[int]], questions: list[list[int]]) -> Tensor:
    """Robertson and Zaragoza's score of every text for every question, ``[N, M]``."""
    counts = [Counter(text) for text in texts]
    lengths = torch.tensor([len(text) for text in texts]).double()
    damping = K * (1 - B + B * lengths / lengths.mean())
    n_with_word = Counter(word for text in counts for word in text)
    columns = []
    for question in questions:
        score = torch.zeros(len(texts), dtype=torch.float64)
        for word in question:
            n = n_with_word[word]
            rarity = np.log1p((len(texts) - n + 0.5) / (n + 0.5))
            c = torch.tensor([text[word] for text in counts]).double()
            score += rarity * c / (c + damping)
        columns.append(score)
    return torch.stack(columns, dim=1)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.language", None, __doc__, formatter_class=raw
    )
    parser.add_argument("cases", nargs="*", default=list(cases.CASES), metavar="CASE")
    parser.add_argument("--truths", type=Path, default=store.root() / "field")
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments")
    parser.add_argument("--what-if", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"{HALVES} halves, seeds {SEEDS}")
    python = None
    if arguments.peers is not None:
        python = interpreter(arguments.peers, "kronfluence")
    for name in arguments.cases:
        language = Language(name, arguments.truths)
        language.compare(python)
        language.left_out()
        language.shuffled()
        if arguments.what_if:
            language.what_if()


if __name__ == "__main__":
    main()
