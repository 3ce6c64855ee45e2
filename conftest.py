"""The package comes first: pytest runs a module a second time whose parents it has to import."""

import blr_analysis  # noqa: F401
