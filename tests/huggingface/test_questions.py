"""Rows of a language model, whatever their form: their loss is transformers' own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers as tiny
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import logsigmoid

import blr_analysis as blr
from blr_analysis.backprop import engine
from blr_analysis.errors import BLRError, DataError, InputError, ModelError, StorageError
from blr_analysis.files.headers import record_text
from blr_analysis.huggingface.models import load_language_model, load_model
from blr_analysis.huggingface.questions import language_task
from blr_analysis.sensitivity.index.projection import Projection
from blr_analysis.sensitivity.index.sketch import Sketch

datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

TURNS = "{% for m in messages %}{{ '[CLS] ' if m.role == 'user' }}{{ m.content }}{{ ' [SEP] ' }}"
PLAIN = TURNS + "{% endfor %}"
MARKED = (
    "{% for m in messages %}{{ '[CLS] ' }}{% if m.role == 'assistant' %}"
    "{%- generation -%}{{ m.content }}{%- endgeneration -%}{% else %}{{ m.content }}{% endif %}"
    "{{ ' [SEP] ' }}{% endfor %}"
)


def written(place: Path, rows: list[Any]) -> Path:
    place.write_text("\n".join(map(json.dumps, rows)))
    return place


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.build("llama", "causal_lm")
    return tiny.save(tmp_path_factory.mktemp("llm"), model, pairs=False)


@pytest.fixture(scope="module")
def adapter(llm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On a base that is stored in half precision."""
    folder = tmp_path_factory.mktemp("adapter")
    base = tiny.save(folder / "base", load_model(llm).model.bfloat16(), pairs=False)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    peft.get_peft_model(load_model(base).model, config).save_pretrained(str(folder))
    tiny.tokenizer(pairs=False, segments=False).save_pretrained(folder)
    return folder


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


def sharegpt(*contents: str) -> list[dict[str, str]]:
    speakers = ("human", "gpt") * len(contents)
    return [{"from": s, "value": c} for s, c in zip(speakers, contents, strict=False)]


# A row; the words that it becomes; the places of those that count.
FORMS: dict[str, tuple[dict[str, Any], str, list[int], str | None]] = {
    "text": ({"text": "the film was good"}, "the film was good", [0, 1, 2, 3], None),
    "answer": ({"prompt": "the film", "answer": " was good"}, "the film was good", [2, 3], None),
    "messages": (
        {"messages": chat("the film", "good", "a book", "dull")},
        "[CLS] the film [SEP] good [SEP] [CLS] a book [SEP] dull [SEP]",
        [4, 5, 10, 11],
        PLAIN,
    ),
    "ShareGPT": (
        {"conversations": sharegpt("the film", "good")},
        "[CLS] the film [SEP] good [SEP]",
        [4, 5],
        PLAIN,
    ),
    "marks": (
        {"messages": chat("the film", "very good", "a", "dull")},
        "[CLS] the film [SEP] [CLS] very good [SEP] [CLS] a [SEP] [CLS] dull [SEP]",
        [5, 6, 12],
        MARKED,
    ),
    "marks behind a prompt": (
        {"prompt": chat("the film", "good", "a book"), "completion": chat("", "dull")[1:]},
        "[CLS] the film [SEP] [CLS] good [SEP] [CLS] a book [SEP] [CLS] dull [SEP]",
        [12],
        MARKED,
    ),
    "other columns": ({"ask": "the film", "say": " was good"}, "the film was good", [2, 3], None),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_the_loss_is_that_of_transformers(form: str, side: str, llm: Path, tmp_path: Path) -> None:
    """Summed over the tokens that count, beside a row of another length."""
    row, words, places, template = FORMS[form]
    loaded = load_model(llm)
    loaded.tokenizer.chat_template = template
    loaded.tokenizer.padding_side = side
    columns = {}
    if form == "other columns":
        columns = {"prompt": "ask", "answer": "say"}
    longer = json.loads(json.dumps(row).replace("the film", "the very good film"))
    task = language_task(loaded, written(tmp_path / "rows.jsonl", [longer, row]), **columns)

    ids = torch.tensor([loaded.tokenizer.convert_tokens_to_ids(words.split())])
    labels = torch.full_like(ids, -100)
    labels[0, places] = ids[0, places]
    counted = int((labels[:, 1:] != -100).sum())
    expected = loaded.model(input_ids=ids, labels=labels).loss * counted
    outputs, targets = task.at(task.parameters()).run(torch.arange(2))
    torch.testing.assert_close(task.likelihood.nll(outputs, targets)[1], expected)


def test_packed_texts_stay_apart(llm: Path) -> None:
    """Positions that begin anew say where a text begins; transformers' attention heeds them."""
    model = load_model(llm).model
    texts = [[4, 5, 6], [7, 8], [9, 10, 11, 12]]

    def packed(members: list[list[int]]) -> dict[str, list[int]]:
        return {
            "input_ids": [token for ids in members for token in ids],
            "labels": [token for ids in members for token in (-100, *ids[1:])],
            "position_ids": [k for ids in members for k in range(len(ids))],
        }

    rows = [packed(texts[:2]), packed(texts[1:])]
    task = blr.Task(model, rows, likelihood="causal_lm")
    outputs, targets = task.at(task.parameters()).run(torch.arange(2))
    alone = [model(input_ids=torch.tensor([t]), labels=torch.tensor([t])).loss for t in texts]
    sums = [loss * (len(t) - 1) for loss, t in zip(alone, texts, strict=True)]
    expected = torch.stack([sums[0] + sums[1], sums[1] + sums[2]])
    torch.testing.assert_close(task.likelihood.nll(outputs, targets), expected)


PAIRS = [
    {"prompt": "the film", "chosen": " was good", "rejected": " is bad dull"},
    {"prompt": "a", "chosen": " dull book", "rejected": " good"},
]
AS_MESSAGES = [
    {
        "chosen": chat(pair["prompt"], pair["chosen"].strip()),
        "rejected": chat(pair["prompt"], pair["rejected"].strip()),
    }
    for pair in PAIRS
]


def log_probability(model: Any, words: str, n_prompt: int) -> Tensor:
    ids = torch.tensor([tiny.tokenizer(pairs=False)(words).input_ids])
    labels = ids.clone()
    labels[:, :n_prompt] = -100
    return -model(input_ids=ids, labels=labels).loss * (ids.shape[1] - n_prompt)


@pytest.mark.parametrize("form", ["texts", "messages"])
def test_a_pair_has_the_loss_of_dpo(form: str, adapter: Path, tmp_path: Path) -> None:
    """And its gradients are autograd's, by which the empirical Fisher is summed."""
    loaded = load_language_model(adapter, dtype="float32")
    loaded.tokenizer.chat_template = PLAIN
    rows = PAIRS if form == "texts" else AS_MESSAGES
    task = language_task(loaded, written(tmp_path / "pairs.jsonl", rows))
    model: Any = loaded.model

    def margin(pair: dict[str, str]) -> Tensor:
        n_prompt = len(pair["prompt"].split())
        starts = ("", "") if form == "texts" else ("[CLS] ", " [SEP]")
        n_prompt += 2 * (form == "messages")
        ends = "" if form == "texts" else " [SEP]"
        words = [
            f"{starts[0]}{pair['prompt']}{starts[1]} {pair[name].strip()}{ends}"
            for name in ("chosen", "rejected")
        ]
        chosen, rejected = (log_probability(model, text, n_prompt) for text in words)
        return chosen - rejected

    with torch.no_grad(), model.disable_adapter():
        references = [margin(pair) for pair in PAIRS]
    losses = [
        -logsigmoid(0.1 * (margin(pair) - reference))
        for pair, reference in zip(PAIRS, references, strict=True)
    ]
    outputs, targets = task.at(task.parameters()).run(torch.arange(2))
    torch.testing.assert_close(task.likelihood.nll(outputs, targets), torch.stack(losses))
    check_fisher(task, model, losses)


def test_the_reference_is_what_training_began_with(adapter: Path, tmp_path: Path) -> None:
    """An adapter that had learned something, and is no zero change of its base."""
    folder = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    model: Any = load_language_model(folder, dtype="float32").model
    first_weights = {n: p.detach() / 2 for n, p in model.named_parameters() if p.requires_grad}
    (folder / "_run").mkdir()
    save_file(first_weights, folder / "_run" / "step-00000000.safetensors")
    recipe = blr.Recipe("adamw", lr=0.1, epochs=1, batch_size=2)
    (folder / "_run" / "recipe.json").write_text(record_text(recipe.record))
    loaded = load_language_model(folder, dtype="float32")
    task = language_task(loaded, written(tmp_path / "pairs.jsonl", PAIRS))
    for name, p in loaded.model.named_parameters():
        if name in first_weights:
            torch.testing.assert_close(
                p.detach(), 2 * first_weights[name]
            )  # the model is as it was

    model.load_state_dict(first_weights, strict=False)
    for pair, actual in zip(PAIRS, task.dataset.references, strict=True):
        chosen, rejected = (
            log_probability(model, pair["prompt"] + pair[name], len(pair["prompt"].split()))
            for name in ("chosen", "rejected")
        )
        assert actual == pytest.approx((chosen - rejected).item(), rel=1e-4)


def test_beta_scales_the_margin_of_a_pair(adapter: Path, tmp_path: Path) -> None:
    loaded = load_language_model(adapter, dtype="float32")
    file = written(tmp_path / "pairs.jsonl", PAIRS)
    margins = {}
    for beta in (0.1, 0.7):
        task = language_task(loaded, file, beta=beta)
        outputs, _ = task.at(task.parameters()).run(torch.arange(2))
        margins[beta] = outputs / beta
    torch.testing.assert_close(margins[0.1], margins[0.7])


@pytest.mark.parametrize("form", ["text", "answer", "pair"])
def test_the_end_token_stands_behind_texts_and_answers(
    form: str, adapter: Path, tmp_path: Path
) -> None:
    """Once: rows that end with it already stay as they are."""
    row, ends = {
        "text": ({"text": "the film was good"}, ["text"]),
        "answer": ({"prompt": "the film", "answer": " was good"}, ["answer"]),
        "pair": (PAIRS[0], ["chosen", "rejected"]),
    }[form]
    closed_row = {**row, **{name: row[name] + "[SEP]" for name in ends}}
    loaded = load_language_model(adapter, dtype="float32")
    loaded.tokenizer.eos_token = "[SEP]"
    file = written(tmp_path / "rows.jsonl", [row, closed_row])
    losses = {}
    for eos in (False, True):
        task = language_task(loaded, file, eos=eos)
        outputs, targets = task.at(task.parameters()).run(torch.arange(2))
        losses[eos] = task.likelihood.nll(outputs, targets)
    torch.testing.assert_close(losses[True], losses[False][1].repeat(2))
    assert abs(losses[False][0] - losses[False][1]) > 1e-6


def check_fisher(task: blr.Task, model: Any, losses: list[Tensor]) -> None:
    """The sum of squared gradients, each of an example by itself."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    expected = {n: torch.ones_like(p) for n, p in trained.items()}
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(trained.values()), retain_graph=True)
        for name, gradient in zip(trained, gradients, strict=True):
            expected[name] += gradient**2
    q = blr.fit_laplace(task, structure="diag", curvature="empirical_fisher", prior_precision=1.0)
    for name, diagonal in q.form.diagonal().items():
        torch.testing.assert_close(diagonal, expected[name], rtol=1e-3, atol=1e-6)


def test_an_adapters_base_stays_in_half_precision(adapter: Path, tmp_path: Path) -> None:
    """Its own weights and gradients are float32, and equal autograd's, text by text."""
    loaded = load_language_model(adapter)
    model: Any = loaded.model
    kinds = {p.requires_grad: p.dtype for p in model.parameters()}
    assert kinds == {False: torch.bfloat16, True: torch.float32}
    texts = tiny.sentences(4, low=5, high=5)
    task = language_task(loaded, written(tmp_path / "d.jsonl", [{"text": t} for t in texts]))
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    ids = tiny.tokenizer(pairs=False)(texts).input_ids
    losses = [
        model(input_ids=torch.tensor([row]), labels=torch.tensor([row])).loss * (len(row) - 1)
        for row in ids
    ]
    task.chunk_size = task.batch_size = 1  # in half precision a batch rounds in another way
    check_fisher(task, model, losses)


def test_long_texts_are_computed_few_at_a_time(
    llm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the memory for a chunk holds, here one."""
    texts = [{"text": text} for text in tiny.sentences(6, low=5)]
    task = language_task(load_model(llm), written(tmp_path / "d.jsonl", texts))
    monkeypatch.setattr(engine, "MIN_BYTES_ON_CPU", 0)
    monkeypatch.setattr(engine, "TOKENS_ON_CPU", 1)
    sizes = [len(chunk.indices) for chunk in engine.chunks(task, task.parameters(), columns=1)]
    assert sizes == [1] * 6


def test_texts_of_similar_lengths_are_computed_together(llm: Path, tmp_path: Path) -> None:
    """Each keeps its own place: an index of all is that of every text alone."""
    words = tiny.sentences(12, low=3, high=9)
    texts = [{"text": text} for text in words]
    task = language_task(load_model(llm), written(tmp_path / "d.jsonl", texts))
    lengths = task.examples.lengths(torch.arange(12))
    assert lengths is not None
    halves = task.subset(range(0, 12, 2)).examples.lengths(torch.arange(6))
    assert halves is not None
    assert halves.tolist() == lengths[::2].tolist()
    sweep = engine.chunks(task, task.parameters(), columns=1, in_order=False)
    visited = torch.cat([chunk.indices for chunk in sweep])
    assert visited.tolist() == lengths.argsort(stable=True).tolist() != list(range(12))
    q = blr.fit_laplace(task, structure="diag", prior_precision=1.0)
    projection = Projection(task, Sketch.of(q, 10**6))
    alone = [projection.whole(torch.tensor([i])) for i in range(12)]
    torch.testing.assert_close(projection.whole(), torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_rows_of_data_sets_and_their_splits(llm: Path, tmp_path: Path) -> None:
    loaded = load_model(llm)
    texts = tiny.sentences(6, low=3)
    rows = [{"text": text} for text in texts]
    file = written(tmp_path / "train.jsonl", rows)
    (tmp_path / "folder").mkdir()
    written(tmp_path / "folder" / "train.jsonl", rows)
    whole = datasets.Dataset.from_list(rows)
    whole.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(tmp_path / "two")
    cases = {
        str(file): texts,
        f"{file}:train[2:4]": texts[2:4],
        f"{file}:train[:50%]": texts[:3],
        str(tmp_path / "folder"): texts,
        f"{tmp_path}/folder:train[1:3]": texts[1:3],
        f"{tmp_path}/one:train[-1:]": texts[-1:],
        f"{tmp_path}/two:test+train[:2]": [texts[0], *texts[:2]],
    }
    for address, expected in cases.items():
        assert language_task(loaded, address).metadata["text"] == expected, address
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
    assert language_task(loaded, stream).metadata["text"] == texts


def test_a_model_of_the_hub_is_read_from_its_cache(
    llm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / "abc").symlink_to(llm)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert load_language_model("org/tiny").task == "causal_lm"


def t5(place: Path) -> Path:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(place)
    return place


REFUSED: dict[str, tuple[Callable[[Path, Path], Any], type[BLRError], str]] = {
    "Hub model": (lambda _, __: load_language_model("org/gone"), StorageError, "--online"),
    "Hub data": (
        lambda llm, _: language_task(load_model(llm), "org/gone:train[:5]"),
        StorageError,
        "--online",
    ),
    "T5": (lambda _, p: load_model(t5(p)), ModelError, "an encoder with a decoder: give its blr"),
    "dtype": (lambda llm, _: load_model(llm, dtype="int8"), InputError, "dtype"),
    "4 bit": (lambda llm, _: load_language_model(llm, load_in_4bit=True), InputError, "4bit"),
    "speaker": (
        lambda llm, p: rows_read(llm, p, {"conversations": [{"from": "judge", "value": "a"}]}),
        DataError,
        "line 1 .* turn of 'judge'",
    ),
    "empty text": (lambda llm, p: rows_read(llm, p, {"text": ""}), DataError, "drop it"),
    "several splits": (
        lambda llm, p: language_task(load_model(llm), two_splits(p)),
        DataError,
        "name one, '.*:train'",
    ),
    "no such split": (
        lambda llm, p: language_task(load_model(llm), f"{two_splits(p)}:dev"),
        DataError,
        "dev",
    ),
    "no such split of a file": (
        lambda llm, p: split_read(llm, p, "test"),
        DataError,
        "'test' names no rows(?!.*UTF-8).*the splits are 'train'$",
    ),
    "stretch of a file that is none": (
        lambda llm, p: split_read(llm, p, "train[a:b]"),
        DataError,
        "names no rows(?!.*UTF-8).*the splits are 'train'$",
    ),
    "no end token": (
        lambda llm, p: language_task(
            load_model(llm), written(p / "d.jsonl", [{"text": "the film"}]), eos=True
        ),
        InputError,
        "no end token.*--eos",
    ),
    "beta of texts": (
        lambda llm, p: language_task(
            load_model(llm), written(p / "d.jsonl", [{"text": "the film"}]), beta=0.3
        ),
        InputError,
        "belongs to pairs",
    ),
    "beta": (
        lambda llm, p: language_task(load_model(llm), written(p / "d.jsonl", PAIRS), beta=0.0),
        InputError,
        "beta must be",
    ),
    "pairs without the model before": (
        lambda llm, p: rows_read(llm, p, PAIRS[0]),
        InputError,
        "model before training",
    ),
    "a column alone": (
        lambda llm, p: language_task(
            load_model(llm), written(p / "d.jsonl", [{"ask": "a"}]), prompt="ask"
        ),
        InputError,
        "go together",
    ),
    "no such column": (
        lambda llm, p: language_task(
            load_model(llm), written(p / "d.jsonl", [{"ask": "a"}]), prompt="ask", answer="say"
        ),
        DataError,
        "no column 'say'",
    ),
}


def rows_read(llm: Path, place: Path, row: dict[str, Any]) -> Any:
    loaded = load_model(llm)
    loaded.tokenizer.chat_template = PLAIN
    return language_task(loaded, written(place / "d.jsonl", [row]))


def split_read(llm: Path, place: Path, split: str) -> Any:
    file = written(place / "d.jsonl", [{"text": "the film"}])
    return language_task(load_model(llm), f"{file}:{split}")


def two_splits(place: Path) -> str:
    whole = datasets.Dataset.from_list([{"text": "the film"}])
    datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk(place / "two")
    return str(place / "two")


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_in_a_line(case: str, llm: Path, tmp_path: Path) -> None:
    ask, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        ask(llm, tmp_path)


def test_a_packing_collator_is_named(llm: Path) -> None:
    from transformers import DataCollatorWithFlattening

    rows: Any = [{"input_ids": [4, 5, 6]}, {"input_ids": [7, 8]}]
    loader = torch.utils.data.DataLoader(rows, collate_fn=DataCollatorWithFlattening())
    task = blr.Task(load_model(llm).model, loader, likelihood="causal_lm")
    with pytest.raises(ModelError, match="packed into one row"):
        blr.fit_laplace(task, structure="diag", prior_precision=1.0)


def test_a_posterior_of_sequences_says_that_labels_were_drawn(llm: Path, tmp_path: Path) -> None:
    texts = [{"text": text} for text in tiny.sentences(3, low=3)]
    task = language_task(load_model(llm), written(tmp_path / "d.jsonl", texts))
    q = blr.fit_laplace(task, structure="kron", prior_precision=1.0)
    assert q.record["kind"] == "fisher_mc"
    assert "1 drawn label of each token" in q.note


def edited_texts(file: Path, rows: list[Any]) -> Path:
    """The second row is as the first."""
    return written(file, [rows[0], rows[0], *rows[2:]])


def other_template(file: Path, tokenizer: Any) -> dict[str, int]:
    tokenizer.chat_template = MARKED
    return {}


def other_token(file: Path, tokenizer: Any) -> dict[str, int]:
    tokenizer.add_tokens(["unheard"])
    return {}


def other_length(file: Path, tokenizer: Any) -> dict[str, int]:
    return {"max_length": 6}


@pytest.mark.parametrize(
    "rows",
    [
        [{"text": text, "source": "web"} for text in tiny.sentences(5, low=2)],
        [{"prompt": "the film", "answer": f" was {word}"} for word in ("good", "dull", "a book")],
        [{"messages": chat("the film", word)} for word in ("good", "dull", "a book")],
    ],
    ids=["texts", "answers", "messages"],
)
def test_unchanged_texts_are_tokenized_on_demand(
    llm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Any
) -> None:
    """They are the same texts, no other one is tokenized, and what has changed is read again."""
    loaded = load_model(llm)
    loaded.tokenizer.chat_template = PLAIN
    file = written(tmp_path / "rows.jsonl", rows)
    task = language_task(loaded, file)
    mark = task.dataset.mark
    again = language_task(loaded, file, mark=mark)
    assert again.metadata == task.metadata
    torch.testing.assert_close(again.fetch(torch.tensor([1])), task.fetch(torch.tensor([1])))
    q = blr.fit_laplace(task, prior_precision=1.0)
    blr.Index.build(task, q, tmp_path / "index", rank=20)
    with monkeypatch.context() as patch:
        patch.setattr(type(task.examples), "sha256", lambda *_: pytest.fail("all were read"))
        index = blr.Index.open(tmp_path / "index", task=again)
        index.top(again.subset([0]), 1, refine=1)
    for change in (other_template, other_length, other_token):
        settings = change(file, loaded.tokenizer)
        changed = language_task(loaded, file, mark=mark, **settings)
        assert isinstance(changed.dataset.rows, list), change
    loaded = load_model(llm)
    loaded.tokenizer.chat_template = PLAIN
    edited = language_task(loaded, edited_texts(file, rows), mark=mark)
    with pytest.raises(BLRError, match=r"other (data|inputs|targets)"):
        blr.Index.open(tmp_path / "index", task=edited)


@pytest.mark.parametrize("saved", [False, True], ids=["in memory", "on disk"])
def test_a_data_set_is_known_by_its_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    """A number that changed is other data; the same numbers with another fingerprint are not."""
    numbers = torch.randn(40, 2, generator=torch.Generator().manual_seed(0)).tolist()
    labels = [number % 3 for number in range(40)]
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, 3))

    def task(name: str) -> blr.Task:
        data = datasets.Dataset.from_dict({"input": numbers, "labels": labels})
        if saved:
            data.save_to_disk(tmp_path / name)
            data = datasets.load_from_disk(tmp_path / name)
        return blr.Task(model, data)

    original = task("a")
    q = blr.fit_laplace(original, prior_precision=1.0)
    blr.Index.build(original, q, tmp_path / "index")
    with monkeypatch.context() as patch:
        patch.setattr(type(original.examples), "sha256", lambda *_: pytest.fail("all were read"))
        blr.Index.open(tmp_path / "index", task=original)
    blr.Index.open(tmp_path / "index", task=task("b"))
    numbers[7][1] += 1.0
    with pytest.raises(BLRError, match="other data"):
        blr.Index.open(tmp_path / "index", task=task("c"))
