"""Precisions from data: every kind against gradients taken one example at a time by autograd."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers as tiny
import torch
import torch.nn.functional as F
from torch import Tensor

import blr_analysis as blr
from blr_analysis import Task
from blr_analysis.errors import (
    BLRError,
    DataError,
    InputError,
    PosteriorError,
    StorageError,
)
from blr_analysis.files import Folder, fingerprint, storage
from blr_analysis.huggingface.data import read_rows
from blr_analysis.huggingface.fisher import FisherResult, fisher
from blr_analysis.huggingface.models import load_model
from blr_analysis.huggingface.questions import read_tokens
from blr_analysis.merging.precisions import open_precision
from blr_analysis.posterior import fit_kept, read_precision_record

transformers = pytest.importorskip("transformers")

N = 9
MODELS = {
    "bert": ("bert", "classification", {}),
    "gpt2 classifier": ("gpt2", "classification", {}),
    "llama classifier": ("llama", "classification", {}),
    "gpt2, tied": ("gpt2", "causal_lm", {}),
    "llama": ("llama", "causal_lm", {}),
    "llama, tied": ("llama", "causal_lm", {"tie_word_embeddings": True}),
}


def made(factory: pytest.TempPathFactory, name: str) -> Path:
    """A model with its data beside it."""
    kind, task, more = MODELS[name]
    place = tiny.save(factory.mktemp("model"), tiny.build(kind, task, **more))
    write_data(place / "data.jsonl")
    return place


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory, "bert")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory, "llama")


def write_data(path: Path) -> None:
    rows = [{"text": text, "label": i % 3} for i, text in enumerate(tiny.sentences(N))]
    path.write_text("\n".join(json.dumps(row) for row in rows))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]


def reload(folder: Path, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """The model and tokenizer by transformers' own means, in the dtype of the oracle."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder).to(dtype).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def logits_of(model: Any, tokenizer: Any, text: str) -> tuple[Tensor, Tensor]:
    """One text by itself, unpadded: logits, and its ids."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    return model(input_ids=ids).logits[0], ids[0]


def gradient(model: Any, loss: Tensor, keep: bool = False) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(
        loss, list(named.values()), retain_graph=keep, allow_unused=True, materialize_grads=True
    )
    return dict(zip(named, found, strict=True))


def summed(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {n: torch.stack([g[n] for g in gradients]).square().sum(0) for n in gradients[0]}


def empirical(folder: Path, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Σ g², text by text, with the cross-entropy of torch."""
    model, tokenizer = reload(folder, dtype)
    found = []
    for row in rows_of(folder):
        logits, ids = logits_of(model, tokenizer, row["text"])
        if logits.ndim == 1:
            loss = F.cross_entropy(logits, torch.tensor(row["label"]))
        else:
            loss = F.cross_entropy(logits[:-1], ids[1:], reduction="sum")
        found.append(gradient(model, loss))
    return summed(found)


def weighed(model: Any, logits: Tensor) -> list[dict[str, Tensor]]:
    """√p_c g_c of every class at every position: their squares add up to the Fisher."""
    found = []
    for loss in -logits.log_softmax(-1).reshape(-1):
        g = gradient(model, loss, keep=True)
        found.append({n: x * (-loss / 2).exp().detach() for n, x in g.items()})
    return found


def exact(folder: Path) -> dict[str, Tensor]:
    """Σ_i Σ_c p_c g_ic²: the Fisher of a classifier, every label weighed by its probability."""
    model, tokenizer = reload(folder)
    each = (logits_of(model, tokenizer, row["text"])[0] for row in rows_of(folder))
    return summed([g for logits in each for g in weighed(model, logits)])


def task_in_double(folder: Path) -> Task:
    loaded = load_model(folder)
    table, where = read_rows(folder / "data.jsonl")
    labels = None if loaded.task == "causal_lm" else table["label"].tolist()
    tokens = read_tokens(loaded, table, where, None, 16, labels)[1]
    loaded.model.double()
    return tokens.task(loaded)


def diagonal(task: Task, curvature: str, seed: int = 0, **how: Any) -> dict[str, Tensor]:
    """What a precision is made of, by the fit of a posterior."""
    how |= {"structure": "diag", "prior_precision": 1e-30, "seed": seed}
    return fit_kept(task, curvature=curvature, **how).form.diagonal()


def gap(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The largest difference, in units of the largest entry of its tensor."""
    assert set(ours) == set(truth)
    floor = max(float(t.abs().max()) for t in truth.values()) * 1e-6
    return max(
        float((ours[n].double() - t).abs().max()) / max(floor, float(t.abs().max()))
        for n, t in truth.items()
    )


def apart(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The sum of all differences, as a part of the sum of all entries."""
    total = sum(float(t.sum()) for t in truth.values())
    return sum(float((ours[n] - t).abs().sum()) for n, t in truth.items()) / total


def stored(folder: Path) -> dict[str, Tensor]:
    return storage.read(folder)[0]


# --- the numbers ------------------------------------------------------------------------------


def test_the_empirical_fisher_is_the_sum_of_squared_gradients(folder: Path) -> None:
    assert gap(diagonal(task_in_double(folder), "empirical_fisher"), empirical(folder)) < 1e-10


TEMPLATE = (
    "{% for m in messages %}{{ '[CLS] ' if m.role == 'user' else '' }}{{ m.content }} {% endfor %}"
)


@pytest.mark.parametrize("kind", ["answers", "messages"])
def test_of_prompts_the_answers_alone_count(llama: Path, tmp_path: Path, kind: str) -> None:
    pairs = [("the film was", "good"), ("a dull", "book was the film"), ("the book", "good good")]
    model, tokenizer = reload(llama)
    place = tmp_path / "m"
    shutil.copytree(llama, place)
    if kind == "messages":
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(place)
        turns = [zip(("user", "assistant"), pair, strict=True) for pair in pairs]
        rows = [{"messages": [{"role": r, "content": c} for r, c in two]} for two in turns]
    else:
        rows = [{"prompt": asked, "answer": f" {said}"} for asked, said in pairs]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = []
    for asked, said in pairs:
        last = " [SEP]" if kind == "answers" else ""  # the tokenizer's own, not the template's
        words = tokenizer.tokenize(f"[CLS] {asked} {said}{last}")
        ids = torch.tensor(tokenizer.convert_tokens_to_ids(words))
        count = len(f"{said}{last}".split())
        logits = model(input_ids=ids.unsqueeze(0)).logits[0, -count - 1 : -1]
        found.append(gradient(model, F.cross_entropy(logits, ids[-count:], reduction="sum")))
    result = fisher(place, tmp_path / "rows.jsonl", kind="emp")
    assert (result.n_data, result.truncated) == (3, 0)
    assert gap(stored(result.folder), summed(found)) < 1e-4
    some = fisher(place, tmp_path / "rows.jsonl", examples=2, force=True)
    assert (some.n_data, some.examples) == (3, 2)


def test_a_folder_gets_it_in_single_precision(folder: Path, tmp_path: Path) -> None:
    result = fisher(folder, folder / "data.jsonl", kind="emp", out=tmp_path / "p")
    truth = empirical(folder, torch.float32)

    found = stored(tmp_path / "p")
    assert gap(found, {n: t.double() for n, t in truth.items()}) < 1e-5
    assert set(found) <= set(Folder.open(folder).specs)  # the names of the files
    assert result.parameters == sum(t.numel() for t in truth.values())


@pytest.mark.slow
def test_ggn_is_the_exact_fisher_to_which_sampled_labels_tend(bert: Path) -> None:
    task, truth = task_in_double(bert), exact(bert)
    assert gap(diagonal(task, "ggn"), truth) < 1e-10
    few, many = (diagonal(task, "mc_fisher", 3, samples=k) for k in (3, 150))
    assert apart(many, truth) < apart(few, truth) / 3  # 1/√50 of it, but for chance
    assert apart(many, truth) < 0.15
    assert apart(empirical(bert), truth) > 2 * apart(many, truth)  # another quantity


def test_sampled_tokens_are_the_models_own(llama: Path) -> None:
    """E (Σ_t g_t(ŷ_t))² = Σ_t Σ_v p_tv g_tv², because g_t(ŷ_t) have mean 0 and no correlation."""
    task = task_in_double(llama)
    model, tokenizer = reload(llama)
    lengths = [len(row["input_ids"]) for row in task.dataset]
    shortest = lengths.index(min(lengths))
    logits, ids = logits_of(model, tokenizer, rows_of(llama)[shortest]["text"])
    assert task.dataset[shortest]["input_ids"] == ids.tolist()
    ours = diagonal(task.subset([shortest]), "mc_fisher", samples=100)
    assert apart(ours, summed(weighed(model, logits[:-1]))) < 0.2


def test_labels_are_drawn_by_example_and_seed(folder: Path) -> None:
    task = task_in_double(folder)
    one = diagonal(task, "mc_fisher", 5)
    assert gap(one, diagonal(task, "mc_fisher", 6)) > 1e-3
    task.memory_budget = 1  # one example per pass
    assert gap(one, diagonal(task, "mc_fisher", 5)) < 1e-10


# --- the files --------------------------------------------------------------------------------


def test_the_record_says_what_it_is(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "p"
    result = fisher(folder, folder / "data.jsonl", samples=2, seed=4, out=out)
    record = read_precision_record(out)
    assert record["kind"] == "fisher_mc"
    assert record["n_data"] == N
    assert record["prior_precision"] == 0
    assert (record["samples"], record["seed"], record["examples"]) == (2, 4, N)
    assert record["frozen"] == []
    assert record["model_sha256"] == fingerprint(Folder.open(folder))
    assert "average" in record["definition"]
    tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings")
    lm = result.n_data == N and record["likelihood"] == "causal_lm"
    assert bool(record["tied"]) == bool(lm and tied)
    opened = open_precision(out)  # as a merge reads it
    assert set(opened.stored) >= set(record["parameters"])
    expected = FisherResult(
        out, "fisher_mc", len(record["parameters"]), result.parameters, N, N, 0,
        record["max_length"], result.zeros, result.seconds,
    )  # fmt: skip
    assert result == expected
    zeros = sum(int((t == 0).sum()) for t in stored(out).values())
    assert result.zeros == zeros / result.parameters


def test_it_lies_beside_the_model_and_is_not_overwritten(bert: Path, tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "m", tiny.build("bert"))
    fisher(model, bert / "data.jsonl", kind="emp")
    first = stored(model / "precision")
    with pytest.raises(StorageError, match="--force"):
        fisher(model, bert / "data.jsonl", kind="ggn")
    assert storage.read(model / "precision")[1]["kind"] == "fisher_emp"
    fisher(model, bert / "data.jsonl", kind="ggn", force=True)
    assert storage.read(model / "precision")[1]["kind"] == "ggn"
    assert gap(stored(model / "precision"), first) > 1e-3
    (model / "precision" / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"notes\.txt"):
        fisher(model, bert / "data.jsonl", kind="emp", force=True)
    assert (model / "precision" / "notes.txt").read_text() == "mine"


def test_some_of_the_examples_stand_for_all(bert: Path, tmp_path: Path) -> None:
    fisher(bert, bert / "data.jsonl", kind="emp", examples=3, seed=1, out=tmp_path / "some")
    record = read_precision_record(tmp_path / "some")
    assert (record["n_data"], record["examples"]) == (N, 3)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))[:3]
    rows = rows_of(bert)
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(json.dumps(rows[i]) for i in order.tolist()))
    fisher(bert, few, kind="emp", out=tmp_path / "few")
    fisher(bert, few, kind="emp", out=tmp_path / "half", dtype=torch.bfloat16)
    half = stored(tmp_path / "half")
    assert all(torch.equal(t.bfloat16(), half[n]) for n, t in stored(tmp_path / "few").items())
    three = {n: t * N / 3 for n, t in stored(tmp_path / "few").items()}
    assert gap(stored(tmp_path / "some"), {n: t.double() for n, t in three.items()}) < 1e-5
    with pytest.raises(InputError, match=f"holds {N}"):
        fisher(bert, bert / "data.jsonl", examples=N + 1, out=tmp_path / "none")


def test_sampled_labels_need_none(bert: Path, tmp_path: Path) -> None:
    plain = tmp_path / "data.txt"
    plain.write_text("\n\n".join(row["text"] for row in rows_of(bert)) + "\n")
    fisher(bert, plain, out=tmp_path / "plain")
    fisher(bert, bert / "data.jsonl", out=tmp_path / "labelled")
    other = stored(tmp_path / "labelled")
    assert gap(stored(tmp_path / "plain"), {n: t.double() for n, t in other.items()}) < 1e-5
    with pytest.raises(DataError, match="name for the label"):
        fisher(bert, plain, kind="emp", out=tmp_path / "emp")
    assert not (tmp_path / "emp").exists()


def test_names_are_those_of_the_files(tmp_path: Path, llama: Path) -> None:
    """A GPT-2 saved without its head: the files lack the prefix that the model's names have."""
    whole = tiny.build("gpt2", "causal_lm")
    model = tiny.save(tmp_path / "m", whole.transformer)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    assert "wte.weight" in Folder.open(model).specs
    fisher(model, llama / "data.jsonl", kind="emp")
    found, record = storage.read(model / "precision")
    assert set(found) == set(Folder.open(model).specs)
    assert record["tied"] == {"wte.weight": ["transformer.wte.weight", "lm_head.weight"]}
    tiny.save(tmp_path / "w", whole)
    write_data(tmp_path / "w" / "data.jsonl")
    truth = {n.removeprefix("transformer."): t for n, t in empirical(tmp_path / "w").items()}
    assert gap(found, truth) < 1e-5


def test_no_network_is_asked(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was tried")

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    fisher(bert, bert / "data.jsonl", out=tmp_path / "p")


# --- a run that was ended ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "at"),
    [
        ({"kind": "emp", "memory_budget": 1}, "out.unfinished"),
        ({"structure": "gram"}, "out.unfinished"),
        ({"structure": "kron", "memory_budget": 1}, "out.factors.unfinished"),
        ({"structure": "kron", "memory_budget": 1}, "out.unfinished"),
    ],
    ids=["emp", "gram", "factors", "eigenvalues"],
)
def test_a_run_that_was_ended_goes_on_to_the_same_bits(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, at: str
) -> None:
    """Not one of another seed, which begins again."""
    follow, take_up = storage.Unfinished.follow, storage.Unfinished.take_up
    starts: dict[str, int] = {}

    def ended(self: Any, sums: Any) -> None:
        self._due = 0.0  # each pass is kept
        follow(self, sums)
        if self.done == 2 and self.path.name == at:
            raise KeyboardInterrupt

    def seen(self: Any, sums: Any) -> None:
        before = self.done
        take_up(self, sums)
        starts[self.path.name] = self.done - before

    place, out = tmp_path / "place", tmp_path / "place" / "out"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(storage.Unfinished, "follow", ended)
        on(llama, out, **options)
    assert (place / at).is_file() and not out.exists()
    shutil.copytree(place, tmp_path / "begun")
    for seed in (0, 1):
        on(llama, tmp_path / f"whole{seed}", **options, seed=seed)
    monkeypatch.setattr(storage.Unfinished, "take_up", seen)
    for seed in (0, 1):
        shutil.rmtree(place)
        shutil.copytree(tmp_path / "begun", place)
        on(llama, out, **options, seed=seed)
        assert bool(starts[at]) == (seed == 0)
        assert not list(place.glob("*unfinished*"))
        once, again = storage.read(tmp_path / f"whole{seed}")[0], storage.read(out)[0]
        assert all(torch.equal(t, again[n]) for n, t in once.items()), seed


# --- adapters ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["diag", "gram"])
def test_an_adapter_has_the_precision_of_what_it_changes(tmp_path: Path, structure: str) -> None:
    """By PEFT's merge of it, as a model of its own; the merges take it, and no other's."""
    peft = pytest.importorskip("peft")
    base = tiny.save(tmp_path / "base", tiny.build("llama", "causal_lm"))
    write_data(tmp_path / "data.jsonl")
    places = [tmp_path / "one", tmp_path / "two"]
    for seed, place in enumerate(places):
        model = tiny.build("llama", "causal_lm")
        settings = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
        tuned = peft.get_peft_model(model, settings)
        torch.manual_seed(seed)
        for p in tuned.parameters():
            p.data += p.requires_grad * torch.randn_like(p) / 3
        tuned.save_pretrained(str(place))
        how = {"kind": "emp", "structure": structure}
        fisher(place, tmp_path / "data.jsonl", base=base, **how)
        whole = tiny.save(tmp_path / f"whole{seed}", tuned.merge_and_unload())
        fisher(whole, tmp_path / "data.jsonl", **how)
        ours, truth = (open_precision(p / "precision") for p in (place, whole))
        changed = [n for n in truth.source.specs if "q_proj" in n or "down_proj" in n]
        assert changed and set(ours.source.specs) == set(changed)
        for name in changed:
            if "eigenvectors" not in name:
                a, b = ours.source.tensor(name), truth.source.tensor(name)
                assert float((a - b).norm()) < 1e-5 * float(b.norm())
    precisions = [place / "precision" for place in places]
    how = {"precisions": [tmp_path / f"whole{t}" / "precision" for t in (0, 1)]}
    blr.merge(base, places, out=tmp_path / "of wholes", method="fisher", **how)
    how = {"precisions": precisions, "method": "fisher"}
    blr.merge(base, places, out=tmp_path / "out", **how)
    with pytest.raises(PosteriorError, match="swapped"):
        blr.merge(base, places[::-1], out=tmp_path / "no", **how)
    with pytest.raises(InputError, match="adapter"):
        fisher(base, tmp_path / "data.jsonl", base=base)


# --- what is refused --------------------------------------------------------------------------


Case = Callable[[Path, Path, Path], object]
REFUSED: dict[str, tuple[Case, type[BLRError], str]] = {
    "GGN of sequences": (lambda lm, _, p: on(lm, p, kind="ggn"), InputError, "kind='mc'"),
    "samples": (lambda _, m, p: on(m, p, kind="emp", samples=2), InputError, "kind='mc'"),
    "unknown kind": (lambda _, m, p: on(m, p, kind="hessian"), InputError, "'hessian'"),
    "label of a language model": (lambda lm, _, p: on(lm, p, label="y"), InputError, "no label"),
    "too long": (lambda _, m, p: on(m, p, max_length=17), InputError, "16 tokens"),
    "bad label": (lambda _, m, p: on(m, p, "bad.csv", kind="emp"), DataError, r"row 2 .*'3'"),
    "below a file": (lambda _, m, p: on(m, m / "data.jsonl/p"), StorageError, "cannot write"),
    "half": (lambda _, m, p: on(m, p, dtype=torch.float16), InputError, "bfloat16"),
}


def on(model: Path, out: Path, data: str = "data.jsonl", **options: Any) -> object:
    return fisher(model, model / data, out=out, **options)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    case: str, llama: Path, bert: Path, tmp_path: Path
) -> None:
    (bert / "bad.csv").write_text("text,label\na,0\nb,3\n")
    ask, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        ask(llama, bert, tmp_path / "p")
    assert not (tmp_path / "p").exists()
