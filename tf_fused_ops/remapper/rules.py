"""The table of rules.

A rule states in one place the stock TensorFlow code it stands for, when it is legal, and the fused
call. Everything else follows from that: the pattern of the forward pass, and the pattern that
autodiff makes of forward and backward, are traced from `stock`.
"""

import collections
import functools

from tf_fused_ops.remapper import (
    attention,
    batch_norm,
    conv3d,
    conv_batch_norm,
    conv_moments,
    conv_transpose,
    convolution,
    cross_entropy,
    dequantized,
    dilated,
    dropout,
    elementwise,
    group_norm,
    grouped_attention,
    layer_norm,
    lines,
    lookup,
    max_pool,
    moments,
    padded_convs,
    prelu,
    product,
    quantized,
    slices,
    softmax,
    spellings,
    trained_convs,
    weight_only,
)

# Chain -> the chain that has to be there for it: the same without side input.
_CHAINS = {
    convolution.Conv2DAct: convolution.Conv2DAct,
    convolution.Conv2DAddAct: convolution.Conv2DAct,
    convolution.Conv2DBiasAct: convolution.Conv2DBiasAct,
    convolution.Conv2DBiasAddAct: convolution.Conv2DBiasAct,
    padded_convs.PadConv2DAct: padded_convs.PadConv2DAct,
    padded_convs.PadConv2DBiasAct: padded_convs.PadConv2DBiasAct,
    padded_convs.PadConv1DAct: padded_convs.PadConv1DAct,
    padded_convs.PadConv1DBiasAct: padded_convs.PadConv1DBiasAct,
    lines.Conv1DAct: lines.Conv1DAct,
    lines.Conv1DBiasAct: lines.Conv1DBiasAct,
    lines.Conv1DBiasAddAct: lines.Conv1DBiasAct,
    lines.RowConv2DBiasAct: lines.RowConv2DBiasAct,
    conv_transpose.Conv2DTransposeAct: conv_transpose.Conv2DTransposeAct,
    conv_transpose.Conv2DTransposeBiasAct: conv_transpose.Conv2DTransposeBiasAct,
    conv_transpose.Conv2DTransposeBiasAddAct: conv_transpose.Conv2DTransposeBiasAct,
    conv_transpose.Conv1DTransposeBiasAct: conv_transpose.Conv1DTransposeBiasAct,
    conv3d.Conv3DAct: conv3d.Conv3DAct,
    conv3d.Conv3DAddAct: conv3d.Conv3DAct,
    conv3d.Conv3DBiasAct: conv3d.Conv3DBiasAct,
    conv3d.Conv3DBiasAddAct: conv3d.Conv3DBiasAct,
    # Before those of products, which would have the numbers made.
    **{rule: rule for rule in weight_only.RULES},
    product.MatMulBiasAct: product.MatMulBiasAct,
    product.MatMulBiasAddAct: product.MatMulBiasAct,
    product.DenseBiasAct: product.DenseBiasAct,
    product.DenseBiasAddAct: product.DenseBiasAct,
    product.BatchMatMulBiasAct: product.BatchMatMulBiasAct,
    product.BatchMatMulBiasAddAct: product.BatchMatMulBiasAct,
    product.HeadsBiasAct: product.HeadsBiasAct,
    product.EinsumBiasAct: product.EinsumBiasAct,
    product.MatMulAct: product.MatMulAct,
    product.MatMulAddAct: product.MatMulAct,
    product.DenseAct: product.DenseAct,
    product.DenseAddAct: product.DenseAct,
    product.BatchMatMulAct: product.BatchMatMulAct,
    product.BatchMatMulAddAct: product.BatchMatMulAct,
    product.EinsumAct: product.EinsumAct,
    quantized.QuantizedMatMulBiasAct: quantized.QuantizedMatMulBiasAct,
    quantized.QuantizedMatMulAct: quantized.QuantizedMatMulAct,
    batch_norm.BatchNormAct: batch_norm.BatchNormAct,
    batch_norm.BatchNormAddAct: batch_norm.BatchNormAct,
    conv_batch_norm.ConvBatchNormAct: conv_batch_norm.ConvBatchNormAct,
    conv_batch_norm.ConvBatchNormAddAct: conv_batch_norm.ConvBatchNormAct,
    conv_batch_norm.ConvBatchNormV2Act: conv_batch_norm.ConvBatchNormV2Act,
    conv_batch_norm.ConvBatchNormV2AddAct: conv_batch_norm.ConvBatchNormV2Act,
    conv_batch_norm.ConvBatchNormV1Act: conv_batch_norm.ConvBatchNormV1Act,
    conv_batch_norm.ConvBatchNormV1AddAct: conv_batch_norm.ConvBatchNormV1Act,
    conv_batch_norm.ConvGivenBatchNormAct: conv_batch_norm.ConvGivenBatchNormAct,
    conv_batch_norm.ConvGivenBatchNormAddAct: conv_batch_norm.ConvGivenBatchNormAct,
    conv_batch_norm.Conv1DGivenBatchNormAct: conv_batch_norm.Conv1DGivenBatchNormAct,
    conv_batch_norm.Conv1DGivenBatchNormAddAct: conv_batch_norm.Conv1DGivenBatchNormAct,
    moments.MomentsBatchNormAct: moments.MomentsBatchNormAct,
    moments.MomentsBatchNormAddAct: moments.MomentsBatchNormAct,
    moments.GivenBatchNormAct: moments.GivenBatchNormAct,
    moments.GivenBatchNormAddAct: moments.GivenBatchNormAct,
}
# TensorFlow has one op for these already; and bare products stay its own, as do convolutions in
# inference.
_BARE = {
    *(batch_norm.BatchNormAct, convolution.Conv2DAct, product.MatMulAct, product.DenseAct),
    *(product.BatchMatMulAct, product.EinsumAct, conv_transpose.Conv2DTransposeAct),
    *(conv3d.Conv3DAct, lines.Conv1DAct),
}


def _table():
    cores = {}
    for chain, core in _CHAINS.items():
        cores[chain] = chain(core=cores.get(core))
        if chain not in _BARE:
            yield cores[chain]
        yield from _with_activations(chain, cores[chain])
    for root in layer_norm.ROOTS:
        chain = functools.partial(group_norm.GroupNormAct, anchor=root)
        core = chain()
        yield core
        yield from _with_activations(chain, core)
    yield from trained_convs.RULES
    yield from dilated.RULES
    yield convolution.GROUPED
    yield conv_moments.CONV_MOMENTS
    yield product.FewRowsMatMul()
    yield product.FewRowsBatchMatMul()
    yield lookup.PackedLookup()
    yield dequantized.DequantizedWeights()
    yield max_pool.ReluMaxPool()
    yield prelu.Prelu()
    yield attention.Attention()
    yield grouped_attention.GroupedAttention()
    yield softmax.Softmax()
    yield slices.PADDED
    yield cross_entropy.SparseSoftmaxCrossEntropy()
    yield cross_entropy.SoftmaxCrossEntropy()
    for draw in (dropout.STATELESS, dropout.STATEFUL):
        yield dropout.Dropout(anchor=draw)
    for root in layer_norm.ROOTS:
        yield layer_norm.LayerNorm(anchor=root)
        yield layer_norm.RmsNorm(anchor=root)
    for activation in spellings.ACTIVATIONS:
        if activation is not spellings.NONE and not activation.own_op:
            yield from (elementwise.Act(activation, form) for form in activation.spellings)


def _with_activations(chain, core):
    for activation in spellings.ACTIVATIONS:
        if activation is not spellings.NONE:
            for spelling in activation.spellings:
                yield chain(activation, spelling, core)


RULES = tuple(_table())
# Of the table where Winograd's algorithm is allowed.
WINOGRAD = convolution.WinogradConv2D()


@functools.lru_cache(maxsize=16)
def by_anchor(own, turn):
    """Returns {anchor: {core: rules}} of the table and of further rules, of those of a turn.

    A rule that adds to no other is its own core.
    """
    table = collections.defaultdict(lambda: collections.defaultdict(list))
    for rule in (*own, *RULES):
        if rule.turn == turn:
            for op_type in rule.anchors:
                table[op_type][rule.core].append(rule)
    return {anchor: dict(groups) for anchor, groups in table.items()}


@functools.lru_cache(maxsize=16)
def by_gradient_op(own=()):
    """Returns {type of stock gradient op: rules} of the table and of further rules."""
    table = collections.defaultdict(list)
    for rule in (*own, *RULES):
        # The gradient of an activation that is several ops reads values between them.
        if rule.activation is spellings.NONE or rule.activation.own_op:
            for op_type in rule.gradient_ops:
                table[op_type].append(rule)
    return dict(table)
