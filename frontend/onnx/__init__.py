"""ONNX models of decoders: onnxruntime's (GroupQueryAttention, MatMulNBits), and those of opset 23 (Attention).

A graph is its own config: it is raised to a module node by node, and refused where a node, or one attribute of it, has
no meaning here. Weights stay where they are, see `file`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from xdsl.dialects.builtin import ModuleOp

from plait.frontend.config_reader import PADDING, read_ends
from plait.frontend.files import TensorFiles, read_json, some, version
from plait.frontend.onnx.attention import past_inputs
from plait.frontend.onnx.file import ENCODINGS, read_onnx_file, refuse, require
from plait.frontend.onnx.nodes import HANDLERS, embeddings
from plait.frontend.onnx.raiser import Cache, Product, Raiser, Unary
from plait.frontend.own import GraphConfig
from plait.spec import WeightRef, parts

if TYPE_CHECKING:
    import onnx_ir as ir

FAMILY = "onnx"
CONFIG = "genai_config.json"
"""What onnxruntime-genai writes beside a model: ids of special tokens are there alone."""


@dataclass(frozen=True)
class OnnxConfig(GraphConfig):
    """What is known of a graph; it answers to the names that `DecoderConfig` has."""

    def build(self, dtype: str) -> ModuleOp:
        """The module. Raises UnsupportedError `onnx-*`, CheckpointError where the file changed."""
        return _raised(Path(self.file)).build(dtype)

    def unused(self) -> dict[str, str]:
        """Tensors of the file that no op uses, with the reason."""
        return _raised(Path(self.file)).unused()


@dataclass(frozen=True)
class _Raised:
    """A raised graph; step `result` of its tape gives the logits."""

    raiser: Raiser
    result: int

    def build(self, dtype: str) -> ModuleOp:
        return self.raiser.tape.build(FAMILY, dtype, self.result)

    def unused(self) -> dict[str, str]:
        tables = {name for pair in self.raiser.ropes for name in pair}
        used = {name.partition("[")[0] for name in self.raiser.refs} | _inner(self.raiser.refs.values())
        left = self.raiser.file.model.graph.initializers.keys() - used
        return {name: "a table of rope, which is computed" if name in tables else "no weight" for name in left}


def _inner(refs: Iterable[WeightRef]) -> set[str]:
    """The names of tensors that weights are made of."""
    return {part.name.partition("[")[0] for ref in refs for part in parts(ref)}


def read_onnx(path: Path) -> tuple[OnnxConfig, TensorFiles]:
    """Raise a graph, and say where its weights lie.

    Raises:
        MissingDependencyError: onnx-ir is not installed.
        CheckpointError: `onnx-damaged`: the file, or one that it names, is not whole.
        UnsupportedError: `onnx-*`: names the node, its kind and the attribute that has no meaning here.
    """
    require()
    raised = _raised(path)
    raiser = raised.raiser
    beside = path.parent / CONFIG
    said = read_json(beside).get("model", {}) if beside.is_file() else {}
    said = said if isinstance(said, dict) else {}
    vocabulary = _vocabulary(raiser)
    # Where a model has no padding, its builder writes the id of a token that it added to the tokenizer alone.
    ends = read_ends(said | {PADDING: None}, str(beside), vocabulary)
    notes = set(raiser.notes)
    if raiser.positions is None:
        notes.add(f"the graph states no longest sequence, {raiser.longest:,} tokens were taken")
    config = OnnxConfig(
        family=FAMILY,
        file=str(path),
        vocab_size=vocabulary,
        blocks=raiser.attentions,
        max_positions=raiser.longest,
        ropes=tuple(dict.fromkeys(f"{rope.kind}, theta {rope.theta:g}" for rope, _ in raiser.ropes.values())),
        dtype=_dtype(raiser),
        bos_token_id=ends.bos,
        eos_token_ids=ends.eos,
        notes=tuple(sorted(notes)),
    )
    weights: dict[str, WeightRef] = dict(raiser.refs)
    return config, TensorFiles(weights, dict(raiser.file.files), {})


def _raised(path: Path) -> _Raised:
    return _read(path, version(path))


@lru_cache(maxsize=1)
def _read(path: Path, version: tuple[int, int]) -> _Raised:
    """Raised once for the config and the module; again where the file changed."""
    raiser = Raiser(read_onnx_file(path), HANDLERS)
    graph = raiser.file.model.graph
    raiser.pasts.update(value.name or "" for node in graph for value in past_inputs(node) if value.is_graph_input())
    raiser.run(embeddings)
    logits = [value for value in graph.outputs if not isinstance(raiser.symbols.get(value.name or ""), Cache)]
    if len(logits) != 1 or not raiser.is_symbol(logits[0]):
        names = some(value.name or "" for value in logits)
        refuse("outputs", f"{path}: one output is to be logits, the others KV caches", f"no caches are {names}")
    return _Raised(raiser, _logits(raiser, logits[0]))


def _logits(raiser: Raiser, value: ir.Value) -> int:
    """The last product, perhaps scaled and capped, as the step that gives the logits."""
    symbol = raiser.symbols[value.name or ""]
    scale = softcap = None
    assert not isinstance(symbol, Cache)
    if isinstance(symbol, Unary) and symbol.kind == "softcap":
        softcap, symbol = symbol.number, symbol.of
    if isinstance(symbol, Unary) and symbol.kind == "scale":
        scale, symbol = symbol.number, symbol.of
    if not isinstance(symbol, Product) or symbol.bias is not None or symbol.dims != (1, -1, symbol.width):
        refuse("outputs", f"the output {value.name!r} is no product of all tokens with a matrix",
               f"it is {type(symbol).__name__} {list(getattr(symbol, 'dims', ()))}")  # fmt: skip
    name, size = raiser.use(symbol.weight), symbol.width
    return raiser.tape.add(lambda b, x: b.logits(x, name, size, scale=scale, softcap=softcap), [symbol.x])


def _vocabulary(raiser: Raiser) -> int:
    (logits,) = (v for v in raiser.file.model.graph.outputs if not isinstance(raiser.symbols[v.name or ""], Cache))
    symbol = raiser.symbols[logits.name or ""]
    assert not isinstance(symbol, Cache)
    return symbol.width


def _dtype(raiser: Raiser) -> str:
    """What K and V are in is what is computed in."""
    kinds = {v.dtype.name for v in raiser.file.model.graph.inputs if v.name in raiser.pasts and v.dtype is not None}
    found = {ENCODINGS.get(kind, "") for kind in kinds}
    if len(found) != 1 or not found <= {"float32", "float16", "bfloat16"}:
        refuse("dtype", f"K and V of the graph are {some(kinds)}", "float32, float16 or bfloat16 is computed in")
    return found.pop()
