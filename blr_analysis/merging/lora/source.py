"""The tensors of a base with an adapter added: of plain LoRA computed piece by piece, of any other
kind merged by PEFT itself, the whole model in memory.

A tensor is cut into blocks of whole rows whose edges do not depend on what is asked for; a block
is W_0 + s·B·A in float32 (float64 where the base is), rounded once to the dtype of the answer.
Never more than the matrices of one tensor, and one block, are in memory.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import install, some
from blr_analysis.errors import ModelError
from blr_analysis.files import Folder, Owned, Scratch, Source, Spec
from blr_analysis.merging.lora.changes import AdapterChange, LoraUpdate, translate
from blr_analysis.merging.matching import same_bytes

TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "FEATURE_EXTRACTION": "AutoModel",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}
BLOCK = 2**16  # elements of W that are computed at a time, in whole rows


class AdaptedBase(Source):
    """A base and what an adapter changes of it.

    Attributes:
        changes: by the base's names, what happens to a tensor, in words; those not named are the
            base's.
        notes: what a user should be told.
    """

    def __init__(
        self,
        name: str,
        base: Source,
        changes: Mapping[str, str],
        dtype: torch.dtype | None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.name, self.changes, self.notes = name, changes, notes
        self.specs: Mapping[str, Spec] = {
            name: Spec(spec.shape, torch.promote_types(dtype or spec.dtype, spec.dtype))
            if name in changes
            else spec
            for name, spec in base.specs.items()
        }
        self.base = base

    def words(self, name: str) -> str:
        """What the adapter does to a tensor."""
        return self.changes.get(name, "")

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        """Elements ``[start, stop)``, the same bits whatever the pieces and the threads."""
        spec = self.piece(name, start, stop)
        if name not in self.changes:
            return self.base.read(name, start, stop, Owned(scratch, (self, "base")))
        piece = scratch.array((self, "piece"), stop - start, spec.dtype)
        self.fill(name, start, piece, scratch)
        return piece

    def fill(self, name: str, start: int, piece: Tensor, scratch: Scratch) -> None:
        """Write the elements of a changed tensor from ``start`` on into ``piece``."""
        raise NotImplementedError


class Streamed(AdaptedBase):
    """A plain adapter, added as it is read."""

    def __init__(
        self,
        name: str,
        base: Source,
        file: Source,
        changes: Mapping[str, AdapterChange],
        dtype: torch.dtype | None,
        notes: tuple[str, ...],
    ) -> None:
        words = {name: change.words for name, change in changes.items()}
        super().__init__(name, base, words, dtype, notes)
        self.origin = self.file = file
        self.how = changes

    def fill(self, name: str, start: int, piece: Tensor, scratch: Scratch) -> None:
        """Cut a piece out of the blocks that it touches."""
        low_rank, stop = self.how[name].low_rank, start + len(piece)
        if low_rank is None:
            piece.copy_(self._start(name, start, stop, scratch))
            return
        real = torch.promote_types(torch.float32, self.base.specs[name].dtype)
        cols = low_rank.cols
        spans = _spans(low_rank, start, stop)
        if not spans:
            return
        above, right = spans[0][0], self._right(low_rank, scratch, real)
        left = self._left(low_rank, above, spans[-1][1], scratch, real)
        for first, last in spans:
            part = left[first - above : last - above].clone()  # placed alike for all pieces
            block = torch.mm(part, right).mul_(low_rank.scale)
            there = self._start(name, first * cols, last * cols, scratch)
            flat = block.add_(there.to(real).view_as(block)).view(-1)
            low, high = max(start, first * cols), min(stop, last * cols)
            piece[low - start : high - start] = flat[low - first * cols : high - first * cols]

    def _start(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        """What a tensor is before anything is added."""
        whole, own = self.how[name].whole, Owned(scratch, (self, "base"))
        if whole is not None:
            return self.file.read(whole, start, stop, own)
        return self.base.read(name, start, stop, own).cpu()

    def _read(self, key: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        return self.file.read(key, start, stop, Owned(scratch, (self, "file")))

    def _left(
        self, low_rank: LoraUpdate, first: int, last: int, scratch: Scratch, real: torch.dtype
    ) -> Tensor:
        """[rows, r]: rows of B, or columns of A where the base is stored transposed."""
        rank = low_rank.rank
        if not low_rank.transposed:
            b = self._read(low_rank.b, first * rank, last * rank, scratch)
            return b.view(-1, rank).to(real, copy=True)
        left = torch.empty(last - first, rank, dtype=real)
        for k in range(rank):
            row = k * low_rank.rows
            left[:, k] = self._read(low_rank.a, row + first, row + last, scratch)
        return left

    def _right(self, low_rank: LoraUpdate, scratch: Scratch, real: torch.dtype) -> Tensor:
        """[r, cols]: A, or Bᵀ where the base is stored transposed."""
        key, size = low_rank.a, low_rank.rank * low_rank.cols
        if not low_rank.transposed:
            return self._read(key, 0, size, scratch).view(low_rank.rank, -1).to(real, copy=True)
        b = self._read(low_rank.b, 0, size, scratch).view(low_rank.cols, -1)
        return b.to(real).T.clone(memory_format=torch.contiguous_format)


def _spans(low_rank: LoraUpdate, start: int, stop: int) -> list[tuple[int, int]]:
    """(first row, row after the last) of the blocks that elements [start, stop) touch."""
    if start == stop:
        return []
    rows, cols = low_rank.rows, low_rank.cols
    step = max(1, BLOCK // cols)
    first = start // cols // step * step
    return [(row, min(row + step, rows)) for row in range(first, -(-stop // cols), step)]


class ByPeft(AdaptedBase):
    """What PEFT makes of the tensors that an adapter changes, and the base's others."""

    def __init__(
        self,
        name: str,
        base: Source,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype | None,
        notes: tuple[str, ...],
    ) -> None:
        super().__init__(name, base, dict.fromkeys(tensors, "merged by PEFT"), dtype, notes)
        self._tensors = tensors

    def fill(self, name: str, start: int, piece: Tensor, scratch: Scratch) -> None:
        """Copy from memory."""
        piece.copy_(self._tensors[name].view(-1)[start : start + len(piece)])


def merge_and_unload(
    folder: Path, entries: Mapping[str, Any], base: Source, file: Source
) -> dict[str, Tensor]:
    """The tensors of the base that an adapter changes, as PEFT merges them, in float32 at least.

    Raises:
        ModelError: PEFT is not installed or refuses the adapter, the base is no transformers
            model, or the merged model has other tensors than the base.
    """
    try:
        import transformers
        from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    except ImportError as error:
        raise ModelError(
            f"{str(folder)!r} is more than plain LoRA and needs peft: {install('peft')}"
        ) from error
    remedy = "merge it with PEFT's merge_and_unload() and name the saved result"
    place = Path(base.name).expanduser()
    if not (place / "config.json").is_file():
        raise ModelError(
            f"{str(folder)!r} is no plain LoRA, and {base.name!r} no transformers model: {remedy}"
        )
    floats = [s.dtype for s in base.specs.values() if s.dtype.is_floating_point]
    real = torch.float64 if torch.float64 in floats else torch.float32
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = PeftConfig.from_pretrained(str(folder))
            ignored = [k for k, v in entries.items() if v and not hasattr(config, k)]
            if ignored:
                raise ValueError(f"the installed PEFT does not know {some(ignored)}")
            kind = transformers.AutoConfig.from_pretrained(place)
            built = TASKS.get(
                entries.get("task_type", ""), (kind.architectures or ["AutoModel"])[0]
            )
            model = getattr(transformers, built).from_pretrained(
                place, dtype=real, local_files_only=True, use_safetensors=True
            )
            tuned = PeftModel.from_pretrained(model, str(folder), config=config)
            odd = get_peft_model_state_dict(tuned).keys() ^ file.specs.keys()
            if odd:
                raise ValueError(f"{some(sorted(odd))} is of the file or of the adapter alone")
            _check_ties(model, file)
            with tempfile.TemporaryDirectory() as saved:  # under the names that files have
                tuned.merge_and_unload().save_pretrained(saved)
                merged = Folder.open(Path(saved))
                tensors = {name: merged.tensor(name) for name in merged.specs}
    except Exception as error:  # whatever PEFT and transformers raise
        raise ModelError(f"PEFT cannot merge {str(folder)!r} ({error}): {remedy}") from error
    own = translate(tensors, base.specs, str(folder))
    changed = {
        own[name]: tensor
        for name, tensor in tensors.items()
        if not torch.equal(tensor, base.tensor(own[name]).to(tensor.dtype))
    }
    for name in base.specs.keys() - own.values():
        for twin in changed:
            if same_bytes(base, name, base, twin):
                raise ModelError(
                    f"{str(folder)!r} changes {twin!r}, which the base stores again as {name!r}: "
                    f"leave {name!r} out"
                )
    return changed


def _check_ties(model: Any, file: Source) -> None:
    """Raise where one of two tied layers is adapted: PEFT merges that into both."""
    weights: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        weights.setdefault(parameter.data_ptr(), []).append(name)
    tied = [name for names in weights.values() if len(names) > 1 for name in names]
    layers = {name.removesuffix(".weight").removesuffix(".base_layer") for name in tied}
    for key in file.specs:
        if "token_adapter" not in key and any(f".{layer}." in key for layer in layers):
            raise ValueError(f"{key!r} adapts one of two tied layers")
