"""How fast an index of texts answers, in the process and as a shell command.

    python -m benchmarks.query_cost [--texts 50000] [--questions 20] [--threads 2] [--folder DIR]

A random Llama of 42,000 parameters and random texts of 8 to 24 words: what is stored, read and
compared is as much as of a larger model's texts, at 32 kB each. ``blr-analysis index`` builds the
index. Printed are seconds of the clock and of all processors: to open the index, for the best 50
texts of each question by the index alone, to open it with its data, and for the best 50 by their
exact influence; then ``blr-analysis query``, which does all of that, and how long the same command
takes to start (a dry run, which loads the model). The folder takes 33 kB a text; ``--folder`` keeps
it: a second run goes on with the build, or asks the index that is there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.llamas import small_llama
from blr_analysis.cli.origin import SOURCE
from blr_analysis.huggingface.models import load_language_model
from blr_analysis.huggingface.questions import language_task
from blr_analysis.sensitivity import Index
from blr_analysis.sensitivity.index.stored import CONFIG

N_WORDS = 1000
SHORTEST = 8
LONGEST = 24
BEST = 50
RANK = 32768  # bytes of a text


def write_model(folder: Path) -> None:
    """A random Llama, and a tokenizer of one token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    small_llama(
        N_WORDS, width=32, layers=1, longest=LONGEST, tie_word_embeddings=True
    ).save_pretrained(folder)
    vocabulary = {f"w{number}": number for number in range(N_WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(folder)


def write_texts(file: Path, count: int, seed: int) -> None:
    """A random text a line."""
    chance = random.Random(seed)
    with open(file, "w") as lines:
        for _ in range(count):
            words = chance.choices(range(N_WORDS), k=chance.randint(SHORTEST, LONGEST))
            text = " ".join(f"w{word}" for word in words)
            lines.write(json.dumps({"text": text}) + "\n")


def processor_seconds() -> float:
    """Of this process and of those that it ran."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextmanager
def timed(label: str) -> Iterator[None]:
    """Print how long the block took."""
    start = time.perf_counter()
    processors = processor_seconds()
    yield
    seconds = time.perf_counter() - start
    of_processors = processor_seconds() - processors
    print(f"{label:<28}{seconds:6.1f} s, {of_processors:6.1f} s of processors", flush=True)


def command(threads: int, *arguments: object) -> None:
    """``blr-analysis`` with these arguments, in a process of its own."""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "blr_analysis", *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.DEVNULL,
        check=True,
    )


def show_times(folder: Path, n_questions: int, threads: int) -> None:
    """Print how long the questions take, in this process and in the shell."""
    index_folder = folder / "index"
    questions_file = folder / "questions.jsonl"
    loaded = load_language_model(folder / "model")
    questions = language_task(loaded, questions_file)
    with timed("open"):
        index = Index.open(index_folder)
    with timed(f"best {BEST} of {n_questions}"):
        index.top(questions, BEST, harmful=False)
    with timed("read the texts"):
        origin = json.loads((index_folder / SOURCE).read_text())
        texts = language_task(loaded, folder / "texts.jsonl", mark=origin["mark"])
    with timed("open with the data"):
        index = Index.open(index_folder, task=texts)
    with timed(f"best {BEST}, refined"):
        index.top(questions, BEST, refine=BEST, harmful=False)
    with timed("query, in the shell"):
        command(threads, "query", index_folder, questions_file)
    with timed("its start"):
        command(threads, "query", index_folder, questions_file, "--dry-run", "--refine", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=50_000)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        index_folder = folder / "index"
        if not (index_folder / CONFIG).is_file():
            write_model(folder / "model")
            write_texts(folder / "texts.jsonl", asked.texts, seed=1)
            write_texts(folder / "questions.jsonl", asked.questions, seed=2)
            with timed("build"):
                command(
                    asked.threads,
                    "index",
                    folder / "model",
                    folder / "texts.jsonl",
                    "--out",
                    index_folder,
                    "--rank",
                    RANK,
                )
        show_times(folder, asked.questions, asked.threads)


if __name__ == "__main__":
    main()
