"""The table of rules.

A rule states in one place the stock TensorFlow code it stands for, when it is legal, and the fused
call. Everything else follows from that: the pattern of the forward pass, and the pattern that
autodiff makes of forward and backward, are traced from `stock`.
"""

import collections
import functools

from tf_fused_ops.remapper import batch_norm, contraction, conv_batch_norm, moments, spellings

# Chain -> the chain that has to be there for it: the same without side input. Those that are fused
# without an activation, too, are rows of their own.
_CHAINS = {
    contraction.Conv2DAct: contraction.Conv2DAct,
    contraction.Conv2DAddAct: contraction.Conv2DAct,
    contraction.Conv2DBiasAct: contraction.Conv2DBiasAct,
    contraction.Conv2DBiasAddAct: contraction.Conv2DBiasAct,
    contraction.PadConv2DBiasAct: contraction.PadConv2DBiasAct,
    contraction.Conv1DBiasAct: contraction.Conv1DBiasAct,
    contraction.Conv1DBiasAddAct: contraction.Conv1DBiasAct,
    contraction.MatMulBiasAct: contraction.MatMulBiasAct,
    contraction.MatMulBiasAddAct: contraction.MatMulBiasAct,
    contraction.DenseBiasAct: contraction.DenseBiasAct,
    contraction.DenseBiasAddAct: contraction.DenseBiasAct,
    contraction.BatchMatMulBiasAct: contraction.BatchMatMulBiasAct,
    contraction.HeadsBiasAct: contraction.HeadsBiasAct,
    contraction.EinsumBiasAct: contraction.EinsumBiasAct,
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
    moments.MomentsBatchNormAct: moments.MomentsBatchNormAct,
    moments.MomentsBatchNormAddAct: moments.MomentsBatchNormAct,
    moments.GivenBatchNormAct: moments.GivenBatchNormAct,
    moments.GivenBatchNormAddAct: moments.GivenBatchNormAct,
}
# TensorFlow has one op for these already.
_BARE = {batch_norm.BatchNormAct, contraction.Conv2DAct}


def _table():
    cores = {chain: chain(spellings.NONE, spellings.NONE.spellings[0]) for chain in _CHAINS}
    for chain, core in _CHAINS.items():
        for activation in spellings.ACTIVATIONS:
            for spelling in activation.spellings:
                if activation is not spellings.NONE:
                    yield chain(activation, spelling, cores[core])
                elif chain not in _BARE:
                    yield (
                        cores[chain] if chain is core else chain(activation, spelling, cores[core])
                    )


RULES = tuple(_table())


@functools.lru_cache(maxsize=16)
def by_anchor(own=()):
    """Returns {anchor: {core: rules}} of the table and of further rules."""
    table = collections.defaultdict(lambda: collections.defaultdict(list))
    for rule in (*own, *RULES):
        table[rule.anchor][rule.core].append(rule)
    return {anchor: dict(groups) for anchor, groups in table.items()}
