"""How a byte-level BPE cuts a text before it merges, by the name that GGUF stores.

GGUF stores no rules, so there is a table. A text is cut by the first expression into its matches and what lies between
them, each piece then by the next one. Sources: the names and the order of expressions are llama.cpp's
(`src/llama-vocab.cpp`: `llm_tokenizer_bpe`, and `llama_vocab::impl::load` for what else a name means), the expressions
those of the models' own tokenizer.json, which llama.cpp writes in other words where its engine lacks some.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True)
class Pre:
    """A way of cutting.

    Attributes:
        cuts: regular expressions.
        whole: a piece that is a token is taken as it is, whatever the merges say.
        add_bos: what an absent `add_bos_token` means.
        nfc: the text is brought to Unicode's composed form first. llama.cpp does not; the models' own tokenizers do.
    """

    cuts: tuple[str, ...]
    whole: bool = False
    add_bos: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in self.cuts]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHES}"
_GPT4O = rf"{_LEAD}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_LEAD}{_UPPER}+{_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}|{_SLASHES}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_PLAIN, _DIGITS = Pre((_GPT2,)), Pre((r"\p{N}", _GPT2))
_LLAMA_BPE = Pre((_LLAMA3,), whole=True, add_bos=True)
_SAME = {
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "pixtral"),
    "gpt-2": ("phi-2", "mpt", "olmo", "trillion", "granite-docling", "exaone4"),
    "smollm": ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    "deepseek-r1-qwen": ("stablelm2", "megrez", "hunyuan"),
    "gpt-4o": ("llama4",),
}
"""Name -> names that mean the same."""

_OWN: dict[str, Pre] = {
    "default": Pre((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "llama-bpe": _LLAMA_BPE,
    "smaug-bpe": Pre((_LLAMA3,)),
    "gpt-2": _PLAIN,
    "smollm": _DIGITS,
    "qwen2": Pre((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": Pre((_QWEN2,)),
    "tekken": Pre((_TEKKEN,), whole=True, add_bos=True),
    "gpt-4o": Pre((_GPT4O,)),
    "falcon": Pre((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-coder": Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": Pre((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
}

PRE_TOKENIZERS: dict[str, Pre] = _OWN | {name: _OWN[like] for like, names in _SAME.items() for name in names}
"""By `tokenizer.ggml.pre`. With the wrong one half of all texts come out as other tokens, and every answer still reads
well: one that is not here is refused."""
