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


def _in_order(graph):
    """Yields every op after those it reads; the graph lists fused ops last."""
    done = set()
    for root in graph.get_operations():
        stack = [root]
        while stack:
            op = stack[-1]
            waiting = [tensor.op for tensor in op.inputs if tensor.op not in done]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            if op not in done:
                done.add(op)
                yield op


def computing_nodes(concrete_function):
    """Returns {node name: (op type, names of the computing nodes it reads)}, inputs first.

    Bookkeeping nodes are left out and the edges that run through them are joined.
    """
    sources = {}
    nodes = {}
    for op in _in_order(concrete_function.graph):
        read = []
        for tensor in op.inputs:
            read.extend(name for name in sources[tensor.op.name] if name not in read)
        if op.type in _PLUMBING:
            sources[op.name] = read
        else:
            sources[op.name] = [op.name]
            nodes[op.name] = (op.type, read)
    return nodes


def fused_chains(function):
    """Returns a Counter of what the last trace of a `tf_fused_ops.function` fused, in words."""
    chains = Counter()
    for fusion in function.remap_reports[-1].fused:
        chain = fusion.messages[0].split(":")[0].removeprefix("Fuse ")
        chains[chain + (", forward and backward" if fusion.gradients else "")] += 1
    return chains


def op_counts(concrete_function):
    """Returns a Counter of the op types of the computing nodes."""
    return Counter(op_type for op_type, _ in computing_nodes(concrete_function).values())
