"""What functions compute, whatever the things in them are called."""

import hashlib


def fingerprint(graph):
    """Returns a digest of the op types, attributes and inputs behind each output of a function.

    Identity ops, which tracing adds as it likes, do not count.

    Args:
        graph: A FuncGraph.
    """
    known = {id(tensor): f"input {i}" for i, tensor in enumerate(graph.inputs)}
    for op in graph.get_operations():
        # An op of a loop may read what is made later.
        inputs = [known.get(id(tensor)) for tensor in op.inputs]
        if op.type == "Identity":
            known.setdefault(id(op.outputs[0]), inputs[0])
            continue
        attrs = [
            (name, _attribute(graph, value))
            for name, value in sorted(op.node_def.attr.items())
            if not name.startswith("_")
        ]
        # Not the inputs themselves: what is read in several places would be told in each.
        digest = hashlib.sha256(repr((op.type, attrs, inputs)).encode()).hexdigest()
        for tensor in op.outputs:
            known.setdefault(id(tensor), (digest, tensor.value_index))
    return tuple(known[id(tensor)] for tensor in graph.outputs)


def of_function(graph, name):
    """Returns the fingerprint of a function that an op of a graph calls, or None if the graph does
    not have it."""
    function = graph._get_function(name)
    return None if function is None else fingerprint(function.graph)


def _attribute(graph, value):
    called = of_function(graph, value.func.name) if value.HasField("func") else None
    return called or value.SerializeToString(deterministic=True)
