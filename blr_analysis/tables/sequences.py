"""One row per sequence, or per token of one."""

from __future__ import annotations

import numpy as np
import pandas as pd

from blr_analysis.sensitivity.sequences import SequenceLeaveOneOut, SequenceScores
from blr_analysis.sensitivity.tokens import TokenScores
from blr_analysis.tables._columns import array_of, frame_of

__all__ = ["sequence_leave_one_out_table", "sequence_scores_table", "token_scores_table"]


def sequence_scores_table(scores: SequenceScores) -> pd.DataFrame:
    """One row per sequence, in the order of the dataset.

    ============== ========================================================== ==============
    column         what                                                       more is
    ============== ========================================================== ==============
    index          position in the dataset
    tokens         how many tokens count
    loss           ℓ_i, summed over those tokens, nats                        worse fitted
    loss_per_token loss / tokens, nats                                        worse fitted
    self_influence g_iᵀΣg_i, first-order rise of ``loss``, nats               more influential
    …              the user's metadata; a name taken above gets the suffix ``_metadata``
    ============== ========================================================== ==============

    Group them with ``table.groupby("speaker")[["tokens", "self_influence"]].sum()``.
    """
    columns = {
        "index": np.arange(len(scores)),
        "tokens": array_of(scores.tokens),
        "loss": array_of(scores.losses),
        "loss_per_token": array_of(scores.losses / scores.tokens),
        "self_influence": array_of(scores.self_influence),
    }
    return frame_of(columns, scores.metadata)


def sequence_leave_one_out_table(loo: SequenceLeaveOneOut) -> pd.DataFrame:
    """One row per sequence: its loss without it and with it, summed over its tokens.

    Columns: index, tokens, loss, loss_before, loss_per_token, loss_per_token_before (nats),
    correction (always "first_order"), then the user's metadata.
    """
    columns = {
        "index": np.arange(len(loo)),
        "tokens": array_of(loo.tokens),
        "loss": array_of(loo.losses),
        "loss_before": array_of(loo.losses_before),
        "loss_per_token": array_of(loo.losses / loo.tokens),
        "loss_per_token_before": array_of(loo.losses_before / loo.tokens),
        "correction": np.asarray(loo.correction, dtype=object),
    }
    return frame_of(columns, loo.metadata)


def token_scores_table(tokens: TokenScores) -> pd.DataFrame:
    """One row per token that counts.

    Columns: index (running number), sequence, position, target (token id), loss, change (the
    first-order rise of the loss without the sequence), loss_without, all in nats, then the
    metadata of the sequence.
    """
    columns = {
        "index": np.arange(len(tokens)),
        "sequence": array_of(tokens.sequence),
        "position": array_of(tokens.position),
        "target": array_of(tokens.target),
        "loss": array_of(tokens.losses),
        "change": array_of(tokens.change),
        "loss_without": array_of(tokens.losses_without),
    }
    return frame_of(columns, tokens.metadata)
