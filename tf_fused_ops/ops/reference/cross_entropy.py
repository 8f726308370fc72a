"""Cross entropy of logits, and numbers of classes or a number for each class."""

import tensorflow as tf

from tf_fused_ops.ops.reference.elementwise import wide


def sparse_softmax_cross_entropy(logits, labels):
    """log(sum of e^logits) - logits[label] over the last dimension.

    Returns:
        The loss; of each row the largest logit, and 1 / the sum of e^(logit - largest).
    """
    x = wide(logits)
    rows = tf.reshape(x, [tf.size(labels), tf.shape(x)[-1]])
    of_label = tf.gather(rows, tf.reshape(labels, [-1]), batch_dims=1)
    largest = tf.reduce_max(x, -1)
    total = tf.reduce_sum(tf.exp(x - largest[..., None]), -1)
    loss = tf.math.log(total) + (largest - tf.reshape(of_label, tf.shape(labels)))
    return [tf.cast(loss, logits.dtype), largest, 1 / total]


def sparse_softmax_cross_entropy_grad(dloss, logits, labels):
    """The gradient of the logits.

    Args:
        dloss: The gradient of the loss.
        logits: As in the forward function.
        labels: As in the forward function.
    """
    x = wide(logits)
    ones = tf.one_hot(labels, tf.shape(logits)[-1], dtype=x.dtype)
    gradient = (tf.nn.softmax(x) - ones) * wide(dloss)[..., None]
    return tf.cast(gradient, logits.dtype)


def softmax_cross_entropy(logits, labels):
    """The sum of labels * (log(sum of e^logits) - logits) over the last dimension.

    Returns:
        The loss; of each row the largest logit, and 1 / the sum of e^(logit - largest).
    """
    x = wide(logits)
    largest = tf.reduce_max(x, -1)
    below = x - largest[..., None]
    total = tf.reduce_sum(tf.exp(below), -1)
    loss = tf.reduce_sum(wide(labels) * (tf.math.log(total)[..., None] - below), -1)
    # Logits may be a single row beside labels of more.
    largest, total = (tf.broadcast_to(value, tf.shape(loss)) for value in (largest, total))
    return [tf.cast(loss, logits.dtype), largest, 1 / total]


def softmax_cross_entropy_grad(dloss, logits, labels):
    """The gradient of the logits, of labels that add up to one.

    Args:
        dloss: The gradient of the loss.
        logits: As in the forward function.
        labels: As in the forward function.
    """
    gradient = (tf.nn.softmax(wide(logits)) - wide(labels)) * wide(dloss)[..., None]
    return tf.cast(gradient, logits.dtype)
