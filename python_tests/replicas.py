"""Replicas as threads of one process, which compute eagerly."""

import concurrent.futures
import threading

import tensorflow as tf

from tf_fused_ops import distribute


class Thread(distribute.Communicator):
    """One of several threads that meet at a barrier, twice for every sum."""

    def __init__(self, rank, barrier, slots):
        self.rank, self.size = rank, len(slots)
        self._barrier, self._slots = barrier, slots

    def all_reduce(self, value):
        @tf.custom_gradient
        def total(value):
            self._slots[self.rank] = value
            self._barrier.wait(60)
            result = tf.add_n(self._slots)
            self._barrier.wait(60)
            return result, self.all_reduce

        return total(value)


class Alone(distribute.Communicator):
    """A group of one, which works in graphs too."""

    rank, size = 0, 1

    def all_reduce(self, value):
        return tf.identity(value)


def run(size, function):
    """Returns the list of function(communicator), called in `size` threads."""
    barrier, slots = threading.Barrier(size), [None] * size

    def replica(rank):
        try:
            return function(Thread(rank, barrier, slots))
        except BaseException:
            barrier.abort()
            raise

    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        return list(pool.map(replica, range(size)))
