"""Texts and labels from files, and models from folders: what is read, and how faults are named."""

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
from blr_analysis.huggingface import data
from blr_analysis.huggingface.models import load_model
from blr_analysis.huggingface.questions import Tokens, read_tokens

pytest.importorskip("transformers")
pytest.importorskip("datasets")

TEXTS = ["a film", 'it was "very good", we\tsaid', "", "Über 雪"]
LABELS = [1, 0, 2, 1]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.build("bert", id2label={0: "neg", 1: "mid", 2: "pos"})
    return tiny.save(tmp_path_factory.mktemp("bert"), model)


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


WRITERS: dict[str, Callable[[pd.DataFrame, Path], Any]] = {
    "jsonl": lambda table, path: table.to_json(path, orient="records", lines=True),
    "json": lambda table, path: table.to_json(path, orient="records", force_ascii=False),
    "csv": lambda t, path: t.to_csv(path, index=False, encoding="utf-8-sig", lineterminator="\r\n"),
    "tsv": lambda _, path: path.write_text(f"label\ttext\n{TSV}\n"),
    "parquet": lambda table, path: table.set_axis([f"row {t}" for t in TEXTS]).to_parquet(path),
}
TSV = "\n".join(f"{y}\t{t.replace(chr(9), ' ')}" for t, y in zip(TEXTS, LABELS, strict=True))


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_says_the_same(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"d.{kind}"
    spaces = " " if kind == "tsv" else "\t"
    WRITERS[kind](pd.DataFrame({"other": 1, "text": TEXTS, "label": LABELS}), path)
    table, file = data.read_rows(path)
    assert data.text_columns(table, file, None) == ("text",)
    assert table["text"].tolist() == [t.replace("\t", spaces) for t in TEXTS]
    label = data.label_column(table, file, None)
    assert data.class_indices(table[label].tolist(), data.places_of(table, file), {}, 3) == LABELS


def test_texts_stand_as_they_are(tmp_path: Path) -> None:
    table, file = data.read_rows(written(tmp_path / "d.txt", "one\n\n  \n two \n"))
    assert table["text"].tolist() == ["one", " two "]
    assert data.places_of(table, file)[1].startswith("line 4 of")
    table, file = data.read_rows(written(tmp_path / "d.csv", 'text,label\n"a\nb",0\nc,1\n'))
    assert table["text"].tolist() == ["a\nb", "c"]
    assert data.places_of(table, file)[1].startswith("row 2 of")
    dated = '{"text": "a", "date": "2020-01-01", "timestamp": 1600000000}\n'
    table, _ = data.read_rows(written(tmp_path / "d.jsonl", dated))
    assert table.iloc[0].tolist() == ["a", "2020-01-01", 1600000000]


def test_columns_by_their_usual_names_and_by_hand() -> None:
    def found(columns: str, text: Any = None) -> tuple[str, ...]:
        return data.text_columns(pd.DataFrame(columns=columns.split()), "here", text)

    assert found("premise hypothesis idx") == ("premise", "hypothesis")
    assert found("premise hypothesis idx", ["hypothesis", "idx"]) == ("hypothesis", "idx")
    assert found("question sentence label") == ("question", "sentence")  # not the sentence alone
    for columns in (["text", "nothing"], ["a", "b", "c"], []):
        with pytest.raises(DataError, match="column"):
            found("text", columns)


def test_labels_by_name_and_number() -> None:
    names = {"neg": 0, "mid": 1, "pos": 2, "2": 0}
    labels = ["pos", 1, "1", 2.0, " 0 ", "2"]  # a name of the model's comes before a number
    assert data.class_indices(labels, [""] * 6, names, 3) == [2, 1, 1, 2, 0, 0]
    for label in (3, -1, 1.5, True, None, "Pos", "", "¹", float("nan"), float("inf"), [1]):
        with pytest.raises(DataError, match=r"line 2 .*label .*0 … 2 .*'pos'"):
            data.class_indices([0, label], ["line 1", "line 2"], {"pos": 2}, 3)


def tokens_of(model: Path, path: Path, labelled: bool = False, longest: int = 16) -> Tokens:
    table, file = data.read_rows(path)
    labels = None
    if labelled:
        column = table[data.label_column(table, file, None)].tolist()
        labels = data.class_indices(column, data.places_of(table, file), {}, 12)
    return read_tokens(load_model(model), table, file, None, longest, labels).tokens


def test_rows_are_padded_and_masked(bert: Path, tmp_path: Path) -> None:
    texts = tiny.sentences(12, low=1, high=20)
    rows = [{"text": t, "label": k} for k, t in enumerate(texts)]
    path = written(tmp_path / "d.jsonl", "\n".join(map(json.dumps, rows)))
    encoded = tokens_of(bert, path, labelled=True, longest=10)
    assert encoded.cut == sum(len(t.split()) + 2 > 10 for t in texts) > 0
    options = {"truncation": True, "max_length": 10, "padding": True, "return_tensors": "pt"}
    expected = tiny.tokenizer()(texts, **options)
    batch = encoded.collate(encoded.rows)
    assert batch.pop("labels").tolist() == list(range(12))
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], ids) for name, ids in expected.items())
    (pair,) = tokens_of(bert, written(tmp_path / "d.csv", "text1,text2\na film,it\n"))
    assert pair["input_ids"] == tiny.tokenizer()("a film", "it").input_ids
    assert 1 in pair["token_type_ids"]


def test_a_model_is_loaded_as_its_files_hold_it_and_in_eval_mode(tmp_path: Path) -> None:
    place = tiny.save(tmp_path, tiny.build("bert").bfloat16().train())
    wide = load_model(place, dtype="float32")
    assert {p.dtype for p in wide.model.parameters()} == {torch.float32}
    loaded = load_model(place)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert not any(m.training for m in loaded.model.modules())
    facts = (loaded.task, loaded.likelihood, loaded.longest)
    assert facts == ("classification", "categorical", 16)


BROKEN: list[tuple[str, str | bytes | None, type[BLRError], str]] = [
    ("d.xlsx", "", DataError, r"none of \.jsonl.*folder: convert"),
    ("d.csv[:2]", None, DataError, r"write a part .*d\.csv:train\[:2\]'"),
    ("d.json", "[]", DataError, "no examples"),
    ("d.csv", "", DataError, "no examples"),
    ("d.csv", "tekst,label\na,1\n", DataError, r"'tekst', 'label'.*--text"),
    ("d.csv", "text,sentence,label\na,b,1\n", DataError, "several columns"),
    ("d.csv", "text,y\na,1\n", DataError, r"label.*--label"),
    ("d.csv", "text,label,target\na,1,1\n", DataError, "several columns that could be the label"),
    ("d.csv", "text,text,label\na,b,1\n", DataError, "column twice"),
    ("d.csv", "text,label\na,b,1\n", DataError, "row 1 has 3 fields, its header 2"),
    ("d.csv", "text,label\na,1\nb\n", DataError, "row 2 has 1 fields"),
    ("d.csv", 'text,label\n"a,1\n', DataError, "no .csv"),
    ("d.csv", "text,label\nna\u00efve,1\n".encode("latin-1"), DataError, "in UTF-8"),
    ("d.jsonl", '{"text": "a", "label": 1}\n\n{"text": ', DataError, "line 3 is no JSON"),
    ("d.jsonl", '\n{"text": "a"}\n["a"]', DataError, "line 3 is no JSON object"),
    ("d.jsonl", '{"text": "a", "label": 1}\n\n{"label": 1}', DataError, "line 3 .* has None for"),
    ("d.jsonl", '{"text": 5, "label": 1}', DataError, "line 1 .* has 5 for its text"),
    ("d.json", '[{"text": "a"},\n{"text": ]', DataError, "line 2 column 10"),
    ("d.parquet", "PAR1 no", DataError, "no .parquet"),
    ("gone.csv", None, StorageError, "no file"),
    ("folder", None, DataError, "any data files"),
]


@pytest.mark.parametrize(("name", "content", "error", "words"), BROKEN)
def test_broken_files_are_named(
    name: str, content: Any, error: type[BLRError], words: str, bert: Path, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    if content is not None:
        written(tmp_path / name, content)
    with pytest.raises(error, match=words) as caught:
        tokens_of(bert, tmp_path / name, labelled=True)
    assert name in str(caught.value)


def _config(place: Path, **fields: object) -> None:
    path = place / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _no_head(place: Path) -> None:
    tiny.build("bert").bert.save_pretrained(place)
    _config(place, architectures=["BertForSequenceClassification"])


def _pickled(place: Path) -> None:
    (place / "model.safetensors").rename(place / "pytorch_model.bin")


def _cut(place: Path) -> None:
    written(place / "model.safetensors", (place / "model.safetensors").read_bytes()[:-10])


def _gone(pattern: str) -> Callable[[Path], object]:
    return lambda place: [path.unlink() for path in place.glob(pattern)]


FOLDERS: dict[str, tuple[Callable[[Path], object], type[BLRError], str]] = {
    "no config": (_gone("config.json"), StorageError, r"config\.json"),
    "another head": (lambda p: _config(p, architectures=["BertForMaskedLM"]), ModelError, "task="),
    "quantised": (lambda p: _config(p, quantization_config={"bits": 4}), ModelError, "quantised"),
    "broken": (lambda p: written(p / "config.json", "{"), ModelError, r"config\.json"),
    "pickled": (_pickled, StorageError, "pickle"),
    "truncated": (_cut, StorageError, "safetensors"),
    "no tokenizer": (_gone("tokenizer*"), ModelError, "tokenizer"),
    "no head": (_no_head, ModelError, r"no weights for 'classifier\.bias', 'classifier\.weight'"),
    "regression": (lambda p: _config(p, problem_type="regression"), ModelError, "regression"),
    "unknown family": (lambda p: _config(p, model_type="unknown"), ModelError, "cannot load"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_is_no_model_says_why(case: str, tmp_path: Path) -> None:
    place = tiny.save(tmp_path, tiny.build("bert"))
    change, error, words = FOLDERS[case]
    change(place)
    with pytest.raises(error, match=words):
        load_model(place)


def test_other_faults(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = tiny.save(tmp_path / "llama", tiny.build("llama", "causal_lm"), pairs=False)
    pair = written(tmp_path / "d.csv", "text1,text2\na,b\n")
    short = written(tmp_path / "d.txt", "a film\na\n")
    refused: list[tuple[Callable[[], object], type[BLRError], str]] = [
        (lambda: load_model(tmp_path / "nowhere"), StorageError, "nowhere"),
        (lambda: load_model(bert, task="summary"), InputError, "'summary'"),
        (lambda: load_model(bert, task="causal_lm"), ModelError, "has no weights for"),
        (lambda: load_model(bert, device="abacus"), BLRError, "'abacus'"),
        (lambda: tokens_of(llama, short), DataError, "line 2 .*nothing to predict"),
        (lambda: tokens_of(llama, pair), DataError, "reads one text"),
    ]
    for ask, error, words in refused:
        with pytest.raises(error, match=words):
            ask()
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    with pytest.raises(InputError, match=r"pip install '\.\[hf\]'"):
        load_model(bert)
