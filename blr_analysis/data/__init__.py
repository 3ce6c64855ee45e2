"""The data of a task: examples by index, in the dataset's own order, the same on every visit.

Datasets, loaders, tensors and tables are read into :class:`Examples`. Data without an index, and
data that change from one visit to the next, are refused here with the remedy. The outputs and
targets of a forward pass are checked here too, before a likelihood sees them.
"""

from __future__ import annotations

from blr_analysis.data.examples import Examples
from blr_analysis.data.reading import read_data
from blr_analysis.data.row_labels import chosen_indices

__all__ = ["Examples", "chosen_indices", "read_data"]
