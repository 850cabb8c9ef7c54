"""The cases, and how one is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.builtin import ModuleOp, StringAttr, TensorType
from xdsl.ir import Attribute

from plait.backends.base import TOKENS, Backend, Batch, CompileOptions, Executable, LoadOptions
from plait.backends.conformance import families
from plait.backends.conformance.models import (
    ATTENTIONS,
    DEEP,
    KV_FP8,
    KV_MODELS,
    MODELS,
    OPS,
    QUANTISED,
    SUMS,
    VOCABULARY,
    Build,
    attention,
    random_weights,
    write_slice,
)
from plait.backends.conformance.script import SCRIPTS, Player, Script, Turn
from plait.backends.weights import DTYPES
from plait.errors import UnsupportedError
from plait.ir import block_count, kv_classes, signature
from plait.ir.module import ops
from plait.ir.numbers import NUMPY, Quantised, round_to, saturate
from plait.ir.ops import BatchFacts, WeightOp
from plait.ir.oracle import Oracle
from plait.ir.passes import SLICE_PIPELINE, run_passes, slice_modules
from plait.ir.types import DTYPES as KINDS
from plait.ir.types import FP8, dtype_name
from plait.spec import kv_class

Array = NDArray[Any]

#: Largest error of one op, as a part of the largest value of its result. In float32 sums of some hundred terms are
#: added up in another order than the oracle's: about 50 roundings of 2^-24. In 16 bits it is the last place: the
#: oracle rounds once, a backend may round an inner value (attention's weights) as well, each by 2^-11 or 2^-8.
OP_TOLERANCE = {"float32": 3e-6, "float16": 4 * 2.0**-11, "bfloat16": 4 * 2.0**-8}

#: The same for the logits of a few blocks: float32 as `plait` promises against other implementations; in 16 bits some
#: 20 results per block are rounded on the way, and roundings add up like a random walk.
MODEL_TOLERANCE = {"float32": 1e-5, "float16": 6 * 2.0**-11, "bfloat16": 6 * 2.0**-8}


@dataclass(frozen=True)
class Case:
    """One thing a backend must get right. `str(case)` is its name."""

    name: str
    dtype: str
    check: Callable[[Bench, str], None]

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}"


def cases(dtypes: Sequence[str]) -> tuple[Case, ...]:
    """Every case for the compute dtypes that a backend says it has (`Capability.dtypes`)."""
    return tuple(Case(name, dtype, check) for dtype in dtypes for name, check in _checks(dtype))


def run_case(
    case: Case,
    backend: Backend,
    target: str,
    folder: Path,
    *,
    shapes_only: bool = False,
    device_code: bool = True,
) -> None:
    """Run one case. Raises AssertionError that says what differs, by how much, and what was allowed.

    Args:
        target: what to compile for, `cuda:sm_90a`.
        folder: an empty directory to write slices to.
        shapes_only: for a backend that computes nothing: hold it to shapes, dtypes and refusals alone.
        device_code: False holds a backend to what it does without machine code: emulating on the host.
    """
    case.check(Bench(backend, target, folder, shapes_only, device_code), case.dtype)


@dataclass(frozen=True)
class Bench:
    """A backend on the test bench."""

    backend: Backend
    target: str
    folder: Path
    shapes_only: bool = False
    device_code: bool = True

    @property
    def options(self) -> CompileOptions:
        return CompileOptions(device_code=self.device_code)

    def load(
        self,
        module: ModuleOp,
        player: Player,
        name: str = "slice",
        tensors: Mapping[str, NDArray[Any] | Quantised] | None = None,
    ) -> Executable:
        """Compile and load one slice's module, with random weights where none are given."""
        script, folder = player.script, self.folder / name
        bounds = {"max_step_tokens": script.step_tokens, "max_sequences": script.sequences}
        options = replace(self.options, page_tokens=script.page_tokens, **bounds)  # type: ignore[arg-type]
        compiled = self.backend.compile(module, self.target, options)
        write_slice(folder, module, tensors or random_weights(module), dict(compiled.files))
        asked = LoadOptions(player.pages, script.page_tokens, threads=1, weight_root=folder, **bounds)
        return self.backend.load(folder, self.target.partition(":")[2] or self.target, asked)

    def close_enough(self, what: str, got: Array, want: Array, tolerance: float) -> None:
        """Compare with the oracle: the largest error against the largest value."""
        assert got.shape == want.shape, f"{what} has shape {got.shape}, not {want.shape}"
        if self.shapes_only or want.size == 0:
            return
        values = got.astype(np.float64)
        assert np.isfinite(values).all(), f"{what} holds NaN or infinity"
        error = float(np.abs(values - want).max() / np.abs(want).max())
        assert error <= tolerance, f"{what} is off by {error:.3g} of its largest value; {tolerance:.3g} is allowed"


def _checks(dtype: str) -> Iterator[tuple[str, Callable[[Bench, str], None]]]:
    for name, build in OPS.items():
        yield f"op-{name}", _against_oracle(build, "pages16", OP_TOLERANCE)
    yield "op-rope-long", _against_oracle(OPS["rope-llama3"], "long", OP_TOLERANCE)
    for name, attributes in ATTENTIONS.items():
        for script in ("pages4", "pages16") if name in ("gqa3", "window8") else ("pages4",):
            yield f"attention-{name}-{script}", _against_oracle(attention(attributes), script, OP_TOLERANCE)
    for name, model in MODELS.items():
        yield f"model-{name}", _against_oracle(model, "pages4", MODEL_TOLERANCE)
    for name, build in (QUANTISED | families.QUANTISED).items():
        tolerance = MODEL_TOLERANCE if name.startswith("model") else OP_TOLERANCE
        yield f"quantised-{name}", _or_refused(build, _against_oracle(build, "pages4", tolerance))
    for name, build in _kv_fp8().items():
        yield f"kv-{name}", _or_refused(build, _against_oracle(build, "pages4", OP_TOLERANCE))
        yield f"kv-{name}-codes", _or_refused(build, partial(_codes, build))
    yield from family_checks(dtype)
    yield "refuses-unknown-attribute", _refuses_unknown_attribute
    yield "slices-equal", _slices_equal
    yield "greedy", _greedy
    yield "greedy-ties", _greedy_ties
    if dtype != "float32":
        return
    for script in ("one", "long"):
        yield f"model-{script}", _against_oracle(MODELS["window-and-full"], script, MODEL_TOLERANCE)
    yield "unfused", _against_oracle(MODELS["bias"], "pages16", MODEL_TOLERANCE, fuse=False)
    yield "chunks-equal-one-shot", _chunks_equal_one_shot
    yield "pages-move", partial(_pages_move, MODELS["unequal-heads"])
    yield "pages-hold-what-others-left", partial(_dirty_pages, MODELS["window-and-full"])
    for name, model in KV_MODELS.items():
        yield f"kv-model-{name}", _or_refused(model, _against_oracle(model, "pages4", MODEL_TOLERANCE))
    for name, model, check in (
        ("move", KV_MODELS["unequal-heads"], _pages_move),
        ("hold-what-others-left", KV_MODELS["window-and-full"], _dirty_pages),
    ):
        yield f"kv-pages-{name}", _or_refused(model, partial(check, model))


def family_checks(dtype: str) -> Iterator[tuple[str, Callable[[Bench, str], None]]]:
    """What a backend need not have."""
    for name, build in families.OPS.items():
        yield f"op-{name}", _or_refused(build, _against_oracle(build, "pages16", OP_TOLERANCE))
    for name in families.TURNS:
        build = families.OPS[f"rope-{name}"]
        yield f"op-rope-{name}-long", _or_refused(build, _against_oracle(build, "long", OP_TOLERANCE))
    for name, build in families.LATENTS.items():
        for script in ("pages4", "pages16"):
            check = _against_oracle(build, script, OP_TOLERANCE)
            yield f"attention-latent-{name}-{script}", _or_refused(build, check)
    for name in ("softmax-bias-normalised", "sigmoid-selection", "groups-max", "groups-top2"):
        build = families.OPS[f"router-{name}"]
        yield f"op-router-{name}-ties", _or_refused(build, partial(_router_ties, build))
    if dtype != "float32":  # of close experts another may be chosen, once a result before is rounded otherwise
        return
    for name, build in families.MODELS.items():
        yield f"model-{name}", _or_refused(build, _against_oracle(build, "pages4", MODEL_TOLERANCE))
    latent = families.MODELS["latent"]
    yield "model-latent-long", _or_refused(latent, _against_oracle(latent, "long", MODEL_TOLERANCE))
    yield "pages-move-latent", _or_refused(latent, partial(_pages_move, latent))
    yield "pages-hold-what-others-left-latent", _or_refused(latent, partial(_dirty_pages, latent))


def _kv_fp8() -> dict[str, Build]:
    plain = {name: attention(attributes) for name, attributes in KV_FP8.items()}
    return {**plain, **{f"latent-{name}": build for name, build in families.KV_FP8.items()}}


def _against_oracle(
    build: Build, script: str, tolerance: Mapping[str, float], fuse: bool = True
) -> Callable[[Bench, str], None]:
    def check(bench: Bench, dtype: str) -> None:
        module = build(dtype)
        oracle = _Reference(module, SCRIPTS[script])
        dtypes = _output_dtypes(module)
        if fuse:
            run_passes(module, SLICE_PIPELINE)
        with closing(bench.load(module, oracle.player)) as executable:
            for index, turn in enumerate(oracle.player.script.turns):
                batch, want = oracle.step(turn)
                got = executable.step(batch, {})
                assert set(got) == set(want), f"outputs are {sorted(got)}, not {sorted(want)}"
                for name, expected in want.items():
                    made = got[name].dtype
                    assert made == DTYPES[dtypes[name]], f"{name} is {made}, not {dtypes[name]}"
                    bench.close_enough(f"{name} of step {index}", got[name], expected, tolerance[dtype])

    return check


def _or_refused(build: Build, check: Callable[[Bench, str], None]) -> Callable[[Bench, str], None]:
    """For formats that a backend need not have: then every way to ask says so, and nothing is compiled."""

    def either(bench: Bench, dtype: str) -> None:
        module = build(dtype)
        run_passes(module, SLICE_PIPELINE)
        refused = bench.backend.capability(bench.target, module).refused
        why = _refusal(partial(bench.backend.compile, module, bench.target, bench.options))
        assert (why is None) == (not refused), f"capability says {refused}, compiling {why or 'nothing against it'}"
        if why is None:
            check(bench, dtype)

    return either


def _output_dtypes(module: ModuleOp) -> dict[str, str]:
    kinds = {name: value.type for name, value in signature(module).outputs.items()}
    return {name: dtype_name(kind.element_type) for name, kind in kinds.items() if isinstance(kind, TensorType)}


class _Reference:
    """The oracle of a module before any pass, playing a script."""

    def __init__(
        self, module: ModuleOp, script: Script, tensors: Mapping[str, NDArray[Any] | Quantised] | None = None
    ) -> None:
        module = module.clone()
        vocabulary = next(
            op.result.type.get_shape()[0]
            for op in ops(module)
            if isinstance(op, WeightOp) and isinstance(op.result.type, TensorType)
        )
        self.player = Player(script, kv_classes(module) or {"full": None}, vocabulary)
        held = {
            name: values if isinstance(values, Quantised) else round_to(values.astype(np.float64), _element(module))
            for name, values in (tensors or random_weights(module)).items()
        }
        self._oracle = Oracle(module, held, self.player.plain_pages, script.page_tokens)

    def step(self, turn: Turn) -> tuple[Batch, dict[str, Array]]:
        """The batch for the backend, and what it must return."""
        batch, plain = self.player.batches(turn)
        return batch, dict(self._oracle.step(cast(BatchFacts, plain)))


def _refuses_unknown_attribute(bench: Bench, dtype: str) -> None:
    """An attribute that is not known must not be dropped: neither by `supports` nor by `compile`."""
    for build in (MODELS["gqa"], MODELS["bias"]):
        for kind in {type(op) for op in ops(build(dtype))}:
            module = build(dtype)
            odd = next(op for op in ops(module) if type(op) is kind)
            odd.attributes["strange_new_factor"] = StringAttr("2")
            answer = bench.backend.supports(odd, bench.target)
            assert not answer.ok, f"{odd.name} with an unknown attribute is said to be supported"
            assert "strange_new_factor" in answer.why, f"the refusal does not name the attribute: {answer.why}"
            why = _refusal(partial(bench.backend.compile, module, bench.target, bench.options))
            assert why is not None, f"{odd.name} compiles although it has an unknown attribute"
            assert "strange_new_factor" in why, f"the refusal does not name the attribute: {why}"
            refused = bench.backend.capability(bench.target, module).refused
            assert any(odd.name in name for name in refused), f"capability.refused says nothing of {odd.name}"


def _refusal(compile_it: Callable[[], object]) -> str | None:
    """What the UnsupportedError says, or None where there is none."""
    try:
        compile_it()
    except UnsupportedError as err:
        return str(err)
    return None


def _chunks_equal_one_shot(bench: Bench, dtype: str) -> None:
    """A prompt in one step, and in chunks of 7 and then token by token: the same logits at the end."""
    module = MODELS["window-and-full"](dtype)
    run_passes(module, SLICE_PIPELINE)
    length = 45
    ways = {
        "one": (Turn({0: length}, "all"),),
        "chunks": (*(Turn({0: 7}, "all") for _ in range(5)), *(Turn({0: 1}, "all") for _ in range(10))),
    }
    found = {}
    for name, turns in ways.items():
        player = Player(Script(turns, 4), kv_classes(module), VOCABULARY)
        with closing(bench.load(module, player, name)) as executable:
            steps = [executable.step(player.batches(turn)[0], {})["logits"] for turn in turns]
        found[name] = np.concatenate(steps)
    bench.close_enough("logits in chunks", found["chunks"], found["one"].astype(np.float64), MODEL_TOLERANCE[dtype])


def _codes(build: Build, bench: Bench, dtype: str) -> None:
    """Pages of FP8 hold what the IR says, bit by bit, and are read as that, values that are too large among them."""
    module, script = build(dtype), SCRIPTS["pages4"]
    tensors = cast(dict[str, NDArray[np.float32]], random_weights(module))
    large, small = ("v", ()) if "v" in tensors else ("latent", ("q_latent",))
    tensors[large] *= 300
    for name in small:  # keys are as large: scores would be of a size that leaves them no digits
        tensors[name] /= 300
    oracle = _Reference(module, script, tensors)
    run_passes(module, SLICE_PIPELINE)
    with closing(bench.load(module, oracle.player, tensors=tensors)) as executable:
        (layout,) = executable.kv_layouts
        for index, turn in enumerate(script.turns):
            batch, want = oracle.step(turn)
            bench.close_enough(f"y of step {index}", executable.step(batch, {})["y"], want["y"], OP_TOLERANCE[dtype])
        owner, last = np.repeat(np.arange(batch.sequence_count), np.diff(batch.query_starts)), batch.positions
        pages = batch.page_tables[kv_class(layout.window)][owner, last // script.page_tokens]
        stored = executable.export_pages(0, pages)
    parts = (("k",), ("v",)) if layout.values is None else (("latent", "k_rope"), ())
    for names, side in zip(parts, stored, strict=True):
        table = np.concatenate([np.zeros((VOCABULARY, 0)), *(tensors[name].astype(np.float64) for name in names)], 1)
        rows = saturate(round_to(table[batch.tokens], KINDS[dtype]), FP8[layout.dtype])
        rows = rows.reshape(len(pages), *side.shape[2:])
        assert side.dtype == NUMPY[layout.dtype], f"exported pages are {side.dtype}, not {layout.dtype}"
        own = side[np.arange(len(pages)), last % script.page_tokens].astype(np.float64)
        assert bench.shapes_only or np.array_equal(own, rows), f"{names} is stored as {own}, not as {rows}"


def _router_ties(build: Build, bench: Bench, dtype: str) -> None:
    """Of experts that score the same the first are chosen: scores are sums of few binary digits, exact in any order."""
    module, rng = build(dtype), np.random.default_rng(5)
    tensors = cast(dict[str, NDArray[np.float32]], random_weights(module))
    for name in sorted({"w", "b", "s"} & set(tensors)):  # the second half of the experts is as the first
        half = rng.integers(-2, 3, (len(tensors[name]) // 2, *tensors[name].shape[1:])) / 8
        tensors[name] = np.concatenate((half, half)).astype(np.float32)
    tensors["x"] = rng.integers(-1, 2, tensors["x"].shape).astype(np.float32)
    tensors["x"][::5] = 0
    oracle = _Reference(module, SCRIPTS["pages4"], tensors)
    run_passes(module, SLICE_PIPELINE)
    with closing(bench.load(module, oracle.player, tensors=tensors)) as executable:
        for index, turn in enumerate(oracle.player.script.turns):
            batch, want = oracle.step(turn)
            got = executable.step(batch, {})["y"]
            same = bench.shapes_only or np.array_equal(got != 0, want["y"] != 0)
            assert same, f"step {index} chooses other experts than the first of equals"
            bench.close_enough(f"y of step {index}", got, want["y"], OP_TOLERANCE[dtype])


def _pages_move(build: Build, bench: Bench, dtype: str) -> None:
    """Pages written by one executable go on in another, under other numbers."""
    module = build(dtype)
    run_passes(module, SLICE_PIPELINE)
    before, after = Turn({0: 21, 1: 6}), Turn({0: 1, 1: 2}, "all")
    script = Script((before, after), 4)
    player = Player(script, kv_classes(module), VOCABULARY)
    with closing(bench.load(module, player, "from")) as source:
        source.step(player.batches(before)[0], {})
        old = player.physical("full", 0).copy()
        layers = range(len(source.kv_layouts))
        moved = [tuple(np.array(x) for x in source.export_pages(layer, old)) for layer in layers]
        others = player.physical("full", 1).copy()
        stay = [tuple(np.array(x) for x in source.export_pages(layer, others)) for layer in layers]
        batch = player.batches(after)[0]
        want = source.step(batch, {})["logits"]
    for layout, (k, v) in zip(source.kv_layouts, moved, strict=True):
        for side, width in ((k, layout.head_dim), (v, layout.v_head_dim)):
            shape = (len(old), script.page_tokens, layout.kv_heads, width)
            assert side.shape == shape, f"exported pages are {side.shape}, not {shape}"
        assert k.dtype == v.dtype == NUMPY[layout.dtype], f"exported pages are {k.dtype}, not {layout.dtype}"
    with closing(bench.load(module, player, "to")) as sink:
        table = batch.page_tables["full"].copy()
        # Sequence 0 goes to other pages: those of sequence 1 change places with it.
        free = np.setdiff1d(np.arange(player.pages["full"], dtype=np.int32), table)
        new = np.concatenate([free, old])[: len(old)]
        table[0, : len(old)] = new
        for layer in layers:
            sink.import_pages(layer, new, *moved[layer])
            sink.import_pages(layer, others, *stay[layer])
        got = sink.step(replace(batch, page_tables={"full": table}), {})["logits"]
    bench.close_enough("logits after the move", got, want.astype(np.float64), MODEL_TOLERANCE[dtype])


def _dirty_pages(build: Build, bench: Bench, dtype: str) -> None:
    """What an earlier request left in a page, infinities even, must not reach the next one."""
    module = build(dtype)
    oracle = _Reference(module, SCRIPTS["pages16"])
    run_passes(module, SLICE_PIPELINE)
    with closing(bench.load(module, oracle.player)) as executable:
        for layer, layout in enumerate(executable.kv_layouts):
            name = kv_class(layout.window)
            pages = np.arange(oracle.player.pages[name], dtype=np.int32)
            shape = (len(pages), layout.page_tokens, layout.kv_heads, layout.head_dim)
            rubbish = np.full(shape, np.inf, np.float32).astype(NUMPY[layout.dtype])
            executable.import_pages(layer, pages, rubbish, rubbish[..., : layout.v_head_dim].copy())
        for turn in oracle.player.script.turns:
            batch, want = oracle.step(turn)
            got = executable.step(batch, {})["logits"]
            bench.close_enough("logits", got, want["logits"], MODEL_TOLERANCE[dtype])


def _slices_equal(bench: Bench, dtype: str) -> None:
    """One backend gives the same bits however the model is cut."""
    whole = DEEP(dtype)
    count = block_count(whole)
    found: dict[int, list[Array]] = {}
    for parts in (1, 2, 3, 7):
        edges = np.linspace(0, count, parts + 1).astype(int).tolist()
        modules = slice_modules(whole, list(pairwise(edges)))
        player = Player(SCRIPTS["short"], kv_classes(whole), VOCABULARY)
        loaded = []
        for index, module in enumerate(modules):
            run_passes(module, SLICE_PIPELINE)
            loaded.append((bench.load(module, player, f"{parts}-{index}"), list(signature(module).inputs)))
        found[parts] = []
        for turn in player.script.turns:
            batch, values = player.batches(turn)[0], dict[str, Array]()
            for executable, inputs in loaded:
                values = executable.step(batch, {name: values[name] for name in inputs})
            found[parts].append(values["logits"])
        for executable, _ in loaded:
            executable.close()
    for parts, steps in found.items():
        for index, (got, want) in enumerate(zip(steps, found[1], strict=True)):
            same = got.shape == want.shape and (bench.shapes_only or np.array_equal(got, want))
            off = np.abs(got - want).max() if got.size else 0.0
            assert same, f"{parts} slices give other logits than one in step {index}, by up to {off:.3g}"


def _greedy(bench: Bench, dtype: str) -> None:
    """Greedy steps return the best tokens of the logits that others return, and leave everything else as it is."""
    whole = MODELS["gqa"](dtype)
    player = Player(SCRIPTS["pages4"], kv_classes(whole), VOCABULARY)
    ways: dict[bool, list[Executable]] = {True: [], False: []}
    for index, module in enumerate(slice_modules(whole, [(0, 1), (1, 2)])):
        run_passes(module, SLICE_PIPELINE)
        for greedy, loaded in ways.items():
            loaded.append(bench.load(module, player, f"{index}-{greedy}"))
    for turn in player.script.turns:
        asked, made = player.batches(turn)[0], []
        for greedy, (first, last) in ways.items():
            batch = replace(asked, greedy=greedy)
            crossed = first.step(batch, {})
            made.append((crossed, last.step(batch, crossed)))
        (crossed, tokens), (equal, logits) = made
        assert set(crossed) == set(equal), f"a greedy step crosses as {sorted(crossed)}, not {sorted(equal)}"
        assert bench.shapes_only or all(np.array_equal(crossed[name], equal[name]) for name in equal)
        _check_best(bench, tokens, logits["logits"])
    for executable in (*ways[True], *ways[False]):
        executable.close()


def _greedy_ties(bench: Bench, dtype: str) -> None:
    """Of equal logits the first is the best; a row whose largest is infinite or a NaN has none."""
    # Weights are finite, sums of them need not be: with the tokens of the first rows they are infinite, and then a NaN.
    module = SUMS(dtype)
    player = Player(SCRIPTS["pages4"], {"full": None}, VOCABULARY)
    tensors = cast(dict[str, NDArray[np.float32]], random_weights(module))
    tensors["w"][50:] = tensors["w"][: len(tensors["w"]) - 50]
    largest = float(ml_dtypes.finfo(DTYPES[dtype]).max)  # type: ignore[no-untyped-call]
    for name, values in {"x": (1, 1), "y": (1, 1), "z": (0, -1), "u": (0, -1)}.items():
        tensors[name][:2] = 0
        tensors[name][:2, 7] = np.multiply(values, largest)
    run_passes(module, SLICE_PIPELINE)
    with closing(bench.load(module, player, tensors=tensors)) as executable:
        for turn in player.script.turns:
            batch = player.batches(turn)[0]
            batch = replace(batch, tokens=batch.tokens % 5)  # some of each
            made = executable.step(replace(batch, greedy=True), {})
            _check_best(bench, made, executable.step(batch, {})["logits"])
            if not bench.shapes_only:
                tokens, strange = made[TOKENS].tolist(), batch.tokens[batch.logit_rows] < 2
                assert np.array_equal(np.array(tokens) == -1, strange), f"{tokens}, and no numbers are {strange}"
                assert max(tokens, default=0) < 50, f"{tokens}: not the first of equals"


def _check_best(bench: Bench, made: Mapping[str, Array], logits: Array) -> None:
    """What a greedy step returned, against the logits of the same rows."""
    assert set(made) == {TOKENS}, f"a greedy step returned {sorted(made)}, not {TOKENS}"
    got, want = made[TOKENS], []
    for row in logits.tolist():
        finite = np.isfinite(max(row)) and not np.isnan(row).any()
        want.append(row.index(max(row)) if finite else -1)
    assert got.dtype == np.int32, f"tokens are {got.dtype}, not int32"
    assert got.shape == (len(logits),), f"tokens are {got.shape}, not {(len(logits),)}"
    assert bench.shapes_only or got.tolist() == want, f"the best tokens are {want}, not {got.tolist()}"


def _element(module: ModuleOp) -> Attribute:
    """The dtype that the module computes in."""
    kinds = (op.results[0].type for op in ops(module) if not isinstance(op, WeightOp))
    element: Attribute = next(kind.element_type for kind in kinds if isinstance(kind, TensorType))
    return element
