"""Recurrent layers: cells, and what runs them over all steps."""

import tensorflow as tf

from tf_fused_ops.ops import activations
from tf_fused_ops.ops.reference.elementwise import wide


def _gates(values, cell):
    return tf.split(values, NUM_GATES[cell], -1)


def _rnn(x, p, states, act):
    return [act(x + p)], []


def _gru(x, p, states, act):
    x, p = _gates(x, "gru"), _gates(p, "gru")
    z, r = tf.sigmoid(x[0] + p[0]), tf.sigmoid(x[1] + p[1])
    n = act(x[2] + r * p[2])
    return [z * states[0] + (1 - z) * n], [z, r, n, p[2]]


def _lstm(x, p, states, act):
    z = _gates(x + p, "lstm")
    i, f, o = (tf.sigmoid(z[k]) for k in (0, 1, 3))
    g = act(z[2])
    c = f * states[1] + i * g
    return [o * act(c), c], [i, f, g, o, c]


# Each returns the gradients of x, of the products, and of the states but for what is the products'.
def _rnn_grad(dh, dc, y, saved, before, act, slope):
    dz = dh * slope(y)
    return [dz], [dz], [tf.zeros_like(dh), dc]


def _gru_grad(dh, dc, y, saved, before, act, slope):
    z, r, n, p = saved
    dz = dh * (before[0] - n) * z * (1 - z)
    dn = dh * (1 - z) * slope(n)
    dr = dn * p * r * (1 - r)
    return [dz, dr, dn], [dz, dr, dn * r], [dh * z, dc]


def _lstm_grad(dh, dc, y, saved, before, act, slope):
    i, f, g, o, c = saved
    a = act(c)
    dc = dc + dh * o * slope(a)
    df = dc * before[1] * f * (1 - f)
    dz = [dc * g * i * (1 - i), df, dc * i * slope(g), dh * a * o * (1 - o)]
    return dz, dz, [tf.zeros_like(dh), dc * f]


_CELLS = {"rnn": _rnn, "gru": _gru, "lstm": _lstm}
_GRADIENTS = {"rnn": _rnn_grad, "gru": _gru_grad, "lstm": _lstm_grad}
NUM_GATES = {"rnn": 1, "gru": 3, "lstm": 4}
_NUM_SAVED = {"rnn": 0, "gru": 4, "lstm": 5}


def recurrent(x, kernel, states, bias=None, mask=None, *, cell, activation, backwards=False):
    """All steps of a recurrent layer; see the documentation of the op.

    Args:
        x: [batch, steps, gates].
        kernel: [units, gates].
        states: h and, for "lstm", c; [batch, units].
        bias: [gates], or None.
        mask: [batch, steps], or None.
        cell: "rnn", "gru" or "lstm".
        activation: "tanh" or "relu".
        backwards: Whether the last step comes first.

    Returns:
        A list: y, the states behind the last step, and what the gradient reads.
    """
    dtype = x.dtype
    x, kernel, *states = (wide(value) for value in (x, kernel, *states))
    bias = 0.0 if bias is None else wide(bias)

    def act(z):
        return activations.STOCK[activation](z, 0.0)

    def step(before, now):
        y, states, _ = before
        x, keep = now
        new, saved = _CELLS[cell](x, states[0] @ kernel + bias, states, act)
        # The op reads the states that it wrote.
        new[0] = wide(tf.cast(new[0], dtype))
        kept = [tf.where(keep, a, b) for a, b in zip(new, states, strict=True)]
        saved = [tf.where(keep, value, tf.zeros_like(value)) for value in saved]
        if cell == "lstm":
            saved[-1] = kept[1]
        return tf.where(keep, new[0], y), tuple(kept), tf.concat([*saved, y[:, :0]], -1)

    batch, units = tf.unstack(tf.shape(states[0]))
    nothing = tf.zeros([batch, _NUM_SAVED[cell] * units], x.dtype)
    start = (tf.zeros_like(states[0]), tuple(states), nothing)
    y, all_states, saved = _scan(step, start, (x, _kept(mask, x)), backwards)
    last = [_end(new, old, backwards) for new, old in zip(all_states, states, strict=True)]
    return [tf.cast(value, dtype) for value in (y, *last, saved)]


def recurrent_grad(dy, dlast, kernel, y, saved, states, mask=None, *, cell, activation, backwards):
    """The gradients of `recurrent` that follow from step to step.

    Args:
        dy: The gradient of y.
        dlast: The gradients of the states behind the last step.
        kernel: As for `recurrent`.
        y: What `recurrent` returned first.
        saved: What it returned last.
        states: As for `recurrent`.
        mask: As for `recurrent`.
        cell: As for `recurrent`.
        activation: As for `recurrent`.
        backwards: As for `recurrent`.

    Returns:
        A list: the gradients of x, of the products h kernel + bias where these are not the same,
        otherwise an empty tensor, and those of the states.
    """
    dtype = dy.dtype
    h = wide(states_before(y, states[0], mask, backwards))
    dy, kernel, y, saved = (wide(value) for value in (dy, kernel, y, saved))
    dstates = [wide(value) for value in dlast]
    if cell == "lstm":
        c = _shifted(saved[..., -tf.shape(kernel)[0] :], wide(states[1]), backwards)
    else:
        c, dstates = h, [*dstates, tf.zeros_like(dstates[0])]

    def act(z):
        return activations.STOCK[activation](z, 0.0)

    def slope(value):
        return activations.gradient(activation, tf.ones_like(value), value, 0.0)

    def step(after, now):
        dh, dc = after[2]
        dy, y, saved, h, c, keep, seen = now
        dh = dh + tf.where(seen, dy, tf.zeros_like(dy))
        saved = tf.split(saved, _NUM_SAVED[cell], -1) if _NUM_SAVED[cell] else []
        found = _GRADIENTS[cell](dh, dc, y, saved, (h, c), act, slope)
        dx, dp = (tf.concat(values, -1) for values in found[:2])
        dx, dp = (tf.where(keep, value, tf.zeros_like(value)) for value in (dx, dp))
        new = [tf.where(keep, a, b) for a, b in zip(found[2], (dh, dc), strict=True)]
        through = wide(tf.cast(dp, dtype))
        new[0] += tf.matmul(through, kernel, transpose_b=True)
        return dx, dp, tuple(new)

    keep = _kept(mask, dy)
    now = (dy, y, saved, h, c, keep, _seen(mask, dy, backwards, exclusive=False))
    gates = tf.zeros([tf.shape(dy)[0], tf.shape(kernel)[1]], dy.dtype)
    dx, dp, all_states = _scan(step, (gates, gates, tuple(dstates)), now, not backwards)
    first = [_end(new, old, not backwards) for new, old in zip(all_states, dstates, strict=True)]
    dp = dp if cell == "gru" else tf.zeros([0], dy.dtype)
    return [tf.cast(value, dtype) for value in (dx, dp, *first[: len(states)])]


def states_before(y, state, mask, backwards):
    """Returns h before every step, [batch, steps, units].

    Args:
        y: h behind every step, or what a masked one has in its place.
        state: h before the first step.
        mask: [batch, steps], or None.
        backwards: Whether the last step comes first.
    """
    before = _shifted(y, state, backwards)
    if mask is None:
        return before
    # Before any step that counts y is zero, not h.
    return tf.where(_seen(mask, y, backwards, exclusive=True), before, state[:, None])


def _shifted(values, first, backwards):
    first = first[:, None]
    parts = [values[:, 1:], first] if backwards else [first, values[:, :-1]]
    # There may be no steps at all.
    return tf.concat(parts, 1)[:, : tf.shape(values)[1]]


def _end(values, start, backwards):
    """The last of some values, [batch, steps, units], or what they started from."""
    start = start[:, None]
    if backwards:
        return tf.concat([values, start], 1)[:, 0]
    return tf.concat([start, values], 1)[:, -1]


def _kept(mask, x):
    """The mask, [batch, steps, 1]."""
    return tf.ones(tf.shape(x[..., :1]), tf.bool) if mask is None else mask[..., None]


def _seen(mask, x, backwards, exclusive):
    """Whether a step has counted so far, [batch, steps, 1]."""
    kept = tf.cast(_kept(mask, x), tf.int32)
    return tf.cumsum(kept, 1, exclusive=exclusive, reverse=backwards) > 0


def _scan(step, start, sequences, reverse):
    """tf.scan over dimension 1."""
    sequences = tf.nest.map_structure(_swapped, sequences)
    return tf.nest.map_structure(_swapped, tf.scan(step, sequences, start, reverse=reverse))


def _swapped(values):
    return tf.transpose(values, [1, 0, 2])
