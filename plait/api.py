"""The public face: plan, compile, open, and the pipeline that they return."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from plait import artifact as artifacts
from plait.errors import CheckpointError, PlanError, UnsupportedError, UsageError, did_you_mean
from plait.spec import WORKLOADS, Cluster, Objective, Plan, Target, Workload, from_yaml, parse_targets
from plait.words import counted

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from xdsl.dialects.builtin import ModuleOp

    from plait.cost_models.profile import ModelProfile
    from plait.cost_models.profiles import Chosen, Profile
    from plait.frontend.checkpoint import Checkpoint
    from plait.frontend.lora import Adapter
    from plait.partitioner.quantize import Choice
    from plait.text import Pipeline

#: Called as (phase, done, total) while long work goes on; total 0 means unknown.
Progress = Callable[[str, int, int], None]

StrPath = str | os.PathLike[str]

#: A checkpoint's path, or a decoder that `torch.export.export` made.
Model: TypeAlias = "StrPath | ExportedProgram"

#: A plan counts what every request at once costs.
MOST_REQUESTS = 1_000_000

#: What `kv_dtype` may be, and the FP8 that it means: the one that every backend has.
KV_DTYPES = {"fp8": "e4m3fn", "e4m3fn": "e4m3fn"}

#: A plan over 4,096 devices has 5 MB. What is larger is weights, given by mistake.
_MOST_PLAN_BYTES = 1 << 26
Targets = str | Target | Sequence[str | Target]


@dataclass(frozen=True)
class Request:
    """Everything that decides a plan, with names resolved: what `plait compile` prints first.

    `quantize`: by device id; see `plait.partitioner.quantize`.
    """

    model: Path
    config: Path | None
    cluster: Cluster
    workload: Workload
    workload_asked: bool
    objective: Objective
    dtype: str | None
    kv_dtype: str | None
    layers: tuple[int, ...] | None
    pins: dict[str, str]
    forbidden_cuts: tuple[int, ...]
    plan: Plan | None
    lora: tuple[Path, ...] = ()
    quantize: Mapping[str, Choice] = field(default_factory=dict)
    profile_notes: tuple[str, ...] = ()


def request(
    model: StrPath,
    targets: Targets | None = None,
    *,
    cluster: StrPath | Cluster | None = None,
    plan: StrPath | Plan | None = None,
    config: StrPath | None = None,
    workload: str | Workload | None = None,
    context: int | None = None,
    concurrency: int | None = None,
    objective: Objective | None = None,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    layers: Sequence[int] | None = None,
    pins: Mapping[str, str] | None = None,
    forbidden_cuts: Iterable[int] = (),
    lora: StrPath | Sequence[StrPath] = (),
    quantize: str | Mapping[str, str] | None = None,
    group_size: int | None = None,
    profile: StrPath | None = None,
) -> Request:
    """Resolve the arguments that `plan` and `compile` share.

    Args:
        model: a .safetensors, .gguf, .pt2 or .onnx file, an index, a directory, or a config.json (plan only).
        targets: `"h100,mi300"`, a list of such, or `Target`s. Instead of a cluster or a plan.
        cluster: a `cluster.yaml` or a `Cluster`.
        plan: a `plan.yaml` or a `Plan`, honoured exactly or refused by name; it brings its cluster and workload.
        config: the config.json of a lone weights file.
        workload: a name (`chat`, `single`, ...) or a `Workload`; `context` and `concurrency` override parts of it.
        objective: throughput (default), latency or capacity.
        dtype: compute dtype; defaults to the checkpoint's.
        kv_dtype: what K and V are stored in: `fp8` (e4m3fn, rounded and without a scale), which takes half the memory
            of 16 bits; defaults to the compute dtype.
        layers: exact number of blocks per device, in the order of the devices.
        pins: unit (`block.3`, `embed`, `head`) -> device id that must hold it.
        forbidden_cuts: block numbers before which there must be no cut.
        lora: a folder with an adapter of PEFT, or several, merged into the weights in their order.
        quantize: what the linears of the blocks are quantised to: `int8`, `int4` or `fp8`; or such a kind by the name
            or the id of a device, for the blocks that lie there.
        group_size: neighbours of a row that share a scale then: 32, 64 or 128, or 0 for the whole row. Of itself int4
            takes the largest that divides a row, int8 and fp8 the whole row.
        profile: a file of `plait profile`, for devices of its kind; without it those in the default place are taken,
            where they hold for this machine.

    Raises:
        UserError: `profile-foreign`: measured on another machine, or under another PyTorch.
        UsageError: names or values that do not fit together.
    """
    from plait.partitioner.quantize import choices, planned_choices

    given = None if plan is None else plan if isinstance(plan, Plan) else _read_plan(Path(plan))
    cuts = tuple(forbidden_cuts)
    if sum(source is not None for source in (targets, cluster, given)) != 1:
        raise UsageError(
            "devices",
            "say what to compile for in exactly one way",
            why="one of targets, cluster or plan names the devices",
            hint="--targets h100,mi300",
        )
    if given is not None:
        fixed = {
            "workload": workload, "context": context, "concurrency": concurrency,
            "objective": objective, "layers": layers, "pins": pins or None, "forbidden_cuts": cuts or None,
            "quantize": quantize or None, "group_size": group_size, "profile": profile,
        }  # fmt: skip
        clash = sorted(name for name, value in fixed.items() if value is not None)
        if clash:
            raise UsageError(
                "plan-clash",
                f"{', '.join(clash)} and a plan were both given",
                why="a plan is honoured exactly; it holds these itself",
                hint="edit the plan instead",
            )
        if dtype is not None and dtype != given.dtype:
            raise UsageError("plan-clash", f"dtype {dtype} was asked for, the plan says {given.dtype}")
        if kv_dtype is not None and _kv_dtype(kv_dtype) != _kv_dtype(given.kv_dtype):
            said = given.kv_dtype or given.dtype
            raise UsageError("plan-clash", f"KV in {kv_dtype} was asked for, the plan says {said}")
    if objective is not None and objective not in get_args(Objective):
        known = get_args(Objective)
        raise UsageError(
            "objective-unknown",
            f"no objective {objective!r}",
            why="known: " + ", ".join(known),
            hint=did_you_mean(objective, known),
        )
    chosen, asides = _profiles(profile, fixed=given is not None or isinstance(cluster, Cluster))
    devices = given.cluster if given is not None else _cluster(targets, cluster, chosen)
    if profile is not None and not any(device.profile for device in devices.devices):
        raise UsageError(
            "profile-unused",
            f"{profile} is of none of the devices",
            why=f"it was measured on {chosen[0].profile.device}; the devices are "
            + ", ".join(dict.fromkeys(device.name for device in devices.devices)),
        )
    return Request(
        model=Path(model),
        config=None if config is None else Path(config),
        cluster=devices,
        workload=_countable(given.workload) if given is not None else _workload(workload, context, concurrency),
        workload_asked=given is not None or workload is not None or context is not None,
        objective=given.objective if given is not None else objective or "throughput",
        dtype=given.dtype if given is not None else dtype,
        kv_dtype=_kv_dtype(given.kv_dtype if given is not None else kv_dtype),
        layers=None if layers is None else tuple(layers),
        pins=dict((pins if given is None else given.pins) or {}),
        forbidden_cuts=cuts if given is None else given.forbidden_cuts,
        plan=given,
        lora=tuple(map(Path, [lora] if isinstance(lora, str | os.PathLike) else lora)),
        quantize=choices(devices, quantize, group_size) if given is None else planned_choices(given),
        profile_notes=tuple(asides) if any(device.backend == "cpu" for device in devices.devices) else (),
    )


def _profiles(asked: StrPath | None, *, fixed: bool) -> tuple[tuple[Chosen, ...], tuple[str, ...]]:
    """The profiles that devices may take, and notes on those left aside. A cluster that is `fixed` has its own."""
    from plait.cost_models import profiles

    if asked is not None:
        return (profiles.given(Path(asked)),), ()
    return ((), ()) if fixed else profiles.default()


def _kv_dtype(asked: str | None) -> str | None:
    if asked is not None and asked not in KV_DTYPES:
        raise UsageError(
            "kv-dtype",
            f"KV cannot be stored in {asked!r}",
            why="known: fp8; without it KV is stored in the dtype that is computed in",
            hint=did_you_mean(asked, KV_DTYPES),
        )
    return None if asked is None else KV_DTYPES[asked]


def _read_plan(path: Path) -> Plan:
    try:
        size = path.stat().st_size
        if not path.is_file() or size > _MOST_PLAN_BYTES:
            why = f"it is {size} bytes long" if path.is_file() else "it is no file"
            raise PlanError("plan-unreadable", f"{path} is no plan", why=why)
        return from_yaml(Plan, path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError) as err:
        raise PlanError("plan-unreadable", f"cannot read the plan {path}", why=str(err)) from err


def _cluster(targets: Targets | None, cluster: StrPath | Cluster | None, profiles: tuple[Chosen, ...] = ()) -> Cluster:
    from plait.cost_models.catalogue import cluster_for
    from plait.cost_models.cluster_file import load_cluster
    from plait.registry import out_of_tree

    if isinstance(cluster, Cluster):
        return cluster
    if cluster is not None:
        return load_cluster(Path(cluster), profiles)
    assert targets is not None
    parts = [targets] if isinstance(targets, str | Target) else list(targets)
    parsed = [target for part in parts for target in ([part] if isinstance(part, Target) else parse_targets(part))]
    return cluster_for(parsed, backends=out_of_tree(), profiles=profiles)


def _workload(workload: str | Workload | None, context: int | None, concurrency: int | None) -> Workload:
    if isinstance(workload, str) and workload not in WORKLOADS:
        raise UsageError(
            "workload-unknown",
            f"no workload {workload!r}",
            why="known: " + ", ".join(WORKLOADS),
            hint=did_you_mean(workload, WORKLOADS),
        )
    chosen = WORKLOADS[workload or "chat"] if isinstance(workload, str | None) else workload
    if context is not None:
        if context < 2:
            raise UsageError("context", f"a context of {context} tokens is too short", why="prompt and output need 2")
        chosen = _scaled(chosen, context)
    if concurrency is not None:
        chosen = replace(chosen, concurrency=concurrency)
    return _countable(chosen)


def _countable(workload: Workload) -> Workload:
    if not 1 <= workload.concurrency <= MOST_REQUESTS:
        raise UsageError(
            "concurrency",
            f"cannot plan for {workload.concurrency} requests at once",
            why=f"it must be 1 to {MOST_REQUESTS:,}",
        )
    return workload


def _scaled(workload: Workload, context: int) -> Workload:
    """The same shares of prompt and output in another context."""
    prompt = min(context - 1, workload.prompt_tokens * context // workload.context_tokens or 1)
    return replace(workload, prompt_tokens=prompt, output_tokens=context - prompt)


def _within(workload: Workload, max_positions: int) -> Workload:
    """The default workload, for a model with fewer positions cut to those. One that was asked for is never cut."""
    return workload if workload.context_tokens <= max_positions else _scaled(workload, max_positions)


def _no_progress(phase: str, done: int, total: int) -> None:
    """The default: silent."""


@dataclass(frozen=True)
class Planned:
    """A plan with what it was made from. The module's linears are quantised as the plan says."""

    checkpoint: Checkpoint
    module: ModuleOp
    plan: Plan
    adapters: tuple[Adapter, ...] = ()


def make_plan(asked: Request, progress: Progress = _no_progress, *, check_backends: bool = False) -> Planned:
    """Read, lower, plan. With `check_backends` the planner is handed what each backend says about the module, and two
    copies of a tied table are compared, and scales are checked; that may import torch or JAX and reads weights, so a
    mere plan goes without."""
    from plait.backends.base import CompileOptions
    from plait.cost_models.profile import profile
    from plait.frontend.checkpoint import open_checkpoint
    from plait.frontend.lora import read_adapters
    from plait.frontend.lower import lower
    from plait.frontend.opaque import ProgramConfig
    from plait.ir.kv import store_kv
    from plait.ir.quantise import quantise_blocks
    from plait.partitioner import Problem, evaluate, solve
    from plait.pull import pulled

    progress("read", 0, 1)
    try:
        checkpoint = open_checkpoint(asked.model, asked.config, asked.dtype)
    except CheckpointError as err:
        raise pulled(err, asked.model) from err.__cause__
    workload = asked.workload if asked.workload_asked else _within(asked.workload, checkpoint.max_positions)
    notes = (*checkpoint.notes(workload.context_tokens), *asked.profile_notes, *_profile_notes(asked.cluster))
    if workload != asked.workload:
        notes = (*notes, _shortened_note(asked.workload, workload, checkpoint))
    checkpoint = checkpoint.at(workload.context_tokens)
    check_backends = check_backends or isinstance(checkpoint.config, ProgramConfig)  # most of them refuse it
    progress("lower", 0, 1)
    module = lower(checkpoint, asked.dtype, read=check_backends)
    if check_backends and (note := _scales_note(checkpoint, module)):
        notes = (*notes, note)
    if asked.kv_dtype is not None:
        store_kv(module, asked.kv_dtype)
    adapters = read_adapters(asked.lora, checkpoint, module)
    on = _quantised(checkpoint, module, asked.quantize)
    progress("plan", 0, 1)
    profiles: dict[int, ModelProfile] = {}  # devices that hold one module share its profile
    for held in (module, *on.values()):
        if id(held) not in profiles:
            profiles[id(held)] = replace(profile(held, checkpoint.max_positions), model=checkpoint.name)
    problem = Problem(
        profile=profiles[id(module)],
        cluster=asked.cluster,
        workload=workload,
        objective=asked.objective,
        max_step_tokens=CompileOptions().max_step_tokens,
        layers=asked.layers,
        pins=asked.pins,
        forbidden_cuts=asked.forbidden_cuts,
        capabilities=_capabilities(asked.cluster, module, on) if check_backends else {},
        held={device: profiles[id(held)] for device, held in on.items()},
    )
    try:
        plan = solve(problem) if asked.plan is None else evaluate(problem, asked.plan)
    except UnsupportedError as err:
        if not isinstance(checkpoint.config, ProgramConfig):
            raise
        # Why no other backend takes it is what a user has to know.
        why = f"{err.why}; it is not made of plait's ops: {checkpoint.config.reason}"
        raise UnsupportedError(err.code, err.what, why=why, hint=err.hint) from err
    slices = []
    for item in plan.slices:
        kind, group_size = asked.quantize.get(item.devices[0], (None, None))
        slices.append(replace(item, quantize=kind, group_size=group_size))
        if kind is not None:
            quantise_blocks(module, *item.blocks, kind, group_size)
    notes = (*notes, *(_merged_note(adapter, checkpoint) for adapter in adapters), *_unquantised_notes(asked, plan))
    plan = replace(plan, slices=tuple(slices), notes=notes or None, kv_dtype=asked.kv_dtype)
    return Planned(checkpoint, module, plan, adapters)


def _profile_notes(cluster: Cluster) -> Iterator[str]:
    """Which devices are timed by measurements."""
    for path in dict.fromkeys(device.profile for device in cluster.devices if device.profile):
        names = dict.fromkeys(device.name for device in cluster.devices if device.profile == path)
        said = next(device.sources[-1] for device in cluster.devices if device.profile == path)
        yield f"times on {', '.join(names)} are {said}"


def _quantised(checkpoint: Checkpoint, module: ModuleOp, choices: Mapping[str, Choice]) -> dict[str, ModuleOp]:
    """The module as each device that `choices` names would hold all of it: one for each choice."""
    from plait.frontend.config import DecoderConfig
    from plait.frontend.exported import RaisedConfig
    from plait.ir.module import block_range
    from plait.ir.quantise import quantise_blocks

    if choices and not isinstance(checkpoint.config, DecoderConfig | RaisedConfig):
        raise UnsupportedError(
            "quantize-model",
            f"{checkpoint.name} cannot be quantised",
            why="an ONNX graph and an opaque program keep their weights as they have them",
            hint="quantise the checkpoint that it was made from",
        )
    made: dict[Choice, ModuleOp] = {}
    for choice in choices.values():
        if choice not in made:
            made[choice] = module.clone()
            quantise_blocks(made[choice], *block_range(module), *choice)
    return {device: made[choice] for device, choice in choices.items()}


def _scales_note(checkpoint: Checkpoint, module: ModuleOp) -> str | None:
    from plait.assemble.scales import check_scales
    from plait.ir import weights

    stored = checkpoint.weights or {}
    return check_scales(stored[name] for name in weights(module) if name in stored)


def _shortened_note(asked: Workload, workload: Workload, checkpoint: Checkpoint) -> str:
    """What a user should know of a default that was not taken as it is."""
    before, now = (f"{each.prompt_tokens} + {each.output_tokens}" for each in (asked, workload))
    room = counted(checkpoint.max_positions, "position")
    return f"the workload {asked.name} is shortened from {before} to {now} tokens: {checkpoint.name} has {room}"


def _unquantised_notes(asked: Request, plan: Plan) -> Iterator[str]:
    """What was to be quantised where nothing lies. Of a kind for all devices an idle one says nothing new."""
    if len(asked.quantize) == len(asked.cluster.devices) and len(set(asked.quantize.values())) == 1:
        return
    placed = {name for item in plan.slices for name in item.devices}
    for device, (kind, _) in asked.quantize.items():
        if device not in placed:
            yield f"nothing is quantised to {kind} on {device}: the plan places nothing there"


def _merged_note(adapter: Adapter, checkpoint: Checkpoint) -> str:
    """What a user should know of weights that an adapter changes."""
    from plait.ir.quant import quant_type

    stored = checkpoint.weights or {}
    quantised = sum(quant_type(ref) is not None for name, ref in stored.items() if name in adapter.changed)
    count = len(adapter.changed)
    said = f"the adapter {adapter.name} is merged into {counted(count, 'weight')} in float32"
    return f"{said}; {quantised} of them stored quantised until now" if quantised else said


def _capabilities(cluster: Cluster, module: ModuleOp, on: Mapping[str, ModuleOp]) -> dict[str, Any]:
    """What each backend says of the module, or of the one that a device holds instead."""
    from plait.registry import load_backend

    answers: dict[tuple[str, str, int], Any] = {}
    found = {}
    for device in cluster.devices:
        held = on.get(device.id, module)
        kind = (device.backend, device.arch, id(held))
        if kind not in answers:
            answers[kind] = load_backend(device.backend).capability(f"{device.backend}:{device.arch}", held)
        found[device.id] = answers[kind]
    return found


@contextmanager
def _on_disk(model: Model) -> Iterator[tuple[StrPath, bool]]:
    """The path of a model, and whether it is gone afterwards: an exported program is saved while it is read."""
    if isinstance(model, str | os.PathLike):
        yield model, False
        return
    if not hasattr(model, "graph_signature"):
        raise UsageError(
            "model-type",
            f"a model of type {type(model).__name__} cannot be read",
            why="it is a path, or what torch.export.export returns",
        )
    from plait.frontend.exported import save_program

    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        path = Path(folder) / "exported.pt2"
        save_program(model, path)
        yield path, True


def plan(model: Model, targets: Targets | None = None, **options: Any) -> Plan:
    """The best plan, predicted. Reads no weights and imports neither torch nor JAX.

    Args:
        model, targets, options: as `request` says.

    Raises:
        FitError: with needed, free and short-by bytes per device.
    """
    with _on_disk(model) as (path, _):
        return make_plan(request(path, targets, **options)).plan


def compile_artifact(
    model: Model,
    targets: Targets | None = None,
    *,
    output: StrPath,
    embed_weights: bool = False,
    calibrate: StrPath | None = None,
    dump_ir: StrPath | None = None,
    device_code: bool | None = None,
    progress: Progress = _no_progress,
    **options: Any,
) -> artifacts.Artifact:
    """Compile a checkpoint to an artifact directory, without starting it.

    A program of `torch.export.export` goes in too, with its weights in the artifact: a decoder from token ids to
    logits, with or without a KV cache. Where it is not made of plait's ops it is one opaque op for xla devices.

    Args:
        output: the directory to write; replaced when it is an artifact already.
        embed_weights: copy each slice's bytes into the artifact instead of referring to the checkpoint.
        calibrate: a text. What is quantised takes the scales that are best for the inputs that linears have on it.
        dump_ir: a directory for the module after every phase.
        device_code: whether to make machine code; False writes what runs emulated on this host only, in no time. None:
            yes, unless PLAIT_DEVICE_CODE is 0.
        progress: see `Progress`.
        model, targets, options: as `request` says.
    """
    with _on_disk(model) as (path, temporary):
        return compile_request(
            request(path, targets, **options),
            output=output,
            embed_weights=embed_weights or temporary,
            calibrate=calibrate,
            dump_ir=dump_ir,
            device_code=device_code,
            progress=progress,
        )


def compile_request(
    asked: Request,
    *,
    output: StrPath,
    embed_weights: bool = False,
    calibrate: StrPath | None = None,
    dump_ir: StrPath | None = None,
    device_code: bool | None = None,
    progress: Progress = _no_progress,
) -> artifacts.Artifact:
    """`compile_artifact` of arguments that are resolved already."""
    from plait.assemble import assemble

    planned = make_plan(asked, progress, check_backends=True)
    dump = None if dump_ir is None else Path(dump_ir)
    return assemble(
        planned,
        Path(output),
        embed_weights=embed_weights,
        calibrate=None if calibrate is None else Path(calibrate),
        dump_ir=dump,
        device_code=device_code,
        progress=progress,
    )


def compile(model: Model, targets: Targets | None = None, *, output: StrPath | None = None, **options: Any) -> Pipeline:
    """Compile a checkpoint and start the pipeline.

        pipe = plait.compile("model.safetensors", targets=["h100", "mi300"], dtype="float32")
        pipe.generate("Hello", max_tokens=32)

    Without `output` the artifact lives as long as the pipeline. `run` holds options of `open`; the others are those of
    `compile_artifact`.
    """
    run = options.pop("run", {})
    if output is not None:
        return open(compile_artifact(model, targets, output=output, **options), **run)
    folder = tempfile.mkdtemp(prefix="plait-")
    try:
        made = compile_artifact(model, targets, output=Path(folder) / "model.plait", **options)
        return open(made, on_close=lambda: shutil.rmtree(folder, ignore_errors=True), **run)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def open(path: StrPath | artifacts.Artifact, **options: Any) -> Pipeline:
    """Check an artifact, start a worker per slice, and return the pipeline. Options are those of `Pipeline.open`."""
    from plait.text import Pipeline

    return Pipeline.open(path, **options)


def profile_device(
    target: str = "cpu",
    *,
    output: StrPath | None = None,
    quick: bool = False,
    threads: int | None = None,
    progress: Progress = _no_progress,
    clock: Callable[[], float] | None = None,
) -> tuple[Profile, Path]:
    """Measure a device of this machine, and write the profile that plans prefer from then on.

    Args:
        target: `cpu`, or an accelerator that is here.
        output: the file; None for the default place in the user's cache, where plans find it.
        quick: half a minute in place of some minutes, with fewer points.
        threads: of the host; None for all cores.
        clock: what seconds are counted by, where not by time; nothing is in another process then.

    Raises:
        UsageError: `profile-device`: the device is not here. `threads`: not 1 or more.
        UserError: `output-unwritable`.
    """
    from plait.assemble.measure import measure_here
    from plait.cost_models.catalogue import resolve
    from plait.cost_models.profiles import default_path, write

    if threads is not None and threads < 1:
        raise UsageError("threads", f"{threads} threads cannot compute anything")
    device = resolve(parse_targets(target)[0])[0]

    @contextmanager
    def opened(model: Path, folder: Path) -> Iterator[Pipeline]:
        made = compile_artifact(model, target, output=folder, dtype="float32")
        with open(made, threads=threads, in_process=clock is not None) as pipe:
            yield pipe

    path = default_path(device.name) if output is None else Path(output)
    counted_by = clock or time.perf_counter
    made = measure_here(device, opened, quick=quick, threads=threads, progress=progress, clock=counted_by)
    write(made, path)
    return made, path
