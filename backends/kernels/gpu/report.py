"""What report.json says of the kernels of a slice."""

from __future__ import annotations

from typing import Any

from plait.backends.base import CompileOptions
from plait.backends.kernels.gpu.archs import Arch
from plait.backends.kernels.gpu.choose import Choice
from plait.backends.kernels.gpu.facts import expectations
from plait.backends.kernels.gpu.loader import require_triton, source_digest
from plait.backends.kernels.gpu.pick import Made, coded_name
from plait.backends.kernels.gpu.steps import steps
from plait.backends.kernels.gpu.table import KERNELS

#: What every binary is checked for; see `plait.backends.kernels.gpu.facts`.
_CHECKS = ("arch", "spills", "shared-memory", "registers", "occupancy", "arguments")


def _checks(choice: Choice, arch: Arch) -> dict[str, Any]:
    """What a binary was checked for, and what of it is not so."""
    variant = choice.variant
    expected = expectations(KERNELS[variant.kernel], variant, arch)
    asked = {"matrix": expected.matrix, "matrix-type": expected.matrix_type, "narrow-loads": expected.load_bytes}
    names = (*_CHECKS, *(name for name, wanted in asked.items() if wanted))
    failed = {failure.name: failure.why for failure in choice.failures}
    return {"passed": [name for name in names if name not in failed], "failed": failed}


def report(made: Made, arch: Arch, options: CompileOptions) -> dict[str, Any]:
    """The plan in numbers, `kernels`, a row for each kind of launch, and `steps`, what whole steps would take."""
    return {
        "launches": len(made.plan.steps),
        "arena_bytes": made.plan.arena_bytes,
        "weight_bytes": sum(weight.nbytes for weight in made.plan.weights.values()),
        "versions": {"triton": require_triton()},
        "kernels": rows(made, arch),
        "steps": steps(made.plan, made.code, options),
    }


def _measured(choice: Choice) -> dict[str, Any] | None:
    """The time of one launch, where it was measured."""
    if choice.measured is None:
        return None
    return {"us": round(choice.measured.best.us, 2), "on": choice.measured.device}


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
                "file": coded_name(choice.variant.kernel, choice.binary),
                "source": source_digest(KERNELS[choice.variant.kernel].source),
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
                "measured": _measured(choice),
                "why": choice.reason,
                "checks": _checks(choice, arch),
            }
        )
    return found
