"""LoRA adapters as PEFT saves them: a folder with adapter_config.json and adapter_model.safetensors.

An adapter adds `scale * B A` to matrices (Hu et al. 2021), and may bring whole tensors that replace those of the
checkpoint (`modules_to_save`). Here it is read and held against the module; no tensor data is read. Whatever of it hits
nothing, and whatever it says it changes and does not, is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xdsl.dialects.builtin import ModuleOp

from plait.errors import CheckpointError, UnsupportedError, did_you_mean
from plait.frontend import safetensors
from plait.frontend.checkpoint import Checkpoint
from plait.frontend.config import DecoderConfig
from plait.frontend.families.decoder import EMBEDDING, LM_HEAD
from plait.frontend.files import read_json, some
from plait.frontend.lora_config import LoraConfig, read_lora_config
from plait.ir import weights
from plait.ir.module import block_range
from plait.ir.quant import held_dtype, quantise_types
from plait.ir.quantise import linear_weights
from plait.ir.types import DTYPES
from plait.spec import WeightRef

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
_OUTERMOST = ("model.", "transformer.", "gpt_neox.")
_PART = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.weight)?")


@dataclass(frozen=True)
class Delta:
    """`scale * b a` is added to a weight (out, in): b is (out, r), a is (r, in). Of an `embedding` (vocabulary, hidden)
    the product is (hidden, vocabulary) and added transposed."""

    a: WeightRef
    b: WeightRef
    scale: float
    embedding: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        out, into = self.b.shape[0], self.a.shape[1]
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
class Base:
    """What an adapter is held against.

    Attributes:
        shapes: of every weight of the module, by name.
        linears: the matrices of the blocks' linears.
        fixed: weights that cannot be changed, with the reason.
    """

    shapes: Mapping[str, tuple[int, ...]]
    linears: Collection[str]
    fixed: Mapping[str, str] = field(default_factory=dict)


def read_adapters(folders: Sequence[Path], checkpoint: Checkpoint, module: ModuleOp) -> tuple[Adapter, ...]:
    """The adapters, held against the module of the whole model. The weights that they change get the dtype that is
    computed in: what is merged is no longer as the checkpoint stores it.

    Raises: as `read_adapter`; UnsupportedError `lora-model` where the model is an exported program.
    """
    if not folders:
        return ()
    if not isinstance(checkpoint.config, DecoderConfig):
        raise UnsupportedError(
            "lora-model",
            f"{checkpoint.name} takes no adapter",
            why="the weights of an exported program have names of their own",
        )
    stored = checkpoint.weights or {}
    held = weights(module)
    shapes = {name: tuple(op.result.type.get_shape()) for name, op in held.items()}
    fixed = {}
    if checkpoint.config.tied:
        shapes[LM_HEAD] = shapes[EMBEDDING]
        why = "it is tied: logits and embedding are one table, and PEFT changes only one of its uses"
        fixed = dict.fromkeys((EMBEDDING, LM_HEAD), why)
    if any(ref.file.endswith(".gguf") for ref in stored.values()):
        why = "GGUF stores some vectors otherwise (Gemma's norms as w + 1); give the checkpoint in safetensors"
        fixed |= {name: why for name, shape in shapes.items() if len(shape) == 1}
    base = Base(shapes, linear_weights(module, *block_range(module)), fixed)
    adapters = tuple(read_adapter(folder, base) for folder in folders)
    changed = {name for adapter in adapters for name in adapter.changed}
    quantise_types(module, {name: held_dtype(held[name]) for name in changed})
    return adapters


def read_adapter(folder: Path, base: Base) -> Adapter:
    """An adapter, every tensor of it matched to a weight.

    Raises:
        CheckpointError: `lora-missing` (no such folder or file), `lora-target` (a tensor for a weight that the module
            does not have), `lora-pair` (A without B), `lora-shape`, `lora-incomplete` (a module that it says it changes
            and has no tensors for), and what the readers of its two files say.
        UnsupportedError: a key, a value or a tensor that is not implemented, by name.
    """
    config = read_lora_config(read_json(_file(folder, CONFIG)), str(folder / CONFIG))
    stored = safetensors.read_file(_file(folder, TENSORS)).weights
    sides: dict[str, dict[str, WeightRef]] = {}
    embeddings: set[str] = set()
    adapter = Adapter(folder.name or str(folder))
    for name, ref in sorted(stored.items()):
        if ref.encoding not in DTYPES:
            raise UnsupportedError("lora-dtype", f"{folder}: {name!r} is stored as {ref.encoding}")
        match = _PART.fullmatch(name)
        if match is None:
            _save(adapter, config, base, name, ref)
            continue
        weight = _weight(config, base, match["module"] + ".weight", name)
        if match["side"] in sides.setdefault(weight, {}):
            raise CheckpointError("lora-target", f"{config.source}: two tensors are side {match['side']} of {weight!r}")
        sides[weight][match["side"]] = ref
        if match["embedding"]:
            embeddings.add(weight)
    for weight, pair in sides.items():
        adapter.deltas[weight] = _delta(config, base, weight, pair, weight in embeddings)
    _check_whole(config, base, adapter)
    return adapter


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
    raise CheckpointError(
        "lora-missing", f"there is no {path}", why=f"an adapter is a folder with {CONFIG} and {TENSORS}"
    )


def _weight(config: LoraConfig, base: Base, name: str, tensor: str) -> str:
    """The weight that `name`, as PEFT says it, means. Files of a model differ in what stands in front of all names."""
    wanted = name.removeprefix(_PREFIX)
    spelt = (wanted, *(outer + wanted for outer in _OUTERMOST), *(wanted.removeprefix(outer) for outer in _OUTERMOST))
    found = next((own for own in spelt if own in base.shapes), None)
    if found is None:
        raise CheckpointError(
            "lora-target",
            f"{config.source}: {tensor!r} changes {wanted!r}, which the model does not have",
            hint=did_you_mean(wanted, base.shapes) or "was the adapter made for this model?",
        )
    if found in base.fixed:
        raise UnsupportedError("lora-target", f"{config.source}: {tensor!r} changes {found!r}", why=base.fixed[found])
    return found


def _save(adapter: Adapter, config: LoraConfig, base: Base, name: str, ref: WeightRef) -> None:
    """A tensor that replaces one of the checkpoint: of a saved module, or an embedding beside its own A and B."""
    plain = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
    if not config.saves(plain.rpartition(".")[0]) and plain == name.removeprefix(_PREFIX):
        raise UnsupportedError(
            "lora-tensor",
            f"{config.source}: the adapter holds {name!r}, which plait does not understand",
            why="known are lora_A and lora_B of modules, and tensors of modules that modules_to_save lists",
        )
    weight = _weight(config, base, plain, name)
    _check_shape(config, name, ref.shape, weight, base.shapes[weight])
    if weight in adapter.saved:
        raise CheckpointError("lora-target", f"{config.source}: two tensors replace {weight!r}")
    adapter.saved[weight] = ref


def _delta(config: LoraConfig, base: Base, weight: str, pair: Mapping[str, WeightRef], embedding: bool) -> Delta:
    module = weight.removesuffix(".weight")
    if len(pair) != 2:
        (only,) = pair.values()
        raise CheckpointError("lora-pair", f"{config.source}: {only.name!r} stands alone", why="B A takes both")
    a, b = pair["A"], pair["B"]
    ranks = {config.rank(module), *a.shape[:1], *b.shape[1:]}
    if (len(a.shape), len(b.shape)) != (2, 2) or len(ranks) != 1:
        raise CheckpointError(
            "lora-shape",
            f"{config.source}: A and B of {module!r} are {list(a.shape)} and {list(b.shape)}",
            why=f"of rank {config.rank(module)}, as the config says, A is (r, in) and B is (out, r)",
        )
    found = Delta(a, b, config.scale(module), embedding)
    _check_shape(config, f"B A of {module}", found.shape, weight, base.shapes[weight])
    return found


def _check_shape(config: LoraConfig, what: str, shape: tuple[int, ...], weight: str, wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise CheckpointError(
            "lora-shape",
            f"{config.source}: {what!r} is {list(shape)}",
            why=f"{weight!r} of the model is {list(wanted)}",
            hint="was the adapter made for this model?",
        )


def _check_whole(config: LoraConfig, base: Base, adapter: Adapter) -> None:
    """What the config says is changed has tensors, and there is something."""
    matrices = {name.removesuffix(".weight"): name for name, shape in base.shapes.items() if len(shape) == 2}
    wanted = {module for module, name in matrices.items() if config.wants(module, linear=name in base.linears)}
    absent = sorted(module for module in wanted if matrices[module] not in adapter.deltas)
    changed = [name.removesuffix(".weight") for name in adapter.changed]
    listed = [*(config.targets if isinstance(config.targets, tuple) else ()), *config.saved]
    absent += [name for name in listed if not any(f".{name}." in f".{module}." for module in changed)]
    if absent or not adapter.changed:
        raise CheckpointError(
            "lora-incomplete",
            f"{config.source}: the adapter has no tensors for {some(absent) if absent else 'anything'}",
            why="it says that it changes them" if absent else "",
            hint="fetch the whole adapter again",
        )
