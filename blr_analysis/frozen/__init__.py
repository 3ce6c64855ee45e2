"""Frozen layers run once: their outputs for an example are kept for the next pass over the data.

A frozen layer is a module whose parameters do not train, and which runs before the model reads
anything that trains. It gives the same outputs for an example at any weights that an analysis
tries. If half of a model's layers are frozen, the outputs of the outermost of them are kept in
memory, a row for each example.

A pass uses kept rows only where they equal what its own frozen layers would give: in eval mode, at
the same frozen numbers, buffers and settings, for the same inputs in batches of the same shape
(padding counts). Fingerprints notice changes that nobody announces (by ``.data``, of a plain
attribute, of a row of the data), but no change inside of an object that a module refers to.

Before the first such pass, passes with and without kept rows are compared, bit for bit, at other
weights of the layers that train. Where they differ, the whole model runs in every pass: it is
random, keeps state, or hooks watch it.
"""

from __future__ import annotations

from blr_analysis.frozen.outputs import FrozenOutputs

__all__ = ["FrozenOutputs"]
