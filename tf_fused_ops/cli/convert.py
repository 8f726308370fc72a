"""`convert`: saves a SavedModel anew, with fused ops or with stock ops only."""

import argparse

from tf_fused_ops.cli.errors import UsageError

_EXAMPLES = """\
examples:
  python -m tf_fused_ops convert model fused_model
  python -m tf_fused_ops convert fused_model model --portable
"""


def add_parser(subparsers):
    """Adds the subcommand and returns its parser."""
    parser = subparsers.add_parser(
        "convert",
        help="save a SavedModel anew with fused ops, or with --portable without them",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="IN", help="the folder of a SavedModel")
    parser.add_argument("target", metavar="OUT", help="the folder to make")
    parser.add_argument(
        "--portable",
        action="store_true",
        help="replace fused ops by stock ops, to serve where tf_fused_ops is not installed",
    )
    parser.add_argument(
        "--disable",
        action="append",
        default=[],
        metavar="RULE",
        help="a rule that is not to be used; * is a wildcard; can be repeated",
    )
    parser.add_argument(
        "--winograd",
        action="store_true",
        help="allow Winograd's algorithm for 3x3 convolutions: faster, larger rounding errors",
    )
    return parser


def run(args):
    """Converts and says what was replaced; returns 0."""
    from tf_fused_ops.remapper import RemapOptions, Report, convert

    options = RemapOptions(disable=args.disable, winograd=args.winograd)
    try:
        reports = convert(args.source, args.target, args.portable, options)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    report = Report.of_all(reports)
    what = "fused ops replaced by stock ops" if args.portable else "chains fused"
    print(f"written: {args.target}, {len(report.fused)} {what}")
    for name, count in sorted(report.counts().items()):
        print(f"  {count:4} {name}")
    for refusal in report.refused:
        print(f"  not {refusal.rule} at {refusal.nodes[-1]}: {refusal.reason}")
    return 0
