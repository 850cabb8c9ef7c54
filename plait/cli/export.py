"""`plait export`: a slice as MLIR, or as an ONNX model, that other tools read."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli.compile import default_output
from plait.cli.export_onnx import export_onnx
from plait.cli.options import Json, Verbose
from plait.errors import ArtifactError, UnsupportedError, UsageError, VerifyError
from plait.outputs import write_whole
from plait.words import bytes_text, counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table
    from xdsl.dialects.builtin import ModuleOp

    from plait.backends.kernels.stateless import Argument, StatelessSlice
    from plait.frontend.checkpoint import Checkpoint
    from plait.spec import WeightRef

NAME = "export"

HELP = """Write a slice as MLIR (torch, linalg, stablehlo or tosa, by torch-mlir), or as an ONNX model.

MLIR is one function with fixed shapes for a prefill or a decode step. Weights, the step and KV are its arguments,
results and KV come out; the first lines of the file name them. Reads no weights: a config.json is enough. Needs
plait[import].

An ONNX model has any shape, takes and gives KV, and holds the weights, in a second file. Needs plait[onnx].

\b
    plait export smollm2                             # StableHLO of a decode step of the whole model
    plait export smollm2.plait --slice 1 --to linalg --phase prefill --tokens 128
    plait export config.json --to torch --dtype bfloat16 --context 1024 --concurrency 8 -o decode.mlir
    plait export smollm2.plait --slice 0 --to onnx   # smollm2.0.onnx and smollm2.0.onnx.data
"""

PREFILL_TOKENS = 128
CONTEXT = 256


class Form(StrEnum):
    """What torch-mlir writes (see `plait.frontend.torch_mlir.FORMS`), and ONNX."""

    TORCH = "torch"
    LINALG = "linalg"
    STABLEHLO = "stablehlo"
    TOSA = "tosa"
    ONNX = "onnx"


class Phase(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


def command(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", show_default=False, help="A checkpoint, as for plait plan, or an artifact."),
    ],
    form: Annotated[
        Form, typer.Option("--to", metavar="FORM", help="torch, linalg, stablehlo, tosa or onnx.")
    ] = Form.STABLEHLO,
    part: Annotated[
        int, typer.Option("--slice", metavar="N", help="The slice of an artifact; a model is slice 0.")
    ] = 0,
    phase: Annotated[Phase, typer.Option("--phase", metavar="PHASE", help="prefill or decode.")] = Phase.DECODE,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="N",
            help=f"New tokens of each request in a prefill step; default: {PREFILL_TOKENS}, at most the context.",
        ),
    ] = None,
    context: Annotated[
        int, typer.Option("--context", metavar="N", help="Tokens of KV of each request, the new ones counted.")
    ] = CONTEXT,
    concurrency: Annotated[int, typer.Option("--concurrency", metavar="N", help="Requests in the step.")] = 1,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="Compute in float32, bfloat16 or float16; default: the model's."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="The config.json of a weights file that lies alone."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Default: NAME.SLICE.PHASE.FORM.mlir here, or NAME.SLICE.onnx."
        ),
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    from plait.cli.screen import Screen
    from plait.frontend import torch_mlir

    screen = Screen(as_json=as_json)
    if form is Form.ONNX:
        _no_shape(phase, tokens, context, concurrency)
        found = _slice(form, model, part, dtype, config)
        path = output or Path(f"{default_output(model).stem}.{part}.onnx")
        with _refused_as(form, compiled=found.root is not None):
            written = export_onnx(screen, found.module, found.refs, found.root, path, found.title)
        screen.result(written)
        return
    if phase is Phase.DECODE and tokens not in (None, 1):
        raise UsageError("export-shape", f"a decode step brings one token of each request, not {tokens}")
    torch_mlir.require()
    found = _slice(form, model, part, dtype, config)
    module, title = found.module, found.title
    from plait.backends.kernels.stateless import Shape, StatelessSlice

    new = 1 if phase is Phase.DECODE else min(PREFILL_TOKENS, context) if tokens is None else tokens
    shape = Shape(concurrency, new, context)
    with _refused_as(form, compiled=found.root is not None), screen.phases() as progress:
        progress("export", 0, 1)
        stateless = StatelessSlice(module, shape)
        text = torch_mlir.mlir_text(stateless, stateless.example(), form)
    step = f"{phase} of {shape.sequences} x {shape.tokens} tokens in a context of {shape.context}"
    whole = _head(f"{title}: {step}, as {form} by {torch_mlir.version_text()}", stateless) + text
    path = output or Path(f"{default_output(model).stem}.{part}.{phase}.{form}.mlir")
    write_whole(path, whole)
    screen.show(_ports(stateless, module))
    screen.show(f"wrote {path}: {bytes_text(len(whole.encode()))}, {form}")
    command = _next(model, form, part, phase, context, concurrency, dtype, config)
    screen.next(command)
    screen.result(
        {
            "output": str(path),
            "form": str(form),
            "phase": str(phase),
            "bytes": len(whole.encode()),
            "arguments": [_fact(item) for item in stateless.arguments],
            "results": [_fact(item) for item in stateless.results],
            "next": command,
        }
    )


def _head(title: str, stateless: StatelessSlice) -> str:
    """The comment that names arguments and results."""
    lines = [title]
    lines += [f"%arg{index}: {_text(item)}" for index, item in enumerate(stateless.arguments)]
    lines += [f"result {index}: {_text(item)}" for index, item in enumerate(stateless.results)]
    return "".join(f"// {line}\n" for line in lines)


def _ports(stateless: StatelessSlice, module: ModuleOp) -> Table:
    """The arguments behind the weights, and the results."""
    from plait.cli.tables import table

    inner = [item for item in stateless.arguments if item.name not in _weight_names(module)]
    rows = [("argument", *_cells(item)) for item in inner] + [("result", *_cells(item)) for item in stateless.results]
    before = counted(len(stateless.arguments) - len(inner), "weight")
    return table(("", "name", "shape", "dtype"), rows, title=f"@main, after {before}")


@contextmanager
def _refused_as(form: Form, *, compiled: bool) -> Iterator[None]:
    """An op that is refused here is not refused by a device, so none is to be changed."""
    try:
        yield
    except UnsupportedError as err:
        if err.code != "op-unsupported":
            raise
        hint = "--to stablehlo writes MLIR instead" if form is Form.ONNX else "`plait compile` it for a device instead"
        if err.why.startswith("dtype = f8"):
            hint = "compile it without --kv-dtype"
        elif err.why.startswith("dtype = "):
            hint = f"{'compile it with ' if compiled else ''}--dtype float32"
        raise UnsupportedError(err.code, f"{err.what} in {form}", why=err.why, hint=hint) from err


@dataclass(frozen=True)
class _Slice:
    """A slice's module, what to call it, and where its weights lie: None of a config alone."""

    module: ModuleOp
    title: str
    refs: Mapping[str, WeightRef] | None
    root: Path | None


def _no_shape(phase: Phase, tokens: int | None, context: int, concurrency: int) -> None:
    """Raises UsageError where an option says a shape."""
    given = {"--phase": phase is not Phase.DECODE, "--tokens": tokens is not None}
    given |= {"--context": context != CONTEXT, "--concurrency": concurrency != 1}
    for option in (name for name, is_given in given.items() if is_given):
        raise UsageError("export-shape", f"{option} was given with --to onnx", why="an ONNX model has any shape")


def _slice(form: Form, model: Path, part: int, dtype: str | None, config: Path | None) -> _Slice:
    from plait.artifact import MANIFEST, check_weights, read_artifact
    from plait.backends.weights import read_weights_json
    from plait.ir import block_count, read_module
    from plait.ir.passes import SLICE_PIPELINE, run_passes

    if not (model / MANIFEST).is_file():
        module, checkpoint = _whole(model, dtype, config)
        _check_slice(part, 1, model)
        run_passes(module, SLICE_PIPELINE)
        return _Slice(module, f"{checkpoint.name}, {counted(block_count(module), 'block')}", checkpoint.weights, None)
    for option, value in (("--dtype", dtype), ("--config", config)):
        if value is not None:
            raise UsageError("export-artifact", f"{option} was given, and {model} is an artifact, which says it itself")
    artifact = read_artifact(model)
    slices = artifact.manifest.slices
    _check_slice(part, len(slices), model)
    folder = slices[part].folder
    try:
        module = read_module(artifact.folder / folder / "slice.mlir")
    except VerifyError as err:
        raise ArtifactError("slice", f"{folder}/slice.mlir of {model} is no module", why=err.why) from err
    title = "{}, blocks {}:{} of {}".format(folder, *slices[part].blocks, artifact.manifest.model)
    if form is Form.ONNX:
        check_weights(artifact)
    return _Slice(module, title, read_weights_json(artifact.folder / folder / "weights.json"), artifact.weight_root)


def _whole(model: Path, dtype: str | None, config: Path | None) -> tuple[ModuleOp, Checkpoint]:
    from plait.errors import CheckpointError
    from plait.frontend.checkpoint import open_checkpoint
    from plait.frontend.lower import lower
    from plait.pull import pulled

    try:
        checkpoint = open_checkpoint(model, config, dtype)
    except CheckpointError as err:
        raise pulled(err, model) from err.__cause__
    return lower(checkpoint, dtype, read=False), checkpoint


def _check_slice(part: int, count: int, model: Path) -> None:
    if not 0 <= part < count:
        raise UsageError(
            "export-slice",
            f"{model} has no slice {part}",
            why=f"it has {count}, numbered from 0" if count > 1 else "it has slice 0 alone",
            hint="plait compile cuts a model into slices; export the artifact" if count == 1 else "",
        )


def _weight_names(module: ModuleOp) -> set[str]:
    from plait.ir import weights

    return set(weights(module))


def _cells(item: Argument) -> tuple[str, str, str]:
    return item.name, " x ".join(map(str, item.shape)), _dtype(item)


def _text(item: Argument) -> str:
    return f"{item.name} {list(item.shape)} {_dtype(item)}"


def _fact(item: Argument) -> dict[str, Any]:
    return {"name": item.name, "shape": list(item.shape), "dtype": _dtype(item)}


def _dtype(item: Argument) -> str:
    return str(item.dtype).removeprefix("torch.")


def _next(
    model: Path,
    form: Form,
    part: int,
    phase: Phase,
    context: int,
    concurrency: int,
    dtype: str | None,
    config: Path | None,
) -> str:
    """The same slice's other phase."""
    other = Phase.DECODE if phase is Phase.PREFILL else Phase.PREFILL
    words = ["plait", "export", str(model), "--to", form, "--phase", other]
    for name, value, default in (
        ("--slice", part, 0),
        ("--context", context, CONTEXT),
        ("--concurrency", concurrency, 1),
        ("--dtype", dtype, None),
        ("--config", config, None),
    ):
        if value != default:
            words += [name, str(value)]
    return shlex.join(words)
