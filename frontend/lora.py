"""LoRA adapters as PEFT saves them: a folder with adapter_config.json and adapter_model.safetensors.

An adapter adds `scale * B A` to matrices (Hu et al. 2021), and may bring whole tensors that replace those of the
checkpoint (`modules_to_save`). Here it is read and held against the module; no tensor data is read. Whatever of it hits
nothing, and whatever it says it changes and does not, is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from xdsl.dialects.builtin import ModuleOp

from plait.errors import CheckpointError, UnsupportedError, did_you_mean
from plait.frontend import safetensors
from plait.frontend.checkpoint import Checkpoint
from plait.frontend.config import DecoderConfig
from plait.frontend.files import read_json, some
from plait.frontend.lora_config import LoraConfig, read_lora_config
from plait.ir import weights
from plait.ir.module import block_range
from plait.ir.quant import held_dtype, quantise_types
from plait.ir.quantise import matrices
from plait.ir.types import DTYPES
from plait.spec import Rows, WeightRef

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
_OUTERMOST = ("model.", "transformer.", "gpt_neox.")
"""What stands in front of all names of a model in some files, and not in others."""

_PART = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.weight)?")
_TIED = "it is tied: logits and embedding are one table, and PEFT changes only one of its uses"
_GGUF_VECTOR = "GGUF stores some vectors otherwise (Gemma's norms as w + 1); give the checkpoint in safetensors"


@dataclass(frozen=True)
class Delta:
    """`scale * b a` is added to a weight (out, in): b is (out, r), a is (r, in). Of an `embedding` (vocabulary, hidden)
    the product is (hidden, vocabulary) and added transposed. `rows`: which rows of b belong to the weight."""

    a: WeightRef
    b: WeightRef
    scale: float
    embedding: bool = False
    rows: Rows | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        out, into = self.b.shape[0], self.a.shape[1]
        if self.rows is not None and out == self.rows.groups * self.rows.stride:
            out = self.rows.count
        return (into, out) if self.embedding else (out, into)


@dataclass(frozen=True)
class Adapter:
    """What an adapter does to the weights of a module, by their names.

    Attributes:
        name: the folder's.
        saved: tensors that replace the checkpoint's.
        deltas: what is added, to a replaced tensor too.
    """

    name: str
    saved: dict[str, WeightRef] = field(default_factory=dict)
    deltas: dict[str, Delta] = field(default_factory=dict)

    @property
    def changed(self) -> set[str]:
        """The weights it changes."""
        return {*self.saved, *self.deltas}


@dataclass(frozen=True)
class Target:
    """A weight of the module, as an adapter may change it.

    Attributes:
        shape: where matrices of a stack are rows of one matrix, as latent attention has them, of all in one below the
            other; `rows` then counts those of all.
        called: its tensor's name in the checkpoint, which several weights share where it is fused (q, k and v).
        rows, transposed: how the weight lies in that tensor; see `WeightRef`.
        linear: it is the matrix of a linear of a block.
        fixed: why it cannot be changed; empty where it can.
        matrices: of a stack as above.
    """

    shape: tuple[int, ...]
    called: str
    rows: Rows | None = None
    transposed: bool = False
    linear: bool = False
    fixed: str = ""
    matrices: int | None = None

    def ref(self, stored: WeightRef) -> WeightRef:
        """The weight in a tensor that replaces the checkpoint's."""
        shape, rows = self.shape, self.rows
        if self.matrices is not None and rows is not None:
            shape = (self.matrices, shape[0] // self.matrices, shape[1])
            rows = replace(rows, groups=rows.groups // self.matrices)
        return replace(stored, shape=shape, rows=rows, transposed=self.transposed)


def read_adapters(folders: Sequence[Path], checkpoint: Checkpoint, module: ModuleOp) -> tuple[Adapter, ...]:
    """The adapters, held against the module of the whole model. The weights that they change get the dtype that is
    computed in: what is merged is no longer as the checkpoint stores it.

    Raises: as `read_adapter`; UnsupportedError `lora-model` where the model is a program or a graph.
    """
    if not folders:
        return ()
    if not isinstance(checkpoint.config, DecoderConfig):
        raise UnsupportedError(
            "lora-model",
            f"{checkpoint.name} takes no adapter",
            why="a program or a graph keeps its weights as it has them",
            hint="give the checkpoint that it was made from",
        )
    targets = _targets(checkpoint, module, tied=checkpoint.config.tied)
    adapters = tuple(read_adapter(folder, targets) for folder in folders)
    held = weights(module)
    changed = {name for adapter in adapters for name in adapter.changed}
    quantise_types(module, {name: held_dtype(held[name]) for name in changed})
    return adapters


def read_adapter(folder: Path, targets: Mapping[str, Target]) -> Adapter:
    """An adapter, every tensor of it matched to a weight.

    Args:
        targets: every weight of the module, by name.

    Raises:
        CheckpointError: `lora-missing` (no such folder or file), `lora-target` (a tensor for a weight that the module
            does not have), `lora-pair` (A without B), `lora-shape`, `lora-incomplete` (a module that it says it changes
            and has no tensors for), and what the readers of its two files say.
        UnsupportedError: a key, a value or a tensor that is not implemented, by name.
    """
    config = read_lora_config(read_json(_file(folder, CONFIG)), str(folder / CONFIG))
    adapter = Adapter(folder.name or str(folder))
    pairs: dict[str, dict[str, WeightRef]] = {}
    for name, ref in sorted(safetensors.read_file(_file(folder, TENSORS)).weights.items()):
        if ref.encoding not in DTYPES:
            raise UnsupportedError("lora-dtype", f"{config.source}: {name!r} is stored as {ref.encoding}")
        match = _PART.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            _save(adapter, config, targets, name, ref)
        elif (known := pairs.setdefault(match["module"], {}).setdefault(match["side"], ref)) is not ref:
            raise CheckpointError("lora-pair", f"{config.source}: {known.name!r} and {name!r} are one matrix twice")
    for called, pair in pairs.items():
        _add(adapter, config, targets, called, pair)
    _check_whole(config, targets, adapter)
    return adapter


def _targets(checkpoint: Checkpoint, module: ModuleOp, *, tied: bool) -> dict[str, Target]:
    config = checkpoint.config
    assert isinstance(config, DecoderConfig)
    stored = checkpoint.weights or {}
    names = {
        (ref.file, ref.offset): ref
        for file in checkpoint.files
        if file.endswith(".safetensors")
        for ref in safetensors.read_file(Path(file)).weights.values()
    }
    linears = matrices(module, *block_range(module))
    found = {}
    for name, op in weights(module).items():
        shape, ref = tuple(op.result.type.get_shape()), stored.get(name)
        gguf = ref is not None and ref.file.endswith(".gguf")
        fixed = _TIED if tied and name == config.embedding else _GGUF_VECTOR if gguf and len(shape) == 1 else ""
        target = Target(shape, name, linear=name in linears, fixed=fixed)
        if ref is not None and (tensor := names.get((ref.file, ref.offset))) is not None:
            target = replace(target, called=tensor.name, rows=ref.rows, transposed=ref.transposed)
            if ref.rows is not None and len(tensor.shape) < len(shape):
                count, rows, columns = shape
                whole = replace(ref.rows, groups=ref.rows.groups * count)
                target = replace(target, shape=(count * rows, columns), rows=whole, matrices=count)
        found[name] = target
    if tied:
        found[config.head] = replace(found[config.embedding], called=config.head)
    return found


def _file(folder: Path, name: str) -> Path:
    path = folder / name
    if path.is_file():
        return path
    pickled = folder / "adapter_model.bin"
    if name == TENSORS and pickled.is_file():
        raise UnsupportedError(
            "checkpoint-format",
            f"{pickled} is not read",
            why="it is a pickle, which can run code when it is opened",
            hint="save the adapter again: `model.save_pretrained(DIR, safe_serialization=True)`",
        )
    why = f"an adapter is a folder with {CONFIG} and {TENSORS}"
    raise CheckpointError("lora-missing", f"there is no {path}", why=why)


def _meant(config: LoraConfig, targets: Mapping[str, Target], wanted: str) -> dict[str, Target]:
    """The weights that lie in the tensor which PEFT calls `wanted`."""
    spelt = (wanted, *(outer + wanted for outer in _OUTERMOST), *(wanted.removeprefix(outer) for outer in _OUTERMOST))
    for name in spelt:
        found = {own: target for own, target in targets.items() if name == target.called}
        if found or name in targets:
            break
    else:
        known = {word for own, target in targets.items() for word in (own, target.called)}
        raise CheckpointError(
            "lora-target",
            f"{config.source}: the adapter changes {wanted!r}, which the model does not have",
            hint=did_you_mean(wanted, known) or "was the adapter made for this model?",
        )
    found = found or {name: targets[name]}
    for own, target in found.items():
        if target.fixed:
            raise UnsupportedError("lora-target", f"{config.source}: the adapter changes {own!r}", why=target.fixed)
    return found


def _save(adapter: Adapter, config: LoraConfig, targets: Mapping[str, Target], name: str, ref: WeightRef) -> None:
    """A tensor that replaces one of the checkpoint: of a saved module, or an embedding beside its own A and B."""
    plain = name.removeprefix(_PREFIX)
    wanted = plain.replace(".base_layer.", ".")
    if not config.saves(wanted.rpartition(".")[0]) and plain == wanted:
        raise UnsupportedError(
            "lora-tensor",
            f"{config.source}: the adapter holds {name!r}, which plait does not understand",
            why="known are lora_A and lora_B of modules, and tensors of modules that modules_to_save lists",
        )
    for own, target in _meant(config, targets, wanted).items():
        stored = ref.shape[::-1] if target.transposed else ref.shape
        if target.rows is not None and stored[:1] == (target.rows.groups * target.rows.stride,):
            stored = (target.rows.count, *stored[1:])
        _check_shape(config, name, stored, own, target)
        adapter.saved[own] = target.ref(ref)


def _add(
    adapter: Adapter, config: LoraConfig, targets: Mapping[str, Target], module: str, pair: Mapping[str, WeightRef]
) -> None:
    if len(pair) != 2:
        (only,) = pair.values()
        raise CheckpointError("lora-pair", f"{config.source}: {only.name!r} stands alone", why="B A takes both")
    a, b = pair["A"], pair["B"]
    if (len(a.shape), len(b.shape)) != (2, 2) or {*a.shape[:1], *b.shape[1:]} != {config.rank(module)}:
        raise CheckpointError(
            "lora-shape",
            f"{config.source}: A and B of {module!r} are {list(a.shape)} and {list(b.shape)}",
            why=f"of rank {config.rank(module)}, as the config says, A is (r, in) and B is (out, r)",
        )
    embedding = ".lora_embedding_" in a.name
    for own, target in _meant(config, targets, f"{module}.weight").items():
        delta = Delta(a, b, config.scale(module), embedding, target.rows)
        _check_shape(config, f"B A of {module}", delta.shape, own, target)
        adapter.deltas[own] = delta


def _check_shape(config: LoraConfig, what: str, shape: tuple[int, ...], own: str, target: Target) -> None:
    if shape != target.shape:
        raise CheckpointError(
            "lora-shape",
            f"{config.source}: {what!r} is {list(shape)}",
            why=f"{own!r} of the model is {list(target.shape)}",
            hint="was the adapter made for this model?",
        )


def _check_whole(config: LoraConfig, targets: Mapping[str, Target], adapter: Adapter) -> None:
    """What the config says is changed has tensors, and there is something."""
    absent = {
        module
        for own, target in targets.items()
        if len(target.shape) == 2 and own not in adapter.deltas
        if config.wants(module := target.called.removesuffix(".weight"), linear=target.linear)
    }
    called = {own: target.called.rpartition(".")[0] for own, target in targets.items()}
    absent |= set(config.unmet(called.values(), (called[own] for own in adapter.changed)))
    if absent or not adapter.changed:
        raise CheckpointError(
            "lora-incomplete",
            f"{config.source}: the adapter has no tensors for {some(absent) if absent else 'anything'}",
            why="it says that it changes them" if absent else "",
            hint="fetch the whole adapter again",
        )
