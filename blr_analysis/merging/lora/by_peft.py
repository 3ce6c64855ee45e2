"""Adapters that are more than plain LoRA, merged by PEFT itself, the whole model in memory."""

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
from blr_analysis.files import Folder, Scratch, Source
from blr_analysis.merging.lora.changes import translate
from blr_analysis.merging.lora.source import AdaptedBase
from blr_analysis.merging.matching import same_bytes

TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "FEATURE_EXTRACTION": "AutoModel",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}


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
