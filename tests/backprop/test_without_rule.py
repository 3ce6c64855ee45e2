"""What no layer rule reads is named once, with its share of the time; ordinary models are quiet."""

from __future__ import annotations

import re
import warnings

import pytest
from models import Case, seeded
from readings import jacobian_of, task_of
from zoo import CASES

NAMED = {
    "prelu": r"'layer\.weight'",
    "mobilenet": None,
    "resnet": None,
    "convnext": r"'scale'",
    "forward_never_called": r"'gain'",
}


@pytest.mark.parametrize("name", NAMED)
def test_what_has_no_rule_is_named_once(name: str) -> None:
    with seeded(0):
        case: Case = CASES[name]()
    task = task_of(case)
    words = NAMED[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jacobian_of(task, 3)
        jacobian_of(task, 3)
    messages = [str(w.message) for w in caught if "no layer rule" in str(w.message)]
    assert len(messages) == (words is not None)
    if words is not None:
        share = re.search(rf"{words}.* (\d+)% of a sweep's time", messages[0])
        assert share is not None
        assert 0 < int(share[1]) <= 100
