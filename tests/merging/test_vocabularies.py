"""Tokens that two models number differently are found, however their tokenizers are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from merging.models_on_disk import near, state, write_model

from blr_analysis.errors import InputError, StorageError
from blr_analysis.merging.recipe import read_recipe
from blr_analysis.merging.recipe.places import renumbered, vocabulary

WORDS = ["the", "a", "cat"]


def put(folder: Path, name: str, content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def fast(vocab: Any, *added: tuple[str, int]) -> dict[str, Any]:
    return {"model": {"vocab": vocab}, "added_tokens": [{"content": t, "id": n} for t, n in added]}


NUMBERED = {word: n for n, word in enumerate(WORDS)}
FORMS = {
    "bpe": ("tokenizer.json", fast(NUMBERED)),
    "unigram": ("tokenizer.json", fast([[word, -1.0] for word in WORDS])),
    "vocab.json": ("vocab.json", NUMBERED),
    "vocab.txt": ("vocab.txt", "\n".join(WORDS)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read(tmp_path: Path, form: str) -> None:
    model = put(tmp_path / "m", *FORMS[form])
    assert vocabulary(model) == NUMBERED
    swapped = put(tmp_path / "o", "tokenizer.json", fast({"the": 0, "a": 2, "cat": 1}))
    assert renumbered(model, swapped) == {"a": (1, 2), "cat": (2, 1)}
    assert renumbered(model, put(tmp_path / "p", "vocab.txt", "the\na\ncat")) == {}


def test_new_tokens_and_new_names_are_no_contradiction(tmp_path: Path) -> None:
    base = put(tmp_path / "b", "tokenizer.json", fast(NUMBERED, ("<reserved_0>", 3)))
    tuned = put(tmp_path / "t", "tokenizer.json", fast(NUMBERED, ("<|im_start|>", 3), ("<pad>", 4)))
    assert renumbered(base, tuned) == {}
    moved = put(tmp_path / "m", "tokenizer.json", fast(NUMBERED, ("<reserved_0>", 4)))
    assert renumbered(base, moved) == {"<reserved_0>": (3, 4)}


def test_what_is_not_known_is_not_compared(tmp_path: Path) -> None:
    model = put(tmp_path / "m", *FORMS["bpe"])
    assert renumbered(model, put(tmp_path / "none", "config.json", {})) == {}
    for k, content in enumerate(([], {"model": 3}, {"model": {"vocab": 3}, "added_tokens": {}})):
        assert renumbered(model, put(tmp_path / f"odd{k}", "tokenizer.json", content)) == {}


def test_damaged_files_are_named(tmp_path: Path) -> None:
    model = put(tmp_path / "m", *FORMS["bpe"])
    with pytest.raises(StorageError, match=r"bad/tokenizer\.json' cannot be read"):
        renumbered(model, put(tmp_path / "bad", "tokenizer.json", "{"))


def test_a_recipe_of_such_models_is_refused(tmp_path: Path) -> None:
    for k, name in enumerate(("base", "ft1", "ft2")):
        write_model(tmp_path / name, near(state(0), k))
        words = WORDS if name != "ft2" else WORDS[::-1]
        vocab = {word: n for n, word in enumerate(words)}
        put(tmp_path / name, "tokenizer.json", {**fast(vocab), "name": name})
    text = "merge_method: linear\nmodels:\n- model: base\n- model: ft1\n"
    (tmp_path / "r.yml").write_text(text)
    assert len(read_recipe(tmp_path / "r.yml").job.members) == 2
    (tmp_path / "r.yml").write_text(f"{text}- model: ft2\n")
    with pytest.raises(InputError, match=r"line 5.*'ft2' and 'base'.*'cat' is 2 and 0"):
        read_recipe(tmp_path / "r.yml")
