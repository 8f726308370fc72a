"""Hides replaced ops. An op cannot be deleted from a graph that is being traced, but it can be left
out of its listing.

A FunctionDef is made of the ops that `graph.get_operations` lists, so hidden ops are not part of
the function. Whether an op stays hidden is decided at each listing: a closure of a custom gradient
may come back for one.
"""


def hide(graph, ops):
    """Leaves ops out of `graph.get_operations` for as long as only other hidden ops use them.

    Args:
        graph: A tf.Graph.
        ops: Ops, consumers before producers.
    """
    hidden = getattr(graph, "_tfo_hidden", None)
    if hidden is None:
        hidden = graph._tfo_hidden = []
        all_operations = type(graph).get_operations

        def get_operations():
            outputs = {id(tensor) for tensor in getattr(graph, "outputs", ())}
            unused = set()
            for op in hidden:
                if (
                    not any(id(tensor) in outputs for tensor in op.outputs)
                    and all(user in unused for tensor in op.outputs for user in tensor.consumers())
                    and all(user in unused for user in op._control_outputs)
                ):
                    unused.add(op)
            return [op for op in all_operations(graph) if op not in unused]

        graph.get_operations = get_operations
    # Later rewrites replace ops that consume what earlier ones left, so they come first.
    hidden[:0] = ops
