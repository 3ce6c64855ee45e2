"""Small language models and taggers in float64, and sequences of unequal length for them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from models import randomised, seeded
from torch import Tensor, nn
from torch.utils.data import DataLoader

from blr_analysis.task import Task

VOCABULARY = 7
IGNORED = -100


class TinyLM(nn.Module):
    """Embeddings, a block of (causal) attention and an MLP with norms, a read-out."""

    def __init__(
        self,
        *,
        causal: bool = True,
        tied: bool = False,
        library: bool = False,
        vocabulary: int = VOCABULARY,
        width: int = 4,
        longest: int = 12,
        classes: int | None = None,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(longest, width)
        self.before, self.between, self.after = (nn.LayerNorm(width) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True) if library else None
        self.qkv = None if library else nn.Linear(width, 3 * width)
        self.mix = None if library else nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.read = nn.Linear(width, classes or vocabulary, bias=not tied)
        if tied:
            self.read.weight = self.words.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        t = input_ids.shape[1]
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        places = (attention_mask.cumsum(1) - 1).clamp_min(0)  # as models do that are padded left
        x = self.words(input_ids) + self.places(places)
        hidden = attention_mask[:, None, None, :] == 0
        if self.causal:
            hidden = hidden | torch.ones(t, t, dtype=torch.bool, device=hidden.device).triu(1)
        hidden = hidden.expand(-1, 1, t, t) & ~torch.eye(t, dtype=torch.bool, device=hidden.device)
        x = x + self._mixed(self.before(x), hidden)
        x = x + self.down(F.gelu(self.up(self.between(x))))
        return SimpleNamespace(logits=self.read(self.after(x)), past_key_values=None)

    def _mixed(self, x: Tensor, hidden: Tensor) -> Tensor:
        if self.attention is not None:
            mask = hidden.squeeze(1).repeat_interleave(2, 0)
            return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        assert self.qkv is not None
        assert self.mix is not None
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)
        return self.mix(mixed.transpose(1, 2).flatten(2))


def tiny_lm(seed: int = 0, **settings: int | bool | None) -> TinyLM:
    """In float64 eval mode with generic weights."""
    with seeded(seed):
        return randomised(TinyLM(**settings))  # type: ignore[arg-type,return-value]


def sequences(n: int, *, vocabulary: int = VOCABULARY) -> list[Tensor]:
    """Random token ids, 3 to 9 each."""
    g = torch.Generator().manual_seed(n)
    lengths = torch.randint(3, 10, (n,), generator=g).tolist()
    return [torch.randint(0, vocabulary, (k,), generator=g) for k in lengths]


def task_of(
    model: nn.Module,
    ids: Sequence[Tensor],
    labels: Sequence[Tensor] | None = None,
    *,
    likelihood: str = "causal_lm",
    n_extra: int = 0,
    left: bool = False,
    mask: bool = True,
    batch_size: int = 4,
    metadata: Any = None,
) -> Task:
    """A task on padded dictionaries, with or without mask; labels are the ids unless given."""

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        longest = max(len(r["input_ids"]) for r in rows) + n_extra
        batch = {}
        for name, fill in {"input_ids": 0, "labels": IGNORED, "attention_mask": 0}.items():
            gaps = [longest - len(r[name]) for r in rows]
            sides = [(gap, 0) if left else (0, gap) for gap in gaps]
            pairs = zip(rows, sides, strict=True)
            batch[name] = torch.stack([F.pad(r[name], side, value=fill) for r, side in pairs])
        return {n: x for n, x in batch.items() if mask or n != "attention_mask"}

    pairs = zip(ids, labels or ids, strict=True)
    rows: Any = [
        {"input_ids": x, "labels": y, "attention_mask": torch.ones_like(x)} for x, y in pairs
    ]
    loader = DataLoader(rows, batch_size=batch_size, collate_fn=collate)
    return Task(model, loader, likelihood=likelihood, batch_size=batch_size, metadata=metadata)


def token_gradients(
    model: nn.Module, ids: Tensor, labels: Tensor, shift: bool = True
) -> tuple[Tensor, Tensor]:
    """Losses ``[t]`` and gradients ``[t, P]`` of the tokens of one sequence that count, by itself
    and unpadded, one backward pass each."""
    logits = model(ids.unsqueeze(0)).logits[0]
    if shift:
        logits, labels = logits[:-1], labels[1:]
    counted = labels != IGNORED
    losses = F.cross_entropy(logits[counted], labels[counted], reduction="none")
    options: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    rows = [torch.autograd.grad(loss, list(model.parameters()), **options) for loss in losses]
    return losses.detach(), torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def with_prompts(ids: Sequence[Tensor]) -> list[Tensor]:
    """Labels that are the ids, but for the first of every sequence and one inside."""
    labels = [x.clone() for x in ids]
    for row in labels:
        row[[0, 2] if len(row) > 4 else [0]] = IGNORED
    return labels


def tags(ids: Sequence[Tensor]) -> list[Tensor]:
    """A class for every token, every fourth ignored."""
    actual = [(x * 5 + torch.arange(len(x))) % 3 for x in ids]
    for row in actual:
        row[3::4] = IGNORED
    return actual
