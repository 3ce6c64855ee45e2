"""Tokenised data sets whose rows differ in length: batches are those of transformers' collators."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_transformers as tiny
import torch
from torch import nn
from torch.utils.data import DataLoader

import blr_analysis as blr
from blr_analysis.errors import DataError
from blr_analysis.padding import Padding

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

TEXTS = tiny.sentences(10)
LABELS = [k % 3 for k in range(10)]
EVERY = torch.arange(10)


@pytest.fixture(scope="module", autouse=True)
def models() -> dict[str, Any]:
    """Made once, which imports what they need."""
    return {kind: tiny.build(kind) for kind in ("bert", "gpt2", "llama")}


def tokenised(tokenizer: Any, **columns: list[Any]) -> Any:
    return datasets.Dataset.from_dict({**tokenizer(TEXTS), **columns})


def same_batches(ours: Any, theirs: Any) -> None:
    assert ours.keys() == theirs.keys()
    for name, column in theirs.items():
        assert torch.equal(ours[name], column), name


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_a_classifiers_rows_are_those_of_its_trainer(models: dict[str, Any], kind: str) -> None:
    """Labels by another name; columns that the model does not take are metadata."""
    tokenizer = tiny.tokenizer(segments=kind == "bert")
    rows = tokenised(tokenizer, labels=LABELS)
    collate = transformers.DataCollatorWithPadding(tokenizer)
    loader: Any = DataLoader(rows.with_format("torch"), collate_fn=collate)
    expected = blr.Task(models[kind], loader).fetch(EVERY)
    more = tokenised(tokenizer, label=LABELS, idx=list(range(10)), text=TEXTS)
    task = blr.Task(models[kind], more)
    same_batches(task.fetch(EVERY), dict(expected))
    assert task.metadata == {"idx": list(range(10)), "text": TEXTS}
    as_list = blr.Task(models[kind], [dict(row) for row in rows])
    same_batches(as_list.fetch(EVERY), dict(expected))


def test_a_language_models_labels_are_its_ids() -> None:
    tokenizer = tiny.tokenizer(segments=False)
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    rows = tokenised(tokenizer)
    loader: Any = DataLoader(rows.with_format("torch"), collate_fn=collate)
    model = tiny.build("llama", "causal_lm")
    expected = blr.Task(model, loader, likelihood="causal_lm").fetch(EVERY)
    same_batches(blr.Task(model, rows, likelihood="causal_lm").fetch(EVERY), dict(expected))
    bare = blr.Task(model, rows.remove_columns("attention_mask"), likelihood="causal_lm")
    same_batches(bare.fetch(EVERY), dict(expected))


def test_a_mask_is_made_only_for_who_takes_one() -> None:
    rows = [{"input_ids": [5, 6], "labels": 1}, {"input_ids": [7], "labels": 0}]
    assert "attention_mask" not in Padding()(rows)
    assert Padding(masked=True)(rows)["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert Padding(masked=True)(rows[:1])["attention_mask"].tolist() == [[1, 1]]


def test_rows_of_unequal_shape_are_named() -> None:
    rows = [{"x": torch.ones(2, 3), "labels": 0}, {"x": torch.ones(2, 4), "labels": 1}]
    with pytest.raises(DataError, match=r"column 'x' has rows of shapes \[2, 3\], \[2, 4\]"):
        blr.Task(nn.Linear(3, 2), rows)


def test_texts_without_ids_are_refused(models: dict[str, Any]) -> None:
    rows = datasets.Dataset.from_dict({"text": TEXTS, "label": LABELS})
    with pytest.raises(DataError, match="'text', 'label' goes to the model; tokenise"):
        blr.Task(models["bert"], rows)
