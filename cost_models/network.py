"""What it costs to hand a boundary tensor from one device to the next."""

from __future__ import annotations

from plait.cost_models.entries import local_paths
from plait.errors import UserError
from plait.spec import Cluster, Device, Link


def link_between(cluster: Cluster, a: Device, b: Device) -> Link:
    """The path from `a` to `b`: one the cluster names for the two devices, then for their hosts; inside a host the peer
    link of equal chips, then the staged path; between hosts the default network.

    Raises:
        UserError: `link-missing`, where the cluster knows no path.
    """
    for ends in ((a.id, b.id), (a.id, b.host), (a.host, b.id), (a.host, b.host)):
        for link in cluster.links:
            if (link.a, link.b) == ends:
                return link
    if a.host != b.host:
        fallback = cluster.default_link
    elif a.name == b.name and a.peer_bytes_per_s and b.peer_bytes_per_s:
        peer = local_paths().peer
        rate = min(a.peer_bytes_per_s, b.peer_bytes_per_s)
        return Link(a.id, b.id, rate, peer.latency_s, kind="peer", source=", ".join((*a.sources, peer.source)))
    else:
        fallback = cluster.local_link
    if fallback is None:
        raise UserError(
            "link-missing", f"no link leads from {a.id} on {a.host} to {b.id} on {b.host}", hint="name one under links:"
        )
    return fallback


def hop_s(link: Link, nbytes: float) -> float:
    """Seconds for one message: latency and bytes over bandwidth."""
    return link.latency_s + nbytes / link.bytes_per_s
