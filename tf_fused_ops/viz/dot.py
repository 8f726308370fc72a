"""Graphviz text of a comparison: every node, name scopes as clusters, both sides in one file."""

import json

from tf_fused_ops.viz import diff

_COLOURS = {
    diff.SAME: ("#9ca3af", "#ffffff"),
    diff.REMOVED: ("#d55e00", "#fde9dc"),
    diff.ADDED: ("#0072b2", "#dcecfa"),
    diff.ALTERED: ("#b58900", "#fdf3cf"),
    diff.REWIRED: ("#b58900", "#ffffff"),
}


def text(title, comparison, single=False):
    """Returns a comparison in graphviz's language.

    Args:
        title: What is drawn.
        comparison: A diff.Comparison.
        single: Whether only the first program is drawn.

    Returns:
        The text of a .dot file.
    """
    lines = [
        f"digraph {_quote(title)} {{",
        f"  label={_quote(title)} labelloc=t fontname=Helvetica compound=true",
        '  node [shape=box style="rounded,filled" fontname=Helvetica fontsize=11]',
        '  edge [color="#9ca3af" fontname=Helvetica fontsize=9]',
    ]
    sides = [("before", comparison.before, comparison.changes_before)]
    if not single:
        sides.append(("after", comparison.after, comparison.changes_after))
    for label, program, changes in sides:
        lines += _side(label, program, changes, comparison.regions)
    return "\n".join([*lines, "}", ""])


def _side(label, program, changes, regions):
    rules = {key: region.rule for region in regions for key in (*region.before, *region.after)}
    lines = [f"  subgraph {_quote(f'cluster {label}')} {{", f"    label={label}"]
    for graph in program.graphs():
        key = "" if graph is program.graph else graph.name
        prefix = f"{label}|{key}|"
        if key:
            lines += [
                f"    subgraph {_quote(f'cluster {prefix}')} {{",
                f"      label={_quote(key)}",
            ]
        lines += _scopes(graph, prefix, changes, key, rules)
        lines += ["    }"] if key else []
        for node in graph.nodes.values():
            lines += _edges(graph, node, prefix)
    return [*lines, "  }"]


def _scopes(graph, prefix, changes, key, rules):
    """Yields the nodes inside nested clusters, one per name scope."""
    stack = []
    for node in sorted(graph.nodes.values(), key=lambda node: node.name.split("/")):
        path = node.name.split("/")[:-1]
        common = 0
        while common < min(len(path), len(stack)) and path[common] == stack[common]:
            common += 1
        yield from ["    }"] * (len(stack) - common)
        for depth in range(common, len(path)):
            scope = "/".join(path[: depth + 1])
            yield f"    subgraph {_quote(f'cluster {prefix}{scope}')} {{"
            yield f"      label={_quote(path[depth])} style=rounded"
        stack = path
        member = (key, node.name)
        yield f"      {_node(node, prefix, changes.get(member), rules.get(member))}"
    yield from ["    }"] * len(stack)


def _node(node, prefix, change, rule):
    stroke, fill = _COLOURS[change.kind if change else diff.SAME]
    label = "\n".join(filter(None, (node.op, node.name.split("/")[-1], rule)))
    tooltip = "\n".join((node.name, *(change.notes if change else ())))
    return (
        f"{_quote(prefix + node.name)} [label={_quote(label)} tooltip={_quote(tooltip)} "
        f'color="{stroke}" fillcolor="{fill}"]'
    )


def _edges(graph, node, prefix):
    target = _quote(prefix + node.name)
    for name, port in node.inputs:
        tensor = graph.nodes[name].outputs[port]
        shown = f":{port} {tensor}" if port else str(tensor)
        yield f"    {_quote(prefix + name)} -> {target} [label={_quote(shown)}]"
    for name in node.controls:
        yield f"    {_quote(prefix + name)} -> {target} [style=dashed]"


def _quote(value):
    """Quotes as graphviz does; JSON's escapes of quotes and line ends are the same."""
    return json.dumps(value, ensure_ascii=False)
