"""How every command ends: each class of error with its exit code, as text on stderr or as JSON on stdout."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from plait.cli.screen import write_json
from plait.errors import FitError, PlaitError, UsageError, system_error

if TYPE_CHECKING:
    from rich.console import Console

#: What a shell reports for a program that the signals SIGINT and SIGPIPE ended.
INTERRUPTED, BROKEN_PIPE = 130, 141

#: The parser's own complaints (unknown option, missing argument). Typer has its classes from click or from a copy of
#: it, depending on its version; the base of the one it exports is right in both.
ParserError: type[Any] = typer.BadParameter.__mro__[2]


class Root(TyperGroup):
    """The group of all commands; the one place where exceptions become exit codes."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        parent = super().main
        code = run_safely(words, lambda: parent(words, prog_name or "plait", standalone_mode=False, **extra))
        if standalone_mode:
            sys.exit(code)
        return code


def run_safely(words: list[str], run: Callable[[], Any]) -> int:
    """Do what the command line `words` asks for. Returns the exit code; never raises."""
    options = words[: words.index("--")] if "--" in words else words
    as_json, verbose = "--json" in options, bool({"-v", "--verbose"} & set(options))
    try:
        code = run()
        sys.stdout.flush()
    except BrokenPipeError:
        return _broken_pipe()
    except SystemExit as end:
        # The parser ends with 1 when a pipe breaks inside it, which is our code for a fault of ours.
        return _broken_pipe() if isinstance(end.__context__, BrokenPipeError) else _exit_code(end.code)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except PlaitError as error:
        return _report(error, as_json, verbose)
    except ParserError as error:
        return _report(_usage(error), as_json, verbose)
    except (OSError, MemoryError) as error:
        return _report(system_error(error) or _fault(error), as_json, verbose)
    except Exception as error:
        return _report(_fault(error), as_json, verbose)
    return _exit_code(code)


def _exit_code(code: object) -> int:
    return code if isinstance(code, int) else 0


def _broken_pipe() -> int:
    _give_up_output()
    return BROKEN_PIPE


def _give_up_output() -> None:
    # What is still in the buffer cannot be written either; without this Python complains when it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(error: Any) -> UsageError:
    context = getattr(error, "ctx", None)
    hint = f"{context.command_path} --help" if context else "plait --help"
    return UsageError("command-line", error.format_message().rstrip("."), hint=hint)


def _fault(error: Exception) -> PlaitError:
    where = traceback.extract_tb(error.__traceback__)[-1]
    fault = PlaitError(
        "fault",
        f"this is a fault in plait: {type(error).__name__}: {error}",
        why=f"{where.name}, line {where.lineno} of {os.path.basename(where.filename)}",  # noqa: PTH119
        hint="the same command with -v shows the traceback; please report it",
    )
    fault.__cause__ = error
    return fault


def _report(error: PlaitError, as_json: bool, verbose: bool) -> int:
    try:
        _tell(error, as_json, verbose)
        sys.stdout.flush()
    except OSError:  # a full disk behind stdout or stderr: the exit code is all that is left to say
        _give_up_output()
    return error.exit_code


def _tell(error: PlaitError, as_json: bool, verbose: bool) -> None:
    if as_json:
        rows = {"rows": list(error.rows)} if isinstance(error, FitError) else {}
        write_json({"error": {**error.to_dict(), "exit_code": error.exit_code, **rows}})
    else:
        from plait.cli.screen import console

        _show(console(stderr=True), error)
    if verbose:
        traceback.print_exception(error)


def _show(screen: Console, error: PlaitError) -> None:
    from rich.text import Text

    from plait.cli.tables import fit_table

    # Not wrapped here: a terminal wraps by itself, and a log keeps its lines whole.
    screen.print(Text.assemble(("error: ", "bold red"), error.what, (f"  [{error.code}]", "dim")), soft_wrap=True)
    if isinstance(error, FitError) and error.rows:
        screen.print(fit_table(error))
    for label, text in (("why", error.why), ("try", error.hint)):
        if text:
            screen.print(Text.assemble((f"  {label}: ", "bold"), text), soft_wrap=True)
