"""One training in every trainer: the same weights, posterior, checkpoints and recipe as by hand."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import pytest
import tiny_transformers
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import blr_analysis as blr
from blr_analysis.huggingface import CheckpointsCallback, IVONTrainer, TrainerPrecision
from blr_analysis.huggingface.models import load_language_model
from blr_analysis.huggingface.questions import language_task
from blr_analysis.huggingface.recording import recipe_of, training_of
from blr_analysis.huggingface.trainer import VariationalTrainer
from blr_analysis.lightning import LightningCheckpoints, VariationalSteps
from blr_analysis.snapshots import state_of

N, EPOCHS, STEPS = 24, 16, 16  # all data in one minibatch, so that no order matters
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 3, generator=G), torch.randint(2, (N,), generator=G)
ROWS = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(num_workers|log_every_n_steps|exists and is not empty|litlogger|LeafSpec).*",
    "ignore::blr_analysis.errors.InitialPrecisionWarning",
)


class Net(nn.Module):
    """A network with BatchNorm that answers as Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(x)
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return loss | {"logits": logits}


def optimizer(kind: str, model: nn.Module) -> Any:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    generator = torch.Generator().manual_seed(3)
    own: Any = {"weight_decay": 1 / N, "steps": STEPS, "generator": generator}
    return blr.IVON(model.parameters(), lr=0.1, ess=N, **own)


@dataclass
class Run:
    """What a training leaves."""

    model: nn.Module
    checkpoints: blr.Checkpoints
    recipe: blr.Recipe
    posterior: blr.Posterior


def kept(checkpoints: Any) -> blr.Posterior:
    return checkpoints.posterior(n_data=N, prior_precision=None)


def by_hand(kind: str) -> Run:
    model = Net()
    own = optimizer(kind, model)
    checkpoints = blr.Checkpoints(model, steps=STEPS, optimizer=own)
    for _ in range(STEPS):
        own.zero_grad()
        if kind == "adamw":
            model(X, Y)["loss"].backward()
        else:
            with own.sampled_params(train=True):
                model(X, Y)["loss"].backward()
        own.step()
        checkpoints.step()
    more = {"weight_decay": 0.1} if kind == "adamw" else {"weight_decay": 1 / N, "steps": STEPS}
    lr = 0.05 if kind == "adamw" else 0.1
    recipe = blr.Recipe(kind, lr=lr, epochs=EPOCHS, batch_size=N, **more)
    return Run(model, checkpoints, recipe, kept(checkpoints))


class TrainerContract:
    """Every way of training leaves what the loop by hand leaves."""

    @classmethod
    def run(cls, kind: str, folder: Path) -> Run:
        raise NotImplementedError

    @pytest.fixture(scope="class", params=["adamw", "ivon"])
    @classmethod
    def runs(cls, request: Any, tmp_path_factory: Any) -> tuple[Run, Run]:
        kind: str = request.param
        return cls.run(kind, tmp_path_factory.mktemp("run")), by_hand(kind)

    def test_the_same_weights_and_buffers(self, runs: tuple[Run, Run]) -> None:
        ours, theirs = (state_of(r.model) for r in runs)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)

    def test_the_same_checkpoints(self, runs: tuple[Run, Run]) -> None:
        ours, theirs = (blr.Task(r.model.eval(), ROWS, checkpoints=r.checkpoints) for r in runs)
        assert len(ours.checkpoints) == len(theirs.checkpoints) == 3
        for one, other in zip(ours.checkpoints, theirs.checkpoints, strict=True):
            for name, value in other.items():
                torch.testing.assert_close(one[name], value, rtol=1e-4, atol=1e-5)

    def test_the_same_recipe(self, runs: tuple[Run, Run]) -> None:
        ours, theirs = (r.recipe for r in runs)
        assert ours.record == theirs.record
        first = Net()
        assert ours.initial is not None
        for name, value in state_of(first).items():
            assert torch.equal(ours.initial[name], value)

    def test_the_same_posterior_with_its_earlier_ones(self, runs: tuple[Run, Run]) -> None:
        ours, theirs = (r.posterior for r in runs)
        assert len(ours.run) == len(theirs.run) == 4
        for p, q in zip(ours.run, theirs.run, strict=True):
            for name in q.mean:
                torch.testing.assert_close(p.mean[name], q.mean[name], rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(p.precision(name), q.precision(name), rtol=1e-3, atol=0)


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    how = {
        "num_train_epochs": EPOCHS, "per_device_train_batch_size": N, "report_to": [],
        "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no", "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant", "save_steps": 5, **settings,
    }  # fmt: skip
    return TrainingArguments(str(folder), **how)


class Drawing(VariationalTrainer, Trainer):
    """Another Trainer that draws weights."""


class TestIVONTrainer(TrainerContract):
    @classmethod
    def run(cls, kind: str, folder: Path) -> Run:
        model = Net()
        if kind == "adamw":
            pytest.skip("which draws weights")
        trainer = IVONTrainer(
            model, arguments(folder), train_dataset=ROWS, optimizers=(optimizer(kind, model), None)
        )
        trainer.train()
        q = trainer.posterior()
        assert q.record["recipe"] == trainer.recipe.record
        q.save(folder / "q")
        assert blr.Posterior.load(folder / "q").record["recipe"] == trainer.recipe.record
        return Run(trainer.model, trainer.checkpoints, trainer.recipe, q)


class TestTrainer(TrainerContract):
    @classmethod
    def run(cls, kind: str, folder: Path) -> Run:
        model, callback = Net(), CheckpointsCallback()
        trainer = (Trainer if kind == "adamw" else Drawing)(
            model, arguments(folder, save_strategy="no"), train_dataset=ROWS, callbacks=[callback],
            optimizers=(optimizer(kind, model), None),
        )  # fmt: skip
        trainer.train()
        assert callback.checkpoints is not None and callback.recipe is not None
        assert not (folder / "_run").exists()
        return Run(model, callback.checkpoints, callback.recipe, kept(callback.checkpoints))


class Module(lightning.pytorch.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = Net(), kind

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return optimizer(self.kind, self.net)


class TestLightning(TrainerContract):
    @classmethod
    def run(cls, kind: str, folder: Path) -> Run:
        module, callback = Module(kind), LightningCheckpoints(submodule="net")
        draws = [] if kind == "adamw" else [VariationalSteps()]
        lightning.Trainer(
            max_epochs=EPOCHS, callbacks=[callback, *draws], logger=False, accelerator="cpu",
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=str(folder),
        ).fit(module, DataLoader(ROWS, batch_size=N))  # type: ignore[arg-type]  # fmt: skip
        assert callback.checkpoints is not None and callback.recipe is not None
        return Run(module.net, callback.checkpoints, callback.recipe, kept(callback.checkpoints))


class TestAccelerate(TrainerContract):
    @classmethod
    def run(cls, kind: str, folder: Path) -> Run:
        model, accelerator = Net(), Accelerator(cpu=True)
        loader: Any = DataLoader(ROWS, batch_size=N)  # type: ignore[arg-type]
        net, wrapped, loader = accelerator.prepare(model, optimizer(kind, model), loader)
        own = wrapped.optimizer
        checkpoints = blr.Checkpoints(net, steps=STEPS, folder=folder, optimizer=own)
        checkpoints.begin()
        for _ in range(EPOCHS):
            for batch in loader:
                own.zero_grad()
                if kind == "adamw":
                    accelerator.backward(net(**batch)["loss"])
                else:
                    with own.sampled_params(train=True):
                        accelerator.backward(net(**batch)["loss"])
                wrapped.step()
                checkpoints.step()
        recipe = recipe_of(wrapped, epochs=EPOCHS, batch_size=N, n_data=N)
        assert recipe is not None
        recipe.initial = checkpoints.first
        return Run(model, checkpoints, recipe, kept(checkpoints))


# ---------------------------------------------------------------- what a Trainer's folder tells


def test_a_trainers_folder_has_checkpoints_and_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    how: Any = {"optim": "adamw_torch", "learning_rate": 0.05, "weight_decay": 0.1}
    trainer = Trainer(
        model, arguments(tmp_path, save_steps=1, lr_scheduler_type="cosine", **how),
        train_dataset=ROWS, callbacks=[CheckpointsCallback(), TrainerPrecision()],
    )  # fmt: skip
    trainer.train()
    expected = {
        "optimizer": "adamw", "lr": 0.05, "epochs": EPOCHS, "batch_size": N, "schedule": "cosine",
        "weight_decay": 0.1,
    }  # fmt: skip
    assert json.loads((tmp_path / "_run" / "recipe.json").read_text()) == expected
    assert (tmp_path / "checkpoint-4" / "training_args.bin").exists()  # a pickle
    monkeypatch.setattr("torch.load", lambda *_, **__: pytest.fail("a pickle is read"))
    found = training_of(tmp_path)
    task = blr.Task(model.eval(), ROWS, **found)
    assert task.recipe is not None and task.recipe.record == expected
    assert task.recipe.initial is not None
    beside = blr.Task(model, ROWS, checkpoints=tmp_path)  # of the Trainer's own checkpoint-*
    for one, other in zip(task.checkpoints, beside.checkpoints, strict=True):
        for name, value in other.items():
            assert torch.equal(one[name], value), name
    early = training_of(tmp_path / "checkpoint-4")
    assert early["recipe"].epochs == 4 and early["checkpoints"] == tmp_path / "_run"
    q = blr.Posterior.load(
        tmp_path / "checkpoint-4" / "precision",
        model=tmp_path / "checkpoint-4",
        prior_precision=1.0,
    )
    assert q.record["recipe"]["epochs"] == 4
    shutil.rmtree(tmp_path / "_run")  # as without the callback
    assert training_of(tmp_path) == {"checkpoints": tmp_path}
    (tmp_path / "checkpoint-4" / "model.safetensors").unlink()  # as of those that are pickled
    assert training_of(tmp_path) == {}


def test_a_resumed_run_has_the_checkpoints_of_the_whole_one(tmp_path: Path) -> None:
    def trained(resume: bool) -> IVONTrainer:
        model = Net()
        trainer = IVONTrainer(
            model, arguments(tmp_path, save_steps=5), train_dataset=ROWS,
            optimizers=(optimizer("ivon", model), None),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5") if resume else None)
        return trainer

    whole, again = (trained(resume) for resume in (False, True))
    for p, q in zip(whole.posterior().run, again.posterior().run, strict=True):
        assert all(torch.equal(p.precision(n), q.precision(n)) for n in p.mean)
    assert again.recipe is not None and again.recipe.initial is not None
    names = {p.name for p in (tmp_path / "_run").iterdir()}
    assert names == {"recipe.json", *(f"step-{k:08d}.safetensors" for k in (0, 2, 4, 8))}


def test_the_run_ends_at_the_best_weights(tmp_path: Path) -> None:
    class Judged(Trainer):
        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            worse = {"eval_loss": abs(self.state.global_step - 4.0)}
            self.log(worse)
            return worse

    callback = CheckpointsCallback()
    best = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    Judged(
        Net(), arguments(tmp_path, **best), train_dataset=ROWS, eval_dataset=ROWS,
        callbacks=[callback],
    ).train()  # fmt: skip
    assert callback.recipe is not None and callback.recipe.epochs == 4
    assert callback.checkpoints is not None
    assert list(callback.checkpoints.snapshots) == [0, 1, 2]


def test_a_language_models_folder_is_a_task_with_its_training(tmp_path: Path) -> None:
    """As the command line reads it."""
    texts = tiny_transformers.sentences(N, low=5, high=5)
    (tmp_path / "data.txt").write_text("\n".join(texts))
    rows = [tiny_transformers.tokenizer(pairs=False)(t).input_ids for t in texts]
    model = tiny_transformers.build("llama", "causal_lm")
    trainer = IVONTrainer(
        model, arguments(tmp_path / "lm", learning_rate=0.1, per_device_train_batch_size=1,
                         num_train_epochs=1),
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in rows],
    )  # fmt: skip
    trainer.train()
    tiny_transformers.save(tmp_path / "lm", model, pairs=False)
    task = language_task(load_language_model(tmp_path / "lm"), tmp_path / "data.txt")
    assert len(task.checkpoints) == 3 and task.recipe is not None
    expected = {"optimizer": "ivon", "lr": 0.1, "epochs": 1, "batch_size": 1, "steps": N}
    told = task.recipe.record or {}
    assert {k: told[k] for k in expected} == expected
    assert told["ess"] == sum(len(ids) - 1 for ids in rows)
