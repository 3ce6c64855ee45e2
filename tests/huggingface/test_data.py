"""Texts and labels from files: what is read, and how each fault is named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tiny_transformers as tiny
import torch

from blr_analysis.errors import BLRError, DataError, InputError, ModelError, StorageError
from blr_analysis.huggingface.data import (
    class_indices,
    label_column,
    places_of,
    read_rows,
    text_columns,
)
from blr_analysis.huggingface.models import checkpoint_names, load_model
from blr_analysis.huggingface.questions import Tokens, read_tokens

pytest.importorskip("transformers")

TEXTS = ["a film", 'it was "very good", we\tsaid', "", "Über 雪"]
LABELS = [1, 0, 2, 1]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.build("bert", id2label={0: "neg", 1: "mid", 2: "pos"})
    return tiny.save(tmp_path_factory.mktemp("bert"), model)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    return tiny.save(place, tiny.build("llama", "causal_lm"), pairs=False)


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def as_jsonl(path: Path) -> None:
    rows = [{"other": 1, "text": t, "label": y} for t, y in zip(TEXTS, LABELS, strict=True)]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")


def as_csv(path: Path) -> None:
    rows = ['"' + t.replace('"', '""') + f'",{y}' for t, y in zip(TEXTS, LABELS, strict=True)]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(["text,label", *rows]).encode())


def as_tsv(path: Path) -> None:
    rows = [f"{y}\t{t.replace(chr(9), ' ')}" for t, y in zip(TEXTS, LABELS, strict=True)]
    path.write_text("\n".join(["label\ttext", *rows]) + "\n")


def as_parquet(path: Path) -> None:
    table = pd.DataFrame({"label": LABELS, "text": TEXTS, "more": TEXTS})
    table.set_axis([f"row {text}" for text in TEXTS]).to_parquet(path)


@pytest.mark.parametrize("write", [as_jsonl, as_csv, as_tsv, as_parquet])
def test_every_format_says_the_same(write: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / f"d.{write.__name__.removeprefix('as_')}"
    write(path)
    table, where = read_rows(path)
    spaces = "\t" if write is not as_tsv else " "
    assert text_columns(table, where, None) == ("text",)
    assert table["text"].tolist() == [t.replace("\t", spaces) for t in TEXTS]
    label = label_column(table, where, None)
    assert class_indices(table[label].tolist(), places_of(table, where), {}, 3) == LABELS


def test_texts_stand_as_they_are(tmp_path: Path) -> None:
    table, where = read_rows(written(tmp_path / "d.txt", "one\n\n  \n two \n"))
    assert table["text"].tolist() == ["one", " two "]
    assert places_of(table, where)[1].startswith("line 4 of")
    table, where = read_rows(written(tmp_path / "d.csv", 'text,label\n"a\nb",0\nc,1\n'))
    assert table["text"].tolist() == ["a\nb", "c"]
    assert places_of(table, where)[1].startswith("row 2 of")
    dated = '{"text": "a", "date": "2020-01-01", "timestamp": 1600000000}\n'
    table, _ = read_rows(written(tmp_path / "d.jsonl", dated))
    assert table.iloc[0].tolist() == ["a", "2020-01-01", 1600000000]


@pytest.mark.parametrize(
    ("header", "asked", "found"),
    [
        ("premise,hypothesis,idx", None, ("premise", "hypothesis")),
        ("premise,hypothesis,idx", ["hypothesis", "idx"], ("hypothesis", "idx")),
        ("question,sentence,label", None, ("question", "sentence")),  # not the sentence alone
    ],
)
def test_pairs_by_their_usual_names_and_by_hand(
    header: str, asked: Any, found: tuple[str, ...], tmp_path: Path
) -> None:
    table, where = read_rows(written(tmp_path / "d.csv", f"{header}\na,b,1\n"))
    assert text_columns(table, where, asked) == found
    assert table[found[0]].tolist() in (["a"], ["b"])


NAMES = {"neg": 0, "mid": 1, "pos": 2, "2": 0}


def test_labels_by_name_and_number() -> None:
    given = ["pos", 1, "1", 2.0, " 0 ", "2"]  # a name of the model's comes before a number
    assert class_indices(given, [""] * 6, NAMES, 3) == [2, 1, 1, 2, 0, 0]


@pytest.mark.parametrize(
    "label", [3, -1, 1.5, True, None, "Pos", "", "¹", float("nan"), float("inf"), [1]]
)
def test_labels_out_of_range_are_named(label: object) -> None:
    with pytest.raises(DataError, match=r"line 2 .*label .*0 … 2 .*'pos'"):
        class_indices([0, label], ["line 1", "line 2"], {"pos": 2}, 3)


BROKEN: list[tuple[str, str | bytes | None, type[BLRError], str]] = [
    ("d.xlsx", "", DataError, r"none of \.jsonl"),
    ("d.json", "[]", DataError, "no examples"),
    ("d.jsonl", "", DataError, "no examples"),
    ("d.txt", "\n \n", DataError, "no examples"),
    ("d.csv", "", DataError, "no examples"),
    ("d.csv", "tekst,label\na,1\n", DataError, r"'tekst', 'label'.*--text"),
    ("d.csv", "text,sentence,label\na,b,1\n", DataError, "several columns"),
    ("d.csv", "text,y\na,1\n", DataError, r"label.*--label"),
    ("d.csv", "text,label,target\na,1,1\n", DataError, "several columns that could be the label"),
    ("d.csv", "text,text,label\na,b,1\n", DataError, "column twice"),
    ("d.csv", "text,label\na,b,1\n", DataError, "row 1 has 3 fields, its header 2"),
    ("d.csv", "text,label\na,1\nb\n", DataError, "row 2 has 1 fields"),
    ("d.csv", 'text,label\n"a,1\n', DataError, "no .csv"),
    ("d.csv", "text,label\nna\u00efve,1\n".encode("latin-1"), DataError, "UTF-8.*iconv"),
    ("d.jsonl", b'\n{"text": "\xe9"}', DataError, "not in UTF-8"),
    ("d.jsonl", '{"text": "a", "label": 1}\n\n{"text": ', DataError, "line 3 is no JSON"),
    ("d.jsonl", '\n{"text": "a"}\n["a"]', DataError, "line 3 is no JSON object"),
    ("d.jsonl", '{"text": "a", "label": 1}\n\n{"label": 1}', DataError, "line 3 .* has no text"),
    ("d.jsonl", '{"text": 5, "label": 1}', DataError, "line 1 .* has 5 for its text"),
    ("d.json", '[{"text": "a"},\n{"text": ]', DataError, "line 2 column 10"),
    ("d.parquet", "PAR1 no", DataError, "no .parquet"),
    ("gone.csv", None, StorageError, "No such file"),
    ("folder", None, DataError, "no folder of Dataset"),
]


@pytest.mark.parametrize(("name", "content", "error", "words"), BROKEN)
def test_broken_files_are_named(
    name: str, content: str | bytes | None, error: type[BLRError], words: str, bert: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    (tmp_path / "folder").mkdir()
    if content is not None:
        written(tmp_path / name, content)
    with pytest.raises(error, match=words) as caught:
        tokens_of(bert, tmp_path / name, labelled=True)
    assert name in str(caught.value)


@pytest.mark.parametrize("columns", [["text", "nothing"], ["a", "b", "c"], []])
def test_columns_that_cannot_be(columns: list[str]) -> None:
    with pytest.raises(DataError, match="column"):
        text_columns(pd.DataFrame({"text": ["a"]}), "here", columns)


# --- token ids --------------------------------------------------------------------------------


def tokens_of(model: Path, path: Path, labelled: bool = False, most: int = 16) -> Tokens:
    table, where = read_rows(path)
    labels = None
    if labelled:
        given = table[label_column(table, where, None)].tolist()
        labels = class_indices(given, places_of(table, where), {}, 12)
    return read_tokens(load_model(model), table, where, None, most, labels)[1]


def test_rows_are_padded_and_masked(bert: Path, tmp_path: Path) -> None:
    texts = tiny.sentences(12, low=1, high=20)
    rows = [{"text": t, "label": k} for k, t in enumerate(texts)]
    path = written(tmp_path / "d.jsonl", "\n".join(map(json.dumps, rows)))
    encoded = tokens_of(bert, path, labelled=True, most=10)
    tokenizer = tiny.tokenizer()
    assert encoded.cut == sum(len(t.split()) + 2 > 10 for t in texts) > 0
    for row, text in zip(encoded, texts, strict=True):
        assert row["input_ids"] == tokenizer(text, truncation=True, max_length=10).input_ids
    batch = encoded.collate(encoded.rows)
    for ids, mask, row in zip(
        batch["input_ids"], batch["attention_mask"], encoded.rows, strict=True
    ):
        count = len(row["input_ids"])
        assert ids[:count].tolist() == row["input_ids"]
        assert ids[count:].eq(0).all()
        assert mask.tolist() == [1] * count + [0] * (len(ids) - count)
    assert batch["labels"].tolist() == list(range(12))


def test_the_labels_of_a_language_model_are_its_ids(llama: Path, tmp_path: Path) -> None:
    encoded = tokens_of(llama, written(tmp_path / "d.txt", "it was\na film was"))
    batch = encoded.collate(encoded.rows)
    assert "token_type_ids" not in batch  # which Llama does not take
    assert torch.equal(batch["labels"][1], batch["input_ids"][1])
    assert batch["labels"][0, 2] == -100
    assert batch["labels"][0, :2].tolist() == batch["input_ids"][0, :2].tolist()


def test_texts_that_a_language_model_cannot_score(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2 .*nothing to predict"):
        tokens_of(llama, written(tmp_path / "d.txt", "a film\na\n"))
    with pytest.raises(DataError, match="reads one text"):
        tokens_of(llama, written(tmp_path / "d.csv", "text1,text2\na,b\n"))


def test_pairs_are_one_row(bert: Path, tmp_path: Path) -> None:
    (item,) = tokens_of(bert, written(tmp_path / "d.csv", "text1,text2\na film,it\n"))
    assert item["input_ids"] == tiny.tokenizer()("a film", "it").input_ids
    assert 1 in item["token_type_ids"]


# --- the model's folder -----------------------------------------------------------------------


def test_a_model_is_loaded_in_float32_and_eval_mode(tmp_path: Path) -> None:
    place = tiny.save(tmp_path, tiny.build("bert").bfloat16().train())
    loaded = load_model(place)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert not any(m.training for m in loaded.model.modules())
    assert (loaded.task, loaded.likelihood, loaded.longest) == (
        "classification",
        "categorical",
        16,
    )
    assert checkpoint_names(loaded) == {n: n for n, _ in loaded.model.named_parameters()}


def _config(place: Path, **more: object) -> None:
    path = place / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


def _truncated(place: Path) -> None:
    content = (place / "model.safetensors").read_bytes()
    (place / "model.safetensors").write_bytes(content[:-10])


def _no_head(place: Path) -> None:
    tiny.build("bert").bert.save_pretrained(place)
    _config(place, architectures=["BertForSequenceClassification"])


def _moved(old: str, new: str) -> Callable[[Path], object]:
    return lambda place: (place / old).rename(place / new)


FOLDERS: dict[str, tuple[Callable[[Path], object], type[BLRError], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), StorageError, r"no config\.json"),
    "an adapter": (_moved("config.json", "adapter_config.json"), ModelError, "PEFT adapter"),
    "another head": (lambda p: _config(p, architectures=["BertForMaskedLM"]), ModelError, "task="),
    "no architecture": (lambda p: _config(p, architectures=None), ModelError, "no architecture"),
    "quantised": (lambda p: _config(p, quantization_config={"bits": 4}), ModelError, "quantised"),
    "broken": (lambda p: (p / "config.json").write_text("{"), StorageError, r"config\.json"),
    "pickled": (_moved("model.safetensors", "pytorch_model.bin"), StorageError, "pickle"),
    "truncated": (_truncated, StorageError, "safetensors"),
    "no tokenizer": (
        lambda p: [path.unlink() for path in p.glob("tokenizer*")],
        ModelError,
        "tokenizer",
    ),
    "no head": (_no_head, ModelError, r"'classifier\.bias', 'classifier\.weight'.*random"),
    "regression": (
        lambda p: tiny.build("bert", num_labels=1).save_pretrained(p),
        ModelError,
        "regression",
    ),
    "unknown family": (lambda p: _config(p, model_type="unknown"), ModelError, "cannot load"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_is_no_model_says_why(case: str, tmp_path: Path) -> None:
    place = tiny.save(tmp_path, tiny.build("bert"))
    change, error, words = FOLDERS[case]
    change(place)
    with pytest.raises(error, match=words):
        load_model(place)


def test_other_faults_of_loading(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(InputError, match="'summary'"):
        load_model(bert, task="summary")
    with pytest.raises(ModelError, match="random"):
        load_model(bert, task="causal_lm")
    with pytest.raises(BLRError, match="'abacus'"):
        load_model(bert, device="abacus")
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    with pytest.raises(InputError, match=r"pip install '\.\[hf\]'"):
        load_model(bert)
