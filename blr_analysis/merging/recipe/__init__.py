"""What to merge with what, as YAML that users of mergekit can read at once."""

from __future__ import annotations

from blr_analysis.merging.recipe.read import Recipe, read_recipe

__all__ = ["Recipe", "read_recipe"]
