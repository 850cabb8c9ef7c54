"""The process that compiles: `python -m plait.backends.xla.build FOLDER`.

It reads `request.json` and `slice.mlir` from the folder and puts the slice's files into `out` there, or `error.json`
beside them. No device is touched: libtpu describes the chips, JAX lowers for them and libtpu compiles.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh
from xdsl.dialects.builtin import ModuleOp

from plait.backends.xla.arrays import arguments, function, mesh_of, sharding, spec, specs
from plait.backends.xla.buckets import Shape
from plait.backends.xla.chips import CHIPS
from plait.backends.xla.fit import check_fit, too_large
from plait.backends.xla.hlo import count
from plait.backends.xla.program import COMPILER_OPTIONS, Program
from plait.backends.xla.record import (
    FILE,
    Attention,
    Bounds,
    Record,
    StoredProgram,
    StoredWeight,
    buckets_of,
    name_of,
    pages_of,
    shapes_of,
    versions,
)
from plait.backends.xla.split import split_module
from plait.errors import PlaitError
from plait.ir import Step, read_module
from plait.ir.module import ops
from plait.spec import from_dict, to_json

MOST_AT_ONCE = 4
"""Programs compiled at the same time; each takes some hundred MB."""


@dataclass(frozen=True)
class Request:
    """What is asked of the process.

    Attributes:
        platform: `tpu`, or `cpu` for code that this host runs.
        scan: whether equal blocks are scanned; tests compare with what comes without.
    """

    arch: str
    attention: Attention
    options: Bounds
    platform: str = "tpu"
    scan: bool = True


def build(module: ModuleOp, request: Request) -> dict[str, bytes]:
    """The files of a slice: programs, their HLO, `programs.json`, and `report.json` for the slice's report.

    Raises:
        FitError: a program takes more memory than a device has.
        UnsupportedError: the slice cannot be split, or cannot take this attention.
    """
    options = request.options
    split = split_module(module, options.group_size)
    program = Program(module, options.page_tokens, split, attention=request.attention, scan=request.scan)
    pages, buckets = pages_of(program.windows, options), buckets_of(options)
    shapes = shapes_of(buckets, program.has_logits)
    wide = request.platform == "cpu"
    if not wide:
        check_fit(program, shapes, pages, CHIPS[request.arch])
    mesh = mesh_of(devices_of(request))
    maker = Maker(program, mesh, request)
    wanted = [arguments(program, shape, pages, wide) for shape in shapes]
    # The first program, a decode of many, says how weights lie in memory; the others take them as they are.
    made = [maker.make(wanted[0], None)]
    formats = made[0].input_formats[0][0]
    _tell(1, shapes)
    with ThreadPoolExecutor(min(MOST_AT_ONCE, os.cpu_count() or 1)) as pool:
        for compiled in pool.map(lambda one: maker.make(one, formats), wanted[1:]):
            made.append(compiled)
            _tell(len(made), shapes)
    files = {}
    for shape, compiled in zip(shapes, made, strict=True):
        files[f"{name_of(shape)}.{request.platform}"] = compiled.runtime_executable().serialize()
        files[f"{name_of(shape)}.hlo.gz"] = gzip.compress(compiled.as_text().encode(), mtime=0)
    record = Record(
        platform=request.platform,
        device_kind=mesh.devices.flat[0].device_kind,
        versions=versions(request.platform),
        group_size=options.group_size,
        attention=request.attention,
        page_tokens=options.page_tokens,
        pages=pages,
        sequences=buckets.sequences,
        queries=buckets.queries,
        keys=buckets.keys,
        weights=tuple(
            StoredWeight(weight.layers, tuple(form.layout.major_to_minor), tuple(form.layout.tiling or ()))
            for weight, form in zip(program.weights, formats, strict=True)
        ),
        programs=tuple(
            StoredProgram(f"{name_of(s)}.{request.platform}", s.sequences, s.queries, s.keys, s.every_row)
            for s in shapes
        ),
    )
    files[FILE] = (to_json(record) + "\n").encode()
    rows = {
        name_of(shape): _row(module, shape, compiled, request) for shape, compiled in zip(shapes, made, strict=True)
    }
    layouts = {
        " ".join(weight.key): _layout(form.layout) for weight, form in zip(program.weights, formats, strict=True)
    }
    report = {"programs": rows, "weight_layouts": layouts, "versions": record.versions, "pages": pages}
    return files | {"report.json": json.dumps(report).encode()}


def _tell(done: int, shapes: Sequence[Shape]) -> None:
    """A line of progress, for `aot`."""
    print(done, len(shapes), name_of(shapes[done - 1]), flush=True)


@dataclass(frozen=True)
class Maker:
    """Compiles one slice's function for arguments of several shapes."""

    program: Program
    mesh: Mesh
    request: Request

    def make(self, kinds: tuple[Any, ...], formats: Sequence[Format] | None) -> Any:
        """Compile for arguments like `kinds`; `formats` of the weights, None leaves their layouts to XLA."""
        weight_specs, pool_specs = specs(self.program)
        if formats is None:
            formats = [Format(Layout.AUTO, sharding(self.mesh, place)) for place in weight_specs]
        whole = sharding(self.mesh, spec())
        pools = [sharding(self.mesh, place) for place in pool_specs]
        jitted = jax.jit(
            function(self.program, self.mesh),
            in_shardings=(list(formats), pools, whole, whole, whole, whole),
            donate_argnums=1,
            keep_unused=True,
            compiler_options=COMPILER_OPTIONS,
        )
        try:
            with jax.set_mesh(self.mesh):  # Pallas asks it which chip this is for
                return jitted.lower(*kinds).compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error) and self.request.platform == "tpu":
                raise too_large(CHIPS[self.request.arch], self.request.arch, str(error)) from error
            raise


def devices_of(request: Request) -> list[Any]:
    """The group's devices: described, or this host's where it is for the host."""
    count = request.options.group_size
    if request.platform != "tpu":
        here: list[Any] = jax.local_devices()[:count]
        return here
    from jax.experimental.topologies import get_topology_desc

    chip = CHIPS[request.arch]
    name = chip.topologies[count]
    bounds = [int(size) for size in name.partition(":")[2].split("x")]
    found = get_topology_desc(name, "tpu", chips_per_host_bounds=[*bounds, 1, 1][:3], **(chip.options or {}))
    devices: list[Any] = list(found.devices)[:count]
    return devices


def _row(module: ModuleOp, shape: Shape, compiled: Any, request: Request) -> dict[str, object]:
    """What the report says of a program, on one device: `flops` and `moved_bytes` (what must move at least once) are
    the IR's over the group's size.

    libtpu's cycles leave out copies that run beside the compute, so a step takes at least what moving its bytes takes.
    """
    memory = compiled.memory_analysis()
    counts = count(compiled.as_text())
    kv = (shape.keys,) * shape.sequences
    step = Step((shape.queries,) * shape.sequences, kv, shape.sequences if shape.queries == 1 else 1)
    costs, chips = [op.cost(step) for op in ops(module)], request.options.group_size
    flops, moved = sum(cost.flops for cost in costs) / chips, sum(cost.bytes for cost in costs) / chips
    row: dict[str, object] = {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "flops": flops,
        "moved_bytes": moved,
        "collectives": dict(sorted(counts.collectives.items())),
    }
    if request.platform == "tpu":
        chip = CHIPS[request.arch]
        compute, memory_ms = counts.cycles / chip.clock_ghz / 1e6, moved / chip.gb_per_s / 1e6
        row |= {
            "estimated_cycles": counts.cycles,
            "estimated_ms": round(max(compute, memory_ms), 4),
            "bound_by": "compute" if compute > memory_ms else "memory",
        }
    return row


def _layout(layout: Layout) -> str:
    """`0,2,1 T(8,128)(2,1)`: dimensions from slow to fast, and tiles."""
    tiles = "".join(f"({','.join(map(str, tile))})" for tile in layout.tiling or ())
    return ",".join(map(str, layout.major_to_minor)) + (f" T{tiles}" if tiles else "")


def main(folder: Path) -> None:
    # Paths of this installation in the programs' debug information would make their bytes depend on it.
    jax.config.update(  # type: ignore[no-untyped-call]
        "jax_hlo_source_file_canonicalization_regex", ".*/"
    )
    request = from_dict(Request, json.loads((folder / "request.json").read_text("utf-8")))
    start = time.monotonic()
    try:
        files = build(read_module(folder / "slice.mlir"), request)
    except PlaitError as error:
        rows = getattr(error, "rows", ())
        text = {"kind": type(error).__name__, "rows": list(rows), **error.to_dict()}
        (folder / "error.json").write_text(json.dumps(text), "utf-8")
        return
    for name, data in files.items():
        (folder / "out" / name).write_bytes(data)
    (folder / "seconds").write_text(f"{time.monotonic() - start:.3f}", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
