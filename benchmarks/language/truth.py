"""Retrainings by a case's recipe, kept on disk: what is there is not trained again."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import blr_analysis as blr
from benchmarks.language import cases
from benchmarks.truth import store
from blr_analysis.huggingface.tokens import Tokens
from blr_analysis.sensitivity.training import trained

HALVES = 24
FOLDS = 10
SEEDS = {"halves": (10, 11), "sources": (10,), "folds": (10,)}
PART = 20  # texts in a forward pass


def text_losses(model: nn.Module, data: Tokens) -> Tensor:
    """The sum over the tokens of each text, in nats, ``[N]``."""
    sums = []
    for start in range(0, len(data), PART):
        rows = [data[i] for i in range(start, min(start + PART, len(data)))]
        batch = data.collate(rows)
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])[0]
        losses = cross_entropy(logits[:, :-1].mT, batch["labels"][:, 1:], reduction="none")
        sums.append(losses.double().sum(1))
    return torch.cat(sums)


def task_of(
    model: nn.Module,
    data: cases.Texts,
    checkpoints: blr.Checkpoints | None = None,
    recipe: blr.Recipe | None = None,
) -> blr.Task:
    """A model and texts."""
    tokens = data.tokens()
    loader: DataLoader = DataLoader(tokens, batch_size=cases.BATCH, collate_fn=tokens.collate)  # type: ignore[arg-type]
    return blr.Task(
        model,
        loader,
        likelihood="causal_lm",
        checkpoints=checkpoints,
        recipe=recipe,
        metadata={"source": data.sources},
        progress=False,
    )


def halves(n: int) -> Tensor:
    """Which texts each random half has, bool ``[HALVES, N]``."""
    generator = torch.Generator().manual_seed(7)
    return torch.stack([torch.randperm(n, generator=generator) < n // 2 for _ in range(HALVES)])


def folds(n: int) -> list[Tensor]:
    """The texts of each fold."""
    return list(torch.randperm(n, generator=torch.Generator().manual_seed(5)).chunk(FOLDS))


@dataclass(frozen=True)
class Kind:
    """Trainings that differ in the texts they keep.

    Attributes:
        subsets: which texts each of them has, bool ``[K, N]``.
        losses: of the test texts after each, ``[seeds, K, M]``.
        own_losses: of the training texts after each, ``[seeds, K, N]``.
        seconds: of a training, on average.
    """

    subsets: Tensor
    losses: Tensor
    own_losses: Tensor
    seconds: float


class Truths:
    """What retraining gives; each kind is trained when it is first asked for."""

    def __init__(self, name: str, task: blr.Task, folder: Path) -> None:
        self.name = name
        self.task = task
        self.folder = folder / name.replace(" ", "_")
        facts = f"{task.recipe} {cases.CASES[name]} {task.n_data} {cases.WIDTH} {cases.VOCABULARY}"
        self.hash = hashlib.sha256(facts.encode()).hexdigest()[:16]

    def subsets(self, kind: str) -> Tensor:
        """Which texts each training of a kind has, bool ``[K, N]``."""
        n = self.task.n_data
        if kind == "halves":
            return halves(n)
        train, _ = cases.texts()
        if kind == "sources":
            groups = [
                torch.tensor([source == name for source in train.sources]) for name in cases.SOURCES
            ]
        else:
            groups = [torch.isin(torch.arange(n), fold) for fold in folds(n)]
        return ~torch.stack(groups)

    def read(self, kind: str, seeds: Iterable[int] | None = None) -> Kind:
        """All trainings of a kind; those that are missing are done."""
        subsets = self.subsets(kind)
        files = [
            [self._retrained(kind, k, subset, seed) for k, subset in enumerate(subsets)]
            for seed in seeds or SEEDS[kind]
        ]
        seconds = [file.record["seconds"] for of_seed in files for file in of_seed]
        losses, own_losses = (
            torch.stack([torch.stack([file.tensors[name] for file in row]) for row in files])
            for name in ("losses", "own_losses")
        )
        return Kind(subsets, losses, own_losses, sum(seconds) / len(seconds))

    def _retrained(self, kind: str, k: int, subset: Tensor, seed: int) -> store.Stored:
        path = self.folder / f"{kind}-{seed}-{k}.safetensors"
        stored = store.read(path, self.hash)
        if stored is not None:
            return stored
        start = time.process_time()
        indices = subset.nonzero().flatten()
        recipe = self.task.recipe
        assert recipe is not None
        state = trained(self.task.quiet, [(self.task, indices, indices)], recipe, seed)
        model = cases.llama()
        model.load_state_dict(state, strict=False)
        model.eval()
        train, test = cases.texts()
        tensors = {
            "losses": text_losses(model, test.tokens()),
            "own_losses": text_losses(model, train.tokens()),
        }
        seconds = time.process_time() - start
        store.write(path, tensors, {"hash": self.hash, "seconds": seconds})
        mean = float(tensors["losses"].mean())
        print(f"{path.stem}: {mean:.2f} nats a text, {seconds:.1f} s", file=sys.stderr, flush=True)
        return store.Stored(tensors, {"seconds": seconds})
