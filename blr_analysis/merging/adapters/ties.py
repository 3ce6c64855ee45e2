"""Output layers tied to the embedding: one tensor on disk, two uses in the model.

PEFT adapts the two uses apart. A merged model that keeps them tied is then not the one that was
trained (``merge_and_unload`` returns it all the same), so only changes that are the same for
both are taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from blr_analysis.errors import ModelError
from blr_analysis.files import Scratch, Source
from blr_analysis.merging.adapters.config import AdapterConfig
from blr_analysis.merging.adapters.names import Grouped, near

PIECE = 2**20  # elements at a time
HEADLESS_TASKS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
HEADLESS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "Model",
)
HEADS = ("LMHeadModel", "HeadsModel")
INPUTS = {"embed", "embed_in", "embed_tokens", "embedding", "embeddings", "shared", "wte"}
INPUTS |= {"tok_embeddings", "token_embedding", "word_embedding", "word_embeddings"}
OUTPUTS = {"decoder", "embed_out", "lm_head", "output", "output_projection"}
NO_TOKENS = ("position", "token_type", "segment", "wpe", "patch")


@dataclass(frozen=True)
class Said:
    """What the configuration beside a base says of its output layer, where there is one.

    Attributes:
        architecture: the class that it was saved from.
        tied: ``tie_word_embeddings``.
    """

    architecture: str | None = None
    tied: bool | None = None

    @classmethod
    def of(cls, base: Source) -> Said:
        """Read ``config.json`` in the base's folder."""
        place = Path(base.name).expanduser()
        if not place.exists():  # a model in memory
            return cls()
        try:
            folder = place if place.is_dir() else place.parent
            said = json.loads((folder / "config.json").read_text("utf-8"))
            inner = said.get("text_config") or {}
            tied = said.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
            name = (said.get("architectures") or [None])[0]
        except (OSError, ValueError, AttributeError, TypeError):
            return cls()
        return cls(name if isinstance(name, str) else None, tied if tied in (True, False) else None)

    @property
    def headless(self) -> bool:
        """Whether a model of this class has no output layer over tokens."""
        name = self.architecture or ""
        return name.endswith(HEADLESS) and not name.endswith(HEADS)


def same(source: Source, one: str, other: str) -> bool:
    """Whether two tensors of a source agree to the last bit, compared piece by piece."""
    spec = source.specs[one]
    if spec != source.specs[other]:
        return False
    mine, theirs = Scratch(), Scratch()
    for start in range(0, spec.numel, PIECE):
        stop = min(start + PIECE, spec.numel)
        pieces = source.read(one, start, stop, mine), source.read(other, start, stop, theirs)
        if not torch.equal(*(piece.view(torch.uint8) for piece in pieces)):
            return False
    return True


def drop_tied_heads(
    config: AdapterConfig, found: Grouped, adapter: Source, base: Source
) -> set[str]:
    """Forget what the file says of an output layer that the base does not store, where it says
    the same of the embedding.

    Returns:
        The embeddings of which it does: their modules, where the matrices are the same, and
        their tensors, where whole tensors are.
    """
    tied = set()
    inputs = [name for name in found.whole if _last(name) in INPUTS and near(name, base.specs)]
    for head in [n for n in found.whole if _last(n) in OUTPUTS and not near(n, base.specs)]:
        for name in inputs:
            if same(adapter, found.whole[head], found.whole[name]):
                tied.add(name)
                del found.whole[head]
                break
    for head in [m for m in found.low_rank if not near(f"{m}.weight", base.specs)]:
        parts = found.low_rank[head]
        for module, other in found.low_rank.items():
            if "A of embedding" in other and set(parts) == {"A", "B"}:
                pairs = (parts["A"], other["B of embedding"]), (parts["B"], other["A of embedding"])
                turned = all(torch.equal(adapter.tensor(x), adapter.tensor(y).T) for x, y in pairs)
                if turned and config.scaling(head) == config.scaling(module):
                    tied.add(module)
                    del found.low_rank[head]
                    break
    return tied


def refuse_tied(
    config: AdapterConfig,
    found: Grouped,
    own: Mapping[str, str],
    tied: set[str],
    base: Source,
    said: Said,
) -> None:
    """Refuse a change of the embedding alone where the base ties its output layer to it."""
    if said.tied is False:
        return
    matrices = [m for m, parts in found.low_rank.items() if "A of embedding" in parts]
    for name in (own[n] for n in own if _last(n) in INPUTS | OUTPUTS):
        for twin in base.specs:
            if twin != name and same(base, twin, name):
                raise ModelError(
                    f"the adapter {config.folder!r} changes {name!r}, and the base stores the same "
                    f"again as {twin!r}: are they tied? If so, leave {twin!r} out of the base "
                    "(save_pretrained does), if not, say tie_word_embeddings=false in its "
                    "config.json."
                )
    whole = [
        name
        for name in found.whole
        if _last(name) in INPUTS
        and any(f".{saved}." in f".{name}" for saved in config.modules_to_save)
    ]
    for changed in sorted({*matrices, *whole} - tied):
        name = own[changed if changed in own else f"{changed}.weight"]
        if _may_be_tied(name, config, base, said):
            raise ModelError(
                f"the adapter {config.folder!r} changes {name!r}, to which the base's output layer "
                "is tied, without changing the output layer: no tied model is what was trained. "
                "Save the base untied (its output layer as a tensor of its own, "
                "tie_word_embeddings=False), or train with ensure_weight_tying=True. Where the "
                "model has no such layer, set task_type in adapter_config.json."
            )


def _may_be_tied(name: str, config: AdapterConfig, base: Source, said: Said) -> bool:
    if any(word in name for word in NO_TOKENS) or config.task_type in HEADLESS_TASKS:
        return False
    if config.task_type is None and said.headless:
        return False
    shape = base.specs[name].shape
    return not any(spec.shape == shape for other, spec in base.specs.items() if other != name)


def _last(name: str) -> str:
    """The last word of the module whose weight this is; empty for other tensors."""
    return name.removesuffix(".weight").rpartition(".")[2] if name.endswith(".weight") else ""
