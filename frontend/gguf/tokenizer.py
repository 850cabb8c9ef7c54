"""The tokenizer of a GGUF file as the text of a tokenizer.json.

GGUF names the pre-tokeniser and stores no rules for it, so there is a table. An unknown one is refused: with the wrong
rules half of all texts come out as other tokens, and every answer still reads well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from plait.errors import CheckpointError, UnsupportedError
from plait.frontend.files import some

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""`tokenizer.ggml.token_type`. The other kinds (unknown, byte) belong to SentencePiece models."""


def _smollm() -> pre_tokenizers.PreTokenizer:
    # llama.cpp splits by `\p{N}`, then by GPT-2's pattern; ByteLevel with its pattern does the latter.
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {"smollm": _smollm}


def tokenizer_json(metadata: dict[str, Any], source: str) -> str:
    """The text of a tokenizer.json for the metadata of a GGUF file.

    Args:
        source: what errors call the file.

    Raises:
        UnsupportedError: another kind of tokenizer, by name.
        CheckpointError: `gguf-tokenizer`: keys are missing or contradict each other.
    """

    def need(key: str, kind: type) -> Any:
        value = metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, kind):
            raise CheckpointError("gguf-tokenizer", f"{source}: tokenizer.ggml.{key} is missing or of the wrong type")
        return value

    _refuse_other_kinds(need("model", str), metadata, source)
    tokens, kinds, merges = need("tokens", list), need("token_type", list), need("merges", list)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [_pair(merge) for merge in merges]
    if len(vocabulary) != len(tokens) or len(kinds) != len(tokens):
        raise CheckpointError(
            "gguf-tokenizer",
            f"{source}: the tokenizer contradicts itself",
            why=f"{len(tokens)} tokens, {len(vocabulary)} of them different, {len(kinds)} types",
        )
    strange = [repr(merge) for merge, pair in zip(merges, pairs, strict=True) if not _known(pair, vocabulary)]
    if strange:
        raise CheckpointError("gguf-tokenizer", f"{source}: merges that make no token: {some(strange)}")
    unknown = {kind for kind in kinds if kind not in (NORMAL, CONTROL, USER_DEFINED, UNUSED)}
    if unknown:
        raise UnsupportedError("gguf-tokenizer", f"{source}: token types {sorted(unknown)} in a BPE vocabulary")

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]()
    tokenizer.decoder = decoders.ByteLevel()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        chosen = [token for token, its in zip(tokens, kinds, strict=True) if its == kind]
        added = [AddedToken(token, special=special, normalized=False) for token in chosen]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    _add_ends(tokenizer, metadata, tokens, source)
    return str(tokenizer.to_str(pretty=False))


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """What a tokenizer_config.json would say: the names of special tokens and the chat template."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name in ("bos", "eos", "unknown", "padding"):
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(tokens, list) and type(index) is int and 0 <= index < len(tokens):
            config[{"unknown": "unk_token", "padding": "pad_token"}.get(name, f"{name}_token")] = tokens[index]
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config


def _refuse_other_kinds(model: str, metadata: dict[str, Any], source: str) -> None:
    hint = "use the safetensors checkpoint, which brings its tokenizer.json"
    if model != "gpt2":
        raise UnsupportedError(
            "gguf-tokenizer", f"{source}: tokenizer model {model!r}", why="byte-level BPE ('gpt2') is read", hint=hint
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise UnsupportedError(
            "gguf-tokenizer",
            f"{source}: pre-tokeniser {pre!r:.100}",
            why=f"GGUF stores its name only; known are {', '.join(PRE_TOKENIZERS)}",
            hint=hint,
        )
    if metadata.get("tokenizer.ggml.add_space_prefix", False) is not False:
        raise UnsupportedError("gguf-tokenizer", f"{source}: add_space_prefix in a BPE tokenizer", hint=hint)


def _pair(merge: Any) -> tuple[str, str]:
    left, _, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
    return left, right


def _known(pair: tuple[str, str], vocabulary: dict[str, int]) -> bool:
    return all(token in vocabulary for token in (*pair, "".join(pair)))


def _add_ends(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str], source: str) -> None:
    """The post-processor that puts BOS and EOS around a text, where the file asks for them."""
    template, special = ["$A"], []
    for name, at in (("bos", 0), ("eos", 2)):
        if metadata.get(f"tokenizer.ggml.add_{name}_token", False):
            index = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if type(index) is not int or not 0 <= index < len(tokens):
                raise CheckpointError("gguf-tokenizer", f"{source}: add_{name}_token without a {name}_token_id")
            template.insert(at, tokens[index])
            special.append((tokens[index], index))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
