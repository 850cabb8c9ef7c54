"""`plait inspect`: what is in a checkpoint or an artifact."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli.options import Json
from plait.errors import CheckpointError, UsageError
from plait.words import bytes_text

if TYPE_CHECKING:
    from plait.cli.screen import Screen
    from plait.frontend.config import DecoderConfig
    from plait.frontend.own import OwnModule

NAME = "inspect"

HELP = """Say what is in a checkpoint or in an artifact.

Of a checkpoint: family, config, tensors by dtype, parameters, KV cache per token, what is unused. Of an artifact:
slices, files, memory, where each slice runs, and its machine code: every kernel (on a TPU every program) with what it
uses and what it is predicted to take. Everything plait would refuse when it compiles or runs is refused here too.

\b
    plait inspect smollm2
    plait inspect model.gguf
    plait inspect smollm2.plait --why
    plait inspect smollm2.plait --slice 1 --asm rms_norm
    plait inspect smollm2.plait --asm "gemm 960x576 16"
"""


def command(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", show_default=False, help="A checkpoint, as for plait plan, or an artifact."),
    ],
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="The config.json of a weights file that lies alone."),
    ] = None,
    part: Annotated[
        int | None, typer.Option("--slice", metavar="N", help="Of an artifact, the machine code of this slice only.")
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Say why each kernel has the tile that it has.")] = False,
    asm: Annotated[
        str | None,
        typer.Option(
            "--asm",
            metavar="KERNEL",
            help="Print one kernel's PTX or AMD assembly, or a TPU program's HLO: its name, then as much of its sizes "
            "and rows as it takes.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    from plait.artifact import MANIFEST
    from plait.cli.screen import Screen

    screen = Screen(as_json=as_json)
    if not (path / MANIFEST).is_file():
        if part is not None or why or asm is not None:
            raise UsageError(
                "inspect-checkpoint", f"{path} is no artifact", why="--slice, --why and --asm ask for code"
            )
        _checkpoint(screen, path, config)
    elif asm is not None:
        _assembly(screen, path, part, asm)
    else:
        _artifact(screen, path, part, why=why)


def _checkpoint(screen: Screen, path: Path, config: Path | None) -> None:
    from plait.cli.tables import facts, table

    found = checkpoint_facts(path, config)
    tensors, kv = found["tensors"], found["kv_bytes_per_token"]
    stored = "no weights, a config only"
    if tensors is not None:
        count = len(found["files"])
        stored = f"{bytes_text(found['weight_bytes'])} in {count} {'file' if count == 1 else 'files'}"
    lines = [
        ("family", found["family"]),
        ("dtype", found["dtype"]),
        ("parameters", f"{found['parameters']:,}"),
        ("weights", stored),
        ("KV cache", f"{bytes_text(kv)} per token of context, in {found['dtype']}"),
        ("max positions", f"{found['max_positions']:,} tokens"),
        ("tokenizer", "yes" if found["tokenizer"] else "none: token ids only"),
        ("chat template", "yes" if found["chat_template"] else "none"),
        *((name.replace("_", " "), config_text(value)) for name, value in found["config"].items()),
        ("note", found["note"] or ""),
    ]
    screen.show(facts(lines, title=found["name"]))
    if tensors is not None:
        rows = [(name, str(row["tensors"]), bytes_text(row["bytes"])) for name, row in tensors.items()]
        screen.show(table(("stored as", "tensors", "size"), rows, right=("tensors", "size")))
    for name, why in found["unused"].items():
        screen.show(f"unused: {name} ({why})")
    screen.result({"checkpoint": found})


def checkpoint_facts(path: Path, config: Path | None) -> dict[str, Any]:
    """What `plait inspect --json` prints of a checkpoint. Reads headers, no tensor's data, unless two must be compared.

    Raises:
        CheckpointError, UnsupportedError: what `plait plan` would raise.
    """
    from plait.cost_models.profile import profile
    from plait.frontend.checkpoint import open_checkpoint
    from plait.frontend.config import DecoderConfig
    from plait.frontend.lower import lower, unused_tensors
    from plait.ir import weights
    from plait.pull import pulled
    from plait.spec import parts

    try:
        checkpoint = open_checkpoint(path, config)
    except CheckpointError as err:
        raise pulled(err, path) from err.__cause__
    module = lower(checkpoint)
    refs = checkpoint.weights
    unused = unused_tensors(checkpoint, module) if refs is not None else {}
    units = profile(module).units
    stored = None if refs is None else [part for ref in refs.values() for part in parts(ref)]
    return {
        "name": checkpoint.name,
        "family": checkpoint.family,
        "dtype": checkpoint.dtype,
        "parameters": sum(math.prod(op.result.type.get_shape()) for op in weights(module).values()),
        "weight_bytes": None if stored is None else sum(part.nbytes for part in stored),
        "kv_bytes_per_token": sum(kv.bytes_per_token for unit in units for kv in unit.facts.kv),
        "max_positions": checkpoint.max_positions,
        "config": config_facts(checkpoint.config),
        "note": None if isinstance(checkpoint.config, DecoderConfig) else checkpoint.config.note,
        "tokenizer": checkpoint.tokenizer is not None,
        "chat_template": checkpoint.chat_template is not None,
        "tensors": None if stored is None else _by_encoding((part.encoding, part.nbytes) for part in stored),
        "files": {str(name): size for name, (size, _) in checkpoint.files.items()},
        "unused": unused,
    }


def _by_encoding(refs: Any) -> dict[str, dict[str, int]]:
    """Tensors and bytes by how they are stored, most bytes first."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for encoding, nbytes in refs:
        counts[encoding] += 1
        sizes[encoding] += nbytes
    return {name: {"tensors": counts[name], "bytes": size} for name, size in sizes.most_common()}


def config_facts(config: DecoderConfig | OwnModule) -> dict[str, Any]:
    """The config in normal form; what every block has alike is said once."""
    from plait.spec import to_dict

    facts: dict[str, Any] = {}
    for name, value in to_dict(config).items():
        if name in ("family", "max_positions", "dtype"):
            continue
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if value is not None:
            facts[name] = value
    return facts


def config_text(value: Any) -> str:
    """A value of the config as a person writes it: `default, theta 100000`, not a Python dict."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.7g}"  # what float32 holds: files of other formats state 9.999999747378752e-06 for 1e-05
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {config_text(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(config_text, value))
    return "none" if value is None else str(value)


def _artifact(screen: Screen, path: Path, part: int | None, *, why: bool) -> None:
    from plait.cli.tables import facts, kv_text, memory_table, table

    found, plan = artifact_facts(path)
    chosen = _chosen(found["slices"], part, path)
    weights = found["weights"]
    lines = [
        ("model", f"{found['model']} ({found['family']}), {found['dtype']}"),
        ("KV", kv_text(plan.kv_dtype)),
        ("written by", f"plait {found['plait_version']}, format {found['format_version']}"),
        ("files", f"{len(found['files'])}, {bytes_text(found['bytes'])}, every digest right"),
        ("weights", f"{weights['where']}: {weights['state']}"),
        ("requests", f"up to {found['max_sequences']} at once, {found['max_kv_tokens']:,} KV tokens together"),
        ("max positions", f"{found['max_positions']:,} tokens"),
        *(("note", note) for note in plan.notes or ()),
    ]
    screen.show(facts(lines, title=str(path)))
    rows = [
        (
            s["folder"],
            s["device"],
            s["target"],
            f"{s['blocks'][0]}:{s['blocks'][1]}",
            s["runs_on"],
            ", ".join(s["crosses"]),
        )
        for s in found["slices"]
    ]
    screen.show(table(("slice", "device", "target", "layers", "runs on", "hands on"), rows, right=("layers",)))
    screen.show(memory_table(plan))
    for item in chosen:
        _code(screen, path, item, why=why)
    screen.result({"artifact": {**found, "slices": chosen}})


def _chosen(slices: list[dict[str, Any]], part: int | None, path: Path) -> list[dict[str, Any]]:
    """All slices, or the one that was asked for."""
    if part is None:
        return slices
    if not 0 <= part < len(slices):
        why = f"it has {len(slices)}, numbered from 0" if len(slices) > 1 else "it has slice 0 alone"
        raise UsageError("inspect-slice", f"{path} has no slice {part}", why=why)
    return [slices[part]]


def _code(screen: Screen, path: Path, item: dict[str, Any], *, why: bool) -> None:
    """The machine code of one slice."""
    from plait.cli.tables import facts, table
    from plait.report.code import code_of, slice_code

    code = code_of(*slice_code(path / item["folder"]))
    if code.none:
        screen.show(f"no machine code in {item['folder']}, {item['target']}: {code.none}\n")
        return
    screen.show(f"machine code of {item['folder']}, {item['target']}", style="bold")
    screen.show(facts(code.totals))
    screen.show(table(code.columns, code.rows, right=code.numbers))
    if code.failed:
        screen.show(facts(code.failed, title="checks that failed"))
    if why and code.why:
        screen.show(facts(code.why, title="why these tiles"))


def _assembly(screen: Screen, path: Path, part: int | None, words: str) -> None:
    """Print the text of one kernel or program; whether the artifact's binary is that very code goes to stderr."""
    from plait.artifact import read_artifact
    from plait.cli.assembly import find

    artifact = read_artifact(path)
    slices = artifact.manifest.slices
    chosen = range(len(slices)) if part is None else [part]
    _chosen([{}] * len(slices), part, path)
    found = find({number: artifact.folder / slices[number].folder for number in chosen}, words)
    if screen.as_json:
        screen.result({"asm": found.as_json()})
        return
    sys.stdout.write(found.text.rstrip("\n") + "\n")
    screen.note(found.remark)


def artifact_facts(path: Path) -> tuple[dict[str, Any], Any]:
    """What `plait inspect --json` prints of an artifact, and its plan. Checks every digest.

    Raises:
        ArtifactError: as `plait.artifact.read_artifact` says. Weights that are not there are stated, not refused.
    """
    from plait.artifact import check_weights, read_artifact
    from plait.errors import ArtifactError
    from plait.spec import to_dict

    artifact = read_artifact(path)
    manifest, plan = artifact.manifest, artifact.plan
    try:
        check_weights(artifact)
        state = "as they were when it was compiled"
    except ArtifactError as err:
        state = err.what
    data = to_dict(manifest)
    sizes = {name: (artifact.folder / name).stat().st_size for name in manifest.files}
    slices = [
        {
            **{name: item[name] for name in ("folder", "device", "backend", "target", "runs_on", "blocks", "dtype")},
            "code": _code_json(artifact.folder / item["folder"]),
            "crosses": [f"{out['name']} {out['dtype']}" for out in item["outputs"]],
            "memory": to_dict(planned.memory),
        }
        for item, planned in zip(data["slices"], plan.slices, strict=True)
    ]
    kept = (
        "model", "family", "dtype", "plait_version", "format_version", "page_tokens",
        "max_sequences", "max_kv_tokens", "max_positions",
    )  # fmt: skip
    where = str(artifact.weight_root) if manifest.weights else "inside the artifact"
    return {
        **{name: data[name] for name in kept},
        "files": sizes,
        "bytes": sum(sizes.values()),
        "weights": {"where": where, "state": state},
        "slices": slices,
    }, plan


def _code_json(folder: Path) -> dict[str, Any]:
    """report.json as it is, and the sizes of the files with code."""
    from plait.report.code import SUFFIXES, slice_code

    report, sizes = slice_code(folder)
    files = {name: size for name, size in sorted(sizes.items()) if name.endswith(SUFFIXES)}
    return {"bytes": sum(files.values()), "files": files, "report": report}
