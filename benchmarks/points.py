"""Measured points: rows of `data/measured.csv` joined to the profile of their model and to their device."""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from plait.cost_models.cases import Point
from plait.cost_models.catalogue import device_of, lookup
from plait.cost_models.op_time import Shard
from plait.cost_models.profile import ModelProfile, profile
from plait.frontend.families import read_config
from plait.frontend.families.decoder import build_decoder
from plait.spec import Device

DATA = Path(__file__).with_name("data")
CONFIGS = Path(__file__).parents[1] / "tests" / "data" / "configs"

#: Devices of the file that are a chip of the catalogue under other terms.
_CHIP = {"h100-pcap": "h100", "a100-80": "a100"}

#: Bytes per number as stored: FP4 has a scale of one byte for every 16 (NVFP4) or 32 (MXFP4) numbers.
_RATIO = {"bf16": 1.0, "fp16": 1.0, "fp8": 0.5, "fp4": 4.5 / 16}


@dataclass(frozen=True)
class Row:
    """One line of the file, in SI units."""

    id: str
    held_out: bool
    model: str
    device: str
    precision: str
    engine: str
    generation: str
    tp: int
    pp: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int | None
    scenario: str
    metric: str
    value: float
    software: str
    source: str

    @property
    def group(self) -> tuple[str, str]:
        return self.model, self.device


def rows() -> list[Row]:
    with (DATA / "measured.csv").open(encoding="utf-8", newline="") as file:
        return [_row(line) for line in csv.DictReader(file)]


def _row(line: dict[str, str]) -> Row:
    def number(name: str) -> int:
        return int(float(line[name]))

    return Row(
        id=line["id"],
        held_out=line["held_out"] == "yes",
        model=line["model"],
        device=line["device"],
        precision=line["precision"],
        engine=line["engine"],
        generation=line["generation"],
        tp=number("tp"),
        pp=number("pp"),
        prompt_tokens=number("prompt_tokens"),
        output_tokens=number("output_tokens"),
        concurrency=number("concurrency") if line["concurrency"] else None,
        scenario=line["scenario"],
        metric=line["metric"],
        value=float(line["value"]),
        software=line["software"],
        source=line["source"],
    )


def excluded() -> dict[str, list[str]]:
    """Why rows were left out -> their ids in the original collection."""
    found: dict[str, str] = yaml.safe_load((DATA / "excluded.yaml").read_text(encoding="utf-8"))
    return {reason: ids.split() for reason, ids in found.items()}


@functools.cache
def model(name: str) -> ModelProfile:
    known = yaml.safe_load((DATA / "models.yaml").read_text(encoding="utf-8"))[name]
    config: dict[str, Any] = json.loads((CONFIGS / f"{known['like']}.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    config |= known.get("keys", {})
    return profile(build_decoder(read_config(config, name), "bfloat16"))


@functools.cache
def device(name: str) -> Device:
    return device_of(lookup(_CHIP.get(name, name)))


#: Compute units by architecture.
UNITS = {"sm_80": 108, "sm_90a": 132, "sm_100a": 148, "sm_120": 188, "gfx942": 304}


def link_bytes_per_s(name: str) -> float:
    """One way, of one device to all its peers; over PCIe where chips have no links of their own."""
    entry = lookup(_CHIP.get(name, name))
    if entry.peer is not None:
        return entry.peer.total_gb_per_s * 1e9
    return (entry.host.gb_per_s if entry.host else 31.0) * 1e9


def shard(row: Row) -> Shard:
    """GPT-OSS stores its experts alone in four bits; KV is stored in FP8 beside FP8 and FP4 weights."""
    ratio = _RATIO[row.precision]
    if row.model.startswith("gpt-oss"):
        return Shard(row.tp, 1.0, 4.25 / 16, 1.0)
    return Shard(row.tp, ratio, ratio, 0.5 if ratio < 1 else 1.0)


def dtypes(row: Row, at: Device) -> tuple[str, str]:
    """What the matrices of blocks and of experts are multiplied in: the narrowest dtype the device has for them."""

    def narrow(names: tuple[str, ...]) -> str:
        return next((name for name in names if name in at.peak_flops_per_s), "bfloat16")

    wanted = {"fp4": ("fp4",), "fp8": ("fp8",)}.get(row.precision, ())
    dense = "bfloat16" if row.model.startswith("gpt-oss") else narrow(wanted)
    # GPT-OSS multiplies MXFP4 by bfloat16 where there is no FP4, by FP8 where there is.
    experts = (
        narrow(wanted)
        if not row.model.startswith("gpt-oss")
        else ("fp8" if "fp4" in at.peak_flops_per_s else "bfloat16")
    )
    return dense, experts


def points(chosen: list[Row] | None = None) -> Iterator[Point]:
    for row in rows() if chosen is None else chosen:
        at = device(row.device)
        dense, experts = dtypes(row, at)
        yield Point(
            id=row.id,
            profile=model(row.model),
            device=at,
            device_label=row.device,
            link_bytes_per_s=link_bytes_per_s(row.device),
            units=UNITS.get(at.arch, 0),
            engine=row.engine,
            generation=row.generation,
            shard=shard(row),
            stages=row.pp,
            matmul_dtype=dense,
            expert_dtype=experts,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            concurrency=row.concurrency,
            scenario=row.scenario,
            metric=row.metric,
            value=row.value,
            group=row.group,
        )
