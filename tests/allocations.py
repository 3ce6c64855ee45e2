"""The memory that torch's CPU allocator hands out."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that is held during one call above what was held before; the same on every run."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    held = highest = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    assert highest > 0, "this build of torch records no allocations"
    return highest
