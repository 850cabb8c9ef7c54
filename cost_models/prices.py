"""Dollars and joules per token of a plan, and from where on they are less than what an API asks.

    $ of a token     = $ per hour of its accelerators / (tokens per second at full load * utilisation * 3600)
    J of a token     = (busy W * utilisation + idle W * (1 - utilisation)) / (tokens per second * utilisation)
    break-even       : the utilisation at which the first is the API's price

An accelerator is paid for by the hour whether it works or not, so the utilisation (tokens served, to those that could
be) says more about a price per token than anything else does. Prices are ranges from the cheapest seen to the list
price; the value between is their geometric mean, as they are far apart. Whole accelerators are paid for, of which a
plan may use a part. Host, network, storage and people are not in it, nor is cooling in the energy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from plait.cost_models.catalogue import HOST_CPU, lookup
from plait.cost_models.entries import Entry
from plait.errors import UserError, did_you_mean
from plait.spec import Device, Estimate, Plan, Source

#: Fractions of the rated power (TDP): value, low, high. Assumed: published runs of inference draw half of it (decode,
#: which waits for memory) to all of it (prefill), and idle accelerators a tenth to a quarter.
BUSY, IDLE = (0.75, 0.5, 1.0), (0.15, 0.1, 0.25)

#: Of a service that nobody measured. Assumed: nights, bursts and head room leave a third of the capacity in use.
UTILISATIONS = (0.1, 0.3, 0.7)

HOUR_S, DAY_S, MILLION = 3600.0, 86400.0, 1e6

Range = tuple[float, float]
Verdict = Literal["cheaper", "depends", "never"]


@dataclass(frozen=True)
class Rate:
    """Of one device: watts at work and at rest, dollars per hour. None: not known."""

    busy_w: Estimate | None = None
    idle_w: Estimate | None = None
    usd_per_hour: Estimate | None = None


@dataclass(frozen=True)
class Line:
    """Equal devices of a plan. Price and power are of all that are paid for together.

    Attributes:
        devices: that hold a slice.
        accelerators: that they sit in: a chip of two devices is paid for whole.
        note: where the price is from.
    """

    name: str
    devices: int
    accelerators: int
    usd_per_hour: Estimate
    busy_w: Estimate | None
    idle_w: Estimate | None
    note: str


@dataclass(frozen=True)
class Throughput:
    """Tokens per second of a pipeline that never waits for requests.

    Attributes:
        input_share: of the price of a request, what its prompt takes: of the devices' time, weighted by their price.
    """

    input_per_s: Estimate
    output_per_s: Estimate
    input_share: float

    @property
    def total_per_s(self) -> Estimate:
        return _plus([self.input_per_s, self.output_per_s])

    @property
    def output_fraction(self) -> float:
        return self.output_per_s.value / (self.input_per_s.value + self.output_per_s.value)


@dataclass(frozen=True)
class TokenCost:
    """At one utilisation. Joules are None where the power of a device is not known."""

    utilisation: float
    tokens_per_day: Estimate
    usd_per_million_input: Estimate
    usd_per_million_output: Estimate
    usd_per_million_tokens: Estimate
    joules_per_token: Estimate | None
    joules_per_output_token: Estimate | None


@dataclass(frozen=True)
class ApiPrice:
    """Dollars per million tokens."""

    input: float
    output: float


@dataclass(frozen=True)
class BreakEven:
    """Where the pipeline costs what the API does.

    Attributes:
        api_usd_per_million_tokens: of the plan's mix of prompts and answers.
        utilisation: above it the pipeline is cheaper; above 1 it never is.
        tokens_per_day: those of that utilisation, prompts and answers together.
        capacity_tokens_per_day: at utilisation 1.
        verdict: `never` where even the cheapest price and the best throughput do not get there; `depends` where some
            of the range does.
    """

    api_usd_per_million_tokens: float
    utilisation: Estimate
    tokens_per_day: Estimate
    capacity_tokens_per_day: Estimate
    verdict: Verdict


def rate_of(device: Device) -> Rate:
    """From the catalogue: the range of prices, and power from the rated one. All None for a device it does not know."""
    entry = _entry(device)
    if entry is None:
        return Rate()
    parts, price = _parts(device), entry.price_usd_per_hour
    busy = idle = None
    if entry.tdp_w is not None:
        busy, idle = (_times(Estimate(*share, "assumed"), entry.tdp_w / parts) for share in (BUSY, IDLE))
    return Rate(busy, idle, None if price is None else _times(between(price.low, price.high), 1 / parts))


def between(low: float, high: float, source: Source = "assumed") -> Estimate:
    """A range of which nobody knows more than its ends."""
    return Estimate(math.sqrt(low * high), low, high, source)


def lines(
    plan: Plan, prices: Mapping[str, Range] | None = None, powers: Mapping[str, Range] | None = None
) -> list[Line]:
    """What is paid for: the accelerators of the plan's slices, idle devices left out.

    Args:
        prices: device -> lowest and highest dollars per hour of one accelerator, instead of the catalogue's.
        powers: device -> watts of one accelerator at work, instead of a fraction of the rated power.

    Raises:
        UserError: `price-unknown`; `price-device` where a price is for a device that the plan does not use.
    """
    devices = {device.id: device for device in plan.cluster.devices}
    used = [devices[name] for item in plan.slices for name in item.devices]
    asked, drawn = (_by_name(given or {}, used, option) for given, option in ((prices, "--price"), (powers, "--power")))
    kinds: dict[str, list[Device]] = {}
    for device in used:
        kinds.setdefault(device.name, []).append(device)
    return [_line(equal, asked.get(name), drawn.get(name)) for name, equal in kinds.items()]


def throughput(plan: Plan, known: Iterable[Line]) -> Throughput:
    """From the plan's predictions.

    Raises:
        UserError: `plan-unpredicted`, where it has none.
    """
    predicted, work = plan.prediction, plan.workload
    if predicted is None or any(item.prefill_s is None or item.decode_s is None for item in plan.slices):
        raise UserError(
            "plan-unpredicted", f"the plan of {plan.model} has no predictions", hint="plait cost MODEL --plan plan.yaml"
        )
    names = {device.id: device.name for device in plan.cluster.devices}
    usd = {line.name: line.usd_per_hour.value / line.devices for line in known}
    steps = work.output_tokens / work.concurrency
    prefill = decode = 0.0
    for item in plan.slices:
        assert item.prefill_s is not None and item.decode_s is not None
        weight = sum(usd[names[name]] for name in item.devices)
        prefill += weight * item.prefill_s.value
        decode += weight * steps * item.decode_s.value
    output = predicted.output_tokens_per_s
    return Throughput(_times(output, work.prompt_tokens / work.output_tokens), output, prefill / (prefill + decode))


def token_cost(known: Iterable[Line], made: Throughput, utilisation: float) -> TokenCost:
    """Price and energy of tokens where `utilisation` of what could be served is: above 0, at most 1."""
    assert 0 < utilisation <= 1
    known = list(known)
    total, usd = made.total_per_s, _plus([line.usd_per_hour for line in known])
    blended = _over(_times(usd, MILLION / HOUR_S), _times(total, utilisation))
    output = made.output_fraction
    power = _power(known, utilisation)
    return TokenCost(
        utilisation,
        _times(total, utilisation * DAY_S),
        _times(blended, made.input_share / (1 - output)),
        _times(blended, (1 - made.input_share) / output),
        blended,
        power and _over(power, _times(total, utilisation)),
        power and _over(power, _times(made.output_per_s, utilisation)),
    )


def break_even(known: Iterable[Line], made: Throughput, api: ApiPrice) -> BreakEven:
    """From how many tokens a day on the pipeline is cheaper than the API."""
    output = made.output_fraction
    asked = api.input * (1 - output) + api.output * output
    full = token_cost(known, made, 1.0)
    at = _times(full.usd_per_million_tokens, 1 / asked)
    usd_per_day = _times(_plus([line.usd_per_hour for line in known]), DAY_S / HOUR_S)
    verdict: Verdict = "cheaper" if at.high <= 1 else "depends" if at.low <= 1 else "never"
    return BreakEven(asked, at, _times(usd_per_day, MILLION / asked), full.tokens_per_day, verdict)


def _line(equal: Sequence[Device], price: Range | None, power: Range | None) -> Line:
    device, rate = equal[0], rate_of(equal[0])
    parts, count = _parts(device), _accelerators(equal)
    usd, note = rate.usd_per_hour and _times(rate.usd_per_hour, parts), _price_note(device)
    if price is not None:
        usd, note = between(*price), "given"
    if usd is None:
        raise UserError(
            "price-unknown",
            f"nobody says what an hour of {device.name} costs",
            why="the catalogue has no price for it, and one that is made up would decide everything",
            hint=f"--price {device.name}=2.50, or a range: --price {device.name}=1.50:4",
        )
    busy, idle = (watts and _times(watts, parts) for watts in (rate.busy_w, rate.idle_w))
    if power is not None:
        busy = between(*power)
        idle = _times(busy, IDLE[0] / BUSY[0])
    usd, busy, idle = _times(usd, count), busy and _times(busy, count), idle and _times(idle, count)
    return Line(device.name, len(equal), count, usd, busy, idle, note)


def _accelerators(equal: Sequence[Device]) -> int:
    """The chips that devices of one name sit in: `mi250x.0` and `mi250x.1` are one. All `cpu` are parts of a host."""
    if equal[0].name == HOST_CPU:
        return len({device.host for device in equal})
    numbers = {device.id.rpartition(".")[2] for device in equal}
    if not all(number.isdecimal() for number in numbers):
        return len(equal)
    return len({int(number) // _parts(equal[0]) for number in numbers})


def _price_note(device: Device) -> str:
    entry = _entry(device)
    price = None if entry is None else entry.price_usd_per_hour
    return "" if price is None else f"{price.year}: {', '.join(price.sources)}"


def _by_name(given: Mapping[str, Range], used: Iterable[Device], option: str) -> dict[str, Range]:
    """By the name that devices have in the plan; users may write any name of a chip."""
    names = {device.name for device in used}
    out: dict[str, Range] = {}
    for said, value in given.items():
        try:
            name = said if said in names else lookup(said).label
        except UserError:
            name = said
        if name not in names:
            raise UserError(
                "price-device",
                f"{option} {said}: the plan uses no such device",
                why=f"it uses {', '.join(sorted(names))}",
                hint=did_you_mean(said, names) or f"leave it out, or say it of {sorted(names)[0]}",
            )
        out[name] = value
    return out


def _power(known: Iterable[Line], utilisation: float) -> Estimate | None:
    parts = list[Estimate]()
    for line in known:
        if line.busy_w is None or line.idle_w is None:
            return None
        parts += [_times(line.busy_w, utilisation), _times(line.idle_w, 1 - utilisation)]
    return _plus(parts)


def _entry(device: Device) -> Entry | None:
    try:
        return lookup(device.name)
    except UserError:
        return None


def _parts(device: Device) -> int:
    """Devices that one accelerator shows up as."""
    entry = _entry(device)
    return entry.logical.count if entry is not None and entry.logical is not None else 1


def _times(x: Estimate, factor: float) -> Estimate:
    return Estimate(x.value * factor, x.low * factor, x.high * factor, x.source)


def _over(x: Estimate, y: Estimate) -> Estimate:
    return Estimate(x.value / y.value, x.low / y.high, x.high / y.low, x.source)


def _plus(parts: Iterable[Estimate]) -> Estimate:
    known = list(parts)
    return Estimate(sum(p.value for p in known), sum(p.low for p in known), sum(p.high for p in known), known[0].source)
