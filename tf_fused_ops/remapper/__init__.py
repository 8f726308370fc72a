"""The remapper: finds chains of stock ops in a graph and replaces them by fused ones."""

import tf_fused_ops.ops  # noqa: F401  (registers the gradients of what the remapper emits)
from tf_fused_ops.remapper.offline import RemapResult, remap
from tf_fused_ops.remapper.report import Fusion, Refusal, Report
from tf_fused_ops.remapper.rewriter import RemapOptions, remap_graph
from tf_fused_ops.remapper.rule import Fused, Match, Rule
from tf_fused_ops.remapper.saved_model import convert

__all__ = [
    "Fused",
    "Fusion",
    "Match",
    "Refusal",
    "RemapOptions",
    "RemapResult",
    "Report",
    "Rule",
    "convert",
    "remap",
    "remap_graph",
]
