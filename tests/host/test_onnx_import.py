"""ONNX decoders: each is run by onnxruntime and by plait, beyond window and page, in chunks and token by token."""

from __future__ import annotations

import contextlib
import copy
import json
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import plait
from plait.errors import ArtifactError, CheckpointError, PlaitError, UnsupportedError
from plait.frontend.checkpoint import open_checkpoint
from plait.frontend.lower import lower, unused_tensors
from plait.frontend.onnx.nodes import HANDLERS
from plait.ir.module import ops
from plait.ir.ops import AttentionOp, LinearOp, RopeOp
from tests import checkpoints
from tests.checkpoints import random_ids, reference_logits
from tests.host.command_line import plait as command
from tests.onnx_models import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    POSITIONS,
    VOCABULARY,
    Attention,
    Graph,
    decoder,
    four_bits,
    group_query,
    logits,
    model_builder,
    save,
    tables,
)

CHUNKS = [19, 11]
"""Two prefill chunks, then single tokens: 40 tokens cross a window of 8 and pages of 16."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def ours(path: Path, ids: list[int], layers: tuple[int, ...] = (1, 1), **options: Any) -> Any:
    targets = ",".join(["cpu"] * len(layers))
    with plait.compile(path, targets, layers=layers, run={"in_process": True}, **options) as pipe:
        whole, chunked = pipe.logits(ids), pipe.logits(ids, chunk=7)
    assert np.abs(whole - chunked).max() < 2e-5 * np.abs(whole).max()
    return whole


def close(got: Any, want: Any, limit: float = 1e-5) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max() < limit * np.abs(want).max()


def onnx_attention(*, by_head: bool = False, mask: str | None = None, window: int = 8, **attributes: Any) -> Attention:
    """Attention of opset 23, with RotaryEmbedding before it.

    Args:
        by_head: 4-D inputs, heads before tokens, and rows of the rope tables looked up by position. Otherwise 3-D
            inputs, and the whole tables with the positions.
        mask: `bool` or `float`; computed from the lengths, with a window.
    """

    def attention(g: Graph, x: str, block: int) -> str:
        if not block:
            g.inputs.append(g.info("position_ids", ["batch", "sequence"], np.int64))
            if mask:
                g.inputs.append(g.info("attention_mask", ["batch", "total"], np.int64))
                _mask(g, mask, window)
        cos, sin = tables(g)
        if by_head:
            cos, sin = (g("Gather", table, "position_ids") for table in (cos, sin))
        qkv = []
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            value = g("MatMul", x, g.random(f"{block}.{name}", HIDDEN, heads * HEAD_DIM))
            if by_head:
                value = g("Transpose", g("Reshape", value, g.ints(0, 0, heads, HEAD_DIM)), perm=[0, 2, 1, 3])
            if name != "v":
                more = {} if by_head else {"num_heads": heads}
                value = g("RotaryEmbedding", value, cos, sin, "" if by_head else "position_ids", **more)
            qkv.append(value)
        heads = {} if by_head else {"q_num_heads": HEADS, "kv_num_heads": KV_HEADS}
        seen = "visible" if mask else ""
        results = g("Attention", *qkv, seen, *g.caches(block), outputs=3, **heads, **attributes)
        g.rename(results, block)
        made: str = results[0]
        if by_head:
            made = g("Reshape", g("Transpose", made, perm=[0, 2, 1, 3]), g.ints(0, 0, HEADS * HEAD_DIM))
        return made

    return attention


def _mask(g: Graph, kind: str, window: int) -> None:
    """`visible` (sequence, total): j <= i and i - j < window."""
    zero, one = g.tensor("zero", 0, np.int64), g.tensor("one", 1, np.int64)
    total = g("Gather", g("Shape", "attention_mask"), one)
    places = g("Range", zero, total, one)
    positions = g("Unsqueeze", g("Squeeze", "position_ids", g.ints(0)), g.ints(1))
    behind = g("LessOrEqual", places, positions)
    near = g("Less", g("Sub", positions, places), g.tensor("window", window, np.int64))
    seen = g("And", behind, near)
    if kind == "float":
        seen = g("Where", seen, g.tensor("shown", 0.0), g.tensor("hidden", np.finfo(np.float32).min))
    g.nodes[-1].output[0] = "visible"


GROUP_QUERY: dict[str, Attention] = {
    "window softcap sinks": group_query(sinks=True, local_window_size=8, softcap=5.0, scale=0.4),
    "interleaved biases": group_query(bias=True, rotary_interleaved=1),
    "interleaved apart partial": group_query(packed=False, bias=True, rotary_interleaved=1, rotary_dim=16),
    "partial": group_query(rotary_dim=16, smooth_softmax=0),
    "no rope": group_query(do_rotary=0, local_window_size=8),
}
OPSET_23: dict[str, Attention] = {
    "causal": onnx_attention(is_causal=1),
    "causal softcap": onnx_attention(is_causal=1, softcap=5.0, scale=0.4, by_head=True),
    "bool mask": onnx_attention(mask="bool", is_causal=1),
    "float mask by head": onnx_attention(mask="float", by_head=True),
}


@pytest.mark.parametrize("case", [*GROUP_QUERY, *OPSET_23])
def test_logits_equal_onnxruntime(case: str, tmp_path: Path) -> None:
    ids = random_ids(40, vocabulary=VOCABULARY)
    attention = (GROUP_QUERY | OPSET_23)[case]
    norm = "SimplifiedLayerNormalization" if case in GROUP_QUERY else "RMSNormalization"
    path = save(decoder(attention, norm=norm), tmp_path / "m.onnx", inline=case in OPSET_23)
    close(ours(path, ids), logits(path, ids, CHUNKS))


@pytest.mark.parametrize(("zeros", "group"), [(True, 16), (False, 16), (True, 32)])
def test_four_bit_products(zeros: bool, group: int, tmp_path: Path) -> None:
    """Groups of 16 make odd numbers of zeros in a row of 48; groups of 32 are no whole ones there."""
    ids = random_ids(40, vocabulary=VOCABULARY)
    g = decoder(group_query(rotary_interleaved=1), norm="SimplifiedLayerNormalization")
    path = save(four_bits(g, zeros=zeros, group=group), tmp_path / "m.onnx")
    if HIDDEN % group:
        with pytest.raises(UnsupportedError, match="48 columns of 4 bits in groups of 32"):
            open_checkpoint(path)
        return
    close(ours(path, ids), logits(path, ids, CHUNKS))
    module = lower(open_checkpoint(path))
    kinds = {str(op.weight.type) for op in ops(module) if isinstance(op, LinearOp)}
    assert all("ui4" in kind and "group 16" in kind for kind in kinds)


def test_half_precision(tmp_path: Path) -> None:
    """As close as half of a step of float16 allows; the module keeps the dtype."""
    ids = random_ids(40, vocabulary=VOCABULARY)
    g = decoder(group_query(local_window_size=8), norm="SimplifiedLayerNormalization", dtype=np.float16)
    path = save(g, tmp_path / "m.onnx")
    assert open_checkpoint(path).dtype == "float16"
    want = logits(path, ids, CHUNKS)
    assert np.abs(ours_in(path, ids, "float16") - want).max() < 1e-2 * np.abs(want).max()


def ours_in(path: Path, ids: list[int], dtype: str) -> Any:
    with plait.compile(path, "cpu", dtype=dtype, run={"in_process": True}) as pipe:
        return pipe.logits(ids)


BUILT = [
    ("llama", "fp32", {}, {}),
    ("qwen2", "int4", {"tie_word_embeddings": True}, {"accuracy_level": 1}),
    pytest.param("qwen2", "fp32", {"tie_word_embeddings": True}, {}, marks=pytest.mark.slow),
    pytest.param("llama", "int8", {}, {"accuracy_level": 1}, marks=pytest.mark.slow),
    pytest.param("llama", "fp32", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }}, {}, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("family", "precision", "config", "options"), BUILT)
def test_models_that_the_model_builder_made(
    family: str, precision: str, config: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """From a checkpoint to logits by onnxruntime-genai's own exporter; plain weights also equal transformers'."""
    source = checkpoints.save(tmp_path / "hf", family, tokenizer=True, num_hidden_layers=2, **config)
    path = model_builder(source, tmp_path / "onnx", precision, **options)
    ids = random_ids(40)
    got = ours(path, ids)
    close(got, logits(path, ids, CHUNKS, head_dim=16))
    if precision == "fp32":
        close(got, reference_logits(source, ids))
    found = open_checkpoint(path)
    assert (found.bos_token_id, found.eos_token_ids, found.max_positions) == (0, (1,), 512)
    assert found.tokenizer is not None and found.chat_template is not None


def test_what_a_checkpoint_says(tmp_path: Path) -> None:
    path = save(decoder(GROUP_QUERY["window softcap sinks"], norm="SimplifiedLayerNormalization"), tmp_path / "m.onnx")
    checkpoint = open_checkpoint(path)
    module = lower(checkpoint)
    assert (checkpoint.family, checkpoint.max_positions, checkpoint.dtype) == ("onnx", POSITIONS, "float32")
    attentions = [op for op in ops(module) if isinstance(op, AttentionOp)]
    said = [(op.window_tokens, op.softcap.value.data, op.sinks is not None) for op in attentions]  # type: ignore[union-attr]
    assert said == [(8, 5.0, True)] * 2 and [op.block_index for op in attentions] == [0, 1]
    rope = next(op.rope for op in ops(module) if isinstance(op, RopeOp))
    assert (rope.kind, rope.theta) == ("default", 10000.0)
    assert unused_tensors(checkpoint, module) == {
        "cos": "a table of rope, which is computed",
        "sin": "a table of rope, which is computed",
        "one": "no weight",
        "ints.1": "no weight",
    }
    told = command("inspect", path, "--json")
    facts = json.loads(told.stdout)["checkpoint"]
    assert facts["config"]["ropes"] == ["default, theta 10000"] and facts["config"]["vocab_size"] == VOCABULARY


def test_an_artifact_knows_its_files(tmp_path: Path) -> None:
    path = save(decoder(group_query(), norm="SimplifiedLayerNormalization"), tmp_path / "m.onnx")
    made = plait.compile_artifact(path, "cpu", output=tmp_path / "m.plait")
    names = {Path(name).name for name in made.manifest.weights}
    assert names == {"m.onnx", "m.onnx.data"}
    data = path.with_name("m.onnx.data")
    whole = data.read_bytes()
    for damage in (lambda: data.write_bytes(whole + b"\0"), lambda: path.write_bytes(path.read_bytes() + b"\x30\x01")):
        damage()
        with pytest.raises(ArtifactError, match="changed since it was compiled"):
            plait.open(made.folder, run={"in_process": True})
        data.write_bytes(whole)


def test_embedded_weights_hold_a_fused_matrix_once(tmp_path: Path) -> None:
    path = save(decoder(group_query(), norm="SimplifiedLayerNormalization"), tmp_path / "m.onnx")
    made = plait.compile_artifact(path, "cpu", output=tmp_path / "m.plait", embed_weights=True)
    held = sum(file.stat().st_size for file in made.folder.rglob("weights.bin"))
    assert held <= path.with_name("m.onnx.data").stat().st_size
    path.with_name("m.onnx.data").unlink()
    ids = random_ids(20, vocabulary=VOCABULARY)
    with plait.open(made.folder, in_process=True) as pipe:
        got = pipe.logits(ids)
    save(decoder(group_query(), norm="SimplifiedLayerNormalization"), path)
    close(got, logits(path, ids, [20]))


def test_tensors_are_never_read(tmp_path: Path) -> None:
    """The table's 3 GB are a hole in a file; 40 MB inside the message are passed over."""
    g = decoder(group_query(), norm="SimplifiedLayerNormalization")
    rows = 3 * 2**30 // (4 * HIDDEN)
    path = save(g, tmp_path / "m.onnx")
    model = onnx.load(path, load_external_data=False)
    (table,) = (tensor for tensor in model.graph.initializer if tensor.name == "table")
    table.dims[0] = rows
    entries = {entry.key: entry for entry in table.external_data}
    entries["location"].value, entries["length"].value, entries["offset"].value = "big", str(rows * 4 * HIDDEN), "0"
    filler = helper.make_tensor("filler", TensorProto.FLOAT, [10 << 20], b"\0" * (40 << 20), raw=True)
    model.graph.initializer.append(filler)
    path.write_bytes(model.SerializeToString())
    del model, table, filler
    with (tmp_path / "big").open("wb") as file:
        file.truncate(rows * 4 * HIDDEN)
    tracemalloc.start()
    checkpoint = open_checkpoint(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert checkpoint.weights is not None and checkpoint.weights["table"].shape == (rows, HIDDEN)
    assert peak < 8 << 20


Change = Callable[[Graph], None]


def _set(kind: str, **attributes: Any) -> Change:
    def change(g: Graph) -> None:
        node = next(node for node in g.nodes if node.op_type == kind)
        kept = [attribute for attribute in node.attribute if attribute.name not in attributes]
        del node.attribute[:]
        node.attribute.extend([*kept, *(helper.make_attribute(*item) for item in attributes.items())])

    return change


def _rewire(kind: str, index: int, value: str) -> Change:
    def change(g: Graph) -> None:
        node = next(node for node in g.nodes if node.op_type == kind)
        node.input.extend([""] * (index + 1 - len(node.input)))
        node.input[index] = value

    return change


def _tensor(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda g: g.tensors.update({name: change(g.tensors[name])})


def _late_row(table: Any) -> Any:
    table = table.copy()
    table[50] *= -1
    return table


GQA, MASKED = group_query(), onnx_attention(mask="bool")

REFUSED: dict[str, tuple[Attention, Change, str, str]] = {
    "unknown attribute": (GQA, _set("GroupQueryAttention", future=1), "attribute", "future = 1"),
    "smooth softmax": (GQA, _set("GroupQueryAttention", smooth_softmax=1), "attribute", "smooth_softmax = 1"),
    "not causal": (GQA, _set("GroupQueryAttention", causal=0), "attribute", "causal = 0"),
    "quantised cache": (GQA, _set("GroupQueryAttention", k_quant_type="PER_TENSOR"), "attribute", "PER_TENSOR"),
    "window-sized cache": (GQA, _set("GroupQueryAttention", sliding_window_cache=1), "attribute", "sliding"),
    "norm axis": (GQA, _set("RMSNormalization", axis=1), "attribute", "axis = 1"),
    "unknown node": (GQA, lambda g: _swap(g, "Sigmoid", "Softplus"), "node", "(Softplus)"),
    "no residual": (GQA, lambda g: _swap(g, "Add", "Sub"), "node", "(Sub)"),
    "tokens elsewhere": (GQA, lambda g: _swap(g, "Gather", "GatherElements"), "node", "looks up no tokens"),
    "lengths": (GQA, _rewire("GroupQueryAttention", 5, "length"), "fact", "length of the sequence less one"),
    "rope of two kinds": (GQA, _tensor("cos", _late_row), "rope", "position 50"),
    "no rope at all": (GQA, _tensor("cos", lambda x: x[::-1].copy()), "rope", "'cos'"),
    "no table": (GQA, _rewire("GroupQueryAttention", 7, ""), "rope", "no tables"),
    "no cache": (GQA, _rewire("GroupQueryAttention", 3, ""), "cache", "no KV cache"),
    "one cache twice": (
        GQA,
        lambda g: _renamed(g, "past_key_values.1.key", "past_key_values.0.key"),
        "cache",
        "another",
    ),
    "codes of integers": (GQA, _tensor("0.o", lambda x: x.astype(np.int32)), "tensor", "INT32"),
    "two logits": (GQA, lambda g: g.outputs.append(g.info(g.nodes[0].output[0], None)), "outputs", "logits"),
    "positions": (onnx_attention(is_causal=1), _rewire("RotaryEmbedding", 3, "input_ids"), "node", "no tokens"),
    "no mask": (onnx_attention(is_causal=0), lambda g: None, "mask", "not causal and has no mask"),
    "mask sees ahead": (MASKED, lambda g: _swap(g, "LessOrEqual", "GreaterOrEqual"), "mask", "the token at"),
    "unknown input": (MASKED, lambda g: _renamed(g, "attention_mask", "gate"), "input", "'gate'"),
    "bias on scores": (onnx_attention(mask="float"), _tensor("shown", lambda x: x + 0.5), "mask", "adds to scores"),
}


def _swap(g: Graph, kind: str, other: str) -> None:
    for node in g.nodes:
        if node.op_type == kind:
            node.op_type = other


def _renamed(g: Graph, name: str, other: str) -> None:
    for node in g.nodes:
        node.input[:] = [other if item == name else item for item in node.input]
    for item in g.inputs:
        item.name = other if item.name == name else item.name


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_meaning_is_refused_by_name(case: str, tmp_path: Path) -> None:
    attention, change, code, word = REFUSED[case]
    g = decoder(attention)
    change(g)
    path = save(g, tmp_path / "m.onnx")
    with pytest.raises(UnsupportedError) as caught:
        open_checkpoint(path)
    assert caught.value.code.partition("-")[2] == code
    assert word in str(caught.value)


def test_damaged_files_are_named_errors(tmp_path: Path) -> None:
    path = save(decoder(group_query(), norm="SimplifiedLayerNormalization"), tmp_path / "m.onnx")
    whole, data = path.read_bytes(), path.with_name("m.onnx.data")
    kept = data.read_bytes()
    data.write_bytes(kept[:-4])
    with pytest.raises(CheckpointError, match="which has"):
        open_checkpoint(path)
    data.unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        open_checkpoint(path)
    data.write_bytes(kept)
    for location in ("../m.onnx.data", "/etc/passwd"):
        model = onnx.load(path, load_external_data=False)
        model.graph.initializer[0].external_data[0].value = location
        path.write_bytes(model.SerializeToString())
        with pytest.raises(CheckpointError, match="outside of its folder"):
            open_checkpoint(path)
        path.write_bytes(whole)
    path.write_bytes(whole.replace(b"offset", b"offs4t", 1))
    with pytest.raises(CheckpointError, match="offs4t"):
        open_checkpoint(path)
    rng = np.random.default_rng(0)
    for _ in range(150):
        broken = bytearray(whole)
        cut = int(rng.integers(0, len(broken)))
        broken[cut] = int(rng.integers(0, 256))
        path.write_bytes(bytes(broken[:cut]) if rng.random() < 0.2 else bytes(broken))
        with contextlib.suppress(PlaitError):
            lower(open_checkpoint(path))


Damage = Callable[[Any], object]


def damaged_nodes(model: Any) -> Iterator[tuple[str, Any]]:
    """Every kind of node without an input, cut short, and with attributes of other types, or none."""
    seen = set()
    for at, node in enumerate(model.graph.node):
        if (node.domain, node.op_type, len(node.input)) in seen:
            continue
        seen.add((node.domain, node.op_type, len(node.input)))
        known = HANDLERS.get((node.domain, node.op_type))
        names = {item.name for item in node.attribute} | (set(known.attributes) if known else set())
        changes: list[tuple[str, Damage]] = [("one output", lambda own: own.output.__delitem__(slice(1, None)))]
        for index in range(len(node.input)):
            changes += [(f"no input {index}", partial(_drop, index)), (f"{index} inputs", partial(_cut, index))]
        for name in sorted(names):
            for value in (0, -1, 7, 0.0, float("nan"), "x", [1], [1.5], None):
                changes.append((f"{name} = {value}", partial(_say, name, value)))
        for what, change in changes:
            copied = copy.deepcopy(model)
            change(copied.graph.node[at])
            yield f"{node.op_type}: {what}", copied


def _drop(index: int, node: Any) -> None:
    node.input[index] = ""


def _cut(index: int, node: Any) -> None:
    del node.input[index:]


def _say(name: str, value: Any, node: Any) -> None:
    kept = [item for item in node.attribute if item.name != name]
    del node.attribute[:]
    node.attribute.extend(kept if value is None else [*kept, helper.make_attribute(name, value)])


@pytest.mark.slow
@pytest.mark.parametrize("case", [*GROUP_QUERY, *OPSET_23, "bits"])
def test_damaged_nodes_are_named_errors(case: str, tmp_path: Path) -> None:
    norm = "SimplifiedLayerNormalization" if case in GROUP_QUERY else "RMSNormalization"
    attention = (GROUP_QUERY | OPSET_23).get(case, group_query(packed=False))
    g = decoder(attention, norm=norm)
    path = save(four_bits(g, zeros=True) if case == "bits" else g, tmp_path / "m.onnx")
    count = 0
    for _, model in damaged_nodes(onnx.load(path, load_external_data=False)):
        path.write_bytes(model.SerializeToString())
        with contextlib.suppress(PlaitError):
            lower(open_checkpoint(path))
        count += 1
    assert count > 50


def test_what_a_node_lacks_is_named_and_our_own_faults_are_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(decoder(group_query()), tmp_path / "m.onnx")
    whole = onnx.load(path, load_external_data=False)

    def told(kind: str, change: Damage) -> str:
        model = copy.deepcopy(whole)
        change(next(node for node in model.graph.node if node.op_type == kind))
        path.write_bytes(model.SerializeToString())
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
        assert caught.value.code == "onnx-damaged"
        return caught.value.why

    assert told("RMSNormalization", partial(_cut, 1)).endswith("lacks its input 1")
    attention, key = "GroupQueryAttention", ("com.microsoft", "GroupQueryAttention")
    assert told(attention, partial(_say, "num_heads", "x")).endswith("num_heads is 'x', and must be of type int")
    assert told(attention, partial(_say, "scale", 1)).endswith("scale is 1, and must be of type float")

    def wrong(*words: Any) -> None:
        raise TypeError("ours")

    monkeypatch.setitem(HANDLERS, key, replace(HANDLERS[key], handle=wrong))
    path.write_bytes(whole.SerializeToString())
    with pytest.raises(TypeError, match="ours"):
        open_checkpoint(path)


def test_a_config_beside_it_is_refused(tmp_path: Path) -> None:
    path = save(decoder(group_query(), norm="SimplifiedLayerNormalization"), tmp_path / "m.onnx")
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(plait.errors.UsageError, match="is a graph, which needs none"):
        open_checkpoint(path, tmp_path / "c.json")


def test_without_onnx_ir_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnx_ir" else found(name))
    (tmp_path / "m.onnx").write_bytes(b"\x08\x0a")
    told = command("inspect", tmp_path / "m.onnx", "--json")
    assert json.loads(told.stdout)["error"]["try"] == "pip install 'plait[onnx]'"
