"""Networks whose training step's memory is measured: layers one after the other."""

from tf_fused_ops.bench.cases import ConvCase, MatMulCase

POOL = "pool"  # the largest of 2x2, channels last

_ROWS = 4096
_MLP_BLOCK = (
    MatMulCase(m=_ROWS, k=512, n=2048, act="gelu_tanh"),
    MatMulCase(m=_ROWS, k=2048, n=512, act="none"),
)


def _vgg(batch, size, channels, widths):
    for width, count in widths:
        for _ in range(count):
            yield ConvCase(batch, (size, size), channels, width)
            channels = width
        yield POOL
        size //= 2


STACKS = {
    "mlp": _MLP_BLOCK * 12,
    "vgg": tuple(_vgg(16, 112, 3, ((64, 2), (128, 2), (256, 3)))),
    "tiny": tuple(_vgg(2, 8, 3, ((8, 2),))),
}
TITLES = {
    "mlp": "12 blocks of dense 512→2048, gelu, dense 2048→512; 4096 rows",
    "vgg": "conv 3x3 relu 2x64, 2x128, 3x256, pooled; 16x112x112 images",
    "tiny": "conv 3x3 relu 2x8, pooled; 2x8x8 images",
}
