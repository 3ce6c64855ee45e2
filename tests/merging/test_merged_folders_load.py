"""A merged folder is a model for transformers, with everything that its base brings along.

Loaders that serve models, such as vLLM's, read the files that the index names, tensor by tensor,
and choose the model by ``architectures``.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers as tiny
import torch
from safetensors import safe_open

import blr_analysis as blr

transformers = pytest.importorskip("transformers")

TEMPLATE = "{% for message in messages %}{{ message['content'] }}<end>{% endfor %}"


@pytest.mark.parametrize("is_tied", [False, True])
def test_tokens_template_and_generation_are_the_bases(tmp_path: Path, is_tied: bool) -> None:
    tokenizer = tiny.tokenizer(segments=False)
    tokenizer.add_tokens(["<end>"])
    tokenizer.chat_template = TEMPLATE
    base = tiny.build("llama", "causal_lm", tie_word_embeddings=is_tied)
    base.resize_token_embeddings(len(tokenizer))
    base.generation_config.max_new_tokens = 7
    models = []
    for t in range(2):
        model = copy.deepcopy(base)
        torch.manual_seed(t)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        models.append(model)
    folders = [tmp_path / name for name in ("base", "one", "two")]
    for folder, model in zip(folders, [base, *models], strict=True):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    arguments: dict[str, Any] = {"method": "linear", "max_shard_bytes": 1000}
    out = blr.merge(folders[0], folders[1:], **arguments, out=tmp_path / "out").folder

    names = [name for name, _ in base.named_parameters()]  # a tied head is stored once
    assert names_by_the_index(out) == sorted(names)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    for name, values in loaded.named_parameters():
        pair = [dict(model.named_parameters())[name] for model in models]
        torch.testing.assert_close(values, (pair[0] + pair[1]) / 2)
    embedding = loaded.get_input_embeddings().weight
    assert (loaded.get_output_embeddings().weight is embedding) == is_tied
    assert loaded.generation_config.max_new_tokens == 7
    words = transformers.AutoTokenizer.from_pretrained(out)
    assert words.convert_tokens_to_ids("<end>") == len(words) - 1 == len(embedding) - 1
    assert words.chat_template == TEMPLATE


def names_by_the_index(folder: Path) -> list[str]:
    """The tensors in the files that the index names; each is in the file that it says."""
    place_of = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len({*place_of.values()}) > 1
    names = []
    for file in sorted({*place_of.values()}):
        with safe_open(folder / file, "pt") as tensors:
            names += tensors.keys()
            assert all(place_of[name] == file for name in tensors.keys())  # noqa: SIM118
    assert {*names} == place_of.keys()
    return sorted(names)
