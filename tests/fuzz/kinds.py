"""What is damaged, and what is then done with it: all that a plan does with a checkpoint before it asks a device.

A kind has seeds, which are folders with a whole checkpoint each; one file of it is damaged. Making seeds needs
transformers; using them does not.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.families import FAMILIES, config_of
from tests.fuzz import mutations
from tests.fuzz.mutations import Mutate

#: Texts that a tokenizer must take.
TEXTS = ("hello", "", "Ünï 😀\n\t  <s>", "a" * 300)
MESSAGES = [{"role": "user", "content": "hello"}]

#: Families whose damaged files are read with their weights: with experts, fused matrices, latent rows, a tied head.
WITH_WEIGHTS = ("llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "phi3-longrope", "gpt2", "falcon", "gemma2")


@dataclass(frozen=True)
class Kind:
    """Attributes:
    file: which of a seed's files is damaged.
    seeds: writes the seeds as folders into a folder.
    check: does everything with a folder; raises PlaitError, or AssertionError where an answer is wrong.
    """

    file: str
    seeds: Callable[[Path], None]
    mutate: Mutate
    check: Callable[[Path], None]


def check_checkpoint(path: Path) -> None:
    """Open, lower for short and long sequences, and ask what a plan asks."""
    from plait.cost_models.profile import profile
    from plait.frontend.checkpoint import open_checkpoint
    from plait.frontend.lower import lower
    from plait.ir.dialect import verify
    from plait.spec import parts

    checkpoint = open_checkpoint(path)
    for ref in (checkpoint.weights or {}).values():
        for part in parts(ref):
            size = Path(part.file).stat().st_size
            assert part.offset >= 0, part
            assert part.offset + part.nbytes <= size, f"{part} ends beyond {size} bytes"
    for context in {1, min(checkpoint.max_positions, 4096), checkpoint.max_positions}:
        checkpoint.notes(context)
        module = lower(checkpoint.at(context))
        verify(module)
        assert profile(module).weight_bytes > 0


def check_tokenizer(folder: Path) -> None:
    """Ids there and back, at once and as a stream, and a conversation."""
    from plait.frontend.checkpoint import open_checkpoint
    from plait.frontend.tokenizer import Tokenizer

    checkpoint = open_checkpoint(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two BOS tokens are worth a warning, and no fault
        tokenizer = Tokenizer.open(
            checkpoint.tokenizer,
            chat_template=checkpoint.chat_template,
            bos_token_id=checkpoint.bos_token_id,
            eos_token_ids=checkpoint.eos_token_ids,
        )
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert all(type(token) is int and token >= 0 for token in ids)
            whole, stream = tokenizer.decode(ids), tokenizer.stream()
            pieces = "".join([stream.push(token) for token in ids] + [stream.finish()])
            assert pieces == whole or "\ufffd" in whole + pieces, f"{pieces!r} streamed of {whole!r}"
        assert tokenizer.vocab_size >= 0
        tokenizer.encode_chat(MESSAGES)


def check_gguf(folder: Path) -> None:
    check_checkpoint(folder)
    check_tokenizer(folder)


def check_adapter(folder: Path) -> None:
    from plait.frontend.checkpoint import open_checkpoint
    from plait.frontend.lora import read_adapters
    from plait.frontend.lower import lower

    checkpoint = open_checkpoint(folder / "model")
    module = lower(checkpoint)
    for adapter in read_adapters([folder], checkpoint, module):
        assert adapter.changed


def _saved(folder: Path, names: tuple[str, ...] = WITH_WEIGHTS) -> None:
    from tests.checkpoints import save

    for name in names:
        save(folder / name, name)


def _sharded(folder: Path) -> None:
    from tests.checkpoints import save

    for name in ("llama", "qwen3_moe", "gpt2"):
        save(folder / name, name, max_shard_size="100KB")


def _configs(folder: Path) -> None:
    for name in FAMILIES:
        kind = FAMILIES[name].classes[1]
        classes = [kind if kind.endswith("Model") else f"{kind}ForCausalLM"]
        (folder / name).mkdir()
        config = config_of(name, {}).to_dict() | {"architectures": classes, "dtype": "bfloat16"}
        (folder / name / "config.json").write_text(json.dumps(config))


def _quantised(folder: Path) -> None:
    from tests.checkpoints import save, save_fp8
    from tests.quantised_checkpoints import FORMATS, save_quantised

    source = save(folder / "source", num_hidden_layers=1, head_dim=16, intermediate_size=128)
    for form in FORMATS:
        save_quantised(folder / form, folder / "wide" / form, source, form)
    for layout in ("tensor", "row", "static", "block"):
        save_fp8(folder / layout, source, layout)
    shutil.rmtree(folder / "wide")
    shutil.rmtree(source)


def _tokenizers(folder: Path) -> None:
    """A byte-level one, and one of pieces with a normaliser and byte fallback, beside a config."""
    from tests.checkpoints import save_tokenizer

    _configs(folder)
    for seed in folder.iterdir():
        if seed.name != "llama":
            shutil.rmtree(seed)
    shutil.copytree(folder / "llama", folder / "pieces")
    save_tokenizer(folder / "llama")
    save_tokenizer(folder / "pieces")
    (folder / "pieces" / "tokenizer.json").write_text(_pieces())


def _pieces() -> str:
    """Like Llama 2's: it falls back to bytes, and the decoder strips the first space."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "e", "l", "o", "▁h", "he", "ll"]
    model = models.BPE(
        vocab={name: index for index, name in enumerate(names)},
        merges=[("▁", "h"), ("h", "e"), ("l", "l")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    made = tokenizers.Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    return str(made.to_str())


def _generation(folder: Path) -> None:
    _tokenizers(folder)
    for seed in folder.iterdir():
        (seed / "generation_config.json").write_text(
            json.dumps({"bos_token_id": 0, "eos_token_id": [1, 2], "temperature": 0.6, "top_p": 0.9, "top_k": 20})
        )


def _gguf(folder: Path) -> None:
    from tests.checkpoints import save
    from tests.gguf_files import ARCHITECTURES, save_gguf

    for name in ARCHITECTURES:
        source = save(folder / f"{name}-source", name, **_GGUF_CONFIG.get(name, {}))
        (folder / name).mkdir()
        save_gguf(folder / name / "model.gguf", source, "Q8_0", _GGUF_TOKENIZER)
        shutil.rmtree(source)


_GGUF_CONFIG: dict[str, dict[str, Any]] = {"qwen3_moe": {"mlp_only_layers": []}}
_GGUF_TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "h", "e", "l", "o", "he", "ll", "\u0120"]
    + [f"t{index}" for index in range(255)],
    "tokenizer.ggml.token_type": [3, 3] + [1] * 262,
    "tokenizer.ggml.merges": ["h e", "l l"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
}


def _adapters(folder: Path) -> None:
    from tests.adapters import save_adapter
    from tests.checkpoints import save

    for name, changed in (("llama", {}), ("gpt2", {"conv1d": True, "target_modules": ["c_attn", "c_fc"]})):
        source = save(folder / f"{name}-source", name)
        save_adapter(folder / name, source, **changed)
        shutil.move(source, folder / name / "model")


def _onnx(folder: Path) -> None:
    from tests.onnx_models import decoder, four_bits, group_query, save

    (folder / "plain").mkdir()
    save(decoder(group_query()), folder / "plain" / "model.onnx")
    (folder / "bits").mkdir()
    save(four_bits(decoder(group_query(packed=False)), zeros=True), folder / "bits" / "model.onnx")


HEADER = mutations.of_safetensors
KINDS: dict[str, Kind] = {
    "safetensors": Kind("model.safetensors", _saved, HEADER, check_checkpoint),
    "quantised": Kind("model.safetensors", _quantised, HEADER, check_checkpoint),
    "index": Kind("model.safetensors.index.json", _sharded, mutations.of_json, check_checkpoint),
    "config": Kind("config.json", _configs, mutations.of_json, check_checkpoint),
    "config-with-weights": Kind("config.json", _saved, mutations.of_json, check_checkpoint),
    "quantization-config": Kind("config.json", _quantised, mutations.in_json("quantization_config"), check_checkpoint),
    "tokenizer": Kind("tokenizer.json", _tokenizers, mutations.of_json, check_tokenizer),
    "tokenizer-config": Kind("tokenizer_config.json", _tokenizers, mutations.of_json, check_tokenizer),
    "generation": Kind("generation_config.json", _generation, mutations.of_json, check_tokenizer),
    "gguf": Kind("model.gguf", _gguf, mutations.of_gguf, check_gguf),
    "adapter-config": Kind("adapter_config.json", _adapters, mutations.of_json, check_adapter),
    "adapter": Kind("adapter_model.safetensors", _adapters, HEADER, check_adapter),
    "onnx": Kind("model.onnx", _onnx, mutations.of_protobuf, check_checkpoint),
}
"""By name."""
