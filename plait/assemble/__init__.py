"""From a plan to an artifact: cut, run the passes, let each backend compile its slice, write everything, seal it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait import artifact as artifacts
from plait.assemble.changed import find_changes, write_changed
from plait.backends.base import CompileOptions
from plait.backends.weights import weights_json
from plait.errors import CheckpointError, UsageError, UserError
from plait.frontend.tokenizer import Tokenizer, tokenizer_text
from plait.ir import kv_layouts, print_module, signature, weights
from plait.ir.cover import cover
from plait.ir.module import boundary
from plait.ir.passes import SLICE_PIPELINE, run_passes, slice_modules
from plait.ir.quantise import matrices
from plait.registry import entry, load_backend
from plait.report import quantized_weights, render_report
from plait.report.code import code_of, slice_code
from plait.spec import Device, Manifest, ManifestSlice, Plan, PlannedSlice, WeightRef, digest, map_parts, to_yaml

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from plait.api import Planned, Progress
    from plait.assemble.calibrate import Calibration
    from plait.frontend.checkpoint import Checkpoint


#: Whether slices get machine code where nobody says: `0` does without, as `--no-device-code` does.
DEVICE_CODE = "PLAIT_DEVICE_CODE"


def compile_options(plan: Plan) -> CompileOptions:
    """The bounds of a batch: as many sequences as the plan has memory for, since each takes a ring of every window."""
    return CompileOptions(
        page_tokens=plan.page_tokens,
        max_sequences=plan.workload.concurrency,
        max_context_tokens=plan.workload.context_tokens,
        max_kv_tokens=_kv_tokens(plan),
    )


def _kv_tokens(plan: Plan) -> int:
    """Tokens that the KV pages of a full layer hold: every request of the workload at its longest."""
    pages = -(-plan.workload.context_tokens // plan.page_tokens)
    return plan.workload.concurrency * pages * plan.page_tokens


def _wants_device_code() -> bool:
    said = os.environ.get(DEVICE_CODE, "1")
    if said not in ("0", "1"):
        raise UsageError("device-code", f"{DEVICE_CODE} is {said!r}", why="it is 0 or 1")
    return said == "1"


@dataclass(frozen=True)
class _Cut:
    """One slice on its way: where it goes and its module after the passes."""

    index: int
    planned: PlannedSlice
    device: Device
    module: ModuleOp

    @property
    def folder(self) -> str:
        return f"slices/{self.index}-{self.device.name}"


def assemble(
    planned: Planned,
    output: Path,
    *,
    embed_weights: bool,
    calibrate: Path | None,
    dump_ir: Path | None,
    device_code: bool | None,
    progress: Progress,
) -> artifacts.Artifact:
    """Write the artifact of a plan.

    Raises:
        CheckpointError: the checkpoint has no weights (it was a config.json alone), or a tokenizer that is none; what
            reading the weights of slices that are quantised or merged says.
        UsageError: a text to calibrate on, and nothing is quantised.
        UnsupportedError: a backend refuses an op.
    """
    checkpoint, plan = planned.checkpoint, planned.plan
    output = output.resolve()  # the way from it to the weights leads through real folders, not through links
    if checkpoint.weights is None:
        raise CheckpointError(
            "no-weights",
            f"{checkpoint.name} has a config but no weights",
            why="compile refers to the bytes of the weights",
            hint="name the .safetensors file or its directory; `plait plan` needs no weights",
        )
    texts = _text_files(checkpoint)
    if dump_ir is not None:
        with artifacts.writing(dump_ir):
            dump_ir.mkdir(parents=True, exist_ok=True)
            (dump_ir / "module.mlir").write_text(print_module(planned.module), "utf-8")
    options = replace(
        compile_options(plan),
        device_code=_wants_device_code() if device_code is None else device_code,
        progress=lambda done, total, label: progress("kernels", done, total),
    )
    calibration = _calibration(planned, calibrate, progress)
    progress("slice", 0, len(plan.slices))
    cuts = _cut(planned, dump_ir)
    with artifacts.staged(output) as folder:
        module_text = print_module(planned.module)
        (folder / "module.mlir").write_text(module_text, "utf-8")
        (folder / "plan.yaml").write_text(to_yaml(plan), "utf-8")
        for name, text in texts.items():
            (folder / name).write_text(text, "utf-8")
        made = []
        for cut in cuts:
            progress("compile", cut.index, len(cuts))
            made.append(_compile(cut, planned, options, folder, embed_weights, calibration, progress))
        progress("write", len(cuts), len(cuts))
        manifest = _manifest(planned, made, module_text)
        if not embed_weights:
            root = _root(planned)
            files = {os.path.relpath(path, root): facts for path, facts in checkpoint.files.items()}
            manifest = replace(manifest, weight_root=os.path.relpath(root, output), weights=files)
        codes = [code_of(*slice_code(folder / item.folder)) for item in made]
        quantized = quantized_weights(folder, [item.folder for item in made])
        (folder / "report.html").write_text(render_report(plan, manifest, codes, quantized), "utf-8")
        artifacts.seal(folder, manifest)
    return artifacts.read_artifact(output)


def _cut(planned: Planned, dump_ir: Path | None) -> list[_Cut]:
    plan = planned.plan
    devices = {device.id: device for device in plan.cluster.devices}
    modules = slice_modules(planned.module, [item.blocks for item in plan.slices])
    assert planned.checkpoint.weights is not None
    lost = cover(modules, weights(planned.module).keys()).unused
    assert not lost, f"in no slice: {lost}"
    cuts = []
    for index, (item, module) in enumerate(zip(plan.slices, modules, strict=True)):
        device = devices[item.devices[0]]
        run_passes(module, SLICE_PIPELINE, dump_ir, f"slice{index}-{device.name}")
        cuts.append(_Cut(index, item, device, module))
    return cuts


def _calibration(planned: Planned, text: Path | None, progress: Progress) -> Calibration | None:
    if text is None:
        return None
    if all(item.quantize is None for item in planned.plan.slices):
        raise UsageError(
            "calibrate", f"{text} was given to calibrate on, and nothing is quantised", hint="add --quantize int4"
        )
    from plait.assemble.calibrate import calibrate

    return calibrate(planned.checkpoint, planned.adapters, text, lambda done, total: progress("calibrate", done, total))


def _compile(
    cut: _Cut,
    planned: Planned,
    options: CompileOptions,
    folder: Path,
    embed_weights: bool,
    calibration: Calibration | None,
    progress: Progress,
) -> ManifestSlice:
    device, module = cut.device, cut.module
    backend, target = load_backend(device.backend), f"{device.backend}:{device.arch}"
    compiled = backend.compile(module, target, options)
    capability = backend.capability(target)
    here = folder / cut.folder
    here.mkdir(parents=True)
    (here / "slice.mlir").write_text(print_module(module), "utf-8")
    changed, made = _change(cut, planned, here, calibration, progress)
    refs = planned.checkpoint.weights
    assert refs is not None
    needed = [refs[name] for name in weights(module) if name not in changed]
    if embed_weights:
        needed = _embed(needed, here / "weights.bin", f"{cut.folder}/weights.bin")
    else:
        root = _root(planned)
        needed = [map_parts(ref, lambda part: replace(part, file=os.path.relpath(part.file, root))) for ref in needed]
    (here / "weights.json").write_text(weights_json([*needed, *changed.values()]), "utf-8")
    # The backend says it of the architecture (`sm_90a (emulated on host)`); tables call the device by its name.
    runs_on = capability.runs_on.replace(device.arch, device.name, 1)
    report = {"device": device.name, "target": target, "runs_on": runs_on, **made, **compiled.report}
    (here / "report.json").write_text(json.dumps(report, indent=2, sort_keys=True) + "\n", "utf-8")
    for name, data in compiled.files.items():
        if Path(name).name != name or (here / name).exists():
            raise UserError("backend-file", f"backend {backend.name} names a file {name!r} that is not its own")
        (here / name).write_bytes(data)
    sig = signature(module)
    return ManifestSlice(
        folder=cut.folder,
        device=device.name,
        backend=device.backend,
        entry=entry(device.backend),
        target=target,
        environment=capability.environment,
        runs_on=runs_on,
        blocks=cut.planned.blocks,
        inputs=tuple(boundary(name, value) for name, value in sig.inputs.items()),
        outputs=tuple(boundary(name, value) for name, value in sig.outputs.items()),
        kv=kv_layouts(module, planned.plan.page_tokens),
        dtype=planned.plan.dtype,
    )


def _change(
    cut: _Cut, planned: Planned, here: Path, calibration: Calibration | None, progress: Progress
) -> tuple[dict[str, WeightRef], dict[str, Any]]:
    """Write the weights of a slice that are not as the checkpoint stores them. Returns their references, and what the
    report says of them: how far each quantised one is from what it was."""
    item, refs = cut.planned, planned.checkpoint.weights
    assert refs is not None
    quantised = {} if item.quantize is None else matrices(planned.module, *item.blocks)
    changes = find_changes(cut.module, refs, planned.adapters, quantised)
    if not changes:
        return {}, {}
    importance: Mapping[str, Any] = {} if calibration is None else calibration.importance
    label = "merge" if item.quantize is None else "quantize"
    made, errors = write_changed(here, changes, importance, lambda done: progress(label, done, len(changes)))
    merged = [name for name, change in changes.items() if change.adapted]
    facts: dict[str, Any] = {"quantized": errors} if errors else {}
    if calibration is not None and errors:
        facts["calibration_tokens"] = calibration.tokens
    return made, facts | ({"merged": merged} if merged else {})


def _root(planned: Planned) -> str:
    """The folder that holds every weights file of the checkpoint."""
    return os.path.commonpath([Path(path).parent for path in planned.checkpoint.files])


def _embed(refs: Sequence[WeightRef], target: Path, name: str) -> list[WeightRef]:
    """Copy the bytes of each tensor behind one another into `target`, called `name` in the references returned. A range
    that several weights are parts of is copied once."""
    places: dict[tuple[str, int, int], int] = {}
    with target.open("wb") as out:

        def copied(part: WeightRef) -> WeightRef:
            place = (part.file, part.offset, part.nbytes)
            if place in places:
                return replace(part, file=name, offset=places[place])
            places[place] = out.tell()
            with Path(part.file).open("rb") as source:
                source.seek(part.offset)
                left = part.nbytes
                while left:
                    chunk = source.read(min(left, 1 << 24))
                    assert chunk, f"{part.file} ends inside {part.name}: its length was checked"
                    out.write(chunk)
                    left -= len(chunk)
            return replace(part, file=name, offset=places[place])

        return [map_parts(ref, copied) for ref in refs]


def _text_files(checkpoint: Checkpoint) -> dict[str, str]:
    """tokenizer.json (out of the GGUF file, where the model is one), and what generation needs to know."""
    files = {"generation.json": json.dumps({"chat_template": checkpoint.chat_template}, indent=2) + "\n"}
    if checkpoint.tokenizer is not None:
        files["tokenizer.json"] = text = tokenizer_text(checkpoint.tokenizer)
        Tokenizer(text, str(checkpoint.tokenizer))  # a broken one is refused now, not when somebody asks
    return files


def _manifest(planned: Planned, slices: Sequence[ManifestSlice], module_text: str) -> Manifest:
    from plait import __version__

    checkpoint, plan, options = planned.checkpoint, planned.plan, compile_options(planned.plan)
    vocabulary = slices[-1].outputs[0].shape[-1]
    assert vocabulary is not None
    assert plan.prediction is not None
    return Manifest(
        model=checkpoint.name,
        family=checkpoint.family,
        plait_version=__version__,
        vocab_size=vocabulary,
        max_positions=checkpoint.max_positions,
        dtype=plan.dtype,
        page_tokens=plan.page_tokens,
        max_sequences=options.max_sequences,
        max_step_tokens=options.max_step_tokens,
        max_kv_tokens=_kv_tokens(plan),
        plan_digest=digest(plan),
        module_digest=digest(module_text),
        slices=tuple(slices),
        eos_token_ids=checkpoint.eos_token_ids,
        bos_token_id=checkpoint.bos_token_id,
    )
