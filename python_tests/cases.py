"""The shapes and attributes on which tests and benchmarks run the ops."""

import dataclasses
import itertools

import numpy as np

from tf_fused_ops.bench.cases import ALPHA as ALPHA
from tf_fused_ops.bench.cases import (
    EPSILON,
    BatchNormCase,
    Case,
    ConvCase,
    ConvTransposeCase,
    MatMulCase,
)

# They end in either half of either vector of a tile's columns.
CHANNELS = (1, 3, 17, 31, 33, 44, 64, 100)
ACTIVATIONS = (
    "none",
    "relu",
    "relu6",
    "elu",
    "selu",
    "leaky_relu",
    "sigmoid",
    "tanh",
    "softplus",
    "hard_sigmoid",
    "silu",
    "hard_swish",
    "mish",
    "gelu_tanh",
    "gelu_erf",
)
# Instruction sets that multiply pairs of bfloat16, and take subnormal ones for zero.
PAIRED_ISAS = ("avx512_bf16", "amx")
DTYPES = ("float32", "float16", "bfloat16", "float64")
QUANTIZED_DTYPES = DTYPES[:3]
LAYOUTS = ("NHWC", "NCHW")
# Where an activation or its slope jumps; finite differences must stay away from there.
KINKS = {
    "relu": (0.0,),
    "relu6": (0.0, 6.0),
    "elu": (0.0,),
    "selu": (0.0,),
    "leaky_relu": (0.0,),
    "hard_sigmoid": (-3.0, 3.0),
    "hard_swish": (-3.0, 3.0),
}


@dataclasses.dataclass(frozen=True)
class ActCase(Case):
    """An activation of a tensor."""

    shape: tuple = (5, 6)
    act: str = "gelu_erf"
    dtype: str = "float32"

    def attributes(self):
        """Keyword arguments for `act` and for `reference.act`."""
        return {"activation": self.act, "alpha": ALPHA}

    def inputs(self, seed=0):
        """float64 arrays x, over all of the activation's range, and dy."""
        rng = np.random.default_rng(seed)
        return [3 * rng.normal(size=self.shape), rng.normal(size=self.shape)]


@dataclasses.dataclass(frozen=True)
class RecurrentOpCase(Case):
    """A recurrent layer: `shape` is (batch, steps, features, units)."""

    cell: str = "lstm"
    shape: tuple = (3, 4, 2, 3)
    act: str = "tanh"
    backwards: bool = False
    masked: bool = True
    bias: bool = True
    # Whether states before the first step are given.
    states: bool = True
    # What is asked for, and has a gradient: "both", "y" or "last".
    used: str = "both"
    dtype: str = "float32"

    def attributes(self):
        """Keyword arguments for the wrappers."""
        return {"activation": self.act, "go_backwards": self.backwards}

    def inputs(self, seed=0):
        """float64 arrays by name, h and c being the states, and the gradients of what is used."""
        batch, steps, features, units = self.shape
        gates = {"rnn": 1, "gru": 3, "lstm": 4}[self.cell] * units
        vectors = {"bias": (gates,)} if self.bias else {}
        if vectors and self.cell == "gru":
            vectors["recurrent_bias"] = (gates,)
        names = ("h", "c") if self.cell == "lstm" else ("h",)
        states = dict.fromkeys(names, (batch, units))
        shapes = {
            "x": (batch, steps, features),
            "kernel": (features, gates),
            "recurrent_kernel": (units, gates),
            **vectors,
            **(states if self.states else {}),
        }
        rng = np.random.default_rng(seed)
        values = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        values["kernel"] /= np.sqrt(features)
        # Over many steps neither states nor gradients grow.
        values["recurrent_kernel"] *= 0.5 / np.sqrt(units)
        used = {"y": (batch, steps, units), **states}
        for name in {"y": names, "last": ("y",)}.get(self.used, ()):
            del used[name]
        return values, [rng.normal(size=shape) for shape in used.values()]

    def mask(self, seed=0):
        """Rows that are masked from the start, in the middle, at the end, throughout, anywhere."""
        batch, steps = self.shape[:2]
        if not self.masked:
            return None
        mask, third = np.ones((batch, steps), bool), -(-steps // 3)
        places = slice(third), slice(third, 2 * third), slice(-third, None), slice(None)
        for row in range(batch):
            kind = (row + steps) % 5
            if kind < len(places):
                mask[row, places[kind]] = False
            else:
                mask[row] = np.random.default_rng(seed + row).uniform(size=steps) < 0.6
        return mask


@dataclasses.dataclass(frozen=True)
class QuantizedOpCase(Case):
    """A product of rows that are quantized, a [*lead, m, k], with int8 b [k, n]."""

    lead: tuple = ()
    m: int = 5
    k: int = 4
    n: int = 3
    tb: bool = False
    bias: bool = True
    act: str = "none"
    dtype: str = "float32"

    def attributes(self):
        """Keyword arguments for the wrapper and for the reference."""
        return {
            "transpose_b": self.tb,
            "epsilon": EPSILON,
            "activation": self.act,
            "alpha": ALPHA,
        }

    def inputs(self, seed=0):
        """Arrays a, int8 b, b_scale, bias or None, dy; float64 but for b."""
        rng = np.random.default_rng(seed)
        a = rng.normal(size=(*self.lead, self.m, self.k))
        b = rng.integers(-128, 128, (self.n, self.k) if self.tb else (self.k, self.n), np.int8)
        # The lowest number along the whole of one dimension, the largest along the other.
        b[::7], b[:, ::5] = -128, 127
        b_scale = rng.uniform(50, 200, self.n) * np.sqrt(max(1, self.k))
        bias = rng.normal(size=self.n) if self.bias else None
        return a, b, b_scale, bias, rng.normal(size=(*self.lead, self.m, self.n))


@dataclasses.dataclass(frozen=True)
class WeightOnlyOpCase(Case):
    """A product of a [*lead, m, k] with weights [k, n] of 4 or 8 bits, as `b` has them in bytes."""

    lead: tuple = ()
    m: int = 5
    k: int = 4
    n: int = 3
    bits: int = 4
    packed_axis: int = 1
    signed: bool = True
    tb: bool = False
    zero: bool = True
    # Rows of one group, 0 for all; with "none" that of groups of equal size.
    part: int = 0
    # How the op learns the groups: "none", not at all; "parts", of neighbours and in any order;
    # "any", of rows anywhere. Some count from the last group backwards.
    group: str = "none"
    bias: bool = True
    act: str = "none"
    dtype: str = "float32"

    def attributes(self):
        """Keyword arguments for the wrapper and for the reference."""
        return {
            "transpose_b": self.tb,
            "bits": self.bits,
            "packed_axis": self.packed_axis,
            "activation": self.act,
            "alpha": ALPHA,
        }

    def groups(self):
        """How many there are."""
        return max(1, -(-self.k // self.part)) if self.part else 1

    def inputs(self, seed=0):
        """Arrays a, bytes b, scale, zero, int32 group, bias, None where one is missing, and dy;
        float64 but for b and group. What no integer is in has any bits."""
        rng = np.random.default_rng(seed)
        a = rng.normal(size=(*self.lead, self.m, self.k))
        sizes = [self.n, self.k] if self.tb else [self.k, self.n]
        if self.bits == 4:
            sizes[self.packed_axis] = -(-sizes[self.packed_axis] // 2)
        b = rng.integers(0, 256, sizes, np.uint8)
        if b.size >= 256:
            b.reshape(-1)[rng.permutation(b.size)[:256]] = np.arange(256)
        shape = (self.n, self.groups()) if self.tb else (self.groups(), self.n)
        # Weights are about as large as those of layers.
        scale = rng.uniform(0.5, 1.5, shape) / (2 ** (self.bits - 2) * np.sqrt(max(1, self.k)))
        middle = 0 if self.signed else 2 ** (self.bits - 1)
        zero = middle + rng.uniform(-3, 3, shape) if self.zero else None
        group = None
        if self.group != "none":
            parts = np.arange(self.k) // max(1, self.part or self.k)
            group = rng.permutation(self.groups())[parts]
            if self.group == "any":
                group = rng.permutation(group)
            back = rng.integers(0, 2, self.groups())[group] * self.groups()
            group = (group - back).astype(np.int32)
        bias = rng.normal(size=self.n) if self.bias else None
        dy = rng.normal(size=(*self.lead, self.m, self.n))
        return a, b.view(np.int8) if self.signed else b, scale, zero, group, bias, dy


def pairwise(factors, allowed=lambda row: True, seed=0):
    """Rows that hold every allowed pair of values of any two factors at least once.

    Args:
        factors: A dict from name to the sequence of its values.
        allowed: Tells whether a row, a dict from name to value, may occur.
        seed: Seed of the search.

    Returns:
        A list of dicts.
    """
    names, rng = list(factors), np.random.default_rng(seed)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }

    def covered(index):
        return {(a, index[a], b, index[b]) for a, b in itertools.combinations(names, 2)}

    rows = []
    while missing:
        a, i, b, j = min(missing)
        candidates = []
        for _ in range(60):
            index = {name: int(rng.integers(len(values))) for name, values in factors.items()}
            index |= {a: i, b: j}
            if allowed({name: factors[name][k] for name, k in index.items()}):
                candidates.append((len(covered(index) & missing), index))
        if not candidates:
            missing.discard((a, i, b, j))
            continue
        index = max(candidates, key=lambda candidate: candidate[0])[1]
        missing -= covered(index)
        rows.append({name: factors[name][k] for name, k in index.items()})
    return rows


def conv_cases():
    """Pairwise over sizes, layouts, paddings, optional inputs, activations and dtypes."""
    factors = {
        "act": ACTIVATIONS,
        "cin": CHANNELS,
        "cout": CHANNELS,
        "dtype": DTYPES,
        "image": ((1, 1), (2, 7), (5, 6), (9, 4), (13, 13)),
        "kernel": ((1, 1), (3, 3), (2, 3), (5, 5), (7, 1)),
        "strides": ((1, 1), (2, 2), (3, 1), (4, 5)),
        "padding": ("SAME", "VALID", ((1, 2), (3, 0)), ((0, 0), (4, 4))),
        "dilations": ((1, 1), (2, 1), (2, 3)),
        "batch": (1, 3, 0),
        "layout": LAYOUTS,
        "bias": (True, False),
        "side": (False, True),
    }
    rows = pairwise(factors, lambda row: min(ConvCase(**row).output_image()) > 0)
    return [ConvCase(**row) for row in rows]


def conv_transpose_cases():
    """Pairwise over sizes, windows, paddings, layouts, optional inputs, activations and dtypes."""
    factors = {
        # Kernels smaller than, as large as and larger than the strides.
        "window": (
            ((1, 1), (1, 1)),
            ((1, 1), (2, 2)),
            ((2, 2), (2, 2)),
            ((3, 3), (1, 1)),
            ((3, 3), (2, 2)),
            ((4, 4), (2, 2)),
            ((5, 5), (2, 2)),
            ((7, 7), (3, 3)),
            ((3, 3), (2, 1)),
            ((2, 3), (3, 2)),
            ((1, 5), (1, 2)),
            ((4, 1), (3, 1)),
        ),
        "act": ACTIVATIONS,
        "cin": (1, 3, 17, 33, 64, 100),
        "cout": (1, 3, 17, 31, 64, 67, 128),
        "dtype": DTYPES,
        "image": ((1, 1), (2, 7), (5, 6), (9, 4), (13, 13), (16, 15)),
        "padding": ("SAME", "VALID", ((1, 2), (3, 0)), ((0, 0), (4, 4))),
        "dilations": ((1, 1), (2, 1), (2, 3)),
        "batch": (1, 3, 0),
        "layout": LAYOUTS,
        "bias": (True, False),
        "side": (False, True),
    }

    def case(row):
        kernel, strides = row["window"]
        rest = {name: value for name, value in row.items() if name != "window"}
        return ConvTransposeCase(kernel=kernel, strides=strides, **rest)

    rows = pairwise(factors, lambda row: min(case(row).convolution().output_image()) > 0)
    return [case(row) for row in rows]


def matmul_cases():
    """Pairwise over sizes, transposes, leading dimensions, activations and dtypes."""
    factors = {
        "act": ACTIVATIONS,
        "k": (*CHANNELS, 300, 0),
        "n": (*CHANNELS, 129),
        "m": (1, 2, 7, 17, 64, 0),
        "dtype": DTYPES,
        "lead": ((), (1,), (3,), (2, 3), (0,)),
        "ta": (False, True),
        "tb": (False, True),
        "bias": (True, False),
        "side": (False, True),
    }
    return [MatMulCase(**row) for row in pairwise(factors)]


def batch_norm_cases():
    """Pairwise over ranks, channels, layouts, modes, activations and dtypes."""
    factors = {
        "act": ACTIVATIONS,
        "channels": CHANNELS,
        "dtype": DTYPES,
        "sizes": ((7,), (1,), (4, 5), (1, 1, 1), (3, 6, 5), (2, 9, 13), (0, 3, 3), (2, 3, 2, 3)),
        "layout": LAYOUTS,
        "training": (True, False),
        "unbiased": (True, False),
        "side": (False, True),
    }
    return [BatchNormCase(**row) for row in pairwise(factors)]


def act_cases():
    """Pairwise over shapes, activations and dtypes; one tensor fills whole tasks and more."""
    shapes = ((0,), (1,), (7,), (3, 0, 5), (33, 31), (2, 3, 5, 7), (4096,), (3, 4099))
    factors = {"act": ACTIVATIONS, "dtype": DTYPES, "shape": shapes}
    return [ActCase(**row) for row in pairwise(factors)]


def recurrent_cases():
    """Pairwise over cells, sizes, activations, directions, optional inputs, outputs and dtypes."""
    # Rows whose units workers share, and rows that they divide, for one task and for several; parts
    # of a vector and of a tile, several parts of the units; no steps, no rows.
    shapes = (
        (1, 1, 1, 1),
        (3, 7, 4, 7),
        (8, 5, 5, 33),
        (5, 3, 9, 150),
        (2, 4, 1, 270),
        (9, 4, 3, 16),
        (20, 3, 6, 139),
        (130, 4, 5, 17),
        (1, 200, 3, 19),
        (3, 0, 2, 5),
        (0, 4, 2, 5),
    )
    factors = {
        "cell": ("rnn", "gru", "lstm"),
        "shape": shapes,
        "dtype": DTYPES,
        "act": ("tanh", "relu"),
        "backwards": (False, True),
        "masked": (True, False),
        "bias": (True, False),
        "states": (True, False),
        "used": ("both", "y", "last"),
    }
    # Next to the kink rounding decides the slope.
    rows = pairwise(factors, lambda row: row["act"] == "tanh" or row["dtype"][-2:] != "16")
    return [RecurrentOpCase(**row) for row in rows]


def quantized_matmul_cases():
    """Pairwise over sizes around those of vectors, tiles and tasks; some of several blocks."""
    factors = {
        "k": (1, 3, 16, 63, 64, 65, 127, 128, 129, 130),
        "n": (1, 15, 16, 17, 31, 32, 33, 34, 63, 64, 65, 0),
        "m": (1, 13, 14, 15, 17, 27, 28, 29, 30, 64, 600, 0),
        "dtype": QUANTIZED_DTYPES,
        "act": ACTIVATIONS,
        "lead": ((), (1,), (3,), (2, 2), (0,)),
        "tb": (False, True),
        "bias": (True, False),
    }
    # Few rows, of which a task takes broad stripes of the weights, block by block of the depth, and
    # rows that are just too many for that; more panels than such a task takes; an output past the
    # caches.
    large = {
        "shape": (
            (1, 9001, 33),
            (3, 3001, 1101),
            (28, 3001, 331),
            (29, 3002, 331),
            (2, 1027, 4200),
            (130, 515, 1030),
            (2051, 5, 1536),
        ),
        "dtype": QUANTIZED_DTYPES,
        "tb": (False, True),
        "bias": (True, False),
        "act": ("none", "gelu_tanh"),
    }
    rows = pairwise(factors)
    for row in pairwise(large):
        m, k, n = row.pop("shape")
        rows.append({**row, "m": m, "k": k, "n": n})
    return [QuantizedOpCase(**row) for row in rows]


def weight_only_cases():
    """Pairwise over sizes around those of vectors, few and many rows, half bytes and groups; some
    of several slices of columns."""
    integers = {
        "bits": (4, 8),
        "packed_axis": (1, 0),
        "signed": (True, False),
        "zero": (True, False),
        "tb": (False, True),
        "group": ("none", "parts", "any"),
        "part": (0, 16, 32, 7, 1, 64),
    }
    factors = {
        "k": (1, 2, 3, 15, 16, 17, 31, 32, 64, 65, 128, 131, 0),
        "n": (1, 2, 3, 15, 16, 17, 33, 64, 65, 67, 130, 0),
        "m": (1, 2, 3, 4, 5, 7, 15, 16, 17, 40, 100, 0),
        "dtype": QUANTIZED_DTYPES,
        "act": ACTIVATIONS,
        "lead": ((), (1,), (3,), (2, 2), (0,)),
        "bias": (True, False),
        **integers,
    }
    # Several slices of columns, of some threads or all at once; rows as one that lie far apart.
    large = {
        "shape": (
            (1, 3001, 331),
            (3, 1024, 1101),
            (16, 2049, 130),
            (17, 3001, 331),
            (40, 515, 1030),
            (1030, 130, 301),
        ),
        "dtype": QUANTIZED_DTYPES,
        "act": ("none", "gelu_tanh"),
        **integers,
    }
    rows = pairwise(factors)
    for row in pairwise(large):
        m, k, n = row.pop("shape")
        rows.append({**row, "m": m, "k": k, "n": n})
    return [WeightOnlyOpCase(**row) for row in rows]


def away_from_kinks(make, argument, activation, distance=0.01, attempts=2000):
    """Finds inputs whose pre-activations stay away from the activation's kinks.

    Args:
        make: Takes a seed, returns the inputs.
        argument: Takes the inputs, returns the pre-activations.
        activation: The activation's name.
        distance: The least distance from a kink.
        attempts: How many seeds to try.

    Returns:
        The inputs.
    """
    for seed in range(attempts):
        inputs = make(seed)
        z = argument(inputs)
        if all(
            np.abs(z - kink).min(initial=np.inf) > distance for kink in KINKS.get(activation, ())
        ):
            return inputs
    raise AssertionError(f"no inputs away from the kinks of {activation}")
