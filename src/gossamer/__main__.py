"""The command ``gossamer``, also as ``python -m gossamer``."""

import sys


def main() -> int:
    """Load the command and run it; returns its exit code."""
    try:
        # It takes seconds to load torch, and Ctrl-C is heard meanwhile.
        from gossamer import cli
    except KeyboardInterrupt:
        print("gossamer: stopped", file=sys.stderr)
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
