"""`viz`: draws a program before and after fusing."""

import argparse

from tf_fused_ops.cli import thing
from tf_fused_ops.cli.errors import UsageError

_EXAMPLES = """\
examples:
  python -m tf_fused_ops viz model.keras -o model.html
  python -m tf_fused_ops viz train.py:step --signature "float32[8,28,28,1], int32[8]" -o step.svg
  python -m tf_fused_ops viz frozen.pb --passes constfold,remap -o remapped.svg
  python -m tf_fused_ops viz train.py:step --passes executed -o what_ran.html
"""


def add_parser(subparsers):
    """Adds the subcommand and returns its parser."""
    parser = subparsers.add_parser(
        "viz",
        help="draw a program before and after fusing, or after passes of TensorFlow's",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    thing.add_arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help=".svg, .html (interactive), .dot, .pbtxt (a pair), or .png and .pdf with graphviz",
    )
    parser.add_argument("--format", help="the format, if FILE does not say it; also: tensorboard")
    parser.add_argument(
        "--passes",
        default="tf_fused_ops",
        metavar="NAMES",
        help="passes to apply in this order, separated by commas; none draws the graph alone "
        "(default: %(default)s; --list-passes names them)",
    )
    parser.add_argument("--list-passes", action=_ListPasses, help="print the passes and exit")
    parser.add_argument("--title", help="what to call it")
    parser.add_argument(
        "--expand",
        metavar="SCOPES",
        help="in an .svg, the name scopes to open, separated by commas, or all",
    )
    parser.add_argument(
        "--details",
        default="",
        metavar="NAMES",
        help="in an .svg, what to write next to the ops: shapes,devices,layouts",
    )
    parser.add_argument(
        "--constants",
        action="store_true",
        help="in an .svg, show unchanged constants and handles of variables too",
    )
    return parser


class _ListPasses(argparse.Action):
    def __init__(self, option_strings, dest, **kwargs):
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None):
        from tf_fused_ops import viz

        print("\n".join(viz.pass_names()))
        parser.exit(0)


def run(args):
    """Draws the picture and returns 0."""
    from tf_fused_ops.viz import passes, writers
    from tf_fused_ops.viz.errors import VizError

    details = _split(args.details)
    unknown = set(details) - {"shapes", "devices", "layouts"}
    if unknown:
        raise UsageError(f"--details: there is no {', '.join(sorted(unknown))}")
    expand = args.expand if args.expand in (None, "all") else _split(args.expand)
    try:
        writers.format_of(args.output, args.format)
        names = passes.canonical(() if args.passes == "none" else _split(args.passes))
        source = thing.load(args)
        comparison = passes.apply(source, names).comparison
        subtitle = f"through {', '.join(names)}" if names else ""
        written = writers.write(
            args.output, args.format, args.title or source.title, subtitle, comparison, not names,
            expand=expand, details=details, constants=args.constants,
        )  # fmt: skip
    except VizError as error:
        raise UsageError(str(error)) from error
    for line in _summary(comparison) if names else ():
        print(line)
    print(f"written: {', '.join(map(str, written))}")
    return 0


def _split(text):
    return [part.strip() for part in text.split(",") if part.strip()]


def _bytes(total):
    unknown = f" (and {total.unknown} tensors of unknown shape)" if total.unknown else ""
    return f"{total.bytes}{unknown}"


def _summary(comparison):
    before, after = comparison.costs()
    yield f"ops             {before.ops} -> {after.ops}"
    yield f"kernels         {before.kernels} -> {after.kernels}"
    yield f"bytes between   {_bytes(before)} -> {_bytes(after)}"
    yield ", ".join(f"{count} {kind}" for kind, count in comparison.counts().items())
    yield f"fused chains    {len(comparison.regions)}"
