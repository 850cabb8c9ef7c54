"""Running the damaged files: in a child process, which may die, hang or grow, and is started again behind that case.

A case is a number: it chooses the seed and everything that is drawn, so a case can be run again alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from plait.errors import LONGEST, PlaitError
from tests.fuzz.kinds import KINDS, Kind

COUNT = 2000
SECONDS = 60
"""A case that takes longer hangs."""

GROWTH_BYTES = 200 << 20
"""A case that makes the process larger by more is a fault."""

MESSAGE = 4 * LONGEST
"""Characters of a whole error."""

FINE = "fine"

ADDRESS_SPACE = 4 << 30
"""More than the process has before the first case: beyond, allocating fails."""


@dataclass(frozen=True)
class Fault:
    """A case that gave neither an error of plait's own nor a right answer."""

    kind: str
    case: int
    what: str
    where: str = ""


@dataclass(frozen=True)
class Outcome:
    """Of a kind: cases by how they ended (an error's code, or FINE), and the faults."""

    ended: dict[str, int]
    faults: list[Fault]


def prepare(name: str, folder: Path) -> Path:
    """Write the seeds of a kind. Needs transformers."""
    made = folder / name
    made.mkdir(parents=True)
    KINDS[name].seeds(made)
    return made


def sweep(name: str, seeds: Path, count: int, first: int = 0) -> Outcome:
    """Cases `first` to `count` of a kind, in child processes."""
    ended, faults = Counter[str](), list[Fault]()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        log = Path(scratch) / "log"
        while first < count:
            words = ["--child", scratch, "--seeds", str(seeds), "--first", str(first), "--count", str(count), name]
            log.write_bytes(b"")
            done = subprocess.run(
                [sys.executable, "-m", "tests.fuzz", *words], capture_output=True, text=True, check=False
            )
            lines = [json.loads(line) for line in log.read_text().splitlines()]
            faults += [Fault(**line["fault"]) for line in lines if "fault" in line]
            ended.update(line["ended"] for line in lines if "ended" in line)
            begun = [line["case"] for line in lines if "case" in line]
            if done.returncode == 0:
                break
            if not begun:
                raise RuntimeError(f"{name} did not begin: {done.stderr[-2000:]}")
            faults.append(Fault(name, begun[-1], f"the process ended with {done.returncode}", done.stderr[-1500:]))
            first = begun[-1] + 1
    return Outcome(dict(ended), faults)


def damage(kind: Kind, seeds: Path, scratch: Path, case: int) -> Path:
    """A seed in `scratch` with one file damaged; the other files are links."""
    names = sorted(seed.name for seed in seeds.iterdir())
    random = Random(f"{kind.file} {case}")
    seed, made = seeds / names[case % len(names)], scratch / "m"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    for entry in seed.iterdir():
        if entry.name != kind.file:
            (made / entry.name).symlink_to(entry)
    (made / kind.file).write_bytes(kind.mutate(random, (seed / kind.file).read_bytes()))
    return made


def child(name: str, seeds: Path, scratch: Path, first: int, count: int) -> None:
    """Run the cases and write each case's begin and end into `scratch`/log."""
    kind = KINDS[name]
    for seed in sorted(seeds.iterdir()):  # what is loaded once is loaded now; and an undamaged file must be fine
        kind.check(seed)
    space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (space, resource.RLIM_INFINITY))
    with (scratch / "log").open("a") as log:

        def say(**words: object) -> None:
            log.write(json.dumps(words) + "\n")
            log.flush()

        for case in range(first, count):
            say(case=case)
            made = damage(kind, seeds, scratch, case)
            before = _start_peak()
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            try:
                say(ended=_ended(kind, made))
            except KeyboardInterrupt:
                raise
            except BaseException as err:  # a library's panic is no Exception
                frames = traceback.format_exception(err)
                say(fault=asdict(Fault(name, case, f"{type(err).__name__}: {err}"[:300], "".join(frames)[-1500:])))
            faulthandler.cancel_dump_traceback_later()
            grown = _peak() - before
            if grown > GROWTH_BYTES:
                say(fault=asdict(Fault(name, case, f"it took {grown >> 20} MB of memory")))


def _ended(kind: Kind, made: Path) -> str:
    """FINE, or the code of an error that can be shown: on a terminal, and as JSON."""
    try:
        kind.check(made)
    except PlaitError as err:
        told = err
    else:
        return FINE
    str(told).encode()
    json.dumps(told.to_dict())
    assert told.code and told.what and len(str(told)) < MESSAGE, f"{told.code} is {len(str(told))} characters long"
    return told.code


def _start_peak() -> int:
    """Forget the most memory that the process ever had; what it has now. (getrusage knows no such thing, and begins
    with what the parent had.)"""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """The most bytes of memory since `_start_peak`."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; all of them")
    parser.add_argument("--count", type=int, default=COUNT, help=f"cases of each ({COUNT})")
    parser.add_argument("--case", type=int, help="one case, with its traceback")
    parser.add_argument("--keep", type=Path, help="with --case: where the damaged files are left")
    for hidden in ("--child", "--seeds"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if unknown := set(asked.kinds) - KINDS.keys():
        parser.error(f"no kind is called {', '.join(sorted(unknown))}")
    names = asked.kinds or list(KINDS)
    if asked.child is not None:
        child(names[0], asked.seeds, asked.child, asked.first, asked.count)
        return 0
    failed = False
    with tempfile.TemporaryDirectory(prefix="seeds-") as folder:
        for name in names:
            seeds, start = prepare(name, Path(folder)), time.monotonic()
            if asked.case is not None:
                made = damage(KINDS[name], seeds, Path(folder), asked.case)
                if asked.keep:
                    shutil.copytree(made, asked.keep)
                KINDS[name].check(made)
                continue
            found = sweep(name, seeds, asked.count)
            shutil.rmtree(seeds)
            failed = failed or bool(found.faults)
            total, fine = sum(found.ended.values()), found.ended.pop(FINE, 0)
            print(
                f"{name}: {asked.count} cases, {fine} read, {total - fine} refused with {len(found.ended)} codes, "
                f"{len(found.faults)} faults, {time.monotonic() - start:.0f} s",
                flush=True,
            )
            for fault in found.faults:
                print(f"  case {fault.case}: {fault.what}\n{fault.where}", flush=True)
    return int(failed)
