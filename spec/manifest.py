"""The first file of an artifact."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.spec.kv import KVLayout

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Boundary:
    """One tensor that crosses between two slices: `shape` has None for the tokens of the batch."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str


@dataclass(frozen=True)
class ManifestSlice:
    """`folder` is relative to the artifact. `entry` is the backend's import path, `module:attribute`."""

    folder: str
    device: str
    backend: str
    entry: str
    target: str
    environment: str
    runs_on: str
    blocks: tuple[int, int]
    inputs: tuple[Boundary, ...]
    outputs: tuple[Boundary, ...]
    kv: tuple[KVLayout, ...]
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """Format version, digests, and what the runtime needs to start the slices.

    Attributes:
        files: sha256 of every file of the artifact but this one, by relative path.
        weight_root: folder that the weight files of `weights.json` are relative to; relative itself to the artifact.
        weights: by path of a checkpoint file, its size in bytes and the sha256 of its header (safetensors header or
            GGUF metadata).
        max_sequences: requests that run at once: the plan's concurrency. More wait their turn.
        max_kv_tokens: KV tokens the plan has memory for (rounded to pages), over all requests in flight.
        max_positions: positions the model was made for.
    """

    model: str
    family: str
    plait_version: str
    vocab_size: int
    max_positions: int
    dtype: str
    page_tokens: int
    max_sequences: int
    max_step_tokens: int
    max_kv_tokens: int
    plan_digest: str
    module_digest: str
    slices: tuple[ManifestSlice, ...]
    files: dict[str, str] = field(default_factory=dict)
    weight_root: str = "."
    weights: dict[str, tuple[int, str]] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    format_version: int = FORMAT_VERSION
