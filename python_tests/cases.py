"""The shapes and attributes on which tests and benchmarks run the ops."""

import dataclasses
import itertools

import numpy as np

from tf_fused_ops.bench.cases import ALPHA as ALPHA
from tf_fused_ops.bench.cases import BatchNormCase, Case, ConvCase, MatMulCase

CHANNELS = (1, 3, 17, 31, 33, 64, 100)
ACTIVATIONS = (
    "none",
    "relu",
    "relu6",
    "elu",
    "leaky_relu",
    "sigmoid",
    "tanh",
    "silu",
    "hard_swish",
    "mish",
    "gelu_tanh",
    "gelu_erf",
)
# Instruction sets that multiply pairs of bfloat16, and take subnormal ones for zero.
PAIRED_ISAS = ("avx512_bf16", "amx")
DTYPES = ("float32", "float16", "bfloat16", "float64")
LAYOUTS = ("NHWC", "NCHW")
# Where an activation or its slope jumps; finite differences must stay away from there.
KINKS = {
    "relu": (0.0,),
    "relu6": (0.0, 6.0),
    "elu": (0.0,),
    "leaky_relu": (0.0,),
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
