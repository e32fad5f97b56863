"""`python -m samestep`: the command line, and what every worker of a job runs."""

import sys

from samestep.cli import main

if __name__ == "__main__":
    sys.exit(main())
