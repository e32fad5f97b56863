"""The entry point of `samestep` and `python -m samestep`, in the user's process and in every worker."""

import os
import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process; Ctrl-C ends it without a traceback."""
    try:
        return _main()
    except KeyboardInterrupt:
        return 130


def _main() -> int:
    # Handle signals before the next import: each import takes time in which a signal may arrive.
    from samestep.workers.interrupts import end_at_once_when_interrupted

    end_at_once_when_interrupted()
    from samestep.workers.process import end_with_launcher

    end_with_launcher()
    try:
        os.getcwd()  # torch's libraries end the process without a folder
    except FileNotFoundError:
        print("samestep: error: the current folder was deleted; change to another one (cd)", file=sys.stderr)
        return 2
    from samestep import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
