"""Decoders that plait's IR has no ops for, exported by torch and run by XLA as one opaque op."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import plait
from plait.backends.conformance.script import Player, Script, Turn
from plait.backends.cpu import BACKEND as CPU
from plait.errors import CheckpointError, UnsupportedError
from plait.frontend.checkpoint import open_checkpoint
from plait.frontend.exported import build_program, read_program, save_program
from plait.frontend.lower import lower
from plait.frontend.opaque import ProgramConfig
from plait.ir import Builder, Step, parse_module, print_module, read_module
from plait.ir.module import ops
from plait.ir.ops import OpaqueOp
from plait.ir.oracle import Oracle
from tests.host.command_line import plait as command

VOCABULARY, LONGEST = 61, 60
PROMPTS = [[3, 4, 5], [7, 1, 44, 2, 9, 9, 30], [12]]
LOCAL = {"in_process": True, "threads": 1}


class Decoder(nn.Module):
    """A mean over everything before, a layer norm and a sine: nothing of it is in plait's IR. The head is tied."""

    def __init__(self, vocabulary: int = VOCABULARY, hidden: int = 32) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.norm = nn.Embedding(vocabulary, hidden), nn.LayerNorm(hidden)
        self.mix, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("rates", torch.rand(4, hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        count = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)[None, :, None]
        x = torch.sin(4 * self.mix(x.cumsum(1) / count) + x * self.rates[2])
        return self.head(2 * self.out(self.norm(x)))


def export(module: nn.Module, tokens: int | None = None, most: int | None = LONGEST) -> ExportedProgram:
    shapes = None if tokens else ({1: Dim("tokens", max=most) if most else Dim("tokens")},)
    return torch.export.export(module.eval(), (torch.zeros(1, tokens or 8, dtype=torch.long),), dynamic_shapes=shapes)


def greedy(module: nn.Module, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(module(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def decoder() -> Iterator[nn.Module]:
    torch.set_num_threads(1)
    return Decoder().eval()


@pytest.fixture(scope="module")
def exported(decoder: nn.Module) -> ExportedProgram:
    return export(decoder)


@pytest.fixture(scope="module")
def file(exported: ExportedProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "decoder.pt2"
    save_program(exported, path)
    return path


def test_text_is_what_torch_would_have_written(decoder: nn.Module, exported: ExportedProgram) -> None:
    want = [greedy(decoder, prompt, 20) for prompt in PROMPTS]
    assert len({token for ids in want for token in ids}) > 10, "the model repeats itself: anything would pass"
    with plait.compile(exported, targets="v5e", context=LONGEST, concurrency=4, run=LOCAL) as pipe:
        assert pipe.generate_ids(PROMPTS, max_tokens=20) == want
        ids = [int(token) for token in np.random.default_rng(0).integers(0, VOCABULARY, LONGEST)]
        with torch.no_grad():
            scores = decoder(torch.tensor([ids]))[0].numpy()
        for chunk in (LONGEST, 7):  # what earlier steps brought is still there
            np.testing.assert_allclose(pipe.logits(ids, chunk), scores, rtol=1e-4, atol=1e-4)
        stats = pipe.stats()["slices"][0]["executable"]
        assert stats["compiled_shapes"] == 2, "one row or all of them, at the one length"


def test_a_file_is_compiled_where_it_lies_and_runs_in_a_worker(decoder: nn.Module, file: Path, tmp_path: Path) -> None:
    made = command("compile", file, "--targets", "h100,v5e", "--context", LONGEST, "-o", tmp_path / "d.plait", "--json")
    assert made.exit_code == 0, made.stderr
    plan = json.loads(made.stdout)["plan"]
    assert [part["devices"] for part in plan["slices"]] == [["tpu-v5e.0"]]
    (idle,) = plan["idle"]
    assert (
        "refuses plait.opaque (block 0)" in idle["cause"]["why"] and "place it on an xla device" in idle["cause"]["why"]
    )
    (note,) = plan["notes"]
    assert "one opaque op" in note and "computes a sequence anew from its first token" in note
    assert note in command("inspect", tmp_path / "d.plait", env={"COLUMNS": "1000"}).stdout
    module = read_module(tmp_path / "d.plait" / "slices" / "0-tpu-v5e" / "slice.mlir")
    ((text,),) = (op.texts for op in ops(module) if isinstance(op, OpaqueOp))
    assert f"tensor<{LONGEST}x{VOCABULARY}xf32>" in text and 'dense<"0x' not in text, "weights are arguments"
    with plait.open(tmp_path / "d.plait", threads=1) as pipe:
        assert pipe.generate_ids(PROMPTS[:1], max_tokens=5) == [greedy(decoder, PROMPTS[0], 5)]
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    other = moved / file.name
    other.write_bytes(file.read_bytes().replace(b'"e.weight"', b'"f.weight"') + b"x")
    with pytest.raises(plait.PlaitError, match=r"changed since it was compiled|no program"):
        plait.open(tmp_path / "d.plait", weights=moved)


def test_a_static_length_is_the_longest_sequence(decoder: nn.Module) -> None:
    with plait.compile(export(decoder, 16), targets="v5e", context=16, concurrency=1, run=LOCAL) as pipe:
        assert pipe.manifest.max_positions == 16
        assert pipe.generate_ids(PROMPTS[1:2], max_tokens=9) == [greedy(decoder, PROMPTS[1], 9)]
        with pytest.raises(plait.PlaitError):
            pipe.generate_ids([[1] * 16], max_tokens=4)


def test_bfloat16_keeps_the_programs_own_dtypes(tmp_path: Path) -> None:
    module = Decoder().to(torch.bfloat16).eval()
    path = tmp_path / "half.pt2"
    save_program(export(module, 16), path)
    checkpoint = open_checkpoint(path)
    assert checkpoint.dtype == "bfloat16"
    with pytest.raises(UnsupportedError, match="computes in bfloat16, not in float32"):
        lower(checkpoint, "float32")
    with plait.compile(path, targets="v5e", context=16, concurrency=1, run=LOCAL) as pipe:
        ids = list(range(16))
        with torch.no_grad():
            want = module(torch.tensor([ids]))[0].float().numpy()
        assert np.abs(pipe.logits(ids) - want).max() < 0.05 * np.abs(want).max()


def test_other_backends_refuse_it_by_name(file: Path) -> None:
    with pytest.raises(UnsupportedError, match="plan-unsupported") as caught:
        plait.plan(file, "h100,mi300,cpu", context=LONGEST)
    for device in ("h100.0", "mi300x.0", "cpu.0"):
        assert device in caught.value.why
    assert "plait.opaque (block 0)" in caught.value.why and "place it on an xla device" in caught.value.why


def _module(**changed: Any) -> str:
    said = {"programs": ["module {}"], "lengths": [8, 16], "flops": [10, 20], "vocabulary": 7} | changed
    b = Builder("opaque", "float32")
    b.block = 0
    logits = b.opaque({"w": ((3, 4), "float32"), "b": ((4,), "bfloat16")}, **said)
    return print_module(b.finish({"logits": logits}))


def test_the_op_as_text_and_what_it_costs() -> None:
    text = _module(programs=['func "a" {\n}', "b"])
    module = parse_module(text)
    assert print_module(module) == text
    op = next(op for op in ops(module) if isinstance(op, OpaqueOp))
    assert op.texts == ('func "a" {\n}', "b") and op.dtype == "float32"
    assert [op.index_for(tokens) for tokens in (1, 8, 9, 16)] == [0, 0, 1, 1]
    cost = op.cost(Step((1, 2), (8, 10), 2))
    assert (cost.flops, cost.weight_bytes) == (30.0, 2 * (48 + 8)), "two sequences, two runs, the weights read twice"
    assert (cost.kv_bytes, cost.activation_bytes) == (4.0 * (18 + 3), 4.0 * 2 * 7)


def test_the_oracle_says_that_it_has_no_answer() -> None:
    module = parse_module(_module(programs=["a", "b"]))
    player = Player(Script((Turn({0: 3}),)), {"full": None}, 7)
    _, batch = player.batches(player.script.turns[0])
    oracle = Oracle(module, {"w": np.zeros((3, 4)), "b": np.zeros(4)}, player.plain_pages, 16)
    with pytest.raises(UnsupportedError, match=r"no answer for plait\.opaque"):
        oracle.step(batch)


class Wide(Decoder):
    """Its logits say more tokens than its table of embeddings has."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).repeat(1, 1, 9)


class Future(Decoder):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + x.mean(1, keepdim=True))


class Counting(Decoder):
    """Each token's logits depend on how many there are."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * tokens.shape[1]


class Noisy(Decoder):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + torch.rand(1)


class Two(Decoder):
    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens), tokens


class Remembering(Decoder):
    def forward(self, tokens: Tensor) -> Tensor:
        self.rates.add_(1.0)
        return super().forward(tokens)


class Pooled(Decoder):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)[:, -1]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (Future, "exported-causal"),
        (Counting, "exported-causal"),
        (Noisy, "exported-causal"),
        (Wide, "exported-run"),
        (Two, "exported-signature"),
        (Pooled, "exported-signature"),
        (Remembering, "exported-memory"),
    ],
)
def test_programs_that_are_no_such_decoder_are_refused(kind: type[Decoder], code: str, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    save_program(export(kind()), path)
    with pytest.raises(UnsupportedError) as caught:
        read_program(path)
    assert caught.value.code == code


def test_large_constants_are_refused_by_name(tmp_path: Path) -> None:
    module = Decoder()
    module.register_buffer("table", torch.arange(1 << 18))
    module.forward = lambda tokens: Decoder.forward(module, tokens) + module.table[tokens][..., None]  # type: ignore[method-assign]
    save_program(export(module, 8), tmp_path / "m.pt2")
    with pytest.raises(UnsupportedError, match=r"'table' is torch.int64 \[262144\]"):
        read_program(tmp_path / "m.pt2")


def test_a_module_without_a_bound_says_so(tmp_path: Path) -> None:
    save_program(export(Decoder(), most=None), tmp_path / "m.pt2")
    config, _ = read_program(tmp_path / "m.pt2")
    assert config.lengths == (256, 1024) and "states no longest sequence, 1,024 tokens" in config.note


def test_programs_are_no_shorter_than_the_module_allows(tmp_path: Path) -> None:
    shapes = ({1: Dim("tokens", min=300, max=512)},)
    made = torch.export.export(Decoder(), (torch.zeros(1, 400, dtype=torch.long),), dynamic_shapes=shapes)
    save_program(made, tmp_path / "m.pt2")
    assert read_program(tmp_path / "m.pt2")[0].lengths == (512,)


def test_a_tied_table_is_one_weight(file: Path, decoder: nn.Module) -> None:
    config, tensors = read_program(file)
    assert isinstance(config, ProgramConfig)
    assert len({"embed.weight", "head.weight"} & set(config.arguments)) == 1
    ref = next(ref for name, ref in tensors.weights.items() if name in ("embed.weight", "head.weight"))
    raw = file.read_bytes()[ref.offset : ref.offset + ref.nbytes]
    table = decoder.get_parameter("embed.weight").detach().numpy()
    assert np.array_equal(np.frombuffer(raw, np.float32).reshape(ref.shape), table)
    (op,) = (op for op in ops(build_program(config, "float32")) if isinstance(op, OpaqueOp))
    products = 2 * LONGEST * (2 * 32 * 32 + 32 * VOCABULARY)
    assert list(op.flops.get_values()) == [products]


def changed(source: Path, target: Path, record: str, change: Callable[[bytes], bytes | None]) -> Path:
    """The file with one record of it changed, or without it."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name) if not name.endswith(record) else change(old.read(name))
            if data is not None:
                new.writestr(name, data)
    return target


def test_damaged_files_are_refused(file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole, config = file.read_bytes(), "model_weights_config.json"
    packed = tmp_path / "packed.pt2"
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    for name, data in {"short": whole[: len(whole) // 2], "text": b"hello", "empty": b""}.items():
        (tmp_path / f"{name}.pt2").write_bytes(data)
    changed(file, tmp_path / "list.pt2", config, lambda _: b'{"config": [1, 2]}')
    changed(file, tmp_path / "keys.pt2", config, lambda text: text.replace(b"use_pickle", b"no_pickle"))
    changed(file, tmp_path / "gone.pt2", "data/weights/weight_0", lambda _: None)
    changed(file, tmp_path / "other.pt2", config, lambda text: text.replace(b'"as_int": 32}', b'"as_int": 16}'))
    changed(file, tmp_path / "model.pt2", "models/model.json", lambda text: text[:-9])
    for name in ("short", "text", "empty", "packed", "list", "keys", "gone", "other", "model"):
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(tmp_path / f"{name}.pt2")
        assert caught.value.code == "exported-damaged", name
    assert capfd.readouterr().err == "", "torch's log of it"


#: What runs, and where it would stand in a program.
BOMB = "__import__('os').system('touch {}')"
SIZE, CALL = "\"Symbol('s", '"torch.ops.aten.sin.default"'
CODE = {
    "an expression": lambda text, to: re.sub(rf"{re.escape(SIZE)}[^\"]*\"", json.dumps(BOMB.format(to)), text),
    "a guard": lambda text, to: text.replace('"guards_code": []', f'"guards_code": ["{BOMB.format(to)}"]'),
    "a function": lambda text, to: text.replace(CALL, '"torch.os.system"'),
    "a path": lambda text, to: text.replace(CALL, '"_operator.attrgetter"'),
    "a name": lambda text, to: text.replace('"tokens"', json.dumps(f"tokens={BOMB.format(to)}")),
}


@pytest.mark.parametrize("what", CODE)
def test_a_program_that_would_run_code_is_refused(what: str, file: Path, tmp_path: Path) -> None:
    """torch evaluates expressions, calls whatever a path leads to, and writes names into functions."""

    def change(data: bytes) -> bytes:
        text = CODE[what](data.decode(), tmp_path / "ran")
        assert text != data.decode()
        return text.encode()

    bad = changed(file, tmp_path / "bad.pt2", "models/model.json", change)
    with pytest.raises(UnsupportedError) as caught:
        open_checkpoint(bad)
    assert caught.value.code == "exported-code" and not (tmp_path / "ran").exists()


def test_what_would_be_unpickled_is_refused(file: Path, tmp_path: Path) -> None:
    """A pickle runs code as it is read: this one would leave a file."""

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    bad = changed(file, tmp_path / "bad.pt2", "sample_inputs/model.pt", lambda _: pickle.dumps(Bomb()))
    with pytest.raises(UnsupportedError) as caught:
        open_checkpoint(bad)
    assert caught.value.code == "exported-pickle" and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("record", ["models/second.json", "data/aotinductor/model/m.so"])
def test_more_than_one_program_is_refused(record: str, file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.pt2"
    bad.write_bytes(file.read_bytes())
    with zipfile.ZipFile(bad, "a") as archive:
        archive.writestr(f"{file.stem}/{record}", "{}")
    with pytest.raises(UnsupportedError, match="exported-contents"):
        open_checkpoint(bad)
    with zipfile.ZipFile(bad, "a") as archive:
        archive.writestr(f"other/{record}", "{}")
    with pytest.raises(CheckpointError, match="two records of one name"):
        open_checkpoint(bad)


def test_cpu_has_no_lowering_and_says_where_to_go() -> None:
    module = parse_module(_module(programs=["a", "b"]))
    op = next(op for op in ops(module) if isinstance(op, OpaqueOp))
    assert "place it on an xla device" in CPU.supports(op, "cpu").why


def test_a_model_of_another_type_is_refused() -> None:
    with pytest.raises(plait.PlaitError, match="model of type int"):
        plait.plan(3, "v5e")  # type: ignore[arg-type]
