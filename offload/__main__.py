"""`python -m offload` is the command `offload`."""

import sys

from offload.cli import main

if __name__ == "__main__":
    sys.exit(main())
