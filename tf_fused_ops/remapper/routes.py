"""Routes: the order in which a search found the nodes of a pattern, and how it came to each."""

from typing import NamedTuple

from tf_fused_ops.remapper.pattern import Operand, Port


class Step(NamedTuple):
    """How to come to a node from those before it.

    Attributes:
        node: The pattern node.
        count: How many inputs its op has.
        order: The places of the node's inputs among those, None if they are as given.
        reader: The node that reads this one, if it is found that way.
        value: What this one reads, if it is found that way; without either a route begins here.
        place: The input, of the reader's op or of this node, that leads here.
    """

    node: int
    count: int
    order: tuple | None
    reader: int | None
    value: Operand | Port | None
    place: int


def record(nodes, view, found, start):
    """Returns the route to what a search found.

    Args:
        nodes: The pattern's nodes.
        view: The GraphView that was searched.
        found: The Binding that the search ended with.
        start: The Binding that it began with.

    Returns:
        A list of Step.
    """
    route, bound, operands = [], set(start.nodes), set(start.operands)
    readers = {}

    def enter(node):
        bound.add(node)
        order = found.orders.get(node)
        for place, value in enumerate(nodes[node].inputs):
            if isinstance(value, Operand):
                operands.add(value.name)
            elif isinstance(value, Port):
                readers.setdefault(value.node, (node, order[place] if order else place))

    def is_known(value):
        if isinstance(value, Port):
            return value.node in bound
        return isinstance(value, Operand) and value.name in operands

    for node in start.nodes:
        enter(node)
    for node, op in found.nodes.items():
        if node in bound:
            continue
        reader, place = readers.get(node, (None, 0))
        value = None
        if reader is None:
            known = ((v, i) for i, v in enumerate(nodes[node].inputs) if is_known(v))
            value, place = next(known, (None, 0))
        count, order = len(view.inputs[op]), found.orders.get(node)
        route.append(Step(node, count, order, reader, value, place))
        enter(node)
    return route
