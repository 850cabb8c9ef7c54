"""The ops of the dialect, one small file per kind."""

from plait.ir.ops.attention import AttentionOp
from plait.ir.ops.base import BatchFacts, OracleKV, PlaitOp
from plait.ir.ops.elementwise import AddOp, GeluMulOp, GeluOp, ScaleOp, SiluMulOp
from plait.ir.ops.embed import EmbedOp, EmbedPositionsOp
from plait.ir.ops.experts import ExpertsOp, RouterOp
from plait.ir.ops.latent import HeadLinearOp, LatentAttentionOp
from plait.ir.ops.linear import LinearOp, LinearsOp
from plait.ir.ops.logits import LogitsOp
from plait.ir.ops.norm import AddRmsNormOp, LayerNormOp, RmsNormOp
from plait.ir.ops.opaque import OpaqueOp
from plait.ir.ops.rope import RopeOp
from plait.ir.ops.weight import WeightOp

OPS: tuple[type[PlaitOp], ...] = (
    WeightOp,
    EmbedOp,
    EmbedPositionsOp,
    RmsNormOp,
    AddRmsNormOp,
    LayerNormOp,
    LinearOp,
    LinearsOp,
    HeadLinearOp,
    RopeOp,
    AttentionOp,
    LatentAttentionOp,
    SiluMulOp,
    GeluMulOp,
    GeluOp,
    RouterOp,
    ExpertsOp,
    ScaleOp,
    AddOp,
    LogitsOp,
    OpaqueOp,
)

CACHING = (AttentionOp, LatentAttentionOp, OpaqueOp)
"""The ops that keep KV between steps: they have `kv`, `cache` and `window_tokens`."""

SCORING = (LogitsOp, OpaqueOp)
"""The ops that give logits: a row for each of the step's `logit_rows`, not for each token."""

__all__ = [
    "CACHING",
    "OPS",
    "SCORING",
    "AddOp",
    "AddRmsNormOp",
    "AttentionOp",
    "BatchFacts",
    "EmbedOp",
    "EmbedPositionsOp",
    "ExpertsOp",
    "GeluMulOp",
    "GeluOp",
    "HeadLinearOp",
    "LatentAttentionOp",
    "LayerNormOp",
    "LinearOp",
    "LinearsOp",
    "LogitsOp",
    "OpaqueOp",
    "OracleKV",
    "PlaitOp",
    "RmsNormOp",
    "RopeOp",
    "RouterOp",
    "ScaleOp",
    "SiluMulOp",
    "WeightOp",
]
