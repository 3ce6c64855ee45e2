"""kronfluence's EK-FAC influence on a language model, in an environment of its own.

    python run_kronfluence.py FOLDER

FOLDER holds ``model`` (a Llama) and ``texts.json`` ({"train": rows of ids, "test": …});
``scores.npy``, ``[N_train, N_test]``, is written there. It reads the model's linear layers alone:
its embeddings are left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments
from kronfluence.task import Task
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM

IGNORED = -100
BATCH = 20


class Texts(Dataset):
    """Rows of ids, filled up on the right."""

    def __init__(self, rows: list[list[int]], longest: int) -> None:
        self.rows = rows
        self.longest = longest

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.tensor(self.rows[i])
        n_missing = self.longest - len(ids)
        pad = nn.functional.pad
        return {
            "input_ids": pad(ids, (0, n_missing)),
            "attention_mask": pad(torch.ones_like(ids), (0, n_missing)),
            "labels": pad(ids, (0, n_missing), value=IGNORED),
        }


class Losses(Task):
    """The sum over tokens, for kronfluence."""

    def compute_train_loss(
        self, batch: dict[str, Tensor], model: nn.Module, sample: bool = False
    ) -> Tensor:
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        logits = logits[:, :-1].flatten(0, 1)
        labels = batch["labels"][:, 1:].flatten()
        if sample:
            drawn = torch.multinomial(logits.detach().softmax(-1), 1).flatten()
            labels = torch.where(labels == IGNORED, labels, drawn)
        return cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)

    def compute_measurement(self, batch: dict[str, Tensor], model: nn.Module) -> Tensor:
        return self.compute_train_loss(batch, model)

    def get_attention_mask(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["attention_mask"]


def main(folder: Path) -> None:
    torch.manual_seed(0)
    texts = json.loads((folder / "texts.json").read_text())
    longest = max(len(ids) for rows in texts.values() for ids in rows)
    train = Texts(texts["train"], longest)
    test = Texts(texts["test"], longest)
    task = Losses()
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model = prepare_model(model, task)
    analyzer = Analyzer(
        "peer",
        model,
        task,
        cpu=True,
        output_dir=str(folder / "work"),
        disable_tqdm=True,
        disable_model_save=True,
    )
    analyzer.fit_all_factors(
        "factors",
        train,
        per_device_batch_size=BATCH,
        factor_args=FactorArguments(strategy="ekfac"),
    )
    analyzer.compute_pairwise_scores(
        "scores",
        "factors",
        test,
        train,
        per_device_query_batch_size=BATCH,
        per_device_train_batch_size=BATCH,
    )
    scores = analyzer.load_pairwise_scores("scores")["all_modules"]
    np.save(folder / "scores.npy", scores.T.float().numpy())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
