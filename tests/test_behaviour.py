"""Tables of sources and BM25, by numbers in place of an index."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from scipy.stats import zscore
from tiny_lm import task_of, tiny_lm
from torch.nn.functional import cross_entropy

from blr_analysis.cli.behaviour import (
    surprise_of,
    table_of_behaviour,
    write_without,
)
from blr_analysis.cli.word_scores import bm25_scores, hybrid_scores, hybrid_table
from blr_analysis.huggingface.tokens import Tokens
from tests.support import tiny_transformers as tiny

TEXTS = tiny.sentences(7)
QUESTIONS = ["the film was good", "a dull book"]
METADATA = {"question": TEXTS, "bm25": TEXTS, "influence": TEXTS, "source": TEXTS}


def texts_of(words: list[str], *, special_tokens: bool = False) -> Any:
    """What the tables read of a task of texts."""
    tokenizer = tiny.tokenizer(pairs=special_tokens)
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in words]
    return SimpleNamespace(dataset=Tokens(rows, pad_id=0, tokenizer=tokenizer), n_data=len(rows))


def index_of(influences: torch.Tensor) -> Any:
    return SimpleNamespace(influence=lambda *_, **__: influences, examples=METADATA)


def test_special_tokens_are_no_words() -> None:
    plain = bm25_scores(texts_of(TEXTS), texts_of(QUESTIONS))
    with_special = texts_of(TEXTS, special_tokens=True), texts_of(QUESTIONS, special_tokens=True)
    assert torch.equal(bm25_scores(*with_special), plain)


def test_metadata_do_not_replace_what_was_computed() -> None:
    """Columns of the user's rows may have any names."""
    influences = torch.randn(7, 2, generator=torch.Generator().manual_seed(0))
    trained, questions = texts_of(TEXTS), texts_of(QUESTIONS)
    bm25 = bm25_scores(trained, questions)
    table = hybrid_table(index_of(influences), trained, questions, top=3, normalize=False)
    assert table["question"].tolist() == [0, 0, 0, 1, 1, 1]
    assert table["rank"].tolist() == [1, 2, 3, 1, 2, 3]
    for row in table.to_dict("records"):
        pair = row["example"], row["question"]
        assert row["influence"] == influences[pair] and row["bm25"] == bm25[pair]
        words = {name for name, value in row.items() if value == TEXTS[row["example"]]}
        assert words == {"question_metadata", "bm25_metadata", "influence_metadata", "source"}
    best = table_of_behaviour(index_of(influences), influences[:, 0], 2, "influence")
    assert best["influence"].tolist() == influences[:, 0].topk(2).values.tolist()
    assert best["influence_metadata"].tolist() == [TEXTS[i] for i in best["example"]]


def test_influence_and_words_count_by_their_standard_deviations() -> None:
    """scipy's z-scores; words that say nothing leave the order of influence."""
    random = torch.Generator().manual_seed(0)
    influences = torch.randn(7, 2, generator=random, dtype=torch.float64)
    bm25 = torch.rand(7, 2, generator=random, dtype=torch.float64)
    expected = zscore(influences.numpy()) + zscore(bm25.numpy())
    assert hybrid_scores(influences, bm25).numpy() == pytest.approx(expected)
    bm25[:] = 0.1
    assert hybrid_scores(influences, bm25).numpy() == pytest.approx(zscore(influences.numpy()))


def test_the_rows_that_stay_are_written_as_they_were(tmp_path: Path) -> None:
    """With all digits of their numbers, also inside of lists and objects."""
    rows: list[dict[str, Any]] = [
        {"text": "a", "weight": 1 / 3, "id": 2**60 + 1, "more": [1, {"of": None}]},
        {"text": "b", "weight": 0.5, "id": 0, "more": []},
        {"text": "c\u2028é", "weight": 1e-20, "id": 1, "more": {"x": [1 / 7, True]}},
    ]
    source = tmp_path / "all.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    target = tmp_path / "less.jsonl"
    assert write_without(str(source), [1], target, online=False) == 2
    left = [json.loads(line) for line in target.read_text().splitlines()]
    assert left == [rows[0], rows[2]]
    table = pd.DataFrame({"when": pd.to_datetime(["2024-01-02", None]), "n": [1.0, None]})
    table.to_parquet(tmp_path / "dates.parquet")
    write_without(str(tmp_path / "dates.parquet"), [], target, online=False)
    left = [json.loads(line) for line in target.read_text().splitlines()]
    assert left == [{"when": "2024-01-02T00:00:00", "n": 1.0}, {"when": None, "n": None}]


def test_outputs_that_a_model_draws_are_no_surprise() -> None:
    """Over many draws z has the mean 0 and the variance 1; likelier outputs have a smaller one."""
    model = tiny_lm()
    draws = torch.Generator().manual_seed(0)
    z = []
    for _ in range(60):
        ids = torch.zeros(3, 1, dtype=torch.long)
        for _ in range(11):
            p = model(ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(p, 1, generator=draws)], dim=1)
        surprise = surprise_of(task_of(model, list(ids)))
        z.append(surprise.deviations)
    values = torch.tensor(z)
    assert abs(values.mean()) < 3 / len(z) ** 0.5
    assert 0.7 < values.std() < 1.3
    best = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(11):
        best = torch.cat([best, model(best).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    found = surprise_of(task_of(model, [best[0]]))
    losses = cross_entropy(model(best).logits[0, :-1], best[0, 1:])
    assert found.loss == pytest.approx(float(losses), rel=1e-5)
    assert found.deviations < -1
    assert found.loss < found.own_loss
