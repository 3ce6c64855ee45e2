"""Planted facts: does a question find the text that states its answer?

    python -m benchmarks.planted [--facts 30] [--passages 200] [--rank 4096 ...] [--learned .5 1] \
        [--checkpoints] [--order SEED]

A small Llama reads State-of-the-Union passages, and how people ask about mayors. It is then
fine-tuned on other passages and on sentences that state planted facts, once each: memorised, or
half-learned (half of the epochs). The questions are in the words of the fact, paraphrased, and
turned round (the answer is what the fact begins with). Printed are recall@1 / MRR of the text that
states it, by the index, by `blr-analysis query` (which refines the index's best), by the exact
influence of the same posterior, and by plain gradients: dot product and cosine. With
``--checkpoints`` the task has those of the fine-tuning, whose errors the influence takes.
``--order`` draws the order of the fine-tuning's batches from this seed: figures differ by much.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.llamas import small_llama
from blr_analysis.cli.query_options import REFINED
from blr_analysis.sensitivity import Index

sys.path.insert(0, str(Path(__file__).parents[1] / "tutorials"))
import speeches

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
WIDTH = 64
LAYERS = 3
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


def llama(n_words: int) -> Any:
    return small_llama(
        n_words, width=WIDTH, layers=LAYERS, longest=2 * WORDS, tie_word_embeddings=True
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
    checkpoints: blr.Checkpoints | None = None,
) -> blr.Task:
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH, collate_fn=padded)  # type: ignore[arg-type]
    return blr.Task(model, loader, likelihood="causal_lm", checkpoints=checkpoints, progress=False)


def flat(task: blr.Task) -> blr.Posterior:
    """Σ = 1."""
    mean = task.parameters()
    ones = {name: torch.ones_like(m) for name, m in mean.items()}
    return blr.Posterior(mean, ones, prior_precision=1.0, n_data=task.n_data)


def found(scores: Tensor, sources: list[int]) -> tuple[float, float]:
    """Recall@1 and MRR of scores ``[N, M]``."""
    true = scores[torch.tensor(sources), torch.arange(len(sources))]
    place = 1 + (scores > true).sum(0)
    return float((place == 1).double().mean()), float((1 / place).mean())


def refined(index: Index, questions: blr.Task, n_refined: int) -> Tensor:
    """Exact influence of each question's best texts, ``[N, M]``.

    The other texts follow in the index's order.
    """
    best = index.top(questions, n_refined, refine=n_refined, harmful=False)
    values = index.influence(questions)
    shift = best.helpful_values.min() - values.max() - 1
    return (values + shift).scatter(0, best.helpful.mT, best.helpful_values.mT)


def scores(task: blr.Task, questions: blr.Task, ranks: list[int]) -> Iterator[tuple[str, Tensor]]:
    """The scores of every text for every question by each method, ``[N, M]``."""
    q = blr.fit_laplace(task, sampled=True)
    n_refined = min(REFINED, task.n_data)
    for rank in ranks:
        with tempfile.TemporaryDirectory() as folder:
            index = blr.Index.build(task, q, f"{folder}/index", rank=rank)
            yield f"index {rank}, in nats", index.influence(questions)
            yield f"index {rank}, by length", index.influence(questions, normalize=True)
            yield f"query {rank}, in nats", refined(index, questions, n_refined)
    yield "exact, in nats", blr.influence(task, q, questions).matrix
    yield "exact, by length", blr.influence(task, q, questions, normalize=True).matrix
    yield "gradient dot product", blr.influence(task, flat(task), questions).matrix
    yield "gradient cosine", blr.influence(task, flat(task), questions, normalize="cosine").matrix


def show(
    model: nn.Module, texts: Corpus, ranks: list[int], checkpoints: blr.Checkpoints | None
) -> None:
    """Print recall@1 / MRR of each method for each kind of question."""
    task = task_of(model.eval(), texts.texts, checkpoints)
    questions = [row for rows in texts.questions.values() for row in rows]
    sizes = [len(rows) for rows in texts.questions.values()]
    for method, values in scores(task, task_of(model, questions), ranks):
        by_kind = values.split(sizes, dim=1)
        figures = [found(part, texts.sources) for part in by_kind]
        row = "".join(f"{recall:8.2f} / {reciprocal:.2f}" for recall, reciprocal in figures)
        print(f"  {method:<22}{row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--facts", type=int, default=30)
    parser.add_argument("--passages", type=int, default=200)
    parser.add_argument("--rank", type=int, nargs="+", default=[4096])
    parser.add_argument("--learned", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--checkpoints", action="store_true")
    parser.add_argument("--order", type=int)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    texts = corpus(asked.facts, asked.passages)
    torch.manual_seed(0)
    base = llama(len(texts.vocabulary))
    train(base, texts.base, EPOCHS, 4e-3)
    size = sum(p.numel() for p in base.parameters())
    print(f"{size:,} parameters, {len(texts.texts)} texts")
    for share in asked.learned:
        model = copy.deepcopy(base)
        epochs = round(2 * EPOCHS * share)
        if asked.order is not None:
            torch.manual_seed(asked.order)
        checkpoints = None
        if asked.checkpoints:
            steps = epochs * math.ceil(len(texts.texts) / BATCH)
            checkpoints = blr.Checkpoints(model, steps=steps)
        loss = train(model, texts.texts, epochs, 1.5e-3, checkpoints)
        kinds = ", ".join(texts.questions)
        print(f"{share:g} of the fine-tuning, loss {loss:.2f}: {kinds}")
        show(model, texts, asked.rank, checkpoints)


if __name__ == "__main__":
    main()
