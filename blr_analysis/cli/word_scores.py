"""Sources by influence and by the words that question and text share (BM25) together."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from blr_analysis.cli.behaviour import metadata_of

if TYPE_CHECKING:  # torch is loaded by the commands that compute
    import pandas as pd
    from torch import Tensor

    from blr_analysis.sensitivity import Index
    from blr_analysis.task import Task

SATURATION = 1.5
"""k of BM25: the larger it is, the longer does another occurrence of a word raise the score."""
LENGTH_DISCOUNT = 0.75
"""b of BM25: how far a word in a long text counts less, from 0 to 1."""


def hybrid_table(
    index: Index, trained: Task, questions: Task, *, top: int, normalize: bool
) -> pd.DataFrame:
    """The ``top`` sources of every question, by :func:`hybrid_scores`.

    The table has a row for each question and source.
    """
    import torch

    from blr_analysis.tables import frame_of

    influences = index.influence(questions, normalize=normalize).double()
    bm25 = bm25_scores(trained, questions)
    best = hybrid_scores(influences, bm25).argsort(dim=0, descending=True, stable=True)[:top]
    n_best = len(best)
    question = torch.arange(questions.n_data).repeat_interleave(n_best)
    example = best.T.flatten()
    columns = {
        "question": question,
        "rank": torch.arange(1, n_best + 1).repeat(questions.n_data),
        "example": example,
        "influence": influences[example, question],
        "bm25": bm25[example, question],
    }
    return frame_of(columns, metadata_of(index, example))


def hybrid_scores(influences: Tensor, bm25: Tensor) -> Tensor:
    """The sum of two standardized scores of every text for every question, ``[N, M]``:

        (u − ū) / σ(u) + (w − w̄) / σ(w)

    for influences u and BM25 w (Montague & Aslam, CIKM 2001). Means and standard deviations are
    over the texts. A score that is the same for all of them counts as 0. Unlike a sum of ranks it
    keeps by how much a text stands out.
    """
    return _standardized(influences.double()) + _standardized(bm25)


def bm25_scores(trained: Task, questions: Task) -> Tensor:
    """BM25 (Robertson & Zaragoza, 2009) of every training text for every question, ``[N, M]``:

        Σ_w log(1 + (N − n_w + ½) / (n_w + ½)) · c_w / (c_w + k (1 − b + b ℓ / ℓ̄))

    summed over the words w of the question. A text of ℓ words has the word c_w times, n_w of the N
    texts have it, and ℓ̄ is the mean of ℓ.
    """
    import torch

    texts = [Counter(words) for words in _words(trained)]
    lengths = torch.tensor([float(text.total()) for text in texts], dtype=torch.float64)
    relative_lengths = lengths / lengths.mean()
    damping = SATURATION * (1 - LENGTH_DISCOUNT + LENGTH_DISCOUNT * relative_lengths)
    columns = []
    for words_of_question in _words(questions):
        scores = torch.zeros(len(texts), dtype=torch.float64)
        for word in words_of_question:
            counts = torch.tensor([float(text[word]) for text in texts], dtype=torch.float64)
            n_with_word = int((counts > 0).sum())
            rarity = math.log1p((len(texts) - n_with_word + 0.5) / (n_with_word + 0.5))
            scores += rarity * counts / (counts + damping)
        columns.append(scores)
    return torch.stack(columns, dim=1)


def _words(task: Task) -> list[list[str]]:
    """The words of every text, in lower case, without the tokenizer's special tokens."""
    data = task.dataset
    words = []
    for i in range(len(data)):
        text = data.tokenizer.decode(data[i]["input_ids"], skip_special_tokens=True)
        words.append(text.lower().split())
    return words


def _standardized(scores: Tensor) -> Tensor:
    """Columns with mean 0 and standard deviation 1, or 0 where a column is constant."""
    deviations = scores - scores.mean(0)
    standardized = deviations / deviations.square().mean(0).sqrt()
    is_constant = (scores == scores[0]).all(0)
    return standardized.masked_fill(is_constant, 0.0)
