"""Start a command, wait for its end, and say what it took.

    python -I -S launcher.py REPORT.json COMMAND ARGUMENT ...

A small process on purpose: the kernel counts the memory of whoever starts a command into the
command's own peak.
"""

import json
import os
import sys
import time


def main() -> None:
    report = sys.argv[1]
    command = sys.argv[2:]
    started = time.perf_counter()
    pid = os.posix_spawnp(command[0], command, os.environ)
    _, status, used = os.wait4(pid, 0)
    found = {
        "seconds": time.perf_counter() - started,
        "cpu": used.ru_utime + used.ru_stime,
        "peak": used.ru_maxrss * 1024,
        "code": os.waitstatus_to_exitcode(status),
    }
    with open(report, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
