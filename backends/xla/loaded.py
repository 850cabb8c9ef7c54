"""Loading what compile made: the programs of a slice on the devices they were made for.

Programs are in PJRT's own serialised form, and go in through the client directly: JAX's way wraps them in a pickle,
which an artifact from somewhere else must not bring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plait.backends.base import LoadOptions
from plait.backends.xla.arrays import arguments, function, output_specs, sharding, spec, specs
from plait.backends.xla.buckets import Buckets, Shape
from plait.backends.xla.program import Program
from plait.backends.xla.record import Attention, Record, StoredProgram, read_record, versions
from plait.errors import ArtifactError, UnsupportedError


@dataclass(frozen=True)
class Programs:
    """What a slice's folder holds for this platform.

    Attributes:
        record: None where it holds nothing for it.
        stale: why the programs cannot be used and XLA compiles here instead; empty where they can.
    """

    record: Record | None = None
    stale: str = ""

    @property
    def chips(self) -> int:
        return 1 if self.record is None else self.record.group_size

    @property
    def attention(self) -> Attention:
        return "gather" if self.record is None else self.record.attention

    @property
    def buckets(self) -> Buckets:
        return Buckets() if self.record is None else self.record.buckets

    @property
    def usable(self) -> Record | None:
        return None if self.stale else self.record

    def pages(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """Pages of a layer by KV class: programs have theirs, at least as many as are wanted."""
        return dict(wanted) if self.usable is None else dict(self.usable.pages)

    def formats(self, program: Program, mesh: Mesh) -> list[Format] | list[NamedSharding]:
        """Where and how the weights lie."""
        shardings = [sharding(mesh, place) for place in specs(program)[0]]
        if self.usable is None:
            return shardings
        stored = self.usable.weights
        if [weight.layers for weight in stored] != [weight.layers for weight in program.weights]:
            raise ArtifactError(
                "xla-weights", "programs.json lists other weights than the slice's module has", hint="compile again"
            )
        return [
            Format(Layout(weight.order, weight.tiling or None), place)
            for weight, place in zip(stored, shardings, strict=True)
        ]

    def load(self, folder: Path, program: Program, mesh: Mesh, wide: bool) -> dict[Shape, LoadedProgram]:
        """Every program, by its shape."""
        if self.usable is None:
            return {}
        return {
            stored.shape: _load(folder, stored, program, mesh, self.usable, wide) for stored in self.usable.programs
        }


def find(folder: Path, options: LoadOptions) -> Programs:
    """The programs in a slice's folder that are for this platform.

    Raises:
        UnsupportedError: `tpu-kind`, `tpu-count`: they are for other devices than there are here, or for more.
    """
    record = read_record(folder)
    if record is None or record.platform != jax.default_backend():
        return Programs()
    devices = jax.local_devices()
    if devices[0].device_kind != record.device_kind:
        raise UnsupportedError(
            "tpu-kind",
            f"the slice was compiled for {record.device_kind}, and this host has {devices[0].device_kind}",
            hint="compile again for this host's kind",
        )
    if len(devices) < record.group_size:
        raise UnsupportedError(
            "tpu-count",
            f"the slice was compiled for {record.group_size} devices, and this host has {len(devices)}",
            hint="compile again for a smaller group",
        )
    return Programs(record, _stale(record, options))


def _stale(record: Record, options: LoadOptions) -> str:
    here = versions(record.platform)
    if here != record.versions:
        made, now = (", ".join(f"{name} {v}" for name, v in sorted(found.items())) for found in (record.versions, here))
        return f"made by {made}; here is {now}"
    if options.page_tokens != record.page_tokens:
        return f"made for pages of {record.page_tokens} tokens"
    short = [name for name, count in options.pages.items() if count > record.pages.get(name, 0)]
    return f"made for fewer pages of {short[0]}" if short else ""


@dataclass(frozen=True)
class LoadedProgram:
    """One program on its devices; called like the jitted `arrays.function`."""

    executable: Any
    mesh: Mesh
    results: tuple[Any, ...]
    places: tuple[PartitionSpec, ...]
    names: tuple[str, ...] = field(default=())

    def __call__(self, weights: list[jax.Array], pools: list[jax.Array], *step: Any) -> Any:
        """The outputs by name, and the pools: the old ones are donated."""
        whole = sharding(self.mesh, spec())
        facts = jax.device_put(jax.tree.leaves(step), whole)
        made = self.executable.execute_sharded([*weights, *pools, *facts]).disassemble_into_single_device_arrays()
        arrays = [
            jax.make_array_from_single_device_arrays(kind.shape, sharding(self.mesh, place), parts)
            for kind, place, parts in zip(self.results, self.places, made, strict=True)
        ]
        return dict(zip(self.names, arrays, strict=False)), arrays[len(self.names) :]


def _load(
    folder: Path, stored: StoredProgram, program: Program, mesh: Mesh, record: Record, wide: bool
) -> LoadedProgram:
    devices = tuple(mesh.devices.flat)
    # A program is bound to the devices it was made on, unless it is told which ones these are.
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(devices)
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id for device in devices]]))
    options.executable_build_options.use_spmd_partitioning = True
    try:
        executable = devices[0].client.deserialize_executable(
            (folder / stored.file).read_bytes(),
            executable_devices=xla_client.DeviceList(devices),
            compile_options=options,
        )
    except (OSError, jax.errors.JaxRuntimeError) as error:
        raise ArtifactError(
            "xla-program", f"{stored.file} cannot be loaded", why=str(error).splitlines()[0], hint="compile again"
        ) from error
    kinds = arguments(program, stored.shape, record.pages, wide)
    outputs, pools = jax.eval_shape(function(program, mesh), *kinds)
    names = tuple(sorted(outputs))
    places = output_specs(program)
    return LoadedProgram(
        executable,
        mesh,
        (*(outputs[name] for name in names), *pools),
        (*(places[name] for name in names), *specs(program)[1]),
        names,
    )
