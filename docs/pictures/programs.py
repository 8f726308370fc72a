"""The programs in this folder's pictures; `python docs/pictures/programs.py` draws them again."""

from pathlib import Path

import tensorflow as tf

from tf_fused_ops import viz

FOLDER = Path(__file__).parent


def conv_bias_relu(x, w, b):
    return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b))


def conv_bn_relu(x, w, scale, offset, mean, variance):
    z = tf.nn.conv2d(x, w, 1, "SAME")
    y, *_ = tf.compat.v1.nn.fused_batch_norm(z, scale, offset, mean, variance, is_training=False)
    return tf.nn.relu(y)


def matmul_bias_gelu_tanh(a, w, b):
    return tf.nn.gelu(tf.nn.bias_add(tf.matmul(a, w), b), approximate=True)


def matmul_bias_gelu_erf(a, w, b):
    return tf.nn.gelu(tf.nn.bias_add(tf.matmul(a, w), b), approximate=False)


def batch_norm_relu_with_gradient(x, scale, offset, dy):
    with tf.GradientTape() as tape:
        tape.watch([x, scale, offset])
        y, *_ = tf.compat.v1.nn.fused_batch_norm(x, scale, offset, is_training=True)
        y = tf.nn.relu(y)
    return tape.gradient(y, [x, scale, offset], output_gradients=dy)


class ResNet50Step:
    """A train step of Keras's ResNet50, images of 64x64 in batches of 4."""

    def __init__(self):
        self.model = tf.keras.applications.ResNet50(
            weights=None, input_shape=(64, 64, 3), classifier_activation=None
        )
        self.optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
        self.optimizer.build(self.model.trainable_variables)

    def train_step(self, images, labels):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=labels, logits=self.model(images, training=True)
            )
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        return loss


IMAGES = [8, 28, 28, 16]
VECTOR = [16]
DENSE = ([32, 128], [128, 512], [512])
PICTURES = {
    conv_bias_relu: (IMAGES, [3, 3, 16, 32], [32]),
    conv_bn_relu: (IMAGES, [3, 3, 16, 16], VECTOR, VECTOR, VECTOR, VECTOR),
    matmul_bias_gelu_tanh: DENSE,
    matmul_bias_gelu_erf: DENSE,
    batch_norm_relu_with_gradient: (IMAGES, VECTOR, VECTOR, IMAGES),
}


def main():
    """Draws all pictures."""
    for function, shapes in PICTURES.items():
        specs = [tf.TensorSpec(shape) for shape in shapes]
        viz.draw(function, FOLDER / f"{function.__name__}.svg", input_signature=specs)
    specs = [tf.TensorSpec(shape) for shape in DENSE]
    path = FOLDER / "matmul_bias_gelu_tanh_remap.svg"
    viz.draw(matmul_bias_gelu_tanh, path, "remap", input_signature=specs)
    specs = [tf.TensorSpec([4, 64, 64, 3]), tf.TensorSpec([4], tf.int32)]
    path = FOLDER / "resnet50_train_step.svg"
    viz.draw(ResNet50Step().train_step, path, input_signature=specs, title="ResNet50 train step")


if __name__ == "__main__":
    main()
