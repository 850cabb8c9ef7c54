"""Names of targets and of the places where slices really run."""

from __future__ import annotations

from collections.abc import Collection

from plait.errors import UnsupportedError, did_you_mean


def label(name: str, emulated: bool) -> str:
    """`h100`, or `h100 (emulated on host)`."""
    return f"{name} (emulated on host)" if emulated else name


def is_emulated(runs_on: str) -> bool:
    """Whether a `label` says so."""
    return "emulated" in runs_on


def check_dtypes(backend: str, used: Collection[str], known: Collection[str]) -> None:
    """Raise UnsupportedError for a dtype that the backend does not compute in."""
    for dtype in used:
        if dtype not in known:
            raise UnsupportedError("dtype", f"{backend} does not compute in {dtype}", why="it has " + ", ".join(known))


def check_group(backend: str, size: int) -> None:
    """Raise UnsupportedError where several devices are to hold a slice together, and the backend splits no tensors."""
    if size != 1:
        raise UnsupportedError("group-size", f"{backend} holds a slice on one device", why=f"{size} were asked for")


def arch_of(backend: str, target: str, archs: Collection[str]) -> str:
    """The architecture of `cuda:sm_90a`. An empty `archs` takes any.

    Raises:
        UnsupportedError: `arch-unknown`: no code can be made for it.
    """
    arch = target.removeprefix(f"{backend}:")
    if archs and arch not in archs:
        raise UnsupportedError(
            "arch-unknown",
            f"{backend} makes no code for {arch!r}",
            why="it knows " + ", ".join(archs),
            hint=did_you_mean(arch, archs),
        )
    return arch
