"""`plait cost`: dollars and joules per token of a plan, and when that is less than an API asks."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from plait.cli.options import Json, PlanOptions, with_plan_options
from plait.errors import UsageError
from plait.words import count_text

if TYPE_CHECKING:
    from plait.cli.screen import Screen
    from plait.cost_models.prices import ApiPrice, BreakEven, Line, Range, Throughput, TokenCost
    from plait.spec import Estimate, Plan

NAME = "cost"

HELP = """Say what a million tokens cost on these devices, and from when on that is less than an API asks.

MODEL is planned as by plait plan, or it is an artifact, whose plan is taken. Prices are those of the catalogue, from
the cheapest seen to the list price, or given. Accelerators are paid for whether they work or not: the share of what
could be served that is served, the utilisation, is always stated.

\b
    plait cost smollm2 --targets h100,mi300
    plait cost smollm2 --targets h100 --concurrency 64 --price h100=2.50 --utilisation 0.5
    plait cost smollm2.plait --api-price 0.6
    plait cost smollm2 --targets 2xh100 --api-price 0.15,0.6     # of prompts, of answers
"""

#: An API's price that shows how the next command is written. Nobody's.
_SOME_PRICE = "0.6"

_YES = {
    "cheaper": "yes, at every price of the range",
    "depends": "only at some prices and speeds of the range",
    "never": "no: full devices at the lowest price still cost more",
}


@with_plan_options
def command(
    options: PlanOptions,
    utilisation: Annotated[
        str | None,
        typer.Option(
            "--utilisation", metavar="U,...", help="Tokens served, to those that could be: 0.3, or several of them."
        ),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price", metavar="DEVICE=USD", help="Dollars an hour of one accelerator: h100=2.50, or h100=1.50:4."
        ),
    ] = None,
    power: Annotated[
        list[str] | None,
        typer.Option("--power", metavar="DEVICE=W", help="Watts of one accelerator at work: h100=550 or h100=400:700."),
    ] = None,
    api_price: Annotated[
        str | None,
        typer.Option(
            "--api-price", metavar="USD", help="What an API asks for a million tokens; or prompts,answers: 0.15,0.6."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    from plait.cli.screen import Screen
    from plait.cost_models.prices import break_even, lines, throughput, token_cost
    from plait.spec import to_dict

    uses = parse_utilisations(utilisation)
    prices, powers = parse_ranges("--price", price), parse_ranges("--power", power)
    api = None if api_price is None else parse_api_price(api_price)
    screen = Screen(as_json=as_json)
    plan, has_weights = _plan(options, screen)
    known = lines(plan, prices, powers)
    made = throughput(plan, known)
    found = [token_cost(known, made, use) for use in uses]
    even = None if api is None else break_even(known, made, api)
    _show(screen, plan, known, made, found)
    if api is not None and even is not None:
        _show_even(screen, api, even)
    for line in known:
        if line.busy_w is None:
            screen.note(f"nobody states the power of {line.name}: no joules without --power {line.name}=WATTS")
    screen.note(f"predicted, of {plan.workload.concurrency} requests at once: more at once make cheaper tokens")
    same = (("--price", price or []), ("--power", power or []), ("--utilisation", filter(None, [utilisation])))
    following = _next(options, has_weights) if api is not None else _ask_again(options, same)
    screen.next(following)
    screen.result(
        {
            "model": plan.model,
            "workload": to_dict(plan.workload),
            "devices": to_dict(known),
            "throughput": {**to_dict(made), "total_per_s": to_dict(made.total_per_s)},
            "costs": to_dict(found),
            "api": None if api is None else to_dict(api),
            "break_even": None if even is None else to_dict(even),
            "next": following,
        }
    )


def parse_utilisations(text: str | None) -> tuple[float, ...]:
    """`0.3`, or `0.1,0.5`, each above 0 and at most 1; without a text those assumed.

    Raises:
        UsageError: `utilisation`.
    """
    from plait.cost_models.prices import UTILISATIONS

    if text is None:
        return UTILISATIONS
    found = [_number(part) for part in text.split(",")]
    if not all(number is not None and 0 < number <= 1 for number in found):
        raise UsageError(
            "utilisation",
            f"cannot read --utilisation {text!r}",
            why="it is the share of the capacity in use: above 0, at most 1",
            hint="--utilisation 0.3",
        )
    return tuple(number for number in found if number is not None)


def parse_ranges(option: str, texts: list[str] | None) -> dict[str, Range]:
    """`["h100=2.5,mi300=1.5:4"]`: device -> lowest and highest.

    Raises:
        UsageError: `price`, showing the text and how it is written.
    """
    found: dict[str, Range] = {}
    for part in (part for text in texts or () for part in text.split(",")):
        name, _, said = part.partition("=")
        low, _, high = said.partition(":")
        ends = _number(low), _number(high or low)
        if not name or ends[0] is None or ends[1] is None or not 0 < ends[0] <= ends[1] or name in found:
            raise UsageError(
                "price",
                f"cannot read {option} {part!r}",
                why="it is DEVICE=NUMBER or DEVICE=LOWEST:HIGHEST, above 0, once for each device",
                hint=f"{option} h100=2.50 or {option} h100=1.50:4",
            )
        found[name] = (ends[0], ends[1])
    return found


def parse_api_price(text: str) -> ApiPrice:
    """`0.6`, or `0.15,0.6` for prompts and answers.

    Raises:
        UsageError: `price`.
    """
    from plait.cost_models.prices import ApiPrice

    parts = text.split(",")
    first, last = _number(parts[0]), _number(parts[-1])
    if len(parts) > 2 or first is None or last is None or first < 0 or last <= 0:
        raise UsageError(
            "price",
            f"cannot read --api-price {text!r}",
            why="it is dollars for a million tokens, or two numbers: of prompts, of answers",
            hint="--api-price 0.6 or --api-price 0.15,0.6",
        )
    return ApiPrice(first, last)


def _number(text: str) -> float | None:
    """A finite number; None for other text."""
    import math

    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _plan(options: PlanOptions, screen: Screen) -> tuple[Plan, bool]:
    """The artifact's, or a new one; and whether there are weights to compile."""
    from plait import api
    from plait.artifact import MANIFEST, read_artifact

    if (options.model / MANIFEST).is_file():
        if options.command(NAME) != PlanOptions(options.model).command(NAME):
            raise UsageError(
                "cost-artifact",
                f"{options.model} is an artifact: its plan is made already",
                hint="plait cost MODEL with these options plans anew",
            )
        return read_artifact(options.model).plan, True
    asked = api.request(**options.arguments())
    with screen.phases() as progress:
        planned = api.make_plan(asked, progress)
    return planned.plan, planned.checkpoint.weights is not None


def _show(screen: Screen, plan: Plan, known: list[Line], made: Throughput, found: list[TokenCost]) -> None:
    from plait.cli.tables import facts, table, workload_text

    rows = [
        ("model", f"{plan.model}, {plan.blocks} layers in {plan.dtype}, for {workload_text(plan.workload)}"),
        ("at full load", f"{range_text(made.total_per_s)} tokens/s, {range_text(made.output_per_s)} of them answers"),
    ]
    screen.show(facts(rows, title="cost"))
    columns = ("device", "number", "$ an hour", "watts at work", "price from")
    paid = [
        (
            line.name,
            str(line.accelerators),
            range_text(line.usd_per_hour),
            range_text(line.busy_w) if line.busy_w else "unknown",
            line.note,
        )
        for line in known
    ]
    screen.show(table(columns, paid, right=columns[1:4]))
    uses = ("used", "$/M tokens", "prompts", "answers", "J/token", "M tokens a day")
    costs = [
        (
            f"{cost.utilisation:.0%}",
            range_text(cost.usd_per_million_tokens),
            f"{cost.usd_per_million_input.value:.3g}",
            f"{cost.usd_per_million_output.value:.3g}",
            f"{cost.joules_per_token.value:.3g}" if cost.joules_per_token else "unknown",
            count_text(cost.tokens_per_day.value / 1e6),
        )
        for cost in found
    ]
    screen.show(table(uses, costs, right=uses))


def _show_even(screen: Screen, api: ApiPrice, even: BreakEven) -> None:
    from plait.cli.tables import facts

    two = f"{api.input:g} for prompts, {api.output:g} for answers: " if api.input != api.output else ""
    rows = [
        ("the API asks", f"{two}{even.api_usd_per_million_tokens:.3g} $/M tokens of this mix"),
        ("cheaper here", _YES[even.verdict]),
        ("from", _from(even)),
        ("capacity", f"{range_text(even.capacity_tokens_per_day, 1e6)} M tokens a day"),
    ]
    screen.show(facts(rows, title="break-even"))


def _from(even: BreakEven) -> str:
    if even.verdict == "never":
        return f"never: {even.utilisation.low:.3g} times the capacity would have to be served, at best"
    share = even.utilisation
    uses = f"{share.value:.0%} used ({share.low:.0%} to {share.high:.0%})"
    uses += "; above 100% is more than these devices serve" if share.high > 1 else ""
    return f"{range_text(even.tokens_per_day, 1e6)} M tokens a day, {uses}"


def range_text(x: Estimate, unit: float = 1.0) -> str:
    """`2.5 (1.99 to 4)`; one number where the ends are equal."""
    value, low, high = (count_text(number / unit) for number in (x.value, x.low, x.high))
    return value if low == high else f"{value} ({low} to {high})"


def _ask_again(options: PlanOptions, same: Iterable[tuple[str, Iterable[str]]]) -> str:
    """For the break-even."""
    words = [part for name, values in same for value in values for part in (name, value)]
    return " ".join(filter(None, [options.command(NAME), shlex.join(words), f"--api-price {_SOME_PRICE}"]))


def _next(options: PlanOptions, has_weights: bool) -> str:
    """What comes after the decision: to try a load, to compile, or to keep the plan."""
    from plait.artifact import MANIFEST

    if (options.model / MANIFEST).is_file():
        return shlex.join(["plait", "simulate", str(options.model)])
    return options.command("compile") if has_weights else f"{options.command('plan')} --output plan.yaml"
