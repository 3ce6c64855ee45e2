"""The files beside its weights that a merged model takes over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from blr_analysis.files.headers import read_json

# What tells a model how to run, or its user what it is allowed to do.
CONFIG = (
    "config.json",
    "generation_config.json",
    "configuration_*.py",
    "modeling_*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenization_*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def copy_files(
    reference: Path,
    tokenizer: Path,
    target: Path,
    dtype: torch.dtype | None,
    change: Callable[[dict[str, Any]], object] | None = None,
) -> dict[str, str]:
    """Copy configuration, tokenizer and chat template; the fate of every file comes back.

    Weights, indices of weights, cards, optimizer states and whatever else a folder holds stay
    where they are. ``dtype``, where given, is written into the copied configuration.
    """
    fates: dict[str, str] = {}
    for folder, patterns in ((reference, CONFIG), (tokenizer, TOKENIZER)):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if any(fnmatch(path.name, p) for p in patterns):
                _copy(path, target / path.name)
                fates[path.name] = f"copied from {str(folder)!r}"
            elif folder == reference and not any(fnmatch(path.name, p) for p in TOKENIZER):
                fates.setdefault(path.name, "left where it is")
    config = target / "config.json"
    if config.is_file() and (dtype is not None or change is not None):
        document = read_json(config)
        if dtype is not None:
            key = "torch_dtype" if "torch_dtype" in document else "dtype"
            document[key] = str(dtype).removeprefix("torch.")
        if change is not None:
            change(document)
        config.write_text(
            json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    return fates


def write_union(tokenizer: Mapping[str, Any], target: Path) -> None:
    """Put ``tokenizer.json`` of several models in place of the copied one."""
    for name in ("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "added_tokens.json"):
        (target / name).unlink(missing_ok=True)
    text = json.dumps(tokenizer, ensure_ascii=False)
    (target / "tokenizer.json").write_text(text, encoding="utf-8")
    config = target / "tokenizer_config.json"
    document = read_json(config) if config.is_file() else {}
    if "added_tokens_decoder" in document:
        known = {
            str(t["id"]): {k: v for k, v in t.items() if k != "id"}
            for t in tokenizer["added_tokens"]
        }
        document["added_tokens_decoder"] = {**known, **document["added_tokens_decoder"]}
        config.write_text(json.dumps(document, indent=2, ensure_ascii=False), encoding="utf-8")


def _copy(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, target)
    else:
        shutil.copyfile(path, target)  # follows links, as a hub's cache is made of them
