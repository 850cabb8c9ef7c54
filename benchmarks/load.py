"""What loading one slice of a checkpoint takes: `python benchmarks/load.py [--json FILE]`.

    python benchmarks/load.py                         # 2 GB in bfloat16 over three cpu slices, five rounds
    python benchmarks/load.py --dtype float32 --gigabytes 1 --rounds 3

The checkpoint is one safetensors file of a llama with random numbers. Each row is a process of its own, which loads a
small slice first, so that the libraries are there before anything is counted.

`slice` is what the slice's weights take in the file, `largest` the largest of them, and `read` what the process asked
the kernel for while it loaded. `held` is the resident memory that the loaded slice takes once it is packed, `above` how
far the peak went above it until the slice could run steps, and `packing` until all was packed. (The logits' weight of
the last slice is held in float32, whatever the dtype of the rest; gate and up are packed as one matrix.)

Then rates, medians of the rounds in GB/s: `cat` of the whole file to /dev/null, in one process, which is twice as fast
as through a pipe; `copy`, the slice's ranges read into fresh memory and nothing else; `weights`, the slice's weights as
arrays; `load`, from the call to a slice that runs steps; `packed`, from the call to one that has all its matrices
packed and runs them as fast as it ever will. `ratio` is that of `load` to `cat`, the median of the rounds' own, `worst`
the least, and `full` that of `packed`. All of it once the page cache was told to forget the file (`cold`), and once it
holds it (`warm`). cat keeps nothing of what it reads: a warm one writes to the processor's cache alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import plait
from plait.artifact import read_artifact
from plait.backends.base import LoadOptions
from plait.backends.kernels.torch_slice import TorchSlice
from plait.backends.weights import read_weight, read_weights_json
from plait.spec import WeightRef

DTYPES = {"bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)), "float32": ("F32", np.dtype(np.float32))}
SLICES = 3
RANDOM_BYTES = 1 << 24

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64,
    "vocab_size": 32000, "max_position_embeddings": 2048, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
WARM = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 512}


def write_model(folder: Path, config: dict[str, Any], dtype: str) -> Path:
    """A checkpoint of random numbers, scaled so that they stay numbers."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}))
    word, kind = DTYPES[dtype]
    header, end = dict[str, Any](), 0
    for name, shape in tensors(config).items():
        size = kind.itemsize * prod(shape)
        header[name] = {"dtype": word, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = np.random.default_rng(0).normal(size=RANDOM_BYTES // kind.itemsize) * 0.02
    block = numbers.astype(kind).tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, len(block)):
            file.write(block[: end - start])
        os.fsync(file.fileno())
    return folder


def tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a llama's tensors, in the order of the file."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    block = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    table = (config["vocab_size"], hidden)
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
    for number in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{number}.{name}.weight": shape for name, shape in block.items()}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": table}


def layers_of(gigabytes: float, dtype: str) -> int:
    """How many layers make up so much."""
    size = DTYPES[dtype][1].itemsize
    ends, with_one = (
        sum(map(prod, tensors(CONFIG | {"num_hidden_layers": count}).values())) * size for count in (0, 1)
    )
    return max(SLICES, round((gigabytes * 1e9 - ends) / (with_one - ends)))


def compiled(model: Path, layers: int, dtype: str) -> Path:
    output = model.with_suffix(".plait")
    split = [layers // SLICES + (number < layers % SLICES) for number in range(SLICES)]
    plait.compile_artifact(model, f"{SLICES}xcpu", layers=tuple(split), dtype=dtype, output=output, device_code=False)
    return output


# One process: a slice


def probe(warm: str, big: str, index: int, rounds: int) -> dict[str, Any]:
    """What loading slice `index` of the artifact `big` takes; `warm` is a small one, which is loaded before."""
    load(Path(warm), index).close()
    artifact = read_artifact(Path(big))
    refs = list(read_weights_json(Path(big) / artifact.manifest.slices[index].folder / "weights.json").values())
    root = artifact.weight_root
    file = Path(refs[0].file) if root is None else root / refs[0].file
    size = sum(ref.nbytes for ref in refs)
    before, asked = resident("VmRSS"), bytes_read()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    executable = load(Path(big), index)
    asked, loading_peak = bytes_read() - asked, resident("VmHWM") - before
    executable.wait()
    peak, held = resident("VmHWM") - before, resident("VmRSS") - before
    executable.close()
    del executable
    whole = file.stat().st_size
    rates: dict[str, list[float]] = {f"{state} {name}": [] for state in ("cold", "warm") for name in RATES}
    for _ in range(rounds):
        for state in ("cold", "warm"):
            for measure in (
                lambda: {"cat": whole / seconds(partial(cat, file))},
                lambda: {"copy": size / seconds(partial(copy, refs, file))},
                lambda: {"weights": size / seconds(lambda: [read_weight(ref, ref.encoding, root) for ref in refs])},
                lambda: {name: size / took for name, took in loading(Path(big), index).items()},
            ):
                if state == "cold":
                    forget(file)
                for name, rate in measure().items():
                    rates[f"{state} {name}"].append(rate / 1e9)
    return {
        "index": index,
        "slice": size,
        "largest": max(ref.nbytes for ref in refs),
        "read": asked,
        "held": held,
        "loading_peak": loading_peak,
        "peak": peak,
        "rates": rates,
    }


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def loading(folder: Path, index: int) -> dict[str, float]:
    start = time.perf_counter()
    executable = load(folder, index)
    ready = time.perf_counter() - start
    executable.wait()
    packed = time.perf_counter() - start
    executable.close()
    return {"load": ready, "packed": packed}


def load(folder: Path, index: int) -> TorchSlice:
    artifact = read_artifact(folder)
    part = artifact.manifest.slices[index]
    options = LoadOptions({"full": 1}, artifact.manifest.page_tokens, threads=1, weight_root=artifact.weight_root)
    return TorchSlice(folder / part.folder, part.device, options)


def copy(refs: Sequence[WeightRef], file: Path) -> None:
    """The same bytes into fresh memory, each tensor in one call."""
    with file.open("rb", buffering=0) as stream:
        held = []
        for ref in refs:
            held.append(np.empty(ref.nbytes, np.uint8))
            stream.seek(ref.offset)
            stream.readinto(held[-1].data)


def cat(file: Path) -> None:
    with Path(os.devnull).open("wb") as nowhere:
        subprocess.run(["cat", file], stdout=nowhere, check=True)


def forget(file: Path) -> None:
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (the peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) * 1024


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


# The table


def main() -> None:
    args = arguments()
    if args.probe:
        warm, big, index, rounds = args.probe
        print(json.dumps(probe(warm, big, int(index), int(rounds))))
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="plait-load-", dir=args.folder) as scratch:
        layers = layers_of(args.gigabytes, args.dtype)
        artifacts = []
        for name, config, count in (("warm", CONFIG | WARM, SLICES), ("big", CONFIG, layers)):
            model = write_model(Path(scratch) / name, config | {"num_hidden_layers": count}, args.dtype)
            artifacts.append(str(compiled(model, count, args.dtype)))
        print(f"{layers} layers, {args.dtype}\n\n| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
        for index in range(SLICES):
            command = [sys.executable, __file__, "--probe", *artifacts, str(index), str(args.rounds)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr)
            rows.append(json.loads(done.stdout))
            for state in ("cold", "warm"):
                print("| " + " | ".join(cells(rows[-1], state)) + " |", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"dtype": args.dtype, "rows": rows}, indent=2) + "\n")


RATES = ("cat", "copy", "weights", "load", "packed")
COLUMNS = (
    *("slice", "MB", "read MB", "largest MB", "held MB", "above MB", "packing MB"),
    *("cache", *RATES, "ratio", "worst", "full"),
)


def cells(row: dict[str, Any], state: str) -> list[str]:
    rates = {name: row["rates"][f"{state} {name}"] for name in RATES}
    ratios, full = (
        [ours / cat for ours, cat in zip(rates[name], rates["cat"], strict=True)] for name in ("load", "packed")
    )
    return [
        str(row["index"]),
        *(f"{row[name] / 1e6:.1f}" for name in ("slice", "read", "largest", "held")),
        *(f"{max(0, row[name] - row['held']) / 1e6:.1f}" for name in ("loading_peak", "peak")),
        state,
        *(f"{statistics.median(values):.2f}" for values in rates.values()),
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f}",
        f"{statistics.median(full):.2f}",
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the checkpoint, and computed in")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="about so large is the checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written; default: the system's own")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file too")
    parser.add_argument("--probe", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
