"""The command `equipoise`, also `python -m equipoise`."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run the command and exit: 0 when done, 2 for a mistake in usage, 1 for everything else."""
    try:
        from .cli import run_command

        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal or a file that has no α shows a question mark
        code = run_command(sys.argv[1:])
    except KeyboardInterrupt:
        code = 1
        print("\nstopped", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
