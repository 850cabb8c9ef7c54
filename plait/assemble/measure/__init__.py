"""`plait profile`: what a device of this machine takes for plait's own ops, as its backend runs them.

Nothing here knows a kernel. Slices of one op, once and several times over, are compiled and loaded through the
backend's contract; the difference of their steps is the op, what is left of the small one is the step. So every backend
is measured the same way. (It has run on the host's CPU; on a GPU or a TPU it has not.)
"""

from plait.assemble.measure.here import measure_here

__all__ = ["measure_here"]
