"""GGUF files: byte ranges, a config in Hugging Face's words, and a decoder in normal form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.errors import CheckpointError, UnsupportedError
from plait.frontend.config import Attention, DecoderConfig, Layer
from plait.frontend.families import read_config
from plait.frontend.files import TensorFiles
from plait.frontend.gguf.architectures import ARCHITECTURES, MIXTURES, Architecture
from plait.frontend.gguf.header import read_header
from plait.frontend.gguf.rope import FREQS, take_factors
from plait.frontend.gguf.tensors import named
from plait.frontend.gguf.words import config_words, own_keys
from plait.ir import Rope
from plait.spec import WeightRef
from plait.words import counted


@dataclass(frozen=True)
class GGUFFile:
    """A file whose header is read, and whose keys are understood.

    Attributes:
        tensors: by GGUF's names.
        config: with the keys of a config.json.
        metadata: as the file says it.
        frequency_factors: what the frequency of each rope pair is divided by; None where there are none.
    """

    path: Path
    tensors: TensorFiles
    config: dict[str, Any]
    metadata: dict[str, Any]
    architecture: Architecture
    frequency_factors: tuple[float, ...] | None

    def decoder(self) -> tuple[DecoderConfig, dict[str, WeightRef]]:
        """The config in normal form, and the weights by its names.

        Raises:
            CheckpointError, UnsupportedError: a value, a tensor or a shape that does not fit, by name.
        """
        config = read_config(self.config, f"the metadata of {self.path}")
        if self.architecture.plain_norms:
            norm = replace(config.norm, offset=None)
            config = _attentions(replace(config, norm=norm), _plain_norm)
        if self.frequency_factors is not None:
            config = _attentions(config, self._with_factors)
        scale = own_keys(self.metadata, self.metadata["general.architecture"]).get("attention.scale")
        if scale:  # 0 stands for the usual one
            if type(scale) is not float or not 0 < scale < float("inf"):
                raise CheckpointError("gguf-key-value", f"{self.path}: attention.scale is {scale!r:.100}")
            config = _attentions(config, lambda own: replace(own, scale=scale))
        return config, named(self.tensors.weights, self.architecture, config, str(self.path))

    def _with_factors(self, own: Attention) -> Attention:
        factors, pairs = self.frequency_factors, (own.rotary_dim or own.head_dim) // 2
        # No architecture with windows has factors; there they would belong to the blocks without one.
        plain = isinstance(own.rope, Rope) and own.rope.kind == "default" and own.window is None
        assert factors is not None
        if not plain or len(factors) != pairs:
            raise CheckpointError(
                "gguf-rope",
                f"{self.path}: {FREQS!r} holds {counted(len(factors), 'factor')}",
                why=f"what turns of a head is {counted(pairs, 'pair')}"
                if plain
                else "the keys scale the rope too, or say a window",
            )
        assert isinstance(own.rope, Rope)
        # Llama 3's scaling, with its frequencies worked out by the converter.
        return replace(own, rope=Rope(own.rope.theta, "longrope", factors=factors, attention_factor=1.0))


def _plain_norm(own: Attention) -> Attention:
    """The norms of q and k without an offset: GGUF stores w + 1 where the family stores w."""
    if own.qk_norm is None:
        return own
    return replace(own, qk_norm=replace(own.qk_norm, norm=replace(own.qk_norm.norm, offset=None)))


def _attentions(config: DecoderConfig, change: Any) -> DecoderConfig:
    def changed(layer: Layer) -> Layer:
        assert isinstance(layer.attention, Attention)
        return replace(layer, attention=change(layer.attention))

    return replace(config, layers=tuple(map(changed, config.layers)))


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file of a supported architecture. Of the tensors only rope factors are read.

    Raises:
        CheckpointError: `gguf-*`: the file contradicts itself or its size.
        UnsupportedError: an architecture, a tensor type or a key that plait does not understand, by name.
    """
    metadata, raw, digest, size = read_header(path)
    name, architecture = _architecture(path, metadata)
    factors = take_factors(raw, str(path))
    config = config_words(metadata, name, architecture, raw, factors, str(path))
    tensors = TensorFiles(raw, {str(path): (size, digest)}, {})
    return GGUFFile(path, tensors, config, metadata, architecture, factors.get(FREQS))


def _architecture(path: Path, metadata: dict[str, Any]) -> tuple[str, Architecture]:
    name = _string(path, metadata, "general.architecture")
    if name is None:
        raise CheckpointError("gguf-key-missing", f"{path} does not say its general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            "architecture-unsupported",
            f"{path} holds the architecture {name!r}",
            why=f"GGUF is read for {', '.join(sorted(ARCHITECTURES))}",
        )
    kind = _string(path, metadata, "general.type")
    if kind not in (None, "model"):
        raise UnsupportedError("gguf-kind", f"{path} is a GGUF file of the type {kind!r}", why="only a model is read")
    if metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedError(
            "gguf-split",
            f"{path} is one part of {metadata['split.count']}",
            hint="merge the parts with `llama-gguf-split --merge`",
        )
    mixture = metadata.get(f"{name}.expert_count") not in (None, 0)
    return name, MIXTURES[name] if mixture and name in MIXTURES else ARCHITECTURES[name]


def _string(path: Path, metadata: dict[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise CheckpointError("gguf-key-type", f"{path}: {key} is {value!r:.100}, expected a string")
    return value
