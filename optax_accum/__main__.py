"""Owns `python -m optax_accum`: which commands there are, and how they end. Each is a file of `_command`."""

import argparse
import inspect
import os
import sys
from collections.abc import Sequence

from optax_accum._command import errors, info, plan, verify

COMMANDS = {"info": info, "plan": plan, "verify": verify}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, and returns its exit status.

    That is 2 where it cannot do what it was asked, 130 after Ctrl-C, and 141 where nobody reads what it says.
    """
    options = _parser().parse_args(arguments)
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads has read enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer goes there
        return 141
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    except Exception as error:  # a user's code may raise any
        print("\n".join([*errors.said(error), *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    example = lambda command: f"example, from the folder of the repository:\n\n  {command}\n"
    parser = argparse.ArgumentParser(
        prog="python -m optax_accum",
        description="Find the fewest micro-batches that fit, or check a train step. By default: names and versions.",
        epilog=example(f"{plan.EXAMPLE}\n  {verify.EXAMPLE}"),
        formatter_class=form,
    )
    parser.set_defaults(run=info.run)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in COMMANDS.items():
        about = inspect.getdoc(command.run)
        own = commands.add_parser(
            name, help=about, description=about, epilog=example(command.EXAMPLE), formatter_class=form
        )
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
