"""Start a command, wait for its end, and say what it took.

    python -I -S launcher.py REPORT.json COMMAND ARGUMENT ...

A small process on purpose: the kernel counts the memory of whoever starts a command into the
command's own peak. What is the command's own, without the files that it maps (which the kernel
can take back), is looked at fifty times a second.
"""

import json
import os
import sys
import threading
import time


def watch(pid: int, ended: threading.Event, seen: list[int]) -> None:
    """Append the anonymous memory of a process, in bytes, until it has ended."""
    while not ended.wait(0.02):
        try:
            with open(f"/proc/{pid}/status", "rb") as file:
                lines = [line for line in file if line.startswith(b"RssAnon:")]
        except OSError:  # ended, or no such system
            return
        seen += [int(line.split()[1]) * 1024 for line in lines]


def main() -> None:
    report, command = sys.argv[1], sys.argv[2:]
    started = time.perf_counter()
    pid = os.posix_spawnp(command[0], command, os.environ)
    ended, seen = threading.Event(), [0]
    watcher = threading.Thread(target=watch, args=(pid, ended, seen))
    watcher.start()
    _, status, used = os.wait4(pid, 0)
    found = {
        "seconds": time.perf_counter() - started,
        "cpu": used.ru_utime + used.ru_stime,
        "peak": used.ru_maxrss * 1024,
        "own": max(seen),
        "major": used.ru_majflt,
        "code": os.waitstatus_to_exitcode(status),
    }
    ended.set()
    watcher.join()
    with open(report, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
