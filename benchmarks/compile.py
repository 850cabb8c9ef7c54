"""What compiling costs: time, memory and size of code per target, without the target and without a model's weights.

    python benchmarks/compile.py [--targets h100,v5e] [--models smollm2,llama-8b] [--rounds 3] [--json FILE]
    python benchmarks/compile.py --targets '' --budget      # only the two slices of the 8B model, against their budget

The models are a config.json and a safetensors file with the right header and no data on disk. Each row starts with an
empty cache of its own. `cold` is that one compile: wall time, CPU time of every process, and the largest sum of
resident memory of the process tree (shared pages count in each process). `cached` is the median of `--rounds` compiles
after it: wall and CPU time. A model that does not fit one device is cut over the fewest that hold it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import psutil

import plait
from plait.errors import FitError

TARGETS = "h100,h200,b200,mi300x,mi355x,v5e,v6e"
#: The whole compile of this model for these targets, in seconds and bytes.
BUDGET = ("llama-8b", "h100,mi300x", 180.0, 6 * 2**30)
#: What the backends call code.
CODE = (".cubin", ".hsaco", ".tpu")
SAMPLE_S = 0.05

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "mlp_bias": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "smollm2": _LLAMA
    | {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192,
        "rope_theta": 100000, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    },
    "llama-8b": _LLAMA
    | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128001,
        "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One compile. Bytes and seconds; `peak_bytes` of the cold one."""

    model: str
    targets: str
    cold_s: float
    cpu_s: float
    cached_s: float | None
    cached_cpu_s: float | None
    peak_bytes: int
    code_bytes: int
    code_files: int
    artifact_bytes: int


def main() -> None:
    args = _arguments()
    rows, budget = [], None
    print("| " + " | ".join(_COLUMNS) + " |\n|" + " --- |" * len(_COLUMNS))
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as scratch:
        folder = Path(scratch)
        for model in args.models:
            path = write_model(folder / model, MODELS[model])
            for target in args.targets:
                rows.append(_show(measure(folder, path, fewest(path, target), args.rounds)))
        if args.budget:
            model, targets, _, _ = BUDGET
            path = write_model(folder / "budget" / model, MODELS[model])
            budget = _show(measure(folder, path, targets, args.rounds))
    if budget is not None:
        print(f"budget {BUDGET[2]:.0f} s and {BUDGET[3] / 2**30:.0f} GiB: {'kept' if kept(budget) else 'BROKEN'}")
    if args.json:
        result = {"rows": [asdict(row) for row in rows], "budget": budget and asdict(budget) | {"kept": kept(budget)}}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def kept(row: Row) -> bool:
    return row.cold_s <= BUDGET[2] and row.peak_bytes <= BUDGET[3]


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """`config.json`, and weights that have a header and a length but no data: a sparse file of zeros."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, end = dict[str, Any](), 0
    for name, shape in _tensors(config).items():
        size = 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def _tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    block = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    table = (config["vocab_size"], hidden)
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,)}
    for number in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{number}.{name}.weight": shape for name, shape in block.items()}
    return found if config["tie_word_embeddings"] else found | {"lm_head.weight": table}


def fewest(model: Path, target: str) -> str:
    """The target, so often that the model fits."""
    for count in (1, 2, 4, 8):
        targets = target if count == 1 else f"{count}x{target}"
        try:
            plait.plan(model, targets)
        except FitError:
            continue
        return targets
    sys.exit(f"{model.name} does not fit 8 {target}")


def measure(folder: Path, model: Path, targets: str, rounds: int) -> Row:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        here = Path(scratch)
        seconds, cpu, peak = _compile(model, targets, here)
        cached = [_compile(model, targets, here)[:2] for _ in range(rounds)]
        files = [path for path in (here / "out.plait").rglob("*") if path.is_file()]
        code = [path.stat().st_size for path in files if path.suffix in CODE]
        return Row(
            model=model.name,
            targets=targets,
            cold_s=round(seconds, 2),
            cpu_s=round(cpu, 2),
            cached_s=_median(wall for wall, _ in cached),
            cached_cpu_s=_median(cpu for _, cpu in cached),
            peak_bytes=peak,
            code_bytes=sum(code),
            code_files=len(code),
            artifact_bytes=sum(path.stat().st_size for path in files),
        )


def _median(times: Iterable[float]) -> float | None:
    known = list(times)
    return round(statistics.median(known), 2) if known else None


def _compile(model: Path, targets: str, folder: Path) -> tuple[float, float, int]:
    """Seconds, CPU seconds of every process, and the most resident bytes of all of them together."""
    command = [sys.executable, "-c", "from plait.cli.main import run; run()", "compile", str(model), "-t", targets]
    environment = os.environ | {"PLAIT_CACHE": str(folder / "cache"), "PLAIT_DEVICE_CODE": "1"}
    before, start = _children_cpu_s(), time.monotonic()
    with (folder / "log").open("wb") as log:
        process = psutil.Popen(
            [*command, "-o", str(folder / "out.plait")], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, _resident_bytes(process))
            time.sleep(SAMPLE_S)
    if process.returncode:
        sys.exit(f"{model.name} for {targets} does not compile:\n{(folder / 'log').read_text(errors='replace')}")
    return time.monotonic() - start, _children_cpu_s() - before, peak


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _resident_bytes(process: Any) -> int:
    total = 0
    try:
        for one in (process, *process.children(recursive=True)):
            total += one.memory_info().rss
    except psutil.NoSuchProcess:
        pass  # one ended while it was asked: the next sample counts the others
    return total


_COLUMNS = ("model", "targets", "cold s", "CPU s", "cached s", "CPU s", "peak GiB", "code MB", "files", "artifact MB")


def _show(row: Row) -> Row:
    cached = ("", "") if row.cached_s is None else (f"{row.cached_s:.1f}", f"{row.cached_cpu_s:.1f}")
    cells = (row.model, row.targets, f"{row.cold_s:.1f}", f"{row.cpu_s:.1f}", *cached, f"{row.peak_bytes / 2**30:.2f}",
             f"{row.code_bytes / 1e6:.2f}", str(row.code_files), f"{row.artifact_bytes / 1e6:.2f}")  # fmt: skip
    print("| " + " | ".join(cells) + " |", flush=True)
    return row


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=_names, default=_names(TARGETS), help=f"default: {TARGETS}")
    parser.add_argument("--models", type=_names, default=list(MODELS), help=f"default: {','.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=3, help="compiles with a full cache; 0 for none")
    parser.add_argument("--budget", action="store_true", help=f"also {BUDGET[0]} for {BUDGET[1]} against its budget")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file too")
    args = parser.parse_args()
    if unknown := sorted(set(args.models) - set(MODELS)):
        parser.error(f"no model {unknown[0]}; there are {', '.join(MODELS)}")
    return args


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    main()
