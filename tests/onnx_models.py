"""Tiny decoders as ONNX graphs, written with onnx's own helpers, and what onnxruntime says about them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, POSITIONS = 61, 48, 4, 2, 32, 64, 64
MS = "com.microsoft"


@dataclass
class Graph:
    """Collects nodes and tensors; values are names. Tensors are random, and wide enough for attention to be uneven."""

    opset: int = 23
    dtype: type[np.floating[Any]] = np.float32
    nodes: list[Any] = field(default_factory=list)
    tensors: dict[str, NDArray[Any]] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __call__(self, kind: str, *inputs: str, domain: str = "", outputs: int = 1, **attributes: Any) -> Any:
        """The name of a node's result, or the names of several."""
        place = f"{kind}_{len(self.nodes)}"
        names = [f"{place}.{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, name=place, domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def tensor(self, name: str, values: Any, dtype: Any = None) -> str:
        self.tensors[name] = np.asarray(values, dtype or self.dtype)
        return name

    def random(self, name: str, *shape: int) -> str:
        scale = 1.5 * shape[0] ** -0.5 if len(shape) > 1 else 0.3
        return self.tensor(name, self.rng.standard_normal(shape) * scale + (len(shape) == 1))

    def ints(self, *values: int) -> str:
        return self.tensor(f"ints.{'.'.join(map(str, values))}", values, np.int64)

    def info(self, name: str, shape: Any, dtype: Any = None) -> Any:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype or self.dtype))
        return helper.make_tensor_value_info(name, kind, shape)

    def caches(self, block: int) -> tuple[str, str]:
        """The inputs of K and V of a block."""
        names = f"past_key_values.{block}.key", f"past_key_values.{block}.value"
        self.inputs += [self.info(name, ["batch", KV_HEADS, "past", HEAD_DIM]) for name in names]
        self.outputs += [
            self.info(f"present.{block}.{side}", ["batch", KV_HEADS, "total", HEAD_DIM]) for side in ("key", "value")
        ]
        return names

    def rename(self, names: list[str], block: int) -> None:
        """The last node's results after the first are K and V that come out."""
        for index, side in ((1, "key"), (2, "value")):
            self.nodes[-1].output[index] = f"present.{block}.{side}"

    def model(self) -> Any:
        tensors = [numpy_helper.from_array(values, name) for name, values in self.tensors.items()]
        graph = helper.make_graph(self.nodes, "decoder", self.inputs, self.outputs, tensors)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(MS, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


Attention = Callable[[Graph, str, int], str]
"""`attention(graph, x, block)`: from the normed input to what is projected out, (batch, sequence, heads x head_dim)."""


def decoder(attention: Attention, blocks: int = 2, norm: str = "RMSNormalization", **graph: Any) -> Graph:
    """Pre-norm blocks with a gated MLP."""
    g = Graph(**graph)
    g.inputs.append(g.info("input_ids", ["batch", "sequence"], np.int64))
    x = g("Gather", g.random("table", VOCABULARY, HIDDEN), "input_ids")
    for block in range(blocks):
        normed = g(norm, x, g.random(f"{block}.norm", HIDDEN), epsilon=1e-6, axis=-1)
        mixed = attention(g, normed, block)
        x = g("Add", x, g("MatMul", mixed, g.random(f"{block}.o", HEADS * HEAD_DIM, HIDDEN)))
        normed = g(norm, x, g.random(f"{block}.norm2", HIDDEN), epsilon=1e-6, axis=-1)
        gate = g("MatMul", normed, g.random(f"{block}.gate", HIDDEN, INNER))
        up = g("MatMul", normed, g.random(f"{block}.up", HIDDEN, INNER))
        inner = g("Mul", g("Mul", gate, g("Sigmoid", gate)), up)
        x = g("Add", x, g("MatMul", inner, g.random(f"{block}.down", INNER, HIDDEN)))
    normed = g(norm, x, g.random("norm", HIDDEN), epsilon=1e-6, axis=-1)
    g("MatMul", normed, g.random("head", HIDDEN, VOCABULARY))
    g.nodes[-1].output[0] = "logits"
    g.outputs.insert(0, g.info("logits", ["batch", "sequence", VOCABULARY]))
    return g


def tables(g: Graph, rotary_dim: int = HEAD_DIM, theta: float = 10000.0, positions: int = POSITIONS) -> tuple[str, str]:
    """cos and sin, [positions, rotary_dim / 2], by the definition."""
    angle = np.outer(np.arange(positions), theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim))
    return g.tensor("cos", np.cos(angle)), g.tensor("sin", np.sin(angle))


def group_query(*, packed: bool = True, rotary_dim: int = HEAD_DIM, bias: bool = False, sinks: bool = False,
                **attributes: Any) -> Attention:  # fmt: skip
    """onnxruntime's attention, as its model builder feeds it: lengths come from the attention mask."""

    def attention(g: Graph, x: str, block: int) -> str:
        if not block:
            g.inputs.append(g.info("attention_mask", ["batch", "total"], np.int64))
            summed = g("ReduceSum", "attention_mask", g.ints(1), keepdims=0)
            g("Cast", g("Sub", summed, g.ints(1)), to=TensorProto.INT32)
            g.nodes[-1].output[0] = "seqlens"
            length = g("Gather", g("Shape", "attention_mask"), g.tensor("one", 1, np.int64), axis=0)
            g("Cast", length, to=TensorProto.INT32)
            g.nodes[-1].output[0] = "length"
        narrow, wide = KV_HEADS * HEAD_DIM, HEADS * HEAD_DIM
        widths = [wide + 2 * narrow] if packed else [wide, narrow, narrow]
        names = ["qkv"] if packed else ["q", "k", "v"]
        made = []
        for name, width in zip(names, widths, strict=True):
            product = g("MatMul", x, g.random(f"{block}.{name}", HIDDEN, width))
            made.append(g("Add", product, g.random(f"{block}.{name}.bias", width)) if bias else product)
        cos, sin = tables(g, rotary_dim)
        sink = g.random(f"{block}.sinks", HEADS) if sinks else ""
        inputs = [*made, *[""] * (3 - len(made)), *g.caches(block), "seqlens", "length", cos, sin, "", "", sink]
        given = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "do_rotary": 1} | attributes
        results = g("GroupQueryAttention", *inputs, domain=MS, outputs=3, **given)
        g.rename(results, block)
        return str(results[0])

    return attention


def four_bits(g: Graph, *, zeros: bool, group: int = 16, seed: int = 1) -> Graph:
    """Every matrix but the table as MatMulNBits of random codes."""
    rng = np.random.default_rng(seed)
    for node in g.nodes:
        if node.op_type != "MatMul":
            continue
        name = node.input[1]
        columns, rows = g.tensors.pop(name).shape
        groups = columns // group
        g.tensors[f"{name}.codes"] = rng.integers(0, 256, (rows, groups, group // 2)).astype(np.uint8)
        g.tensors[f"{name}.scales"] = rng.uniform(0.02, 0.1, (rows, groups)).astype(np.float32)
        inputs = [node.input[0], f"{name}.codes", f"{name}.scales"]
        if zeros:
            g.tensors[f"{name}.zeros"] = rng.integers(0, 256, (rows, -(-groups // 2))).astype(np.uint8)
            inputs.append(f"{name}.zeros")
        given = {"K": columns, "N": rows, "bits": 4, "block_size": group, "accuracy_level": 1}
        made = helper.make_node("MatMulNBits", inputs, list(node.output), name=node.name, domain=MS, **given)
        node.CopyFrom(made)
    return g


def save(g: Graph, path: Path, *, inline: bool = False) -> Path:
    """Write the model, with its tensors in a file beside it unless `inline`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if inline:
        onnx.save(g.model(), path)
    else:
        onnx.save(g.model(), path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=64)
    return path


def session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@dataclass
class Player:
    """One sequence, fed to a model in steps; K and V that come out go in again."""

    session: Any
    head_dim: int = HEAD_DIM
    kv: dict[str, NDArray[Any]] = field(default_factory=dict)
    past: int = 0

    def __post_init__(self) -> None:
        kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        for item in self.session.get_inputs():
            if item.name.startswith("past"):
                shape = [1, item.shape[1], 0, item.shape[3] if isinstance(item.shape[3], int) else self.head_dim]
                self.kv[item.name] = np.zeros(shape, kinds[item.type])

    def step(self, **given: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The results that are no caches. What the graph asks for beside `given` follows from the lengths."""
        new = next(iter(given.values())).shape[1]
        total = self.past + new
        more = {"attention_mask": np.ones((1, total), np.int64), "position_ids": np.arange(self.past, total)[None]}
        asked = {item.name for item in self.session.get_inputs()}
        feeds = {name: value for name, value in (given | more | self.kv).items() if name in asked}
        names = [item.name for item in self.session.get_outputs()]
        made = dict(zip(names, self.session.run(None, feeds), strict=True))
        self.kv = {name.replace("present", "past_key_values"): made.pop(name) for name in names if "present" in name}
        self.past = total
        return made


def logits(
    paths: Path | list[Path], ids: list[int], chunks: list[int], head_dim: int = HEAD_DIM
) -> NDArray[np.float32]:
    """[len(ids), vocabulary]: of one model, or of slices in a row, fed in chunks and then token by token."""
    players = [Player(session(path), head_dim) for path in (paths if isinstance(paths, list) else [paths])]
    rows, at = [], 0
    for count in [*chunks, *[1] * (len(ids) - sum(chunks))]:
        flow = {"input_ids": np.array([ids[at : at + count]])}
        for player in players:
            flow = player.step(**flow)
        rows.append(flow["logits"][0])
        at += count
    return np.concatenate(rows).astype(np.float32)


def model_builder(source: Path, folder: Path, precision: str, **options: Any) -> Path:
    """What onnxruntime-genai's model builder makes of a checkpoint."""
    words = [f"{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", folder, "-p", precision]
    more = ["-e", "cpu", "-c", folder / "cache", *(["--extra_options", *words] if words else [])]
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "model.onnx"
