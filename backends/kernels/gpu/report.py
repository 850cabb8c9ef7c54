"""What report.json says of the kernels of a slice."""

from __future__ import annotations

from typing import Any

from plait.backends.kernels.gpu.archs import Arch
from plait.backends.kernels.gpu.pick import Made


def rows(made: Made, arch: Arch) -> list[dict[str, Any]]:
    """One row per kernel and kind of launch, in the order of the plan."""
    found = []
    for use, choice in made.choices:
        facts, prediction = choice.binary.facts, choice.prediction
        found.append(
            {
                "kernel": choice.variant.kernel,
                "op": use.op,
                "launches": use.launches,
                "rows": "any" if use.most is None else f"up to {use.most}",
                "sizes": dict(use.sizes),
                "types": dict(choice.variant.types),
                "constants": dict(choice.variant.constants),
                "tile": dict(choice.variant.tile.constants),
                "num_warps": choice.binary.num_warps,
                "num_stages": choice.variant.tile.num_stages,
                "arch": arch.name,
                "code_bytes": len(choice.binary.code),
                "registers": facts.registers,
                "spills": facts.spills,
                "shared_bytes": facts.shared_bytes,
                "blocks_per_unit": facts.blocks,
                "occupancy": facts.warps / arch.most_warps,
                "limited_by": facts.limit,
                "matrix_instruction": max(facts.matrix, key=lambda name: facts.matrix[name], default=None),
                "widest_load_bytes": facts.widest_load_bytes,
                "flops": prediction.flops,
                "bytes": prediction.nbytes,
                "predicted_us": round(prediction.total_us, 2),
                "bound_by": prediction.bound_by,
                "why": choice.reason,
                "checks": {"failed": [{"name": f.name, "why": f.why} for f in choice.failures]},
            }
        )
    return found
