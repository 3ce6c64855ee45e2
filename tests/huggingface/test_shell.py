"""From a training with checkpoints to the commands of the shell: ``index``, ``query``, ``audit``
and ``what-if`` of the folder that the Trainer wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers as tiny
from commands import refused, run
from transformers import Trainer, TrainingArguments

import blr_analysis as blr
from blr_analysis.huggingface import CheckpointsCallback, IVONTrainer
from blr_analysis.posterior.recognition import OTHER_WEIGHTS

N = 9
HALF = "index/posterior.safetensors"  # an index stands at a checkpoint of its training
WAYS: dict[str, Any] = {
    "callback": (Trainer, [CheckpointsCallback]),
    "IVON": (IVONTrainer, []),
    "checkpoint-*": (Trainer, []),
}


def trained(folder: Path, way: str) -> Path:
    """A language model that a Trainer trained on sentences, and the sentences."""
    kind, callbacks = WAYS[way]
    texts = tiny.sentences(N, low=5, high=5)
    rows = [{"text": text, "source": "ab"[i % 2]} for i, text in enumerate(texts)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, rows[:2])))
    ids = tiny.tokenizer(pairs=False)(texts).input_ids
    model = tiny.build("llama", "causal_lm", tie_word_embeddings=True)
    folder_of_model = folder / "lm"
    arguments: dict[str, Any] = {
        "num_train_epochs": 8,
        "per_device_train_batch_size": N,
        "save_steps": 1,
        "learning_rate": 0.1 if kind is IVONTrainer else 1e-3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    kind(
        model,
        TrainingArguments(str(folder_of_model), **arguments),
        train_dataset=[{"input_ids": i, "labels": i} for i in ids],
        callbacks=[callback() for callback in callbacks],
    ).train()
    tiny.save(folder_of_model, model, pairs=False)
    return folder_of_model


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_trainers_folder_is_indexed_queried_and_audited(
    way: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of_model = trained(tmp_path, way)
    monkeypatch.chdir(tmp_path)
    fit = ("--fit", "diag", "--prior-precision", 1)
    assert run(capsys, "index", "lm", "data.jsonl", *fit, "--out", "index")[0] == 0
    stored = blr.Index.open("index").posterior
    assert "checkpoint" in stored.record  # it stands at half of the run
    code, output, err = run(capsys, "query", "index", "asked.jsonl", "--top", 1)
    assert code == 0 and output, err
    another_checkpoint = f"{folder_of_model.name}/checkpoint-4"
    tiny.tokenizer(pairs=False).save_pretrained(another_checkpoint)
    query = ("query", "index", "asked.jsonl", "--top", 1, "--model", another_checkpoint)
    assert "weights" in refused(capsys, *query)

    question = ("--remove", "source == 'a'", "--solver", "posterior")
    plain = run(capsys, "what-if", "lm", "data.jsonl", *fit, *question)
    half = run(capsys, "what-if", "lm", "data.jsonl", "-p", HALF, *question)
    assert plain[0] == half[0] == 0, half[2]
    assert OTHER_WEIGHTS[4:] not in plain[1] + plain[2]
    assert OTHER_WEIGHTS in half[2]
    assert OTHER_WEIGHTS[4:] in " ".join(half[1].split())
    argv = ("lm", "data.jsonl", "--by", "none")
    code, output, err = run(capsys, "audit", *argv, *fit, "--out", "whole")
    assert code == 0 and OTHER_WEIGHTS[4:] not in " ".join(output.split()), err
    code, output, err = run(capsys, "audit", *argv, "-p", HALF, "--out", "half")
    assert code == 0 and OTHER_WEIGHTS[4:] in " ".join(output.split()), err
    assert OTHER_WEIGHTS[4:] in (tmp_path / "half" / "report.html").read_text()
