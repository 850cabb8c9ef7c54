"""docs/accuracy.md from judged points. Every table is made here; the reasons beside them stand in data/reasons.yaml."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np
import yaml
from points import DATA, Row, excluded, points, rows

from plait.cost_models.sheet import Sheet
from plait.cost_models.speeds import fitted


@dataclass(frozen=True)
class Judged:
    """A measured point and what models say of it; a peer's text is why it says nothing, None that it was not asked."""

    row: Row
    backend: str
    plait: float
    spread: float
    roofline: float
    peers: dict[str, float | str | None]

    def error(self, said: float) -> float:
        """Signed: said / measured - 1."""
        return said / self.row.value - 1

    @property
    def inside(self) -> bool:
        reach = exp(self.spread)
        return self.plait / reach <= self.row.value <= self.plait * reach


PEERS = ("genz", "aiconfigurator")
CLASSES = {"cuda": "NVIDIA", "rocm": "MI300X", "xla": "TPU"}
METRICS = {
    "tpot": "TPOT",
    "token": "TPOT",
    "ttft": "TTFT",
    "prompt": "TTFT",
    "latency": "latency",
    "throughput": "throughput",
}
#: Class and metric -> the largest median absolute error that was asked for.
TARGETS = {
    ("NVIDIA", "TPOT"): 0.15,
    ("MI300X", "TPOT"): 0.20,
    ("TPU", "TPOT"): 0.20,
    ("NVIDIA", "TTFT"): 0.30,
    ("MI300X", "TTFT"): 0.30,
    ("TPU", "TTFT"): 0.30,
    ("NVIDIA", "throughput"): 0.20,
    ("MI300X", "throughput"): 0.20,
    ("TPU", "throughput"): 0.20,
    ("MI300X", "latency"): 0.20,
}
BATCHES = ((1, 1), (2, 8), (9, 32), (33, 128), (129, 10**9))


def page(found: list[Judged]) -> str:
    held = [j for j in found if j.row.held_out]
    used = [j for j in found if not j.row.held_out]
    groups = sorted({j.row.group for j in held})
    return "\n".join(
        [
            _HEAD.format(
                points=len(found),
                used=len(used),
                held=len(held),
                groups=", ".join(f"{model} on {device}" for model, device in groups),
            ),
            "## Against what was asked\n",
            _targets(held),
            "\n## Held-out groups, one by one\n",
            _by(held, ("group", "metric", "engine"), lambda j: (_group(j), METRICS[j.row.metric], j.row.engine)),
            "\n## Held-out groups by device\n",
            _by(held, ("device", "metric"), lambda j: (j.row.device, METRICS[j.row.metric])),
            "\n## Held-out groups by requests in flight\n",
            _by(held, ("class", "metric", "requests"), lambda j: (_class(j), METRICS[j.row.metric], _batch(j))),
            "\n## The peers, where they answer\n",
            _PEERS,
            _peers(held, found),
            "\n## MI300X, 8-way tensor parallel, one batch from start to end\n",
            _latencies(found),
            "\n## Pipeline parallelism: Llama 3.3 70B in FP4 on RTX PRO 6000 over PCIe, 1000 tokens in and out\n",
            _pipeline(),
            "\n## Groups the fit saw, by fits that did not\n",
            _left_out(used),
            "\n## Groups the fit saw\n",
            _by(used, ("group", "metric", "engine"), lambda j: (_group(j), METRICS[j.row.metric], j.row.engine)),
            "\n## What is missed, and why\n",
            _reasons(),
            "\n## Rows that were left out\n",
            _excluded(),
        ]
    )


def _targets(held: list[Judged]) -> str:
    table = []
    for (kind, metric), limit in TARGETS.items():
        mine = [j for j in held if _class(j) == kind and METRICS[j.row.metric] == metric]
        if not mine:
            table.append((kind, metric, "0", percent(limit), "-", "-", "-", "no held-out point"))
            continue
        error = median_error(mine)
        said = (percent(limit), percent(error), signed(bias(mine)), percent(share_inside(mine)))
        table.append((kind, metric, str(len(mine)), *said, "met" if error <= limit else "missed"))
    inside = share_inside(held)
    table.append(
        ("all", "all", str(len(held)), "80 % inside", "-", "-", percent(inside), "met" if inside >= 0.8 else "missed")
    )
    return markdown(("class", "metric", "points", "asked", "median error", "bias", "inside the range", ""), table)


def _by(chosen: list[Judged], names: tuple[str, ...], key: Callable[[Judged], tuple[str, ...]]) -> str:
    """Error by key: of plait and of the nominal roofline on all points, of peers on those that they answer."""
    parts: dict[tuple[str, ...], list[Judged]] = {}
    for j in chosen:
        parts.setdefault(key(j), []).append(j)
    table = []
    for label, mine in sorted(parts.items()):
        row = [*label, str(len(mine)), percent(median_error(mine)), signed(bias(mine)), percent(share_inside(mine))]
        row.append(f"{percent(median_error(mine, lambda j: j.roofline))} ({signed(bias(mine, lambda j: j.roofline))})")
        row += [_peer_cell(mine, peer) for peer in PEERS]
        table.append(tuple(row))
    return markdown(
        (*names, "points", "plait", "bias", "inside", "roofline (bias)", "GenZ (bias)", "aiconfigurator (bias)"), table
    )


def _peer_cell(mine: list[Judged], peer: str) -> str:
    answered = [j for j in mine if isinstance(j.peers[peer], float)]
    if not answered:
        return "not asked" if all(j.peers[peer] is None for j in mine) else "no answer"

    def said(j: Judged) -> float:
        value = j.peers[peer]
        assert isinstance(value, float)
        return value

    count = "" if len(answered) == len(mine) else f", {len(answered)} points"
    return f"{percent(median_error(answered, said))} ({signed(bias(answered, said))}{count})"


def _peers(held: list[Judged], found: list[Judged]) -> str:
    table = []
    for name, chosen in (("held out", held), ("all", found)):
        for peer in PEERS:
            answered = [(j, said) for j in chosen if isinstance(said := j.peers[peer], float)]
            parts: dict[tuple[str, str], list[tuple[Judged, float]]] = {}
            for j, said in answered:
                parts.setdefault((j.row.device, METRICS[j.row.metric]), []).append((j, said))
            for label, pairs in sorted(parts.items()):
                theirs = float(np.median([abs(j.error(said)) for j, said in pairs]))
                ours = median_error([j for j, _ in pairs])
                closer = "plait" if ours <= theirs else peer
                table.append((name, peer, *label, str(len(pairs)), percent(theirs), percent(ours), closer))
    if not table:
        return "No peer was asked.\n"
    return markdown(("groups", "peer", "device", "metric", "points", "its error", "plait's", "closer"), table)


def _latencies(found: list[Judged]) -> str:
    mine = [j for j in found if j.row.device == "mi300x" and j.row.metric == "latency"]
    mine.sort(key=lambda j: (j.row.model, j.row.prompt_tokens, j.row.concurrency or 0))
    table = []
    for j in mine:
        what = (j.row.model, "held out" if j.row.held_out else "in the fit")
        lengths = (f"{j.row.prompt_tokens} / {j.row.output_tokens}", str(j.row.concurrency))
        errors = (signed(j.error(j.plait)), signed(j.error(j.roofline)))
        table.append((*what, *lengths, f"{j.row.value:.2f}", f"{j.plait:.2f}", *errors))
    return markdown(("model", "", "tokens in / out", "batch", "measured s", "plait s", "error", "roofline"), table)


def pipeline_rows() -> list[tuple[int, float, float]]:
    """Stages, measured and expected tokens per second, of the scaling table."""
    known: dict[int, float] = yaml.safe_load((DATA / "pipeline.yaml").read_text(encoding="utf-8"))["tokens_per_s"]
    lengths = (1, 1000, 1000)
    base = next(
        row
        for row in rows()
        if row.group == ("llama-3-70b", "rtxpro6000") and (row.pp, row.prompt_tokens, row.output_tokens) == lengths
    )
    asked = [Row(**{**base.__dict__, "pp": stages, "value": value}) for stages, value in known.items()]
    said = Sheet(list(points(asked))).expected(fitted())
    return [(row.pp, row.value, float(value)) for row, value in zip(asked, said, strict=True)]


def _pipeline() -> str:
    found = pipeline_rows()
    first = found[0]
    table = []
    for stages, measured, said in found:
        scaling = (f"{measured / first[1]:.2f}", f"{said / first[2]:.2f}")
        values = (f"{measured:.0f}", f"{said:.0f}", signed(said / measured - 1))
        table.append((str(stages), *values, *scaling, "yes" if stages in (1, 4) else "no"))
    head = ("stages", "measured tok/s", "plait tok/s", "error", "measured scaling", "plait's", "in the fit")
    return markdown(head, table)


def _left_out(used: list[Judged]) -> str:
    with (DATA / "left_out.csv").open(encoding="utf-8", newline="") as file:
        errors = {line["id"]: exp(float(line["log_error"])) - 1 for line in csv.DictReader(file)}
    parts: dict[tuple[str, str], list[float]] = {}
    for j in used:
        if j.row.id in errors:
            parts.setdefault((_group(j), METRICS[j.row.metric]), []).append(errors[j.row.id])
    table = [
        (*label, str(len(mine)), percent(float(np.median(np.abs(mine)))), signed(float(np.median(mine))))
        for label, mine in sorted(parts.items())
    ]
    return markdown(("group", "metric", "points", "median error", "bias"), table)


def _reasons() -> str:
    known: dict[str, str] = yaml.safe_load((DATA / "reasons.yaml").read_text(encoding="utf-8"))
    return "".join(f"- **{what}**: {why}\n" for what, why in known.items())


def _excluded() -> str:
    return markdown(("rows", "why"), [(str(len(ids)), reason) for reason, ids in excluded().items()])


def median_error(mine: Sequence[Judged], said: Callable[[Judged], float] = lambda j: j.plait) -> float:
    return float(np.median([abs(j.error(said(j))) for j in mine]))


def bias(mine: Sequence[Judged], said: Callable[[Judged], float] = lambda j: j.plait) -> float:
    return float(np.median([j.error(said(j)) for j in mine]))


def share_inside(mine: Sequence[Judged]) -> float:
    return sum(j.inside for j in mine) / len(mine)


def _class(j: Judged) -> str:
    return CLASSES[j.backend]


def _group(j: Judged) -> str:
    return f"{j.row.model} on {j.row.device}"


def _batch(j: Judged) -> str:
    if j.row.concurrency is None:
        return "as many as fit"
    low, high = next((low, high) for low, high in BATCHES if low <= j.row.concurrency <= high)
    return str(low) if low == high else f"{low:3d} to {high}" if high < 10**6 else f"{low} and more"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def signed(value: float) -> str:
    return f"{100 * value:+.0f} %"


def markdown(head: tuple[str, ...], table: Iterable[tuple[Any, ...]]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, ("---",) * len(head), *table)]
    return "\n".join(lines) + "\n"


_HEAD = """# Accuracy of the cost model

Made by `python benchmarks/accuracy.py`; not to be edited. `--fit` fits anew, `--peers PYTHON` asks the peers anew.

{points} measured points, each with its source in `benchmarks/data/measured.csv`: {used} fit the numbers of
`cost_models/fitted.yaml`, {held} are held out. The split is by group, a model on a device: of the groups of a device,
in the order of sha256 of `model|device`, the second, the fifth ... are held out (Llama 4 Scout counts on h100, though
its rows are left out). They touch no number: neither the fit, nor its ranges. Their errors were seen while the model
was made; what was changed after that was kept or dropped by fits that leave out groups of the fit, and by the tables
of MI300X and of pipelines below. Held out are {groups}.

The error of a point is |predicted / measured - 1|; tables show medians, and as the bias the median of the signed error.
`inside` is the share of points inside the stated range: that range holds 80 % of what fits that left a group out said
of that group (a conformal quantile, by backend and phase).

How a prediction is made: the time of each op from its flops, bytes and tiles and from what the device reaches
([op_time.py](../cost_models/op_time.py)), all-reduces ([collectives.py](../cost_models/collectives.py)), host work of
the engine for each step, and what continuous batching makes of the steps ([serving.py](../cost_models/serving.py)). The
numbers of engines (vLLM, TensorRT-LLM, SGLang) say how their steps differ; plans use those of devices alone, with
plait's own overhead of a step, which is assumed.

The roofline of the tables has nominal peaks, bandwidths and links and no overhead, through the same closed forms of
serving. Medians of peers are over the points that they answer.
"""

_PEERS = """GenZ (genz-llm 0.0.16) gets nominal peaks, as it is a roofline, and says how long the two phases take; they
go through the closed forms of serving here. It does not know mixtures of experts, Qwen3 and BLOOM by the names here.
aiconfigurator 0.12.0 says TTFT and TPOT itself; it looks them up in tables that it ships for NVIDIA GPUs, and its own
sample of measurements is where most of the points of h100, h200 and b200 come from. Its successor, aisimulate 0.13.0,
is a stub on PyPI that fetches its wheel from its maker's own index, which could not be reached. What a peer does not
answer (a model or a device that it does not know, a missing table) counts for nobody.
"""
