"""The contraction engine on NumPy arrays: numbers, threads, layouts, instruction sets."""

import functools
import itertools

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
from cases import DTYPES, PAIRED_ISAS
from memo import remembered
from numpy.lib.stride_tricks import sliding_window_view

from tf_fused_ops import _core

# Of values around 1, which are rounded to the dtype once; sums are those of the accumulator.
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 3e-6, "float64": 1e-13}
# Cases are batch, in_size, in_c, out_c, kernel, strides, dilations, pads (top, left, bottom,
# right), and groups if there are several. Of these, columns at the image's edges have tiles of
# their own: at both edges or one, of taps side by side or apart, of several bands and panels.
EDGE_CASES = [
    (4, (15, 17), 9, 33, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    (17, (19, 22), 16, 40, (5, 5), (1, 1), (1, 1), (2, 2, 2, 2)),
    (16, (28, 26), 12, 20, (3, 3), (2, 2), (1, 1), (1, 0, 1, 1)),
    (20, (16, 22), 16, 40, (3, 3), (1, 1), (2, 2), (2, 2, 2, 2)),
    (16, (20, 15), 16, 33, (3, 4), (1, 1), (1, 1), (1, 3, 1, 0)),
    (16, (14, 14), 17, 100, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
]
CASES = [
    *EDGE_CASES,
    # The same with more of such columns than have tiles of their own, and with no input channels.
    (2, (17, 19), 12, 40, (3, 11), (1, 1), (1, 1), (1, 5, 1, 5)),
    (2, (14, 14), 0, 40, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    (2, (5, 7), 3, 17, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    (1, (1, 1), 31, 33, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    (2, (9, 30), 17, 1, (3, 2), (2, 3), (1, 1), (1, 0, 1, 1)),
    (1, (11, 10), 1, 64, (2, 3), (1, 1), (3, 2), (0, 0, 0, 0)),
    (3, (6, 5), 64, 100, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (2, (7, 9), 33, 31, (1, 1), (2, 2), (1, 1), (0, 0, 0, 0)),
    (1, (4, 4), 256, 16, (3, 3), (1, 1), (1, 1), (2, 0, 3, 5)),
    (1, (3, 3), 5, 7, (5, 5), (4, 4), (1, 1), (2, 2, 2, 2)),
    (2, (16, 40), 300, 40, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (0, (4, 4), 3, 5, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    (1, (4, 5), 3, 18, (3, 4), (1, 1), (7, 6), (7, 9, 7, 9)),
    (1, (3, 3), 4, 5, (2, 2), (1, 1), (1, 1), (9, 9, 9, 9)),
    (2, (4, 4), 0, 5, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    # Taps above each other, which see an odd number of pixels of padding.
    (2, (9, 8), 6, 20, (3, 1), (1, 1), (2, 1), (1, 3, 0, 2)),
    # Several panels of filters, the last ones whole vectors or not; an output to be streamed.
    (2, (5, 7), 20, 216, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (1, (6, 5), 9, 161, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    (1, (130, 256), 3, 128, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    # Few pixels of so many channels that blocks of filters meet more than a usual band.
    (1, (6, 10), 3072, 40, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    # Few rows: several parts of the depth, several tasks side by side, no depth at all.
    (1, (1, 1), 300, 1030, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (1, (2, 2), 270, 1100, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (3, (1, 1), 13, 5, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (1, (1, 2), 0, 5, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    # Few rows whose gradients are dot products, and large enough to be written row by row.
    (1, (1, 7), 530, 1040, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (1, (5, 1), 1011, 523, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (1, (1, 8), 300, 71, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (1, (1, 1), 300, 600, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    # Twelve rows and more, in groups; and filters that are pixels of their input gradient, with
    # depths that are odd or are cut into parts, several blocks of them, several images.
    (1, (1, 11), 300, 141, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (1, (4, 4), 40, 1100, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (1, (1, 19), 300, 513, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (2, (4, 5), 530, 600, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (1, (1, 33), 90, 1100, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    # More pixels whose filters are still packed block by block, several blocks of them: one line
    # that workers gather together, and lines of several images under several taps.
    (1, (13, 17), 700, 1040, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (2, (13, 14), 70, 1100, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    # Vectors of which half goes to the output.
    (2, (5, 23), 24, 8, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (1, (6, 17), 40, 24, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    (2, (7, 19), 72, 56, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    # Pixels of few channels, which fill vectors together.
    (2, (7, 19), 12, 4, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (1, (5, 23), 20, 3, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (2, (9, 37), 9, 2, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1)),
    # Lines of half a tile's rows, which are taken two at a time: an odd number of them, of as many
    # pixels as a register has rows or fewer, several bands, strides.
    (2, (14, 14), 33, 40, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    (1, (9, 16), 64, 70, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    (1, (21, 15), 130, 20, (5, 5), (1, 1), (1, 1), (2, 2, 2, 2)),
    (2, (27, 25), 20, 40, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1)),
    (1, (9, 31), 24, 33, (1, 1), (2, 2), (1, 1), (0, 0, 0, 0)),
    (3, (13, 9), 40, 33, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1)),
    (2, (3, 2), 20, 40, (3, 3), (2, 1), (1, 1), (1, 1, 1, 1)),
    # Few columns: depths that are no whole vectors, pixels that are no whole tiles, several parts
    # of them; and padding, which is none.
    (2, (9, 13), 70, 1, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (1, (1, 301), 301, 2, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (3, (7, 20), 131, 3, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (1, (29, 40), 257, 4, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (2, (6, 5), 64, 5, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (1, (5, 6), 100, 2, (1, 1), (1, 1), (1, 1), (0, 1, 0, 2)),
    (1, (1, 12), 100, 2, (1, 1), (1, 1), (1, 1), (0, 0, 0, 3)),
    # Many pixels of few channels: input and filter gradient from one gathered dz.
    (3, (31, 17), 21, 45, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (1, (1, 1300), 64, 96, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    # Filter gradients that are too large for several sets of sums.
    (1, (21, 32), 560, 1048, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    (2, (6, 7), 130, 552, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    # So many small images that several are gathered together for the filter gradient.
    (43, (5, 4), 6, 9, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    (35, (5, 5), 7, 20, (1, 1), (2, 2), (1, 1), (0, 0, 0, 0)),
    (37, (1, 5), 5, 40, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    # And that share a band forward, too: of so many filters that no cache keeps them.
    (11, (7, 7), 170, 160, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    (9, (8, 6), 150, 190, (3, 3), (2, 2), (1, 1), (0, 1, 2, 1)),
    # Few output channels, or no input channels; the pixels of a line in whole tiles and parts, and
    # in several bands.
    (2, (9, 67), 37, 3, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    (1, (8, 50), 20, 6, (3, 2), (1, 1), (2, 3), (2, 3, 2, 0)),
    (1, (6, 49), 19, 9, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    (2, (11, 33), 6, 2, (2, 3), (2, 1), (1, 1), (1, 1, 0, 1)),
    (1, (3, 980), 90, 1, (5, 3), (1, 1), (1, 1), (2, 1, 2, 1)),
    (1, (5, 40), 0, 2, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    # One output channel and few pixels, so that operands change places, and sums have one set.
    (1, (20, 20), 100, 1, (2, 3), (1, 1), (1, 1), (2, 1, 2, 2)),
    # Few input channels: the pixels between the strides together, in one tile's rows or several;
    # those beyond the edge left out.
    (1, (21, 67), 3, 20, (7, 7), (2, 2), (1, 1), (2, 2, 3, 3)),
    (2, (9, 50), 2, 40, (3, 3), (1, 3), (1, 1), (1, 1, 1, 1)),
    (1, (9, 61), 4, 33, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1)),
    (1, (9, 60), 4, 33, (3, 3), (2, 2), (2, 2), (2, 2, 2, 2)),
    # Windows that stand side by side: on the whole image, but for a margin, only along a line.
    (2, (8, 12), 5, 24, (4, 4), (4, 4), (1, 1), (0, 0, 0, 0)),
    (1, (8, 13), 5, 24, (4, 4), (4, 4), (1, 1), (0, 0, 0, 0)),
    (1, (9, 12), 3, 20, (3, 4), (2, 4), (1, 1), (1, 0, 1, 0)),
    (2, (1, 24), 7, 20, (1, 3), (1, 3), (1, 1), (0, 0, 0, 0)),
    # Pixels between the strides that are columns of a product: all of them together, several lines
    # and panels, of whole panels each, some without a tap, of sums in parts.
    (1, (20, 66), 3, 20, (7, 7), (2, 2), (1, 1), (2, 2, 3, 3)),
    (2, (6, 40), 16, 20, (2, 2), (2, 2), (1, 1), (0, 0, 0, 0)),
    (1, (6, 42), 35, 40, (2, 3), (2, 3), (1, 1), (0, 0, 0, 0)),
    (1, (20, 36), 3, 9, (11, 11), (4, 4), (1, 1), (2, 2, 2, 2)),
    (1, (9, 12), 2, 17, (5, 4), (1, 3), (1, 1), (2, 1, 2, 1)),
    (1, (8, 6), 6, 1100, (3, 3), (2, 2), (1, 1), (0, 0, 1, 1)),
    # Channels that are groups of their own: several vectors and a part of one, windows larger than
    # the image or beside it, strides and dilations, more rows than a band has, one tap, no pixels.
    (2, (9, 11), 40, 40, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 40),
    (2, (7, 7), 35, 35, (7, 7), (1, 1), (1, 1), (3, 3, 3, 3), 35),
    (1, (9, 33), 35, 35, (7, 7), (1, 1), (1, 1), (3, 3, 3, 3), 35),
    (1, (6, 33), 17, 17, (3, 9), (1, 1), (1, 1), (1, 4, 1, 4), 17),
    (1, (20, 33), 17, 17, (5, 5), (2, 2), (1, 1), (2, 2, 1, 2), 17),
    (1, (20, 33), 3, 3, (3, 4), (2, 3), (2, 2), (2, 2, 1, 2), 3),
    (1, (4, 4), 16, 16, (2, 2), (1, 1), (1, 1), (9, 9, 9, 9), 16),
    (2, (90, 121), 9, 9, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 9),
    (2, (5, 6), 33, 33, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0), 33),
    (0, (5, 6), 3, 3, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 3),
    # The same, read where they are: tiles at either edge and between them, at both; wide margins;
    # more channels than a task takes.
    (2, (6, 50), 40, 40, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 40),
    (1, (9, 61), 24, 24, (7, 7), (1, 1), (1, 1), (3, 3, 3, 3), 24),
    (1, (9, 64), 48, 48, (3, 4), (2, 3), (2, 1), (1, 2, 2, 0), 48),
    (1, (8, 60), 20, 20, (5, 7), (1, 1), (1, 3), (2, 9, 2, 9), 20),
    (1, (3, 5), 32, 32, (3, 3), (1, 1), (1, 1), (7, 30, 0, 9), 32),
    (1, (8, 401), 64, 64, (7, 7), (1, 1), (1, 1), (3, 3, 3, 3), 64),
    (1, (8, 401), 40, 40, (7, 7), (1, 1), (1, 1), (3, 3, 3, 3), 40),
    # Windows that lie a page apart.
    (1, (4, 9), 512, 512, (3, 3), (1, 2), (1, 1), (1, 1, 1, 1), 512),
    # Groups that fit a vector, of as many input channels, of fewer and of more; several vectors and
    # parts of one, sizes that do not divide it, a row of many taps.
    (2, (9, 11), 36, 36, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 9),
    (1, (8, 30), 48, 48, (3, 5), (2, 1), (1, 2), (1, 2, 1, 2), 6),
    (1, (8, 30), 24, 24, (3, 5), (1, 1), (1, 1), (1, 2, 1, 2), 6),
    (1, (8, 30), 24, 48, (5, 7), (1, 1), (1, 1), (2, 3, 2, 3), 6),
    (2, (7, 6), 6, 6, (2, 3), (1, 1), (1, 1), (1, 1, 0, 1), 3),
    (2, (7, 16), 20, 40, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 20),
    (2, (7, 16), 22, 44, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), 11),
    (1, (5, 40), 64, 64, (1, 11), (1, 1), (1, 1), (0, 5, 0, 5), 4),
    (2, (9, 13), 51, 51, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 17),
    (1, (9, 33), 45, 63, (3, 3), (2, 1), (1, 2), (1, 1, 1, 1), 9),
    (2, (9, 33), 44, 22, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 22),
    (1, (9, 33), 48, 33, (3, 3), (1, 2), (1, 1), (1, 1, 1, 1), 3),
    # Groups of several channels, of one with several output channels, and of several with one; few
    # pixels, few channels, strides, windows beside the image.
    (2, (12, 13), 24, 36, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 4),
    (2, (12, 13), 24, 36, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), 4),
    (2, (12, 13), 128, 192, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0), 2),
    (2, (12, 40), 8, 8, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 4),
    (2, (12, 13), 6, 18, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 6),
    (2, (12, 40), 96, 3, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 3),
    (1, (1, 5), 130, 8, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0), 2),
    (1, (4, 5), 6, 18, (3, 4), (1, 1), (7, 6), (7, 9, 7, 9), 2),
    (0, (4, 5), 6, 18, (3, 4), (1, 1), (1, 1), (1, 1, 1, 1), 2),
]


class Case:
    """Operands of a convolution, channels last, and its linear map in float64."""

    def __init__(self, parameters, dtype="float32", seed=0):
        batch, in_size, in_c, out_c, kernel, self.strides, self.dilations, pads = parameters[:8]
        self.groups = parameters[8] if len(parameters) > 8 else 1
        top, left, bottom, right = pads
        self.pads = ((0, 0), (top, bottom), (left, right), (0, 0))
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, self.dilations, strict=True)]
        padded = (in_size[0] + top + bottom, in_size[1] + left + right)
        self.out_size = tuple(
            (p - r) // s + 1 for p, r, s in zip(padded, reach, self.strides, strict=True)
        )
        self.sizes = {
            "batch": batch,
            "in_size": in_size,
            "in_c": in_c,
            "out_size": self.out_size,
            "out_c": out_c,
            "kernel": kernel,
            "strides": self.strides,
            "dilations": self.dilations,
            "pads": (top, left),
            "groups": self.groups,
        }
        random = np.random.default_rng(seed)

        def normal(*shape):
            return random.normal(size=shape).astype(dtype)

        self.input = normal(batch, *in_size, in_c)
        depth = in_c // self.groups
        scale = 1 / np.sqrt(max(kernel[0] * kernel[1] * depth, 1))
        filters = random.normal(size=(*kernel, depth, out_c)) * scale
        self.filters = filters.astype(dtype)
        self.bias, self.scale = normal(out_c), normal(out_c)
        self.side, self.dy = (normal(batch, *self.out_size, out_c) for _ in range(2))

    def windows(self):
        """The input under the filter, [batch, out_h, out_w, in_c, kernel_h, kernel_w]."""
        kernel = self.sizes["kernel"]
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, self.dilations, strict=True)]
        padded = np.pad(self.input.astype(np.float64), self.pads)
        view = sliding_window_view(padded, reach, axis=(1, 2))
        return view[
            :, :: self.strides[0], :: self.strides[1], :, :: self.dilations[0], :: self.dilations[1]
        ]

    @functools.cached_property
    def reference(self):
        """z without scale, bias and side input, and the gradients for dz = dy, in float64."""
        filters, dy = self.filters.astype(np.float64), self.dy.astype(np.float64)
        parts = [np.split(a, self.groups, -1) for a in (filters, dy, self.input)]
        every = zip(np.split(self.windows(), self.groups, 3), *parts, strict=True)
        found = [self._reference_of_group(*one) for one in every]
        z, dx, dw = (np.concatenate(some, -1) for some in zip(*found, strict=True))
        return z, (dx, dw, dy.sum((0, 1, 2)), dy)

    def _reference_of_group(self, windows, filters, dy, x):
        z = np.einsum("nhwcrs,rsck->nhwk", windows, filters, optimize=True)
        dw = np.einsum("nhwcrs,nhwk->rsck", windows, dy, optimize=True)
        dx = np.zeros(np.pad(x, self.pads).shape)
        for r in range(filters.shape[0]):
            for s in range(filters.shape[1]):
                h, w = r * self.dilations[0], s * self.dilations[1]
                rows = slice(h, h + (self.out_size[0] - 1) * self.strides[0] + 1, self.strides[0])
                columns = slice(
                    w, w + (self.out_size[1] - 1) * self.strides[1] + 1, self.strides[1]
                )
                dx[:, rows, columns] += dy @ filters[r, s].T
        inside = tuple(slice(a, n - b) for (a, b), n in zip(self.pads, dx.shape, strict=True))
        return z, dx[inside], dw

    def shape(self, **layouts):
        return _core.ConvShape(**self.sizes, **layouts)


case_of = remembered(Case)


def _channels_first(x):
    return np.ascontiguousarray(np.moveaxis(x, -1, 1))


def _assert_close(actual, expected, tolerance, scale=1.0):
    assert actual.shape == expected.shape
    if expected.size:
        error = np.abs(actual.astype(np.float64) - expected).max()
        assert error <= tolerance * max(scale, np.abs(expected).max()), error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_matches_float64(parameters, dtype, core_isa):
    case = case_of(parameters, dtype)
    z, gradients = case.reference
    bias, side, factors = (v.astype(np.float64) for v in (case.bias, case.side, case.scale))
    sums = (("relu", None, z + bias + side), ("relu6", case.scale, z * factors + bias + side))
    for (act, scale, expected), pack_first, save in itertools.product(sums, *[(False, True)] * 2):
        y, pre = _core.conv_forward(
            *(case.shape(), case.input, case.filters, case.bias, case.side),
            scale=scale,
            activation=act,
            pack_first=pack_first,
            save_pre_activation=save,
        )
        if save:
            _assert_close(pre, expected, TOLERANCE[dtype])
        most = 6 if act == "relu6" else np.inf
        _assert_close(y, np.clip(expected, 0, most), TOLERANCE[dtype])
    actual = _core.conv_gradient(case.shape(), case.dy, case.input, case.filters)
    for a, e in zip(actual, gradients, strict=True):
        _assert_close(a, e, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("parameters", "tap"),
    [(case, tap) for case in EDGE_CASES for tap, pad in ((0, 1), (-1, 3)) if case[7][pad]],
    ids=str,
)
def test_taps_beyond_the_edges_are_left_out(parameters, tap, core_isa):
    """What is infinite there reaches nothing that does not meet it, not even as zero times it."""
    if core_isa == "amx":
        pytest.skip("its tiles are too large to leave out columns")
    case = Case(parameters)
    shape, x, filters, dy = case.shape(), case.input, case.filters.copy(), case.dy.copy()
    y, _ = _core.conv_forward(shape, x, filters, case.bias, case.side)
    dx, dw, *_ = _core.conv_gradient(shape, dy, x, filters)
    offset = range(filters.shape[1])[tap] * case.dilations[1] - case.pads[2][0]
    columns = np.arange(case.out_size[1]) * case.strides[1] + offset  # of x, as the tap sees it
    beyond = (columns < 0) | (columns >= x.shape[2])
    others = np.isin(np.arange(x.shape[2]), columns, invert=True)
    assert beyond.any() and others.any()

    dy[:, :, beyond] = np.inf
    _, at_edges, *_ = _core.conv_gradient(shape, dy, x, filters)
    np.testing.assert_array_equal(at_edges[:, tap], dw[:, tap])
    filters[:, tap] = np.inf
    at_edges, _ = _core.conv_forward(shape, x, filters, case.bias, case.side)
    np.testing.assert_array_equal(at_edges[:, :, beyond], y[:, :, beyond])
    at_edges, *_ = _core.conv_gradient(shape, case.dy, x, filters)
    np.testing.assert_array_equal(at_edges[:, :, others], dx[:, :, others])


def test_filters_that_no_cache_holds(core_isa):
    """They meet long sums in parts, each of which adds to what those before have written."""
    case = Case((1, (30, 19), 3100, 2040, (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)))
    z, gradients = case.reference
    expected = z * case.scale + case.bias + case.side
    scratch, _ = _core.conv_scratch_bytes(case.shape())
    assert scratch < case.filters.nbytes / 2
    arrays = (case.input, case.filters, case.bias, case.side)
    for threads, pack_first in itertools.product((1, 3), (False, True)):
        y, pre = _core.conv_forward(
            *(case.shape(), *arrays),
            scale=case.scale,
            activation="relu",
            num_threads=threads,
            pack_first=pack_first,
            save_pre_activation=True,
        )
        _assert_close(pre, expected, TOLERANCE["float32"])
        np.testing.assert_array_equal(y, np.maximum(pre, 0))
    actual = _core.conv_gradient(case.shape(), case.dy, case.input, case.filters)
    for a, e in zip(actual, gradients, strict=True):
        _assert_close(a, e, TOLERANCE["float32"])


@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_layouts_agree(parameters, core_isa):
    """Channels first and transposed filters are other address maps of the same sums."""
    case = case_of(parameters)
    y, _ = _core.conv_forward(case.shape(), case.input, case.filters, case.bias, case.side)
    expected = _core.conv_gradient(case.shape(), case.dy, case.input, case.filters)
    transposed = case.groups == 1
    shape = case.shape(
        input_channels_first=True, output_channels_first=True, filters_transposed=transposed
    )
    x, side, dy = (_channels_first(a) for a in (case.input, case.side, case.dy))
    filters = np.ascontiguousarray(case.filters.swapaxes(2, 3)) if transposed else case.filters
    other, _ = _core.conv_forward(shape, x, filters, case.bias, side)
    np.testing.assert_allclose(np.moveaxis(other, 1, -1), y, rtol=0, atol=3e-6)
    dx, dw, db, dz = _core.conv_gradient(shape, dy, x, filters)
    scale = max(np.abs(expected[1]).max(initial=0), 1)
    _assert_close(np.moveaxis(dx, 1, -1), expected[0], TOLERANCE["float32"])
    dw = dw.swapaxes(2, 3) if transposed else dw
    np.testing.assert_allclose(dw, expected[1], rtol=0, atol=3e-6 * scale)
    np.testing.assert_allclose(db, expected[2], rtol=0, atol=3e-6 * scale)
    np.testing.assert_array_equal(np.moveaxis(dz, 1, -1), expected[3])


@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_threads_do_not_change_a_bit(parameters, core_isa):
    case = case_of(parameters)
    runs = []
    for num_threads in (1, 2, 5):
        options = {"activation": "gelu_tanh", "num_threads": num_threads}
        y, pre = _core.conv_forward(case.shape(), case.input, case.filters, case.bias, **options)
        runs.append(
            [
                y,
                *_core.conv_gradient(
                    case.shape(), case.dy, case.input, case.filters, pre, **options
                ),
            ]
        )
    for run in runs[1:]:
        for a, b in zip(runs[0], run, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_moments_are_those_of_the_output(parameters, dtype, core_isa):
    """Also far from zero: |mean| is 300 standard deviations."""
    case = case_of(parameters, dtype)
    bias = case.bias + np.asarray(300, dtype)
    for activation in ("none", "relu", "tanh"):
        options = {"activation": activation}
        y, moments = _core.conv_moments(case.shape(), case.input, case.filters, bias, **options)
        alone, _ = _core.conv_forward(case.shape(), case.input, case.filters, bias, **options)
        np.testing.assert_array_equal(y, alone)
        values = y.astype(np.float64).reshape(-1, y.shape[-1])
        mean = values.mean(0) if values.size else 0
        np.testing.assert_array_equal(moments[0], len(values))
        np.testing.assert_allclose(moments[1], mean, rtol=1e-7)
        squares = ((values - mean) ** 2).sum(0)
        np.testing.assert_allclose(moments[2], squares, rtol=3e-6, atol=1e-20)


def test_moments_are_taken_in_the_tiles(core_isa):
    """A pass of its own adds in another order, which shows in the last digits."""
    taken = {}
    for name, out_c, layouts in (
        ("whole vectors", 48, {}),
        ("half a vector", 40, {}),
        ("a part of a vector", 45, {}),
        ("channels first", 48, {"output_channels_first": True}),
    ):
        case = Case((3, (30, 31), 20, out_c, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)))
        shape = case.shape(**layouts)
        y, moments = _core.conv_moments(shape, case.input, case.filters, case.bias)
        mean, squares = _core.batch_norm_moments(y, channels_first=bool(layouts))
        np.testing.assert_allclose(moments[1:], [mean, squares], rtol=1e-6, atol=1e-8)
        taken[name] = not np.array_equal(moments[1:], [mean, squares])
    assert taken == {
        "whole vectors": True,
        "half a vector": core_isa != "amx",
        "a part of a vector": False,
        "channels first": False,
    }


@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_threads_do_not_change_moments(parameters, core_isa):
    case = case_of(parameters)
    runs = [
        _core.conv_moments(case.shape(), case.input, case.filters, num_threads=n)[1]
        for n in (1, 2, 5)
    ]
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 7, 5), (1, 300, 65, 97), (3, 17, 33, 2)], ids=str)
def test_matmul(sizes, transpose_a, transpose_b, core_isa):
    batch, m, k, n = sizes
    random = np.random.default_rng(0)
    a = random.normal(size=(batch, m, k)).astype(np.float32)
    b = (random.normal(size=(k, n)) / np.sqrt(k)).astype(np.float32)
    dy = random.normal(size=(batch, m, n)).astype(np.float32)
    shape = _core.ConvShape.matmul(batch, m, k, n, transpose_a, transpose_b)
    x = a.swapaxes(1, 2)[:, :, None] if transpose_a else a[:, None]
    w = b.T[None, None] if transpose_b else b[None, None]
    x, w = np.ascontiguousarray(x), np.ascontiguousarray(w)
    y, _ = _core.conv_forward(shape, x, w)
    _assert_close(y[:, 0], a.astype(np.float64) @ b, TOLERANCE["float32"])
    dx, dw, db, _ = _core.conv_gradient(shape, dy[:, None], x, w)
    da = dx[:, :, 0].swapaxes(1, 2) if transpose_a else dx[:, 0]
    _assert_close(da, dy.astype(np.float64) @ b.T, TOLERANCE["float32"])
    product = np.einsum("bmk,bmn->kn", a.astype(np.float64), dy)
    _assert_close(dw[0, 0].T if transpose_b else dw[0, 0], product, TOLERANCE["float32"])
    _assert_close(db, dy.astype(np.float64).sum((0, 1)), TOLERANCE["float32"])


def test_pixels_between_strides_come_from_one_product(core_isa):
    """So zero stands for the taps that some lack, and meets what is infinite."""
    case = Case((1, (16, 16), 5, 3, (7, 7), (4, 4), (1, 1), (3, 3, 3, 3)))
    dy = np.zeros_like(case.dy)
    # Its window are pixels 1 to 7, those of the first two blocks but for pixel 0.
    dy[0, 1, 1] = np.inf
    dx, *_ = _core.conv_gradient(case.shape(), dy, case.input, case.filters)
    assert np.all(np.isnan(dx[0, 0, :8]))
    assert np.all(dx[0, 8:] == 0)
    shape = case.shape(input_channels_first=True)
    dx, *_ = _core.conv_gradient(shape, dy, _channels_first(case.input), case.filters)
    assert np.all(dx[0, :, 0] == 0)
    assert not np.isfinite(dx[0, :, 1:8, 1:8]).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [40, 1024])
@pytest.mark.parametrize("kernel", [3, 7])
def test_channels_of_their_own_are_read_where_they_are(kernel, channels, dtype, core_isa):
    """So an infinite filter meets no zero beside the image; it does where they are gathered, as
    pixels are that lie pages apart, or half a page if they are widened twice for a row of taps."""
    margin = kernel // 2
    sizes = ((9, 40), channels, channels, (kernel, kernel), (1, 1), (1, 1), (margin,) * 4)
    case = Case((1, *sizes, channels), dtype)
    filters = case.filters.copy()
    filters[:, 0] = np.inf
    x = np.ones_like(case.input)
    y, _ = _core.conv_forward(case.shape(), x, filters)
    assert np.all(np.isinf(y[:, :, margin:]))
    beside = y[:, :, 0].astype(np.float64)
    shape = case.shape(input_channels_first=True)
    gathered, _ = _core.conv_forward(shape, _channels_first(x), filters)
    assert np.all(np.isnan(gathered[:, :, 0]))
    widened = case.input.itemsize == 2
    collide = channels == 1024 and not (widened and kernel == 3)
    if collide or (widened and core_isa in ("portable", "avx2")):
        assert np.all(np.isnan(beside))
    else:
        taps = case.filters[margin:, margin:, 0].astype(np.float64)
        _assert_close(beside[0, 0], taps.sum((0, 1)), TOLERANCE[dtype])


def test_wrong_operands_are_refused():
    case = Case(CASES[0])
    with pytest.raises(ValueError, match="filters"):
        _core.conv_forward(case.shape(), case.input, case.filters[:, :, :-1])
    with pytest.raises(ValueError, match="activation"):
        _core.conv_forward(case.shape(), case.input, case.filters, activation="softmax")
    with pytest.raises(ValueError, match="saved"):
        _core.conv_gradient(case.shape(), case.dy, case.input, case.filters, activation="relu")
    with pytest.raises(ValueError, match="groups"):
        _core.ConvShape(**case.sizes | {"groups": 2})
    with pytest.raises(ValueError, match="groups"):
        _core.ConvShape(**Case(CASES[-1]).sizes, filters_transposed=True)
    with pytest.raises(ValueError, match="instruction set"):
        _core.set_isa("sse9")


def test_bfloat16_is_multiplied_by_pairs(core_isa):
    """The instruction takes subnormal numbers for zero, which widened ones are not."""
    shape = _core.ConvShape.matmul(1, 1500, 6, 8)
    small, large = (
        [np.full(s, value, "bfloat16") for s in [(1, 1, 1500, 6), (1, 1, 6, 8), (1, 1, 1500, 8)]]
        for value in (2.0**-130, 2.0**100)
    )
    y, _ = _core.conv_forward(shape, small[0], large[1])
    dx, *_ = _core.conv_gradient(shape, large[2], large[0], small[1])
    _, dw, *_ = _core.conv_gradient(shape, large[2], small[0], large[1])
    for product in (y, dx, dw):
        assert np.all((product == 0) == (core_isa in PAIRED_ISAS))
