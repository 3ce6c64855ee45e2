"""IVON inside Hugging Face's Trainer: two lines changed, the same steps as a loop by hand."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers
import torch
from optimizers import ROWS, float16_on_a_cpu, make
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

import blr_analysis as blr
from blr_analysis import IVON
from blr_analysis.errors import InputError
from blr_analysis.huggingface import IVONTrainer, MonitorCallback

N = 12


class Alike(Dataset):
    """The same sentence again and again, so that no order matters."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        places = torch.arange(4)  # each example's own, so that VOGN reads a gradient of each
        return {"input_ids": places + 5, "position_ids": places, "labels": torch.tensor(1)}


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=12, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=12, max_position_embeddings=8, num_labels=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def trainer(folder: Path, model: Any, optimizer: Any = None, **settings: Any) -> IVONTrainer:
    arguments = {
        "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 3, "learning_rate": 0.1,
        "gradient_accumulation_steps": 2, "report_to": [], "disable_tqdm": True, "use_cpu": True,
        "logging_strategy": "no", "max_grad_norm": 0.0, **settings,
    }  # fmt: skip
    return IVONTrainer(
        model,
        TrainingArguments(str(folder), **arguments),
        train_dataset=Alike(),
        eval_dataset=Alike(),
        optimizers=(optimizer, None),
    )


def ivon(model: Any, **options: Any) -> IVON:
    generator = torch.Generator().manual_seed(3)
    return IVON(model.parameters(), lr=0.1, ess=N, weight_decay=0.1, generator=generator, **options)


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("settings", "close"),
    [
        ({"max_grad_norm": 0.0}, 1e-6),
        ({}, 1e-6),
        ({"bf16": True}, 0.02),
        ({"scaled": True}, 0.02),
        pytest.param({"fp16": True, "use_cpu": False}, 0.02, marks=GPU),
    ],
)
def test_it_takes_the_steps_of_a_loop_by_hand(
    tmp_path: Path, settings: Any, close: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = bert(), bert()
    how = {"max_grad_norm": 0.1, "lr_scheduler_type": "constant", "save_strategy": "no"} | settings
    scaled = how.pop("scaled", False)
    run = trainer(tmp_path, model, ivon(model), **how)
    scaler = float16_on_a_cpu(run.accelerator, monkeypatch) if scaled else None
    run.train()
    assert scaler is None or scaler.get_scale() == 1024  # it grew once, and met no infinity
    optimizer = ivon(other)
    batch = {k: torch.stack([v] * 3) for k, v in Alike()[0].items()}
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(2):  # a draw for each microbatch; their mean
            with optimizer.sampled_params(train=True):
                other(**batch).loss.backward()
        if how["max_grad_norm"]:
            torch.nn.utils.clip_grad_norm_(other.parameters(), how["max_grad_norm"])
        optimizer.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-4, atol=close)


def test_steps_are_counted_where_only_epochs_are_given(tmp_path: Path) -> None:
    run = trainer(tmp_path, bert(), max_steps=-1, num_train_epochs=3)
    run.create_optimizer()
    options: Any = {"weight_decay": 1 / N, "hess_init": "weights", "steps": 6}
    expected = IVON(bert().parameters(), lr=0.1, ess=N, **options)
    assert run.optimizer.param_groups[0]["beta2"] == expected.param_groups[0]["beta2"]


class Sentences(Alike):
    """Each with a label that does not count, beside the first, which nothing predicts."""

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.arange(4) + i % 3
        return {"input_ids": ids, "labels": torch.where(torch.arange(4) == 2, -100, ids)}


TOKENS = 2 * N


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=12, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=8,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("given", [False, True])
def test_a_mean_over_tokens_has_tokens_for_ess(tmp_path: Path, given: bool) -> None:
    model = llama()
    own = IVON(model.parameters(), lr=0.1, ess=TOKENS, weight_decay=1 / TOKENS) if given else None
    run = trainer(tmp_path, model, own, save_strategy="no")
    run.train_dataset = Sentences()
    before = torch.get_rng_state()
    run.create_optimizer()
    assert torch.equal(torch.get_rng_state(), before)  # counting leaves the draws alone
    run.train()
    optimizer = getattr(run.optimizer, "optimizer", run.optimizer)
    assert optimizer.param_groups[0]["ess"] == TOKENS
    posterior = run.posterior()
    assert posterior.n_data == N and posterior.prior_precision == pytest.approx(1.0)
    task = blr.Task(
        model, torch.utils.data.DataLoader(Sentences(), batch_size=3), likelihood="causal_lm"
    )
    assert bool(blr.sensitivity(task, posterior).self_influence.isfinite().all())


@pytest.mark.parametrize("problem", [None, "regression", "collated"])
def test_a_mean_over_outputs_has_their_number_for_ess(tmp_path: Path, problem: str | None) -> None:
    rows = [Alike()[i] | {"labels": torch.tensor([1.0, 0.0])} for i in range(N)]
    model = bert()
    model.config.problem_type = None if problem == "collated" else problem  # None: the labels tell
    run = trainer(tmp_path, model, save_strategy="no")
    run.train_dataset = rows  # type: ignore[assignment]
    if problem == "collated":

        def named(some: list[dict[str, Any]]) -> dict[str, Tensor]:
            held = {k: torch.stack([r[k] for r in some]) for k in ("input_ids", "position_ids")}
            return held | {"labels": torch.tensor([[r["tag"] == "a", False] for r in some]).float()}

        run.data_collator = named
        run.args.remove_unused_columns = False
        run.train_dataset = [  # type: ignore[assignment]
            {k: v for k, v in Alike()[i].items() if k != "labels"} | {"tag": "a"} for i in range(N)
        ]
    run.train()
    posterior = run.posterior()
    optimizer = getattr(run.optimizer, "optimizer", run.optimizer)
    assert optimizer.param_groups[0]["ess"] == 2 * N
    assert posterior.n_data == N and posterior.prior_precision == pytest.approx(1.0)


def test_the_best_checkpoint_brings_its_own_precision(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    run = trainer(
        tmp_path, bert(), metric_for_best_model="loss", greater_is_better=True, **settings
    )
    run.train()
    best = run.state.best_model_checkpoint
    assert best is not None and best.endswith("-2")
    ours, theirs = run.posterior(), blr.Posterior.from_checkpoint(best, bert())
    last = blr.Posterior.from_optimizer(run.optimizer.optimizer, run.model)
    for name in ours.mean:
        assert torch.equal(ours.mean[name], theirs.mean[name])
        assert torch.equal(ours.precision(name), theirs.precision(name))
    assert any(not torch.equal(ours.precision(n), last.precision(n)) for n in ours.mean)


def test_adams_rate_is_said_and_adam_refused(tmp_path: Path) -> None:
    model = bert()
    with pytest.warns(UserWarning, match="IVON's are"):
        trainer(tmp_path, model, learning_rate=5e-5).create_optimizer()
    with pytest.raises(InputError, match="nothing is trained"):
        trainer(tmp_path, model).posterior()
    with pytest.raises(InputError, match="AdamW draws no weights"):
        trainer(tmp_path, model, torch.optim.AdamW(model.parameters())).train()


# one of each class of optimizer: what the others are, accelerate's tests go through
@pytest.mark.parametrize(
    "row", [r for r in ROWS if r not in ("OGN", "Vadam", "Vprop", "SGD", "RMSprop")]
)
def test_every_row_trains_and_is_resumed_to_the_bit(tmp_path: Path, row: str) -> None:
    model = bert()
    whole = trainer(tmp_path, model, make(row, model, N))
    whole.train()
    other = bert()
    again = trainer(tmp_path, other, make(row, other, N))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    moved = 0
    for p, q, start in zip(
        model.parameters(), other.parameters(), bert().parameters(), strict=True
    ):
        assert torch.equal(p, q)
        assert bool(p.isfinite().all())
        moved += not torch.equal(p, start)
    assert moved > 10


def test_a_monitor_watches_and_is_resumed(tmp_path: Path) -> None:
    def watched() -> tuple[IVONTrainer, blr.Monitor]:
        model = bert()
        task = blr.Task(model, torch.utils.data.DataLoader(Alike(), batch_size=3))
        monitor = blr.Monitor(task, examples=4)
        run = trainer(tmp_path, model, max_steps=-1, num_train_epochs=2)
        run.add_callback(MonitorCallback(monitor))
        return run, monitor

    run, monitor = watched()
    run.train()
    assert monitor.table["epoch"].tolist() == [1, 2]
    said = [row["loo_nll"] for row in run.state.log_history if "loo_nll" in row]
    assert said == monitor.table["loo_nll"].tolist()
    again, other = watched()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for p, q in zip(run.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert again.state.global_step == 4 and len(other) == 2
    columns = monitor.table.columns.drop("seconds")  # the second epoch was watched again
    assert other.table[columns].equals(monitor.table[columns])
    assert other.rows[0]["seconds"] == monitor.rows[0]["seconds"]
    assert torch.equal(other.deviations, monitor.deviations)
    with pytest.raises(InputError, match="epoch 1 does not follow epoch 2; build a new Monitor"):
        run.train()  # another run, refused before its first step
    assert run.state.global_step == 0


# A script for Hugging Face's Trainer trains with IVON when two of its lines are changed.


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


def tiny(folder: Path) -> None:
    tiny_transformers.save(folder, tiny_transformers.build("bert", num_labels=2))


def run(text: str, folder: Path, steps: int) -> Any:
    known: dict[str, Any] = {"__name__": "script"}
    exec(compile(text, "run_glue.py", "exec"), known)
    (folder / "six.csv").write_text("sentence,label\n" + LINES)
    options = f"--max_steps {steps} --per_device_train_batch_size 6 --report_to none --use_cpu 1"
    options += " --disable_tqdm 1 --logging_steps 1 --save_strategy no"
    where = [str(folder / "model"), str(folder / "six.csv"), "--output_dir", str(folder / "out")]
    return known["main"]([*where, *options.split()])


@pytest.mark.slow
def test_two_changed_lines_train_on_six(tmp_path: Path) -> None:
    changes = list(difflib.ndiff(SCRIPT.splitlines(), CHANGED.splitlines()))
    assert [sum(line.startswith(sign) for line in changes) for sign in ("- ", "+ ")] == [2, 2]
    (tmp_path / "model").mkdir()
    tiny(tmp_path / "model")
    trainer = run(CHANGED, tmp_path, 200)
    assert type(trainer.optimizer.optimizer).__name__ == "IVON"
    assert trainer.evaluate()["eval_loss"] < 0.5  # of two classes, log 2 at first
    posterior = trainer.posterior()
    assert posterior.n_data == 6
    assert set(posterior.mean) == {n for n, _ in trainer.model.named_parameters()}
