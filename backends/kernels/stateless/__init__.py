"""A slice as a torch module without state, for export: weights, step and KV go in, results and KV come out.

Shapes are fixed: S sequences bring T new tokens each and have room for C tokens of KV. The new tokens are the last of
their sequence, at positions `kv_lens - T ... kv_lens - 1`. Activations are (S * T, width) as everywhere in the IR; KV
is contiguous, (S, C, heads, head_dim), and each layer's new K and V are put in their places. Of a latent attention
there is K alone.
"""

from plait.backends.kernels.stateless import attend, dense, experts
from plait.backends.kernels.stateless.module import Argument, StatelessSlice
from plait.backends.kernels.stateless.table import LOWERING, Shape

#: Importing them fills the table.
EMITTERS = (attend, dense, experts)

__all__ = ["EMITTERS", "LOWERING", "Argument", "Shape", "StatelessSlice"]
