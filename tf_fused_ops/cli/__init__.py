"""The command line's subcommands, one module each.

A subcommand module has `add_parser(subparsers)`, which returns its parser, and `run(args)`, which
returns the exit status.
"""

import argparse

from tf_fused_ops._version import __version__
from tf_fused_ops.cli import bench, convert, demo, explain, info, rules, viz
from tf_fused_ops.cli.errors import UsageError

_COMMANDS = (info, rules, explain, viz, convert, demo, bench)


class _Parser(argparse.ArgumentParser):
    """Reports bad input in one sentence."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv=None):
    """Runs the command line.

    Args:
        argv: list of arguments without the program name; None takes them from sys.argv.

    Returns:
        The exit status: 0, 1 when a command's own claim failed, 2 for bad input.
    """
    parser = _Parser(prog="python -m tf_fused_ops", description="Fused ops for TensorFlow.")
    parser.add_argument("--version", action="version", version=f"tf_fused_ops {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers).set_defaults(run=command.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except UsageError as error:
        parser.exit(2, f"{parser.prog} {args.command}: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\ninterrupted\n")
