"""The nouns: frozen dataclasses without behaviour, YAML and JSON in and out, digests.

Units stand in the field names (`_bytes`, `_s`, `_tokens`, `_per_s`).
"""

from plait.spec.capability import Capability, Support
from plait.spec.cluster import Cluster, Device, Link
from plait.spec.codec import digest, from_dict, from_json, from_yaml, to_dict, to_json, to_yaml
from plait.spec.estimate import Cause, Estimate, MemoryEstimate, Source
from plait.spec.kv import KVLayout, kv_class, ring_pages
from plait.spec.manifest import FORMAT_VERSION, Boundary, Manifest, ManifestSlice
from plait.spec.plan import IdleDevice, Objective, Plan, PlannedSlice, Prediction, QuantKind
from plait.spec.target import Target, parse_target, parse_targets
from plait.spec.weight import Encoding, Packing, Piece, Rows, WeightRef, map_parts, parts
from plait.spec.workload import WORKLOADS, Workload

__all__ = [
    "FORMAT_VERSION",
    "WORKLOADS",
    "Boundary",
    "Capability",
    "Cause",
    "Cluster",
    "Device",
    "Encoding",
    "Estimate",
    "IdleDevice",
    "KVLayout",
    "Link",
    "Manifest",
    "ManifestSlice",
    "MemoryEstimate",
    "Objective",
    "Packing",
    "Piece",
    "Plan",
    "PlannedSlice",
    "Prediction",
    "QuantKind",
    "Rows",
    "Source",
    "Support",
    "Target",
    "WeightRef",
    "Workload",
    "digest",
    "from_dict",
    "from_json",
    "from_yaml",
    "kv_class",
    "map_parts",
    "parse_target",
    "parse_targets",
    "parts",
    "ring_pages",
    "to_dict",
    "to_json",
    "to_yaml",
]
