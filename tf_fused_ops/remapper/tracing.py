"""Hooks into TensorFlow's tracing, so that every graph traced under the decorator is rewritten.

Two functions of TensorFlow are wrapped, once, when the decorator is first used. Both are private,
hence small wrappers that pass everything through and do nothing unless an enclosing graph belongs
to the decorator:

* `func_graph.func_graph_from_py_func` traces every function graph there is: bodies of cond and
  while, map_fn, functions given to tf.data, nested tf.functions. The rewriting happens at the end
  of the Python function, while the graph is still the default one, so that control dependencies,
  captures and structured outputs remain TensorFlow's business.
* `function_context.make_function_context` makes the key under which a tf.function keeps its traces.
  A nested tf.function gets a key of its own, or a trace from inside the decorator would be reused
  outside of it and the other way round.
"""

import dataclasses
import functools
import inspect
import threading

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import function_context
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.ops import control_flow_util
from tensorflow.python.util import tf_decorator, tf_stack

from tf_fused_ops.remapper import log, recurrent, rewriter
from tf_fused_ops.remapper.report import Report

_lock = threading.Lock()
_installed = False


@dataclasses.dataclass(frozen=True, eq=False)
class Session:
    """What one decorated function wants, and where its reports go."""

    options: rewriter.RemapOptions
    jit_compile: bool
    reports: list


def install():
    """Installs the hooks; does nothing the second time.

    Raises:
        RuntimeError: This TensorFlow does not have the functions that are hooked.
    """
    global _installed
    with _lock:
        if _installed:
            return
        expect(func_graph, "func_graph_from_py_func", ("name", "python_func"))
        expect(function_context, "make_function_context", ("scope_type",))
        func_graph.func_graph_from_py_func = _traced(func_graph.func_graph_from_py_func)
        function_context.make_function_context = _keyed(function_context.make_function_context)
        _installed = True


def begin(graph, session):
    """Marks a graph that is about to be traced: it and the graphs inside it are to be rewritten."""
    graph._tfo_session = session
    recurrent.install(_options_of)


def mark_decorated(python_func):
    """Says that a Python function calls `begin` and `finish` itself."""
    python_func._tfo_decorated = True


@tf.autograph.experimental.do_not_convert
def finish(outputs, session):
    """Rewrites the graph that is being traced.

    Args:
        outputs: What the traced Python function returned.
        session: What the decorated function around it wants.

    Returns:
        The same structure, with replaced tensors.
    """
    graph = ops.get_default_graph()
    flat = tf.nest.flatten(outputs, expand_composites=True)
    tensors = [_leaving(value) for value in flat]
    tensors = [value for value in tensors if getattr(value, "graph", None) is graph]
    if session.jit_compile or _is_compiled(graph):
        # Its backward function, which XLA compiles, too, is traced outside of the context.
        graph._tfo_compiled = True
        report = Report(
            graph.name, skipped="it is compiled by XLA, which has no kernels for the fused ops"
        )
        log.vlog(log.FUSION, f"{graph.name} is left alone: {report.skipped}")
    else:
        new, report = rewriter.remap_graph(
            graph,
            tensors,
            session.options,
            in_program_order=graph._add_control_dependencies,
        )
        loops, left = recurrent.take_reports(graph)
        report.fused[:0], report.refused[:0] = loops, left
        changed = {id(a): b for a, b in zip(tensors, new, strict=True) if a is not b}
        if changed:
            flat = [changed.get(id(value), value) for value in flat]
            outputs = tf.nest.pack_sequence_as(outputs, flat, expand_composites=True)
    session.reports.append(report)
    return outputs


def _options_of(graph):
    """Returns the options of the nearest decorated graph around, or None where XLA compiles."""
    session = session_of(graph)
    left = session is None or session.jit_compile or _is_compiled(graph)
    return None if left else session.options


def _is_compiled(graph):
    """Returns whether XLA compiles a graph, as far as can be told while that is traced."""
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        return True
    while isinstance(graph, func_graph.FuncGraph):
        # The graph of a backward function may stand for itself, but reads its forward function's.
        read = [getattr(tensor, "graph", None) for tensor in graph.external_captures]
        if any(getattr(one, "_tfo_compiled", False) for one in (graph, *read)):
            return True
        graph = graph.outer_graph
    return False


def _leaving(value):
    """Returns the tensor or op by which a returned value keeps others alive."""
    return value.flow if isinstance(value, tf.TensorArray) else value


def session_of(graph):
    """Returns the session of the nearest decorated graph around, or None."""
    while isinstance(graph, func_graph.FuncGraph):
        session = getattr(graph, "_tfo_session", None)
        if session is not None:
            return session
        graph = graph.outer_graph
    return None


def _traced(original):
    @functools.wraps(original)
    def func_graph_from_py_func(name, python_func, *args, **kwargs):
        # A decorated function begins and finishes its own graph.
        session = session_of(ops.get_default_graph())
        if session is None or hasattr(python_func, "_tfo_decorated"):
            with tf_stack.CurrentModuleFilter():
                return original(name, python_func, *args, **kwargs)

        def traced(*func_args, **func_kwargs):
            return finish(python_func(*func_args, **func_kwargs), session)

        traced = tf_decorator.make_decorator(python_func, traced)
        with tf_stack.CurrentModuleFilter():
            return original(name, traced, *args, **kwargs)

    return func_graph_from_py_func


def _keyed(original):
    @functools.wraps(original)
    def make_function_context(scope_type=None):
        session = session_of(ops.get_default_graph())
        if session is not None:
            scope_type = ("tf_fused_ops", session.options, scope_type)
        return original(scope_type)

    return make_function_context


def expect(module, name, parameters):
    """Checks that a private function of TensorFlow is what the callers were written for.

    Args:
        module: The module or class that should have it.
        name: Its name.
        parameters: The names of its first parameters.

    Raises:
        RuntimeError: It is missing, or has other parameters.
    """
    function = getattr(module, name, None)
    found = tuple(inspect.signature(function).parameters) if callable(function) else ()
    if found[: len(parameters)] != parameters:
        raise RuntimeError(
            f"tf_fused_ops.function does not work with TensorFlow {tf.__version__}: "
            f"{module.__name__}.{name} is not the function it was written for"
        )
