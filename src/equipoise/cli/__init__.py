"""The command line: its verbs, one file each, and its error messages."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from importlib.metadata import version

from .. import __version__
from ..errors import UsageError, describe_error, get_first_line, make_unknown_error
from .arguments import ARGUMENTS, VERBS
from .flags import parse_arguments
from .words import refuse_empty_path


def do_verb(verb: str, argv: list[str]) -> None:
    """Parse the words, and only then import the file of the verb: most of the package takes seconds to import.

    Verbs whose flags depend on a method parse them on their own.
    """
    given = parse_arguments(ARGUMENTS[verb], verb, argv) if verb in ARGUMENTS else argv
    module = importlib.import_module(f"{__name__}.{verb}")
    getattr(module, f"do_{verb}")(given)


def format_usage() -> str:
    """The usage text."""
    lines = "\n".join(f"  {verb:6} {words}" for verb, words in VERBS.items())
    return (
        f"usage: equipoise VERB ...\n\nClass-incremental learning that stays balanced.\n\n{lines}\n\n"
        "  equipoise VERB --help lists a verb's flags; --version the version; --debug shows tracebacks."
    )


def run_command(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    debug = "--debug" in argv
    argv = [word for word in argv if word != "--debug"]
    if not argv or argv[0] in ("-h", "--help"):
        print(format_usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"equipoise {__version__}, torch {version('torch')}")
        return 0
    try:
        if argv[0] not in VERBS:
            raise make_unknown_error("command", argv[0], VERBS)
        refuse_empty_path(argv[0], argv[1:])
        do_verb(argv[0], argv[1:])
        return 0
    except SystemExit as end:  # help was printed
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        print("equipoise: stopped; the same command goes on where it was", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        words = describe_error(error)
        if words is None:  # a bug of ours; the traceback is shown with --debug only
            words = f"unexpected {type(error).__name__}: {get_first_line(error)}; --debug shows where"
        print(f"equipoise: {words}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
