"""The words of topics as a table."""

from __future__ import annotations

import pandas as pd

from blr_analysis.learning_rule.inference.topics import TopicWords


def topics_table(topics: TopicWords) -> pd.DataFrame:
    """One row per topic and word, the most probable first.

    Returns:
        Columns: topic (from 0), rank (from 1), word, probability (E[β_kw]).
    """
    rows = [
        (topic, rank, word, probability)
        for topic, pairs in enumerate(zip(topics.words, topics.probabilities, strict=True))
        for rank, (word, probability) in enumerate(zip(*pairs, strict=True), start=1)
    ]
    return pd.DataFrame(rows, columns=["topic", "rank", "word", "probability"])
