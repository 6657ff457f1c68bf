"""The command `equipoise`, also `python -m equipoise`."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run the command; exit with 0 for success, 2 for a usage error, 1 for any other error."""
    try:
        from .cli import run_command

        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # an encoding without α prints a question mark
        code = run_command(sys.argv[1:])
    except KeyboardInterrupt:
        code = 1
        print("\nstopped", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
