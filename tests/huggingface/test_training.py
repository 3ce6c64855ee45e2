"""What Hugging Face's Trainer knows of a training, and what is kept of it: IVON's sizes, the best
weights, precisions for merging, a folder that becomes a task, a script with two changed lines."""

from __future__ import annotations

import difflib
import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers as tiny
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import blr_analysis as blr
from blr_analysis.cli.inputs import Source
from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.files import Folder, fingerprint, storage
from blr_analysis.files.headers import read_record
from blr_analysis.huggingface import (
    BLRCallback,
    CheckpointsCallback,
    IVONTrainer,
    MonitorCallback,
    TrainerPrecision,
)
from blr_analysis.huggingface.callbacks import end_with
from blr_analysis.huggingface.models import load_language_model
from blr_analysis.huggingface.questions import language_task
from blr_analysis.posterior import read_precision_record
from blr_analysis.posterior.capture import from_checkpoint, from_optimizer
from blr_analysis.runs import training_of

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
    folder: Path,
    model: Any = None,
    *callbacks: TrainerCallback,
    data: Any = DATA,
    kind: type[Trainer] = IVONTrainer,
    optimizer: Any = None,
    **settings: Any,
) -> Any:
    """Two steps an epoch, and a checkpoint after each epoch."""
    arguments = {
        "num_train_epochs": 2,
        "save_steps": 2,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_strategy": "no",
        **settings,
    }
    return kind(
        model or bert(),
        TrainingArguments(str(folder), **arguments),
        train_dataset=data,
        eval_dataset=DATA,
        callbacks=[*callbacks],
        optimizers=(optimizer, None),
    )


def same(first: blr.Posterior, second: blr.Posterior) -> bool:
    pairs = [(q.mean, q.form.diagonal()) for q in (first, second)]
    return all(torch.equal(a[n], b[n]) for a, b in zip(*pairs, strict=True) for n in a)


@pytest.mark.parametrize("given", [False, True])
def test_a_mean_over_tokens_has_tokens_for_ess(tmp_path: Path, given: bool) -> None:
    """One label of four does not count, beside the first, which nothing predicts."""
    labels = torch.where(torch.arange(4) == 2, -100, IDS)
    rows: Any = [{"input_ids": i, "labels": y} for i, y in zip(IDS, labels, strict=True)]
    model = tiny.build("llama", "causal_lm")
    tokens = 2 * N
    optimizer = blr.IVON(model.parameters(), lr=0.1, ess=tokens, weight_decay=1 / tokens)
    run = prepared(
        tmp_path,
        model,
        data=rows,
        save_strategy="no",
        optimizer=optimizer if given else None,
    )
    before = torch.get_rng_state()
    group = run.create_optimizer().param_groups[0]
    assert torch.equal(torch.get_rng_state(), before)  # counting leaves the draws alone
    assert group["ess"] == tokens
    assert given or run.optimizer.steps == 4
    run.train()
    assert not list(tmp_path.iterdir())
    posterior = run.posterior()
    assert posterior.n_data == N
    assert posterior.prior_precision == pytest.approx(1.0)
    task = blr.Task(model, DataLoader(rows, batch_size=3), likelihood="causal_lm")
    assert bool(blr.sensitivity(task, posterior).self_influence.isfinite().all())


@pytest.mark.parametrize("collated", [False, True])
def test_a_mean_over_outputs_has_their_number_for_ess(tmp_path: Path, collated: bool) -> None:
    rows: list[Any] = [{**row, "labels": torch.tensor([1.0, 0.0])} for row in DATA]

    def named(rows_of_batch: list[Any]) -> dict[str, Tensor]:
        ids = torch.stack([row["input_ids"] for row in rows_of_batch])
        return {"input_ids": ids, "labels": torch.ones(len(rows_of_batch), 2)}

    if collated:
        rows = [{"input_ids": ids, "tag": "a"} for ids in IDS]
    run = prepared(tmp_path, data=rows, remove_unused_columns=False)
    run.data_collator = named if collated else run.data_collator
    run.train()
    q = run.posterior()
    assert run.optimizer.optimizer.param_groups[0]["ess"] == 2 * N
    assert q.n_data == N
    assert q.prior_precision == pytest.approx(1.0)


def test_the_best_checkpoint_brings_its_own_precision_and_recipe(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    run = prepared(tmp_path, **settings)
    run.evaluate = lambda *_, **__: run.log(worse := {"eval_loss": run.state.global_step}) or worse
    run.train()
    best = blr.Posterior.from_checkpoint(tmp_path / "checkpoint-2", bert())
    assert same(run.posterior(), best)
    assert not same(best, blr.Posterior.from_optimizer(run.optimizer.optimizer, run.model))
    assert run.recipe.epochs == 1
    assert list(run.checkpoints.snapshots) == [0, 1]


WAY: dict[str, Any] = {
    "kind": Trainer,
    "optim": "adamw_torch",
    "weight_decay": 0.1,
    "lr_scheduler_type": "cosine",
    "num_train_epochs": 8,
}


def recipe_of_way(model: torch.nn.Module) -> dict[str, Any]:
    """What is written of a training in this way: Trainer decays neither biases nor norms."""
    undecayed = [n for n, _ in model.named_parameters() if "bias" in n or "LayerNorm" in n]
    return {
        "optimizer": "adamw",
        "lr": 0.1,
        "epochs": 8,
        "batch_size": 6,
        "schedule": "cosine",
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "groups": [{"params": undecayed, "weight_decay": 0.0}],
    }


def test_a_callback_writes_checkpoints_and_recipe(tmp_path: Path) -> None:
    """The same ones after a resumption."""
    callback = CheckpointsCallback()
    model = bert()
    prepared(tmp_path, model, callback, **WAY).train()
    written = read_record(tmp_path / "_run" / "recipe.json")
    assert written == recipe_of_way(model)
    names = {p.name for p in (tmp_path / "_run").iterdir()}
    snapshots = {f"step-{k:08d}.safetensors" for k in (0, 2, 4, 8)}
    assert names == {"recipe.json", "weights.json", *snapshots}
    uninterrupted = callback.checkpoints.posterior(n_data=N).run  # type: ignore[union-attr]
    resumed = prepared(tmp_path, bert(), callback, **WAY)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    posteriors = callback.checkpoints.posterior(n_data=N).run  # type: ignore[union-attr]
    assert len(uninterrupted) == 4
    assert all(map(same, uninterrupted, posteriors))


def test_a_trainers_folder_tells_checkpoints_and_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bert()
    prepared(tmp_path, model, CheckpointsCallback(), TrainerPrecision(), **WAY).train()
    expected = recipe_of_way(model)
    assert (tmp_path / "checkpoint-4" / "training_args.bin").exists()  # a pickle
    monkeypatch.setattr("torch.load", lambda *_, **__: pytest.fail("a pickle is read"))
    task = blr.Task(model.eval(), DATA, **training_of(tmp_path, model))
    assert task.recipe is not None
    assert task.recipe.record == expected
    assert task.recipe.initial is not None
    beside = blr.Task(model, DATA, checkpoints=tmp_path)  # of the Trainer's own checkpoint-*
    torch.testing.assert_close([*task.checkpoints], [*beside.checkpoints], rtol=0, atol=0)
    assert beside.recipe is not None
    assert beside.recipe.record == expected
    assert beside.recipe.initial is not None
    half = bert()
    half.load_state_dict(load_file(tmp_path / "checkpoint-8" / "model.safetensors"))
    assert blr.Task(half, DATA, checkpoints=tmp_path).recipe.epochs == 4  # type: ignore[union-attr]
    quarter = bert()
    quarter.load_state_dict(load_file(tmp_path / "checkpoint-4" / "model.safetensors"))
    early = training_of(tmp_path / "checkpoint-4", quarter)
    assert early["recipe"].epochs == 2
    assert early["checkpoints"] == tmp_path / "_run"
    assert read_precision_record(tmp_path / "checkpoint-4/precision")["recipe"]["epochs"] == 2
    shutil.rmtree(tmp_path / "_run")  # as without the callback
    assert training_of(tmp_path, model) == {"checkpoints": tmp_path}
    (tmp_path / "checkpoint-4" / "model.safetensors").unlink()  # as of those that are pickled
    assert training_of(tmp_path, model) == {}


class Killed(TrainerCallback):
    """The process dies after the first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt


def test_a_run_is_told_from_another_one_in_its_folder(tmp_path: Path) -> None:
    model = bert()
    prepared(tmp_path, model, CheckpointsCallback(), **WAY).train()
    run = tmp_path / "_run"
    rounded = bert().bfloat16()
    rounded.load_state_dict(model.state_dict())
    for same_training in (model, rounded, rounded.float()):
        assert training_of(tmp_path, same_training)["checkpoints"] == run
    saved = bert()
    saved.load_state_dict(load_file(tmp_path / "checkpoint-8" / "model.safetensors"))
    before = [load_file(run / f"step-{step:08d}.safetensors") for step in (2, 4)]
    found = blr.Task(saved, DATA, checkpoints=run).checkpoints
    for state, expected in zip(found, before, strict=True):
        assert all(torch.equal(value, expected[name]) for name, value in state.items())

    again = bert()
    prepared(tmp_path, again, **WAY | {"lr_scheduler_type": "linear"}).train()
    with pytest.warns(UserWarning, match="recorded by another training"):
        assert training_of(tmp_path, again) == {}
    for folder in (run, tmp_path):
        with pytest.raises(InputError, match="of these weights: remove it"):
            blr.Task(again, DATA, checkpoints=folder)

    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path, bert(), CheckpointsCallback(), Killed(), **WAY).train()
    with pytest.warns(UserWarning, match="recorded by another training"):
        assert training_of(tmp_path, model) == {}


def test_a_language_models_folder_is_a_task_with_its_training(tmp_path: Path) -> None:
    """As the command line reads it."""
    texts = tiny.sentences(N, low=5, high=5)
    (tmp_path / "data.txt").write_text("\n".join(texts))
    rows = [{"input_ids": i, "labels": i} for i in tiny.tokenizer(pairs=False)(texts).input_ids]
    model = tiny.build("llama", "causal_lm")
    run = prepared(tmp_path / "lm", model, data=rows, num_train_epochs=8)
    run.train()
    tiny.save(tmp_path / "lm", model, pairs=False)
    task = language_task(load_language_model(tmp_path / "lm"), tmp_path / "data.txt")
    assert len(task.checkpoints) == 3
    assert task.recipe is not None
    record = task.recipe.record or {}
    expected = {"lr": 0.1, "epochs": 8, "batch_size": 6}
    expected |= {"optimizer": "ivon", "steps": 16, "ess": 4 * N}
    assert {k: record[k] for k in expected} == expected
    assert run.optimizer.optimizer.param_groups[0]["batch_size"] == 4 * 6  # tokens of a step


@pytest.mark.slow
def test_a_monitor_watches_and_is_resumed(tmp_path: Path) -> None:
    def watched(place: str | None = None) -> tuple[Any, blr.Monitor]:
        model = bert()
        monitor = blr.Monitor(blr.Task(model, DataLoader(DATA, batch_size=3)), examples=4)  # type: ignore[arg-type]
        run = prepared(tmp_path, model, MonitorCallback(monitor))
        run.train(resume_from_checkpoint=place)
        return run, monitor

    run, monitor = watched()
    assert monitor.table["epoch"].tolist() == [1, 2]
    reported = [row["loo_nll"] for row in run.state.log_history if "loo_nll" in row]
    assert reported == monitor.table["loo_nll"].tolist()
    again, resumed_monitor = watched(str(tmp_path / "checkpoint-2"))
    assert same(run.posterior(), again.posterior())
    assert resumed_monitor.rows[0]["seconds"] == monitor.rows[0]["seconds"]
    columns = monitor.table.columns.drop("seconds")  # the second epoch was watched again
    assert resumed_monitor.table[columns].equals(monitor.table[columns])
    assert torch.equal(resumed_monitor.deviations, monitor.deviations)
    with pytest.raises(InputError, match="epoch 1 does not follow epoch 2; build a new Monitor"):
        run.train()  # another run, refused before its first step
    assert run.state.global_step == 0


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_a_precision_lies_in_every_checkpoint(tmp_path: Path, kind: str) -> None:
    """By the formula, and as a module or a merge reads it; the tied embeddings once."""
    rows = DATA if kind == "bert" else [{"input_ids": i, "labels": i} for i in IDS]
    is_tied = kind != "bert"
    model = tiny.build(kind, "causal_lm", tie_word_embeddings=True) if is_tied else bert()
    run = prepared(
        tmp_path,
        model,
        TrainerPrecision(),
        kind=Trainer,
        data=rows,
        weight_decay=0.01,
        optim="adamw_torch",
        save_total_limit=2,
        save_steps=1,
    )
    run.train()
    assert {p.parent.name[-1] for p in tmp_path.glob("*/precision")} == {"3", "4"}
    place = tmp_path / "checkpoint-4"
    stored, record = storage.read(place / "precision")
    assert list(stored) == [n for n, _ in model.named_parameters()]
    other_names = [["lm_head.weight"]] if is_tied else []
    assert [*record["tied"].values()] == other_names
    state = run.optimizer.optimizer.state
    for name, p in model.named_parameters():
        by_hand = N * (state[p]["exp_avg_sq"] / (1 - 0.999**4)).sqrt()
        torch.testing.assert_close(stored[name], by_hand, rtol=1e-5, atol=0)
    assert (record["kind"], record["n_data"], record["step"]) == ("adam_v", N, 4)
    assert record["prior_precision"] == 0
    assert record["definition"] == "H = N*sqrt(v_hat)"
    assert record["recipe"]["optimizer"] == "adamw"
    assert record["recipe"]["batch_size"] == 6
    assert record["model_sha256"] == fingerprint(Folder.open(place), progress=False)
    truth = from_optimizer(run.optimizer, model, n_data=N, prior_precision=2.0)
    q = blr.Posterior.load(place / "precision", model=place, prior_precision=2.0)
    # the Trainer's own, without our callback
    read = from_checkpoint(place, model, n_data=N, prior_precision=2.0)
    for name, s in truth.precision.items():
        assert torch.equal(q.precision(name), s)
        assert torch.equal(read.precision[name], s)
        assert torch.equal(q.mean[name], read.mean[name])


def test_ivons_precision_has_its_prior_and_a_stream_its_length(tmp_path: Path) -> None:
    recorder = TrainerPrecision(n_data=1000)
    prepared(tmp_path, None, recorder, kind=Trainer, data=Stream(), max_steps=2).train()
    assert read_precision_record(tmp_path / "checkpoint-2" / "precision")["n_data"] == 1000
    run = prepared(tmp_path, None, TrainerPrecision(), weight_decay=0.1)
    run.train()
    place = tmp_path / "checkpoint-4"
    q = blr.Posterior.load(place / "precision", model=place)
    assert same(q, blr.Posterior.from_optimizer(run.optimizer.optimizer, run.model))
    assert q.record["kind"] == "ivon"
    assert q.prior_precision == pytest.approx(N * 0.1)
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(bert(), peft.LoraConfig(target_modules=["query"]))
    prepared(tmp_path / "lora", adapted, TrainerPrecision(), kind=Trainer).train()
    assert read_precision_record(tmp_path / "lora/checkpoint-4/precision")["model_sha256"] is None


def test_checkpoints_in_memory_are_said_with_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blr_analysis.huggingface.recording.MUCH_MEMORY", 0)
    run = prepared(tmp_path, save_strategy="no")
    with pytest.warns(UserWarning, match=r"stay in memory, up to 0\.0 GiB.*save_strategy"):
        run.train()


def rows_of_tokens() -> list[Any]:
    return [{"input_ids": ids, "labels": torch.where(ids == 5, -100, ids)} for ids in IDS]


@pytest.mark.parametrize("kind", ["tokens", "classes"])
def test_an_evaluation_adds_perplexity_and_averages_predictions(tmp_path: Path, kind: str) -> None:
    """The average is over probabilities, label by label; batches count as in ``eval_loss``."""
    is_lm = kind == "tokens"
    model = tiny.build("llama", "causal_lm") if is_lm else bert()
    rows = rows_of_tokens() if is_lm else DATA
    run = prepared(tmp_path, model, data=rows, save_strategy="no", per_device_eval_batch_size=5)
    run.eval_dataset = rows
    run.train()
    plain = run.evaluate()
    assert ("eval_perplexity" in plain) == is_lm
    if is_lm:
        assert plain["eval_perplexity"] == pytest.approx(math.exp(plain["eval_loss"]))
    optimizer = run.optimizer.optimizer
    draw = optimizer.sampled_params
    by_draw = []
    labels = torch.stack([row["labels"] for row in rows])

    @contextmanager
    def recorded() -> Iterator[None]:
        with draw():
            with torch.no_grad():
                by_draw.append(probabilities(run.model(input_ids=IDS).logits))
            yield

    def probabilities(logits: Tensor) -> Tensor:
        if is_lm:
            counted = labels[:, 1:] != -100
            logits = logits[:, :-1][counted]
            targets = labels[:, 1:][counted]
        else:
            targets = labels
        return logits.double().softmax(-1)[torch.arange(len(targets)), targets]

    optimizer.sampled_params = recorded
    logged = len(run.state.log_history)
    for draws in (-1, 1.5):  # refused before the data are evaluated
        with pytest.raises(InputError, match="draws must be a whole number"):
            run.evaluate(draws=draws)
    assert len(run.state.log_history) == logged
    actual = run.evaluate(draws=3)
    losses = -torch.stack(by_draw).mean(0).log()
    n_labels = [1] * N
    if is_lm:
        n_labels = (labels[:, 1:] != -100).sum(1).tolist()
    of_examples = losses.split(n_labels)
    expected = sum(
        len(batch) * float(torch.cat(batch).mean())
        for batch in (of_examples[:5], of_examples[5:10], of_examples[10:])
    )
    assert actual["eval_averaged_loss"] == pytest.approx(expected / N, rel=1e-5)
    assert run.state.log_history[-1]["eval_averaged_loss"] == actual["eval_averaged_loss"]
    optimizer.sampled_params = nullcontext
    at_mean = run.evaluate(draws=2)
    assert at_mean["eval_averaged_loss"] == pytest.approx(at_mean["eval_loss"], rel=1e-5)


def test_a_callback_leaves_all_that_an_analysis_asks_for(tmp_path: Path) -> None:
    """Of any Trainer: checkpoints, the recipe, and factors in a file."""
    callback = BLRCallback(prior_precision=1.0)
    with pytest.raises(InputError, match=r"train\(\) first"):
        callback.posterior()
    rows = rows_of_tokens()
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny.build("llama", "causal_lm"), config)
    run = prepared(
        tmp_path,
        model,
        callback,
        kind=Trainer,
        data=rows,
        optim="adamw_torch",
        learning_rate=1e-3,
        num_train_epochs=8,
    )
    run.train()
    task = callback.task(rows, likelihood="causal_lm")
    assert len(task.checkpoints) > 1
    assert task.recipe.optimizer == "adamw"
    q = callback.posterior()
    assert q.structure == "kron"
    assert len(q.earlier) > 1
    assert q.n_data == N
    stored = blr.Posterior.load(tmp_path / "_run" / "posterior.safetensors")
    assert same(stored, q)
    assert len(stored.earlier) == len(q.earlier)
    assert bool(blr.sensitivity(task, q).self_influence.isfinite().all())


def test_a_second_training_is_recorded_by_itself(tmp_path: Path) -> None:
    """The first one's hooks are gone, and the posterior that it left is not advertised."""
    callback = BLRCallback(prior_precision=1.0)
    model = tiny.build("llama", "causal_lm")
    run = prepared(tmp_path, model, callback, kind=Trainer, data=rows_of_tokens())
    said: list[str] = []
    n_hooks = []
    for _ in range(2):
        run.train()
        n_hooks.append(sum(len(m._forward_hooks) for m in model.modules()))
        source = Source(task=str(tmp_path), data="texts.jsonl")
        source.say_if_recorded(callback.task(rows_of_tokens(), likelihood="causal_lm"), said.append)
    assert n_hooks[0] == n_hooks[1]
    assert len(said) == 2
    run.remove_callback(callback)
    run.train()
    source.say_if_recorded(callback.task(rows_of_tokens(), likelihood="causal_lm"), said.append)
    assert len(said) == 2


def test_factors_under_mixed_precision_are_those_without_it(tmp_path: Path) -> None:
    """Labels are drawn; the first ones at the same weights up to rounding."""
    precisions = []
    for bf16 in (False, True):
        callback = BLRCallback(prior_precision=1.0)
        model = tiny.build("llama", "causal_lm")
        run = prepared(
            tmp_path,
            model,
            callback,
            kind=Trainer,
            data=rows_of_tokens(),
            optim="adamw_torch",
            learning_rate=1e-6,
            bf16=bf16,
            save_strategy="no",
        )
        run.train()
        q = callback.posterior()
        assert q.record["labels"] == "drawn from the predictions"
        precisions.append(torch.cat([q.precision(name).flatten() for name in q.mean]) - 1)
    exact, rounded = precisions
    assert float((exact - rounded).norm()) < 0.05 * float(exact.norm())


class Stop(TrainerCallback):
    """Ends a training early, as a kill would."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = True
        return control


@pytest.mark.parametrize("has_sums", [True, False])
def test_recorded_factors_go_on_after_a_resumption(tmp_path: Path, has_sums: bool) -> None:
    """To those of the whole training; where what was recorded is lost, a warning says so."""
    rows = rows_of_tokens()
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    arguments: dict[str, Any] = {
        "kind": Trainer,
        "data": rows,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "num_train_epochs": 6,
        "lr_scheduler_type": "constant",
    }

    def adapted() -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(tiny.build("llama", "causal_lm"), config)

    whole = BLRCallback(prior_precision=1.0)
    prepared(tmp_path / "whole", adapted(), whole, **arguments).train()
    killed = BLRCallback(prior_precision=1.0)
    prepared(tmp_path / "killed", adapted(), killed, Stop(), **arguments).train()
    place = tmp_path / "killed" / "checkpoint-2"
    if not has_sums:
        (place / "blr_recorded.safetensors").unlink()
    resumed = BLRCallback(prior_precision=1.0)
    run = prepared(tmp_path / "killed", adapted(), resumed, **arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.train(resume_from_checkpoint=str(place))
    is_warned = any("before the training was resumed" in str(w.message) for w in caught)
    assert is_warned is not has_sums
    last = resumed.posterior()
    assert same(last, whole.posterior()) is has_sums
    assert has_sums or bool(last.form.diagonal()[next(iter(last.mean))].isfinite().all())


@pytest.mark.parametrize("kind", [IVONTrainer, Trainer])
@pytest.mark.parametrize("is_regression", [False, True])
def test_positions_that_all_examples_share_are_recorded(
    tmp_path: Path, kind: type[Trainer], is_regression: bool
) -> None:
    """Those of BERT, also where the loss is none to draw labels from."""
    model = tiny.build("bert", num_labels=1) if is_regression else bert()
    rows = [{**row, "labels": row["labels"].float()} for row in DATA] if is_regression else DATA
    callback = BLRCallback()
    prepared(tmp_path, model, callback, kind=kind, data=rows).train()
    q = callback.posterior()
    assert set(q.mean) == {name for name, _ in model.named_parameters()}
    assert ("drawn" in q.record["labels"]) != is_regression


class Frozen(torch.nn.Module):
    """A language model of which one parameter trains, that no layer multiplies or adds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = bert().requires_grad_(False)
        self.temperature = torch.nn.Parameter(torch.ones(1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.body(input_ids).logits * self.temperature
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_model_that_cannot_be_recorded_is_trained_all_the_same(tmp_path: Path) -> None:
    callback = BLRCallback()
    run = prepared(tmp_path, Frozen(), callback, kind=Trainer, optim="adamw_torch")
    with pytest.warns(UserWarning, match="no factors are recorded: .*'temperature'"):
        run.train()
    assert callback.recipe is not None
    assert len(callback.task(DATA).checkpoints) > 0
    with pytest.raises(InputError, match="no factors"):
        callback.posterior()


@pytest.mark.parametrize("has_end_token", [True, False])
def test_texts_are_read_as_the_training_read_them(has_end_token: bool, tmp_path: Path) -> None:
    """With the end token behind them, where the trainer put it there."""
    tokenizer = tiny.tokenizer(pairs=False, segments=False)
    tokenizer.eos_token = "[SEP]"
    end = [tokenizer.eos_token_id] * has_end_token
    texts = tiny.sentences(N, low=3, high=3)
    rows: Any = [
        {"input_ids": ids + end, "labels": ids + end} for ids in tokenizer(texts).input_ids
    ]
    model = tiny.build("llama", "causal_lm")
    run = prepared(tmp_path, model, CheckpointsCallback(), kind=Trainer, data=rows)
    run.callback_handler.processing_class = tokenizer
    run.train()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    task = language_task(load_language_model(tmp_path), file)
    assert [row["labels"] for row in task.dataset.rows] == [row["labels"] for row in rows]
    other = language_task(load_language_model(tmp_path), file, eos=not has_end_token)
    assert [row["labels"] for row in other.dataset.rows] != [row["labels"] for row in rows]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[5, 6, 3], [7, 3]], True),
        ([[5, 6, 7, 8], [7, 3], [5, 6, 3]], True),  # the first one is cut
        ([[5, 6, 7], [7, 3], [5, 6, 7, 3]], False),
        ([[5, 6, 7], [8, 9, 7]], False),
        ([[5, 6, -3], [7, -3, -3]], False),  # the end token fills up: it is masked
        ([[5, 3, -3], [7, 3, -3]], True),
    ],
)
def test_the_end_token_is_seen_behind_texts(rows: list[list[int]], expected: bool) -> None:
    data = [
        {"input_ids": [abs(i) for i in row], "attention_mask": [int(i > 0) for i in row]}
        for row in rows
    ]
    loader: Any = DataLoader(data)  # type: ignore[arg-type]
    assert end_with(loader, 3) is expected


@pytest.mark.parametrize("kind", [BLRCallback, CheckpointsCallback])
def test_no_factors_are_recorded_of_texts_in_one_row(kind: Any, tmp_path: Path) -> None:
    """Their number is not the number of rows."""
    callback = kind(structure="kron")
    rows: Any = [{"input_ids": ids} for ids in IDS.tolist()]
    model = tiny.build("llama", "causal_lm")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)  # norms of root mean squares have no rule
    run = prepared(tmp_path, model, callback, kind=Trainer, data=rows, optim="adamw_torch")
    run.data_collator = DataCollatorWithFlattening()
    with pytest.warns(UserWarning, match="no factors are recorded: .*several texts into one row"):
        run.train()
    assert callback.checkpoints.recordings is None
    assert callback.recipe is not None


@pytest.mark.parametrize("is_added_later", [False, True])
@pytest.mark.parametrize("kind", [IVONTrainer, Trainer])
def test_curves_of_a_monitor_go_through_the_log(
    kind: type[Trainer], is_added_later: bool, tmp_path: Path
) -> None:
    """To every callback that reports; of other trainers than IVONTrainer with their ``log``."""
    logs: list[dict[str, float]] = []

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            logs.append(dict(kwargs["logs"]))

    model = bert()
    monitor = blr.Monitor(blr.Task(model, DATA), examples=4)
    callback = MonitorCallback(monitor)
    callbacks = [Reporter()] if is_added_later else [Reporter(), callback]
    run = prepared(tmp_path, model, *callbacks, kind=kind, save_strategy="no")
    if is_added_later:
        run.add_callback(callback)
    if kind is Trainer:
        callback.log = run.log
    run.train()
    rows = [row for row in logs if "loo_nll" in row]
    assert [row["loo_nll"] for row in rows] == monitor.table["loo_nll"].tolist()
    assert [row["epoch"] for row in rows] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rate": 5e-5}, "learning_rate is not set, and its default 5e-05 is Adam's"),
        ({"learning_rate": 1e-4}, "learning_rate=0.0001 is Adam's"),
        ({"adam_beta1": 0.8}, "adam_beta1=0.8 has no effect"),
        ({"optim": "sgd"}, "optim=sgd has no effect"),
    ],
)
def test_warnings_name_the_arguments_that_were_written(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    run = prepared(tmp_path, **settings)
    with pytest.warns(UserWarning, match=f"^{words}") as caught:
        run.create_optimizer()
    assert len(caught) == 1


def adam(folder: Path, **options: Any) -> Any:
    return prepared(folder, None, TrainerPrecision(), kind=Trainer, **options)


def ivon(folder: Path, optimizer: Any = None, **options: Any) -> Any:
    model = bert()
    return prepared(folder, model, optimizer=optimizer and optimizer(model.parameters()), **options)


REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "Adam's rate": (lambda p: ivon(p, learning_rate=5e-5).train(), UserWarning, "IVON's are"),
    "untrained": (lambda p: ivon(p).posterior(), OptimizerError, "NoneType"),
    "no draws": (lambda p: ivon(p, torch.optim.AdamW).train(), InputError, "AdamW draws no"),
    "IVON": (lambda p: ivon(p, data=Stream(), max_steps=2).train(), InputError, "no length.*ess"),
    "SGD": (lambda p: adam(p, optim="sgd").train(), OptimizerError, "SGD keeps no precision"),
    "Adafactor": (lambda p: adam(p, optim="adafactor").train(), OptimizerError, "from Adafactor"),
    "Adam": (lambda p: adam(p, data=Stream(), max_steps=2).train(), InputError, "n_data="),
}


@pytest.mark.filterwarnings("error:learning_rate")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_before_a_step(case: str, tmp_path: Path) -> None:
    ask, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        ask(tmp_path)
    assert not list(tmp_path.glob("checkpoint-*"))


# A script for Hugging Face's Trainer trains with IVON when two of its lines are changed


SCRIPT = Path(__file__).with_name("run_glue.py").read_text("utf-8")
OURS = "from blr_analysis.huggingface import IVONTrainer as Trainer"
CHANGED = SCRIPT.replace("from transformers import Trainer", OURS).replace("=5e-5", "=0.1")
GOOD = "the film was very good,1\na bright book,1\na very good book,1\n"
BAD = "the film was not good,0\na dull book,0\nthe book was very bad,0\n"


@pytest.mark.slow
def test_two_changed_lines_train_on_six(tmp_path: Path) -> None:
    changes = list(difflib.ndiff(SCRIPT.splitlines(), CHANGED.splitlines()))
    assert [sum(line.startswith(sign) for line in changes) for sign in ("- ", "+ ")] == [2, 2]
    tiny.save(tmp_path / "model", tiny.build("bert", num_labels=2))
    (tmp_path / "six.csv").write_text("sentence,label\n" + GOOD + BAD)
    script: dict[str, Any] = {"__name__": "script"}
    exec(compile(CHANGED, "run_glue.py", "exec"), script)
    options = "--max_steps 200 --per_device_train_batch_size 6 --report_to none --use_cpu 1"
    options += " --disable_tqdm 1 --logging_steps 1 --save_strategy no"
    paths = [str(tmp_path / "model"), str(tmp_path / "six.csv"), "--output_dir", str(tmp_path)]
    run = script["main"]([*paths, *options.split()])
    assert type(run.optimizer.optimizer).__name__ == "IVON"
    assert run.evaluate()["eval_loss"] < 0.5  # of two classes, log 2 at first
    assert set(run.posterior().mean) == {n for n, _ in run.model.named_parameters()}
