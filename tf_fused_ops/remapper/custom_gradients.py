"""Tells one overridden gradient of an op from another.

Every call of a custom gradient registers it under a name of its own, so names say nothing. What
does is the code, or for functions that were saved and loaded, the body: it is compared with what
TensorFlow's own custom gradients have for one.
"""

import functools
import inspect

import tensorflow as tf
from tensorflow.python.framework import func_graph, function_def_to_graph, ops

from tf_fused_ops.remapper.fingerprints import fingerprint

# Set where a custom gradient or gradient_override_map replaces the op's own gradient.
ATTRIBUTE = "_gradient_op_type"
# TensorFlow's functions with custom gradients that spellings are made of.
_STOCK = (tf.nn.silu,)


def identify(name):
    """Returns what tells a registered gradient from others.

    Args:
        name: The value of the attribute.

    Returns:
        A hashable; None for a custom gradient of another process, which is no gradient at all here.
    """
    if not name.startswith("CustomGradient"):
        return name
    try:
        registered = ops.gradient_registry.lookup(name)
    except LookupError:
        return None
    variables = inspect.getclosurevars(registered).nonlocals
    if "tape_grad_fn" in variables:
        made = inspect.getclosurevars(variables["tape_grad_fn"]).nonlocals
        return made["grad_fn"].__code__ if "grad_fn" in made else name
    body = getattr(variables.get("func"), "graph", None)
    return name if body is None else _identity_of_body(body)


def identify_in(library):
    """Returns a function like `identify` that also knows the gradients of a FunctionDefLibrary."""
    bodies = {f.signature.name: f for f in library.function}
    saved = {g.registered_op_type: g.gradient_func for g in library.registered_gradients}

    @functools.cache
    def identify_saved(name):
        if saved.get(name) not in bodies:
            return identify(name)
        body = function_def_to_graph.function_def_to_graph(bodies[saved[name]])
        return _identity_of_body(body)

    return identify_saved


def _identity_of_body(graph):
    """Returns the identity of the stock gradient with this body, or one of the body's own."""
    found = fingerprint(graph)
    dy = graph.inputs[0]
    if dy.dtype.is_floating:
        for index in range(len(_STOCK)):
            shape = None if dy.shape.rank is None else tuple(dy.shape)
            identity, expected = _stock_gradient(index, dy.dtype, shape)
            if found == expected:
                return identity
    return found


@functools.cache
def _stock_gradient(index, dtype, shape):
    """Returns the identity and the fingerprint of a stock custom gradient."""
    graph = func_graph.FuncGraph("stock")
    with graph.as_default():
        _STOCK[index](tf.compat.v1.placeholder(dtype, shape))
        op = next(op for op in graph.get_operations() if ATTRIBUTE in op.node_def.attr)
        name = op.get_attr(ATTRIBUTE).decode()
        # As tf.saved_model.save traces it.
        gradient = tf.function(ops.gradient_registry.lookup(name))
        body = gradient.get_concrete_function(None, *op.inputs).graph
    return identify(name), fingerprint(body)
