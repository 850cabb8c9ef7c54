"""Compile what the tests of this folder run, on any machine: `python -m tests.device.compile [--arch sm_90a]`.

Kernels go where PLAIT_CACHE says. `--slim` leaves out their assembly, to carry the folder to another machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from plait.backends.kernels.gpu import loader
from plait.backends.kernels.gpu.build import Binary, arch_named, compile_many, pack
from plait.backends.kernels.gpu.cache import Cache, default_folder
from tests.device import prepared
from tests.device.machine import find


class Through:
    """Goes through every test up to where it stops."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool:
        names = pyfuncitem._fixtureinfo.argnames
        with contextlib.suppress(Exception, pytest.skip.Exception):  # numbers are wrong where nothing runs
            pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arch", help="for another machine: sm_90a, gfx942, ...")
    parser.add_argument("--slim", action="store_true", help="keep machine code only")
    args = parser.parse_args()
    found = find()
    if isinstance(found, str) and args.arch is None:
        print(f"nothing to compile: {found}; name what to compile for with --arch")
        return
    arch = arch_named(args.arch) if isinstance(found, str) or args.arch else found.arch
    os.environ.setdefault("PLAIT_CACHE", str(default_folder().parent))  # or the tests would take one of their own
    start = time.perf_counter()
    recording = prepared.record(arch)
    options = ["-q", "--no-header", "--no-summary", "-p", "no:cacheprovider", "-m", "device", "-W", "ignore"]
    status = pytest.main([*options, str(Path(__file__).parent)], plugins=[Through()])
    if status != pytest.ExitCode.OK:
        sys.exit(int(status))
    jobs = list(recording.jobs.values())
    cache = Cache(default_folder())
    made = compile_many(jobs, cache=cache, workers=os.cpu_count(), progress=_progress)
    wrong = [binary for binary in made if not isinstance(binary, Binary)]
    for error in wrong:
        print(error, file=sys.stderr)
    if args.slim:
        for job, binary in zip(jobs, made, strict=True):
            if isinstance(binary, Binary):
                cache.put(job.key, pack(replace(binary, packed_assembly=zlib.compress(b""))))
    prepared.maker().write_text(loader.require_triton())
    print(f"{len(jobs)} kernels for {arch.name}, {time.perf_counter() - start:.0f} s")
    if wrong:
        sys.exit(f"{len(wrong)} do not compile")


def _progress(done: int, total: int, what: str) -> None:
    if sys.stderr.isatty() or not done % 100:
        print(f"{done} of {total}: {what}", file=sys.stderr)


if __name__ == "__main__":
    main()
