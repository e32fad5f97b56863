"""`samestep` and `python -m samestep`: the command line, and what every worker of a job runs."""

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process, which a signal may end from here on without a word."""
    try:
        return _main()
    except KeyboardInterrupt:
        return 130


def _main() -> int:
    # One after the other, as each import takes its time.
    from samestep.workers.interrupts import end_at_once_when_interrupted

    end_at_once_when_interrupted()
    from samestep.workers.process import end_with_launcher

    end_with_launcher()
    from samestep import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
