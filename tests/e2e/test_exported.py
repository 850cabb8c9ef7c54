"""Programs of torch.export as plait's ops: their logits are the program's own, whole, cut and in chunks.

40 tokens: beyond windows (8) and pages (16); chunks of 7 end inside pages.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import ExportedProgram

import plait
from plait.errors import MissingDependencyError, UnsupportedError
from plait.frontend import exported
from plait.frontend.exported import RaisedConfig, read_program, save_program
from plait.frontend.opaque import ProgramConfig
from plait.ir.module import ops
from plait.ir.ops import AttentionOp, RopeOp
from tests.exported_models import LONGEST, Block, Masked, Plain, Written, export, export_cached, family
from tests.families import ORIGINAL, ROPE
from tests.host.command_line import plait as command

COUNT, LIMIT = 40, 1e-5
WINDOW = {"sliding_window": 8}
LLAMA3: dict[str, Any] = ROPE | {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}

MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "llama": (lambda: Plain(family("llama", tie_word_embeddings=True)), 3),
    "llama-eager": (lambda: Plain(family("llama", "eager", num_key_value_heads=1)), 3),
    "qwen2": (lambda: Plain(family("qwen2", "eager")), 3),
    "qwen3": (lambda: Plain(family("qwen3")), 3),
    "mistral": (lambda: Plain(family("mistral", **WINDOW)), 3),
    "gemma2": (lambda: Plain(family("gemma2", "eager")), 3),
    "gpt2": (lambda: Plain(family("gpt2")), 3),
    "phi3": (lambda: Plain(family("phi3", "eager")), 3),
    "llama3": (lambda: Plain(family("llama", rope_parameters=LLAMA3)), 3),
    "olmo2": (lambda: Plain(family("olmo2")), 3),
    "gpt_neox": (lambda: Plain(family("gpt_neox")), 3),
    "stablelm": (lambda: Plain(family("stablelm")), 3),
    "granite": (lambda: Plain(family("granite")), 3),
    "written": (Written, 2),
    "written-masked": (lambda: Written(Masked, rotary=16), 2),
}

FAST = {("llama", "cpu"), ("gemma2", "cpu"), ("gpt2", "cpu"), ("written", "cpu"), ("mistral", "h100")}
CASES = [
    pytest.param(name, device, marks=[] if (name, device) in FAST else [pytest.mark.slow])
    for name in MODELS
    for device in ("cpu", "h100")
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def ids_and_logits(module: nn.Module, count: int = COUNT) -> tuple[list[int], NDArray[np.float32]]:
    ids = [int(token) for token in np.random.default_rng(1).integers(2, 61, count)]
    with torch.no_grad():
        return ids, module(torch.tensor([ids]))[0].numpy()


def saved(program: ExportedProgram, folder: Path) -> Path:
    save_program(program, folder / "m.pt2")
    return folder / "m.pt2"


@contextmanager
def compiled(path: Path, device: str, blocks: int, slices: int = 1) -> Iterator[plait.Pipeline]:
    layers = (blocks,) if slices == 1 else (1, blocks - 1)
    with plait.compile(
        path, f"{slices}x{device}", layers=layers, context=LONGEST, run={"in_process": True}, device_code=False
    ) as pipe:
        assert len(pipe.plan.slices) == slices and pipe.plan.notes is None
        yield pipe


def check(pipe: plait.Pipeline, ids: list[int], want: NDArray[np.float32]) -> None:
    for chunk in (len(ids), 7):
        off = np.abs(pipe.logits(ids, chunk) - want).max() / np.abs(want).max()
        assert off < LIMIT, f"chunks of {chunk}: {off:.3g}"


@pytest.mark.parametrize(("name", "device"), CASES)
def test_logits_are_the_programs(name: str, device: str, tmp_path: Path) -> None:
    make, blocks = MODELS[name]
    module = make().eval()
    ids, want = ids_and_logits(module)
    path = saved(export(module), tmp_path)
    for slices in (1, 2):
        with compiled(path, device, blocks, slices) as pipe:
            check(pipe, ids, want)


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_a_cache_that_goes_in_and_out_is_plaits(name: str, tmp_path: Path) -> None:
    """The program gives the logits of the last token alone; every token's can be asked for."""
    model = family(name)
    ids, want = ids_and_logits(Plain(model))
    path = saved(export_cached(model, keep=1), tmp_path)
    with compiled(path, "cpu", 3, 2) as pipe:
        assert pipe.manifest.max_positions == 2 * LONGEST
        check(pipe, ids, want)


def test_a_program_from_python_and_the_command_line(tmp_path: Path) -> None:
    module = Written().eval()
    ids, want = ids_and_logits(module, 16)
    program = export(module, tokens=16)  # a static length is the longest
    with plait.compile(program, targets="cpu", context=16, run={"in_process": True}) as pipe:
        assert pipe.manifest.max_positions == 16
        check(pipe, ids, want)
    path = saved(program, tmp_path)
    (told,) = (value for value in json.loads(command("inspect", path, "--json").stdout).values() if "config" in value)
    assert told["family"] == "exported" and told["config"]["ropes"] == ["default, theta 500"]
    assert told["max_positions"] == 16 and told["unused"] == {}


@pytest.mark.slow
def test_what_was_read_back(tmp_path: Path) -> None:
    config, tensors = read_program(saved(export(Plain(family("phi3", "eager"))), tmp_path))
    assert isinstance(config, RaisedConfig) and (config.blocks, config.max_positions) == (3, LONGEST)
    assert config.ropes == ("default, theta 10000",)
    # One fused tensor of the file, in three parts that are byte ranges of it.
    parts = [ref for name, ref in tensors.weights.items() if ".layers.0.self_attn.qkv_proj" in name]
    assert sorted(ref.shape[0] for ref in parts) == [32, 32, 64]
    spans = sorted((ref.offset, ref.offset + ref.nbytes) for ref in parts)
    assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]]

    scaled = read_program(saved(export(Plain(family("llama", rope_parameters=LLAMA3))), tmp_path))[0].build("float32")
    ropes = [op.rope for op in ops(scaled) if isinstance(op, RopeOp)]
    assert len(ropes) == 6 and {rope.kind for rope in ropes} == {"longrope"}
    assert ropes[0].factors is not None and max(ropes[0].factors) == pytest.approx(4.0, rel=1e-6)

    windowed = read_program(saved(export(Plain(family("gemma2", "eager"))), tmp_path))[0].build("bfloat16")
    attentions = [op for op in ops(windowed) if isinstance(op, AttentionOp)]
    assert [op.window and op.window.value.data for op in attentions] == [8, None, 8]
    assert all(op.softcap is not None and op.softcap.value.data == 5.0 for op in attentions)


def test_bfloat16_programs_are_computed_in_bfloat16(tmp_path: Path) -> None:
    model = Plain(family("llama"))
    for parameter in model.parameters():  # not the frequencies of the rope
        parameter.data = parameter.data.to(torch.bfloat16)
    with torch.no_grad():
        ids = list(range(2, 42))
        want = model(torch.tensor([ids]))[0].float().numpy()
    config, _ = read_program(saved(export(model), tmp_path))
    assert isinstance(config, RaisedConfig) and config.dtype == "bfloat16"
    assert config.ropes == ("default, theta 10000",), "read back from tables before they are rounded"
    with compiled(tmp_path / "m.pt2", "cpu", 3) as pipe:
        off = np.abs(pipe.logits(ids) - want).max() / np.abs(want).max()
        assert 1e-6 < off < 5e-2


class Odd(nn.Module):
    """Around an MLP: something that plait has no op for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def test_an_odd_op_is_named_with_its_place(tmp_path: Path) -> None:
    model: Any = family("llama")
    model.model.layers[1].mlp = Odd(model.model.layers[1].mlp)
    path = saved(export(Plain(model), most=None, tokens=12), tmp_path)
    with pytest.raises(UnsupportedError, match="plan-unsupported") as caught:
        plait.plan(path, "h100")
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "torch.tanh(self" in text)
    place = f"of 'model.model.layers.1.mlp', at e2e/test_exported.py:{line} (`return torch.tanh(self.inner(x))`)"
    assert f"the node 'tanh' (aten.tanh.default) {place} is not raised" in caught.value.why
    plan = plait.plan(path, "h100,v5e")
    assert [part.devices for part in plan.slices] == [("tpu-v5e.0",)]
    assert plan.notes is not None and "one opaque op" in plan.notes[0] and "the node 'tanh'" in plan.notes[0]


class Ahead(Block):
    """Each token sees one behind it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = q.shape[2]
        seen = torch.ones(tokens, tokens).tril(1).bool()
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


class Biased(Block):
    """ALiBi: a mask that adds to scores."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        far = (places[None] - places[:, None]).float()
        mask = torch.where(far > 0, -torch.inf, 0.1 * far)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class Tiled(Block):
    """KV heads repeated as a whole: query head 1 has KV head 1, not 0."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (item[:, None].expand(1, 2, 2, -1, -1).flatten(1, 2) for item in (k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Crossed(Block):
    """Neighbours turn against each other, by the angles of halves."""

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x1, x2 = x[..., ::2], x[..., 1::2]
        return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)


class Quick(Block):
    """A scale for each feature behind the attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k, v) * self.norms[0].weight[:16]


class Longer(Block):
    """Queries that grow with the logarithm of the length, beyond 20 tokens."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = torch.arange(q.shape[2])[-1] + 1.0
        return super().attend(q * torch.clamp(length.log() / math.log(20), min=1), k, v)


class Chunked(Block):
    """Each token sees its own eight and the eleven times eight before: 89 to 96 tokens, and no such number is there."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        new, old = places[:, None], places[None]
        seen = (old <= new) & (new // 8 - old // 8 < 12)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


class Far(Written):
    """Rope tables of 200 rows."""

    def __init__(self, block: type[Block]) -> None:
        super().__init__(block, rotary=16)
        angles = torch.arange(200)[:, None] * 500.0 ** (-torch.arange(8) / 8)
        self.cos, self.sin = angles.cos(), angles.sin()


class Shifted(Block):
    """One KV head, whose K gets a bias behind its rope."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__(hidden, heads, 1, dim)
        self.key = nn.Linear(dim, dim, bias=False)
        self.shift = nn.Parameter(torch.ones(dim))

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if x.shape[2] > 1:
            return super().turn(x, cos, sin)
        return super().turn(self.key(x), cos, sin) + self.shift


class Turned(Block):
    """As many tokens as heads, and rope turns each head by its own number."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__(hidden, 12, 12, dim)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().turn(x, cos[:, 0], sin[:, 0])


class Late(Written):
    """Positions that begin at one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.cos, self.sin = self.cos[1:], self.sin[1:]


def reason(path: Path) -> str:
    try:
        config, _ = read_program(path)
    except UnsupportedError as err:
        return err.why
    assert isinstance(config, ProgramConfig)
    return config.reason


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Written(Ahead, rotary=16), "the token at 0 sees the one at 1"),
        (lambda: Written(Biased, rotary=16), "adds to scores and does not only hide keys"),
        (lambda: Written(Tiled, rotary=16), "each for its neighbours of the heads"),
        (lambda: Written(Crossed, rotary=16), "aten.slice"),
        (lambda: Written(Quick, rotary=16), "aten.mul"),
        (lambda: Late(rotary=16), "the table is not that of a rope"),
        (lambda: Written(Shifted, rotary=16), "a bias to what has turned"),
        (lambda: Written(Turned, rotary=16), "do not belong to the tokens"),
    ],
    ids=["ahead", "alibi", "tiled", "neighbours", "scale", "late", "shifted", "heads"],
)  # fmt: skip
def test_what_means_something_else_is_not_raised(make: Callable[[], nn.Module], words: str, tmp_path: Path) -> None:
    """The reason stands in the config of the opaque op, or in the error where it is no such op either."""
    path = saved(export(make(), tokens=12), tmp_path)
    assert words in reason(path)


@pytest.mark.parametrize(("block", "words"), [(Longer, "aten.mul"), (Chunked, "its mask is not causal")])
def test_what_shows_in_long_sequences_alone_is_found(block: type[Block], words: str, tmp_path: Path) -> None:
    path = saved(export(Far(block), most=200), tmp_path)
    assert words in reason(path)


def test_caches_in_another_order_are_refused(tmp_path: Path) -> None:
    model = family("llama", num_hidden_layers=1)
    program = export_cached(model)
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    first, k, v = output.args[0]
    output.args = ((first, v, k),)
    specs = program.graph_signature.output_specs
    specs[1:] = [replace(specs[2]), replace(specs[1])]
    with pytest.raises(UnsupportedError, match="exported-signature") as caught:
        read_program(saved(program, tmp_path))
    assert "not the caches that go in (past_0_0, past_0_1), in their order" in caught.value.why


def test_what_neither_plait_nor_torch_mlir_takes_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' experts count tokens with histc; and the node that keeps the program from being raised."""
    path = saved(export(Plain(family("gpt_oss", "eager")), tokens=16), tmp_path)
    with pytest.raises(UnsupportedError, match="torch-mlir-refused") as caught:
        plait.plan(path, "v5e")
    assert "the node 'histc' (aten.histc.default) of 'model.model.layers.0.mlp.experts', at " in caught.value.what
    assert "of 'model.model.layers.0.self_attn', at gpt_oss/modeling_gpt_oss.py:" in caught.value.why
    found = importlib.util.find_spec
    exported._read.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch_mlir" else found(name))
    with pytest.raises(MissingDependencyError, match="torch-mlir-missing") as missing:
        plait.plan(path, "v5e")
    assert "is not raised" in missing.value.why and "self_attn" in missing.value.why
