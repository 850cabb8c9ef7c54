"""Slices through torch-mlir: what it writes, and that it computes what torch and our own JAX compute."""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import Tensor
from xdsl.dialects.builtin import ModuleOp

import plait as plait_package
from plait.backends.kernels.arrays import to_numpy
from plait.backends.kernels.stateless import Argument, Shape, StatelessSlice
from plait.backends.xla.opaque import array_kind, stablehlo_function
from plait.errors import UnsupportedError, UsageError
from plait.frontend.checkpoint import open_checkpoint
from plait.frontend.lower import lower
from plait.frontend.torch_mlir import FORMS, mlir_text
from plait.ir import Builder
from plait.ir.passes import SLICE_PIPELINE, run_passes, slice_modules
from tests.checkpoints import random_ids, reference_logits, save
from tests.host.command_line import config_file, plait

CONTEXT = 24
PROMPT, NEW = 13, 3
#: A window that is shorter than the prompt, biases, plain.
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "mistral": {"sliding_window": 6}, "qwen2": {}}

#: Of the largest logit.
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _module(folder: Path, dtype: str) -> ModuleOp:
    module = lower(open_checkpoint(folder), dtype)
    run_passes(module, SLICE_PIPELINE)
    return module


class Torch:
    """The exported module itself, run by torch."""

    def __init__(self, module: ModuleOp, shape: Shape) -> None:
        self.slice = StatelessSlice(module, shape)

    def __call__(self, args: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(self.slice(*args))


class TorchMlir(Torch):
    """The same through torch-mlir, StableHLO and XLA's CPU backend."""

    def __init__(self, module: ModuleOp, shape: Shape) -> None:
        super().__init__(module, shape)
        text = mlir_text(self.slice, self.slice.example(), "stablehlo")
        kinds = [[array_kind(a.shape, _numpy(a)) for a in side] for side in (self.slice.arguments, self.slice.results)]
        self._run = jax.jit(stablehlo_function(text, *kinds))

    def __call__(self, args: list[Tensor]) -> list[Tensor]:
        results = self._run(*[to_numpy(value) for value in args])
        return [
            torch.from_numpy(np.asarray(value).astype(np.float32)).to(kind.dtype)
            for value, kind in zip(results, self.slice.results, strict=True)
        ]


def _numpy(argument: Argument) -> Any:
    return to_numpy(torch.empty(0, dtype=argument.dtype)).dtype


def _logits(kind: type[Torch], module: ModuleOp, folder: Path, ids: list[int]) -> np.ndarray[Any, Any]:
    """[NEW + 1, vocabulary]: after the prompt in one prefill step, then after each further token in a decode step."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    kept: dict[str, Tensor] = {}
    rows = []
    prefill, decode = kind(module, Shape(1, PROMPT, CONTEXT)), kind(module, Shape(1, 1, CONTEXT))
    for run, start, end in [(prefill, 0, PROMPT), *((decode, n, n + 1) for n in range(PROMPT, PROMPT + NEW))]:
        step = {
            "tokens": torch.tensor([ids[start:end]], dtype=torch.int32),
            "kv_lens": torch.tensor([end], dtype=torch.int32),
            "logit_rows": torch.tensor([end - start - 1], dtype=torch.int32),
        }
        given = [
            step[a.name] if a.name in step else tensors[a.name].to(a.dtype) if a.name in tensors else
            # What nobody wrote is never looked at, not even where it is infinite.
            kept.get(a.name, torch.full(a.shape, float("inf"), dtype=a.dtype))
            for a in run.slice.arguments
        ]  # fmt: skip
        made = dict(zip((r.name for r in run.slice.results), run(given), strict=True))
        rows.append(made.pop("logits").float().numpy()[0])
        kept = made
    return np.stack(rows)


def _error(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("mistral", "float32"),
        ("mistral", "bfloat16"),
        pytest.param("llama", "float32", marks=pytest.mark.slow),
        pytest.param("qwen2", "float32", marks=pytest.mark.slow),
    ],
)
def test_torch_torch_mlir_and_our_jax_agree(family: str, dtype: str, tmp_path: Path) -> None:
    folder = save(tmp_path / family, family, num_hidden_layers=1, max_position_embeddings=64, **FAMILIES[family])
    ids = random_ids(PROMPT + NEW)
    module = _module(folder, dtype)
    torch_made = _logits(Torch, module, folder, ids)
    through_mlir = _logits(TorchMlir, module, folder, ids)
    with plait_package.compile(folder, "v5e", dtype=dtype, context=64, run={"in_process": True, "threads": 1}) as pipe:
        our_jax = pipe.logits(ids, PROMPT)[PROMPT - 1 :]
    limit = TOLERANCE[dtype]
    assert _error(through_mlir, torch_made) < limit
    assert _error(np.asarray(our_jax), torch_made) < limit
    # And all three are right: transformers knows nothing of plait.
    assert _error(torch_made, reference_logits(folder, ids)[PROMPT - 1 :]) < limit


def test_a_wrong_window_is_noticed(tmp_path: Path) -> None:
    """The comparison above would see it."""
    folder = save(tmp_path / "m", "mistral", num_hidden_layers=2, max_position_embeddings=64, sliding_window=6)
    wrong = save(tmp_path / "w", "mistral", num_hidden_layers=2, max_position_embeddings=64, sliding_window=7)
    ids = random_ids(PROMPT + NEW)
    made = _logits(Torch, _module(wrong, "float32"), wrong, ids)
    assert _error(made, reference_logits(folder, ids)[PROMPT - 1 :]) > 1e-3


DIALECT = {
    "torch": "torch.aten.linear",
    "linalg": "linalg.generic",
    "stablehlo": "stablehlo.dot_general",
    "tosa": "tosa.matmul",
}


#: Each form once; the other combinations are slow.
FIRST = (("torch", "decode"), ("linalg", "prefill"), ("stablehlo", "decode"), ("tosa", "prefill"))


@pytest.mark.parametrize(
    ("form", "phase"),
    [
        *FIRST,
        *(pytest.param(*c, marks=pytest.mark.slow) for c in product(FORMS, ("prefill", "decode")) if c not in FIRST),
    ],
)
def test_a_slice_in_every_form(form: str, phase: str, tmp_path: Path) -> None:
    dtype = {"prefill": "float32", "decode": "bfloat16"}[phase]
    config = config_file(tmp_path, num_hidden_layers=1)
    out = tmp_path / "slice.mlir"
    words = ["--tokens", "5"] if phase == "prefill" else []
    result = plait(
        "export", config, "--to", form, "--phase", phase, *words, "--dtype", dtype, "--concurrency", "2", "-o", out,
        "--context", "16", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    told, text = json.loads(result.stdout), out.read_text()
    assert DIALECT[form] in text and ("bf16" in text) == (dtype == "bfloat16")
    assert "dense_resource" not in text
    # `%argN` once in the head of the file, once in the signature of @main.
    (signature,) = re.findall(r"func.func @main\((.*?)\) ->", text)
    assert len(re.findall(r"%arg\d+:", signature)) == len(told["arguments"]) == text.count("\n// %arg")
    assert [item["name"] for item in told["results"]] == ["logits", "kv.0.k", "kv.0.v"]
    assert told["results"][0]["shape"] == [2, 128]
    assert {"name": "kv.0.k", "shape": [2, 16, 2, 16], "dtype": dtype} in told["arguments"]
    assert told["next"].startswith("plait export") and told["bytes"] == out.stat().st_size


def test_a_slice_of_an_artifact(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", num_hidden_layers=2)
    made = plait_package.compile_artifact(folder, "v5e,v5e", layers=[1, 1], output=tmp_path / "m.plait")
    out = tmp_path / "second.mlir"
    result = plait("export", made.folder, "--slice", "1", "--context", "16", "-o", out, "--json")
    assert result.exit_code == 0, result.stderr
    names = [item["name"] for item in json.loads(result.stdout)["arguments"]]
    assert "x0" in names and "tokens" not in names and "model.layers.1.mlp.down_proj.weight" in names
    assert "// slices/1-" in out.read_text()
    for words, code in (
        (["--slice", "2"], "export-slice"),
        (["--dtype", "bfloat16"], "export-artifact"),
        (["--tokens", "3"], "export-shape"),
        (["--phase", "prefill", "--tokens", "300"], "export-shape"),
    ):
        refused = plait("export", made.folder, *words, "-o", tmp_path / "no.mlir", "--json")
        assert (refused.exit_code, json.loads(refused.stdout)["error"]["code"]) == (64, code)
    assert not (tmp_path / "no.mlir").exists()


def test_slices_pass_their_boundaries(tmp_path: Path) -> None:
    """Two stateless slices in a row give what the whole gives."""
    folder = save(tmp_path / "m", num_hidden_layers=2)
    from safetensors.torch import load_file

    tensors, whole = load_file(folder / "model.safetensors"), lower(open_checkpoint(folder))
    ids, made = random_ids(6), {}
    for part in [whole, *slice_modules(whole, [(0, 1), (1, 2)])]:
        run_passes(part, SLICE_PIPELINE)
        run = Torch(part, Shape(1, 6, 8))
        step = {
            "tokens": torch.tensor([ids], dtype=torch.int32),
            "kv_lens": torch.tensor([6], dtype=torch.int32),
            "logit_rows": torch.tensor([5], dtype=torch.int32),
        }
        args = [
            made[a.name] if a.name in made else (step | tensors).get(a.name, torch.zeros(a.shape, dtype=a.dtype))
            for a in run.slice.arguments
        ]
        results = dict(zip((r.name for r in run.slice.results), run(args), strict=True))
        want = results["logits"] if part is whole else want  # noqa: F821
        made = {} if part is whole else results
    torch.testing.assert_close(made["logits"], want)


def test_what_cannot_be_written_is_refused_by_name() -> None:
    b = Builder("m", "float32")
    x = b.embed("e", 10, 32)
    b.block = 0
    q = b.linear(x, "q", 32)
    y = b.attention(q, q, q, heads=2, kv_heads=2, head_dim=16, scale=0.25, kv_dtype="e4m3fn")
    module = b.finish({"y": y})
    with pytest.raises(UnsupportedError) as caught:
        StatelessSlice(module, Shape(1, 1, 8))
    assert "plait.attention (block 0)" in caught.value.what and "e4m3fn" in str(caught.value).lower()


def test_without_torch_mlir_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch_mlir" else found(name))
    result = plait("export", config_file(tmp_path), "--json")
    error = json.loads(result.stdout)["error"]
    assert (error["code"], error["try"]) == ("torch-mlir-missing", "pip install 'plait[import]'")
    assert result.exit_code == 2


def test_constants_of_one_shape_are_kept_apart() -> None:
    class TwoTables(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor([10.0, 20.0, 30.0])

    text = mlir_text(TwoTables(), [torch.zeros(3)], "stablehlo")
    kind = [array_kind((3,), np.float32)]
    (got,) = jax.jit(stablehlo_function(text, kind, kind))(np.ones(3, np.float32))
    assert np.asarray(got).tolist() == [11.0, 22.0, 33.0]


def test_what_torch_mlir_does_not_know_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Solver(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.eigvalsh(x)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UnsupportedError) as caught:
        mlir_text(Solver(), [torch.eye(3)], "stablehlo")
    assert caught.value.code == "torch-mlir-refused" and "linalg_eigh" in str(caught.value)
    assert list(tmp_path.iterdir()) == [], "no report of the failure is left there"


def test_text_that_is_no_stablehlo_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="XLA does not take the program"):
        stablehlo_function("module { func.func @main() { foo.bar } }", [], [])


def test_a_step_needs_room() -> None:
    with pytest.raises(UsageError, match="no step of 1 x 9 tokens in a context of 8"):
        Shape(1, 9, 8)
