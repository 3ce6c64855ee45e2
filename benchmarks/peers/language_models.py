"""Peers' scores of a language model's training texts: halves retrained, or planted facts.

    python benchmarks/peers/language_models.py FOLDER METHOD [METHOD ...] [--threads 1]

in an environment with the METHOD's package (``requirements/peers-NAME.txt``); FOLDER is what
``benchmarks.language_halves train --out`` or tutorial 6 wrote. Writes ``FOLDER/METHOD.safetensors``
(``scores`` ``[N, M]``, for ``language_halves score --peer METHOD=FILE``); of tutorial 6's facts it
prints how far in front each question's source is. Settings are the packages' own but for those
that stand below. Bergson reads the blocks' linear layers, kronfluence also a read-out that is not
tied to the word table, dattri-LLM all layers that it knows.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

LONGEST = 2048  # tokens in one pass
EKFAC = (
    "ekfac",
    "--method",
    "kfac",
    "--hessian_cfg.ev_correction",
    "--preprocess_cfg.ev_correction",
)
CG = ("--solver", "cg", "--num_steps", "5", "--astra.batch_size", "64")
GLOBAL = ("--projection_target", "global", "--projection_dim", "128")  # fewer than texts
BERGSON = {
    "bergson-ekfac": EKFAC,
    "bergson-ekfac-cg": (*EKFAC, *CG),
    "bergson-trackstar": ("trackstar",),
    "bergson-trak": ("trak", "--loss_fn", "log_odds", *GLOBAL),
}
# On a CPU its conjugate gradients write into a file that is mapped to be read: SIGSEGV.
STARTED = """
from bergson import __main__
from bergson.hessians import astra
found = astra.numpy_to_tensor
astra.numpy_to_tensor = lambda rows: found(rows.copy())
__main__.main()
"""
Rows = list[dict[str, list[int]]]  # input_ids, labels: -100 where no loss is


def read(folder: Path) -> tuple[Path, Rows, Rows]:
    """The model's folder, the training texts and the questions."""
    if (folder / "data.safetensors").is_file():
        data = load_file(folder / "data.safetensors")
        rows = [{"input_ids": row, "labels": row} for row in data["ids"].tolist()]
        n = data["inside"].shape[1]
        return folder / "model-0", rows[:n], rows[n:]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "llm")
    texts, questions = lines(folder / "train.jsonl"), lines(folder / "questions.jsonl")

    def row(prompt: str, text: str) -> dict[str, list[int]]:
        found = tokenizer(prompt + text, return_offsets_mapping=True)
        ids, places = found["input_ids"], found["offset_mapping"]
        keep = [e > len(prompt) for _, e in places]
        return {
            "input_ids": ids,
            "labels": [i if k else -100 for i, k in zip(ids, keep, strict=True)],
        }

    asked = [row(q["prompt"], q["answer"]) for q in questions]
    return folder / "llm", [row("", t["text"]) for t in texts], asked


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def loaded(folder: Path) -> Any:
    """The model, or the adapter on its base; what is trained requires gradients."""
    if (folder / "adapter_config.json").is_file():
        from peft import AutoPeftModelForCausalLM

        return AutoPeftModelForCausalLM.from_pretrained(
            folder, is_trainable=True, dtype=torch.float32
        ).eval()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def layers(model: nn.Module) -> list[str]:
    """The trained linear layers; of tied word tables none."""
    tied = model.config.tie_word_embeddings  # type: ignore[union-attr]
    return [
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and m.weight.requires_grad and not (tied and "lm_head" in name)
    ]


def padded(rows: Rows) -> list[dict[str, Tensor]]:
    longest = max(len(r["input_ids"]) for r in rows)
    filled = {"input_ids": 0, "labels": -100}
    found = []
    for row in rows:
        room = longest - len(row["input_ids"])
        each = {k: torch.tensor(row[k] + [fill] * room) for k, fill in filled.items()}
        each["attention_mask"] = (torch.arange(longest) < longest - room).long()
        found.append(each)
    return found


def logits_of(model: Any, batch: Any) -> Tensor:
    read = {k: batch[k] for k in ("input_ids", "attention_mask")}
    return model(**read, use_cache=False).logits[:, :-1].flatten(0, 1)


def loss(model: Any, batch: Any) -> Tensor:
    """Summed over all words that count."""
    return F.cross_entropy(
        logits_of(model, batch), batch["labels"][:, 1:].flatten(), reduction="sum"
    )


def bergson(method: str, place: Path, train: Rows, asked: Rows) -> Tensor:
    import numpy as np
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    work = Path(tempfile.mkdtemp())
    shutil.copytree(place, work / "model")
    config = work / "model/config.json"
    if config.is_file():  # it packs texts into one pass up to the length that the model reads
        about = {**json.loads(config.read_text()), "max_position_embeddings": LONGEST}
        config.write_text(json.dumps(about))
    made = Tokenizer(models.WordLevel({"w": 0}, unk_token="w"))  # asked for, of no use here
    PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=LONGEST, unk_token="w", pad_token="w"
    ).save_pretrained(work / "model")
    for name, rows in {"train": train, "query": asked}.items():
        (work / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = work / "run"
    command = [sys.executable, "-c", STARTED, BERGSON[method][0], str(run)]
    command += [*BERGSON[method][1:], "--model", str(work / "model"), "--overwrite"]
    command += ["--data.dataset", str(work / "train.jsonl")]
    command += ["--query.dataset", str(work / "query.jsonl"), "--query.aggregation", "none"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    subprocess.run(command, check=True, env={**os.environ, **offline, **threads})
    about = json.loads((run / "scores/info.json").read_text())
    kept = np.memmap(run / "scores/scores.bin", dtype=np.dtype(about["dtype"]), mode="r")
    columns = [kept[f"score_{j}"] for j in range(about["num_scores"])]
    return torch.tensor(np.stack(columns, axis=1))


def kronfluence(method: str, place: Path, train: Rows, asked: Rows) -> Tensor:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    model = loaded(place)

    class Words(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            if not sample:
                return loss(model, batch)
            z = logits_of(model, batch)
            with torch.no_grad():
                drawn = z.softmax(-1).multinomial(1).flatten()
            drawn = drawn.masked_fill(batch["labels"][:, 1:].flatten() == -100, -100)
            return F.cross_entropy(z, drawn, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return loss(model, batch)

        def get_influence_tracked_modules(self) -> list[str]:
            return names

        def get_attention_mask(self, batch: Any) -> Tensor:
            return batch["attention_mask"]

    names = layers(model)
    task, quiet = Words(), {"cpu": True, "disable_tqdm": True, "disable_model_save": True}
    ready = prepare_model(model, task)
    analyzer = Analyzer("x", ready, task, output_dir=tempfile.mkdtemp(), **quiet)  # type: ignore[arg-type]
    data, questions = padded(train), padded(asked)
    strategy = FactorArguments(strategy="ekfac")
    analyzer.fit_all_factors("f", data, per_device_batch_size=8, factor_args=strategy)  # type: ignore[arg-type]
    how = ScoreArguments(damping_factor=None) if method.endswith("heuristic") else ScoreArguments()
    batches: Any = {"per_device_query_batch_size": 8, "per_device_train_batch_size": 8}
    analyzer.compute_pairwise_scores(
        "s",
        "f",
        questions,
        data,
        score_args=how,
        **batches,  # type: ignore[arg-type]
    )
    found: Any = analyzer.load_pairwise_scores("s")
    return found["all_modules"].mT


def dattri(method: str, place: Path, train: Rows, asked: Rows) -> Tensor:
    from dattri_llm import (
        AttributionArguments,
        AttributionTask,
        EKFACAttributor,
        TracInAttributor,
    )

    model = loaded(place)
    task = AttributionTask(loss, model)
    options: Any = {"output_dir": tempfile.mkdtemp()}
    kind: Any = TracInAttributor if method == "dattri-cosine" else EKFACAttributor
    how: dict[str, Any] = {
        "dattri-cosine": {"normalized_grad": True},
        "dattri-ekfac": {},
        "dattri-ekfac-relative": {"damping": 0.1, "relative_damping": True},
    }[method]
    attributor = kind(AttributionArguments(**options), task=task)
    scores = attributor.attribute(padded(train), padded(asked), **how)
    return scores.agnostic_matrix()[1]


METHODS = {
    **dict.fromkeys(BERGSON, bergson),
    **dict.fromkeys(("kronfluence", "kronfluence-heuristic"), kronfluence),
    **dict.fromkeys(("dattri-cosine", "dattri-ekfac", "dattri-ekfac-relative"), dattri),
}


def recall(scores: Tensor, questions: list[dict[str, Any]], method: str) -> None:
    """Rows of tutorial 6's table; the source of fact k is text 4k."""
    for kind in dict.fromkeys(q["words"] for q in questions):
        asked = [j for j, q in enumerate(questions) if q["words"] == kind]
        columns = scores[:, asked]
        true = columns[[4 * questions[j]["fact"] for j in asked], range(len(asked))]
        better, tied = (columns > true).sum(0), (columns == true).sum(0)
        places = better + (tied + 1) / 2
        found = [(places <= 1).float(), (places <= 5).float(), 1 / places]
        print(f"| {method} | {kind} | {' | '.join(f'{x.mean():.2f}' for x in found)} |")


def used() -> float:
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, who))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("methods", nargs="+", choices=METHODS)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    place, train, asked = read(args.folder)
    for method in args.methods:
        start, began = used(), time.perf_counter()
        scores = METHODS[method](method, place, train, asked).float().contiguous()
        if scores.shape != (len(train), len(asked)):  # equal texts are one to some
            raise SystemExit(f"{method}: scores of {scores.shape} for {len(train)} × {len(asked)}")
        save_file({"scores": scores}, args.folder / f"{method}.safetensors")
        seconds = time.perf_counter() - began
        print(
            f"{method}: {used() - start:.0f} seconds of CPU, {seconds:.0f} by the clock", flush=True
        )
        if (args.folder / "questions.jsonl").is_file():
            recall(scores, lines(args.folder / "questions.jsonl"), method)


if __name__ == "__main__":
    main()
