"""What a pass did: nodes removed, added and altered, edges rerouted, chains fused."""

import collections
import dataclasses

from tf_fused_ops.viz import costs
from tf_fused_ops.viz.model import Graph, Program

SAME, REMOVED, ADDED, ALTERED, REWIRED = "same", "removed", "added", "altered", "rewired"


@dataclasses.dataclass(frozen=True)
class Change:
    """What became of a node.

    Attributes:
        kind: SAME, REMOVED, ADDED, ALTERED (attributes or device) or REWIRED (only its inputs).
        notes: The differences in words.
    """

    kind: str = SAME
    notes: tuple = ()


@dataclasses.dataclass(frozen=True)
class Region:
    """A chain that was fused.

    Attributes:
        rule: The rule's name.
        before: (function name or "", node name) of the nodes that were replaced.
        after: The same of the nodes that replaced them.
        source: "file:line" of the user's code, or None.
        notes: The log's lines.
    """

    rule: str
    before: tuple
    after: tuple
    source: str | None = None
    notes: tuple = ()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two programs and how they differ.

    Attributes:
        before: The Program before.
        after: The Program after.
        changes_before: {(function name or "", node name): Change} of the nodes before; nodes that
            are the same are left out.
        changes_after: The same of the nodes after.
        regions: The fused chains.
    """

    before: Program
    after: Program
    changes_before: dict
    changes_after: dict
    regions: tuple

    def costs(self):
        """Returns the Costs before and after."""
        return costs.measure(self.before), costs.measure(self.after)

    def counts(self):
        """Returns {kind of change: number of nodes}."""
        before = collections.Counter(change.kind for change in self.changes_before.values())
        after = collections.Counter(change.kind for change in self.changes_after.values())
        kinds = (ALTERED, REWIRED, ADDED)
        return {REMOVED: before[REMOVED], **{kind: after[kind] for kind in kinds}}

    def op_counts(self):
        """Returns {op type: (number before, number after)} of the op types that differ."""
        old, new = (
            collections.Counter(n.op for g in p.graphs() for n in g.nodes.values())
            for p in (self.before, self.after)
        )
        return {op: (old[op], new[op]) for op in sorted(old | new) if old[op] != new[op]}


def compare(before, after, regions=()):
    """Compares two programs node by node.

    Nodes are the same if their names, graphs and op types are. Function bodies are paired by the
    calls that use them, because passes rename functions.

    Args:
        before: A Program.
        after: A Program.
        regions: Regions; members that are not in the programs are dropped.

    Returns:
        A Comparison.
    """
    walk = _Walk(before, after)
    walk.pair("", "")
    walk.finish()
    kept = (_restricted(region, before, after) for region in regions)
    return Comparison(
        before, after, walk.old, walk.new, tuple(r for r in kept if r.before or r.after)
    )


def body(program, name) -> Graph:
    """Returns the main graph for "", or else the body of a function."""
    return program.functions[name] if name else program.graph


def _restricted(region, before, after):
    def exist(program, members):
        graphs = {"": program.graph, **program.functions}
        return tuple((g, n) for g, n in members if g in graphs and n in graphs[g].nodes)

    return dataclasses.replace(
        region, before=exist(before, region.before), after=exist(after, region.after)
    )


class _Walk:
    """Compares graphs in pairs, beginning with the main ones."""

    def __init__(self, before, after):
        self.before, self.after = before, after
        self.old, self.new = {}, {}
        self.partners = {}
        self._seen = ({}, {})

    def pair(self, old_name, new_name):
        """Compares two graphs and those that are called from the same nodes in both."""
        if old_name in self._seen[0] or new_name in self._seen[1]:
            return
        self._seen[0][old_name] = self._seen[1][new_name] = True
        self.partners[new_name] = old_name
        old, new = body(self.before, old_name), body(self.after, new_name)
        for name, node in old.nodes.items():
            partner = new.nodes.get(name)
            if partner is None or partner.op != node.op:
                notes = (f"replaced by {partner.op}",) if partner else ()
                self.old[old_name, name] = Change(REMOVED, notes)
                if partner:
                    self.new[new_name, name] = Change(ADDED, (f"replaces {node.op}",))
                continue
            change = _altered(node, partner)
            if change.kind != SAME:
                self.old[old_name, name] = self.new[new_name, name] = change
            for (key, first), (other, second) in zip(node.calls, partner.calls, strict=False):
                known = first in self.before.functions and second in self.after.functions
                if key == other and known:
                    self.pair(first, second)
        for name in new.nodes.keys() - old.nodes.keys():
            self.new[new_name, name] = Change(ADDED)

    def finish(self):
        """Pairs what is left by name; functions without a partner are removed or added."""
        for name in self.before.functions.keys() & self.after.functions.keys():
            self.pair(name, name)
        sides = (
            (self.before, self._seen[0], self.old, Change(REMOVED)),
            (self.after, self._seen[1], self.new, Change(ADDED)),
        )
        for program, seen, changes, change in sides:
            for name in program.functions.keys() - seen.keys():
                changes.update({(name, node): change for node in program.functions[name].nodes})


def _altered(old, new):
    """Returns how a node of the same name and type differs."""
    functions = {key.partition("[")[0] for key, _ in old.calls + new.calls}
    notes = [
        f"{key}: {old.attrs.get(key, 'absent')} → {new.attrs.get(key, 'absent')}"
        for key in sorted((old.attrs.keys() | new.attrs.keys()) - functions)
        if old.attrs.get(key) != new.attrs.get(key)
    ]
    # A node without a device is placed sooner or later; that is no change.
    if old.device and old.device != new.device:
        notes.append(f"device: {old.device} → {new.device or 'none'}")
    kind = ALTERED if notes else SAME
    edges = _edge_notes(old, new)
    if edges and kind == SAME:
        kind = REWIRED
    return Change(kind, (*notes, *edges))


def _edge_notes(old, new):
    notes = []
    longest = max(len(old.inputs), len(new.inputs))
    pairs = zip(_padded(old.inputs, longest), _padded(new.inputs, longest), strict=True)
    for slot, (first, second) in enumerate(pairs):
        if first != second:
            notes.append(f"input {slot}: {_port(first)} → {_port(second)}")
    for name in sorted(set(old.controls) - set(new.controls)):
        notes.append(f"no longer waits for {name}")
    for name in sorted(set(new.controls) - set(old.controls)):
        notes.append(f"waits for {name}")
    return notes


def _padded(inputs, length):
    return [*inputs, *([None] * (length - len(inputs)))]


def _port(value):
    return "none" if value is None else f"{value[0]}:{value[1]}"


def infer_regions(comparison):
    """Finds what a pass of TensorFlow's fused: new ops named "Fused" and what they swallowed.

    Args:
        comparison: A Comparison of the program before and after the pass.

    Returns:
        A tuple of Regions.
    """
    walk = _Walk(comparison.before, comparison.after)
    walk.pair("", "")
    walk.finish()
    regions, taken = [], set()
    for new_name in ["", *comparison.after.functions]:
        old_name = walk.partners.get(new_name)
        if old_name is None:
            continue
        old = body(comparison.before, old_name)
        for node in body(comparison.after, new_name).nodes.values():
            change = comparison.changes_after.get((new_name, node.name), Change())
            if change.kind != ADDED or "Fused" not in node.op or node.name not in old.nodes:
                continue
            members = _swallowed(comparison, old_name, old, node, taken)
            taken.update(members)
            regions.append(
                Region(_fused_name(node), tuple(members), ((new_name, node.name),),
                       old.nodes[node.name].source)
            )  # fmt: skip
    return tuple(regions)


def _swallowed(comparison, graph_name, graph, node, taken):
    """Returns the removed nodes from a replaced node up to the inputs of what replaced it."""
    kept = {name for name, _ in node.inputs}
    stack, members = [node.name], []
    while stack:
        name = stack.pop()
        key = (graph_name, name)
        change = comparison.changes_before.get(key, Change())
        if change.kind != REMOVED or key in taken or key in members or graph.nodes[name].calls:
            continue
        members.append(key)
        stack.extend(name for name, _ in graph.nodes[name].inputs if name not in kept)
    return members


def _fused_name(node):
    fused = node.attrs.get("fused_ops", node.attrs.get("activation_mode", "")).strip("[]")
    return f"{node.op} ({fused})" if fused else node.op
