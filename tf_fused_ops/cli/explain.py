"""`explain`: what is fused in a program by which rule, what nearly is, what TensorFlow fuses."""

import argparse
import collections
import fnmatch
import json
import operator
import re

from tf_fused_ops.cli import thing
from tf_fused_ops.cli.errors import UsageError

_EXAMPLES = """\
examples:
  python -m tf_fused_ops explain train.py:step --signature "float32[8,28,28,1], int32[8]"
  python -m tf_fused_ops explain model.keras --json
  python -m tf_fused_ops explain model.keras --require "Conv2DBiasAct>=16"
"""
_NAMESPACE = "TfFusedOps>"
_COMPARISONS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


def add_parser(subparsers):
    """Adds the subcommand and returns its parser."""
    parser = subparsers.add_parser(
        "explain",
        help="say what is fused by which rule, what nearly is and why not, what TensorFlow fuses",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    thing.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="CLAIM",
        help='end with status 1 unless it holds: "Conv2DBiasAct>=16" counts fused ops, '
        '"conv2d_bias_*==16" applications of rules; can be repeated',
    )
    return parser


def run(args):
    """Prints the report; returns 0, or 1 if a required claim does not hold."""
    from tf_fused_ops.viz import passes
    from tf_fused_ops.viz.errors import VizError

    claims = [_parse(text) for text in args.require]
    source = thing.load(args)
    try:
        ours = passes.apply(source, (passes.OURS,))
        theirs = passes.apply(source, ("remap",))
    except VizError as error:
        raise UsageError(str(error)) from error
    report = collect(source.title, ours, theirs)
    report["required"] = [_check(report, *claim) for claim in claims]
    print(json.dumps(report, indent=2) if args.json else "\n".join(_lines(report)))
    return 0 if all(claim["holds"] for claim in report["required"]) else 1


def collect(title, ours, theirs):
    """Returns the report as data.

    Args:
        title: What the program is called.
        ours: The passes.Result of this package's pass.
        theirs: The passes.Result of TensorFlow's remapper.

    Returns:
        A dict with the keys "program", "fused", "refused", "skipped", "tensorflow", "ops", "rules".
    """
    fused = [
        {
            "rule": region.rule,
            "function": _function(region),
            "nodes": [name for _, name in region.before],
            "fused": [name for _, name in region.after],
            "source": region.source,
            "messages": list(region.notes),
        }
        for region in ours.comparison.regions
    ]
    refused = [
        {"rule": refusal.rule, "nodes": list(refusal.nodes), "reason": refusal.reason}
        for report in ours.reports
        for refusal in report.refused
    ]
    skipped = [
        {"function": _text(report.graph), "reason": report.skipped}
        for report in ours.reports
        if report.skipped
    ]
    tensorflow = [
        {
            "op": region.rule,
            "function": _function(region),
            "nodes": [name for _, name in region.before],
            "source": region.source,
        }
        for region in theirs.comparison.regions
    ]
    nodes = (node for graph in ours.comparison.after.graphs() for node in graph.nodes.values())
    ops = collections.Counter(
        node.op.removeprefix(_NAMESPACE) for node in nodes if node.op.startswith(_NAMESPACE)
    )
    return {
        "program": title,
        "fused": fused,
        "refused": refused,
        "skipped": skipped,
        "tensorflow": tensorflow,
        "ops": dict(sorted(ops.items())),
        "rules": dict(sorted(collections.Counter(entry["rule"] for entry in fused).items())),
    }


def _function(region):
    """Returns the function that a region is in, or None for the main graph."""
    return (region.before or region.after)[0][0] or None


def _text(name):
    return name.decode() if isinstance(name, bytes) else name


def _parse(text):
    match = re.fullmatch(r"\s*([\w*?>]+?)\s*(>=|<=|==|>|<)\s*(\d+)\s*", text)
    if match is None:
        raise UsageError(f"--require: '{text}' is not a claim such as Conv2DBiasAct>=16")
    return match[1].removeprefix(_NAMESPACE), match[2], int(match[3])


def _check(report, name, comparison, number):
    counts = report["ops"] | report["rules"]
    found = sum(count for key, count in counts.items() if fnmatch.fnmatchcase(key, name))
    holds = _COMPARISONS[comparison](found, number)
    return {"claim": f"{name}{comparison}{number}", "found": found, "holds": holds}


def _lines(report):
    fused, tensorflow = report["fused"], report["tensorflow"]
    ops = ", ".join(f"{count} {op}" for op, count in report["ops"].items())
    yield f"{report['program']}: {len(fused)} chains fused{f' ({ops})' if ops else ''}"
    for entry in fused:
        yield f"  {entry['rule']} at {entry['nodes'][-1]}{_where(entry)}"
        yield from (f"    {message}" for message in entry["messages"])
    yield f"nearly fused: {len(report['refused'])}"
    for entry in report["refused"]:
        yield f"  not {entry['rule']} at {entry['nodes'][-1]}: {entry['reason']}"
    for entry in report["skipped"]:
        yield f"  {entry['function']} is left alone: {entry['reason']}"
    yield f"TensorFlow's own remapper would have fused {len(tensorflow)} chains"
    for entry in tensorflow:
        yield f"  {entry['op']} at {entry['nodes'][0]}{_where(entry)}"
    for claim in report["required"]:
        verdict = "holds" if claim["holds"] else "FAILS"
        yield f"required {claim['claim']}: {verdict}, found {claim['found']}"


def _where(entry):
    function = f" in {entry['function']}" if entry["function"] else ""
    return function + (f" ({entry['source']})" if entry["source"] else "")
