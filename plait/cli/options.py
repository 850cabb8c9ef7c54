"""The options that several commands share, said once, and how their text becomes the arguments of `plait.api`."""

from __future__ import annotations

import functools
import inspect
import shlex
import typing
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from plait.errors import UsageError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more; show the traceback of an error.")]


@dataclass(frozen=True)
class PlanOptions:
    """What decides a plan. The text of each option becomes the help text; see `plait.api.request` for the meaning."""

    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="A .safetensors, .gguf, .pt2 or .onnx file, an index, a directory, or a config.json (plan only).",
        ),
    ]
    targets: Annotated[
        str | None,
        typer.Option("--targets", "-t", metavar="LIST", help="Devices, in order: h100,mi300 or 2xh100@hostA,v5e."),
    ] = None
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", metavar="FILE", help="A cluster.yaml with devices, hosts, links and free memory."),
    ] = None
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="A plan.yaml, honoured exactly; it names its devices itself."),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="The config.json of a weights file that lies alone."),
    ] = None
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload", metavar="NAME", help="What will be asked: chat (default), single, batch, summarize, code."
        ),
    ] = None
    context: Annotated[
        int | None, typer.Option("--context", metavar="N", help="Tokens of one request, prompt and output together.")
    ] = None
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", metavar="N", help="Requests in flight at once.")
    ] = None
    objective: Annotated[
        str | None,
        typer.Option("--objective", metavar="GOAL", help="throughput (default), latency or capacity."),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="Compute in float32, bfloat16 or float16; default: the model's."),
    ] = None
    kv_dtype: Annotated[
        str | None,
        typer.Option("--kv-dtype", metavar="DTYPE", help="Store K and V in fp8; default: what is computed in."),
    ] = None
    layers: Annotated[
        str | None,
        typer.Option("--layers", metavar="N,N", help="Exactly so many blocks per device, in the order of the devices."),
    ] = None
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", metavar="UNIT=DEVICE", help="Keep a block (or embed, head) on a device: block.3=h100.0."),
    ] = None
    forbid_cut: Annotated[
        list[int] | None, typer.Option("--forbid-cut", metavar="N", help="Never cut before block N.")
    ] = None
    lora: Annotated[
        list[Path] | None,
        typer.Option("--lora", metavar="DIR", help="Merge a PEFT adapter into the weights; several in their order."),
    ] = None
    quantize: Annotated[
        str | None,
        typer.Option(
            "--quantize", metavar="KIND", help="Quantise the linears to int8, int4 or fp8; or h100=fp8,mi300=int8."
        ),
    ] = None
    group_size: Annotated[
        int | None,
        typer.Option("--group-size", metavar="N", help="Neighbours of a row that share a scale: 32, 64, 128; 0 all."),
    ] = None
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", help="Times that plait profile measured; default: this machine's."),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `plait.api.request` and of everything that takes the same.

        Raises:
            UsageError: `layers`, `pin` or `quantize`, showing the text and how it is written.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        layers, pins, cuts = values.pop("layers"), values.pop("pin"), values.pop("forbid_cut")
        lora, quantize = values.pop("lora"), values.pop("quantize")
        return {
            **values,
            "lora": tuple(lora or ()),
            "quantize": None if quantize is None else parse_quantize(quantize),
            "layers": None if layers is None else parse_layers(layers),
            "pins": parse_pins(pins) if pins else None,
            "forbidden_cuts": tuple(cuts or ()),
        }

    def command(self, verb: str, **changed: Any) -> str:
        """The command line `plait VERB MODEL ...` that asks for the same, with some options changed; safe to paste."""
        values = {**asdict(self), **changed}
        words = ["plait", verb, str(values.pop("model"))]
        for name, value in values.items():
            for item in value if isinstance(value, list) else [value]:
                if item is not None:
                    words += ["--" + name.replace("_", "-"), str(item)]
        return shlex.join(words)


def parse_layers(text: str) -> tuple[int, ...]:
    """`10,20`: blocks per device."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            "layers", f"cannot read --layers {text!r}", why="it is one whole number per device", hint="--layers 10,20"
        ) from None


def parse_pins(texts: list[str]) -> dict[str, str]:
    """`["block.3=h100.0"]`: unit -> device id."""
    pins: dict[str, str] = {}
    for text in texts:
        unit, _, device = text.partition("=")
        if not unit or not device:
            raise UsageError("pin", f"cannot read --pin {text!r}", why="it is UNIT=DEVICE", hint="--pin block.3=h100.0")
        if pins.get(unit, device) != device:
            raise UsageError("pin", f"{unit} is pinned to {pins[unit]} and to {device}")
        pins[unit] = device
    return pins


def parse_quantize(text: str) -> str | dict[str, str]:
    """`int4` for all devices, or `h100=fp8,mi300=int8`: device -> kind."""
    if "=" not in text:
        return text
    kinds: dict[str, str] = {}
    for part in text.split(","):
        device, _, kind = part.partition("=")
        if not device or not kind or kinds.get(device, kind) != kind:
            raise UsageError(
                "quantize",
                f"cannot read --quantize {text!r}",
                why="it is one kind, or one DEVICE=KIND for each device",
                hint="--quantize h100=fp8,mi300=int8",
            )
        kinds[device] = kind
    return kinds


def with_plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `options: PlanOptions` of a command by its fields, each an option of its own."""
    hints = typing.get_type_hints(PlanOptions, include_extras=True)
    own_hints = typing.get_type_hints(command, include_extras=True)
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(PlanOptions)
    ]
    own = [
        parameter.replace(annotation=own_hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "options"
    ]
    taken = {parameter.name for parameter in shared}

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        options = PlanOptions(**{name: values.pop(name) for name in taken})
        command(options=options, **values)

    expanded.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in (*shared, *own)}
    return expanded
