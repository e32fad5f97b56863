"""`samestep` and `python -m samestep`: the command line, and what every worker of a job runs."""

import sys

from samestep.workers.process import end_at_once_when_interrupted, end_with_launcher

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process, which a signal may end from here on without a word."""
    end_at_once_when_interrupted()
    end_with_launcher()
    from samestep import cli  # not before: what is imported takes its time

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
