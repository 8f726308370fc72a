"""The decorator `tf_fused_ops.function`: tf.function with fused ops."""

import dataclasses

from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.profiler import trace
from tensorflow.python.util import deprecation, tf_decorator, tf_stack, traceback_utils

from tf_fused_ops import call_cache
from tf_fused_ops.remapper import RemapOptions, tracing

# As many calls without tracing as TensorFlow looks back, and more.
_COUNTED_CALLS = 16


@traceback_utils.filter_traceback
def _raise_filtered(error):
    raise error


class Function(polymorphic_function.Function):
    """A tf.function whose graphs are rewritten with fused ops as they are traced.

    Attributes:
        remap_reports: A list of `tf_fused_ops.remapper.Report`, one per traced graph in the order
            of tracing; graphs of control flow and of nested functions come before the one that
            contains them.
    """

    def __init__(self, python_function, name, remap=None, **kwargs):
        tracing.install()
        super().__init__(python_function, name, **kwargs)
        self._remap = remap or RemapOptions()
        self.remap_reports = []
        self._calls = call_cache.CallCache()
        self._known_calls = 0  # since the last that TensorFlow knows of

    def __call__(self, *args, **kwargs):
        # What TensorFlow does around a call takes as long as a small graph.
        if not self._run_functions_eagerly and not trace.enabled():
            description, tensors = call_cache.describe(args, kwargs)
            found = self._calls.find(description)
            if found is not None:
                self._known_calls += 1
                try:
                    return found(tensors)
                except Exception as error:
                    _raise_filtered(error)
        self._count_known_calls()
        return super().__call__(*args, **kwargs)

    def _count_known_calls(self):
        """Tells TensorFlow, which warns where too few calls go without tracing, of some of them."""
        manager = polymorphic_function._frequent_tracing_detector_manager
        for _ in range(min(self._known_calls, _COUNTED_CALLS)):
            manager.called_without_tracing(self._key_for_call_stats)
        self._known_calls = 0

    def _call(self, *args, **kwargs):
        description, tensors = call_cache.describe(args, kwargs)
        found = self._calls.find(description)
        if found is not None:
            return found(tensors)
        traced = self.experimental_get_tracing_count()
        result = super()._call(*args, **kwargs)
        if description is not None and self.experimental_get_tracing_count() == traced:
            options = (
                self._no_variable_creation_config
                if self._created_variables
                else self._variable_creation_config
            )
            self._calls.add(description, tensors, args, kwargs, options)
        return result

    def _generate_tracing_options(self, fn, scope_type):
        # The seam where TensorFlow has wrapped the user's function (autograph, variable creation)
        # but not traced it.
        options = super()._generate_tracing_options(fn, scope_type)
        session = tracing.Session(self._remap, bool(self._jit_compile), self.remap_reports)
        traced = options.python_function

        def rewritten(*args, **kwargs):
            graph = ops.get_default_graph()
            if not isinstance(graph, func_graph.FuncGraph):
                return traced(*args, **kwargs)
            tracing.begin(graph, session)
            with tf_stack.CurrentModuleFilter():
                outputs = traced(*args, **kwargs)
            return tracing.finish(outputs, session)

        tracing.mark_decorated(rewritten)
        return dataclasses.replace(
            options, python_function=tf_decorator.make_decorator(traced, rewritten)
        )

    def _clone(self, python_function):
        clone = type(self)(
            python_function or self._python_function,
            self._name,
            remap=self._remap,
            input_signature=self.input_signature,
            autograph=self._autograph,
            jit_compile=self._jit_compile,
            reduce_retracing=self._reduce_retracing,
            experimental_attributes=self._attributes,
            experimental_autograph_options=self._experimental_autograph_options,
        )
        clone._shared_rendezvous = self._shared_rendezvous
        return clone

    def __get__(self, instance, owner):
        bound = super().__get__(instance, owner)
        if isinstance(bound, Function):
            bound._remap = self._remap
        return bound


@deprecation.deprecated_args(
    None, "experimental_compile is deprecated, use jit_compile instead", "experimental_compile"
)
@deprecation.deprecated_args(
    None,
    "experimental_relax_shapes is deprecated, use reduce_retracing instead",
    "experimental_relax_shapes",
)
@deprecation.deprecated_args(
    None, "experimental_follow_type_hints is deprecated", "experimental_follow_type_hints"
)
def function(
    func=None,
    input_signature=None,
    autograph=True,
    jit_compile=None,
    reduce_retracing=False,
    experimental_implements=None,
    experimental_autograph_options=None,
    experimental_attributes=None,
    experimental_relax_shapes=None,
    experimental_compile=None,
    experimental_follow_type_hints=None,
    *,
    remap=None,
):
    """Compiles a function into a TensorFlow graph and replaces chains of ops in it by fused ops.

    A drop-in for `tf.function`: same arguments, same kind of object. Chains such as convolution,
    bias and activation become one op, in inference, where gradients are taken outside the function,
    and where they are taken inside it.

        @tfo.function
        def step(images, labels):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(images) - labels))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        step(images, labels)
        print(step.remap_reports[-1])  # what was fused, and why the rest was not

    With `jit_compile=True` the graph is left alone, since XLA has no kernels for the fused ops.

    Args:
        func: As for `tf.function`.
        input_signature: As for `tf.function`.
        autograph: As for `tf.function`.
        jit_compile: As for `tf.function`.
        reduce_retracing: As for `tf.function`.
        experimental_implements: As for `tf.function`.
        experimental_autograph_options: As for `tf.function`.
        experimental_attributes: As for `tf.function`.
        experimental_relax_shapes: Deprecated; use `reduce_retracing`.
        experimental_compile: Deprecated; use `jit_compile`.
        experimental_follow_type_hints: Deprecated.
        remap: A `tf_fused_ops.remapper.RemapOptions`, for instance to switch rules off.

    Returns:
        A `Function`, or a decorator that makes one if `func` is None.

    Raises:
        ValueError: As for `tf.function`.
        RuntimeError: The installed TensorFlow lacks the private functions that the rewriting hooks
            into.
    """
    if jit_compile is None and polymorphic_function.JIT_COMPILE_FUNCTIONS:
        jit_compile = True
    jit_compile = deprecation.deprecated_argument_lookup(
        "jit_compile", jit_compile, "experimental_compile", experimental_compile
    )

    def decorated(inner):
        compiled = Function(
            inner,
            getattr(inner, "__name__", "function"),
            remap=remap,
            input_signature=input_signature,
            autograph=autograph,
            jit_compile=jit_compile,
            reduce_retracing=reduce_retracing or bool(experimental_relax_shapes),
            experimental_implements=experimental_implements,
            experimental_autograph_options=experimental_autograph_options,
            experimental_attributes=experimental_attributes,
        )
        return tf_decorator.make_decorator(inner, compiled, decorator_name="tf_fused_ops.function")

    return decorated if func is None else decorated(func)
