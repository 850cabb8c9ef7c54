"""One op on one device: what it does, what it takes and why, and what would change that most.

What would change it is found by asking the same model again with one number a tenth better: so it holds whatever the
model says of overlap, waves and launches, and for whatever takes its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from plait.cost_models.network import link_between
from plait.cost_models.op_time import ATTENTION, EXPERTS, MATMUL, OTHER, kind_of
from plait.cost_models.profile import Matrix, ModelProfile, OpFacts
from plait.cost_models.roofline import PESSIMISTIC, OpTime, op_time, rates
from plait.cost_models.speeds import Fitted, quantities
from plait.errors import UsageError, did_you_mean
from plait.ir.facts import Cost, Step
from plait.spec import Cluster, Device, Source

#: How much better each number is made.
TENTH = 0.1

#: The boundary between two slices, which is no op of the IR.
HOP = "hop"

_PREFIX = "plait."


@dataclass(frozen=True, eq=False)
class PlacedOp:
    """A distinct op of a model, and how often it stands in it.

    Attributes:
        kv_heads: the fewest of the attentions of its unit.
    """

    op: OpFacts
    count: int
    kv_heads: int

    @property
    def name(self) -> str:
        return self.op.name.removeprefix(_PREFIX)

    @property
    def label(self) -> str:
        """`linear 4096x14336`: what a product's weights are like; other ops are called by their name."""
        return self.name if self.op.matrix is None else f"{self.name} {_shape(self.op.matrix)}"


@dataclass(frozen=True)
class Reached:
    """A number that the time was computed with, and where it comes from. Shares are of what the vendor states."""

    what: str
    value: float
    low: float
    high: float
    unit: str
    source: Source


@dataclass(frozen=True)
class Change:
    """What the op would take if one thing were a tenth better; `change` is relative to what it takes."""

    what: str
    seconds: float
    change: float


@dataclass(frozen=True)
class OpExplained:
    """`changes`: those that matter most first."""

    op: str
    count: int
    device: str
    dtype: str
    time: OpTime
    reached: tuple[Reached, ...]
    changes: tuple[Change, ...]

    @property
    def assumed(self) -> tuple[str, ...]:
        """The numbers behind it that nobody measured."""
        return tuple(item.what for item in self.reached if item.source == "assumed")


def placed_ops(model: ModelProfile, step: Step) -> list[PlacedOp]:
    """The distinct ops of a model; those that cost the same in the step are one."""
    counts = Counter(unit.facts for unit in model.units)
    found: dict[tuple[str, Matrix | None, Cost], PlacedOp] = {}
    for facts, count in counts.items():
        heads = min((kv.kv_heads for kv in facts.kv), default=1)
        for op in facts.ops:
            key = (op.name, op.matrix, op.cost(step))
            known = found.get(key)
            found[key] = PlacedOp(op, count + (known.count if known else 0), heads)
    return list(found.values())


def chosen(ops: Iterable[PlacedOp], asked: str) -> list[PlacedOp]:
    """The ops of a name, `linear`, or of a name and shape, `linear 4096x14336`.

    Raises:
        UsageError: `op-unknown`, with the names there are.
    """
    known = list(ops)
    words = asked.removeprefix(_PREFIX)
    found = [placed for placed in known if words in (placed.name, placed.label)]
    if not found:
        names = sorted({placed.name for placed in known} | {HOP})
        near = did_you_mean(words, [*names, *(placed.label for placed in known)])
        raise UsageError("op-unknown", f"the model has no op {asked!r}", why="it has " + ", ".join(names), hint=near)
    return found


def explain_op(placed: PlacedOp, step: Step, device: Device, dtype: str) -> OpExplained:
    """Raises UserError `device-dtype`."""

    def time(op: OpFacts, on: Device) -> OpTime:
        return op_time(op, step, on, dtype, kv_heads=placed.kv_heads)

    now, plain = time(placed.op, device), replace(device, profile=None)
    modelled = time(placed.op, plain)
    # What was measured knows no peak and no bandwidth: their part in it is taken to be what it is in the model.
    scale = now.seconds / modelled.seconds if modelled.seconds else 1.0
    cost = placed.op.cost(step)
    faster = {
        f"peak of {dtype}": replace(plain, peak_flops_per_s=_more(device.peak_flops_per_s)),
        "memory bandwidth": replace(plain, bandwidth_bytes_per_s=device.bandwidth_bytes_per_s * (1 + TENTH)),
    }
    smaller = {"weight_bytes": "weight bytes", "kv_bytes": "KV bytes", "activation_bytes": "activation bytes"}
    seconds = {f"10 % more {what}": scale * time(placed.op, on).seconds for what, on in faster.items()}
    seconds |= {
        f"10 % fewer {what}": scale * time(_smaller(placed.op, name), plain).seconds
        for name, what in smaller.items()
        if getattr(cost, name)
    }
    seconds["10 % cheaper launches"] = scale * (modelled.seconds - TENTH * modelled.terms["launch"])
    terms = {name: scale * value for name, value in modelled.terms.items()}
    return OpExplained(
        placed.label,
        placed.count,
        device.id,
        dtype,
        replace(now, terms=terms, bound=modelled.bound),
        tuple(_reached(placed.op, device, dtype, now)),
        _changes(now.seconds, seconds),
    )


def per_token_at_twice(placed: PlacedOp, step: Step, device: Device, dtype: str) -> Change:
    """What a token costs in a batch of twice as many requests."""
    twice = Step(step.query_lens * 2, step.kv_lens * 2, step.logit_rows * 2)
    now, then = (op_time(placed.op, at, device, dtype, kv_heads=placed.kv_heads).seconds for at in (step, twice))
    return Change("twice the requests at once, for each token", then / 2, then / 2 / now - 1 if now else 0.0)


def explain_hop(model: ModelProfile, step: Step, cluster: Cluster) -> OpExplained:
    """The widest boundary of the model, from the first device of the cluster to the second.

    Raises:
        UsageError: `op-hop`: there are not two devices, or not two blocks.
        UserError: `link-missing`.
    """
    if len(cluster.devices) < 2 or not model.boundary_bytes_per_token:
        raise UsageError(
            "op-hop", "a hop needs two devices and a model of two blocks", hint="--op hop --target h100,mi300"
        )
    a, b = cluster.devices[:2]
    link = link_between(cluster, a, b)
    nbytes = float(step.tokens * max(model.boundary_bytes_per_token))
    wire = nbytes / link.bytes_per_s
    total = link.latency_s + wire
    terms = {"arithmetic": 0.0, "traffic": 0.0, "launch": link.latency_s, "wire": wire}
    bound = "wire" if wire > link.latency_s else "launch"
    now = OpTime(total, wire, total * PESSIMISTIC, 0.0, nbytes, bound, wire / total, "assumed", terms)
    better = {
        "10 % more bytes per second": link.latency_s + wire / (1 + TENTH),
        "10 % less latency": total - TENTH * link.latency_s,
        "10 % fewer bytes": total - TENTH * wire,
    }
    reached = tuple(
        Reached(what, value, value, value, unit, "assumed")
        for what, value, unit in (
            (f"link ({link.kind}: {link.source})", link.bytes_per_s, "B/s"),
            ("latency", link.latency_s, "s"),
        )
    )
    return OpExplained(
        HOP, len(model.boundary_bytes_per_token), f"{a.id} > {b.id}", "", now, reached, _changes(total, better)
    )


def _reached(op: OpFacts, device: Device, dtype: str, now: OpTime) -> Iterator[Reached]:
    """The shares of the nominal numbers that the model counts on, and the cost of a launch; or the profile instead."""
    if device.profile is not None:
        yield Reached(f"the profile {device.profile}", now.seconds, now.low, now.high, "s", now.source)
        return
    speeds = rates(device, dtype).speeds
    assert speeds is not None
    kind, known = kind_of(op.name), quantities(device) or {}
    fitted = _QUANTITIES[kind]
    shares = {"peak": speeds.efficiency[kind], "bandwidth": speeds.bytes[kind] / device.bandwidth_bytes_per_s}
    if kind == ATTENTION:
        shares["KV bandwidth"] = speeds.kv_bytes / device.bandwidth_bytes_per_s
    for what, value in shares.items():
        yield _with_range(f"share of the {what}", value, "", known.get(fitted[what]))
    launch = speeds.expert_launch_s if kind == EXPERTS else speeds.launch_s
    yield _with_range("one launch", launch, "s", known.get(fitted["launch"]))


#: What of `fitted.yaml` stands behind each number, by kind of op.
_QUANTITIES: Mapping[str, Mapping[str, str]] = {
    MATMUL: {"peak": "matmul", "bandwidth": "bandwidth", "launch": "launch_s"},
    EXPERTS: {"peak": "experts", "bandwidth": "expert_bandwidth", "launch": "expert_launch_s"},
    ATTENTION: {
        "peak": "attention",
        "bandwidth": "bandwidth",
        "KV bandwidth": "kv_bandwidth",
        "launch": "launch_s",
    },
    OTHER: {"peak": "matmul", "bandwidth": "bandwidth", "launch": "launch_s"},
}


def _with_range(what: str, value: float, unit: str, fitted: Fitted | None) -> Reached:
    """The range is the fit's, as a ratio; no share is above 1. A number that was not fitted has no range."""
    if fitted is None:
        return Reached(what, value, value, value, unit, "assumed")
    low, high = (value * end / fitted.value for end in (fitted.low, fitted.high))
    return Reached(what, value, low, high if unit else min(high, 1.0), unit, fitted.source)


def _changes(now: float, seconds: Mapping[str, float]) -> tuple[Change, ...]:
    found = [Change(what, then, then / now - 1 if now else 0.0) for what, then in seconds.items()]
    return tuple(sorted(found, key=lambda change: change.change))


def _smaller(op: OpFacts, name: str) -> OpFacts:
    def cost(step: Step) -> Cost:
        whole = op.cost(step)
        return replace(whole, **{name: getattr(whole, name) * (1 - TENTH)})

    return replace(op, cost=cost)


def _more(peaks: Mapping[str, float]) -> dict[str, float]:
    return {dtype: peak * (1 + TENTH) for dtype, peak in peaks.items()}


def _shape(matrix: Matrix) -> str:
    stack = f"{matrix.experts}x" if matrix.experts > 1 else ""
    return f"{stack}{matrix.columns}x{matrix.inner}"
