"""Bergson's scores for the model and passages of ``benchmarks.language_halves``.

    python benchmarks/peers/bergson_halves.py FOLDER ekfac|trackstar

in an environment with bergson (and graphviz); FOLDER is what ``language_halves train --out`` wrote.
Writes ``FOLDER/METHOD.safetensors`` for ``language_halves score --peer``, and prints CPU seconds.
Everything is left as Bergson sets it; only blocks' linear layers are read, as it does.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FITTED = ("--method", "kfac", "--hessian_cfg.ev_correction", "--preprocess_cfg.ev_correction")
METHODS = {
    "ekfac": ("ekfac", *FITTED),
    "trackstar": ("trackstar",),
}
LONGEST = 4096  # tokens: it packs passages into one pass up to the length that the model reads


def written(folder: Path) -> Path:
    """The model, a tokenizer of words that are numbers, and the passages as texts."""
    place = folder / "bergson"
    shutil.copytree(folder / "model-0", place / "model", dirs_exist_ok=True)
    config = json.loads((place / "model/config.json").read_text())
    config["max_position_embeddings"] = LONGEST
    (place / "model/config.json").write_text(json.dumps(config))
    words = {f"w{i}": i for i in range(config["vocab_size"])}
    built = Tokenizer(models.WordLevel(words, unk_token="w0"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict.fromkeys(("unk_token", "pad_token", "eos_token"), "w0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, model_max_length=LONGEST, **special)
    tokenizer.save_pretrained(place / "model")
    data = load_file(folder / "data.safetensors")
    n = data["inside"].shape[1]
    for name, rows in (("train", data["ids"][:n]), ("query", data["ids"][n:])):
        lines = [json.dumps({"text": " ".join(f"w{i}" for i in row)}) for row in rows.tolist()]
        (place / f"{name}.jsonl").write_text("\n".join(lines))
    return place


def main() -> None:
    folder, method = Path(sys.argv[1]), sys.argv[2]
    place = written(folder)
    run = place / method
    command = [sys.executable, "-m", "bergson", METHODS[method][0], str(run)]
    command += [*METHODS[method][1:], "--model", str(place / "model"), "--overwrite"]
    command += ["--data.dataset", str(place / "train.jsonl")]
    command += ["--query.dataset", str(place / "query.jsonl"), "--query.aggregation", "none"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, check=True, env={**os.environ, **offline})
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    about = json.loads((run / "scores/info.json").read_text())
    kept = np.memmap(run / "scores/scores.bin", dtype=np.dtype(about["dtype"]), mode="r")
    scores = np.stack([kept[f"score_{j}"] for j in range(about["num_scores"])], axis=1)
    save_file({"scores": torch.tensor(scores)}, folder / f"{method}.safetensors")
    print(f"{method}: {used.ru_utime + used.ru_stime:.0f} seconds of CPU, importing included")


if __name__ == "__main__":
    main()
