"""What a traced function's graph consists of, for counting and for drawing."""

from collections import Counter

# Bookkeeping that computes nothing; left out so that the computation can be seen.
_PLUMBING = frozenset(
    ["Const", "Identity", "NoOp", "Placeholder", "ReadVariableOp", "AssignVariableOp", "Shape"]
)
_NAMESPACE = "TfFusedOps>"


def is_fused(op_type):
    """Tells whether an op type is one of this package's."""
    return op_type.startswith(_NAMESPACE)


def short_name(op_type):
    """Returns the op type without this package's namespace."""
    return op_type.removeprefix(_NAMESPACE)


def computing_nodes(concrete_function):
    """Returns {node name: (op type, names of the computing nodes it reads)}, in graph order.

    Bookkeeping nodes are left out and the edges that run through them are joined.
    """
    sources = {}
    nodes = {}
    for op in concrete_function.graph.get_operations():
        read = []
        for tensor in op.inputs:
            read.extend(name for name in sources.get(tensor.op.name, ()) if name not in read)
        if op.type in _PLUMBING:
            sources[op.name] = read
        else:
            sources[op.name] = [op.name]
            nodes[op.name] = (op.type, read)
    return nodes


def op_counts(concrete_function):
    """Returns a Counter of the op types of the computing nodes."""
    return Counter(op_type for op_type, _ in computing_nodes(concrete_function).values())
