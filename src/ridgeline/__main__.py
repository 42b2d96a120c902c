"""`python -m ridgeline` is the command line."""

import sys

from ridgeline.cli import main

if __name__ == "__main__":
    sys.exit(main())
