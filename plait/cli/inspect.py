"""`plait inspect`: what is in a checkpoint or an artifact."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli.options import Json
from plait.errors import CheckpointError, PlaitError, UsageError
from plait.words import bytes_text, counted

if TYPE_CHECKING:
    from plait.cli.screen import Screen
    from plait.frontend.checkpoint import Checkpoint

NAME = "inspect"

HELP = """Say what is in a checkpoint or in an artifact.

Of a checkpoint: family, what its blocks are, tensors by dtype, parameters, KV cache per token, what is unused; and for
each target whether every op is taken, what is refused and why, and how quantised weights are held there. Of an
artifact: slices, files, memory, where each slice runs, and its machine code: every kernel (on a TPU every program) with
what it uses and what it is predicted to take. What cannot be read at all is refused here too.

\b
    plait inspect smollm2
    plait inspect model.gguf --targets h100,mi300,v5e
    plait inspect phi3 --context 8192
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
    targets: Annotated[
        str | None,
        typer.Option(
            "--targets", "-t", metavar="LIST", help="Of a checkpoint, the devices to ask: h100,mi300,v5e,cpu."
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", metavar="N", help="Of a checkpoint, tokens of the longest sequence; default: all it has."
        ),
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
        _checkpoint(screen, path, config, targets, context)
        return
    if targets is not None or context is not None:
        raise UsageError(
            "inspect-artifact",
            f"{path} is an artifact",
            why="--targets and --context ask what a checkpoint could become",
        )
    if asm is not None:
        _assembly(screen, path, part, asm)
    else:
        _artifact(screen, path, part, why=why)


def _checkpoint(screen: Screen, path: Path, config: Path | None, targets: str | None, context: int | None) -> None:
    from plait.cli.tables import facts, table

    found, lines = _read(path, config, targets, context)
    tensors, kv = found["tensors"], found["kv_bytes_per_token"]
    stored = "no weights, a config only"
    if tensors is not None:
        stored = f"{bytes_text(found['weight_bytes'])} in {counted(len(found['files']), 'file')}"
    rows = [
        ("family", found["family"]),
        ("dtype", found["dtype"]),
        ("parameters", f"{found['parameters']:,}"),
        ("weights", stored),
        ("KV cache", f"{bytes_text(kv)} per token of context, in {found['dtype']}"),
        ("max positions", f"{found['max_positions']:,} tokens"),
        ("tokenizer", _text_state(found, "tokenizer", "none: token ids only")),
        ("chat template", _text_state(found, "chat_template", "none")),
        *lines,
        *(("note", note) for note in found["notes"]),
    ]
    screen.show(facts(rows, title=found["name"]))
    if tensors is not None:
        listed = [(name, str(row["tensors"]), bytes_text(row["bytes"])) for name, row in tensors.items()]
        screen.show(table(("stored as", "tensors", "size"), listed, right=("tensors", "size")))
    for name, why in found["unused"].items():
        screen.show(f"unused: {name} ({why})")
    _show_targets(screen, found["targets"])
    if found["next"]:
        screen.next(found["next"])
    screen.result({"checkpoint": found})


def _text_state(found: dict[str, Any], part: str, none: str) -> str:
    if problem := found["problems"].get(part):
        return f"damaged: {problem}"
    return "yes" if found[part] else none


def _text_problems(checkpoint: Checkpoint) -> dict[str, str]:
    """What is wrong with the tokenizer and with the chat template; nothing of what is not there."""
    from plait.frontend.tokenizer import Tokenizer

    problems: dict[str, str] = {}
    if checkpoint.tokenizer is None:
        return problems
    part = "tokenizer"
    try:
        tokenizer = Tokenizer.open(checkpoint.tokenizer, chat_template=checkpoint.chat_template)
        if checkpoint.chat_template is not None:
            part = "chat_template"
            tokenizer.template()
    except PlaitError as err:
        problems[part] = ": ".join(filter(None, (err.what, err.why)))
    return problems


def _show_targets(screen: Screen, answers: list[dict[str, Any]]) -> None:
    """One line for each target, and below them what is refused."""
    from plait.assemble.support import by_reason
    from plait.cli.tables import table
    from plait.report.decoder import block_ranges

    rows, refused = [], []
    for answer in answers:
        reasons = by_reason(answer["refused"])
        held = [
            f"{name}: " + ", ".join(how + (f" ({count})" if len(ways) > 1 else "") for how, count in ways.items())
            for name, ways in answer["weights"].items()
        ]
        takes = f"refuses {len(answer['refused'])}" if reasons else "every op"
        takes = "nothing" if "all" in answer["refused"] else takes
        rows.append([answer["device"], answer["target"], takes, "; ".join(held)])
        refused += [
            f"{answer['device']} refuses {'it' if op == 'all' else op}"
            + (f" in {block_ranges(blocks)}" if blocks else "")
            + f": {why}"
            for (op, why), blocks in reasons.items()
        ]
    columns = ["target", "code for", "takes", "quantised weights"]
    shown = len(columns) if any(row[-1] for row in rows) else len(columns) - 1
    screen.show(table(columns[:shown], [row[:shown] for row in rows]))
    for line in refused:
        screen.show(line)


def checkpoint_facts(
    path: Path, config: Path | None = None, targets: str | None = None, context: int | None = None
) -> dict[str, Any]:
    """What `plait inspect --json` prints of a checkpoint. Reads headers, no tensor's data, unless two must be compared.

    Args:
        targets: as after `--targets`; None for one of each kind.
        context: tokens of the longest sequence; None for as many as the model has positions.

    Raises:
        CheckpointError, UnsupportedError: what `plait plan` would raise.
        UsageError: an unknown target, or a context that the model has no positions for.
    """
    return _read(path, config, targets, context)[0]


def _read(
    path: Path, config: Path | None, targets: str | None, context: int | None
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """`checkpoint_facts`, and the config in words."""
    from plait.assemble.support import TARGETS, format_name, support_of, takers
    from plait.cli.options import PlanOptions
    from plait.cost_models.profile import profile
    from plait.frontend.checkpoint import open_checkpoint
    from plait.frontend.lower import lower, unused_tensors
    from plait.ir import weights
    from plait.pull import pulled
    from plait.report.decoder import config_facts, config_lines
    from plait.spec import parts

    try:
        opened = open_checkpoint(path, config)
    except CheckpointError as err:
        raise pulled(err, path) from err.__cause__
    longest = opened.max_positions if context is None else context
    if not 1 <= longest <= opened.max_positions:
        raise UsageError(
            "inspect-context", f"--context {context}", why=f"{opened.name} has {opened.max_positions:,} positions"
        )
    checkpoint = opened.at(longest)
    module = lower(checkpoint)
    refs = checkpoint.weights
    model = profile(module)
    # Weights that are rows of one tensor (fused q, k and v) name one range of the file.
    ranges = {(part.file, part.offset): part for ref in (refs or {}).values() for part in parts(ref)}
    stored = None if refs is None else list(ranges.values())
    answers = support_of(module, targets or TARGETS)
    taken = takers(answers)
    quantised = {own.name: own.kind for unit in model.units for own in unit.quantised}
    asked = PlanOptions(path, targets=",".join(taken if targets else taken[:1]), config=config, context=context)
    facts = {
        "name": checkpoint.name,
        "family": checkpoint.family,
        "dtype": checkpoint.dtype,
        "parameters": sum(math.prod(op.result.type.get_shape()) for op in weights(module).values()),
        "weight_bytes": None if stored is None else sum(part.nbytes for part in stored),
        "kv_bytes_per_token": sum(kv.bytes_per_token for unit in model.units for kv in unit.facts.kv),
        "max_positions": opened.max_positions,
        "config": config_facts(opened.config),
        "notes": list(opened.notes(longest)),
        "tokenizer": checkpoint.tokenizer is not None,
        "chat_template": checkpoint.chat_template is not None,
        "problems": _text_problems(checkpoint),
        "tensors": None if stored is None else _by_encoding((part.encoding, part.nbytes) for part in stored),
        "quantised": dict(Counter(map(format_name, quantised.values()))),
        "files": {str(name): size for name, (size, _) in checkpoint.files.items()},
        "unused": unused_tensors(checkpoint, module) if refs is not None else {},
        "targets": [
            {
                "device": answer.device,
                "target": answer.target,
                "runs_on": answer.runs_on,
                "refused": answer.refused,
                "weights": answer.held,
            }
            for answer in answers
        ],
        "next": asked.command("plan") if taken else None,
    }
    return facts, config_lines(opened.config)


def _by_encoding(refs: Any) -> dict[str, dict[str, int]]:
    """Tensors and bytes by how they are stored, most bytes first."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for encoding, nbytes in refs:
        counts[encoding] += 1
        sizes[encoding] += nbytes
    return {name: {"tensors": counts[name], "bytes": size} for name, size in sizes.most_common()}


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
    from plait.cli.tables import facts, fitted
    from plait.report.code import code_of, slice_code

    code = code_of(*slice_code(path / item["folder"]))
    if code.none:
        screen.show(f"no machine code in {item['folder']}, {item['target']}: {code.none}\n")
        return
    screen.show(f"machine code of {item['folder']}, {item['target']}", style="bold")
    screen.show(facts(code.totals))
    for part in fitted(code.columns, code.rows, screen.width, keys=code.keys, right=code.numbers):
        screen.show(part)
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
