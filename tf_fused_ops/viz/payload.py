"""What the page and the static picture are drawn from: a comparison as plain data."""

from tf_fused_ops.viz import costs


def make(title, subtitle, comparison, single=False):
    """Returns a comparison as data that `json.dumps` takes.

    Args:
        title: What is drawn.
        subtitle: Which passes it went through.
        comparison: A diff.Comparison.
        single: Whether only the first program is drawn.

    Returns:
        A dict: "sides" (one per program: "graphs", the first being the main one, of nodes),
        "regions", "counts" and "strings", the texts of attributes, which the nodes number.
    """
    strings = _Strings()
    regions = list(comparison.regions)
    sides = [_side("before", comparison.before, comparison.changes_before,
                   _members(regions, "before"), strings)]  # fmt: skip
    if not single:
        sides.append(_side("after", comparison.after, comparison.changes_after,
                           _members(regions, "after"), strings))  # fmt: skip
    else:
        sides[0]["label"] = ""
    return {
        "title": title,
        "subtitle": subtitle,
        "sides": sides,
        "regions": [
            {"rule": region.rule, "source": region.source, "notes": list(region.notes)}
            for region in regions
        ],
        "changes": {} if single else comparison.counts(),
        "strings": strings.texts,
    }


class _Strings:
    """Numbers texts, so that each is written once."""

    def __init__(self):
        self.texts = []
        self._numbers = {}

    def __call__(self, text):
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]


def _members(regions, side):
    return {key: number for number, region in enumerate(regions) for key in getattr(region, side)}


def _side(label, program, changes, members, strings):
    total = costs.measure(program)
    return {
        "label": label,
        "costs": {
            "ops": total.ops,
            "kernels": total.kernels,
            "bytes": total.bytes,
            "unknown": total.unknown,
        },
        "graphs": [
            _graph("" if graph is program.graph else graph.name, graph, changes, members, strings)
            for graph in program.graphs()
        ],
    }


def _graph(key, graph, changes, members, strings):
    number = {name: index for index, name in enumerate(graph.nodes)}
    return {
        "name": key,
        "arguments": [number[name] for name in graph.arguments],
        "results": [[number[name], port] for name, port in graph.results],
        "nodes": [
            _node(node, number, changes.get((key, node.name)), members.get((key, node.name)),
                  strings)
            for node in graph.nodes.values()
        ],
    }  # fmt: skip


def _node(node, number, change, region, strings):
    """Returns a node; what is absent or empty is left out."""
    entry = {
        "name": node.name,
        "op": node.op,
        "in": [[number[name], port] for name, port in node.inputs],
        "controls": [number[name] for name in node.controls],
        "out": [strings(str(tensor)) for tensor in node.outputs],
        "attrs": [strings(f"{name}: {text}") for name, text in node.attrs.items()],
        "calls": [list(call) for call in node.calls],
        "device": node.device and strings(node.device),
        "layout": node.attrs.get("data_format"),
        "source": node.source and strings(node.source),
        "handle": int(not node.inputs and any(t.dtype == "resource" for t in node.outputs)) or None,
        "region": region,
    }
    if change is not None:
        entry |= {"change": change.kind, "notes": list(change.notes)}
    return {name: value for name, value in entry.items() if value not in (None, "", [])}
