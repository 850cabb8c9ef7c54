"""Opening a checkpoint, in whatever form it lies there. Tensor data is not read.

model.safetensors   model.safetensors.index.json   a directory   a hub cache folder   model.gguf   config.json alone
model.pt2 (a program that torch.export saved)   model.onnx
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plait.errors import CheckpointError, UsageError
from plait.frontend import safetensors
from plait.frontend.config import DecoderConfig
from plait.frontend.config_reader import read_ends, token_ids
from plait.frontend.exported import read_program
from plait.frontend.families import family, read_config
from plait.frontend.files import TensorFiles, parse_json, read_json, read_text
from plait.frontend.locate import INDEX_SUFFIX, find, index_of
from plait.frontend.own import OwnModule
from plait.frontend.quantisation import join_scales
from plait.frontend.quantisation.modelopt import from_file
from plait.frontend.views import apply as apply_views
from plait.frontend.views import with_prefix
from plait.ir.types import DTYPES
from plait.spec import WeightRef


@dataclass(frozen=True)
class Checkpoint:
    """A model as it lies on disk.

    Attributes:
        name: what to call it: the folder's or the file's name.
        weights: byte range of every tensor by name; None where only a config.json was given.
        files: size in bytes and digest of the header of every weights file, by absolute path.
        dtype: the dtype the weights are meant to be computed in; float32 for quantised files, which it holds exactly.
        tokenizer: a tokenizer.json, or the GGUF file that carries one; None where there is none.
        tokenizer_config: names of special tokens and `chat_template`, as tokenizer_config.json says them.
        generation: what generation_config.json says.
    """

    name: str
    config: DecoderConfig | OwnModule
    weights: dict[str, WeightRef] | None
    files: dict[str, tuple[int, str]]
    dtype: str
    tokenizer: Path | None = None
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def family(self) -> str:
        return self.config.family

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    def at(self, context: int) -> Checkpoint:
        """The checkpoint for sequences up to `context` tokens, where its ropes depend on that; see `RopeByContext`."""
        return replace(self, config=self.config.at(context)) if isinstance(self.config, DecoderConfig) else self

    def notes(self, context: int) -> tuple[str, ...]:
        """What a plan for sequences up to `context` tokens says about the model."""
        if isinstance(self.config, DecoderConfig):
            return tuple(rope.note(context) for rope in self.config.context_choices)
        return (self.config.note,) if self.config.note else ()

    @property
    def chat_template(self) -> str | None:
        template = self.tokenizer_config.get("chat_template")
        return template if isinstance(template, str) else None


def open_checkpoint(path: Path | str, config: Path | str | None = None, dtype: str | None = None) -> Checkpoint:
    """Read everything about a checkpoint but its tensors' data.

    Args:
        path: a `.safetensors`, `.gguf`, `.pt2` or `.onnx` file, a `*.safetensors.index.json`, a directory that
            holds such, the cache folder of a model of the hub, or a config.json (to plan without weights).
        config: the config.json to use instead of the one beside the weights.
        dtype: what to take where neither config nor weights say the dtype of the model.

    Raises:
        CheckpointError, UnsupportedError: naming the file and what is wrong with it.
    """
    found = find(Path(path).absolute())
    override = None if config is None else Path(config).absolute()
    opened = _OPENERS[found.suffix](found, override)
    return opened if opened.dtype else replace(opened, dtype=dtype or _unsaid(found, opened.weights))


def _open_safetensors(path: Path, override: Path | None) -> Checkpoint:
    index = index_of(path)
    if index is not None:
        raise CheckpointError(
            "checkpoint-shard",
            f"{path.name} is one shard of a larger checkpoint",
            why=f"{index.name} beside it lists it",
            hint=f"give {index.parent} or the index instead",
        )
    beside = path.parent / "config.json"
    if override is None and not beside.is_file():
        tensors = safetensors.read_file(path)
        config = read_config(*_config_in_metadata(path, tensors.metadata))
        return _checkpoint(path, path.parent, config, tensors)
    # The config first: what is no supported model is refused as such, not by the dtype of one of its tensors.
    config = _read_config_file(override or beside)
    return _checkpoint(path, (override or beside).parent, config, safetensors.read_file(path))


def _config_in_metadata(path: Path, metadata: dict[str, str]) -> tuple[dict[str, Any], str]:
    if "config" not in metadata:
        raise CheckpointError(
            "config-missing",
            f"{path} has no config.json beside it and none in its metadata",
            why="head counts, the rope base and the norm's epsilon cannot be told from the shapes of tensors",
            hint="--config path/to/config.json",
        )
    source = f"the config in the metadata of {path}"
    return parse_json(metadata["config"].encode(), source), source


def _open_json(path: Path, override: Path | None) -> Checkpoint:
    if path.name.endswith(INDEX_SUFFIX):
        beside = override or path.parent / "config.json"
        if not beside.is_file():
            raise CheckpointError("config-missing", f"there is no {beside}", hint="--config path/to/config.json")
        config = _read_config_file(beside)
        return _checkpoint(path, beside.parent, config, safetensors.read_index(path))
    if override is not None:
        raise UsageError("config-twice", f"--config was given, and the model {path} is a config itself")
    return _checkpoint(path, path.parent, _read_config_file(path), None)


def _open_gguf(path: Path, override: Path | None) -> Checkpoint:
    from plait.frontend.gguf import read_gguf
    from plait.frontend.gguf.tokenizer import tokenizer_config

    if override is not None:
        raise UsageError("config-twice", f"--config was given, and {path.name} carries its own config")
    file = read_gguf(path)
    config, weights = file.decoder()
    assert config.dtype is not None, "read_gguf states the dtype"
    return Checkpoint(
        name=path.stem,
        config=config,
        weights=weights,
        files=file.tensors.files,
        dtype=config.dtype,
        tokenizer=path if "tokenizer.ggml.model" in file.metadata else None,
        tokenizer_config=tokenizer_config(file.metadata),
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
    )


def _open_program(path: Path, override: Path | None) -> Checkpoint:
    if override is not None:
        raise UsageError("config-twice", f"--config was given, and {path.name} is a program, which needs none")
    config, tensors = read_program(path)
    return _checkpoint(path, path.parent, config, tensors)


def _open_onnx(path: Path, override: Path | None) -> Checkpoint:
    from plait.frontend.onnx import read_onnx

    if override is not None:
        raise UsageError("config-twice", f"--config was given, and {path.name} is a graph, which needs none")
    config, tensors = read_onnx(path)
    return _checkpoint(path, path.parent, config, tensors)


_OPENERS: dict[str, Callable[[Path, Path | None], Checkpoint]] = {
    ".safetensors": _open_safetensors,
    ".json": _open_json,
    ".gguf": _open_gguf,
    ".pt2": _open_program,
    ".onnx": _open_onnx,
}


def _read_config_file(path: Path) -> DecoderConfig:
    return read_config(from_file(path.parent, read_json(path)), str(path))


def _checkpoint(
    path: Path, config_folder: Path, config: DecoderConfig | OwnModule, tensors: TensorFiles | None
) -> Checkpoint:
    """Put together what lies beside the weights, or else beside the config."""
    folders = dict.fromkeys((path.parent, config_folder))

    def beside(name: str) -> Path | None:
        return next((folder / name for folder in folders if (folder / name).is_file()), None)

    generation_file, tokenizer_file = beside("generation_config.json"), beside("tokenizer_config.json")
    generation = read_json(generation_file) if generation_file else {}
    tokenizer_config = read_json(tokenizer_file) if tokenizer_file else {}
    template_file = beside("chat_template.jinja")
    template = read_text(template_file) if template_file else _default_template(tokenizer_config, tokenizer_file)
    tokenizer_config = {key: value for key, value in tokenizer_config.items() if key != "chat_template"}
    if template is not None:
        tokenizer_config["chat_template"] = template

    quantisation = config.quantisation if isinstance(config, DecoderConfig) else None
    weights = None if tensors is None else join_scales(tensors.weights, quantisation, path)
    if weights is not None and isinstance(config, DecoderConfig):
        kind = family(config.family)
        weights = apply_views(with_prefix(weights, kind.prefix), kind.views(config), str(path))

    def named(role: str) -> tuple[int, ...]:
        return _named_token(tokenizer_config.get(role), beside("tokenizer.json"), config.vocab_size)

    ends = read_ends(generation, str(generation_file), config.vocab_size)
    return Checkpoint(
        name=_name(path),
        config=config,
        weights=weights,
        files={} if tensors is None else tensors.files,
        dtype=config.dtype or _stored_dtype(weights),
        tokenizer=beside("tokenizer.json"),
        tokenizer_config=tokenizer_config,
        generation=generation,
        bos_token_id=config.bos_token_id if config.bos_token_id is not None else next(iter(named("bos_token")), None),
        eos_token_ids=ends.eos or config.eos_token_ids or named("eos_token"),
    )


def _name(path: Path) -> str:
    """The folder's name for the standard file names, otherwise the file's."""
    if path.parent.parent.name == "snapshots":
        return path.parent.parent.parent.name.removeprefix("models--").replace("--", "/")
    standard = path.name in ("model.safetensors", "config.json") or path.name.endswith(INDEX_SUFFIX)
    return path.parent.name if standard and path.parent.name else path.stem


def _default_template(tokenizer_config: dict[str, Any], source: Path | None) -> str | None:
    """One template, or the one named `default` of a list."""
    value = tokenizer_config.get("chat_template")
    if not isinstance(value, str | list | None):
        raise CheckpointError(
            "chat-template-invalid",
            f"{source}: 'chat_template' is {value!r:.100}",
            why="it is a text, or a list of named ones",
        )
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = named[0].get("template") if named else None
    return value if isinstance(value, str) else None


def _named_token(value: Any, tokenizer: Path | None, vocabulary: int) -> tuple[int, ...]:
    """The id of a special token that tokenizer_config.json names, for configs that give no id."""
    name = value.get("content") if isinstance(value, dict) else value
    if tokenizer is None or not isinstance(name, str):
        return ()
    added = read_json(tokenizer).get("added_tokens")
    entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    ids = [entry.get("id") for entry in entries if entry.get("content") == name]
    return token_ids(ids, f"{tokenizer}: the id of {name!r}", vocabulary)


def _stored_dtypes(weights: Mapping[str, WeightRef] | None) -> set[str]:
    """What matrices are stored in that are not quantised."""
    matrices = [ref for ref in (weights or {}).values() if len(ref.shape) > 1 and ref.scale is None]
    return {ref.encoding for ref in matrices if ref.encoding in DTYPES}


def _stored_dtype(weights: Mapping[str, WeightRef] | None) -> str:
    """The one dtype that all matrices are stored in but the quantised ones, for configs that do not say; else empty."""
    found = _stored_dtypes(weights)
    return found.pop() if len(found) == 1 else ""


def _unsaid(path: Path, weights: Mapping[str, WeightRef] | None) -> str:
    """Raises CheckpointError: nobody says the dtype."""
    stored = _stored_dtypes(weights)
    raise CheckpointError(
        "config-key-missing",
        f"{path} does not say the dtype of the model",
        why=f"its weights are stored as {', '.join(sorted(stored))}" if stored else "there are no weights to ask",
        hint='--dtype bfloat16, or what the model was made for; or add "dtype" to its config',
    )
