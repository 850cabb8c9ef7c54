"""config.json files as they are published (`tests/data/configs`): read as they stand, and of the size people know.

Sizes are those of the model pages and reports; transformers builds the same config without memory as a second witness.
Its tables of positions, windows and kinds of blocks are the witness of ours.
"""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp

from plait.errors import CheckpointError, UnsupportedError
from plait.frontend.config import Attention, DecoderConfig
from plait.frontend.families import FAMILIES, read_config
from plait.frontend.families.decoder import build_decoder
from plait.ir import Cost, Rope, Step, kv_layouts, ops, weights
from plait.ir.rope import angles
from tests.host.command_line import plait

FOLDER = Path(__file__).parents[1] / "data" / "configs"


@dataclass(frozen=True)
class Known:
    """What is known of a model.

    Attributes:
        parameters: of all tensors; a tied table counts once.
        kv_bytes: of a token, over all layers, in 16 bits.
        active: billions of parameters that a token meets, of a mixture of experts, as its makers say.
    """

    parameters: int
    kv_bytes: int
    active: float | None = None


# Parameters: what the page of a model shows of its safetensors files, but for DeepSeek and Kimi, whose files hold
# scales and layers for more tokens too: DeepSeek-V3's report says 671 B of 37 B active, Kimi K2's 1.04 T of 32.6 B.
# KV: 2 x layers x KV heads x head_dim x 2 bytes; DeepSeek-V2's report, section 2.1: (512 + 64) numbers per layer.
KNOWN = {
    "Llama-2-7b-hf": Known(6_738_415_616, 524_288),
    "Llama-3.1-8B": Known(8_030_261_248, 131_072),
    "Llama-3.1-70B": Known(70_553_706_496, 327_680),
    "Llama-3.1-405B": Known(405_853_388_800, 516_096),
    "Llama-3.2-1B": Known(1_235_814_400, 32_768),
    "Llama-3.3-70B-Instruct": Known(70_553_706_496, 327_680),
    "Mistral-7B-v0.1": Known(7_241_732_096, 131_072),
    "Mistral-7B-v0.3": Known(7_248_023_552, 131_072),
    "Mistral-Nemo-Base-2407": Known(12_247_782_400, 163_840),
    "Mixtral-8x7B-v0.1": Known(46_702_792_704, 131_072, 12.9),
    "Qwen2.5-7B-Instruct": Known(7_615_616_512, 57_344),
    "Qwen2.5-7B-Instruct-yarn": Known(7_615_616_512, 57_344),
    "Qwen3-8B": Known(8_190_735_360, 147_456),
    "Qwen3-30B-A3B": Known(30_532_122_624, 98_304, 3.3),
    "gemma-2-9b": Known(9_241_705_984, 344_064),
    "gemma-3-1b-it": Known(999_885_952, 26_624),
    "Phi-3-mini-4k-instruct": Known(3_821_079_552, 393_216),
    "Phi-3-mini-128k-instruct": Known(3_821_079_552, 393_216),
    "phi-4": Known(14_659_507_200, 204_800),
    "Phi-4-mini-instruct": Known(3_836_021_760, 131_072),
    "OLMo-2-1124-7B": Known(7_298_617_344, 524_288),
    "Olmo-3-1025-7B": Known(7_298_011_136, 524_288),
    "SmolLM2-135M-Instruct": Known(134_515_008, 23_040),
    "SmolLM2-1.7B": Known(1_711_376_384, 196_608),
    "SmolLM3-3B": Known(3_075_098_624, 73_728),
    "granite-3.1-8b-instruct": Known(8_170_848_256, 163_840),
    "stablelm-2-1_6b": Known(1_644_515_328, 196_608),
    "c4ai-command-r-v01": Known(34_980_831_232, 1_310_720),
    "c4ai-command-r-plus": Known(103_810_674_688, 262_144),
    "c4ai-command-r7b-12-2024": Known(8_028_033_024, 131_072),
    "gpt-oss-20b": Known(20_914_757_184, 49_152, 3.61),
    "gpt-oss-120b": Known(116_829_156_672, 73_728, 5.13),
    "DeepSeek-V2-Lite": Known(15_706_484_224, 31_104, 2.4),
    "DeepSeek-V3": Known(671_026_419_200, 70_272, 37.0),
    "DeepSeek-R1": Known(671_026_419_200, 70_272, 37.0),
    "Kimi-K2-Instruct": Known(1_026_408_232_448, 70_272, 32.6),
    "gpt2": Known(124_439_808, 36_864),
    "pythia-1b": Known(1_011_781_632, 131_072),
    "falcon-7b": Known(6_921_720_704, 8_192),
    "falcon-40b": Known(41_303_293_952, 122_880),
}

#: Older than the key. plait has no default: whoever knows the model adds it.
WITHOUT_THETA = ("Llama-2-7b-hf", "falcon-7b", "falcon-40b")


def published(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return config | ({"rope_theta": 10000.0} if name in WITHOUT_THETA else {})


@cache
def read(name: str) -> DecoderConfig:
    return read_config(published(name), f"{name}.json")


@cache
def built(name: str) -> ModuleOp:
    return build_decoder(read(name), "bfloat16")


@cache
def theirs(name: str) -> Any:
    """transformers' config."""
    from transformers import CONFIG_MAPPING

    config = deepcopy(published(name))
    config.pop("quantization_config", None)
    kind = config.pop("model_type").replace("kimi_k2", "deepseek_v3")  # of which it has no class of its own
    return CONFIG_MAPPING[kind].from_dict(config)


def test_every_family_has_a_published_config() -> None:
    """Ministral 8B is published as a Mistral; nothing of that name is in use."""
    assert {published(name)["model_type"] for name in KNOWN} == FAMILIES.keys() - {"ministral"}


@pytest.mark.parametrize("name", WITHOUT_THETA)
def test_a_config_older_than_theta_is_refused_by_name(name: str) -> None:
    config = json.loads((FOLDER / f"{name}.json").read_text())
    with pytest.raises(CheckpointError, match="rope_theta is missing") as caught:
        read_config(config, name)
    assert "10000.0" in caught.value.hint


def test_what_no_op_does_is_refused_by_name() -> None:
    config = json.loads((FOLDER / "refused" / "stablelm-2-12b.json").read_text())
    with pytest.raises(UnsupportedError, match="'qk_layernorm' is True"):
        read_config(config, "stablelm-2-12b")


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_and_kv(name: str) -> None:
    module, known = built(name), KNOWN[name]
    assert sum(math.prod(op.result.type.get_shape()) for op in weights(module).values()) == known.parameters
    layouts = kv_layouts(module, 16)
    assert sum(2 * item.kv_heads * (item.head_dim + item.v_head_dim) for item in layouts) == known.kv_bytes


@pytest.mark.parametrize("name", [name for name, known in KNOWN.items() if known.active is not None])
def test_active_parameters(name: str) -> None:
    """A token of decode multiplies and adds once for each parameter that it meets; of the table it meets one row."""
    flops = sum((op.cost(Step.decode(1, 1)) for op in ops(built(name))), Cost()).flops
    active, table = KNOWN[name].active, read(name).vocab_size * read(name).hidden_size
    assert active is not None
    # Some count the table and some do not.
    assert 0.96 * active * 1e9 < flops / 2 + table and flops / 2 < 1.04 * active * 1e9


@pytest.mark.parametrize("name", KNOWN)
def test_transformers_builds_as_many_parameters(name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs(name))
    biases = (buffer for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias"))
    assert sum(tensor.numel() for tensor in (*model.parameters(), *biases)) == KNOWN[name].parameters


def layer_kinds(config: Any) -> list[str]:
    """The kind of each block, as transformers fills it in."""
    listed = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    return listed or ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers


@pytest.mark.parametrize("name", KNOWN)
def test_windows_are_those_of_transformers(name: str) -> None:
    config = theirs(name)
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in layer_kinds(config)]
    assert [getattr(layer.attention, "window", None) for layer in read(name).layers] == windows


def expected_frequencies(config: Any, kind: str, context: int) -> tuple[np.ndarray[Any, Any], float]:
    """Radians per position and what cos and sin grow by, from transformers' own functions."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    nested = kind in config.rope_parameters
    given = config.rope_parameters[kind] if nested else config.rope_parameters
    if given["rope_type"] != "default":
        found, grown = ROPE_INIT_FUNCTIONS[given["rope_type"]](
            config, "cpu", context, **({"layer_type": kind} if nested else {})
        )
        return found.double().numpy(), grown
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned = int(head_dim * given.get("partial_rotary_factor", 1.0))
    return given["rope_theta"] ** -(np.arange(0, turned, 2) / turned), 1.0


POSITIONS = np.array([1, 4095, 4096, 32_768, 131_071])


@pytest.mark.parametrize("name", [name for name in KNOWN if name != "gpt2"])  # which learned its positions
def test_positions_are_those_of_transformers(name: str) -> None:
    """In each layer, within the context of the pretraining and far beyond. Angles are float32."""
    config = theirs(name)
    without = set()
    for context in (1024, read(name).max_positions):
        layers = read(name).at(context).layers
        pairs = list(zip((layer.attention for layer in layers), layer_kinds(config), strict=True))
        without |= {index for index, (own, _) in enumerate(pairs) if own.rope is None}
        for own, kind in dict.fromkeys(pair for pair in pairs if pair[0].rope is not None):
            assert isinstance(own.rope, Rope)
            found, grown = expected_frequencies(config, kind, context)
            turned = own.rotary_dim or own.head_dim if isinstance(own, Attention) else own.rope_dim
            np.testing.assert_allclose(angles(own.rope, turned, POSITIONS), np.outer(POSITIONS, found), rtol=1e-6)
            assert (own.rope.attention_factor or 1.0) == pytest.approx(grown, rel=1e-9)
    rotates = getattr(config, "no_rope_layers", None)
    if config.model_type == "cohere2":  # its blocks without a window have no positions
        rotates = [kind == "sliding_attention" for kind in layer_kinds(config)]
    assert without == {index for index, turns in enumerate(rotates or ()) if not turns}


@pytest.mark.parametrize(
    ("name", "targets", "bytes_per_parameter"),
    [("DeepSeek-V3", "8xh200,4xmi300", 1), ("Llama-3.1-8B", "h100,mi300,v5p", 2), ("Qwen3-30B-A3B", "2xmi300", 2)],
)
def test_a_plan_from_the_config_alone(name: str, targets: str, bytes_per_parameter: int) -> None:
    """Every block is placed, and together the slices hold the whole model."""
    done = plait("plan", FOLDER / f"{name}.json", "--targets", targets, "--json")
    assert done.exit_code == 0, done.stdout
    slices = json.loads(done.stdout)["plan"]["slices"]
    assert [item["blocks"][0] for item in slices] == [0, *(item["blocks"][1] for item in slices[:-1])]
    assert slices[-1]["blocks"][1] == read(name).blocks
    held = sum(item["memory"]["weights_bytes"] for item in slices)
    # Codes of one byte have scales, and tables, norms and routers have two bytes.
    assert 1 <= held / (KNOWN[name].parameters * bytes_per_parameter) < 1.02
