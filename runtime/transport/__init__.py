"""Moving tensors between the processes of one pipeline."""

from plait.runtime.transport.channel import INLINE_BYTES, SLOTS, Channel, PeerGoneError, socket_pair
from plait.runtime.transport.frame import DTYPES, VERSION, Frame, pack

__all__ = ["DTYPES", "INLINE_BYTES", "SLOTS", "VERSION", "Channel", "Frame", "PeerGoneError", "pack", "socket_pair"]
