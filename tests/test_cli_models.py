"""The commands that work with folders of models: ``index``, ``query``, ``what-if`` and ``audit`` of
language models, ``fisher`` and ``merge``. They write what the functions give, and say what is so;
what they read is what trainers make of it."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tiny_transformers as tiny
import torch
from commands import CommandContract, refused, run
from models_on_disk import family_in_memory, write_family
from safetensors.torch import load_file, save_file

import blr_analysis as blr
from blr_analysis.backprop import engine
from blr_analysis.cli import main
from blr_analysis.cli.index import planned_rank
from blr_analysis.cli.refinement import note_of_sizes
from blr_analysis.errors import DataError, InputError, ModelError
from blr_analysis.files import Folder, storage
from blr_analysis.files.headers import read_record, record_text
from blr_analysis.huggingface.fisher import fisher_cost, text_tasks
from blr_analysis.huggingface.models import load_language_model, load_model
from blr_analysis.huggingface.questions import language_task
from blr_analysis.posterior.precision_files import write_precision

pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

N = 9
ASKED = [{"prompt": "the film", "answer": " was good"}, {"prompt": "a", "answer": " dull book"}]
TEMPLATE = (
    "{% for m in messages %}{{ '[CLS] ' if m.role == 'user' else '' }}{{ m.content }}"
    "{{ ' [SEP] ' }}{% endfor %}"
)


RECIPE = """
merge_method: gradient_matching
base_model: base
models:
- {model: ft1, parameters: {weight: 0.5}}
- {model: ft2, parameters: {weight: 1.5}}
parameters: {delta: 0.25}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model with texts, questions and an exact index; a classifier, two others of it
    with precisions, and examples for each."""
    place = tmp_path_factory.mktemp("models")
    tiny.save(
        place / "llm", tiny.build("llama", "causal_lm", tie_word_embeddings=True), pairs=False
    )
    texts = tiny.sentences(N, low=3)
    written(place / "data.jsonl", [{"text": t, "source": "ab"[i % 2]} for i, t in enumerate(texts)])
    written(place / "asked.jsonl", ASKED)
    how = f"--prior-precision 1 --rank 1000000 --out {place}/index"
    assert main(["index", f"{place}/llm", f"{place}/data.jsonl", *how.split()]) == 0
    tiny.save(place / "model", tiny.build("bert"))
    pairs = zip(texts, tiny.sentences(N, high=4, seed=1), strict=True)
    rows = [{"premise": a, "hypothesis": b, "label": i % 3} for i, (a, b) in enumerate(pairs)]
    written(place / "pairs.jsonl", rows)
    for k, name in enumerate("ab", 1):
        model = tiny.build("bert")
        generator = torch.Generator().manual_seed(k)
        for p in model.parameters():
            p.data += 0.05 * torch.randn(p.shape, generator=generator)
        folder = tiny.save(place / name, model)
        curved = {n: torch.full(s.shape, float(k)) for n, s in Folder.open(folder).specs.items()}
        about = {"kind": "fisher_mc", "definition": "constant", "n_data": 10}
        write_precision(folder / "precision", curved, **about, model=folder)
        rows = [{"text": t, "label": i % 3} for i, t in enumerate(tiny.sentences(12, seed=k))]
        written(place / f"{name}.jsonl", rows)
    return place


@pytest.fixture
def here(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder: a recipe, a base and two fine-tunes, and links to the models of text."""
    write_family(tmp_path)
    (tmp_path / "recipe.yml").write_text(RECIPE)
    for each in place.iterdir():
        (tmp_path / each.name).symlink_to(each)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def tuned(*targets: str) -> Path:
    """A LoRA adapter of the language model."""
    peft = pytest.importorskip("peft")
    place = Path("lora")
    how = {"init_lora_weights": False, "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(r=2, target_modules=[*targets], **how)
    peft.get_peft_model(load_model("llm").model, config).save_pretrained(str(place))
    changed(place / "adapter_config.json", base_model_name_or_path=str(Path("llm").absolute()))
    return place


def changed(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def written(file: Path | str, rows: list[dict[str, Any]]) -> Path:
    Path(file).write_text("\n".join(map(json.dumps, rows)))
    return Path(file)


# What is read


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


TURNS = chat("the film", "good", "a book", "dull")
SAID = "[CLS] the film [SEP] good [SEP] [CLS] a book [SEP] dull [SEP]"
INSTRUCTION = {"instruction": "the film", "output": " was good"}
GO = "{{ 'go' if m.role == 'assistant' }}{{ m.content }}"
GLUED = TEMPLATE.replace("{{ m.content }}", GO) + "{{ 'go' if add_generation_prompt }}"


@pytest.mark.parametrize(
    ("row", "words", "kept"),
    [
        (ASKED[0], "the film was good", [2, 3]),
        (INSTRUCTION | {"input": "a book"}, "the film\n\na book was good", [4, 5]),
        (INSTRUCTION | {"input": ""}, "the film was good", [2, 3]),
        (INSTRUCTION | {"input": None}, "the film was good", [2, 3]),
        (INSTRUCTION | {"input": "a book", "text": "a dull book"}, "a dull book", [0, 1, 2]),
        ({"messages": TURNS}, SAID, [4, 5, 10, 11]),
        ({"prompt": TURNS[:3], "completion": TURNS[3:]}, SAID, [10, 11]),
        ({"messages": chat("the film", "od", "a book", "od")}, GLUED, [4, 5, 10, 11]),
    ],
)
def test_of_prompts_and_conversations_the_answers_count(
    here: Path, row: Any, words: str, kept: list[int]
) -> None:
    """A token that begins in the header of a turn counts, as after a prompt."""
    loaded = load_model("llm")
    whole = datasets.Dataset.from_list([row | {"source": "web"}])
    loaded.tokenizer.chat_template = GLUED if words == GLUED else TEMPLATE
    whole.to_pandas().to_parquet("rows.parquet")
    whole.save_to_disk("saved")
    shown = words.replace("[CLS] ", "").replace(" [SEP]", "")
    if words == GLUED:
        shown = "the film od a book od"
        words = SAID.replace("dull", "good")
    for file in (written("rows.jsonl", [*whole]), Path("rows.parquet"), whole, Path("saved")):
        task = language_task(loaded, file)
        told = [task.metadata[name] for name in ("text", "source")]
        assert told == [[" ".join(shown.split())], ["web"]]
        batch = task.fetch(torch.arange(1))
        ids = batch["input_ids"][0]
        labels = batch["labels"][0]
        assert loaded.tokenizer.convert_ids_to_tokens(ids.tolist()) == words.split()
        assert (labels != -100).nonzero().flatten().tolist() == kept


LONG = " ".join(["the"] * 16)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "the", "answer": ""}], "line 1 .* has '' for its answer"),
        ([{"prompt": LONG, "answer": " book"}], "17 tokens"),
        ([{"text": f"{LONG} book"}], "max_length"),
        ([{"messages": "the"}], "no list of messages"),
        ([{"messages": TURNS}], "rewrites"),
    ],
)
def test_bad_rows(here: Path, rows: list[dict[str, Any]], words: str) -> None:
    loaded = load_model("llm")
    loaded.tokenizer.chat_template = "{{ 'dull ' if messages | length > 2 }}" + TEMPLATE
    with pytest.raises(DataError, match=words):
        language_task(loaded, written("rows.jsonl", rows))


def test_tokens_and_adapters_of_other_models(here: Path) -> None:
    loaded = load_model("llm")
    adapter = tuned("q_proj", "v_proj")
    with pytest.raises(InputError, match="no chat template"):
        language_task(loaded, written("rows.jsonl", [{"messages": TURNS}]))
    loaded.model.resize_token_embeddings(6)
    with pytest.raises(DataError, match="tokenizer"):
        language_task(loaded, "data.jsonl")
    tiny.save(here / "wide", tiny.build("llama", "causal_lm", hidden_size=16))
    for base, word in (("wide", "--base"), ("gone", "--base"), ("llm", "does not fit")):
        if base == "llm":
            changed(adapter / "adapter_config.json", r=0)
        with pytest.raises(ModelError, match=word):
            load_language_model(adapter, base=base)


# The commands

TIED = [pytest.param(name, marks=pytest.mark.slow) for name in ("embed_tokens", "lm_head")]


@pytest.mark.parametrize("target", ["q_proj", *TIED])
def test_an_adapter_is_indexed_on_its_base(here: Path, capsys: Any, target: str) -> None:
    """That of a tied table has gradients of its own; what fisher would add it to is two layers."""
    adapter = tuned(target)
    recorded = adapter / "_run" / "posterior.safetensors"
    recorded.parent.mkdir()
    recorded.touch()
    argv = (adapter, "data.jsonl", "--out")
    code, _, err = run(capsys, "index", *argv, "of_adapter")
    assert code == 0 and "prior precision" in err, err  # was found
    assert f"-p {recorded} spares the fit" in " ".join(err.split())
    names = set(blr.Index.open("of_adapter").posterior.mean)
    assert names
    assert all(f"{target}.lora_" in name for name in names)
    if target != "q_proj":
        assert "tied" in refused(capsys, "fisher", *argv, "precision")
        return
    shutil.copytree("llm", "moved")
    asked = ("query", "of_adapter", "asked.jsonl", "--top", 1, "--base", "moved")
    code, out, err = run(capsys, *asked, "--max-length", 3)
    assert code == 0 and "the film" in out and "1 of 2 texts" in err, err
    weights = load_file("moved/model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] *= 1.1
    save_file(weights, "moved/model.safetensors", {"format": "pt"})
    assert "is not the base that the index was built on" in refused(capsys, *asked)


@pytest.mark.slow
def test_a_query_names_the_model_that_the_index_was_made_with(here: Path, capsys: Any) -> None:
    loaded = load_model("llm")
    asked = ("query", "index", "asked.jsonl", "--model", "other")
    loaded.tokenizer.add_tokens(["another"])  # which no text had
    loaded.tokenizer.save_pretrained("other")
    loaded.model.bfloat16().save_pretrained("other")  # the same, rounded
    assert run(capsys, *asked)[0] == 0
    tiny.build("llama", "causal_lm", seed=1, tie_word_embeddings=True).save_pretrained("other")
    assert "weights" in refused(capsys, *asked)
    words = json.loads(Path("other/tokenizer.json").read_text())
    ids = words["model"]["vocab"]
    ids["good"], ids["dull"] = ids["dull"], ids["good"]
    changed(Path("other/tokenizer.json"), **words)
    assert "the tokenizer of 'other' is not the one of the index" in refused(capsys, *asked)


@pytest.mark.slow
def test_an_index_and_its_questions(here: Path, capsys: Any) -> None:
    task, test = (language_task(load_model("llm"), name) for name in ("data.jsonl", "asked.jsonl"))
    q = blr.fit_laplace(task, structure="kron", curvature="mc_fisher", prior_precision=1.0)
    how = "--top 3 --out found --tokens --refine 3 --no-normalize"
    code, out, err = run(capsys, "query", "index", "asked.jsonl", *how.split())
    exact = blr.influence(task, q, test, k=3)
    table = pd.read_parquet("found/sources.parquet")
    assert code == 0 and table["example"].tolist() == exact.helpful.flatten().tolist(), err
    values = exact.helpful_values.flatten().tolist()
    assert table["influence"].tolist() == pytest.approx(values, rel=1e-3)
    first = int(exact.helpful[0, 0])
    text = task.metadata["text"][first]
    assert text[:40] in out
    assert "0  the film was good" in out
    shares = pd.read_parquet("found/tokens.parquet")
    sums = shares.groupby(["question", "example"])["influence"].sum()
    for row in table.itertuples():
        assert float(sums[row.question, row.example]) == pytest.approx(row.influence, rel=1e-3)
    words = shares.query("question == 0 and example == @first")["token"].tolist()
    assert words == text.split()[1:]


def test_a_query_doubts_sizes_that_nothing_measured() -> None:
    """At its minimum a model's sizes hold; a recorded posterior does not know its minimum."""
    x = torch.linspace(-1, 1, 12).unsqueeze(1)
    y = 2 * x + torch.tensor([0.1, -0.1]).repeat(6).unsqueeze(1)
    model = torch.nn.Linear(1, 1)
    checkpoints = blr.Checkpoints(model, steps=4, structure="kron")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=1)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        error = torch.nn.functional.mse_loss(model(x), y)
        error.backward()
        return error

    for _ in range(4):
        optimizer.step(loss)
        checkpoints.step()
    recorded = checkpoints.posterior(n_data=12, prior_precision=1.0)
    assert "only rankings hold" in note_of_sizes(recorded, "influence")
    assert note_of_sizes(recorded, "normalized_influence") == ""
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones_like(x)], 1), y).solution
    model.weight.data[:] = solution[0]
    model.bias.data[:] = solution[1]
    task = blr.Task(model, (x, y), likelihood="gaussian")
    fitted = blr.fit_laplace(task, structure="full", prior_precision=1e-9)
    assert note_of_sizes(fitted, "influence") == ""


def test_a_query_orders_the_best_of_a_rough_index_by_their_exact_influence(
    here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blr_analysis.cli.refinement.REFINED", 4)
    how = "--prior-precision 1 --rank 32 --out rough"
    assert run(capsys, "index", "llm", "data.jsonl", *how.split())[0] == 0
    argv = ("query", "rough", "asked.jsonl", "--top", 3, "--out")
    code, _, err = run(capsys, *argv, "refined")
    assert code == 0 and "refined: the best 4 examples of each question" in err, err
    code, _, err = run(capsys, *argv, "unrefined", "--refine", 0)
    assert code == 0 and "refined" not in err, err
    task, test = (language_task(load_model("llm"), name) for name in ("data.jsonl", "asked.jsonl"))
    index = blr.Index.open("rough")
    exact = blr.influence(task, index.posterior, test)
    estimates = index.influence(test)
    for name, values in ("refined", exact), ("unrefined", estimates):
        table = pd.read_parquet(f"{name}/sources.parquet")
        for question, rows in table.groupby("question"):
            shortlist = estimates[:, question].topk(4).indices.tolist()
            best = sorted(shortlist, key=lambda row: -values[row, question])[:3]
            assert rows["example"].tolist() == best
            influence = values[best, question].tolist()
            assert rows["influence"].tolist() == pytest.approx(influence, rel=1e-3)
    assert not estimates.argsort(0).equal(exact.argsort(0))


def test_a_query_says_why_it_is_not_refined(
    here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index's own answers are shown then; data that the user names must be the right ones."""
    argv = ("query", "copied", "asked.jsonl")
    shutil.copytree("index", "copied")
    expected = run(capsys, *argv, "--refine", 0)[1]
    assert "refined: all 9 examples" in run(capsys, *argv)[2]
    with monkeypatch.context() as patch:
        patch.setattr("blr_analysis.cli.refinement.MOST_GRADIENTS", 10)
        _, out, err = run(capsys, *argv)
        assert out == expected and "not refined: 2 questions may take 11 gradients" in err
    other = written("other.jsonl", [{"text": text} for text in tiny.sentences(N, seed=3)])
    source = Path("copied/source.json")
    for data, words in (None, "--data"), ("gone.jsonl", "no file"), (str(other), "other inputs"):
        source.write_text(record_text(read_record(source) | {"data": data}))
        code, out, err = run(capsys, *argv)
        (line,) = (line for line in err.splitlines() if "not refined" in line)
        assert code == 0 and out == expected and words in line
        if data is not None:
            assert words in refused(capsys, *argv, "--data", data)


@pytest.mark.slow
def test_an_audit_of_texts(here: Path, capsys: Any) -> None:
    how = "--max-length 5 --prior-precision 1 --test asked.jsonl --out audit"
    code, out, err = run(capsys, "audit", "llm", "data.jsonl", *how.split())
    texts = pd.read_parquet("audit/table.parquet")["text"].tolist()
    longer = sum(len(text.split()) > 5 for text in texts)
    assert code == 0 and "perplexity" in out and f"{longer} of {N} texts" in err, err
    assert texts == tiny.sentences(N, low=3)
    assert texts[0] in Path("audit/report.html").read_text()


def passes(said: str) -> float:
    return float(said.split("passes")[1].split()[0])


@pytest.mark.slow
def test_a_dry_run_counts_what_the_run_then_does(
    here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    true = engine.record
    monkeypatch.setattr(engine, "record", lambda *a, **k: ran.append(k["size"]) or true(*a, **k))
    for options, found in ("--fit diag --prior-precision 1", 0), ("", 1):
        # a pass without records: the loss of the model
        argv = ("index", "llm", "data.jsonl", *options.split(), "--out", f"of{found}")
        said = run(capsys, *argv, "--dry-run")[1]
        assert not Path(f"of{found}").exists()
        assert not ran.clear()
        assert run(capsys, *argv)[0] == 0
        assert sum(ran) / N == pytest.approx(passes(said) - found, rel=0.05)
    for options, more in ("--by source --passes 50", 3 * 2 * 50), ("--test asked.jsonl", 2 / N):
        argv = ("audit", "llm", "data.jsonl", "--dry-run")
        plain, said = (run(capsys, *argv, *how)[1] for how in ((), options.split()))
        assert passes(said) - passes(plain) == pytest.approx(more, abs=0.011)


@pytest.mark.slow
def test_a_place_for_an_index_is_looked_at_before_the_work(
    here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blr_analysis.posterior.fit_laplace", lambda *_, **__: 1 / 0)
    other = tiny.build("llama", "causal_lm", seed=1, tie_word_embeddings=True)
    tiny.save(here / "other", other, pairs=False)
    for argv, word in (
        ("llm data.jsonl --out recipe.yml", "there already"),
        ("llm data.jsonl --out other", "is not empty"),
        ("other data.jsonl --rank 1000000 --out index", "an index with another model: name"),
        ("llm asked.jsonl --rank 1000000 --out index", "another number of examples, data:"),
        ("llm data.jsonl --rank 7 --out index", "another rank"),
    ):
        for how in ((), ("--dry-run",)):
            assert word in refused(capsys, "index", *argv.split(), "--prior-precision", 1, *how)
    shutil.copytree("index", "copied")
    argv = "llm data.jsonl --rank 7 --force --out copied"
    assert "ZeroDivisionError" in run(capsys, "index", *argv.split())[2]


GOOD = [{"prompt": "the book", "answer": " is not very bad"}]


def test_a_behaviour_has_its_sources_and_the_data_without_them(here: Path, capsys: Any) -> None:
    """The mean over its outputs, less that over good ones, by the index's own influence."""
    argv = ("query", "index", "--bad", "asked.jsonl", "--top", 3, "--out", "of_bad")
    good = written("good.jsonl", GOOD)
    code, out, err = run(capsys, *argv, "--good", good, "--write", "less.jsonl")
    assert code == 0 and "6 rows without these 3" in out, err
    loaded = load_model("llm")
    index = blr.Index.open("index")
    bad, fine = (index.influence(language_task(loaded, f)) for f in ("asked.jsonl", good))
    scores = bad.double().mean(1) - fine.double().mean(1)
    worst = scores.argsort(descending=True)[:3].tolist()
    table = pd.read_parquet("of_bad/sources.parquet")
    assert table["example"].tolist() == worst
    assert table["influence"].tolist() == pytest.approx(scores[worst].tolist(), rel=1e-4)
    rows = [json.loads(line) for line in Path("data.jsonl").read_text().splitlines()]
    left = [json.loads(line) for line in Path("less.jsonl").read_text().splitlines()]
    assert left == [row for i, row in enumerate(rows) if i not in worst]
    for options, words in (
        (("--bad", "asked.jsonl", "--write", "less.jsonl"), "there already"),
        (("asked.jsonl", "--write", "x.jsonl"), "belong to --bad"),
        ((), "name QUESTIONS"),
        (("asked.jsonl", "--hybrid", "--refine", 3), "leave --refine"),
    ):
        assert words in refused(capsys, "query", "index", *options)


def test_good_outputs_that_a_model_does_not_say_are_named(here: Path, capsys: Any) -> None:
    """What it says itself is not, whether it is drawn or searched for."""
    loaded = load_model("llm")
    unlikely: list[int] = []
    likely: list[int] = []
    for ids, take in ((unlikely, torch.argmin), (likely, torch.argmax)):
        ids += loaded.tokenizer("the film")["input_ids"]
        for _ in range(8):
            with torch.no_grad():
                logits = loaded.model(input_ids=torch.tensor([ids])).logits[0, -1]
            ids.append(int(take(logits)))
    for ids, is_named in ((unlikely, True), (likely, False)):
        answer = " " + " ".join(loaded.tokenizer.convert_ids_to_tokens(ids[2:]))
        good = written("good.jsonl", [{"prompt": "the film", "answer": answer}])
        argv = ("query", "index", "--bad", "asked.jsonl", "--good", good, "--top", 3)
        code, _, err = run(capsys, *argv)
        assert code == 0, err
        assert ("unlikely for this model" in err) is is_named, err


def test_influence_is_added_to_bm25(here: Path, capsys: Any) -> None:
    argv = ("query", "index", "asked.jsonl", "--hybrid", "--top", N, "--out", "hybrid")
    code, _, err = run(capsys, *argv)
    assert code == 0, err
    table = pd.read_parquet("hybrid/sources.parquet").query("question == 0")
    texts = [text.split() for text in tiny.sentences(N, low=3)]
    mean = sum(map(len, texts)) / N

    def bm25(text: list[str]) -> float:
        """As Lucene has it."""
        total = 0.0
        for word in ("the", "film", "was", "good"):
            n = sum(word in other for other in texts)
            count = text.count(word)
            norm = 1.5 * (0.25 + 0.75 * len(text) / mean)
            total += math.log(1 + (N - n + 0.5) / (n + 0.5)) * count / (count + norm)
        return total

    assert table["bm25"].tolist() == pytest.approx([bm25(texts[i]) for i in table["example"]])
    scores = table[["influence", "bm25"]]
    sums = ((scores - scores.mean()) / scores.std(ddof=0)).sum(axis=1)
    assert sums.is_monotonic_decreasing


def test_a_killed_index_does_not_fit_again(
    here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that was loaded in another dtype, which a query does not name again."""
    rows = Path("data.jsonl").read_text().splitlines()
    Path("ten.jsonl").write_text("\n".join([*rows, *rows][:10]))  # enough to choose a rank by
    argv = ("index", "llm", "ten.jsonl", "--dtype", "bfloat16", "--out", "killed")

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(blr.Index, "build", killed)
        assert run(capsys, *argv)[0] == 130
    assert list(Path("killed.unfinished").glob("*.safetensors"))
    assert not Path("killed").exists()
    monkeypatch.setattr("blr_analysis.posterior.laplace.fit_at_weights", lambda *_, **__: 1 / 0)
    code, out, err = run(capsys, *argv)
    assert code == 0, err
    assert not Path("killed.unfinished").exists()
    assert blr.Index.open("killed").n_data == 10
    assert "rank 1,024: the smallest" in out + err
    assert planned_rank(Path("killed")) == 1024  # a build that goes on does not choose again
    code, out, err = run(capsys, "query", "killed", "asked.jsonl", "--refine", 3, "--top", 1)
    assert code == 0 and "the film was good" in out, err


def test_an_index_of_python_is_asked_with_a_named_model(here: Path, capsys: Any) -> None:
    """It has no record of its model: one line says what is not checked, the answers are equal."""
    asked = ("asked.jsonl", "--refine", 3, "--top", 1, "--model", "llm")
    code, out, err = run(capsys, "index", "llm", "data.jsonl:train[:5]", "--out", "of_python")
    assert code == 0, err
    assert "not measured (too few texts)" in out
    asked = (*asked, "--data", "data.jsonl:train[:5]")
    code, expected, err = run(capsys, "query", "of_python", *asked)
    assert code == 0, err
    Path("of_python/source.json").unlink()
    code, found, err = run(capsys, "query", "of_python", *asked)
    assert code == 0 and found == expected and "does not record its tokenizer" in err, err


# Merging


def load(folder: Path | str) -> dict[str, torch.Tensor]:
    return Folder.open(folder).tensors()


def printed(out: str) -> dict[str, str]:
    """The printed lines by their first word."""
    split = [re.split(r"\s{2,}", line, maxsplit=1) for line in out.splitlines() if "  " in line]
    return dict(pair for pair in split if len(pair) == 2)


class TestMerge(CommandContract):
    name = "merge"
    argv = ("recipe.yml", "--shard-size", "300B")
    to = ("out",)

    def check(self, out: Path, said: str) -> None:
        expected = blr.merge(**family_in_memory(), weights=[0.5, 1.5], delta=0.25)
        found = load(out)
        assert set(found) == set(expected)
        assert all(torch.equal(found[n], expected[n]) for n in expected)
        assert "6 tensors merged, 0 copied" in said
        assert re.search(r"3\.62 kB read, 604 B written in \d+\.\d s, [\d.]+ kB/s", said)
        assert "written to out: model-00001-of-00003.safetensors, model-00002" in said
        sizes = [sum(t.nbytes for t in load_file(f).values()) for f in out.glob("*.safetensors")]
        assert max(sizes) <= 300
        assert sum(sizes) == 604


class TestFisher(CommandContract):
    """With all of its options."""

    name = "fisher"
    argv = (
        "model",
        "pairs.jsonl",
        "--text",
        "premise",
        "--text",
        "hypothesis",
        "--label",
        "label",
        "--kind",
        "emp",
        "--task",
        "classification",
        "--examples",
        5,
        "--max-length",
        9,
        "--bfloat16",
        "--max-memory",
        "1MB",
        "--seed",
        3,
    )

    def check(self, out: Path, said: str) -> None:
        tensors, record = storage.read(out)
        found = printed(said)
        zeros = sum(int((t == 0).sum()) for t in tensors.values())
        size = sum(t.numel() for t in tensors.values())
        cut = record["truncated"]
        assert found["kind"] == record["kind"] == "fisher_emp"
        assert record["seed"] == 3
        assert (record["examples"], record["n_data"], record["max_length"]) == (5, N, 9)
        assert record["columns"] == ["premise", "hypothesis", "label"]
        assert cut > 0
        assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
        assert found["tensors"] == str(len(tensors))
        assert found["parameters"] == f"{size:,}, {zeros / size:.1%} of them exactly 0"
        used = f"{N} (5 used, scaled); {cut} texts were cut to 9 tokens (--max-length)"
        assert found["n_data"] == used
        assert float(found["seconds"]) > 0
        assert found["written"] == "out"
        assert found["next"].startswith("blr-analysis merge")


def test_a_dry_run_says_what_would_be_done(here: Path, capsys: Any) -> None:
    code, out, err = run(capsys, "merge", "recipe.yml", "merged", "--dry-run")
    assert code == 0
    assert "recipe.yml, base_precision: taken from" in err
    found = printed(out)
    assert found["method"].startswith("gradient_matching: θ_0 + Σ")
    assert (found["to read"], found["to write"]) == ("3.62 kB", "604 B")
    assert re.fullmatch(r"[\d.]+ MB of buffers at most, \d threads?", found["memory"])
    assert re.search(r"ft2 +1\.5 +ft2/precision\n", out)
    assert re.search(r"merged +6 +151 +float32 +604 B", out)
    assert "embed.weight" not in out
    assert "Nothing was written" in out
    assert run(capsys, "merge", "recipe.yml", "--dry-run")[1] == out


def test_by_validation(here: Path, capsys: Any) -> None:
    """Of all that auto tries the best comes first; without data the given delta decides."""
    (here / "auto.yml").write_text(
        "merge_method: auto\nbase_model: model\nmodels: [{model: a}, {model: b}]\n"
        "parameters: {delta: 0.5}\n"
    )
    code, _, err = run(capsys, "merge", "auto.yml", "untried")
    assert code == 0
    assert "'gradient matching by the given base precision': no data" in err
    data = ("--validate", "a.jsonl", "--validate", "b.jsonl")
    code, said, err = run(capsys, "merge", "auto.yml", "out", *data)
    assert code == 0
    assert "auto: Choice(" in err
    assert load("out")
    tried = re.findall(r"^(?:average|task\S*) .*?([\d.]+)$", said.split("Tried")[1], re.MULTILINE)
    assert sorted(tried, key=float) == tried
    assert len(tried) >= 5


@pytest.mark.slow
def test_statistics_behind_merged_layers(here: Path, capsys: Any) -> None:
    """The bits of the same merge in memory; a dry run says what it takes and reads no data."""
    models = "{model: a, data: a.jsonl}, {model: b, data: b.jsonl, parameters: {weight: 2}}"
    text = f"merge_method: fisher\nbase_model: model\nmodels: [{models}]\n"
    (here / "data.yml").write_text(text.replace("jsonl", "jsonl, precision: null"))
    code, said, _ = run(capsys, "merge", "data.yml", "--dry-run")
    assert code == 0
    assert "a forward pass over each model" in said
    assert run(capsys, "merge", "data.yml", "out")[0] == 0
    tasks = text_tasks("model", ["a.jsonl", "b.jsonl"], labelled=False)
    how: dict[str, Any] = {"tasks": tasks, "weights": [1, 2], "method": "fisher"}
    expected = blr.merge(load("model"), [load("a"), load("b")], **how)
    found = load("out")
    assert all(torch.equal(found[n], t) for n, t in expected.items())


@pytest.mark.slow
def test_a_dry_run_counts_passes_and_bytes(here: Path, capsys: Any) -> None:
    """Of three labels "ggn" takes two backward passes; factors are as large as they will be."""
    argv = ("fisher", "model", "a.jsonl")
    ways = {"": 1, "--kind ggn": 5 / 3, "--samples 4": 3, "--structure gram": 1 / 3}
    for how, times in (ways | {"--structure kron": 2}).items():
        said = run(capsys, *argv, *how.split(), "--dry-run")[1]
        assert passes(said) == pytest.approx(times, abs=0.5 / 12)
        if "--structure" in how:
            place = how[-4:]
            assert run(capsys, *argv, *how.split(), "--out", place)[0] == 0
            size = sum(t.nbytes for t in storage.read(here / place)[0].values())
            assert fisher_cost("model", "a.jsonl", structure=place).disk == size


def test_precisions_of_other_weights_and_options_that_cannot_be(here: Path, capsys: Any) -> None:
    models = "{model: a, precision: b/precision}, {model: b, precision: a/precision}"
    text = f"merge_method: gradient_matching\nbase_model: model\nmodels: [{models}]"
    (here / "swapped.yml").write_text(text)
    assert "swapped" in refused(capsys, "merge", "swapped.yml", "out")
    assert run(capsys, "merge", "swapped.yml", "out", "--trust")[0] == 0
    for argv, word in (
        ("merge recipe.yml none --threads 0", "threads must be"),
        ("merge recipe.yml none --validate a.jsonl", "auto"),
    ):
        assert word in refused(capsys, *argv.split())
        assert not (here / "none").exists()


@pytest.mark.slow
def test_commands_load_only_what_they_need(here: Path) -> None:
    """--help and wrong command lines no torch, nothing what only some need, a merge no tables."""
    code = """if True:
        import importlib, pkgutil, sys
        from blr_analysis.cli import main
        main(["audit", "-h"]), main(["query"])
        assert not {"torch", "pandas", "matplotlib", "bokeh", "sklearn"} & {*sys.modules}
        import blr_analysis
        tables = {"pandas", "matplotlib", "scipy", "sklearn", "transformers", "pyarrow"}
        import blr_analysis.huggingface
        assert not {"ruamel.yaml", *tables} & {*sys.modules}
        assert main(["merge", "recipe.yml", "out"]) == 0 and not tables & {*sys.modules}
        of_extras = {"callbacks", "trainer", "lightning", "__main__"}
        for found in pkgutil.walk_packages(blr_analysis.__path__, "blr_analysis."):
            if found.name.rpartition(".")[2] not in of_extras:
                importlib.import_module(found.name)
        extras = {"transformers", "huggingface_hub", "peft", "lightning", "pytorch_lightning"}
        assert not extras & {*sys.modules}
    """
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    how: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run([sys.executable, "-c", code], env=env, **how)
    assert done.returncode == 0 and "--passes" in done.stdout, done.stderr
