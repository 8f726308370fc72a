"""What functions compute, whatever the things in them are called."""


def fingerprint(graph):
    """Returns a function's outputs as nested tuples of op types, attributes and inputs.

    Identity ops, which tracing adds as it likes, do not count.

    Args:
        graph: A FuncGraph.
    """
    known = {id(tensor): ("input", i) for i, tensor in enumerate(graph.inputs)}

    def describe(tensor):
        if tensor.op.type == "Identity":
            return describe(tensor.op.inputs[0])
        if id(tensor) not in known:
            attrs = tuple(
                (name, of_function(graph, value.func.name) if value.HasField("func") else
                 value.SerializeToString(deterministic=True))
                for name, value in sorted(tensor.op.node_def.attr.items())
                if not name.startswith("_")
            )  # fmt: skip
            inputs = tuple(map(describe, tensor.op.inputs))
            known[id(tensor)] = (tensor.op.type, attrs, inputs, tensor.value_index)
        return known[id(tensor)]

    return tuple(map(describe, graph.outputs))


def of_function(graph, name):
    """Returns the fingerprint of a function that an op of a graph calls."""
    return fingerprint(graph._get_function(name).graph)
