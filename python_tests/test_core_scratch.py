"""What the engine's scratch memory amounts to: a stated bound, and less where a path needs none."""

import numpy as np
import pytest
from cases import ConvCase

from tf_fused_ops import _core

MIB = 1 << 20
# What a thread holds of the images, of filters and of sums (docs/memory.md).
THREAD_BYTES = 3 * MIB // 2
# Of few pixels, together.
FEW_PIXELS_BYTES = 16 * MIB
# Sets of sums of a filter gradient, together.
SUMS_BYTES = 4 * MIB


pytestmark = pytest.mark.usefixtures("core_isa")


def shape(batch, size, cin, cout, kernel, stride=1, groups=1):
    case = ConvCase(batch, (size, size), cin, cout, (kernel, kernel), (stride, stride))
    (top, _), (left, _) = case.pads()
    return _core.ConvShape(
        batch=batch,
        in_size=case.image,
        in_c=cin,
        out_size=case.output_image(),
        out_c=cout,
        kernel=case.kernel,
        strides=case.strides,
        pads=(top, left),
        groups=groups,
    )


def in_parts():
    """Whether a float32 is multiplied as three bfloat16, which take half as much memory again."""
    return _core.isa() == "amx"


def filter_bytes(cin, cout, kernel):
    # In whole panels, of at most 32 columns.
    return (6 if in_parts() else 4) * kernel * kernel * cin * -(-cout // 32) * 32


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "sizes",
    [
        (4, 56, 64, 64, 3),
        (2, 56, 64, 256, 1),
        (2, 112, 3, 64, 7, 2),
        (2, 14, 256, 256, 3),
        (16, 5, 512, 512, 3),
        (2, 112, 64, 3, 3),
        (2, 256, 64, 3, 9),
        (1, 14, 1024, 12, 3),
    ],
)
def test_scratch_is_bounded(sizes, threads):
    _, _, cin, cout, kernel, *_ = sizes
    forward, gradient = _core.conv_scratch_bytes(shape(*sizes), threads)
    assert forward <= filter_bytes(cin, cout, kernel) + threads * THREAD_BYTES
    # The gradients of input and filters one after the other.
    bound = filter_bytes(cout, cin, kernel) + max(filter_bytes(cin, cout, kernel), SUMS_BYTES)
    assert gradient <= bound + 2 * threads * THREAD_BYTES


@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [(9, 2048, 1024), (33, 1152, 1000), (96, 9000, 512), (200, 5000, 1024)],
)
def test_filters_of_few_pixels_are_not_copied_whole(rows, depth, columns):
    few, _ = _core.conv_scratch_bytes(_core.ConvShape.matmul(1, rows, depth, columns))
    many, _ = _core.conv_scratch_bytes(_core.ConvShape.matmul(1, 1024, depth, columns))
    assert few < rows * depth * (6 if in_parts() else 4) + 2 * THREAD_BYTES
    assert few < FEW_PIXELS_BYTES + THREAD_BYTES
    # Long sums are computed in parts of their length, and the filters of one part are needed.
    assert many > (few if in_parts() else depth * columns * 4)


def test_filters_that_no_cache_holds_are_copied_in_parts():
    depth, columns = 8192, 1024
    scratch, _ = _core.conv_scratch_bytes(_core.ConvShape.matmul(1, 1024, depth, columns))
    assert scratch < depth * columns * 2


@pytest.mark.parametrize("rows", [1, 4, 8, 16])
def test_filters_of_few_rows_are_read_as_they_are(rows):
    """The rows and the sums of some parts of the depth are all that is needed."""
    plain, transposed = (
        _core.conv_scratch_bytes(_core.ConvShape.matmul(1, rows, 2048, 1024, *transposes))[0]
        for transposes in ((False, False), (False, True))
    )
    assert plain < rows * 2048 * 4 + 8 * max(rows, 4) * (1024 + 32) * 4 + 1024
    assert transposed < rows * 2048 * 4 + 1024


def test_filters_of_input_gradients_are_read_as_they_are():
    """Few rows of dz meet them one by one; more, up to half of their columns, are packed."""
    few, half, more = (
        _core.conv_scratch_bytes(_core.ConvShape.matmul(1, rows, 2048, 1024))[1]
        for rows in (12, 256, 1025)
    )
    assert few < 12 * (2048 + 1024) * 4 + MIB // 4
    assert half < filter_bytes(2048, 1024, 1) // 2 < more // 2


@pytest.mark.parametrize("columns", [1, 4])
def test_factors_of_few_columns_are_read_as_they_are(columns):
    """The filters, transposed; for their gradient dz, transposed, eight sets of sums, whose lines
    are a little longer, and what the bias gradient gathers of dz."""
    few, more = (
        _core.conv_scratch_bytes(_core.ConvShape.matmul(1, 2048, 2048, n)) for n in (columns, 5)
    )
    factors = columns * 2048 * 4
    assert few[0] < factors + 1024
    assert few[1] < 9 * factors * 33 // 32 + MIB // 8 < more[1]


def test_threads_share_bands_evenly_where_results_do_not_depend_on_bands():
    """Three threads have a band of 192 rows each, two have four of 128."""
    one, two, three = (
        _core.conv_scratch_bytes(_core.ConvShape.matmul(1, 512, 512, 2048), threads)[0]
        - filter_bytes(512, 2048, 1)
        for threads in (1, 2, 3)
    )
    if in_parts():
        row, sums = 512 * 6, 64 * 1024
        assert 2 * 128 * row < two < 2 * (128 * row + sums)
        assert 3 * 192 * row < three < 3 * (192 * row + sums)
    else:
        assert two - one == three - two


def test_few_channels_are_broadcast():
    """Filters of two channels more, and two rows of a tile's sums; panels have room for them."""
    one, three = (_core.conv_scratch_bytes(shape(2, 28, 64, cout, 3))[0] for cout in (1, 3))
    assert 0 <= three - one - 9 * 64 * 2 * 4 <= 2 * 32 * 4


def test_input_gradients_of_few_channels_are_broadcast():
    """Panels of the filters alone would take more. Blocks of 2x2 pixels do not fill the image."""
    _, taken = _core.conv_scratch_bytes(shape(2, 57, 1, 64, 7, 2))
    assert taken < filter_bytes(64, 1, 7)


def test_filter_gradients_of_few_channels_exchange_operands():
    """Sums are of the taps and 64 columns, not of the taps' 64 rows each and a panel's columns."""
    _, taken = _core.conv_scratch_bytes(shape(8, 28, 64, 1, 5))
    assert taken < SUMS_BYTES // (4 if in_parts() else 8)


def test_gradients_of_many_pixels_come_from_one_gathered_dz():
    """The input gradient by itself would gather bands of dz once more."""
    _, taken = _core.conv_scratch_bytes(_core.ConvShape.matmul(1, 4096, 64, 256))
    sums = 16 * 65 * 256 * 4
    # Of a band.
    pixels = 192 if _core.isa() in ("portable", "avx2") else 126
    filters, dz, x = filter_bytes(64, 256, 1), pixels * 256 * 4, 0
    if in_parts():
        dz = 128 * 256 * (4 + 2 * 6)  # as numbers, and in parts for either gradient
        x = 64 * 160 * 6
    assert sums < taken < sums + filters + dz + x + 64 * 1024


def test_channels_of_their_own_are_not_gathered():
    """Filters, and where taps lie; of the filter gradient, x alone is gathered."""
    forward, gradient = _core.conv_scratch_bytes(shape(1, 56, 64, 64, 7, groups=64))
    few, _ = _core.conv_scratch_bytes(shape(1, 56, 3, 3, 7, groups=3))
    filters = 49 * 64 * 4
    assert forward < filters + 4096
    assert few > 16 * 62 * 4 * 4
    assert gradient < 32 * filters + 640 * 1024


@pytest.mark.parametrize("channels", [3, 48])
def test_windows_side_by_side_are_pixels_of_more_channels(channels):
    """The lines of an 8x4 window of three channels: one pixel of twelve each."""
    sizes = {"batch": 2, "out_c": 40, "out_size": (7, 7)}
    shapes = (
        {"in_size": (56, 28), "in_c": channels, "kernel": (8, 4), "strides": (8, 4)},
        {"in_size": (56, 7), "in_c": 4 * channels, "kernel": (8, 1), "strides": (8, 1)},
    )
    window, line = (_core.conv_scratch_bytes(_core.ConvShape(**sizes, **s)) for s in shapes)
    assert window == line


def test_small_images_are_gathered_together():
    """Ten sets of sums each; of 40 images, four are gathered at a time."""
    apart, together = (_core.conv_scratch_bytes(shape(batch, 5, 6, 9, 3))[1] for batch in (10, 40))
    image, dz = 7 * 7 * 6 * 4, 5 * 5 * 9 * 4
    assert together - apart >= 3 * (image + dz)


def test_channels_are_divided_where_images_and_filters_are_few():
    """So that there are tasks; of many images, each task gathers all channels."""
    few, many = (
        np.diff([_core.conv_scratch_bytes(shape(batch, 14, 256, 16, 3), n)[1] for n in (1, 2)])
        for batch in (2, 16)
    )
    x = 16 * 16 * 256 * 4
    assert few + x // 2 < many


@pytest.mark.parametrize("columns", [1024, 1023])
def test_large_filter_gradients_hold_their_own_sums(columns):
    _, in_place = _core.conv_scratch_bytes(_core.ConvShape.matmul(1, 8, 2048, columns))
    transposed = _core.ConvShape.matmul(1, 8, 2048, columns, False, True)
    _, copied = _core.conv_scratch_bytes(transposed)
    assert in_place < 2 * MIB
    assert copied > 2048 * columns * 4
