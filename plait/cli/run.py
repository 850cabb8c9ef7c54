"""`plait run`: an artifact answers a prompt."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli.options import Json, Verbose
from plait.words import seconds_text

if TYPE_CHECKING:
    from plait.cli.screen import Screen
    from plait.text import Pipeline

NAME = "run"

HELP = """Let an artifact answer a prompt.

Starts the slices, one worker process each, and prints the text as it comes. The last line says where each slice ran;
a slice of a device that is not here runs emulated on the host. The prompt goes through the model's chat template if
it has one; --raw continues the text as it stands.

\b
    plait run smollm2.plait "What is the capital of France?"
    plait run smollm2.plait "Once upon a time" --raw --max-tokens 100
    plait run smollm2.plait "Write a poem" --temperature 0.8 --top-p 0.95 --seed 7
"""


def command(
    artifact: Annotated[
        Path, typer.Argument(metavar="ARTIFACT", show_default=False, help="A directory that plait compile wrote.")
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", show_default=False, help="What to ask.")],
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", metavar="N", min=1, help="The most new tokens.")
    ] = 64,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it stands, without a chat template.")
    ] = False,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", help="0 takes the likeliest token every time.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", metavar="P", help="Sample from the likeliest tokens that sum to P.")
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="K", help="Sample from the K likeliest tokens.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Same seed, same prompt: same text.")] = 0,
    weights: Annotated[
        Path | None, typer.Option("--weights", metavar="DIR", help="The checkpoint's folder, where it has moved.")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", metavar="N", help="Host threads of each worker.")] = None,
    share_workers: Annotated[
        bool, typer.Option("--share-workers", help="One process for neighbouring slices that can share it.")
    ] = False,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="No worker processes; for slices of one backend.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Check a digest of every tensor that crosses slices; show the workers' output."),
    ] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    from plait import api
    from plait.artifact import read_artifact
    from plait.cli.screen import Screen
    from plait.cli.tables import warn_of_null
    from plait.frontend.tokenizer import tokenizer_text
    from plait.runtime.sampler import SamplingParams

    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    # Workers take seconds to start: what can be refused without them is refused before.
    SamplingParams(**sampling)
    checked = read_artifact(artifact)
    tokenizer_text(checked.folder / "tokenizer.json")
    screen = Screen(as_json=as_json)
    options = {"threads": threads, "share_workers": share_workers, "in_process": in_process, "debug": debug}
    with screen.phases() as progress:
        progress("start", 0, 0)
        pipe = api.open(checked, weights=weights, **options)
    warn_of_null(screen, pipe.manifest)
    with pipe:
        began = time.monotonic()
        times: list[float] = []
        chat = pipe.chat_template is not None and not raw
        pieces = _timed(pipe.stream(prompt, max_tokens, chat=chat, **sampling), times)
        text = "".join(pieces) if as_json else _stream(pieces)
        _finish(screen, pipe, text, began, times, verbose=verbose)


def _timed(pieces: Iterable[str], times: list[float]) -> Iterator[str]:
    """The same pieces, noting when each came."""
    for piece in pieces:
        times.append(time.monotonic())
        yield piece


def _stream(pieces: Iterable[str]) -> str:
    text = ""
    for piece in pieces:
        text += piece
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return text


def _finish(screen: Screen, pipe: Pipeline, text: str, began: float, times: list[float], *, verbose: bool) -> None:
    from plait.cli.tables import table

    taken = time.monotonic() - began
    stats = pipe.stats()
    tokens, slices = stats["tokens"], stats["slices"]
    rate, first = tokens / taken, (times[0] - began if times else None)
    where = ", ".join(f"slice {number} on {item['runs_on']}" for number, item in enumerate(slices))
    begun = "no text" if first is None else f"first text after {seconds_text(first)}"
    screen.note(f"{tokens} {'token' if tokens == 1 else 'tokens'}, {rate:.1f} tokens/s, {begun}; {where}")
    if verbose:
        columns = ("slice", "runs on", "steps", "busy", "hops")
        rows = [
            (i["slice"], i["runs_on"], str(i["steps"]), seconds_text(i["busy_s"]), seconds_text(i["hop_s"]))
            for i in slices
        ]
        screen.aside(table(columns, rows, right=columns[2:]))
    screen.result(
        {
            "text": text,
            "tokens": tokens,
            "tokens_per_s": rate,
            "first_text_s": first,
            "slices": [{"slice": i["slice"], "runs_on": i["runs_on"]} for i in slices],
        }
    )
