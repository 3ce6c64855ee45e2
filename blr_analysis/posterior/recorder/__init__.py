"""Kronecker factors of the curvature, collected by hooks while a model trains.

    model trains ─ tape ─► a recorded pass ─ drawn labels ─► gradients at every layer's outputs
                 ─ collected ─► several passes at once ─ layer terms ─► A_i, G_i ─► means

``recorder`` decides which passes are recorded and runs the rest; ``recordable`` says what it can
see in a model, ``rows`` which rows of a layer belong to which example, ``states`` what is saved.
"""

from blr_analysis.posterior.recorder.recordable import in_bytes as in_bytes
from blr_analysis.posterior.recorder.recordable import is_recordable as is_recordable
from blr_analysis.posterior.recorder.recorder import KroneckerRecorder as KroneckerRecorder
from blr_analysis.posterior.recorder.states import COUNTS as COUNTS
from blr_analysis.posterior.recorder.states import between as between
