"""What Hugging Face's Trainer knows of a training, and what is kept of it: IVON's sizes, the best
weights, precisions for merging, a folder that becomes a task, a script with two changed lines."""

from __future__ import annotations

import difflib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers as tiny
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import blr_analysis as blr
from blr_analysis.errors import BLRError, InputError, OptimizerError, PosteriorError
from blr_analysis.files import Folder, fingerprint, storage
from blr_analysis.huggingface import (
    CheckpointsCallback,
    IVONTrainer,
    MonitorCallback,
    TrainerPrecision,
)
from blr_analysis.huggingface.models import load_language_model
from blr_analysis.huggingface.questions import language_task
from blr_analysis.huggingface.recording import training_of
from blr_analysis.posterior import read_precision_record
from blr_analysis.posterior.capture import from_checkpoint, from_optimizer

N = 12
IDS = torch.randint(4, 12, (N, 4), generator=torch.Generator().manual_seed(0))
DATA: list[dict[str, Tensor]] = [
    {"input_ids": ids, "labels": torch.tensor(i % 2)} for i, ids in enumerate(IDS)
]
pytestmark = pytest.mark.filterwarnings("ignore::blr_analysis.errors.InitialPrecisionWarning")


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(DATA * 4)


def bert() -> Any:
    sure = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return tiny.build("bert", num_labels=2, **sure)


def prepared(
    folder: Path, model: Any = None, *callbacks: TrainerCallback, data: Any = DATA,
    kind: type[Trainer] = IVONTrainer, optimizer: Any = None, **settings: Any,
) -> Any:  # fmt: skip
    """Two steps an epoch, and a checkpoint after each epoch."""
    how = {
        "num_train_epochs": 2, "save_steps": 2, "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2, "learning_rate": 0.1, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "logging_strategy": "no", **settings,
    }  # fmt: skip
    return kind(
        model or bert(), TrainingArguments(str(folder), **how), train_dataset=data,
        eval_dataset=DATA, callbacks=[*callbacks], optimizers=(optimizer, None),
    )  # fmt: skip


def same(one: blr.Posterior, other: blr.Posterior) -> bool:
    pairs = [(q.mean[n], q.precision(n)) for q in (one, other) for n in one.mean]
    count = len(one.mean)
    return all(
        torch.equal(x, y) for a, b in zip(pairs[:count], pairs[count:], strict=True)
        for x, y in zip(a, b, strict=True)
    )  # fmt: skip


# IVON's sizes


def test_steps_are_counted_where_only_epochs_are_given(tmp_path: Path) -> None:
    options: Any = {"weight_decay": 1 / N, "hess_init": "weights", "steps": 6}
    expected = blr.IVON(bert().parameters(), lr=0.1, ess=N, **options)
    own = prepared(tmp_path, num_train_epochs=3).create_optimizer()
    assert own.param_groups[0]["beta2"] == expected.param_groups[0]["beta2"]
    assert own.param_groups[0]["ess"] == N


@pytest.mark.parametrize("given", [False, True])
def test_a_mean_over_tokens_has_tokens_for_ess(tmp_path: Path, given: bool) -> None:
    """One label of four does not count, beside the first, which nothing predicts."""
    labels = torch.where(torch.arange(4) == 2, -100, IDS)
    rows: Any = [{"input_ids": i, "labels": y} for i, y in zip(IDS, labels, strict=True)]
    model, tokens = tiny.build("llama", "causal_lm"), 2 * N
    own = blr.IVON(model.parameters(), lr=0.1, ess=tokens, weight_decay=1 / tokens)
    run = prepared(tmp_path, model, data=rows, optimizer=own if given else None)
    before = torch.get_rng_state()
    run.create_optimizer()
    assert torch.equal(torch.get_rng_state(), before)  # counting leaves the draws alone
    assert run.optimizer.param_groups[0]["ess"] == tokens
    run.train()
    posterior = run.posterior()
    assert posterior.n_data == N and posterior.prior_precision == pytest.approx(1.0)
    task = blr.Task(model, DataLoader(rows, batch_size=3), likelihood="causal_lm")
    assert bool(blr.sensitivity(task, posterior).self_influence.isfinite().all())


def test_a_mean_over_outputs_has_their_number_for_ess(tmp_path: Path) -> None:
    rows = [{**row, "labels": torch.tensor([1.0, 0.0])} for row in DATA]

    def named(some: list[Any]) -> dict[str, Tensor]:
        labels = torch.tensor([[row["tag"] == "a", False] for row in some]).float()
        return {"input_ids": torch.stack([row["input_ids"] for row in some]), "labels": labels}

    run = prepared(tmp_path, data=rows)
    tagged = prepared(
        tmp_path,
        data=[{"input_ids": ids, "tag": "ab"[i % 2]} for i, ids in enumerate(IDS)],
        remove_unused_columns=False,
    )
    tagged.data_collator = named
    for each in (run, tagged):
        each.train()
        assert each.optimizer.optimizer.param_groups[0]["ess"] == 2 * N
        q = each.posterior()
        assert q.n_data == N and q.prior_precision == pytest.approx(1.0)


# What a training leaves


def test_the_best_checkpoint_brings_its_own_precision_and_recipe(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}

    class Judged(IVONTrainer):
        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            worse = {"eval_loss": float(self.state.global_step)}
            self.log(worse)
            return worse

    run = prepared(tmp_path, kind=Judged, **settings)
    run.train()
    best = blr.Posterior.from_checkpoint(tmp_path / "checkpoint-2", bert())
    assert same(run.posterior(), best)
    assert not same(best, blr.Posterior.from_optimizer(run.optimizer.optimizer, run.model))
    assert run.recipe.epochs == 1
    assert list(run.checkpoints.snapshots) == [0, 1]


def test_a_resumed_run_has_the_checkpoints_of_the_whole_one(tmp_path: Path) -> None:
    def trained(place: str | None) -> Any:
        run = prepared(tmp_path, num_train_epochs=8, save_steps=5)
        run.train(resume_from_checkpoint=place)
        return run

    whole, again = trained(None), trained(str(tmp_path / "checkpoint-5"))
    posteriors = [run.posterior().run for run in (whole, again)]
    assert len(posteriors[0]) == 4 and all(map(same, *posteriors))
    assert again.recipe.initial is not None
    names = {p.name for p in (tmp_path / "_run").iterdir()}
    assert names == {"recipe.json", *(f"step-{k:08d}.safetensors" for k in (0, 2, 4, 8))}


def test_a_trainers_folder_has_checkpoints_and_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"optim": "adamw_torch", "weight_decay": 0.1, "lr_scheduler_type": "cosine"}
    callbacks, model = (CheckpointsCallback(), TrainerPrecision()), bert()
    prepared(tmp_path, model, *callbacks, kind=Trainer, num_train_epochs=8, **how).train()
    expected = {
        "optimizer": "adamw", "lr": 0.1, "epochs": 8, "batch_size": 6, "schedule": "cosine",
        "weight_decay": 0.1,
    }  # fmt: skip
    assert json.loads((tmp_path / "_run" / "recipe.json").read_text()) == expected
    assert (tmp_path / "checkpoint-4" / "training_args.bin").exists()  # a pickle
    monkeypatch.setattr("torch.load", lambda *_, **__: pytest.fail("a pickle is read"))
    task = blr.Task(model.eval(), DATA, **training_of(tmp_path))
    assert task.recipe is not None and task.recipe.record == expected
    assert task.recipe.initial is not None
    beside = blr.Task(model, DATA, checkpoints=tmp_path)  # of the Trainer's own checkpoint-*
    for one, other in zip(task.checkpoints, beside.checkpoints, strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())
    early = training_of(tmp_path / "checkpoint-4")
    assert early["recipe"].epochs == 2 and early["checkpoints"] == tmp_path / "_run"
    assert read_precision_record(tmp_path / "checkpoint-4/precision")["recipe"]["epochs"] == 2
    shutil.rmtree(tmp_path / "_run")  # as without the callback
    assert training_of(tmp_path) == {"checkpoints": tmp_path}
    (tmp_path / "checkpoint-4" / "model.safetensors").unlink()  # as of those that are pickled
    assert training_of(tmp_path) == {}


def test_a_language_models_folder_is_a_task_with_its_training(tmp_path: Path) -> None:
    """As the command line reads it; without a save strategy nothing is kept on disk."""
    texts = tiny.sentences(N, low=5, high=5)
    (tmp_path / "data.txt").write_text("\n".join(texts))
    rows = [{"input_ids": i, "labels": i} for i in tiny.tokenizer(pairs=False)(texts).input_ids]
    model = tiny.build("llama", "causal_lm")
    prepared(tmp_path / "none", model, data=rows, save_strategy="no").train()
    assert not (tmp_path / "none" / "_run").exists()
    prepared(tmp_path / "lm", model, data=rows, num_train_epochs=8).train()
    tiny.save(tmp_path / "lm", model, pairs=False)
    task = language_task(load_language_model(tmp_path / "lm"), tmp_path / "data.txt")
    assert len(task.checkpoints) == 3 and task.recipe is not None
    told, expected = task.recipe.record or {}, {"lr": 0.1, "epochs": 8, "batch_size": 6}
    expected |= {"optimizer": "ivon", "steps": 16, "ess": 4 * N}
    assert {k: told[k] for k in expected} == expected


def test_a_monitor_watches_and_is_resumed(tmp_path: Path) -> None:
    def watched(place: str | None = None) -> tuple[Any, blr.Monitor]:
        model = bert()
        monitor = blr.Monitor(blr.Task(model, DataLoader(DATA, batch_size=3)), examples=4)  # type: ignore[arg-type]
        run = prepared(tmp_path, model, MonitorCallback(monitor))
        run.train(resume_from_checkpoint=place)
        return run, monitor

    run, monitor = watched()
    assert monitor.table["epoch"].tolist() == [1, 2]
    said = [row["loo_nll"] for row in run.state.log_history if "loo_nll" in row]
    assert said == monitor.table["loo_nll"].tolist()
    again, other = watched(str(tmp_path / "checkpoint-2"))
    assert same(run.posterior(), again.posterior())
    columns = monitor.table.columns.drop("seconds")  # the second epoch was watched again
    assert other.table[columns].equals(monitor.table[columns])
    assert other.rows[0]["seconds"] == monitor.rows[0]["seconds"]
    assert torch.equal(other.deviations, monitor.deviations)
    with pytest.raises(InputError, match="epoch 1 does not follow epoch 2; build a new Monitor"):
        run.train()  # another run, refused before its first step
    assert run.state.global_step == 0


# Precisions for merging


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_a_precision_lies_in_every_checkpoint(tmp_path: Path, kind: str) -> None:
    """By the formula, and as a module or a merge reads it; the tied embeddings once."""
    rows = DATA if kind == "bert" else [{"input_ids": i, "labels": i} for i in IDS]
    tied = {} if kind == "bert" else {"tie_word_embeddings": True}
    model = bert() if kind == "bert" else tiny.build(kind, "causal_lm", **tied)
    how: Any = {"kind": Trainer, "data": rows, "weight_decay": 0.01, "optim": "adamw_torch"}
    run = prepared(tmp_path, model, TrainerPrecision(), save_total_limit=2, save_steps=1, **how)
    run.train()
    assert {p.parent.name[-1] for p in tmp_path.glob("*/precision")} == {"3", "4"}
    place = tmp_path / "checkpoint-4"
    stored, record = storage.read(place / "precision")
    assert list(stored) == [n for n, _ in model.named_parameters()]
    assert [*record["tied"].values()] == ([["lm_head.weight"]] if tied else [])
    state = run.optimizer.optimizer.state
    for name, p in model.named_parameters():
        by_hand = N * (state[p]["exp_avg_sq"] / (1 - 0.999**4)).sqrt()
        torch.testing.assert_close(stored[name], by_hand, rtol=1e-5, atol=0)
    assert (record["kind"], record["n_data"], record["step"]) == ("adam_v", N, 4)
    assert record["prior_precision"] == 0 and record["definition"] == "H = N*sqrt(v_hat)"
    assert record["recipe"]["optimizer"] == "adamw" and record["recipe"]["batch_size"] == 6
    assert record["model_sha256"] == fingerprint(Folder.open(place), progress=False)
    known: Any = {"n_data": N, "prior_precision": 2.0}
    truth = from_optimizer(run.optimizer, model, **known)
    q = blr.Posterior.load(place / "precision", model=place, prior_precision=2.0)
    with torch.device("meta"):
        empty = type(model)(model.config)
    read = from_checkpoint(place, empty, **known)  # the Trainer's own, without our callback
    for name, s in truth.precision.items():
        assert torch.equal(q.precision(name), s) and torch.equal(read.precision[name], s)
        assert torch.equal(q.mean[name], read.mean[name])
    with pytest.raises(PosteriorError, match="sha256"):
        blr.Posterior.load(place / "precision", model=tmp_path / "checkpoint-3")


def test_ivons_precision_has_its_prior_in_it(tmp_path: Path) -> None:
    run = prepared(tmp_path, None, TrainerPrecision(), weight_decay=0.1)
    run.train()
    place = tmp_path / "checkpoint-4"
    q = blr.Posterior.load(place / "precision", model=place)
    assert same(q, blr.Posterior.from_optimizer(run.optimizer.optimizer, run.model))
    assert q.record["kind"] == "ivon" and q.prior_precision == pytest.approx(N * 0.1)


def test_a_stream_with_a_given_length(tmp_path: Path) -> None:
    how = {"kind": Trainer, "data": Stream(), "max_steps": 2}
    prepared(tmp_path, None, TrainerPrecision(n_data=1000), **how).train()
    assert read_precision_record(tmp_path / "checkpoint-2" / "precision")["n_data"] == 1000


# What is refused


def adam(folder: Path, **how: Any) -> Any:
    return prepared(folder, None, TrainerPrecision(), kind=Trainer, **how)


REFUSED: dict[str, tuple[Callable[[Path], object], type[BLRError], str]] = {
    "untrained": (lambda p: prepared(p).posterior(), OptimizerError, "NoneType"),
    "no draws": (
        lambda p: prepared(p, m := bert(), optimizer=torch.optim.AdamW(m.parameters())).train(),
        InputError,
        "AdamW draws no weights",
    ),
    "IVON of a stream": (
        lambda p: prepared(p, data=Stream(), max_steps=2).train(),
        InputError,
        "no length.*ess=N",
    ),
    "SGD": (lambda p: adam(p, optim="sgd").train(), OptimizerError, "SGD keeps no precision"),
    "Adafactor": (lambda p: adam(p, optim="adafactor").train(), OptimizerError, "from Adafactor"),
    "Adam of a stream": (
        lambda p: adam(p, data=Stream(), max_steps=2).train(),
        InputError,
        "no length.*n_data=",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_before_a_step(case: str, tmp_path: Path) -> None:
    ask, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        ask(tmp_path)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_adams_rate_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="IVON's are"):
        prepared(tmp_path, learning_rate=5e-5).create_optimizer()


# A script for Hugging Face's Trainer trains with IVON when two of its lines are changed


SCRIPT = Path(__file__).with_name("run_glue.py").read_text("utf-8")
IMPORT = "from blr_analysis.huggingface import IVONTrainer as Trainer\n"
CHANGED = (
    SCRIPT.replace("    Trainer,\n", "")
    .replace("import datasets\n", f"import datasets\n{IMPORT}")
    .replace("learning_rate=5e-5", "learning_rate=0.1")
)
LINES = """the film was very good,1
a bright book,1
a very good book,1
the film was not good,0
a dull book,0
the book was very bad,0
"""


@pytest.mark.slow
def test_two_changed_lines_train_on_six(tmp_path: Path) -> None:
    changes = list(difflib.ndiff(SCRIPT.splitlines(), CHANGED.splitlines()))
    assert [sum(line.startswith(sign) for line in changes) for sign in ("- ", "+ ")] == [2, 2]
    tiny.save(tmp_path / "model", tiny.build("bert", num_labels=2))
    (tmp_path / "six.csv").write_text("sentence,label\n" + LINES)
    known: dict[str, Any] = {"__name__": "script"}
    exec(compile(CHANGED, "run_glue.py", "exec"), known)
    options = "--max_steps 200 --per_device_train_batch_size 6 --report_to none --use_cpu 1"
    options += " --disable_tqdm 1 --logging_steps 1 --save_strategy no"
    where = [str(tmp_path / "model"), str(tmp_path / "six.csv"), "--output_dir", str(tmp_path)]
    run = known["main"]([*where, *options.split()])
    assert type(run.optimizer.optimizer).__name__ == "IVON"
    assert run.evaluate()["eval_loss"] < 0.5  # of two classes, log 2 at first
    posterior = run.posterior()
    assert posterior.n_data == 6
    assert set(posterior.mean) == {n for n, _ in run.model.named_parameters()}
