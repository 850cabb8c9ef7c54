"""Finding one kernel or program of an artifact by what a person says of it, and its text."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import ArtifactError, UsageError, did_you_mean

#: At most so many names in an error.
_SHOWN = 12


@dataclass(frozen=True)
class Text:
    """What `--asm` prints.

    Attributes:
        identical: whether the artifact's binary is the code of this text; None where there is no other text of it.
        remark: that in words.
    """

    slice: int
    name: str
    file: str
    text: str
    identical: bool | None
    remark: str

    def as_json(self) -> dict[str, Any]:
        fields = ("slice", "name", "file", "identical", "remark", "text")
        return {name: getattr(self, name) for name in fields}


@dataclass(frozen=True)
class _Item:
    """A kernel for some rows, or a program. `words` is what may be said of it, the name first."""

    slice: int
    folder: Path
    words: tuple[str, ...]
    file: str
    row: Mapping[str, Any]

    @property
    def name(self) -> str:
        return " ".join(self.words)


def find(folders: Mapping[int, Path], said: str) -> Text:
    """The one kernel or program that is meant.

    Args:
        folders: of the slices to look in, by number.
        said: its name, or its file's; then its sizes and rows, as far as it takes: `gemm 960x576 16`.

    Raises:
        UsageError: `asm-unknown`, `asm-ambiguous`: names what there is.
        UserError: `no-code`: the slices have no machine code.
        MissingDependencyError: `triton-missing`: kernels are compiled again.
    """
    items = [item for number, folder in folders.items() for item in _items(number, folder)]
    if not items:
        numbers = ", ".join(map(str, folders))
        raise ArtifactError(
            "no-code",
            f"there is no machine code in slice {numbers}",
            why="it was compiled without, or runs as it is",
            hint="plait inspect says what each slice has",
        )
    words = said.replace(":", " ").split()
    found = [item for item in items if _fits(item, words)]
    if not found:
        known = sorted({item.words[0] for item in items})
        same = [item for item in items if words[:1] == [item.words[0]]]
        raise UsageError(
            "asm-unknown",
            f"no kernel or program is called {said!r}",
            why="there are " + _listed([item.name for item in same] or known),
            hint=did_you_mean(said, known if not same else {item.name for item in same}),
        )
    if len({(item.slice, item.file) for item in found}) > 1:
        parts = {item.slice for item in found}
        # What only constants tell apart (two windows) has a file of its own.
        alike = Counter((item.slice, item.name) for item in found)
        plain = [item.name if alike[item.slice, item.name] == 1 else Path(item.file).stem for item in found]
        hint = "say more of it: --asm " + repr(plain[0]) if len(parts) == 1 else "name the slice: --slice N"
        pairs = zip(plain, found, strict=True)
        names = plain if len(parts) == 1 else [f"{name} in slice {item.slice}" for name, item in pairs]
        raise UsageError("asm-ambiguous", f"more than one kernel is called {said!r}", why=_listed(names), hint=hint)
    return _text(found[0])


def _fits(item: _Item, words: list[str]) -> bool:
    """A file's name alone, or the kernel's with any of its other words."""
    if len(words) == 1 and words[0] in (item.file, Path(item.file).stem):
        return True
    return words[:1] == [item.words[0]] and set(words[1:]) <= set(item.words[1:])


def _listed(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = len(unique) - _SHOWN
    return ", ".join(unique[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _items(number: int, folder: Path) -> Iterator[_Item]:
    from plait.report.code import label, slice_code

    report, _ = slice_code(folder)
    for row in report.get("kernels", ()):
        rows = row["rows"].removeprefix("up to ")
        yield _Item(number, folder, (*label(row).split(), rows), row["file"], row)
    for name in report.get("programs", ()):
        yield _Item(number, folder, (name,), f"{name}.hlo.gz", {})


def _text(item: _Item) -> Text:
    return _program(item) if item.file.endswith(".hlo.gz") else _kernel(item)


def _program(item: _Item) -> Text:
    """HLO is kept beside the program."""
    text = gzip.decompress((item.folder / item.file).read_bytes()).decode()
    return Text(item.slice, item.name, item.file, text, None, f"the HLO that libtpu made {item.name} of")


def _kernel(item: _Item) -> Text:
    """The artifact has no assembly: the kernel is compiled again, from the cache where it is there still."""
    from plait.backends.kernels.gpu.assembly import again

    made = again(item.folder, item.file, item.row)
    remark = f"{item.name}: the code of {item.folder.name}/{item.file}"
    if made.differs:
        remark += f" is not this one, byte for byte: {made.differs}"
    else:
        remark += ", byte for byte"
    return Text(item.slice, item.name, item.file, made.text, not made.differs, remark)
