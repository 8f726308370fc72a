"""Hides replaced ops. An op cannot be deleted from a graph that is being traced, but it can be left
out of its listing.

A FunctionDef is made of the ops that `graph.get_operations` lists, so hidden ops are not part of
the function. Whether an op stays hidden is decided at each listing: a closure of a custom gradient
may come back for one.
"""


def hide(graph, ops, successors=None):
    """Leaves ops out of `graph.get_operations` for as long as only other hidden ops use them.

    Args:
        graph: A tf.Graph.
        ops: Ops, consumers before producers; what is hidden already may be in another place now.
        successors: {one of `ops`: the op that takes effect in its stead}. The latter is listed in
            the place of the first of the former, since order is what tells TensorFlow which effects
            come first. Whoever comes to wait for one of these, say to return the variable
            that it has changed, waits for the latter.
    """
    hidden = getattr(graph, "_tfo_hidden", None)
    if hidden is None:
        hidden = graph._tfo_hidden = []
        graph._tfo_successors = {}
        all_operations = type(graph).get_operations

        def get_operations():
            replaced = set(hidden)
            for old, new in graph._tfo_successors.items():
                for user in old._control_outputs:
                    if user not in replaced:
                        replace_control_input(user, old, new)
            outputs = {id(tensor) for tensor in getattr(graph, "outputs", ())}
            unused = set()
            for op in hidden:
                if (
                    not any(id(tensor) in outputs for tensor in op.outputs)
                    and all(user in unused for tensor in op.outputs for user in tensor.consumers())
                    and all(user in unused for user in op._control_outputs)
                ):
                    unused.add(op)
            first = {new: old for old, new in reversed(graph._tfo_successors.items())}
            placed = {old: new for new, old in first.items()}
            listed = []
            for op in all_operations(graph):
                if op not in first:
                    listed += [placed[op], op] if op in placed else [op]
            return [op for op in listed if op not in unused]

        graph.get_operations = get_operations
    # Later rewrites replace ops that consume what earlier ones left, so they come first.
    hidden[:] = dict.fromkeys([*ops, *hidden])
    graph._tfo_successors |= successors or {}


def replace_control_input(op, old, new):
    """Makes an op wait for another op than before."""
    inputs = [new if other is old else other for other in op.control_inputs]
    op._remove_all_control_inputs()
    op._add_control_inputs(dict.fromkeys(inputs))
