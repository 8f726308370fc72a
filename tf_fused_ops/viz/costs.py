"""What a program costs, as far as its graph tells: ops, kernel launches, bytes between ops."""

import dataclasses

# Ops that hand on a buffer, name one or order others, and launch nothing.
_NO_KERNEL = frozenset(
    [
        "Const",
        "Placeholder",
        "PlaceholderWithDefault",
        "Identity",
        "IdentityN",
        "NoOp",
        "StopGradient",
        "PreventGradient",
        "ReadVariableOp",
        "VarHandleOp",
        "VariableV2",
        "_Arg",
        "_DeviceArg",
        "_Retval",
        "_DeviceRetval",
        "Shape",
        "ShapeN",
        "Size",
        "Rank",
        "Reshape",
        "Squeeze",
        "ExpandDims",
        "Snapshot",
        "_EagerConst",
        "HostConst",
        "Assert",
        "ControlTrigger",
        "EnsureShape",
        "Enter",
        "Exit",
        "Switch",
        "Merge",
        "NextIteration",
        "LoopCond",
    ]
)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Static costs; a function counts once per call and a loop's body once.

    Attributes:
        ops: Number of nodes.
        kernels: Number of nodes that launch a kernel.
        bytes: Bytes between ops: each tensor that a kernel makes is counted once for being written
            and once per kernel that reads it; constants, arguments and variables only for being
            read.
        unknown: Number of tensors of unknown shape, whose bytes are missing.
    """

    ops: int = 0
    kernels: int = 0
    bytes: int = 0
    unknown: int = 0

    def __add__(self, other):
        return Costs(*(a + b for a, b in zip(
            dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))  # fmt: skip


def launches(node):
    """Returns whether running a node launches a kernel of its own."""
    return node.op not in _NO_KERNEL and not node.calls


def measure(program):
    """Returns the Costs of a Program."""
    return _graph_costs(program, program.graph, {}, frozenset({program.graph.name}))


def _graph_costs(program, graph, known, stack):
    if graph.name in known:
        return known[graph.name]
    total = _own_costs(graph)
    for node in graph.nodes.values():
        for _, name in node.calls:
            if name in program.functions and name not in stack:
                body = program.functions[name]
                total += _graph_costs(program, body, known, stack | {name})
    known[graph.name] = total
    return total


def _own_costs(graph):
    kernels = [node for node in graph.nodes.values() if launches(node)]
    read = {}
    for node in kernels:
        for name, port in set(node.inputs):
            read[_origin(graph, name, port)] = read.get(_origin(graph, name, port), 0) + 1
    moved = unknown = 0
    for (name, port), readers in read.items():
        node = graph.nodes[name]
        tensor = node.outputs[port]
        if tensor.bytes is None:
            unknown += tensor.dtype not in ("resource", "variant")
        else:
            moved += tensor.bytes * (readers + launches(node))
    return Costs(len(graph.nodes), len(kernels), moved, unknown)


def _origin(graph, name, port):
    """Follows a tensor through ops that hand it on."""
    node = graph.nodes[name]
    while node.op in ("Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "Snapshot"):
        name, port = node.inputs[0]
        node = graph.nodes[name]
    return name, port
