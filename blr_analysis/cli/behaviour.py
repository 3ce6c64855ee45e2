"""The training texts that a behaviour rests on, the data without them, and ranks by BM25."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blr_analysis.errors import InputError

if TYPE_CHECKING:  # torch is loaded by the commands that compute
    import pandas as pd
    from torch import Tensor

    from blr_analysis.sensitivity import Index
    from blr_analysis.task import Task

SATURATION = 1.5  # k of BM25: how often a word counts
SHORTENED = 0.75  # b of BM25: how far long texts count less


def behaviour_scores(opened: Index, bad: Task, good: Task | None, *, normalize: bool) -> Tensor:
    """How far the loss of a bad output would rise without each training text, ``[N]``.

    This is the text's mean influence on the bad outputs, less its mean influence on the good ones.
    """
    scores = opened.influence(bad, normalize=normalize).double().mean(1)
    if good is not None:
        scores = scores - opened.influence(good, normalize=normalize).double().mean(1)
    return scores


def table_of_behaviour(opened: Index, scores: Tensor, top: int, quantity: str) -> pd.DataFrame:
    """A row for each of the texts that the behaviour rests on most."""
    import pandas as pd

    order = scores.argsort(descending=True, stable=True)[:top]
    columns: dict[str, Any] = {"example": order.tolist(), quantity: scores[order].tolist()}
    for name, values in opened.examples.items():
        columns[name] = [values[i] for i in order.tolist()]
    return pd.DataFrame(columns)


def write_without(data: str, examples: Sequence[int], place: Path, *, online: bool) -> int:
    """Write the training rows without these examples, as .jsonl.

    Returns:
        The number of rows that were written.

    Raises:
        InputError: no row would be left.
    """
    from blr_analysis.files import drafted
    from blr_analysis.huggingface.data import read_rows

    table, _ = read_rows(data, online=online)
    rows = table.reset_index(drop=True).drop(index=list(examples))
    if not len(rows):
        raise InputError("no row is left: ask for fewer (--top)")
    with drafted(place) as draft:
        text = str(rows.to_json(orient="records", lines=True, force_ascii=False))
        lines = [json.dumps(json.loads(line)) for line in text.split("\n") if line]
        draft.write_text("\n".join(lines) + "\n")
    return len(rows)


def hybrid_table(
    opened: Index, trained: Task, questions: Task, *, top: int, normalize: bool
) -> pd.DataFrame:
    """The ``top`` sources of every question, by the sum of two ranks.

    One rank is by influence, the other by BM25 on the words of question and text (Robertson &
    Zaragoza, 2009).
    """
    import pandas as pd

    by_words = words_scores(trained, questions)
    by_influence = opened.influence(questions, normalize=normalize).double()
    ranks = _ranks(by_influence) + _ranks(by_words)
    rows = []
    for question in range(questions.n_data):
        order = ranks[:, question].argsort(stable=True)[:top]
        for position, example in enumerate(order.tolist(), 1):
            row = {
                "question": question,
                "rank": position,
                "example": example,
                "influence": float(by_influence[example, question]),
                "bm25": float(by_words[example, question]),
            }
            row |= {name: values[example] for name, values in opened.examples.items()}
            rows.append(row)
    return pd.DataFrame(rows)


def words_scores(trained: Task, questions: Task) -> Tensor:
    """BM25 of every training text for every question, ``[N, M]``:

        Σ_w log(1 + (N − n_w + ½) / (n_w + ½)) · c_w / (c_w + k (1 − b + b ℓ / ℓ̄))

    summed over the words w of the question. A text of ℓ words has the word c_w times, n_w of the N
    texts have it, and ℓ̄ is the mean of ℓ.
    """
    import torch

    texts = [Counter(words) for words in _words(trained)]
    lengths = torch.tensor([float(text.total()) for text in texts], dtype=torch.float64)
    damping = SATURATION * (1 - SHORTENED + SHORTENED * lengths / lengths.mean())
    columns = []
    for question in _words(questions):
        scores = torch.zeros(len(texts), dtype=torch.float64)
        for word in question:
            counts = torch.tensor([float(text[word]) for text in texts], dtype=torch.float64)
            n_with_word = int((counts > 0).sum())
            rarity = math.log1p((len(texts) - n_with_word + 0.5) / (n_with_word + 0.5))
            scores += rarity * counts / (counts + damping)
        columns.append(scores)
    return torch.stack(columns, dim=1)


def _words(task: Task) -> list[list[str]]:
    """The words of every text, in lower case."""
    data = task.dataset
    texts = [data.tokenizer.decode(data[i]["input_ids"]) for i in range(len(data))]
    return [text.lower().split() for text in texts]


def _ranks(scores: Tensor) -> Tensor:
    """The rank of each row in every column; the largest has rank 1, ties share their mean rank."""
    import pandas as pd
    import torch

    ranked = pd.DataFrame(scores.numpy()).rank(ascending=False)
    return torch.from_numpy(ranked.to_numpy(copy=True))
