"""`plait compile`: a checkpoint to an artifact."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from plait.cli.options import Json, PlanOptions, Verbose, with_plan_options

NAME = "compile"

HELP = """Compile a model for several devices at once.

Plans the model over the devices, compiles each slice for its device and writes an artifact. Needs no device. Says
what it understood, where each layer goes and why, and where each slice will really run; a device that is not here is
emulated on the host. Nothing is written when something fails.

\b
    plait compile smollm2 --targets h100,mi300
    plait compile model.safetensors --targets 2xh100@hostA,mi300x@hostB -o model.plait
    plait compile smollm2 --plan plan.yaml
    plait compile smollm2 --targets h100,mi300 --layers 10,20
    plait compile smollm2 --targets h100,mi300 --pin block.3=h100.0 --forbid-cut 15
    plait compile smollm2 --targets h100,mi300 --quantize h100=fp8,mi300=int4 --calibrate text.txt
    plait compile smollm2 --targets h100 --lora my-adapter
"""


@with_plan_options
def command(
    options: PlanOptions,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="The artifact to write; default: NAME.plait here."),
    ] = None,
    embed_weights: Annotated[
        bool, typer.Option("--embed-weights", help="Copy the weights into the artifact instead of pointing to them.")
    ] = False,
    dump_ir: Annotated[
        Path | None, typer.Option("--dump-ir", metavar="DIR", help="Write the module after every phase, as MLIR text.")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option("--calibrate", metavar="FILE", help="A text; --quantize takes the scales that are best for it."),
    ] = None,
    no_device_code: Annotated[
        bool,
        typer.Option(
            "--no-device-code", help="Make no machine code: slices run emulated on this host only, compiled in no time."
        ),
    ] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    from plait import api
    from plait.assemble.changed import FILE as CHANGED
    from plait.cli.screen import Screen
    from plait.cli.tables import plan_tables, quantize_table, request_facts, warn_of_checks, warn_of_null
    from plait.report import quantized_weights
    from plait.report.code import code_of, slice_code
    from plait.spec import to_dict
    from plait.words import bytes_text

    screen = Screen(as_json=as_json)
    arguments = options.arguments()
    folder = output or default_output(options.model)
    asked = api.request(**arguments)
    screen.show(request_facts(asked, str(folder)))
    with screen.phases() as progress:
        made = api.compile_request(
            asked,
            output=folder,
            embed_weights=embed_weights,
            calibrate=calibrate,
            dump_ir=dump_ir,
            device_code=False if no_device_code else None,
            progress=progress,
        )
    slices = made.manifest.slices
    for part in plan_tables(made.plan, [item.runs_on for item in slices], screen.width, verbose=verbose):
        screen.show(part)
    quantized = quantized_weights(made.folder, [item.folder for item in slices])
    if quantized:
        screen.show(quantize_table(quantized, everything=verbose))
    size = folder_bytes(made.folder)
    changed = any((made.folder / item.folder / CHANGED).is_file() for item in slices)
    others = "changed weights inside, the others" if changed else "weights"
    where = "weights inside" if embed_weights else f"{others} stay in {made.weight_root}"
    screen.show(f"wrote {folder}: {bytes_text(size)}, {where}; {folder / 'report.html'} shows the plan")
    warn_of_null(screen, made.manifest)
    codes = {item.folder: code_of(*slice_code(made.folder / item.folder)) for item in slices}
    failed = {folder: code.failed for folder, code in codes.items() if code.failed}
    warn_of_checks(screen, failed)
    if (made.folder / "tokenizer.json").is_file():
        command = shlex.join(["plait", "run", str(folder)]) + ' "Why is the sky blue?"'
    else:
        screen.note("the checkpoint has no tokenizer.json: it runs on token ids, from Python: pipe.generate_ids")
        command = shlex.join(["plait", "inspect", str(folder)])
    screen.next(command)
    screen.result(
        {
            "artifact": str(folder),
            "bytes": size,
            "plan": to_dict(made.plan),
            "slices": [
                {"folder": s.folder, "device": s.device, "target": s.target, "blocks": s.blocks, "runs_on": s.runs_on}
                for s in slices
            ],
            "checks_failed": failed,
            "quantized": quantized,
            "next": command,
        }
    )


def default_output(model: Path) -> Path:
    """NAME.plait in the current directory; NAME is the directory's name or the file's stem."""
    whole = Path(os.path.abspath(model))  # noqa: PTH100 - `..` has a name too, and links keep theirs
    name = whole.name if whole.is_dir() else whole.name.removesuffix(".index.json").rsplit(".", 1)[0]
    return Path(f"{name or 'model'}.plait")


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
