"""The page's walk in the shell, from three LoRA adapters to a model and to an adapter."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from pathlib import Path

import pytest
import tiny_transformers as tiny
import torch
from commands import run
from torch import nn

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
SECTION = "## Three LoRA adapters\n"
BLOCK = re.compile(r"^```(yaml|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> dict[str, str]:
    """The recipe and the commands of the section, as the page shows them."""
    page = (ROOT / "docs" / "merging.md").read_text(encoding="utf-8")
    section = page.split(SECTION)[1].split("\n## ")[0]
    return dict(BLOCK.findall(section))


def write_adapter(folder: Path, base: nn.Module, seed: int) -> None:
    """An adapter of rank 2, with random A and B."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(copy.deepcopy(base), config)
    torch.manual_seed(seed)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) / 3
    tuned.save_pretrained(str(folder))


# Writes down every command of a script, and the recipe as it is when the command runs.
NOTED = """blr-analysis() {
    echo "$@" >> commands.txt
    cp adapters.yml "recipe$(wc -l < commands.txt).yml"
}
"""


def commands_of(script: str, folder: Path) -> list[list[str]]:
    """The arguments of the commands that a script runs, as bash expands them."""
    subprocess.run(["bash", "-euc", NOTED + script], cwd=folder, check=True)
    return [line.split() for line in (folder / "commands.txt").read_text().splitlines()]


@pytest.mark.slow
def test_the_page_merges_three_adapters_with_the_prediction_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny.build("llama", "causal_lm")
    tiny.save(tmp_path / "base", base)
    for k in (1, 2, 3):
        write_adapter(tmp_path / f"lora{k}", base, k)
        rows = [json.dumps({"text": text}) for text in tiny.sentences(40, seed=k)]
        (tmp_path / f"train{k}.jsonl").write_text("\n".join(rows))
    shown = blocks()
    recipe = tmp_path / "adapters.yml"
    recipe.write_text(shown["yaml"])
    monkeypatch.chdir(tmp_path)
    printed = ""
    for number, arguments in enumerate(commands_of(shown["sh"], tmp_path), 1):
        recipe.write_bytes((tmp_path / f"recipe{number}.yml").read_bytes())
        code, output, errors = run(capsys, *arguments)
        assert code == 0, errors
        printed += output
    assert "as a share of the move back to the base" in printed  # grams say no sizes
    assert printed.index("Forecast") < printed.index("rank keeps 100.0%")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "merged_adapter"))
    weights = adapted.merge_and_unload().state_dict()
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=1e-4)
