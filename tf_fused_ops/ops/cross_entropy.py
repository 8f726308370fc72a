"""Cross entropy of logits and labels as one op, and its gradients."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _gradient, reference
from tf_fused_ops.ops.attention import unbroadcast


def sparse_softmax_cross_entropy(labels, logits, name=None):
    """Computes log(sum of e^logits) - logits[label] over the last dimension in one pass.

    As `tf.nn.sparse_softmax_cross_entropy_with_logits`, which computes the gradient along with the
    loss and keeps it. This op keeps two numbers for each label; its gradient computes the softmax
    again from the logits. On GPUs for all dtypes but float64.

    Args:
        labels: Tensor [...], numbers of classes; int32 or int64. On a GPU the loss and the gradient
            are NaN where one is no class, as in TensorFlow's op.
        logits: Tensor [..., classes]; float16, bfloat16, float32 or float64.
        name: A name for the operation.

    Returns:
        Tensor of labels' shape and logits' dtype.

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit, or, on a CPU, a label is no class.
    """
    logits = _logits(logits)
    labels = _arguments.integers("labels", labels)
    return _loss(ops.tf_fused_ops_sparse_softmax_cross_entropy, labels, logits, name)


def softmax_cross_entropy(labels, logits, name=None):
    """Computes the sum of labels * (log(sum of e^logits) - logits) in one pass.

    Over the last dimension, as `tf.nn.softmax_cross_entropy_with_logits`, which computes the
    gradient along with the loss and keeps it. This op keeps two numbers for each row of logits; its
    gradient computes the softmax again from the logits. Labels have a gradient, too; that of the
    logits is the one of labels that add up to one, as in TensorFlow's op. On CPUs only.

    Args:
        labels: Tensor [..., classes] of logits' shape and dtype, the probability of each class.
        logits: Tensor [..., classes]; float16, bfloat16, float32 or float64. Where both are
            matrices, either may have a single row, which stands for all.
        name: A name for the operation.

    Returns:
        Tensor [...] of logits' dtype.

    Raises:
        ValueError: An argument does not fit, as far as that is known before running.
        tf.errors.InvalidArgumentError: An argument does not fit.
    """
    logits = _logits(logits)
    labels = _arguments.tensor_like("labels", labels, logits.dtype, "logits")
    return _loss(ops.tf_fused_ops_softmax_cross_entropy, labels, logits, name)


def _logits(value):
    logits = _arguments.tensor("logits", value)
    if logits.shape.rank == 0:
        raise ValueError("logits must have rank 1 or more; got a scalar")
    return logits


def _loss(op, labels, logits, name):
    wide = tf.float64 if logits.dtype == tf.float64 else tf.float32
    loss, _, _ = op(logits=logits, labels=labels, U=wide, name=name)
    return loss


def _logits_gradient(op, gradients, function, gradient_op):
    """Returns the gradient of the logits by all outputs.

    Args:
        op: The forward operation, as a gradient function receives it.
        gradients: One an output: those of the loss and of what the gradient op reads again.
        function: What the operation computes, in stock ops.
        gradient_op: Runs the gradient op.
    """
    dloss, *of_kept = gradients
    logits, labels = op.inputs
    _, largest, inverse_sum = op.outputs
    found = gradient_op(
        dloss=dloss, logits=logits, labels=labels, largest=largest, inverse_sum=inverse_sum
    )
    if all(map(_gradient.is_zero, of_kept)):
        return found
    return found + _gradient.differentiate(function, op, [None, *of_kept])[0]


@tf.RegisterGradient("TfFusedOps>SparseSoftmaxCrossEntropy")
def _sparse_gradient(op, *gradients):
    gradient_op = ops.tf_fused_ops_sparse_softmax_cross_entropy_grad
    function = reference.sparse_softmax_cross_entropy
    return _logits_gradient(op, gradients, function, gradient_op), None


@tf.RegisterGradient("TfFusedOps>SparseSoftmaxCrossEntropyGrad")
def _sparse_grad_gradient(op, gradient):
    return _grad_gradient(reference.sparse_softmax_cross_entropy_grad, op, gradient)


@tf.RegisterGradient("TfFusedOps>SoftmaxCrossEntropy")
def _dense_gradient(op, *gradients):
    logits, labels = op.inputs

    def gradient_op(**arguments):
        return _of(logits, ops.tf_fused_ops_softmax_cross_entropy_grad(**arguments))

    function, (of_logits, of_labels) = reference.softmax_cross_entropy, _gradient.wanted(op)
    return (
        _logits_gradient(op, gradients, function, gradient_op) if of_logits else None,
        _of(labels, _labels_gradient(op, gradients[0])) if of_labels else None,
    )


def _labels_gradient(op, dloss):
    """Returns the gradient of labels that are a number for each class, -log_softmax * dloss."""
    logits = op.inputs[0]
    _, largest, inverse_sum = op.outputs
    below = tf.cast(logits, largest.dtype) - largest[..., None]
    log_softmax = below + tf.math.log(inverse_sum)[..., None]
    return tf.cast(-log_softmax * tf.cast(dloss, largest.dtype)[..., None], logits.dtype)


def _of(tensor, gradient):
    """Returns the gradient of logits or labels, which may be a single row, given that of all."""
    shape = tensor.shape
    if shape.rank is not None and (shape.rank != 2 or shape[0] not in (None, 1)):
        return gradient
    return unbroadcast(gradient, tensor)


@tf.RegisterGradient("TfFusedOps>SoftmaxCrossEntropyGrad")
def _dense_grad_gradient(op, gradient):
    return _grad_gradient(reference.softmax_cross_entropy_grad, op, gradient)


def _grad_gradient(function, op, gradient):
    # What the forward op kept follows from its arguments.
    def stock(dloss, logits, labels, largest, inverse_sum):
        return [function(dloss, logits, labels)]

    return _gradient.differentiate(stock, op, [gradient])
