"""`accelerate`: Keras's fit, evaluate and predict, and KerasHub's generate, with fused ops."""

import functools
import warnings

import tensorflow as tf
from tensorflow.python.framework import func_graph, ops

from tf_fused_ops.remapper import RemapOptions, tracing

_STEPS = {
    "train_step": "train_function",
    "test_step": "test_function",
    "predict_step": "predict_function",
}
# What models of KerasHub that generate have, too, and what makes a function of it.
_GENERATION, _MAKE_GENERATION = "generate_step", "make_generate_function"
# What Keras asks where jit_compile is "auto".
_CHOICE_OF_JIT = "_resolve_auto_jit_compile"


def accelerate(model, enable=True, verbose=0, remap=None):
    """Makes `fit`, `evaluate`, `predict` and `train_on_batch` of a Keras model run fused ops, and
    `generate` if it is one of KerasHub's that generate text or images.

    Works before and after `compile`, for subclassed models and for models with a `train_step` of
    their own. Callbacks, metrics, `steps_per_execution`, `run_eagerly` (which runs stock ops),
    distribution strategies and `jit_compile` (which leaves nothing to fuse, and a warning says so)
    stay what they are; `jit_compile="auto"` chooses the fused ops, not XLA, if `compile` comes
    after. `generate`, for which models choose XLA when they are made, always runs fused ops.

        model.compile("adam", "sparse_categorical_crossentropy")
        tfo.accelerate(model, verbose=1)
        model.fit(images, labels)
        model.train_step.remap_reports  # what was fused, and why the rest was not

    Args:
        model: A `keras.Model`.
        enable: False gives the model back as it was.
        verbose: 1 prints, once for each of training, evaluation and prediction, what was fused.
        remap: A `tf_fused_ops.RemapOptions`, for instance to switch rules off.

    Returns:
        The model.

    Raises:
        TypeError: `model` is not a `keras.Model`.
        ValueError: Keras does not compute with TensorFlow.
        RuntimeError: The installed TensorFlow lacks the private functions that the rewriting hooks
            into.
    """
    import keras

    from tf_fused_ops import _keras

    _keras.check_backend("tf_fused_ops.accelerate")
    if not isinstance(model, keras.Model):
        raise TypeError(f"model must be a keras.Model; got {type(model).__name__}")
    generates = all(hasattr(model, name) for name in (_GENERATION, _MAKE_GENERATION))
    steps = _STEPS | ({_GENERATION: "generate_function"} if generates else {})
    for name in (*steps, _CHOICE_OF_JIT, _MAKE_GENERATION):
        _restore(model, name)
    if enable:
        tracing.install()
        for name in steps:
            session = tracing.Session(remap or RemapOptions(), False, [])
            _put(model, name, _remapped(model, name, session, verbose))
        _put(model, _CHOICE_OF_JIT, lambda: False)
        if generates:
            _put(model, _MAKE_GENERATION, _uncompiled(model, getattr(model, _MAKE_GENERATION)))
    for function in steps.values():
        # Keras makes them anew, from the steps, when they are needed.
        setattr(model, function, None)
    return model


def _uncompiled(model, make):
    """Returns a function that makes another one of the model as if XLA were not to compile it."""

    @functools.wraps(make)
    def made():
        chosen, model.jit_compile = model.jit_compile, False
        try:
            return make()
        finally:
            model.jit_compile = chosen

    return made


def _remapped(model, name, session, verbose):
    """Returns a step of the model that rewrites the graph in which it is traced."""
    original = getattr(model, name)

    @functools.wraps(original)
    def step(*args, **kwargs):
        graph = ops.get_default_graph()
        if not isinstance(graph, func_graph.FuncGraph):
            return original(*args, **kwargs)
        if tracing.session_of(graph) not in (None, session):
            # The model trains inside a function that rewrites its graph itself.
            return original(*args, **kwargs)
        # Not a function of its own: under a distribution strategy replicas could not meet in it.
        tracing.begin(graph, session)
        start = len(session.reports)
        outputs = tracing.finish(original(*args, **kwargs), session)
        if not start:
            _announce(f"tf_fused_ops: {name} of {model.name}", session.reports, verbose)
        return outputs

    step.remap_reports = session.reports
    return step


def _put(model, name, function):
    """Hides a method by a function of the instance."""
    # What the instance had, if anything, under the name of the class's method.
    function.tfo_replaced = vars(model).get(name)
    vars(model)[name] = function


def _restore(model, name):
    function = vars(model).get(name)
    if not hasattr(function, "tfo_replaced"):
        return
    if function.tfo_replaced is None:
        del vars(model)[name]
    else:
        vars(model)[name] = function.tfo_replaced


@tf.autograph.experimental.do_not_convert
def _announce(title, reports, verbose):
    """Says what was fused, if asked to, and warns where nothing could be."""
    skipped = {report.skipped for report in reports if report.skipped}
    if skipped:
        warnings.warn(
            f"{title} is left alone: {', '.join(sorted(skipped))}. Compile the model with "
            "jit_compile=False to fuse it.",
            stacklevel=2,
        )
    elif verbose:
        print(f"{title}: {_summary(reports)}")


def _summary(reports):
    counts, gradients = {}, 0
    for report in reports:
        gradients += sum(fusion.gradients for fusion in report.fused)
        for rule, count in report.counts().items():
            counts[rule] = counts.get(rule, 0) + count
    listed = ", ".join(f"{count} {rule}" for rule, count in sorted(counts.items()))
    total = f"{sum(counts.values())} fused, {gradients} with gradients"
    return f"{total}: {listed}" if listed else total
