"""Tokens that two models number differently are found, however their tokenizers are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from merging.models_on_disk import State, near, state, write_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from blr_analysis.errors import BLRError, InputError, StorageError
from blr_analysis.files import Folder
from blr_analysis.merging.folders import execute
from blr_analysis.merging.plan import make_plan as plan_folders
from blr_analysis.merging.recipe import read_recipe
from blr_analysis.merging.recipe import vocabulary
from blr_analysis.posterior import write_precision

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


# Models of different vocabularies


def with_tokens(root: Path, name: str, tokens: list[str], seed: int, **config: Any) -> Path:
    """An embedding and a head with a row for each token, and one more layer."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        n: torch.randn(rows, 3, generator=generator)
        for n, rows in (("embed.weight", len(tokens)), ("mlp.weight", 4))
    }
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = torch.randn(len(tokens), 3, generator=generator)
    sizes = {"vocab_size": len(tokens), **config}
    folder = write_model(root / name, tensors, config=sizes)
    return put(folder, "tokenizer.json", tokenizer_of(tokens))


def tokenizer_of(tokens: list[str]) -> str:
    tokenizer = Tokenizer(WordLevel({t: n for n, t in enumerate(tokens) if t[0] != "<"}))
    tokenizer.add_tokens([t for t in tokens if t[0] == "<"])
    return tokenizer.to_str()


TOKENS = {
    "base": ["the", "a", "cat"],
    "one": ["the", "a", "cat", "<x>"],
    "two": ["a", "the", "cat", "<y>", "<x>"],
    "new": ["the", "dog", "a", "hen", "<x>", "<y>"],
}
RECIPE = "merge_method: linear\nmodels: [{model: one}, {model: two}]\n"


@pytest.fixture
def three(tmp_path: Path) -> Path:
    for k, (name, tokens) in enumerate(TOKENS.items()):
        with_tokens(tmp_path, name, tokens, k)
    return tmp_path


def merged(root: Path, text: str) -> tuple[dict[str, torch.Tensor], Path]:
    (root / "r.yml").write_text(text)
    out = root / "out"
    execute(plan_folders(read_recipe(root / "r.yml").job), out)
    return Folder.open(out).tensors(), out


def row(root: Path, model: str, token: str, name: str) -> torch.Tensor:
    return Folder.open(root / model).tensors()[name][TOKENS[model].index(token)]


@pytest.mark.parametrize("name", ["embed.weight", "lm_head.weight"])
@pytest.mark.parametrize("other", ["two", "new"])
def test_a_union_has_every_token_once(three: Path, name: str, other: str) -> None:
    text = RECIPE.replace("two", other) + "tokenizer_source: union"
    tensors, out = merged(three, text)
    tokens = Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab()
    assert tokens == vocabulary(out)
    assert tokens.keys() == set(TOKENS["one"]) | set(TOKENS[other])
    assert [tokens[t] for t in TOKENS["one"]] == [0, 1, 2, 3]
    assert json.loads((out / "config.json").read_text())["vocab_size"] == len(tokens)
    for token, at in tokens.items():
        knowing = [m for m in ("one", other) if token in TOKENS[m]]  # the others take their mean
        expected = sum(row(three, m, token, name) for m in knowing) / len(knowing)
        torch.testing.assert_close(tensors[name][at], expected)


def test_the_base_lends_its_row_to_models_that_lack_a_token(three: Path) -> None:
    text = (
        "merge_method: task_arithmetic\nbase_model: two\ntokenizer_source: base\n"
        "models: [{model: one, parameters: {weight: 0.5}}]\n"
    )
    tensors, out = merged(three, text)
    assert vocabulary(out) == {t: n for n, t in enumerate(TOKENS["two"])}
    own = Folder.open(three / "two").tensors()["embed.weight"]
    torch.testing.assert_close(tensors["embed.weight"][3], own[3])  # <y>, unknown to one: no step
    expected = own[1] + 0.5 * (row(three, "one", "the", "embed.weight") - own[1])
    torch.testing.assert_close(tensors["embed.weight"][1], expected)


@pytest.mark.parametrize("source", ["base", "union"])
def test_tables_that_are_padded_differently_give_one_without_padding(
    three: Path, source: str
) -> None:
    padded = {n: t.clone() for n, t in Folder.open(three / "base").tensors().items()}
    for name in ("embed.weight", "lm_head.weight"):
        padded[name] = torch.cat([padded[name] + 1, torch.full((5, 3), 7.0)])
    write_model(three / "padded", padded, config={"vocab_size": 8})
    put(three / "padded", "tokenizer.json", (three / "base" / "tokenizer.json").read_text())
    text = f"merge_method: linear\nbase_model: padded\ntokenizer_source: {source}\n"
    tensors, out = merged(three, text + "models: [{model: base}, {model: padded}]")
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 3
    own = Folder.open(three / "base").tensors()
    for name in ("embed.weight", "lm_head.weight"):
        torch.testing.assert_close(tensors[name], own[name] + 0.5)


@pytest.mark.parametrize("method", ["fisher", "gradient_matching"])
@pytest.mark.parametrize("prior", [0.0, 0.5])
def test_precisions_of_other_vocabularies(three: Path, method: str, prior: float) -> None:
    """Row by row by hand: who lacks a token, or has a padded table, says nothing of its row."""
    models, stored = {}, {}
    for k, name in enumerate(("base", "one", "two")):
        models[name] = {n: t.clone() for n, t in Folder.open(three / name).tensors().items()}
        if name == "one":  # padded
            for n in ("embed.weight", "lm_head.weight"):
                models[name][n] = torch.cat([models[name][n], torch.ones(3, 3)])
            write_model(three / name, models[name], config={"vocab_size": 7})
            put(three / name, "tokenizer.json", tokenizer_of(TOKENS[name]))
        generator = torch.Generator().manual_seed(k)
        own = {n: torch.rand(t.shape, generator=generator) + 0.1 for n, t in models[name].items()}
        place, stored[name] = three / name / "precision", own
        given = {n: h + prior for n, h in own.items()}
        about = {"kind": "fisher_mc", "definition": "h", "n_data": 1, "prior_precision": prior}
        write_precision(place, given, **about)
    text = f"merge_method: {method}\nbase_model: base\ntokenizer_source: union\n"
    tensors, _ = merged(three, text + "models: [{model: one}, {model: two}]")
    union = ["the", "a", "cat", "<x>", "<y>"]
    for n in ("embed.weight", "lm_head.weight"):
        for at, token in enumerate(union):

            def known(name: str, values: State, n: str = n, token: str = token) -> Any:
                tokens = TOKENS[name]
                return values[name][n][tokens.index(token)] if token in tokens else None

            pairs = [(known(m, models), known(m, stored)) for m in ("base", "one", "two")]
            there = [w for w, _ in pairs if w is not None]
            lent = there[0] if token in TOKENS["base"] else torch.stack(there).mean(0)
            (base, first), *rest = [(lent, 0 * lent) if w is None else (w, h) for w, h in pairs]
            first = first if method == "gradient_matching" else 0 * first
            total = first + sum(h for _, h in rest)
            truth = base + sum((first + h) * (w - base) for w, h in rest) / total
            torch.testing.assert_close(tensors[n][at], truth)


def test_numbers_that_the_library_would_not_give_are_refused(three: Path) -> None:
    """Of an added token that stands behind a gap."""
    document = json.loads((three / "two" / "tokenizer.json").read_text())
    document["added_tokens"][1]["id"] = 7
    put(three / "two", "tokenizer.json", document)
    with_tokens(three, "more", ["the", "a", "cat", "<z>"], 3)
    text = RECIPE.replace("one", "more") + "base_model: two\ntokenizer_source: union"
    with pytest.raises(InputError, match="union"):
        merged(three, text)


def test_other_lengths_without_a_word_on_tokens(three: Path) -> None:
    with pytest.raises(BLRError, match="tokenizer_source"):
        merged(three, "merge_method: linear\nmodels: [{model: base}, {model: one}]")


def test_tied_and_untied_models_give_an_untied_one(tmp_path: Path) -> None:
    with_tokens(tmp_path, "tied", TOKENS["base"], 0, tie_word_embeddings=True)
    with_tokens(tmp_path, "free", TOKENS["base"], 1, tie_word_embeddings=False)
    tensors, out = merged(tmp_path, "merge_method: linear\nmodels: [{model: tied}, {model: free}]")
    tied, free = (Folder.open(tmp_path / n).tensors() for n in ("tied", "free"))
    expected = (tied["embed.weight"] + free["lm_head.weight"]) / 2
    torch.testing.assert_close(tensors["lm_head.weight"], expected)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
