"""The training texts that a behaviour rests on, the data without them, and ranks by BM25."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blr_analysis.errors import InputError

if TYPE_CHECKING:  # torch is loaded by the commands that compute
    import pandas as pd
    from torch import Tensor

    from blr_analysis.sensitivity import Index
    from blr_analysis.task import Task

SATURATION = 1.5
"""k of BM25: the larger it is, the longer does another occurrence of a word raise the score."""
LENGTH_DISCOUNT = 0.75
"""b of BM25: how far a word in a long text counts less, from 0 to 1."""


def behaviour_scores(index: Index, bad: Task, good: Task | None, *, normalize: bool) -> Tensor:
    """How far the loss of a bad output would rise without each training text, ``[N]``.

    This is the text's mean influence on the bad outputs, less its mean influence on the good ones.
    """
    scores = _mean_influence(index, bad, normalize)
    if good is not None:
        scores = scores - _mean_influence(index, good, normalize)
    return scores


def _mean_influence(index: Index, outputs: Task, normalize: bool) -> Tensor:
    """The influence of each training text, averaged over these outputs, ``[N]``."""
    return index.influence(outputs, normalize=normalize).double().mean(1)


def table_of_behaviour(index: Index, scores: Tensor, top: int, quantity: str) -> pd.DataFrame:
    """A row for each of the texts that the behaviour rests on most.

    Args:
        scores: what :func:`behaviour_scores` returns.
        top: the number of texts.
        quantity: the name of the column of scores.
    """
    from blr_analysis.tables import frame_of

    examples = scores.argsort(descending=True, stable=True)[:top]
    columns = {"example": examples, quantity: scores[examples]}
    return frame_of(columns, _metadata_of(index, examples))


def _metadata_of(index: Index, examples: Tensor) -> dict[str, list[Any]]:
    """The columns of the index's table of examples, for these examples."""
    indices = examples.tolist()
    return {name: [column[i] for i in indices] for name, column in index.examples.items()}


def write_without(data: str, examples: Sequence[int], path: Path, *, online: bool) -> int:
    """Write the training rows without these examples, as .jsonl.

    Args:
        data: the address of the training data.
        examples: the places of the rows that are left out.
        online: whether the data may be fetched from the Hub.

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
    lines = [json.dumps(_json_value(row)) for row in rows.to_dict("records")]
    with drafted(path) as draft:
        draft.write_text("\n".join(lines) + "\n")
    return len(rows)


def _json_value(value: Any) -> Any:
    """The value as JSON has it, with all its digits: missing values are null, dates are text."""
    import pandas as pd

    if isinstance(value, Mapping):
        return {str(name): _json_value(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(entry) for entry in value]
    if hasattr(value, "tolist"):  # arrays and numbers of NumPy
        return _json_value(value.tolist())
    is_infinite = isinstance(value, float) and math.isinf(value)
    if pd.isna(value) or is_infinite:
        return None
    return value.isoformat() if isinstance(value, date | time) else value


def hybrid_table(
    index: Index, trained: Task, questions: Task, *, top: int, normalize: bool
) -> pd.DataFrame:
    """The ``top`` sources of every question, by the sum of two ranks.

    The first rank is by influence, the second by BM25 on the words of question and text (Robertson
    & Zaragoza, 2009). The table has a row for each question and source.
    """
    import torch

    from blr_analysis.tables import frame_of

    influences = index.influence(questions, normalize=normalize).double()
    bm25 = bm25_scores(trained, questions)
    rank_sums = _ranks(influences) + _ranks(bm25)
    best = rank_sums.argsort(dim=0, stable=True)[:top]
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
    return frame_of(columns, _metadata_of(index, example))


def bm25_scores(trained: Task, questions: Task) -> Tensor:
    """BM25 of every training text for every question, ``[N, M]``:

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


def _ranks(scores: Tensor) -> Tensor:
    """The rank of each row in every column; the largest has rank 1, ties share their mean rank."""
    import pandas as pd
    import torch

    ranks = pd.DataFrame(scores.numpy()).rank(ascending=False)
    return torch.from_numpy(ranks.to_numpy(copy=True))
