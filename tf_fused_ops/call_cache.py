"""Finds the trace that a call of a function leads to by what its arguments are.

`tf.function` binds, casts and compares the types of all arguments in every call, which takes
several times as long as the runtime needs for a small graph.
"""

import functools

from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import (
    concrete_function,
    function_context,
    function_type_utils,
    polymorphic_function,
    tracing_compilation,
)
from tensorflow.python.framework import dtypes, ops

from tf_fused_ops import short_graphs
from tf_fused_ops.remapper import tracing

# Their traces depend on more than the dtype.
_HANDLES = (dtypes.resource.as_datatype_enum, dtypes.variant.as_datatype_enum)
_LITERALS = (bool, int, float, str, type(None))
_MOST_CALLS = 1024  # as many as TensorFlow keeps


class _Undescribed(Exception):
    """Only TensorFlow knows what such an argument leads to."""


def _describe(value, tensors):
    kind = type(value)
    if kind is ops.EagerTensor:
        dtype = value._datatype_enum()
        if dtype in _HANDLES:
            raise _Undescribed
        tensors.append(value)
        return dtype, value._shape_tuple()
    if kind in _LITERALS:
        return kind, value
    if kind is tuple or kind is list:
        return kind, tuple([_describe(item, tensors) for item in value])
    if kind is dict:
        return kind, tuple([(key, _describe(item, tensors)) for key, item in value.items()])
    raise _Undescribed


def describe(args, kwargs):
    """What decides which trace a call leads to.

    Returns:
        The description, which is hashable, and the tensors in the arguments; or None and None where
        an argument is no eager tensor, plain Python value or structure of them, or where a graph is
        being built.
    """
    if not context.executing_eagerly():
        return None, None
    tensors = []
    try:
        arguments = _describe(args, tensors), _describe(kwargs, tensors)
        description = arguments, function_context.make_function_context()
        hash(description)
    except (_Undescribed, TypeError):
        return None, None
    return description, tensors


@functools.cache
def _check_tensorflow():
    tracing.expect(polymorphic_function.Function, "_call", ("self",))
    tracing.expect(tracing_compilation, "trace_function", ("args", "kwargs", "tracing_options"))
    tracing.expect(
        function_type_utils, "canonicalize_function_inputs", ("args", "kwargs", "function_type")
    )
    tracing.expect(
        concrete_function.ConcreteFunction,
        "_call_flat",
        ("self", "tensor_inputs", "captured_inputs"),
    )


class _Call:
    """A trace, and the places of its inputs among the tensors of a call."""

    def __init__(self, trace, places):
        self._trace = trace
        self._places = places
        self._short = short_graphs.shorten(trace.graph)

    def __call__(self, tensors):
        trace = self._trace
        inputs = [tensors[place] for place in self._places]
        if self._short is None or not short_graphs.wanted():
            return trace._call_flat(inputs, trace.captured_inputs)
        outputs = self._short.run(inputs + trace.captured_inputs)
        return trace.function_type.pack_output(outputs)


class CallCache:
    """The traces of one function that calls have led to."""

    def __init__(self):
        _check_tensorflow()
        self._calls = {}

    def find(self, description):
        """What computes such a call's result from its tensors, or None."""
        return self._calls.get(description)

    def add(self, description, tensors, args, kwargs, options):
        """Keeps which trace TensorFlow has found for a call.

        Args:
            description: What `describe` returned for the call.
            tensors: The tensors that it returned.
            args: The arguments of the call by place.
            kwargs: The arguments of the call by name.
            options: The `TracingOptions` with which TensorFlow looked for the trace.
        """
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        # A tensor that is there twice does not show which of its places an input has.
        if description in self._calls or len(places) < len(tensors):
            return
        bound = function_type_utils.canonicalize_function_inputs(
            args, kwargs, options.polymorphic_type, options.default_values, options.is_pure
        )
        trace = tracing_compilation.trace_function(bound.args, bound.kwargs, options)
        inputs = trace.function_type.unpack_inputs(
            trace.function_type.bind(*bound.args, **bound.kwargs)
        )
        if len(self._calls) == _MOST_CALLS:
            self._calls.clear()
        # Other inputs are made of Python values or are default values of parameters.
        known = all(id(tensor) in places for tensor in inputs)
        self._calls[description] = (
            _Call(trace, [places[id(tensor)] for tensor in inputs]) if known else None
        )
