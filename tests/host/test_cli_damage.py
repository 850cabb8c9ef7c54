"""Damaged or contradicting checkpoints and impossible devices, as a user meets them: `plait compile` ends with exit
code 2 and one line that names the fault, without a traceback, and nothing is written anywhere."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.checkpoints import edit_config, save, save_gguf
from tests.host.command_line import plait, subprocess_plait

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
TENSOR, TWIN = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model in three forms: a single file, shards with an index, and GGUF; and one with a tied embedding."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save(folder / "whole", tokenizer=True, **SMALL)
    save(folder / "shards", max_shard_size="50KB", **SMALL)
    save(folder / "tied", tie_word_embeddings=True, **SMALL)
    (folder / "gguf").mkdir()
    save_gguf(folder / "gguf" / "m.gguf", folder / "whole")
    return folder


Change = Callable[[Path], object]


def whole(folder: Path) -> Path:
    return folder / "model.safetensors"


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def gguf(folder: Path) -> Path:
    return folder / "m.gguf"


def cut(file: Callable[[Path], Path], count: int) -> Change:
    return lambda folder: file(folder).write_bytes(file(folder).read_bytes()[:-count])


def keep(file: Callable[[Path], Path], count: int) -> Change:
    return lambda folder: file(folder).write_bytes(file(folder).read_bytes()[:count])


def grow(file: Callable[[Path], Path], count: int) -> Change:
    return lambda folder: file(folder).write_bytes(file(folder).read_bytes() + bytes(count))


def tensors(change: Callable[[dict[str, Any]], object]) -> Change:
    """Change the tensors of a single file, which stays a sound one."""

    def apply(folder: Path) -> None:
        found = load_file(whole(folder))
        change(found)
        save_file(found, whole(folder), metadata={"format": "pt"})

    return apply


def as_fp8(entry: dict[str, Any]) -> dict[str, Any]:
    """As many bytes of FP8."""
    begin, end = entry["data_offsets"]
    return {"dtype": "F8_E4M3", "shape": [end - begin]}


def header(change: Callable[[dict[str, Any]], object]) -> Change:
    """Change the header of a single file and leave its data alone."""

    def apply(folder: Path) -> None:
        raw = whole(folder).read_bytes()
        (length,) = struct.unpack_from("<Q", raw)
        entries = json.loads(raw[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        whole(folder).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return apply


def index(change: Callable[[dict[str, str]], object]) -> Change:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        data = json.loads(path.read_text())
        change(data["weight_map"])
        path.write_text(json.dumps(data))

    return apply


def config(**changes: Any) -> Change:
    return lambda folder: edit_config(folder, **changes)


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


@dataclass(frozen=True)
class Damage:
    """`form` of the checkpoint, what is done to it, and the code and a word of the line that names it."""

    form: str
    change: Change
    code: str
    word: str


DAMAGES: dict[str, Damage] = {
    # files
    "truncated": Damage("whole", cut(whole, 100), "safetensors-truncated", "100 bytes are missing"),
    "cut inside the header": Damage("whole", keep(whole, 100), "safetensors-header-length", "is not a whole"),
    "extra bytes": Damage("whole", grow(whole, 7), "safetensors-trailing", "7 bytes more"),
    "empty file": Damage("whole", text("model.safetensors", ""), "safetensors-header-length", "model.safetensors"),
    "missing shard": Damage("shards", lambda f: shard(f).unlink(), "index-shard-missing", "model-00002-of-"),
    "truncated shard": Damage("shards", cut(shard, 4), "safetensors-truncated", "4 bytes are missing"),
    "extra bytes in a shard": Damage("shards", grow(shard, 4), "safetensors-trailing", "4 bytes more"),
    "tensor not in its shard": Damage(
        "shards", index(lambda m: m.update(ghost=m["model.norm.weight"])), "index-tensor-missing", "'ghost'"
    ),
    "tensor not in the index": Damage(
        "shards", index(lambda m: m.pop(TENSOR)), "index-tensor-unlisted", repr(TENSOR)
    ),
    "index of nothing": Damage("shards", text("model.safetensors.index.json", "{}"), "index-invalid", "weight_map"),
    "truncated GGUF": Damage("gguf", cut(gguf, 40), "gguf-truncated", "cut short"),
    "extra bytes in a GGUF": Damage("gguf", grow(gguf, 64), "gguf-trailing", "bytes more"),
    "GGUF header only": Damage("gguf", text("m.gguf", "GGUF"), "gguf-header", "cut short"),
    # tensors
    "tensor missing": Damage("whole", tensors(lambda t: t.pop(TENSOR)), "tensor-missing", repr(TENSOR)),
    "tensor nobody uses": Damage(
        "whole", tensors(lambda t: t.update(loose=np.ones(1, np.float32))), "tensor-unused", "'loose'"
    ),
    "two tied tables that differ": Damage(
        "tied",
        tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})),
        "tied-differ",
        "'lm_head.weight'",
    ),
    "no head and not tied": Damage("tied", config(tie_word_embeddings=False), "tensor-missing", "'lm_head.weight'"),
    "tied and no table": Damage(
        "tied",
        tensors(lambda t: t.pop("model.embed_tokens.weight")),
        "tensor-missing",
        "'model.embed_tokens.weight'",
    ),
    "unknown dtype": Damage("whole", header(lambda h: h[TENSOR].update(dtype="F31")), "dtype-unknown", "'F31'"),
    "FP8": Damage("whole", header(lambda h: h[TENSOR].update(as_fp8(h[TENSOR]))), "dtype-unsupported", "stored as FP8"),
    "integers": Damage("whole", header(lambda h: h[TENSOR].update(dtype="I32")), "dtype-unsupported", "I32"),
    "overlapping tensors": Damage(
        "whole",
        header(lambda h: h[TENSOR].update(data_offsets=h[TWIN]["data_offsets"])),
        "safetensors-layout",
        "an overlap",
    ),
    # config
    "shape against config": Damage("whole", config(intermediate_size=63), "tensor-shape", "down_proj"),
    "head_dim against config": Damage("whole", config(head_dim=8), "tensor-shape", "k_proj"),
    "a block too few": Damage("whole", config(num_hidden_layers=2), "tensor-unused", "layers.2"),
    "a block too many": Damage("whole", config(num_hidden_layers=4), "tensor-missing", "layers.3"),
    "unknown key": Damage("whole", config(attn_logit_softcapping=30.0), "config-key-unknown", "attn_logit_softcapping"),
    "unknown rope": Damage(
        "whole",
        config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0}),
        "rope-unsupported",
        "'spiral'",
    ),
    "no theta": Damage("whole", config(rope_parameters={"rope_type": "default"}), "config-key-missing", "rope_theta"),
    "FP8 in the config": Damage(
        "whole", config(quantization_config={"quant_method": "fp8"}), "quantisation-conflict", "(fp8)"
    ),
    "a quantisation nobody knows": Damage(
        "whole", config(quantization_config={"quant_method": "nobodys"}), "config-value", "'nobodys'"
    ),
    "unknown family": Damage("whole", config(model_type="bert"), "family-unsupported", "'bert'"),
    "unknown compute dtype": Damage("whole", config(dtype="float8_e4m3fn"), "dtype-unsupported", "float8_e4m3fn"),
    "config that is no JSON": Damage("whole", text("config.json", "{"), "json-invalid", "config.json"),
    "no config": Damage("whole", lambda f: (f / "config.json").unlink(), "config-missing", "config.json"),
    # what lies beside
    "tokenizer that is none": Damage("whole", text("tokenizer.json", '{"model": 1}'), "tokenizer", "tokenizer.json"),
    "end token that is none": Damage(
        "whole", text("generation_config.json", '{"eos_token_id": "x"}'), "config-type", "'x'"
    ),
}  # fmt: skip


def listing(folder: Path) -> dict[str, bytes]:
    """Every file with its bytes, and every directory."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


def compiled(model: Path, *words: str | Path) -> Any:
    return plait("compile", model, *words, "-o", model.parent / "out" / "m.plait", "--dump-ir", model.parent / "ir")


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_checkpoint_is_one_clear_error(case: str, checkpoints: Path, tmp_path: Path) -> None:
    damage = DAMAGES[case]
    model = shutil.copytree(checkpoints / damage.form, tmp_path / "m")
    damage.change(model)
    before = listing(tmp_path)
    result = compiled(model, "--targets", "2xcpu", "--layers", "1,2")
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert f"[{damage.code}" in line and damage.word in line
    assert "Traceback" not in result.output
    assert listing(tmp_path) == before, "something was written"


@pytest.mark.parametrize("form", ["whole", "shards", "tied", "gguf"])
def test_the_same_checkpoints_undamaged_compile(form: str, checkpoints: Path, tmp_path: Path) -> None:
    model = shutil.copytree(checkpoints / form, tmp_path / "m")
    assert compiled(model, "--targets", "2xcpu", "--layers", "1,2").exit_code == 0


CLUSTER = """
devices:
- target: h100@a
  free_bytes: {free}
- name: npu
  arch: npu1
  memory_bytes: 32 GiB
  bandwidth_bytes_per_s: 500 GB
  peak_flops_per_s: {peaks}
"""

DEVICES: dict[str, tuple[dict[str, str], str, str]] = {
    "no memory left": ({"free": "0"}, "device-memory", "h100.0 has no free memory"),
    "less than the reserve": ({"free": "1 GB"}, "device-memory", "h100.0 has no memory left for a slice"),
    "a device of unknown speed": ({"peaks": "{}"}, "device-numbers", "npu lacks peak_flops_per_s"),
    "a device of speed 0": ({"peaks": "{float32: 0}"}, "device-numbers", "npu.0 cannot be planned on"),
}


@pytest.mark.parametrize("case", DEVICES)
def test_an_impossible_device_is_one_clear_error(case: str, checkpoints: Path, tmp_path: Path) -> None:
    changes, code, words = DEVICES[case]
    model = shutil.copytree(checkpoints / "whole", tmp_path / "m")
    (tmp_path / "cluster.yaml").write_text(CLUSTER.format(**{"free": "60 GB", "peaks": "{float32: 1.0e12}"} | changes))
    before = listing(tmp_path)
    result = compiled(model, "--cluster", tmp_path / "cluster.yaml")
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert line == f"error: {line.removeprefix('error: ').partition('  [')[0]}  [{code}]" and words in line
    assert listing(tmp_path) == before, "something was written"


def test_memory_that_is_free_but_not_enough(checkpoints: Path, tmp_path: Path) -> None:
    """Needed, free and short-by of the device, and what would fit; nothing is written."""
    model = shutil.copytree(checkpoints / "whole", tmp_path / "m")
    own = {"free": "60 GB", "peaks": "{float32: 1.0e12}"}
    (tmp_path / "cluster.yaml").write_text(CLUSTER.format(**own).replace("32 GiB", "4 GB"))
    before = listing(tmp_path)
    words = ("--cluster", tmp_path / "cluster.yaml", "--layers", "0,3", "--concurrency", "50000", "--json")
    result = compiled(model, *words)
    assert result.exit_code == 2, result.output
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "does-not-fit"
    (row,) = [row for row in error["rows"] if row["device"] == "npu.0"]
    assert row["free"] == 4 * 10**9 and row["short_by"] == row["needed"] - row["free"] > 0
    assert listing(tmp_path) == before, "something was written"


def test_outputs_that_cannot_be_written(checkpoints: Path, tmp_path: Path) -> None:
    """A file stands where the artifact, its folder or the dump should; and the disk is full halfway."""
    model, file = checkpoints / "whole", tmp_path / "file"
    file.write_text("mine")
    for words in (("-o", file), ("-o", file / "m.plait"), ("-o", tmp_path / "m.plait", "--dump-ir", file)):
        result = plait("compile", model, "--targets", "cpu", *words)
        assert result.exit_code == 2 and str(file) in result.stderr
        assert result.stderr.count("error:") == 1
    code = (
        "import resource, signal; from plait.cli.main import run\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "run()"
    )
    words = ("compile", model, "--targets", "cpu", "--embed-weights", "-o", tmp_path / "new" / "m.plait")
    command = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "[output-unwritable]\n  why: File too large\n" in done.stderr
    assert listing(tmp_path) == {"file": b"mine"}


def test_an_unknown_target_is_wrong_usage(checkpoints: Path, tmp_path: Path) -> None:
    model = shutil.copytree(checkpoints / "whole", tmp_path / "m")
    result = compiled(model, "--targets", "h100,mi3000")
    assert result.exit_code == 64
    assert "'mi3000'" in result.stderr and "did you mean 'mi300'" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_in_a_process_of_its_own(checkpoints: Path, tmp_path: Path) -> None:
    """The same through the installed command's entry point: exit code, one error on stderr, no traceback."""
    model = shutil.copytree(checkpoints / "whole", tmp_path / "m")
    DAMAGES["truncated"].change(model)
    done = subprocess_plait("compile", model, "--targets", "cpu", "-o", tmp_path / "m.plait")
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1 and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
