"""The named cases that the benchmark times, in groups."""

import dataclasses
import fnmatch

from tf_fused_ops.bench.cases import BatchNormCase, ConvCase, MatMulCase, ResNet50Case

GROUPS = {
    "contraction": {
        "conv3x3_64": ConvCase(16, (56, 56), 64, 64),
        "conv3x3_256": ConvCase(16, (14, 14), 256, 256),
        "conv1x1_64_256": ConvCase(16, (56, 56), 64, 256, (1, 1)),
        "conv1x1_512_128": ConvCase(16, (28, 28), 512, 128, (1, 1)),
        "conv7x7_stem": ConvCase(8, (224, 224), 3, 64, (7, 7), (2, 2)),
        "matmul_gelu_tanh": MatMulCase(m=2048, k=768, n=3072, act="gelu_tanh"),
        "matmul_gelu_erf": MatMulCase(m=2048, k=768, n=3072, act="gelu_erf"),
        "matmul_small_gelu_tanh": MatMulCase(m=512, k=512, n=2048, act="gelu_tanh"),
    },
    "batch_norm": {
        "batch_norm_relu": BatchNormCase((16, 56, 56), 64),
        "batch_norm_add_relu": BatchNormCase((16, 56, 56), 256, side=True),
        "batch_norm_30_channels": BatchNormCase((8, 71, 71), 30),
        "batch_norm_512_channels": BatchNormCase((16, 14, 14), 512),
        "batch_norm_nchw": BatchNormCase((16, 56, 56), 64, layout="NCHW"),
    },
    "off_track": {
        "conv3x3_17_100": ConvCase(8, (28, 28), 17, 100),
        "conv3x3_stride2": ConvCase(16, (56, 56), 64, 128, strides=(2, 2)),
        "conv5x5": ConvCase(8, (28, 28), 64, 64, (5, 5)),
        "conv3x3_dilation2": ConvCase(8, (28, 28), 64, 64, dilations=(2, 2)),
        "conv3x3_batch1": ConvCase(1, (56, 56), 64, 64),
        "conv3x3_nchw": ConvCase(16, (56, 56), 64, 64, layout="NCHW"),
        "conv_tiny": ConvCase(2, (7, 7), 17, 33),
        "matmul_tiny": MatMulCase(m=17, k=64, n=33, act="gelu_tanh"),
        "matmul_skinny": MatMulCase(m=8, k=768, n=3072, act="gelu_tanh"),
        "matmul_tall": MatMulCase(m=50_000, k=100, n=17, act="gelu_erf"),
        "batch_norm_tiny": BatchNormCase((2, 7, 7), 17),
    },
    "model": {"resnet50": ResNet50Case()},
}
CASES = {name: case for group in GROUPS.values() for name, case in group.items()}


def group_of(name):
    """The group that a case is in."""
    return next(group for group, cases in GROUPS.items() if name in cases)


def select(patterns, dtype):
    """The cases whose name, or whose group's name, matches one of the patterns.

    Args:
        patterns: Sequence of names, in which * and ? are wildcards.
        dtype: "float32", "bfloat16", "float16" or "float64".

    Returns:
        A dict from name to case, in the table's order.

    Raises:
        ValueError: A pattern matches nothing.
    """
    chosen = set()
    for pattern in patterns:
        found = {
            name
            for name in CASES
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(group_of(name), pattern)
        }
        if not found:
            raise ValueError(f"'{pattern}' is none of {', '.join([*GROUPS, *CASES])}")
        chosen |= found
    return {
        name: dataclasses.replace(case, dtype=dtype)
        for name, case in CASES.items()
        if name in chosen
    }
