"""`rules`: the table of rules, with the stock code that each stands for and its state."""

import argparse
import fnmatch
import json

from tf_fused_ops.cli.errors import UsageError

_EXAMPLES = """\
examples:
  python -m tf_fused_ops rules
  python -m tf_fused_ops rules "conv2d_bias_gelu*"     with all spellings and the stock code
  python -m tf_fused_ops rules --json
"""
_NAMESPACE = "TfFusedOps>"
# What rules emit that have no fused op of their own.
_STOCK = "stock ops"


def add_parser(subparsers):
    """Adds the subcommand and returns its parser."""
    parser = subparsers.add_parser(
        "rules",
        help="list the rules: the stock code that each stands for, and whether it can apply here",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="only these, with all their code; * is a wildcard"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    return parser


def run(args):
    """Prints the table and returns 0."""
    table = collect(args.name or "*")
    if not table:
        raise UsageError(f"there is no rule '{args.name}'")
    lines = _detailed(table) if args.name else _short(table)
    print(json.dumps(table, indent=2) if args.json else "\n".join(lines))
    return 0


def collect(pattern="*"):
    """Returns the rules whose names fit a pattern, as a list of dicts.

    Args:
        pattern: A shell wildcard.

    Returns:
        [{"rule", "family", "chain", "activation", "spellings", "code", "fused_ops", "state"}].
    """
    from tf_fused_ops.cli import stock_code
    from tf_fused_ops.remapper import (
        caches,
        recurrent,
        rules,
        slices,
        stock_optimizers,
        variable_updates,
    )

    elsewhere = {rule.name: rule.fused_ops for rule in stock_optimizers.UPDATES}
    table = {}
    others = (caches.UPDATE_CACHE, slices.JOINED, *variable_updates.UPDATES)
    for rule in (*rules.RULES, *others):
        if not fnmatch.fnmatchcase(rule.name, pattern):
            continue
        entry = table.setdefault(rule.name, {
            "rule": rule.name,
            "family": rule.family,
            "chain": type(rule).__doc__.splitlines()[0].rstrip("."),
            "activation": rule.activation.name,
            "spellings": [],
            "code": stock_code.of_chain(rule),
            "fused_ops": list(rule.fused_ops),
            "state": _state(rule.fused_ops, elsewhere.get(rule.name, ()), rule.devices),
        })  # fmt: skip
        spelling = stock_code.of_spelling(rule.spelling, rule.activation.name)
        if spelling not in entry["spellings"]:
            entry["spellings"].append(spelling)
    for loop in recurrent.LOOPS:
        if fnmatch.fnmatchcase(loop.name, pattern):
            table[loop.name] = {
                "rule": loop.name,
                "family": "recurrent",
                "chain": "the loop of a recurrent layer of Keras",
                "activation": "none",
                "spellings": ["x"],
                "code": [loop.code],
                "fused_ops": list(recurrent.FUSED_OPS),
                "state": _state(recurrent.FUSED_OPS),
            }
    return sorted(table.values(), key=lambda entry: (entry["family"], entry["rule"]))


def _state(op_types, elsewhere=(), devices=("CPU", "GPU")):
    """Returns for which of some devices, and for which dtypes, all ops of a rule have kernels, and
    which ops take their place elsewhere."""
    import tensorflow as tf

    from tf_fused_ops.remapper import kernels

    dtypes = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
    parts = []
    for device in devices:
        found = [
            dtype.name
            for dtype in dtypes
            if all(kernels.has_kernel(op_type, dtype, device) for op_type in op_types)
        ]
        if found:
            parts.append(f"{device} ({', '.join(found)})")
    if elsewhere:
        parts.append(f"elsewhere {', '.join(elsewhere)}")
    return f"on: {'; '.join(parts)}" if parts else "off: no kernels in this build"


def _short(table):
    width = max(len(entry["rule"]) for entry in table)
    family = None
    for entry in table:
        if entry["family"] != family:
            family = entry["family"]
            ops = ", ".join(op.removeprefix(_NAMESPACE) for op in entry["fused_ops"])
            yield f"{entry['chain']} -> {ops or _STOCK}"
            yield f"  {entry['state']}"
        first, *others = entry["spellings"]
        spellings = "spelling" if len(others) == 1 else "spellings"
        more = f"  and {len(others)} other {spellings}" if others else ""
        yield f"  {entry['rule']:<{width}}  act(x) = {first}{more}"


def _detailed(table):
    for entry in table:
        yield f"{entry['rule']}: {entry['chain']} -> {', '.join(entry['fused_ops']) or _STOCK}"
        yield f"  {entry['state']}"
        yield from (f"  act(x) = {spelling}" for spelling in entry["spellings"])
        for code in entry["code"]:
            yield ""
            yield from (f"    {line}".rstrip() for line in code.splitlines())
        yield ""
