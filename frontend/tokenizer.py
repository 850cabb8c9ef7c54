"""Text to token ids and back, chat templates included, over a tokenizer.json."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from plait.errors import CheckpointError, UserError
from plait.frontend.files import read_text

Message = Mapping[str, Any]

REPLACEMENT = "\ufffd"
"""What a decoder gives for bytes that are not yet, or never, a character."""


class DoubleBosWarning(UserWarning):
    """A text begins with the BOS token although the tokenizer adds one itself."""


class Tokenizer:
    """A tokenizer.json with the names of its ends and a chat template.

    Args:
        text: the contents of a tokenizer.json.
        source: what errors call it.
        chat_template: jinja2 text.
    """

    def __init__(
        self,
        text: str,
        source: str = "tokenizer.json",
        *,
        chat_template: str | None = None,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        with library(source):
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        # Settings of a training run may be saved along; a prompt must not be cut or padded in silence.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._source, self._template_text = source, chat_template
        self._template: jinja2.Template | None = None
        self.bos_token_id, self.eos_token_ids = bos_token_id, tuple(eos_token_ids)

    @classmethod
    def open(
        cls,
        path: Path | None,
        *,
        chat_template: str | None = None,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> Tokenizer:
        """Read a tokenizer.json, or the tokenizer of a GGUF file.

        Raises:
            CheckpointError: `tokenizer-missing`, `tokenizer-invalid`.
            UnsupportedError: the GGUF file's tokenizer is of another kind.
        """
        return cls(
            tokenizer_text(path),
            str(path),
            chat_template=chat_template,
            bos_token_id=bos_token_id,
            eos_token_ids=eos_token_ids,
        )

    @property
    def vocab_size(self) -> int:
        """Tokens that can come out, special ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer adds (BOS, where a model wants one)."""
        ids = self._encode(text, add_special_tokens=True)
        if self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            warnings.warn(
                "the text begins with the BOS token and the tokenizer adds another; leave it out of the text",
                DoubleBosWarning,
                stacklevel=2,
            )
        return ids

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation through the chat template.

        The template writes every special token itself, so the tokenizer adds none: a second BOS costs accuracy.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self._encode(text, add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text that the chat template makes of messages, each with `role` and `content`.

        Raises:
            CheckpointError: `chat-template-missing`, `chat-template-invalid`.
            UserError: `chat-message`; `chat-template`: the template refuses these messages.
        """
        template = self.template()
        for message in messages:
            if not (isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
                raise UserError(
                    "chat-message",
                    f"a message of a chat is {dict(message)!r:.200}",
                    why="it needs a role and a content, both text",
                )
        try:
            return template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self._name(self.bos_token_id),
                eos_token=self._name(self.eos_token_ids[0] if self.eos_token_ids else None),
            )
        except jinja2.TemplateError as err:
            raise UserError("chat-template", "the chat template refuses these messages", why=f"{err!s:.500}") from err
        except Exception as err:  # the template is a program of its own: it divides by zero and counts too far
            raise UserError(
                "chat-template", "the chat template fails on these messages", why=f"{type(err).__name__}: {err!s:.500}"
            ) from err

    def template(self) -> jinja2.Template:
        """The chat template. Raises CheckpointError as `render_chat`."""
        if self._template is None:
            if self._template_text is None:
                raise CheckpointError(
                    "chat-template-missing",
                    f"the checkpoint of {self._source} has no chat template",
                    hint="send plain text instead of messages",
                )
            try:
                self._template = _environment().from_string(self._template_text)
            except Exception as err:  # also what is nested too deep
                where = f"line {err.lineno}" if isinstance(err, jinja2.TemplateSyntaxError) else type(err).__name__
                raise CheckpointError(
                    "chat-template-invalid", "the chat template is not valid", why=f"{where}: {err!s:.500}"
                ) from err
        return self._template

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        with library(self._source):
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self) -> StreamDecoder:
        """A decoder for one answer as it comes."""
        return StreamDecoder(self)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as err:
            raise UserError("text-invalid", "the text holds a lone surrogate, which is no character") from err
        with library(self._source):
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def _name(self, token_id: int | None) -> str:
        return (self._tokenizer.id_to_token(token_id) or "") if token_id is not None else ""


@contextmanager
def library(source: str) -> Iterator[None]:
    """Faults of the tokenizers library as plait's own. It raises nothing narrower than Exception, and where a file
    contradicts itself (a special token without an id) it panics, which is no Exception.

    Raises:
        CheckpointError: `tokenizer-invalid`.
    """
    try:
        yield
    except BaseException as err:
        if not isinstance(err, Exception) and type(err).__name__ != "PanicException":
            raise
        what = f"{source} is not a tokenizer that works"
        raise CheckpointError("tokenizer-invalid", what, why=f"{err!s:.500}") from err


class StreamDecoder:
    """Text piece by piece: the pieces joined are the text of all tokens, and none ends inside a character.

    A token may hold part of a character, and its text may depend on the tokens before it, so each piece is the
    difference of two decodings that begin at the same earlier token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._known = 0
        """Tokens at the front of `_ids` whose text has been handed out."""

    def push(self, token_id: int) -> str:
        """The text that is complete with this token; empty while a character is not."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(REPLACEMENT):
            return ""
        return self._take(text)

    def finish(self) -> str:
        """What is left at the end, with replacement characters where bytes never became one."""
        return self._take(self._tokenizer.decode(self._ids))

    def _take(self, text: str) -> str:
        piece = text[len(self._tokenizer.decode(self._ids[: self._known])) :]
        # Keep the tokens of this piece as the context of the next.
        self._ids, self._known = self._ids[self._known :], len(self._ids) - self._known
        return piece


def tokenizer_text(path: Path | None) -> str:
    """The contents of a tokenizer.json, made from a GGUF file's metadata where `path` is one.

    Raises:
        CheckpointError: `tokenizer-missing`: there is none, so only token ids can be used.
    """
    if path is None or not path.is_file():
        raise CheckpointError(
            "tokenizer-missing",
            "the checkpoint has no tokenizer.json" if path is None else f"there is no {path}",
            hint="put the model's tokenizer.json beside its weights, or work with token ids",
        )
    if path.suffix == ".gguf":
        from plait.frontend.gguf.header import read_header
        from plait.frontend.gguf.tokenizer import tokenizer_json

        metadata, *_ = read_header(path)
        return tokenizer_json(metadata, str(path))
    return read_text(path)


class _Generation(Extension):
    """`{% generation %}` marks what a model is trained on; in inference it is only brackets."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates of the hub expect: they are strangers' code, so they run in jinja2's sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
