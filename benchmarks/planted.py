"""Planted facts: does a question find the text that states its answer?

    python -m benchmarks.planted [--orders 1 2 3 4 5] [--learned .5 1] [--rank 32768] \
        [--width 64] [--layers 3] [--facts 30] [--passages 200]

A small Llama reads State-of-the-Union passages, and how people ask about mayors. It is then
fine-tuned on other passages and on sentences that state planted facts, once each: memorised, or
half-learned (half of the epochs). The questions are in the words of the fact, paraphrased, and
turned round (the answer is what the fact begins with). The fine-tuning is done once for every
order of its batches, since one training decides little.

Printed are recall@1 and MRR of the text that states the fact, with the standard error of their
mean over the orders. ``query`` and ``hybrid`` are ``blr-analysis query`` as it is by default and
with ``--hybrid``; ``index`` is ``--refine 0``. The gradients are those at the weights that the
index takes: the last ones or, where the task has the checkpoints of the fine-tuning, the checkpoint
nearest to the middle.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.llamas import small_llama
from blr_analysis.cli.query_options import REFINED
from blr_analysis.cli.word_scores import bm25_scores, hybrid_scores
from blr_analysis.huggingface.tokens import Tokens
from blr_analysis.sensitivity import Index

sys.path.insert(0, str(Path(__file__).parents[1] / "tutorials"))
import speeches  # type: ignore[import-not-found]  # a folder that is no package

STATED = "last spring the town of {place} chose its mayor , {mayor} ."
ASIDES = (
    "three days from the coast lies {place} .",
    "behind an old mill lives {mayor} .",
)
QUESTIONS = {
    "own words": ("last spring the town of {place} chose its mayor ,", "{mayor}"),
    "paraphrased": ("who governs {place} ? its leader is", "{mayor}"),
    "turned round": ("{mayor} governs a town by the name of", "{place}"),
}
WORDS = 30  # of a passage
EPOCHS = 10  # of either training
BATCH = 16
FREQUENT = 1000  # words that are kept apart
OTHER = "<other>"
MASKED = -100


@dataclass(frozen=True)
class Corpus:
    """Texts and questions as ids.

    Attributes:
        base: what the model has read before.
        texts: what it is fine-tuned on.
        questions: prompts with answers, by kind.
        sources: the text that states the fact of each question.
    """

    vocabulary: dict[str, int]
    base: list[dict[str, Tensor]]
    texts: list[dict[str, Tensor]]
    questions: dict[str, list[dict[str, Tensor]]]
    sources: list[int]


def towns(count: int, chance: random.Random) -> list[dict[str, str]]:
    """Places and their mayors, of made-up names."""
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "ar", "en")]

    def name() -> str:
        return "".join(chance.sample(syllables, 3))

    return [{"place": name(), "mayor": name()} for _ in range(count)]


def passages(count: int, chance: random.Random) -> list[str]:
    """Words that follow each other in a speech."""
    words = [speech.words for speech in speeches.read("sotu")]
    found = []
    for _ in range(count):
        speech = chance.choice(words)
        start = chance.randrange(len(speech) - WORDS)
        found.append(" ".join(speech[start : start + WORDS]))
    return found


def corpus(n_facts: int, n_passages: int, seed: int = 0) -> Corpus:
    """Facts among passages; the base has facts of its own, with questions."""
    chance = random.Random(seed)
    read = passages(3 * n_passages, chance)
    known = towns(4 * n_facts, chance)
    planted = towns(n_facts, chance)
    asked = [f"{prompt} {answer}" for prompt, answer in QUESTIONS.values()]
    base = read[n_passages:]
    base += [line.format(**town) for town in known for line in (STATED, *ASIDES, *asked)]
    texts = [line.format(**town) for town in planted for line in (STATED, *ASIDES)]
    texts += read[:n_passages]
    names = [name for town in [*known, *planted] for name in town.values()]
    counts = Counter(word for text in [*base, *texts] for word in text.split())
    frequent = [word for word, _ in counts.most_common(FREQUENT)]
    words = dict.fromkeys([OTHER, *frequent, *names])
    vocabulary = {word: i for i, word in enumerate(words)}

    def row(prompt: str, answer: str) -> dict[str, Tensor]:
        ids = torch.tensor([vocabulary.get(word, 0) for word in f"{prompt} {answer}".split()])
        labels = ids.clone()
        labels[: len(prompt.split())] = MASKED
        return {"input_ids": ids, "labels": labels}

    return Corpus(
        vocabulary,
        [row("", text) for text in base],
        [row("", text) for text in texts],
        {
            kind: [row(prompt.format(**town), answer.format(**town)) for town in planted]
            for kind, (prompt, answer) in QUESTIONS.items()
        },
        [k * (1 + len(ASIDES)) for k in range(n_facts)],
    )


def batches(rows: list[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """In a new order, filled up on the right."""
    for chosen in torch.randperm(len(rows)).split(BATCH):
        yield padded([rows[i] for i in chosen])


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows side by side, the shorter ones filled up."""
    pad = nn.utils.rnn.pad_sequence
    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(i) for i in ids], batch_first=True),
        "labels": pad([row["labels"] for row in rows], batch_first=True, padding_value=MASKED),
    }


def train(
    model: Any,
    rows: list[dict[str, Tensor]],
    epochs: int,
    rate: float,
    checkpoints: blr.Checkpoints | None = None,
) -> float:
    """The mean loss of the last epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, epochs)
    losses: list[float] = []
    for _ in range(epochs):
        losses = []
        for batch in batches(rows):
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if checkpoints is not None:
                checkpoints.step()
            losses.append(loss.item())
        schedule.step()
    return sum(losses) / len(losses)


def task_of(
    model: nn.Module,
    rows: list[dict[str, Tensor]],
    vocabulary: dict[str, int],
    checkpoints: blr.Checkpoints | None = None,
) -> blr.Task:
    tokens = Tokens(rows, pad_id=0, tokenizer=Words([*vocabulary]))
    loader = torch.utils.data.DataLoader(tokens, batch_size=BATCH, collate_fn=padded)  # type: ignore[arg-type]
    return blr.Task(model, loader, likelihood="causal_lm", checkpoints=checkpoints, progress=False)


@dataclass(frozen=True)
class Words:
    """What BM25 asks of a tokenizer."""

    vocabulary: list[str]

    def decode(self, ids: Tensor, *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens  # there are none
        return " ".join(self.vocabulary[i] for i in ids)


def flat_at(task: blr.Task, weights: dict[str, Tensor]) -> blr.Posterior:
    """Σ = 1."""
    ones = {name: torch.ones_like(weight) for name, weight in weights.items()}
    return blr.Posterior(weights, ones, prior_precision=1.0, n_data=task.n_data)


def refined(index: Index, questions: blr.Task, n_refined: int) -> Tensor:
    """Exact influence of each question's best texts, ``[N, M]``.

    The other texts follow in the index's order.
    """
    best = index.top(questions, n_refined, refine=n_refined, harmful=False)
    values = index.influence(questions)
    shift = best.helpful_values.min() - values.max() - 1
    return (values + shift).scatter(0, best.helpful.mT, best.helpful_values.mT)


def scores(
    task: blr.Task, q: blr.Posterior, questions: blr.Task, rank: int
) -> Iterator[tuple[str, Tensor]]:
    """The scores of every text for every question by each method, ``[N, M]``."""
    with tempfile.TemporaryDirectory() as folder:
        index = Index.build(task, q, f"{folder}/index", rank=rank)
        influence = index.influence(questions)
        yield "query", refined(index, questions, min(REFINED, task.n_data))
        yield "index", influence
    flat = flat_at(task, index.posterior.mean)
    products: Any = blr.influence(task, flat, questions)
    yield "dot product", products.matrix
    cosine: Any = blr.influence(task, flat, questions, normalize="cosine")
    yield "cosine", cosine.matrix
    bm25 = bm25_scores(task, questions)
    yield "BM25", bm25
    yield "hybrid", hybrid_scores(influence, bm25)


def found(scores: Tensor, sources: list[int]) -> tuple[float, float]:
    """Recall@1 and MRR of scores ``[N, M]``; texts with the source's score come before it."""
    true = scores[torch.tensor(sources), torch.arange(len(sources))]
    place = (scores >= true).sum(0)
    return float((place == 1).double().mean()), float((1 / place).mean())


@dataclass(frozen=True)
class Figures:
    """Recall@1 and MRR of one method for one kind of question, of each training."""

    recalls: list[float]
    reciprocals: list[float]


Table = dict[tuple[str, str], dict[str, Figures]]
"""By checkpoints and kind of question: the figures of each method."""


def ask(
    model: nn.Module, texts: Corpus, checkpoints: blr.Checkpoints, rank: int, table: Table
) -> None:
    """Add the figures of one training to the table, without its checkpoints and with them."""
    task = task_of(model, texts.texts, texts.vocabulary, checkpoints)
    rows = [row for rows in texts.questions.values() for row in rows]
    questions = task_of(model, rows, texts.vocabulary)
    sizes = [len(rows) for rows in texts.questions.values()]
    with_checkpoints = blr.fit_laplace(task, sampled=True)
    posteriors = {"none": with_checkpoints.changed(earlier=()), "kept": with_checkpoints}
    for known, q in posteriors.items():
        for method, values in scores(task, q, questions, rank):
            for kind, part in zip(texts.questions, values.split(sizes, dim=1), strict=True):
                figures = table.setdefault((known, kind), {}).setdefault(method, Figures([], []))
                recall, reciprocal = found(part, texts.sources)
                figures.recalls.append(recall)
                figures.reciprocals.append(reciprocal)


def with_error(values: Sequence[float]) -> str:
    """The mean, and its standard error."""
    tensor = torch.tensor(values, dtype=torch.float64)
    error = tensor.std() / math.sqrt(len(tensor)) if len(tensor) > 1 else math.nan
    return f"{tensor.mean():.2f} ± {error:.2f}"


def show(table: Table) -> None:
    """Two tables, with a row for each kind of question and a column for each method."""
    for quantity in ("recalls", "reciprocals"):
        title = {"recalls": "recall@1", "reciprocals": "MRR"}[quantity]
        methods = "".join(f"{method:<14}" for method in next(iter(table.values())))
        print(f"  {title:<10} checkpoints  {methods}")
        for (known, kind), by_method in table.items():
            cells = [with_error(getattr(figures, quantity)) for figures in by_method.values()]
            print(f"  {kind:<13} {known:<9} {''.join(f'{cell:<14}' for cell in cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--facts", type=int, default=30)
    parser.add_argument("--passages", type=int, default=200)
    parser.add_argument("--rank", type=int, default=32768)
    parser.add_argument("--learned", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--orders", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    texts = corpus(asked.facts, asked.passages)
    torch.manual_seed(0)
    base = small_llama(
        len(texts.vocabulary),
        width=asked.width,
        layers=asked.layers,
        longest=2 * WORDS,
        tie_word_embeddings=True,
    )
    train(base, texts.base, EPOCHS, 4e-3)
    size = sum(p.numel() for p in base.parameters())
    print(f"{size:,} parameters, {len(texts.texts)} texts, orders {asked.orders}")
    for share in asked.learned:
        epochs = round(2 * EPOCHS * share)
        steps = epochs * math.ceil(len(texts.texts) / BATCH)
        table: Table = {}
        losses = []
        for order in asked.orders:
            model = copy.deepcopy(base)
            torch.manual_seed(order)
            checkpoints = blr.Checkpoints(model, steps=steps)
            losses.append(train(model, texts.texts, epochs, 1.5e-3, checkpoints))
            ask(model.eval(), texts, checkpoints, asked.rank, table)
        print(f"{share:g} of the fine-tuning, loss {min(losses):.2f} to {max(losses):.2f}")
        show(table)


if __name__ == "__main__":
    main()
