"""``python -m blr_analysis``: the command line."""

from blr_analysis.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
