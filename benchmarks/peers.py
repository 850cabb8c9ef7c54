"""Asks other people's cost models for the same points. Runs under the Python that has them, never under plait's.

    PYTHON benchmarks/peers.py genz|aiconfigurator < points.jsonl > answers.jsonl

A line in is a point's configuration; a line out is {"id": ..., "prefill_s", "decode_s"} (GenZ, times of steps) or
{"id": ..., "ttft", "tpot"} (aiconfigurator), or {"id": ..., "error": why it does not answer}.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from typing import Any

#: Of the file's models: what each peer calls them.
GENZ = {
    "llama-2-70b": "llama2_70b",
    "llama-3-70b": "meta-llama/Llama-3.1-70B",
    "llama-3-8b": "meta-llama/Llama-3.1-8B",
    "llama-3-405b": "meta-llama/Llama-3.1-405B",
}
AICONFIGURATOR = {
    "llama-2-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3-405b": "meta-llama/Meta-Llama-3.1-405B",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen3-coder-480b": "Qwen/Qwen3-Coder-480B-A35B-Instruct",
}
SYSTEMS = {
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "gb200": "gb200",
    "a100-80": "a100_sxm",
    "rtxpro6000": "rtx_pro_6000_server",
}
GENZ_BITS = {"bf16": "bf16", "fp16": "bf16", "fp8": "fp8", "fp4": "int4"}


def genz(point: dict[str, Any]) -> dict[str, float]:
    from GenZ import decode_moddeling, prefill_moddeling  # type: ignore[import-not-found]

    if point["model"] not in GENZ:
        raise ValueError("no such model")
    system = {
        "real_values": True,
        "Flops": point["tflops_16"],
        "Memory_size": point["memory_gb"],
        "Memory_BW": point["bandwidth_gbs"],
        "ICN": point["link_gbs"],
        "ICN_LL": 1,
    }
    same = {
        "model": GENZ[point["model"]],
        "system_name": system,
        "bits": GENZ_BITS[point["precision"]],
        "tensor_parallel": point["tp"],
        "parallelism_heirarchy": f"TP{{{point['tp']}}}_EP{{1}}_PP{{1}}",
        "model_offload": True,
    }
    prefill = prefill_moddeling(batch_size=point["prompts"], input_tokens=point["prompt_tokens"], **same)
    decode = decode_moddeling(
        batch_size=point["batch"],
        input_tokens=point["prompt_tokens"],
        output_tokens=point["output_tokens"] // 2,
        Bb=1,
        **same,
    )
    return {"prefill_s": prefill["Latency"] / 1000, "decode_s": decode["Latency"] / 1000}


def aiconfigurator(point: dict[str, Any]) -> dict[str, float]:
    from aiconfigurator.cli.api import cli_estimate  # type: ignore[import-not-found]

    if point["model"] not in AICONFIGURATOR:
        raise ValueError("no such model")
    if point["device"] not in SYSTEMS:
        raise ValueError("no such device")
    quant = {
        "bf16": ("bfloat16", "bfloat16"),
        "fp16": ("bfloat16", "bfloat16"),
        "fp8": ("fp8", "fp8"),
        "fp4": ("nvfp4", "fp8"),
    }
    gemm, kv = quant[point["precision"]]
    more: dict[str, Any] = {"gemm_quant_mode": gemm, "kvcache_quant_mode": kv}
    if "gpt-oss" in point["model"]:
        more = {}
    elif point["experts"]:
        more["moe_quant_mode"] = gemm
    if point["experts"]:
        more |= {"moe_tp_size": point["tp"], "moe_ep_size": 1}
    same: dict[str, Any] = {
        "mode": "static" if point["scenario"] == "static" else "agg",
        "backend_name": point["engine"].split("-")[0],
        "isl": point["prompt_tokens"],
        "osl": point["output_tokens"],
        "batch_size": point["batch"],
        "tp_size": point["tp"],
        "pp_size": point["pp"],
        **more,
    }
    model, system = AICONFIGURATOR[point["model"]], SYSTEMS[point["device"]]
    try:
        found = cli_estimate(model, system, **same)
    except Exception:  # a table is missing: it can fill in from neighbours
        found = cli_estimate(model, system, database_mode="HYBRID", **same)
    return {"ttft": found.ttft / 1000, "tpot": found.tpot / 1000}


PEERS: dict[str, Callable[[dict[str, Any]], dict[str, float]]] = {"genz": genz, "aiconfigurator": aiconfigurator}


def main() -> None:
    ask = PEERS[sys.argv[1]]
    for line in sys.stdin:
        point = json.loads(line)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                answer: dict[str, Any] = dict(ask(point))
        except Exception as error:  # whatever it raises is its answer
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps({"id": point["id"], **answer}), flush=True)


if __name__ == "__main__":
    main()
