"""What a model would be if a group of examples were gone, new or relabelled: by one step, a
descent, a short replay of its training, or trainings of the user's own."""

from blr_analysis.sensitivity.groups.adapt import Adapted, adapt
from blr_analysis.sensitivity.groups.perturbed import ByClass, WhatIf
from blr_analysis.sensitivity.groups.what_if import what_if, what_if_each

__all__ = ["Adapted", "ByClass", "WhatIf", "adapt", "what_if", "what_if_each"]
