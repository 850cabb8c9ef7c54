"""Programs that `torch.export.save` wrote (`.pt2`): decoders, raised to plait's ops; what is not made of
them is taken as one opaque op.

In a `.pt2` each weight is a record of raw bytes, so weights are byte ranges of the file like everybody's. The program
itself is read by torch, after `pt2` has looked at it.
"""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdsl.dialects.builtin import ModuleOp

from plait.errors import MissingDependencyError, PlaitError, UnsupportedError
from plait.frontend.aten.graph import describe
from plait.frontend.aten.raised import FAMILY, Raised, raise_program
from plait.frontend.files import TensorFiles, version
from plait.frontend.opaque import FAMILY as OPAQUE
from plait.frontend.opaque import ProgramConfig, check_program, written
from plait.frontend.own import GraphConfig
from plait.frontend.pt2 import Archive, check_code, damaged, read_archive, refuse
from plait.frontend.torch_mlir import quiet, require
from plait.ir import Builder
from plait.spec import WeightRef
from plait.spec.weight import Encoding

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram


@dataclass(frozen=True)
class RaisedConfig(GraphConfig):
    """What is known of a program that is made of plait's ops; it answers to the names that `DecoderConfig` has."""

    def build(self, dtype: str) -> ModuleOp:
        """The module. Raises UnsupportedError, CheckpointError where the file changed since."""
        found = _program(Path(self.file))
        assert found.raised is not None
        return found.raised.build(dtype)

    def unused(self) -> dict[str, str]:
        """Tensors of the file that no op uses, with the reason."""
        found = _program(Path(self.file))
        assert found.raised is not None
        used = {name.partition("[")[0] for name in found.raised.refs}
        return dict.fromkeys(
            found.aliases.keys() - used, "no weight of an op: a table that is computed, or no part of logits"
        )


@dataclass(frozen=True)
class _Program:
    """A loaded program, raised or opaque. `aliases`: the names under which torch knows each tensor that a byte range
    holds (a tied table has two)."""

    config: RaisedConfig | ProgramConfig
    tensors: TensorFiles
    aliases: dict[str, tuple[str, ...]]
    raised: Raised | None = None
    exported: ExportedProgram | None = None


def read_program(path: Path) -> tuple[RaisedConfig | ProgramConfig, TensorFiles]:
    """Raise an exported program to plait's ops. Where it is not made of them, check that it can be an opaque op:
    a decoder with one input, token ids [1 or batch, tokens], and one result, logits [1 or batch, tokens, vocabulary],
    causal and without memory.

    Raises:
        MissingDependencyError: torch is not installed, or torch-mlir where it is needed.
        CheckpointError: `exported-damaged`: the file is no whole archive, or torch does not read it.
        UnsupportedError: `exported-*`: it is read, and is no such decoder; names what is in the way.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("torch-missing", f"reading {path.name} needs torch", hint="pip install torch")
    found = _program(path)
    return found.config, found.tensors


def build_program(config: ProgramConfig, dtype: str) -> ModuleOp:
    """The module: one `plait.opaque` with a StableHLO program per length.

    Raises:
        UnsupportedError: `exported-dtype`: another dtype than its own is asked for; `torch-mlir-refused`: naming what
            torch-mlir cannot write, where it stands, and why the program is not made of plait's ops.
    """
    if dtype != config.dtype:
        raise UnsupportedError(
            "exported-dtype",
            f"{Path(config.file).name} computes in {config.dtype}, not in {dtype}",
            why="an opaque program keeps the dtypes it was exported with",
            hint=f"export the module in {dtype}",
        )
    found = _program(Path(config.file))
    assert found.exported is not None
    try:
        with quiet():
            made = [written(found.exported, found.aliases, length) for length in config.lengths]
    except UnsupportedError as err:
        raise _unwritten(config, found.exported, err) from err
    refs = found.tensors.weights
    b = Builder(OPAQUE, config.dtype)
    b.block = 0
    logits = b.opaque(
        {name: (refs[name].shape, refs[name].encoding) for name in config.arguments},
        programs=[text for text, _ in made],
        lengths=config.lengths,
        flops=[flops for _, flops in made],
        vocabulary=config.vocab_size,
    )
    _read.cache_clear()  # the weights that torch holds are not needed any more
    return b.finish({"logits": logits})


_TORCH_OP = re.compile(r"torch\.(?:operator\b.*?name = \"torch\.)?((?:aten|prims|torchvision|higher_order)\.\w+)")
"""An op in what torch-mlir says."""


def _unwritten(config: ProgramConfig, exported: ExportedProgram, err: UnsupportedError) -> UnsupportedError:
    """What torch-mlir refuses, with the node of the program that it is; no node is known of what torch takes apart."""
    if err.code != "torch-mlir-refused":
        return err
    found = _TORCH_OP.search(err.why)
    nodes = [node for node in exported.graph.nodes if found and f"{node.target}.".startswith(f"{found[1]}.")]
    what = describe(nodes[0]) if nodes else found[1] if found else "a part of it"
    return UnsupportedError(
        err.code,
        f"{Path(config.file).name} is not made of plait's ops, and torch-mlir cannot write {what}",
        why=f"{config.reason}; {err.what}: {err.why}",
        hint="give the checkpoint that it was made from, or export the module without it",
    )


def save_program(exported: ExportedProgram, path: Path) -> None:
    """Write a program as a file that `read_program` reads."""
    import torch

    with quiet():
        torch.export.save(exported, path)


def _program(path: Path) -> _Program:
    return _read(path, version(path))


@lru_cache(maxsize=1)
def _read(path: Path, version: tuple[int, int]) -> _Program:
    """Loaded once for the config and the module; again where the file changed."""
    import torch

    archive = read_archive(path)
    with quiet():
        check_code(archive)
        try:
            return _load(archive, torch.export.load(path))
        except PlaitError:
            raise
        except Exception as err:
            cause = err.__cause__ or err
            raise damaged(path, f"{type(cause).__name__}: {cause}"[:500]) from err


def _load(archive: Archive, exported: ExportedProgram) -> _Program:
    refs, aliases = _ranges(archive, exported)
    if not refs:
        refuse("weights", "the program has no weights of a dtype that plait reads", ", ".join(_ENCODINGS))
    dtype = _dtype(refs)
    files = {str(archive.path): archive.identity}
    try:
        # Without decompositions torch only turns what writes in place into results.
        named = {name: refs[first] for first, names in aliases.items() for name in names}
        raised = raise_program(exported.run_decompositions({}), named, dtype)
    except UnsupportedError as reason:
        return _opaque(archive, exported, TensorFiles(refs, files, {}), aliases, dtype, reason)
    config = RaisedConfig(
        family=FAMILY,
        file=str(archive.path),
        vocab_size=raised.vocabulary,
        blocks=raised.blocks,
        max_positions=raised.longest,
        ropes=raised.ropes,
        dtype=dtype,
        notes=raised.notes,
    )
    return _Program(config, TensorFiles(dict(raised.refs), files, {}), aliases, raised=raised)


def _opaque(
    archive: Archive,
    exported: ExportedProgram,
    tensors: TensorFiles,
    aliases: dict[str, tuple[str, ...]],
    dtype: str,
    reason: UnsupportedError,
) -> _Program:
    why = reason.what + (f" ({reason.why})" if reason.why else "")
    try:
        require()
    except MissingDependencyError as err:
        raise MissingDependencyError(
            err.code,
            f"{archive.path.name} is not made of plait's ops, and one opaque op needs torch-mlir",
            why=f"{err.why}; {why}",
            hint=err.hint,
        ) from err
    kept = {name for names in aliases.values() for name in names}
    others = {name: tensor for name, tensor in (exported.state_dict | exported.constants).items() if name not in kept}
    try:
        lengths, bounded, vocabulary = check_program(exported, others)
    except UnsupportedError as err:
        raise UnsupportedError(
            err.code,
            err.what,
            why=f"{err.why or 'it is no opaque op'}; nor is it made of plait's ops: {why}",
            hint=err.hint,
        ) from err
    config = ProgramConfig(
        family=OPAQUE,
        file=str(archive.path),
        vocab_size=vocabulary,
        max_positions=lengths[-1],
        lengths=lengths,
        bounded=bounded,
        arguments=tuple(tensors.weights),
        dtype=dtype,
        reason=why,
    )
    return _Program(config, tensors, aliases, exported=exported)


def _ranges(archive: Archive, exported: ExportedProgram) -> tuple[dict[str, WeightRef], dict[str, tuple[str, ...]]]:
    """The tensors that byte ranges hold, and all names of each."""
    refs: dict[str, WeightRef] = {}
    aliases: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for name, item in archive.weights.items():
        place = json.dumps([item["path_name"], item["tensor_meta"]], sort_keys=True)
        ref = _ref(archive, name, item, exported.state_dict[name])
        if ref is None:
            continue
        if place in first:
            aliases[first[place]].append(name)
        else:
            first[place] = name
            refs[name], aliases[name] = ref, [name]
    return refs, {name: tuple(names) for name, names in aliases.items()}


_ENCODINGS: dict[str, Encoding] = {"torch.float32": "float32", "torch.float16": "float16", "torch.bfloat16": "bfloat16"}


def _ref(archive: Archive, name: str, item: dict[str, Any], tensor: torch.Tensor) -> WeightRef | None:
    encoding = _ENCODINGS.get(str(tensor.dtype))
    if encoding is None or not tensor.is_contiguous() or tensor.dim() == 0 or tensor.numel() == 0:
        return None
    offset, length = archive.records["data/weights/" + item["path_name"]]
    inside = int(item["tensor_meta"]["storage_offset"]["as_int"]) * tensor.element_size()
    nbytes = tensor.numel() * tensor.element_size()
    if inside + nbytes > length:
        raise damaged(archive.path, f"{name} takes {nbytes} bytes from {inside} on, its record has {length}")
    return WeightRef(name, str(archive.path), offset + inside, nbytes, encoding, tuple(tensor.shape))


def _dtype(refs: dict[str, WeightRef]) -> str:
    """The dtype that most bytes are in."""
    sizes: dict[str, int] = {}
    for ref in refs.values():
        sizes[ref.encoding] = sizes.get(ref.encoding, 0) + ref.nbytes
    return max(sizes, key=sizes.__getitem__)
