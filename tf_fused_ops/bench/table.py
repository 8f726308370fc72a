"""The named cases that the benchmark times, in groups."""

import dataclasses
import fnmatch
import re

from tf_fused_ops.bench import drawn
from tf_fused_ops.bench.cases import (
    MODES,
    ApplicationCase,
    BatchNormCase,
    ConvCase,
    ConvTransposeCase,
    DecoderCase,
    MatMulCase,
    QuantizedCase,
    RecurrentCase,
    RuleCase,
    WeightOnlyCase,
)

_CHANNELS = (128,)
_IMAGES = (8, 28, 28, 128)
_FILTERS = (3, 3, 128, 128)
_CONV_MACS = 8 * 28 * 28 * 9 * 128 * 128
# What a normalization with given statistics takes: scale, offset, mean, variance.
_VECTORS = [_CHANNELS] * 4
_TOKENS = (16, 128, 256)
_HIDDEN = (16, 128, 1024)
_WEIGHTS = (256, 1024)
_HEADS = (16, 128, 8, 32)
_TOKEN_MACS = 16 * 128 * 256 * 1024
# Layers, width, heads, those of keys, hidden width, positions, steps.
_DECODER = (4, 768, 12, 4, 2048, 1024, 32)


def _rule(family, *shapes, result=None, **fields):
    """A row of the group "rules"; a family with a second summand takes one more input."""
    result = result or shapes[0]
    more = (result,) if family.endswith("_add") else ()
    return {f"rule_{family}": RuleCase(family, (*shapes, *more), result, **fields)}


def _alone(rows):
    """The rows of families with their backward pass alone."""
    # Of products, that is fused for such activations only.
    acts = {name: case.act if "conv" in name else "gelu_erf" for name, case in rows.items()}
    return {
        f"{name}_grad": dataclasses.replace(case, act=acts[name], alone=True)
        for name, case in rows.items()
        if case.family != "act" or case.act == acts[name]
    }


def _both(family, *shapes, **fields):
    """The rows of a family and of the same with a second summand."""
    return _rule(family, *shapes, **fields) | _rule(f"{family}_add", *shapes, **fields)


_RULES = {
    **_both("conv2d", _IMAGES, _FILTERS, macs=_CONV_MACS),
    **_rule("conv2d_bias_add", _IMAGES, _FILTERS, _CHANNELS, macs=_CONV_MACS),
    **_rule("grouped_conv2d", _IMAGES, (3, 3, 16, 128), macs=_CONV_MACS // 8, act="none"),
    **_rule("trained_conv2d", _IMAGES, _FILTERS, macs=_CONV_MACS, act="none", trained=True),
    **_rule("pad_conv2d", _IMAGES, _FILTERS, result=(8, 14, 14, 128), macs=_CONV_MACS // 4),
    **_rule(
        "pad_conv2d_bias",
        _IMAGES,
        _FILTERS,
        _CHANNELS,
        result=(8, 14, 14, 128),
        macs=_CONV_MACS // 4,
    ),
    **_rule("conv1d", (16, 512, 128), (5, 128, 128), macs=16 * 512 * 5 * 128 * 128, act="silu"),
    **_rule("pad_conv1d", (16, 512, 128), (5, 128, 128), macs=16 * 512 * 5 * 128 * 128, act="silu"),
    **_rule(
        "row_conv2d_bias",
        (16, 1, 512, 128),
        (1, 5, 128, 128),
        _CHANNELS,
        result=(16, 512, 128),
        macs=16 * 512 * 5 * 128 * 128,
    ),
    **_rule(
        "pad_conv1d_bias",
        (16, 512, 128),
        (5, 128, 128),
        _CHANNELS,
        macs=16 * 512 * 5 * 128 * 128,
    ),
    **_both(
        "conv1d_bias",
        (16, 512, 128),
        (5, 128, 128),
        _CHANNELS,
        macs=16 * 512 * 5 * 128 * 128,
    ),
    **_rule(
        "conv2d_transpose",
        _IMAGES,
        (4, 4, 64, 128),
        result=(8, 56, 56, 64),
        macs=8 * 28 * 28 * 16 * 64 * 128,
        act="silu",
    ),
    **_rule(
        "trained_conv2d_transpose",
        _IMAGES,
        (4, 4, 64, 128),
        result=(8, 56, 56, 64),
        macs=8 * 28 * 28 * 16 * 64 * 128,
        act="none",
        trained=True,
    ),
    **_both(
        "conv2d_transpose_bias",
        _IMAGES,
        (2, 2, 64, 128),
        (64,),
        result=(8, 56, 56, 64),
        macs=8 * 28 * 28 * 4 * 64 * 128,
    ),
    **_rule(
        "conv1d_transpose_bias",
        (16, 512, 128),
        (4, 64, 128),
        (64,),
        result=(16, 1024, 64),
        macs=16 * 512 * 4 * 64 * 128,
    ),
    **_both(
        "conv3d",
        (2, 16, 28, 28, 8),
        (3, 3, 3, 8, 16),
        result=(2, 16, 28, 28, 16),
        macs=2 * 16 * 28 * 28 * 27 * 8 * 16,
        act="silu",
    ),
    **_both(
        "conv3d_bias",
        (2, 16, 56, 56, 3),
        (3, 3, 3, 3, 32),
        (32,),
        result=(2, 16, 56, 56, 32),
        macs=2 * 16 * 56 * 56 * 27 * 3 * 32,
    ),
    **_rule(
        "trained_conv3d",
        (2, 8, 28, 28, 64),
        (1, 1, 1, 64, 128),
        result=(2, 8, 28, 28, 128),
        macs=2 * 8 * 28 * 28 * 64 * 128,
        act="none",
        trained=True,
    ),
    **_both("matmul", (2048, 256), _WEIGHTS, result=(2048, 1024), macs=_TOKEN_MACS),
    **_rule(
        "matmul_bias_add",
        (2048, 256),
        _WEIGHTS,
        (1024,),
        result=(2048, 1024),
        macs=_TOKEN_MACS,
    ),
    **_both("dense", _TOKENS, _WEIGHTS, result=_HIDDEN, macs=_TOKEN_MACS, act="silu"),
    **_both(
        "dense_bias",
        _TOKENS,
        _WEIGHTS,
        (1024,),
        result=_HIDDEN,
        macs=_TOKEN_MACS,
        act="gelu_erf",
    ),
    **_both("batch_matmul", _TOKENS, _WEIGHTS, result=_HIDDEN, macs=_TOKEN_MACS, act="gelu_tanh"),
    **_both("batch_matmul_bias", _TOKENS, _WEIGHTS, (1024,), result=_HIDDEN, macs=_TOKEN_MACS),
    **_rule("einsum", _TOKENS, (256, 8, 32), result=_HEADS, macs=_TOKEN_MACS // 4),
    **_rule(
        "einsum_bias",
        _TOKENS,
        (256, 8, 32),
        (8, 32),
        result=_HEADS,
        macs=_TOKEN_MACS // 4,
        act="none",
    ),
    **_rule(
        "heads_bias",
        _TOKENS,
        (256, 256),
        (8, 32),
        result=_HEADS,
        macs=_TOKEN_MACS // 4,
        act="none",
    ),
    **_both("moments_batch_norm", _IMAGES, *[_CHANNELS] * 2),
    **_both("given_batch_norm", _IMAGES, *_VECTORS),
    **_rule(
        "conv2d_moments",
        _IMAGES,
        _FILTERS,
        *[_CHANNELS] * 2,
        macs=_CONV_MACS,
        act="none",
        joins=True,
    ),
    **_both("conv2d_batch_norm", _IMAGES, _FILTERS, *_VECTORS, macs=_CONV_MACS),
    **_both("conv2d_batch_norm_v1", _IMAGES, _FILTERS, *_VECTORS, macs=_CONV_MACS),
    **_both("conv2d_batch_norm_v2", _IMAGES, _FILTERS, *_VECTORS, macs=_CONV_MACS),
    **_both("conv2d_given_batch_norm", _IMAGES, _FILTERS, *_VECTORS, macs=_CONV_MACS),
    **_both(
        "conv1d_given_batch_norm",
        (16, 512, 128),
        (5, 128, 128),
        *_VECTORS,
        macs=16 * 512 * 5 * 128 * 128,
    ),
    **_rule("group_norm", (8, 32, 32, 320), (320,), (320,), act="silu"),
    **_rule("layer_norm", (16, 128, 768), (768,), (768,), act="none"),
    **_rule("rms_norm", (16, 128, 768), (768,), act="none"),
    **_rule("attention", *[(8, 256, 8, 64)] * 3, macs=2 * 8 * 8 * 256 * 256 * 64, act="none"),
    **_rule(
        "grouped_attention",
        (8, 256, 4, 2, 64),
        *[(8, 256, 4, 64)] * 2,
        macs=2 * 8 * 8 * 256 * 256 * 64,
        act="none",
        inferred=True,
    ),
    **_rule(
        "few_rows_matmul",
        (1, 768),
        (768, 8000),
        result=(1, 8000),
        macs=768 * 8000,
        act="none",
        inferred=True,
    ),
    **_rule(
        "few_rows_batch_matmul",
        (4, 1, 768),
        (768, 2048),
        result=(4, 1, 2048),
        macs=4 * 768 * 2048,
        act="none",
        inferred=True,
    ),
    **_rule("softmax", (16, 12, 128, 128), act="none"),
    **_rule("cross_entropy", *[(2048, 8192)] * 2, result=(2048,), act="none"),
    **_rule("sparse_cross_entropy", (2048, 8192), result=(2048,), act="none"),
    **_rule("dropout", (16, 128, 768), act="none"),
    **_rule("prelu", _IMAGES, _CHANNELS, act="none"),
    **_rule("relu_max_pool", _IMAGES, result=(8, 14, 14, 128), act="none", trained=True),
    **{
        f"rule_act_{act}": RuleCase("act", ((8192, 3072),), (8192, 3072), act=act)
        for act in (
            *("gelu_erf", "gelu_tanh", "silu", "mish", "hard_swish"),
            *("softplus", "hard_sigmoid"),
        )
    },
}
# A chain of one op never has to stay; those of the others are fused with their forward pass only.
_NEVER_ALONE = (
    *("grouped_conv2d", "attention", "softmax", "dropout", "cross_entropy"),
    *("sparse_cross_entropy", "prelu"),
)
# Those whose backward pass is timed alone, too; of these two the other groups have the whole.
_ALONE = {
    **_rule("conv2d_bias", _IMAGES, _FILTERS, _CHANNELS, macs=_CONV_MACS),
    **_rule("matmul_bias", (2048, 256), _WEIGHTS, (1024,), result=(2048, 1024), macs=_TOKEN_MACS),
    **{
        name: case
        for name, case in _RULES.items()
        if not re.search("_norm|transpose|conv3d", name)
        and case.modes == MODES
        and case.family not in _NEVER_ALONE
    },
}
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
    "dense": {
        "dense_4_rows": MatMulCase(m=4, k=4096, n=4096, act="relu"),
        "dense_32_rows": MatMulCase(m=32, k=2048, n=1000, act="relu"),
        "dense_128_rows": MatMulCase(m=128, k=4096, n=4096, act="relu"),
        "dense_2048_rows": MatMulCase(m=2048, k=2048, n=2048, act="relu"),
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
        "conv3x3_to_3": ConvCase(4, (112, 112), 64, 3),
        "conv9x9_to_3": ConvCase(2, (128, 128), 64, 3, (9, 9)),
        "conv_tiny": ConvCase(2, (7, 7), 17, 33),
        "matmul_tiny": MatMulCase(m=17, k=64, n=33, act="gelu_tanh"),
        "matmul_skinny": MatMulCase(m=8, k=768, n=3072, act="gelu_tanh"),
        "matmul_tall": MatMulCase(m=50_000, k=100, n=17, act="gelu_erf"),
        "batch_norm_tiny": BatchNormCase((2, 7, 7), 17),
    },
    "groups": {
        "conv7x7_depthwise": ConvCase(8, (56, 56), 96, 96, (7, 7), groups=96, act="none"),
        "conv3x3_depthwise": ConvCase(8, (56, 56), 144, 144, groups=144),
        "conv3x3_groups_of_4": ConvCase(8, (56, 56), 128, 128, groups=32),
        "conv3x3_groups_of_24": ConvCase(8, (28, 28), 192, 192, groups=8),
        "conv3x3_2_groups": ConvCase(8, (28, 28), 128, 128, groups=2),
    },
    # Layers of U-Nets, of generators and decoders of images.
    "transposed": {
        "transposed2x2_256_128": ConvTransposeCase(8, (64, 64), 256, 128, (2, 2)),
        "transposed2x2_128_64": ConvTransposeCase(4, (128, 128), 128, 64, (2, 2)),
        "transposed3x3_64_32": ConvTransposeCase(8, (56, 56), 64, 32),
        "transposed4x4_256_128": ConvTransposeCase(32, (16, 16), 256, 128, (4, 4)),
        "transposed4x4_to_3": ConvTransposeCase(32, (64, 64), 64, 3, (4, 4), act="tanh"),
        "transposed5x5_256_128": ConvTransposeCase(32, (14, 14), 256, 128, (5, 5)),
        "transposed5x5_to_1": ConvTransposeCase(32, (28, 28), 64, 1, (5, 5), act="tanh"),
        "transposed3x3_stride1": ConvTransposeCase(8, (28, 28), 64, 64, strides=(1, 1)),
    },
    # What keeps a GPU busy: layers of ResNet-50 for 32 images, and the whole for 64; layers of
    # BERT-base for 8192 tokens.
    "large": {
        "large_conv3x3_64": ConvCase(32, (56, 56), 64, 64),
        "large_conv3x3_256": ConvCase(32, (14, 14), 256, 256),
        "large_conv1x1_64_256": ConvCase(32, (56, 56), 64, 256, (1, 1)),
        "large_conv7x7_stem": ConvCase(32, (224, 224), 3, 64, (7, 7), (2, 2)),
        "large_matmul_gelu_tanh": MatMulCase(m=8192, k=768, n=3072, act="gelu_tanh"),
        "large_matmul_gelu_erf": MatMulCase(m=8192, k=768, n=3072, act="gelu_erf"),
        "large_batch_norm_add_relu": BatchNormCase((32, 56, 56), 256, side=True),
        "large_batch_norm_relu": BatchNormCase((32, 112, 112), 64),
        "large_resnet50": ApplicationCase(macs=3_857_973_248, batch=64, size=224),
    },
    "rules": _RULES | _alone(_ALONE),
    "recurrent": {
        "lstm_32x128": RecurrentCase("lstm", 32, 128, 128, 256),
        "gru_32x128": RecurrentCase("gru", 32, 128, 128, 256),
        "simple_rnn_32x128": RecurrentCase("simple_rnn", 32, 128, 128, 256),
        "lstm_batch1": RecurrentCase("lstm", 1, 256, 64, 128),
        "gru_batch1": RecurrentCase("gru", 1, 256, 64, 128),
        "lstm_short": RecurrentCase("lstm", 64, 64, 32, 64),
        "gru_short": RecurrentCase("gru", 64, 64, 32, 64),
        "lstm_512": RecurrentCase("lstm", 32, 100, 256, 512),
        "gru_512": RecurrentCase("gru", 32, 100, 256, 512),
    },
    # The sizes of layers of language models, for one token and for more; of BERT-base.
    "quantized": {
        "quantized_1_row": QuantizedCase(1, 2048, 2048),
        "quantized_1_row_silu": QuantizedCase(1, 4096, 11008, bias=False, act="silu"),
        "quantized_16_rows": QuantizedCase(16, 2048, 2048),
        "quantized_128_rows_gelu": QuantizedCase(128, 768, 3072, act="gelu_erf"),
        "quantized_2048_rows_gelu": QuantizedCase(2048, 768, 3072, act="gelu_erf"),
        "quantized_2048_rows": QuantizedCase(2048, 3072, 768),
        "quantized_square_relu": QuantizedCase(2048, 512, 512, act="relu"),
        "quantized_odd": QuantizedCase(37, 300, 1000),
    },
    # The sizes of layers of language models of 4 bits, for one token and for more; of 8 bits.
    "weight_only": {
        "weight_only_1_row": WeightOnlyCase(1, 2048, 2048, group=128),
        "weight_only_1_row_silu": WeightOnlyCase(1, 4096, 11008, group=128, bias=False, act="silu"),
        "weight_only_4_rows": WeightOnlyCase(4, 2048, 2048, group=128),
        "weight_only_16_rows": WeightOnlyCase(16, 2048, 2048, group=128),
        "weight_only_128_rows": WeightOnlyCase(128, 2048, 2048, group=128),
        "weight_only_2048_rows_gelu": WeightOnlyCase(2048, 768, 3072, group=128, act="gelu_tanh"),
        "weight_only_8_bits_1_row": WeightOnlyCase(1, 2048, 2048, bits=8),
        "weight_only_8_bits_128_rows": WeightOnlyCase(128, 2048, 2048, bits=8),
        "weight_only_odd": WeightOnlyCase(37, 96, 1001, group=32),
    },
    # The same product as every rule for it finds it, and the numbers alone.
    "weight_only_forms": {
        **{
            f"weight_only_{form}{'_bias' * bias}": WeightOnlyCase(
                16, 768, 768, group=128, form=form, bias=bias, act="none" if bias else "silu"
            )
            for form in ("dense", "batch_matmul", "heads", "einsum")
            for bias in (True, False)
        },
        "weight_only_numbers": WeightOnlyCase(1, 768, 768, group=128, form="numbers", bias=False),
    },
    # A small language model behind a prompt of which only the keys and values count.
    "generation": {
        "decoder_tiny": DecoderCase(),
        "decoder_batch1": DecoderCase(1, *_DECODER),
        "decoder_batch4": DecoderCase(4, *_DECODER),
        "decoder_12_key_heads": DecoderCase(1, 4, 768, 12, 12, 2048, 1024, 32),
    },
    "model": {
        "resnet50": ApplicationCase(),
        "mobilenet_v2": ApplicationCase("MobileNetV2", 154_083_200, 3_469_760),
        "efficientnet_b0": ApplicationCase("EfficientNetB0", 197_778_400, 5_236_192),
        "convnext": ApplicationCase("ConvNeXtTiny", 2_273_606_400, 28_524_000),
    },
}
CASES = {name: case for group in GROUPS.values() for name, case in group.items()}


def group_of(name):
    """The group that a case is in."""
    return drawn.group_of(name) or next(group for group in GROUPS if name in GROUPS[group])


def select(patterns, dtype):
    """The cases whose name, or whose group's name, matches one of the patterns.

    Args:
        patterns: Sequence of names, in which * and ? are wildcards, or of `drawn.names`.
        dtype: "float32", "bfloat16", "float16" or "float64".

    Returns:
        A dict from name to case, in the table's order, then those that are drawn.

    Raises:
        ValueError: A pattern matches nothing.
    """
    chosen, random_ones = set(), {}
    for pattern in patterns:
        if drawn.group_of(pattern):
            random_ones[pattern] = drawn.case(pattern)
            continue
        found = {
            name
            for name in CASES
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(group_of(name), pattern)
        }
        if not found:
            raise ValueError(f"'{pattern}' is none of {', '.join([*GROUPS, *CASES])}")
        chosen |= found
    known = {name: case for name, case in CASES.items() if name in chosen}
    return {
        name: dataclasses.replace(case, dtype=dtype) for name, case in (known | random_ones).items()
    }
