"""The emitters of torch, one file per kind of op: each op becomes a closure, bound to weights and KV when a slice is
loaded.

`LOWERING.emit(op)` checks the op and needs neither a device nor weights; what it returns is bound by `bind` on loading
to a kernel: `kernel(step, *activations) -> tensor, or a tuple of them`. Weights, KV and batch are no activations.
"""

from plait.backends.kernels.torch_eager import attend, elementwise, experts, linear, norm, tables
from plait.backends.kernels.torch_eager.table import LOWERING, Bind, Kernel, Slice

#: Importing them fills the table.
EMITTERS = (attend, elementwise, experts, linear, norm, tables)

__all__ = ["EMITTERS", "LOWERING", "Bind", "Kernel", "Slice"]
