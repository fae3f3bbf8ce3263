"""The command ``gossamer`` as ``python -m gossamer``."""

import sys

from gossamer.cli import main

if __name__ == "__main__":
    sys.exit(main())
