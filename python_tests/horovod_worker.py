"""One process of a Horovod job: batch norm over all of them against one batch here."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import tf_fused_ops as tfo


def main():
    hvd.init()
    tfo.distribute.set_communicator(tfo.distribute.Horovod())
    for sizes in ((2, 2), (1, 5), (0, 3)):
        rng = np.random.default_rng(0)
        count = sum(sizes)
        x, dy = rng.normal(size=(2, count, 4, 3)) + np.arange(count).reshape(-1, 1, 1)
        x, dy = (tf.constant(value, tf.float32) for value in (x, dy))
        scale, offset, mean, variance = tf.constant(rng.uniform(1, 2, size=(4, 3)), tf.float32)

        def outputs_and_gradients(
            function, x, dy, moving=(mean, variance), vectors=(scale, offset)
        ):
            with tf.GradientTape() as tape:
                tape.watch([x, *vectors])
                y, *statistics = function(x, *vectors, *moving, activation="relu", momentum=0.5)
            gradients = tape.gradient(y, [x, *vectors], output_gradients=dy)
            return [y, gradients[0]], statistics, gradients[1:]

        tensors, statistics, vectors = outputs_and_gradients(tfo.batch_norm_act, x, dy)
        own = [tf.split(value, sizes)[hvd.rank()] for value in (x, dy)]
        expected = [tf.split(value, sizes)[hvd.rank()] for value in tensors]
        for run in (outputs_and_gradients, tf.function(outputs_and_gradients)):
            found, found_statistics, found_vectors = run(tfo.sync_batch_norm_act, *own)
            found_vectors = [hvd.allreduce(value, op=hvd.Sum) for value in found_vectors]
            pairs = zip(
                [*found, *found_statistics, *found_vectors],
                [*expected, *statistics, *vectors],
                strict=True,
            )
            for value, other in pairs:
                size = np.abs(other).max(initial=0)
                np.testing.assert_allclose(value, other, rtol=0, atol=4e-6 * size)
    print("equal")


if __name__ == "__main__":
    main()
