"""Cases whose sizes are drawn at random: the table's were chosen by its authors."""

import random
import re

from tf_fused_ops.bench import costs
from tf_fused_ops.bench.cases import (
    BatchNormCase,
    ConvCase,
    ConvTransposeCase,
    MatMulCase,
    RecurrentCase,
)

# What a training step may take, so that calls are of up to some tens of milliseconds.
_MOST_MACS, _MOST_BYTES = 4 * 10**9, 2 * 10**8

_BATCHES = (1, 2, 4, 8, 16, 32)
_SIDES = (4, 7, 8, 14, 16, 20, 28, 33, 40, 56, 64, 80, 112)
_LINES = (50, 128, 500, 1000, 4096)
_CHANNELS = (1, 3, 4, 8, 12, 16, 17, 24, 32, 48, 64, 96, 100, 128, 144, 192, 256, 320, 512, 1024)
_ROWS = (1, 2, 3, 5, 8, 16, 17, 32, 64, 100, 128, 256, 500, 512, 1024, 2048, 4096, 10000)
_WIDTHS = (*_CHANNELS, 10, 384, 640, 768, 1000, 2048, 3072, 4096)
_CONV_ACTS = ("none", "relu", "relu", "relu6", "silu")
_MATMUL_ACTS = ("none", "relu", "relu", "tanh", "sigmoid", "silu", "gelu_tanh", "gelu_erf")


def _conv(rng):
    size, stride, dilation = rng.choice((1, 1, 2, 3, 3, 3, 4, 5, 7)), rng.choice((1, 1, 1, 2)), 1
    if stride == 1 and size > 1:
        dilation = rng.choice((1, 1, 1, 2))
    side = rng.choice(_SIDES)
    on_line = rng.random() < 0.2
    return ConvCase(
        batch=rng.choice(_BATCHES),
        image=(1, rng.choice(_LINES)) if on_line else (side, rng.choice((side, side, 9, 50))),
        cin=rng.choice(_CHANNELS),
        cout=rng.choice(_CHANNELS),
        kernel=(1 if on_line else size, size),
        strides=(1 if on_line else stride, stride),
        dilations=(1 if on_line else dilation, dilation),
        padding=rng.choice(("SAME", "SAME", "VALID")),
        act=rng.choice(_CONV_ACTS),
    )


def _conv_transpose(rng):
    stride = rng.choice((1, 2, 2, 2, 3))
    size = max(stride, rng.choice((2, 3, 4, 5)))  # otherwise no tap meets some pixels
    side = stride * rng.choice((4, 7, 8, 14, 16, 28, 32))
    return ConvTransposeCase(
        batch=rng.choice(_BATCHES),
        image=(side, side),
        cin=rng.choice(_CHANNELS),
        cout=rng.choice(_CHANNELS),
        kernel=(size, size),
        strides=(stride, stride),
        act=rng.choice(("none", "relu", "tanh")),
    )


def _matmul(rng):
    return MatMulCase(
        lead=rng.choice(((), (), (2,), (8,), (16,))),
        m=rng.choice(_ROWS),
        k=rng.choice(_WIDTHS),
        n=rng.choice(_WIDTHS),
        act=rng.choice(_MATMUL_ACTS),
    )


def _batch_norm(rng):
    side = rng.choice(_SIDES)
    return BatchNormCase(
        sizes=(rng.choice(_BATCHES), side, side),
        channels=rng.choice(_CHANNELS),
        side=rng.random() < 0.4,
        act=rng.choice(_CONV_ACTS[1:]),
    )


def _recurrent(rng):
    return RecurrentCase(
        cell=rng.choice(("lstm", "gru", "simple_rnn")),
        batch=rng.choice((1, 4, 16, 32, 64)),
        steps=rng.choice((5, 20, 50, 100)),
        features=rng.choice((16, 17, 64, 100, 128, 256)),
        units=rng.choice((16, 32, 33, 64, 100, 128, 256, 512)),
    )


_FAMILIES = {
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "matmul": _matmul,
    "batch_norm": _batch_norm,
    "recurrent": _recurrent,
}
_NAME = re.compile(rf"(random_({'|'.join(_FAMILIES)}))_\d+_\d+")


def names(seed, count):
    """The names of `count` cases of each family."""
    return [f"random_{family}_{seed}_{i}" for family in _FAMILIES for i in range(count)]


def group_of(name):
    """The group of a case of that name, of a family; None if that is no name of `names`."""
    match = _NAME.fullmatch(name)
    return match and match[1]


def case(name):
    """The `cases.Case` of a name of `names`, the same in every process."""
    draw = _FAMILIES[_NAME.fullmatch(name)[2]]
    rng = random.Random(name)
    while True:
        drawn = draw(rng)
        fits = not isinstance(drawn, ConvCase) or min(drawn.output_image()) > 0
        if fits and _is_short(drawn):
            return drawn


def _is_short(drawn):
    work = costs.work(drawn, "step")
    return work.macs <= _MOST_MACS and work.bytes <= _MOST_BYTES
