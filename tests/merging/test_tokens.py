"""Token tables: which word each row stands for, who borrows which row, and what is refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models_on_disk import write_model, write_precision
from torch import Tensor

import blr_analysis as blr
from blr_analysis.errors import BLRError, InputError, ModelError, StorageError
from blr_analysis.files import Folder
from blr_analysis.merging import execute, make_plan
from blr_analysis.merging.recipe import read_recipe
from blr_analysis.merging.tokens import vocabulary

WIDTH = 3
NUMBERED = {"the": 0, "a": 1, "cat": 2}
ADDED = {"<x>": 3, "[PAD]": 4}


def put(folder: Path, name: str, content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def fast(vocab: Any, added: Mapping[str, int] | None = None) -> dict[str, Any]:
    tokens = [{"content": word, "id": number} for word, number in (added or {}).items()]
    return {"model": {"vocab": vocab}, "added_tokens": tokens}


def decoder(added: Mapping[str, int]) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(n): {"content": word} for word, n in added.items()}}


FORMS: dict[str, dict[str, Any]] = {
    "tokenizer.json": {"tokenizer.json": fast(NUMBERED, ADDED)},
    "with scores": {"tokenizer.json": fast([[w, -1.0] for w in NUMBERED], ADDED)},
    "all in one": {"tokenizer.json": fast({**NUMBERED, **ADDED})},
    "vocab.json": {"vocab.json": NUMBERED, "added_tokens.json": ADDED},
    "vocab.txt": {"vocab.txt": "\n".join(NUMBERED), "added_tokens.json": ADDED},
    "a decoder": {"vocab.json": NUMBERED, "tokenizer_config.json": decoder(ADDED)},
    "both": {"tokenizer.json": fast(NUMBERED), "added_tokens.json": ADDED},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_vocabulary_is_read(tmp_path: Path, form: str) -> None:
    for name, content in FORMS[form].items():
        put(tmp_path / "m", name, content)
    assert vocabulary(tmp_path / "m") == NUMBERED | ADDED
    assert vocabulary(tmp_path) == {}


def test_lines_of_a_vocabulary_end_where_they_end(tmp_path: Path) -> None:
    """Characters that only look like the end of a line are words."""
    put(tmp_path / "m", "vocab.txt", "the\n\u2028\n\x85\na\n")
    assert vocabulary(tmp_path / "m") == {"the": 0, "\u2028": 1, "\x85": 2, "a": 3}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", {"model": None}),
        ("tokenizer.json", fast({"the": "0"})),
        ("tokenizer.json", fast({"the": -1})),
        ("tokenizer.json", {"model": {"vocab": {"the": 0}}, "added_tokens": [{"id": 1}]}),
        ("vocab.json", ["the"]),
        ("vocab.json", {"the": 0.5}),
    ],
)
def test_damaged_tokenizers_are_refused(tmp_path: Path, name: str, content: Any) -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        vocabulary(put(tmp_path / "m", name, content))
    put(tmp_path / "n", "vocab.json", NUMBERED)
    with pytest.raises(StorageError, match="cannot be read"):
        vocabulary(put(tmp_path / "n", "added_tokens.json", "[]x"))


@pytest.mark.slow
@pytest.mark.parametrize("fast_one", [True, False])
def test_the_words_are_those_of_transformers(tmp_path: Path, fast_one: bool) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    if fast_one:
        words = Tokenizer(models.WordLevel({**NUMBERED, "<unk>": 3}, unk_token="<unk>"))
        peer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    else:
        put(tmp_path, "vocab.txt", "[UNK]\n[SEP]\n[PAD]\n[CLS]\n[MASK]\nthe\na\n")
        peer = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    peer.add_tokens(["<x>", "new"])
    peer.add_special_tokens({"pad_token": "<fill>"})
    peer.save_pretrained(tmp_path / "m")
    assert vocabulary(tmp_path / "m") == peer.get_vocab()


# Merges. A model is a list of words with a row of random numbers for each word.


def with_tokens(
    root: Path,
    name: str,
    tokens: Sequence[str],
    *,
    padding: int = 0,
    tables: Sequence[str] = ("embed.weight", "lm_head.weight"),
    tied: bool = False,
    rows: int | None = None,
) -> Path:
    """A folder with token tables, one more layer, a tokenizer, and a precision of each number."""
    generator = torch.Generator().manual_seed(len(name) + 7 * len(tokens))
    length = (len(tokens) if rows is None else rows) + padding
    tensors = {"mlp.weight": torch.randn(4, WIDTH, generator=generator)}
    table = torch.randn(length, WIDTH, generator=generator)
    for key in tables:
        if key.endswith("bias"):
            tensors[key] = torch.randn(length, generator=generator)
        elif tied:
            tensors[key] = table.clone()
        else:
            tensors[key] = torch.randn(length, WIDTH, generator=generator)
    folder = write_model(root / name, tensors, config={"vocab_size": length})
    h = {n: torch.rand(t.shape, generator=generator) + 0.6 for n, t in tensors.items()}
    write_precision(folder / "precision", h, prior_precision=0.5)
    return put(folder, "tokenizer.json", fast({t: n for n, t in enumerate(tokens)}))


def merge(
    root: Path, models: Sequence[str], *, method: str = "linear", source: str | None = None
) -> tuple[dict[str, Tensor], Path, list[str]]:
    """A merge with weights of 1; the model "base" is also the base, unless the method is linear."""
    entries = ", ".join(f"{{model: {name}}}" for name in models)
    text = f"merge_method: {method}\nmodels: [{entries}]\nparameters: {{weight: 1}}\n"
    if method != "linear":
        text += "base_model: base\n"
    if source is not None:
        text += f"tokenizer_source: {source}\n"
    (root / "r.yml").write_text(text)
    folder = root / f"out{len(list(root.iterdir()))}"
    plan = make_plan(read_recipe(root / "r.yml").job)
    execute(plan, folder)
    return Folder.open(folder).tensors(), folder, plan.notes


TOKENS = {"base": ["the", "a"], "one": ["the", "a", "<x>"], "two": ["the", "a", "<x>", "<y>"]}


@pytest.mark.parametrize("method", ["fisher", "gradient_matching", "task_arithmetic"])
@pytest.mark.parametrize("source", ["union", "base", "one"])
def test_rows_that_one_vocabulary_appends(tmp_path: Path, method: str, source: str) -> None:
    """Row by row by hand: who lacks a token borrows the row, and says nothing of it; the rows of
    padding stand for no token."""
    for name, tokens in TOKENS.items():
        with_tokens(tmp_path, name, tokens, padding=3 * (name == "one"))
    tensors, folder, _ = merge(tmp_path, ["one", "two"], method=method, source=source)
    count = {"union": 4, "base": 2, "one": 3}[source]
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == count
    assert len(vocabulary(folder)) == count
    state = {name: Folder.open(tmp_path / name).tensors() for name in TOKENS}
    h = {n: Folder.open(tmp_path / n / "precision", stem="precision").tensors() for n in TOKENS}
    for name in ("embed.weight", "lm_head.weight"):
        assert len(tensors[name]) == count
        for row in range(count):
            having = [m for m in TOKENS if row < len(TOKENS[m])]
            w = [state[m if m in having else having[0]][name][row] for m in TOKENS]
            c = [h[m][name][row] - 0.5 if m in having else torch.zeros(WIDTH) for m in TOKENS]
            if method == "task_arithmetic":
                truth = w[1] + w[2] - w[0]
            else:
                first = c[0] if method == "gradient_matching" else torch.zeros(WIDTH)
                pull = sum((first + c[k]) * (w[k] - w[0]) for k in (1, 2))
                truth = w[0] + pull / (first + c[1] + c[2])
            torch.testing.assert_close(tensors[name][row], truth, rtol=1e-4, atol=1e-5)


def mean_by_words(root: Path, models: Mapping[str, Sequence[str]], key: str) -> dict[str, Tensor]:
    """The mean row of each word, of the first model that has it where a model has not."""
    states = {name: Folder.open(root / name).tensors()[key] for name in models}
    means = {}
    for word in dict.fromkeys(word for tokens in models.values() for word in tokens):
        rows = {n: states[n][t.index(word)] for n, t in models.items() if word in t}
        lender = next(iter(rows.values()))
        means[word] = torch.stack([rows.get(name, lender) for name in models]).mean(0)
    return means


@pytest.mark.parametrize("form", ["tokenizer.json", "added_tokens.json", "tokenizer_config.json"])
@pytest.mark.parametrize("padding", ["none", "to one length"])
def test_the_mean_is_that_of_words(tmp_path: Path, form: str, padding: str) -> None:
    """For every way to store the tokens that a model appends, also where tables have spare rows."""
    models = {"long": ["the", "a", "<x>", "<y>"], "short": ["the", "a"]}
    for name, tokens in models.items():
        spare = 6 - len(tokens) if padding == "to one length" else 0
        folder = with_tokens(tmp_path, name, tokens, padding=spare)
        added = {word: number for number, word in enumerate(tokens) if number > 1}
        if form != "tokenizer.json":
            put(folder, "tokenizer.json", fast({"the": 0, "a": 1}))
            put(folder, form, added if form == "added_tokens.json" else decoder(added))
    tensors, merged, notes = merge(tmp_path, ["short", "long"], source="union")
    assert notes == []
    assert vocabulary(merged) == {word: n for n, word in enumerate(models["long"])}
    for key in ("embed.weight", "lm_head.weight"):
        assert len(tensors[key]) == (6 if padding == "to one length" else 4)
        for number, truth in enumerate(mean_by_words(tmp_path, models, key).values()):
            torch.testing.assert_close(tensors[key][number], truth)


@pytest.mark.parametrize("stores_both", [["long"], ["short"], ["long", "short"]])
def test_a_tied_head_borrows_the_rows_of_the_table(tmp_path: Path, stores_both: list[str]) -> None:
    models = {"long": ["the", "a", "<x>"], "short": ["the", "a"]}
    for name, tokens in models.items():
        tables = ["embed.weight", "lm_head.weight"] if name in stores_both else ["embed.weight"]
        with_tokens(tmp_path, name, tokens, tables=tables, tied=True)
    for order in (["short", "long"], ["long", "short"]):
        tensors, _, _ = merge(tmp_path, order, source="union")
        for number, truth in enumerate(mean_by_words(tmp_path, models, "embed.weight").values()):
            for key in tensors.keys() - {"mlp.weight"}:
                torch.testing.assert_close(tensors[key][number], truth)


@pytest.mark.parametrize("bias", ["lm_head.bias", "cls.predictions.bias", "some_odd.name.bias"])
def test_a_number_for_each_token_is_lengthened_with_the_table(tmp_path: Path, bias: str) -> None:
    models = {"long": ["the", "a", "<x>", "<y>", "<z>"], "short": ["the", "a"]}
    for name, tokens in models.items():
        with_tokens(tmp_path, name, tokens, tables=["embed.weight", bias])
    tensors, _, _ = merge(tmp_path, ["short", "long"], source="union")
    truth = torch.stack(list(mean_by_words(tmp_path, models, bias).values()))
    torch.testing.assert_close(tensors[bias], truth)


def test_a_bias_with_one_axis_more(tmp_path: Path) -> None:
    """As BART's ``final_logits_bias``, [1, V]."""
    for name, length in (("long", 5), ("short", 4)):
        tensors = {"shared.weight": torch.ones(length, 2), "bias": torch.ones(1, length) * length}
        folder = write_model(tmp_path / name, tensors)
        put(folder, "tokenizer.json", fast({f"w{k}": k for k in range(length)}))
    tensors, _, _ = merge(tmp_path, ["short", "long"], source="union")
    assert tensors["bias"].tolist() == [[4.5, 4.5, 4.5, 4.5, 5.0]]


def test_a_head_of_classes_is_no_table_of_tokens(tmp_path: Path) -> None:
    for name, length in (("long", 5), ("short", 4)):
        tensors = {"embed.weight": torch.ones(length, 2), "output.weight": torch.ones(3, 2)}
        folder = write_model(tmp_path / name, tensors)
        put(folder, "tokenizer.json", fast({f"w{k}": k for k in range(length)}))
    tensors, _, _ = merge(tmp_path, ["short", "long"], source="union")
    assert [len(tensors[n]) for n in ("embed.weight", "output.weight")] == [5, 3]


VOCABULARIES = {
    **TOKENS,
    "swapped": ["a", "the"],
    "other": ["the", "a", "<z>"],
    "later": ["the", "a", "<w>", "<x>"],
}
REFUSED: list[tuple[list[str], str | None, str]] = [
    # a word at two numbers
    (["base", "swapped"], None, "number 2 tokens differently, such as 'a'"),
    (["base", "swapped"], "union", "number 2 tokens differently"),
    (["one", "later"], None, "number 1 tokens differently, such as '<x>'"),
    (["one", "later"], "union", "number 1 tokens differently"),
    # two words at a number, of tables of one length or of two
    (["one", "other"], "union", "2 is '<z>' in 'other' and '<x>' in 'one'"),
    (["one", "other"], "base", "2 is '<z>' in 'other' and '<x>' in 'one'"),
    (["one", "other"], "other", "2 is '<x>' in 'one' and '<z>' in 'other'"),
    (["two", "other"], "union", "one number stands for two tokens"),
    # tables of two lengths, merged by number
    (["one", "two"], None, "set tokenizer_source"),
]


@pytest.mark.parametrize(("models", "source", "words"), REFUSED)
def test_words_that_do_not_fit_are_refused(
    tmp_path: Path, models: list[str], source: str | None, words: str
) -> None:
    for name in models:
        with_tokens(tmp_path, name, VOCABULARIES[name])
    with pytest.raises(BLRError, match=words):
        merge(tmp_path, models, source=source)


def test_words_that_no_one_tokenizer_has_are_refused(tmp_path: Path) -> None:
    """Two models that append a word each, at two numbers."""
    for name, added in (("one", {"<x>": 2}), ("two", {"<y>": 3})):
        folder = with_tokens(tmp_path, name, ["the", "a", "", ""])
        put(folder, "tokenizer.json", fast({"the": 0, "a": 1}, added))
    with pytest.raises(InputError, match=r"'<[xy]>'.*merge rows by number"):
        merge(tmp_path, ["one", "two"], source="union")
    with pytest.raises(InputError, match="'two' lacks '<x>' and has tokens behind it"):
        merge(tmp_path, ["one", "two"], source="base")


def test_without_a_source_rows_are_merged_by_number_and_it_is_said(tmp_path: Path) -> None:
    with_tokens(tmp_path, "one", ["the", "a", "<x>"], padding=1)
    with_tokens(tmp_path, "other", ["the", "a", "<z>"], padding=1)
    with_tokens(tmp_path, "more", ["the", "a", "<x>", "<y>"])
    tensors, _, notes = merge(tmp_path, ["one", "other", "more"])
    assert len(notes) == 2
    assert "'<z>' and '<x>': they are merged by number" in notes[0]
    assert "lacks 1 tokens of 'more', such as '<y>'" in notes[1]
    states = [Folder.open(tmp_path / n).tensors() for n in ("one", "other", "more")]
    mean = torch.stack([state["embed.weight"] for state in states]).mean(0)
    torch.testing.assert_close(tensors["embed.weight"], mean)


def test_tokens_without_a_row(tmp_path: Path) -> None:
    """A note names the model that has them; they are refused where the result needs their rows."""
    with_tokens(tmp_path, "base", TOKENS["base"])
    with_tokens(tmp_path, "short", TOKENS["two"], rows=2)
    _, folder, notes = merge(tmp_path, ["base", "short"], source="base")
    assert vocabulary(folder) == {"the": 0, "a": 1}
    assert "2 tokens of 'short' have none of its 2 rows, such as '<x>'" in notes[0]
    for source in ("union", "short"):
        with pytest.raises(InputError, match="no model has a row for '<x>' of 'short'"):
            merge(tmp_path, ["base", "short"], source=source)


def test_a_tokenizer_alone_has_no_rows(tmp_path: Path) -> None:
    for name in ("base", "one"):
        with_tokens(tmp_path, name, TOKENS[name])
    put(tmp_path / "words", "vocab.json", {"the": 0, "a": 1, "<x>": 2, "<y>": 3})
    with pytest.raises(InputError, match="no model has a row for '<y>'"):
        merge(tmp_path, ["base", "one"], source="words")
    put(tmp_path / "words", "vocab.json", {"the": 0, "a": 1, "<x>": 2})
    tensors, folder, _ = merge(tmp_path, ["base", "one"], source="words")
    assert len(tensors["embed.weight"]) == 3
    assert len(vocabulary(folder)) == 3


@pytest.mark.parametrize(
    ("file", "content"), [("tokenizer.model", "\0"), ("tokenizer.json", {"odd": 1}), ("", "")]
)
def test_tokenizers_that_are_not_read_are_said(tmp_path: Path, file: str, content: Any) -> None:
    for name in ("base", "one"):
        folder = with_tokens(tmp_path, name, TOKENS["base"])
    (folder / "tokenizer.json").unlink()
    if file:
        put(folder, file, content)
    for source in (None, "base"):
        _, _, notes = merge(tmp_path, ["base", "one"], source=source)
        assert notes == ["the tokenizer of 'one' is not read: its rows are merged by their number"]
    with pytest.raises(InputError, match=r"union needs a tokenizer\.json in 'one'"):
        merge(tmp_path, ["base", "one"], source="union")
    with_tokens(tmp_path, "two", TOKENS["two"])
    with pytest.raises(InputError, match=r"borrowed rows need a tokenizer\.json in 'one'"):
        merge(tmp_path, ["base", "one", "two"], source="two")
    with pytest.raises(InputError, match=r"holds none of tokenizer\.json"):
        merge(tmp_path, ["base", "two"], source="r.yml")


def test_the_same_from_python(tmp_path: Path) -> None:
    """Folders are compared from Python too; state dicts have no words."""
    places = {n: with_tokens(tmp_path, n, VOCABULARIES[n]) for n in ("base", "swapped", "one")}
    with pytest.raises(InputError, match="number 2 tokens differently"):
        blr.merge(places["base"], [places["swapped"]], method="linear")
    with pytest.raises(ModelError, match="set tokenizer_source"):
        blr.merge(None, [places["base"], places["one"]], method="linear")
    pair = [places["base"], places["one"]]
    merged = blr.merge(None, pair, method="linear", tokenizer_source="union")
    assert len(merged["embed.weight"]) == 3
    report = blr.merge(None, pair, method="linear", tokenizer_source="union", out=tmp_path / "o")
    assert len(vocabulary(report.folder)) == 3
    states = [Folder.open(place).tensors() for place in pair]
    for models in (states, [pair[0], states[1]]):
        with pytest.raises(InputError, match="for models in folders"):
            blr.merge(None, models, method="linear", tokenizer_source="union")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blr.merge(None, [pair[0], states[0]], method="linear")
