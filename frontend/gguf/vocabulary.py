"""The vocabulary of a GGUF file: its tokens, what kinds they are, and where texts begin and end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from plait.errors import CheckpointError, UnsupportedError
from plait.frontend.files import some
from plait.words import counted

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""`tokenizer.ggml.token_type`."""

SPECIAL = (CONTROL, UNKNOWN)
"""Kinds that a text names and an answer does not show."""

_UNSTRIPPED = {"<unk>", "<s>", "<|endoftext|>"}


@dataclass(frozen=True)
class Vocabulary:
    """`source` is what errors call the file."""

    metadata: Mapping[str, Any]
    source: str
    tokens: tuple[str, ...]
    kinds: tuple[int, ...]

    @property
    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def error(self, what: str, why: str = "") -> CheckpointError:
        return CheckpointError("gguf-tokenizer", f"{self.source}: {what}", why=why)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """`tokenizer.ggml.<key>`; an error without a default where it is absent, and where it is of another type."""
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, kind):
            raise self.error(f"tokenizer.ggml.{key} is missing or of the wrong type")
        return value

    def of(self, *kinds: int) -> list[str]:
        """The tokens of some kinds."""
        return [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds]

    def add_to(self, tokenizer: Tokenizer) -> None:
        """Tokens that a text is searched for before anything else."""
        strips = self._strips_behind()
        for kinds, special in ((SPECIAL, True), ((USER_DEFINED,), False)):
            added = [
                AddedToken(token, special=special, normalized=False, rstrip=strips and token not in _UNSTRIPPED)
                for token in self.of(*kinds)
            ]
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)

    def _strips_behind(self) -> bool:
        """Whether spaces behind a special token are dropped. No key says so; llama.cpp goes by the model's name."""
        name = self.metadata.get("general.name")
        return isinstance(name, str) and any(word in name.lower() for word in ("phi-3", "phi3"))

    def add_ends(self, tokenizer: Tokenizer, add_bos: bool) -> None:
        """The post-processor that puts BOS and EOS around a text.

        Args:
            add_bos: what an absent `add_bos_token` means.
        """
        template, special = ["$A"], []
        for name, at, default in (("bos", 0, add_bos), ("eos", 2, False)):
            if self.get(f"add_{name}_token", bool, default):
                index = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
                if type(index) is not int or not 0 <= index < len(self.tokens):
                    raise self.error(f"add_{name}_token without a {name}_token_id")
                template.insert(at, self.tokens[index])
                special.append((self.tokens[index], index))
        if not special:
            return
        try:
            tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
        except Exception as err:  # a token whose text is a word of the library's templates; it raises nothing narrower
            raise self.error(f"BOS or EOS is {some(token for token, _ in special)}", why=str(err)) from err


def read_vocabulary(metadata: Mapping[str, Any], source: str, allowed: tuple[int, ...]) -> Vocabulary:
    """The vocabulary, whose tokens may be of the kinds `allowed`.

    Raises:
        CheckpointError: `gguf-tokenizer`: keys are missing or contradict each other.
        UnsupportedError: a token of another kind.
    """
    empty = Vocabulary(metadata, source, (), ())
    tokens, kinds = empty.get("tokens", list), empty.get("token_type", list)
    if len(set(map(str, tokens))) != len(tokens) or len(kinds) != len(tokens):
        raise empty.error(
            "the tokenizer contradicts itself",
            why=f"{counted(len(tokens), 'token')}, {len(set(map(str, tokens)))} of them different, "
            + counted(len(kinds), "type"),
        )
    if not all(isinstance(token, str) for token in tokens):
        raise empty.error("tokenizer.ggml.tokens holds what is no text")
    unknown = {kind for kind in kinds if kind not in allowed}
    if unknown:
        model = metadata.get("tokenizer.ggml.model")
        raise UnsupportedError("gguf-tokenizer", f"{source}: token types {sorted(unknown)} in a {model!r} vocabulary")
    return Vocabulary(metadata, source, tuple(tokens), tuple(kinds))
