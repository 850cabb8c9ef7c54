"""What a hop between two processes costs: `python benchmarks/hop.py [--json FILE]`.

Latency is half a round trip of an 8 KiB tensor. Bandwidth is tensor bytes over the time until a small answer is back.
Each figure stands beside a memcpy of the same size and `multiprocessing.Pipe` in the same run, because only the ratio
carries over to another machine. `*_min` is the best of the run, the rest are medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from plait.runtime.transport import Channel, Frame, socket_pair

KIB, MIB = 1 << 10, 1 << 20
LATENCY_ROUNDS = 4000
SIZES = {MIB: 60, 64 * MIB: 10, 512 * MIB: 4}


def fork(body: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    return pid


def timed(rounds: int, call: Callable[[], object]) -> tuple[float, float]:
    """Best and median seconds of `call`, after a warm-up of two."""
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times[2:]), statistics.median(times[2:])


def over_channel(nbytes: int, rounds: int, echo: bool) -> tuple[float, float]:
    here, there = socket_pair()

    def answer() -> None:
        here.close()
        with Channel(there, "bench") as channel:
            for _ in range(rounds + 2):
                frame = channel.recv()
                channel.send(Frame("step", tensors=frame.tensors if echo else {}))

    pid = fork(answer)
    there.close()
    frame = Frame("step", tensors={"x": np.ones(nbytes, np.uint8)})
    with Channel(here, "peer") as channel:
        result = timed(rounds, lambda: (channel.send(frame), channel.recv()))
    os.waitpid(pid, 0)
    return result


def over_pipe(nbytes: int, rounds: int, echo: bool) -> tuple[float, float]:
    here, there = multiprocessing.Pipe()

    def answer() -> None:
        for _ in range(rounds + 2):
            data = there.recv_bytes()
            there.send_bytes(data if echo else b"x")

    pid = fork(answer)
    data = np.ones(nbytes, np.uint8)
    result = timed(rounds, lambda: (here.send_bytes(data), here.recv_bytes()))
    os.waitpid(pid, 0)
    return result


def over_memcpy(nbytes: int, rounds: int) -> tuple[float, float]:
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return timed(rounds, lambda: np.copyto(target, source))


def measure() -> dict[str, Any]:
    hops = {"plait": over_channel, "pipe": over_pipe}
    result: dict[str, Any] = {"latency_8kib_us": {}, "bandwidth_gb_per_s": {}}
    for name, hop in hops.items():
        best, median = hop(8 * KIB, LATENCY_ROUNDS, True)
        result["latency_8kib_us"][name] = median / 2 * 1e6
        result["latency_8kib_us"][name + "_min"] = best / 2 * 1e6
    for nbytes, rounds in SIZES.items():
        row = {"memcpy": nbytes / over_memcpy(nbytes, rounds)[1] / 1e9}
        row |= {name: nbytes / hop(nbytes, rounds, False)[1] / 1e9 for name, hop in hops.items()}
        row["plait_over_memcpy"] = row["plait"] / row["memcpy"]
        result["bandwidth_gb_per_s"][f"{nbytes // MIB} MiB"] = row
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    result = measure()
    latency = result["latency_8kib_us"]
    print("8 KiB hop, microseconds (best / median)")
    for name in ("plait", "pipe"):
        print(f"  {name:8} {latency[name + '_min']:7.1f} / {latency[name]:7.1f}")
    print("bandwidth, GB/s")
    for size, row in result["bandwidth_gb_per_s"].items():
        figures = "  ".join(f"{name} {value:6.2f}" for name, value in row.items())
        print(f"  {size:8} {figures}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
