"""Precisions written by Hugging Face's own Trainer, and its checkpoints read afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_transformers import build
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from blr_analysis import IVON, Posterior
from blr_analysis.errors import (
    InputError,
    ModelError,
    OptimizerError,
    PosteriorError,
    StorageError,
)
from blr_analysis.files import Folder, fingerprint, storage
from blr_analysis.huggingface import TrainerPrecision
from blr_analysis.merging.merge import merge
from blr_analysis.posterior.capture import from_checkpoint, from_optimizer
from blr_analysis.posterior.precision_files import read_precision_record

N, DECAY = 24, 0.01


class Sentences(Dataset):
    """Token numbers and labels that leave most of the vocabulary unused."""

    def __init__(self, n: int = N) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(5, 12, (n, 6), generator=generator)
        self.labels = torch.randint(0, 2, (n,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([Sentences()[i] for i in range(N)] * 4)


def bert(dtype: torch.dtype = torch.float32) -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=12, max_position_embeddings=10, num_labels=2,
    )  # fmt: skip
    return BertForSequenceClassification(config).to(dtype)


def train(
    folder: Path,
    *,
    model: nn.Module | None = None,
    callback: TrainerPrecision | None = None,
    data: Any = None,
    trainer: type[Trainer] = Trainer,
    optimizer: torch.optim.Optimizer | None = None,
    **settings: Any,
) -> Trainer:
    arguments = {
        "max_steps": 3, "save_steps": 3, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "weight_decay": DECAY, "report_to": [],
        "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no", **settings,
    }  # fmt: skip
    run = trainer(
        model or bert(),
        TrainingArguments(str(folder), **arguments),
        train_dataset=data or Sentences(),
        callbacks=[callback] if callback else None,
        optimizers=(optimizer, None),
    )
    run.train()
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer, TrainerPrecision]:
    folder = tmp_path_factory.mktemp("run")
    callback = TrainerPrecision()
    trainer = train(folder, callback=callback)
    return folder / "checkpoint-3", trainer, callback


Run = tuple[Path, Trainer, TrainerPrecision]


def live(trainer: Trainer, **options: Any) -> Any:
    return from_optimizer(trainer.optimizer, trainer.model, n_data=N, bare=True, **options)


# ----------------------------------------------------------------- what the callback writes


def test_the_precision_lies_in_the_checkpoint(run: Run) -> None:
    checkpoint, trainer, _ = run
    stored, _ = storage.read(checkpoint / "precision")
    expected = live(trainer).precision
    assert list(stored) == [n for n, _ in trainer.model.named_parameters()]
    for name, p in trainer.model.named_parameters():
        assert stored[name].shape == p.shape
        assert torch.equal(stored[name], expected[name]), name
    # v̂ is AdamW's own second moment: one tensor by the formula itself.
    state = trainer.optimizer.optimizer.state
    weight = trainer.model.classifier.weight
    by_hand = N * (state[weight]["exp_avg_sq"] / (1 - 0.999**3)).sqrt()
    assert torch.allclose(stored["classifier.weight"], by_hand, rtol=1e-6)
    unused = stored["bert.embeddings.word_embeddings.weight"][20:]
    assert unused.numel() and not unused.any()  # rows that no sentence has: the data say nothing


def test_the_record_says_how_it_was_trained(run: Run) -> None:
    checkpoint, trainer, _ = run
    record = read_precision_record(checkpoint / "precision")
    assert record["kind"] == "adam_v" and record["n_data"] == N
    assert record["prior_precision"] == 0.0
    assert record["batch_size"] == 4
    assert record["recipe"]["batch_size"] == 4 and record["recipe"]["optimizer"] == "adamw"
    assert (record["step"], record["beta2"], record["bias_corrected"]) == (3, 0.999, True)
    assert record["optimizer"].endswith("AdamW")
    assert record["definition"] == "H = N*sqrt(v_hat)"
    assert "no L2 penalty" in record["prior_from"]
    decay, spared = record["parameter_order"]
    assert "classifier.weight" in decay and "classifier.bias" in spared
    assert len(decay) + len(spared) == len(list(trainer.model.parameters()))
    assert record["prior_outside"]["classifier.weight"] == pytest.approx(N * DECAY)
    assert record["prior_outside"]["classifier.bias"] == 0.0
    assert record["model_sha256"] == fingerprint(Folder.open(checkpoint), progress=False)


def test_a_posterior_from_the_checkpoint_and_its_precision(run: Run, tmp_path: Path) -> None:
    checkpoint, trainer, _ = run
    q = Posterior.load(checkpoint / "precision", model=checkpoint, prior_precision=2.0)
    expected = from_optimizer(trainer.optimizer, trainer.model, n_data=N, prior_precision=2.0)
    for name, m in expected.mean.items():
        assert torch.equal(q.mean[name], m), name
        assert torch.equal(q.precision(name), expected.precision[name]), name
    assert (q.n_data, q.prior_precision) == (N, 2.0)
    bert().save_pretrained(tmp_path / "other")
    with pytest.raises(PosteriorError, match="sha256"):
        Posterior.load(checkpoint / "precision", model=tmp_path / "other", prior_precision=1.0)


def test_every_checkpoint_has_one_and_old_ones_go(tmp_path: Path) -> None:
    train(tmp_path, callback=TrainerPrecision(), save_steps=1, save_total_limit=2)
    assert {p.parent.name for p in tmp_path.glob("*/precision")} == {
        "checkpoint-2", "checkpoint-3",
    }  # fmt: skip
    assert not (tmp_path / "checkpoint-1").exists()
    records = [read_precision_record(p) for p in sorted(tmp_path.glob("*/precision"))]
    assert [r["step"] for r in records] == [2, 3]


def test_a_model_saved_after_training(run: Run, tmp_path: Path) -> None:
    checkpoint, trainer, callback = run
    trainer.save_model(str(tmp_path / "fine-tuned"))
    assert callback.save(tmp_path / "fine-tuned") == tmp_path / "fine-tuned" / "precision"
    one, _ = storage.read(tmp_path / "fine-tuned" / "precision")
    two, _ = storage.read(checkpoint / "precision")
    assert all(torch.equal(one[n], two[n]) for n in two)
    with pytest.raises(StorageError, match="save the model there first"):
        callback.save(tmp_path / "nowhere")
    with pytest.raises(OptimizerError, match="no training has begun"):
        TrainerPrecision().save(tmp_path / "fine-tuned")


def test_the_best_models_precision_is_not_the_last_ones(tmp_path: Path) -> None:
    callback = TrainerPrecision()
    trainer = train(
        tmp_path, callback=callback, load_best_model_at_end=True, eval_strategy="steps",
        eval_steps=1, save_steps=1, metric_for_best_model="loss", trainer=Evaluated,
    )  # fmt: skip
    trainer.save_model(str(tmp_path / "best"))
    with pytest.raises(OptimizerError, match=r"load_best_model_at_end.*precision' instead"):
        callback.save(tmp_path / "best")


class Evaluated(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, eval_dataset=Sentences(6), **kwargs)


class Variational(Trainer):
    """IVON in a Trainer: the weights of a training step are a draw."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.optimizer.optimizer.sampled_params(train=True):  # type: ignore[union-attr]
            return super().training_step(*args, **kwargs)


def test_ivon_as_the_trainers_optimizer(tmp_path: Path) -> None:
    model = bert()
    optimizer = IVON(model.parameters(), lr=0.01, ess=N, weight_decay=0.1, beta2=0.9)
    callback = TrainerPrecision()
    train(
        tmp_path, model=model, optimizer=optimizer, callback=callback, trainer=Variational,
        max_grad_norm=0.0,
    )  # fmt: skip
    checkpoint = tmp_path / "checkpoint-3"
    q = Posterior.load(checkpoint / "precision", model=checkpoint)
    expected = Posterior.from_optimizer(optimizer, model)
    for name, m in expected.mean.items():
        assert torch.equal(q.mean[name], m)
        assert torch.equal(q.precision(name), expected.precision(name))
    record = read_precision_record(checkpoint / "precision")
    assert record["kind"] == "ivon" and record["prior_precision"] == pytest.approx(N * 0.1)
    with (
        optimizer.sampled_params(),
        pytest.raises(OptimizerError, match="inside sampled_params"),
    ):
        model.save_pretrained(tmp_path / "draw")
        callback.save(tmp_path / "draw")
    assert not (tmp_path / "draw" / "precision").exists()


def test_two_checkpoints_are_merged_by_their_precisions(tmp_path: Path) -> None:
    base = bert()
    base.save_pretrained(tmp_path / "base")
    folders, tensors = [], []
    for name, rate in (("one", 0.01), ("two", 0.02)):
        trainer = train(tmp_path / name, callback=TrainerPrecision(), learning_rate=rate)
        folders.append(tmp_path / name / "checkpoint-3")
        tensors.append(live(trainer).precision)
    places = [folder / "precision" for folder in folders]
    merge(tmp_path / "base", folders, precisions=places, delta=1e-3, out=tmp_path / "merged")
    found = Folder.open(tmp_path / "merged")
    start = dict(base.named_parameters())
    for name in ("classifier.weight", "bert.embeddings.word_embeddings.weight"):
        theta = [Folder.open(folder).tensor(name) for folder in folders]
        curved = [t[name] for t in tensors]
        expected = start[name] + sum(
            (1e-3 + h) * (m - start[name]) for h, m in zip(curved, theta, strict=True)
        ) / (1e-3 + sum(curved))
        assert torch.allclose(found.tensor(name), expected, rtol=1e-5, atol=1e-7), name
        assert not torch.allclose(found.tensor(name), sum(theta) / 2, rtol=1e-3)


# ------------------------------------------------------------ what is refused, and when


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim": "sgd"}, "SGD keeps no precision"),
        ({"optim": "adafactor"}, "no precision can be read from Adafactor"),
        ({"model": "bfloat16"}, r"in torch\.bfloat16.*cannot fall"),
        ({"data": Stream()}, "no length.*n_data="),
    ],
)
def test_what_cannot_work_is_refused_when_training_begins(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    if settings.get("model"):
        settings = {"model": bert(torch.bfloat16)}
    with pytest.raises((OptimizerError, InputError), match=message):
        train(tmp_path, callback=TrainerPrecision(), **settings)
    with pytest.raises(InputError, match="n_data"):
        TrainerPrecision(n_data=0)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_stream_with_a_given_length(tmp_path: Path) -> None:
    train(tmp_path, callback=TrainerPrecision(n_data=1000), data=Stream())
    assert read_precision_record(tmp_path / "checkpoint-3" / "precision")["n_data"] == 1000


def test_a_save_that_fails_warns_and_training_goes_on(tmp_path: Path) -> None:
    class Foreign(TrainerPrecision):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "precision"
            folder.mkdir()
            (folder / "notes.txt").write_text("precious")
            super().on_save(args, state, control, **kwargs)

    with pytest.warns(UserWarning, match=r"no precision was written.*notes\.txt"):
        trainer = train(tmp_path, callback=Foreign())
    assert trainer.state.global_step == 3


# -------------------------------------------------- checkpoints of the real Trainer, as saved


def test_a_real_checkpoint_gets_the_right_names(run: Run) -> None:
    checkpoint, trainer, _ = run
    with torch.device("meta"):
        empty = BertForSequenceClassification(trainer.model.config)
    captured = from_checkpoint(checkpoint, empty, n_data=N, prior_precision=1.0)
    expected = from_optimizer(trainer.optimizer, trainer.model, n_data=N, prior_precision=1.0)
    assert list(captured.precision) == list(expected.precision)
    for name, s in expected.precision.items():
        assert torch.equal(captured.precision[name], s), name
        assert torch.equal(captured.mean[name], expected.mean[name]), name
    assert captured.record["order"].startswith("Trainer's groups")
    assert captured.record["mean_from"] == "checkpoint"


def test_weights_saved_under_other_names_get_no_precision(run: Run, tmp_path: Path) -> None:
    _, trainer, callback = run
    weights = {f"other.{n}": p.detach().clone() for n, p in trainer.model.named_parameters()}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"other names or shapes.*'bert\.embeddings"):
        callback.save(tmp_path)
    assert not (tmp_path / "precision").exists()


class Texts(Sentences):
    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_language_models_with_tied_embeddings(tmp_path: Path, kind: str) -> None:
    model = build(kind, "causal_lm", tie_word_embeddings=True)
    trainer = train(tmp_path, model=model, data=Texts(), callback=TrainerPrecision())
    stored, record = storage.read(tmp_path / "checkpoint-3" / "precision")
    expected = live(trainer).precision
    assert list(stored) == list(expected) and "lm_head.weight" not in stored
    for name, s in expected.items():
        assert torch.equal(stored[name], s), name
    (tied,) = record["tied"].values()
    assert tied == ["lm_head.weight"]
