"""What devices can do, and what a model asks of them.

Names, targets and clusters come from `plait.cost_models.catalogue` and `plait.cost_models.cluster_file`, which import
nothing heavy; a model's profile from `plait.cost_models.profile`, times from `roofline`, bytes from `memory`, hops from
`network`.
"""

from plait.cost_models.catalogue import cluster_for, devices, lookup, resolve
from plait.cost_models.cluster_file import load_cluster

__all__ = ["cluster_for", "devices", "load_cluster", "lookup", "resolve"]
