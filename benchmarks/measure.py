"""Seconds and peak memory of a call; with a GPU in use, synchronised and of its memory."""

from __future__ import annotations

import ctypes
import gc
import resource
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch


def threads(n: int = 2) -> None:
    """Use ``n`` threads for everything in this process."""
    torch.set_num_threads(n)


def clock() -> float:
    """Seconds, when all that a GPU was given is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def interleaved(
    calls: dict[str, Callable[[], object]], rounds: int = 7, warm: int = 2
) -> dict[str, float]:
    """Medians of several calls taken in turn, so that a busy moment hits all of them."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warm + rounds):
        for name, call in calls.items():
            start = clock()
            call()
            if turn >= warm:
                taken[name].append(clock() - start)
    return {name: statistics.median(t) for name, t in taken.items()}


def resident() -> int:
    """Bytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_above(call: Callable[[], object]) -> int:
    """Peak bytes during one call, above what was held before it: resident, or torch's on a GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - held
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier work freed goes back, so that it counts again
    before = resident()
    highest = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.is_set():
            highest = max(highest, resident())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    call()
    highest = max(highest, resident())
    done.set()
    watcher.join()
    return max(0, highest - before)
