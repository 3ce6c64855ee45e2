"""TRL's own trainers: their losses are those of our tasks, and what callbacks keep of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers as tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.huggingface import BLRCallback, VariationalTrainer
from blr_analysis.huggingface.models import load_language_model
from blr_analysis.huggingface.questions import language_task

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]
N = 9
LONGEST = 32
MARKED = (
    "{% for m in messages %}{{ '[CLS] ' }}{% if m.role == 'assistant' %}"
    "{%- generation -%}{{ m.content }}{%- endgeneration -%}{% else %}{{ m.content }}{% endif %}"
    "{{ ' [SEP] ' }}{% endfor %}"
)
TEXTS = tiny.sentences(N, low=3)
ANSWERS = [" good book", " dull"]
SETTINGS: dict[str, Any] = {
    "max_steps": 8,
    "save_steps": 4,
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": N,
    "max_length": LONGEST,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "logging_strategy": "no",
}


@pytest.fixture
def llm(tmp_path: Path) -> Path:
    """A base, and a tokenizer with an end token and a chat template with marks."""
    model = tiny.build("llama", "causal_lm", max_position_embeddings=LONGEST)
    folder = tiny.save(tmp_path / "llm", model, pairs=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "[SEP]"
    tokenizer.model_max_length = LONGEST
    tokenizer.chat_template = MARKED
    tokenizer.save_pretrained(folder)
    return folder


def with_adapter(folder: Path, *, has_learned: bool = False) -> Any:
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj", "down_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=not has_learned,
    )
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)


def messages(question: str, answer: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer.strip()},
    ]


def trained(
    kind: Any, config: Any, model: Any, llm: Path, rows: list[Any], *callbacks: TrainerCallback
) -> Any:
    """A trainer that has trained, and has saved its model."""
    run = kind(
        model,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(llm),
        callbacks=[*callbacks],
    )
    run.train()
    run.save_model(config.output_dir)
    return run


def loss_of_trainer(run: Any) -> float:
    """Of all training rows, as the trainer computes it."""
    run.model.eval()
    (batch,) = run.get_eval_dataloader(run.train_dataset)
    with torch.no_grad():
        return float(run.compute_loss(run.model, batch))


def losses_of_task(task: blr.Task) -> torch.Tensor:
    outputs, targets = task.at(task.parameters()).run(torch.arange(task.n_data))
    return task.likelihood.nll(outputs, targets)


def written(place: Path, rows: list[Any]) -> Path:
    place.write_text("\n".join(map(json.dumps, rows)))
    return place


def answers() -> list[tuple[str, str]]:
    return [(text, ANSWERS[i % 2]) for i, text in enumerate(TEXTS)]


# Rows; the trainer's settings; whether the trainer puts the end token behind them.
FORMS: dict[str, tuple[list[Any], dict[str, Any], bool]] = {
    "texts": ([{"text": text} for text in TEXTS], {}, True),
    "answers": ([{"prompt": q, "completion": a} for q, a in answers()], {}, True),
    "messages": (
        [{"messages": messages(q, a)} for q, a in answers()],
        {"assistant_only_loss": True},
        False,
    ),
    "packed": ([{"text": text} for text in TEXTS], {"packing": True, "max_length": 20}, True),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:no factors are recorded.*one row:UserWarning")
def test_a_text_has_the_loss_of_sft(form: str, llm: Path, tmp_path: Path) -> None:
    """Its mean over tokens, padded and packed; the callback leaves what an analysis asks for."""
    rows, more, eos = FORMS[form]
    callback = BLRCallback(prior_precision=1.0)
    config = trl.SFTConfig(str(tmp_path / "out"), **{**SETTINGS, **more})
    run = trained(trl.SFTTrainer, config, with_adapter(llm), llm, rows, callback)
    file = written(tmp_path / "rows.jsonl", rows)
    task = language_task(load_language_model(tmp_path / "out"), file, eos=eos)
    n_tokens = sum(label != -100 for row in task.dataset.rows for label in row["labels"][1:])
    expected = loss_of_trainer(run)
    assert float(losses_of_task(task).sum()) / n_tokens == pytest.approx(expected, rel=1e-5)

    by_record = language_task(load_language_model(tmp_path / "out"), file)
    assert torch.equal(losses_of_task(by_record), losses_of_task(task))
    assert callback.recipe is not None
    assert callback.recipe.optimizer == "adamw"
    assert len(task.checkpoints) == 3
    is_packed = form == "packed"
    assert callback.recipe.missing == ["packing"] * is_packed
    if is_packed:
        with pytest.raises(InputError, match="no factors were recorded"):
            callback.posterior()
        return
    q = callback.posterior()
    assert q.structure == "kron"
    assert len(q.earlier) == 3
    assert bool(blr.sensitivity(task, q).self_influence.isfinite().all())


def test_weights_are_drawn_in_trls_trainer(llm: Path, tmp_path: Path) -> None:
    class Drawing(VariationalTrainer, trl.SFTTrainer):
        pass

    model = with_adapter(llm)
    weights = [p for p in model.parameters() if p.requires_grad]
    rows = datasets.Dataset.from_list(FORMS["texts"][0])
    run = Drawing(
        model,
        args=trl.SFTConfig(str(tmp_path), **{**SETTINGS, "learning_rate": 0.1}),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(llm),
        optimizers=(blr.IVON(weights, lr=0.1, ess=N), None),
    )
    run.train()
    actual = run.evaluate(draws=2)
    assert actual["eval_perplexity"] == pytest.approx(math.exp(actual["eval_loss"]), rel=1e-3)
    assert actual["eval_averaged_loss"] > 0


PAIRS = [
    {"prompt": "the film", "chosen": " was good", "rejected": " is bad dull"},
    {"prompt": "a", "chosen": " dull book", "rejected": " good"},
    {"prompt": "a film", "chosen": " dull book", "rejected": " good"},
]
MODELS = {
    "a whole model": AutoModelForCausalLM.from_pretrained,
    "a new adapter": with_adapter,
    "an adapter that had learned": lambda folder: with_adapter(folder, has_learned=True),
}


@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize("kind", MODELS)
def test_a_pair_has_the_loss_of_trls_dpo(kind: str, beta: float, llm: Path, tmp_path: Path) -> None:
    """Whatever the training began with: the callback keeps those weights as the reference."""
    out = tmp_path / "out"
    config = trl.DPOConfig(str(out), beta=beta, **SETTINGS)
    callback = BLRCallback()
    model = MODELS[kind](llm)
    with pytest.warns(UserWarning, match="no factors are recorded"):
        run = trained(trl.DPOTrainer, config, model, llm, PAIRS, callback)
    file = written(tmp_path / "pairs.jsonl", PAIRS)
    task = language_task(load_language_model(out), file)  # the callback recorded β and the end
    expected = loss_of_trainer(run)
    assert abs(expected - math.log(2)) > 1e-3  # the loss of a model that has not learned
    assert float(losses_of_task(task).mean()) == pytest.approx(expected, rel=1e-5)
    assert len(task.checkpoints) == 3
    assert task.recipe is not None
    assert task.recipe.missing == []
