"""Groups of replicas that train a model together, and what synchronised batch norm asks of them.

Under a strategy of `tf.distribute` there is nothing to set up. With Horovod, or anything else that
can add up tensors across processes:

    tfo.distribute.set_communicator(tfo.distribute.Horovod())
"""

import abc

import tensorflow as tf


class Communicator(abc.ABC):
    """A group of replicas, seen from one of them. All of them make the same calls in one order.

    Attributes:
        rank: This replica's number, from 0 on.
        size: How many replicas there are.
    """

    rank: int
    size: int

    @abc.abstractmethod
    def all_reduce(self, value):
        """Returns the sum of a float64 tensor over all replicas, which must be differentiable.

        Raises:
            tf.errors.OpError: A replica is gone, or did not call within the collective's timeout.
        """

    def all_gather(self, value):
        """Returns the tensors of all replicas, which have one shape, stacked in order of rank.

        Every replica adds its own slot to zeros, which is exact: one round, where an all-gather of
        tf.distribute or Horovod exchanges sizes first.
        """
        paddings = [[self.rank, self.size - 1 - self.rank], *([[0, 0]] * value.shape.rank)]
        slots = tf.pad(value[tf.newaxis], paddings)
        return tf.ensure_shape(self.all_reduce(slots), [self.size, *value.shape])


class ReplicaContext(Communicator):
    """The replicas of a `tf.distribute` strategy; timeouts are those of the strategy.

    Args:
        context: A `tf.distribute.ReplicaContext`.
    """

    def __init__(self, context):
        self._context = context
        self.rank = context.replica_id_in_sync_group
        self.size = context.num_replicas_in_sync

    def all_reduce(self, value):
        """Returns the sum of a tensor over all replicas."""
        return self._context.all_reduce(tf.distribute.ReduceOp.SUM, value)


class Horovod(Communicator):
    """The processes of a Horovod job, after `hvd.init()`.

    Raises:
        ImportError: Horovod is not installed.
        ValueError: Horovod has not been initialised.
    """

    def __init__(self):
        import horovod.tensorflow as hvd

        self._hvd = hvd
        self.rank = hvd.rank()
        self.size = hvd.size()

    def all_reduce(self, value):
        """Returns the sum of a tensor over all processes."""
        return self._hvd.allreduce(value, op=self._hvd.Sum)


_default = None


def set_communicator(communicator):
    """Sets the group that synchronised batch norm uses outside of `tf.distribute` strategies.

    Functions that have been traced keep the group of that time.

    Args:
        communicator: A `Communicator`, or None for none.

    Raises:
        TypeError: It is something else.
    """
    global _default
    if communicator is not None:
        check_communicator(communicator)
    _default = communicator


def check_communicator(communicator):
    """Raises a TypeError if the argument `communicator` is not a `Communicator`."""
    if not isinstance(communicator, Communicator):
        raise TypeError(
            "communicator must be a tf_fused_ops.distribute.Communicator; got "
            f"{type(communicator).__name__}"
        )


def current():
    """Returns the group that the calling code belongs to, or None.

    It is that of the strategy in whose replica context the code runs, otherwise that of
    `set_communicator`.
    """
    context = tf.distribute.get_replica_context()
    if context is not None and context.num_replicas_in_sync > 1:
        return ReplicaContext(context)
    return _default
