"""Cross entropy of logits and numbers of classes as one op, and its gradients."""

import tensorflow as tf

from tf_fused_ops._library import ops
from tf_fused_ops.ops import _arguments, _gradient, reference


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
    logits = _arguments.tensor("logits", logits)
    if logits.shape.rank == 0:
        raise ValueError("logits must have rank 1 or more; got a scalar")
    loss, _, _ = ops.tf_fused_ops_sparse_softmax_cross_entropy(
        logits=logits,
        labels=_arguments.integers("labels", labels),
        U=tf.float64 if logits.dtype == tf.float64 else tf.float32,
        name=name,
    )
    return loss


@tf.RegisterGradient("TfFusedOps>SparseSoftmaxCrossEntropy")
def _cross_entropy_gradient(op, dloss, dlargest, dinverse_sum):
    if not (_gradient.is_zero(dlargest) and _gradient.is_zero(dinverse_sum)):
        gradients = [dloss, dlargest, dinverse_sum]
        return _gradient.differentiate(reference.sparse_softmax_cross_entropy, op, gradients)
    logits, labels = op.inputs
    logits_grad = ops.tf_fused_ops_sparse_softmax_cross_entropy_grad(
        dloss=dloss,
        logits=logits,
        labels=labels,
        largest=op.outputs[1],
        inverse_sum=op.outputs[2],
    )
    return logits_grad, None


@tf.RegisterGradient("TfFusedOps>SparseSoftmaxCrossEntropyGrad")
def _cross_entropy_grad_gradient(op, gradient):
    # What the forward op kept follows from its arguments.
    def stock(dloss, logits, labels, largest, inverse_sum):
        return [reference.sparse_softmax_cross_entropy_grad(dloss, logits, labels)]

    return _gradient.differentiate(stock, op, [gradient])
