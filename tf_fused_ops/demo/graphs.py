"""What a traced function's graph consists of."""

from collections import Counter

# Bookkeeping that computes nothing.
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


def fused_chains(function):
    """Returns a Counter of what the last trace of a `tf_fused_ops.function` fused, in words."""
    chains = Counter()
    for fusion in function.remap_reports[-1].fused:
        chain = fusion.messages[0].split(":")[0].removeprefix("Fuse ")
        chains[chain + (", forward and backward" if fusion.gradients else "")] += 1
    return chains


def op_counts(concrete_function):
    """Returns a Counter of the op types of the nodes that compute."""
    types = (op.type for op in concrete_function.graph.get_operations())
    return Counter(op_type for op_type in types if op_type not in _PLUMBING)
