"""Convolutions of volumes: chains, gradients, models, and what is near a chain and stays."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from remapping import (  # fmt: skip
    asked_for,
    assert_same,
    check_portable,
    check_training,
    fused_ops,
    gradient_count,
    gradient_op_counts,
    op_counts,
    plain,
    reasons,
    rule_counts,
    specs,
    step_of,
    taped,
    values,
)
from test_remapper_refusals import after, guided_relu, keep
from transposing import ADDITIONS, BIASES, as_stock, compare, scaled

import tf_fused_ops as tfo
from tf_fused_ops.function import function
from tf_fused_ops.remapper import RemapOptions, conv3d, convert, spellings, trained_convs

OP = "TfFusedOps>Conv3DBiasAct"
GRAD = f"{OP}Grad"
STOCK = {"Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2", "BiasAdd", "BiasAddGrad"}
# Of input, filters, bias and output.
VOLUME = [(2, 3, 6, 5, 3), (3, 3, 3, 3, 4), (4,), (2, 3, 6, 5, 4)]
X, W, B, S = values(*VOLUME)
NO_SIZES = (*[None] * 4, 3)
FAMILIES = ("conv3d", "conv3d_add", "conv3d_bias", "conv3d_bias_add")
KINDS = {
    "": tf.identity,
    "_relu": tf.nn.relu,
    "_silu": tf.nn.silu,
    "_gelu_tanh": lambda z: keras.ops.gelu(z, approximate=True),
    "_gelu_erf": lambda z: keras.ops.gelu(z, approximate=False),
    "_leaky_relu": lambda z: tf.nn.leaky_relu(z, -0.3),
}
ACTS = [(a, s) for a in spellings.ACTIVATIONS if a is not spellings.NONE for s in a.spellings]


def conv(x, w, strides=1, padding="SAME", **options):
    steps = [strides] * 3 if isinstance(strides, int) else strides
    return tf.nn.conv3d(x, w, [1, *steps, 1], padding, **options)


def biased(x, w, b, *args, **options):
    return tf.nn.bias_add(conv(x, w, *args, **options), b)


def chain_of(family, act, add=ADDITIONS["plus"]):
    """Returns the stock code of a family, and arguments of it."""

    def chain(x, w, *others):
        z = conv(x, w)
        if "bias" in family:
            z = tf.nn.bias_add(z, others[0])
        return act(add(z, others[-1]) if "add" in family else z)

    return chain, [X, W, *[B] * ("bias" in family), *[S] * ("add" in family)]


def all_fused(fn, args, rules, gradients=0, known=None, units=1024):
    """As `compare`; asserts also that fused ops alone are in the graph."""
    known = known or [a.shape for a in args]
    compiled = compare(fn, args, known, rules, gradients, units)
    found = op_counts(compiled.get_concrete_function())
    assert found[OP] == sum(n for rule, n in rules.items() if rule.startswith("conv3d"))
    assert found[GRAD] in gradient_op_counts(compiled)
    assert not found.keys() & STOCK
    return compiled


def the_op(compiled, *args):
    graph = compiled.get_concrete_function(*args).graph
    (op,) = (op for op in graph.get_operations() if op.type == OP)
    return op


@pytest.mark.parametrize("i", range(len(ACTS)), ids=lambda i: f"{ACTS[i][0].name}-{i}")
def test_spellings(i):
    """Each after one of the chains; test_remapper_rules.py has all chains."""
    act, spelling = ACTS[i]
    family = FAMILIES[i % 4]
    chain, args = chain_of(family, spelling, list(ADDITIONS.values())[i // 4 % len(ADDITIONS)])
    batch = [(None, *VOLUME[0][1:]), *(a.shape for a in args[1:])]
    known = None if "add" in family else batch
    all_fused(step_of(chain), args, {f"{family}_{act.name}": 1}, 1, known)


@pytest.mark.parametrize("act", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_outer_tape(family, act):
    chain, args = chain_of(family, KINDS[act])
    signature = [*specs(args[:1], "add" not in family), *specs(args[1:])]
    compiled = function(chain, input_signature=signature)
    with plain():
        assert_same(taped(compiled, args), taped(chain, args), units=512)
    bare = family + act == "conv3d"
    assert rule_counts(compiled) == ({} if bare else {family + act: 1})
    found = op_counts(compiled.get_concrete_function())
    assert (found[OP], found["Conv3D"]) == ((0, 1) if bare else (1, 0))


@pytest.mark.parametrize("act", ["", "_relu", "_silu"])
def test_persistent_tape(act):
    def step(x, w, b):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, w, b])
            y = KINDS[act](biased(x, w, b))
            first, second = tf.reduce_sum(y * y), tf.reduce_sum(tf.sin(y))
        return tape.gradient(first, [x, w, b]), tape.gradient(second, w)

    compiled = all_fused(step, [X, W, B], {f"conv3d_bias{act}": 1}, 2)
    asked = asked_for(compiled.get_concrete_function(), GRAD, ["input", "filters", "bias"])
    assert asked == {"input": 1, "filters": 2, "bias": 1}


@pytest.mark.parametrize("act", [tf.tanh, tf.nn.silu])
@pytest.mark.parametrize("where", ["inside", "between", "outside"])
def test_second_order(where, act):
    """With both tapes in the function, or one, or none."""

    def slopes(f, args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = f(*args)
            loss = tf.reduce_sum(y**2) if y.shape.rank else y
        return tape.gradient(loss, args)

    def plain_chain(x, w, b):
        return act(biased(x, w, b))

    def steep(f):
        return lambda *args: tf.add_n([tf.reduce_sum(g**2) for g in slopes(f, args)])

    chain = function(plain_chain) if where == "outside" else plain_chain
    first = function(steep(chain)) if where == "between" else steep(chain)
    both = function(lambda *args: slopes(first, args))
    found = both(X, W, B) if where == "inside" else slopes(first, [X, W, B])
    scaled(found, slopes(steep(plain_chain), [X, W, B]))
    compiled = {"inside": both, "between": first, "outside": chain}[where]
    # Both gradients read the values inside of silu.
    assert rule_counts(compiled) or (where == "inside" and "conv3d_bias_silu" in reasons(compiled))
    assert where != "between" or gradient_count(compiled) == 1


# Window, strides, padding.
GEOMETRIES = {
    "points": ((1, 1, 1), 1, "SAME"),
    "points, strides": ((1, 1, 1), 2, "SAME"),
    "slices": ((1, 3, 3), 1, "SAME"),
    "columns": ((3, 1, 1), 1, "SAME"),
    "columns, valid": ((3, 1, 1), (1, 2, 2), "VALID"),
    "strides": ((3, 3, 3), 2, "SAME"),
    "unequal strides": ((2, 3, 2), (1, 2, 3), "SAME"),
    "valid": ((3, 3, 3), 1, "VALID"),
    "valid, strides": ((2, 3, 3), 2, "VALID"),
    "valid, gaps": ((1, 2, 1), 3, "VALID"),
    "even": ((2, 2, 2), 1, "SAME"),
}


@pytest.mark.parametrize("sizes", ["known", "unknown"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometries(name, sizes):
    window, strides, padding = GEOMETRIES[name]
    args = values(VOLUME[0], (*window, 3, 4), (4,))
    act, rule = (tf.nn.silu, "_silu") if sizes == "known" else (tf.nn.relu, "_relu")
    known = [VOLUME[0] if sizes == "known" else NO_SIZES, args[1].shape, (4,)]

    def chain(x, w, b):
        return act(biased(x, w, b, strides, padding))

    op = the_op(all_fused(step_of(chain), args, {f"conv3d_bias{rule}": 1}, 1, known))
    steps = [strides] * 3 if isinstance(strides, int) else list(strides)
    assert op.get_attr("strides") == [1, *steps, 1]
    assert op.get_attr("padding") == padding.encode()


@pytest.mark.parametrize("dilations", [(1, 2, 2), (2, 1, 3)])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_dilations(padding, dilations):
    """TensorFlow's own kernels know none, oneDNN's do: compared with filters that have holes."""
    x, w, b = values((2, 5, 8, 9, 3), (2, 3, 2, 3, 4), (4,))
    holes = np.zeros(
        [*(d * (s - 1) + 1 for d, s in zip(dilations, w.shape[:3], strict=True)), 3, 4], "float32"
    )
    holes[tuple(slice(None, None, d) for d in dilations)] = w

    @function
    def chain(x, w, b):
        return tf.nn.gelu(biased(x, w, b, 1, padding, dilations=[1, *dilations, 1]))

    assert_same(chain(x, w, b), tf.nn.gelu(biased(x, holes, b, 1, padding)), units=256)
    assert rule_counts(chain) == {"conv3d_bias_gelu_erf": 1}
    assert the_op(chain, x, w, b).get_attr("dilations") == [1, *dilations, 1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(("act", "name"), [(tf.nn.relu6, "relu6"), (tf.nn.silu, "silu")])
def test_dtypes(act, name, dtype):
    def step(*args):
        return taped(lambda x, w, b, s: act(biased(x, w, b) + s), args)

    args = values(*VOLUME, dtype=dtype)
    compiled = all_fused(step, args, {f"conv3d_bias_add_{name}": 1}, 1, units=256)
    assert the_op(compiled).get_attr("T") == tf.as_dtype(dtype)


@pytest.mark.parametrize("form", BIASES)
@pytest.mark.parametrize("act", ["", "_relu", "_gelu_erf"])
def test_biases(act, form):
    def chain(x, w, b):
        return KINDS[act](BIASES[form](conv(x, w), b))

    known = [NO_SIZES, *VOLUME[1:3]]
    all_fused(step_of(chain), [X, W, B], {f"conv3d_bias{act}": 1}, 1, known)


@pytest.mark.parametrize("form", [form for form in BIASES if form != "bias_add"])
def test_bias_of_one_channel(form):
    args = values(VOLUME[0], (3, 3, 3, 3, 1), (1, 1, 1, 1, 1))
    known = [NO_SIZES, *(a.shape for a in args[1:])]
    code = step_of(lambda x, w, b: tf.nn.silu(BIASES[form](conv(x, w), b)))
    all_fused(code, args, {"conv3d_bias_silu": 1}, 1, known)


def skip(x, w, b):
    """A block with a skip; and one with a projection that has strides."""
    y = tf.nn.relu(biased(x, w, b) + x)
    return y, tf.nn.relu(biased(y, w, b, 2) + conv(y, w[:1, :1, :1], 2))


@pytest.mark.parametrize("known", ["batch", "sizes", "channels"])
@pytest.mark.parametrize("gradients", [False, True])
def test_skips(known, gradients):
    """What is added has the same size, also where no size is known."""
    args = values(VOLUME[0], (3, 3, 3, 3, 3), (3,))
    shape = {"batch": VOLUME[0], "sizes": (None, *VOLUME[0][1:]), "channels": NO_SIZES}[known]
    code = step_of(lambda *args: skip(*args)[1]) if gradients else skip
    known = [shape, *(a.shape for a in args[1:])]
    rules = {"conv3d_bias_add_relu": 1, "conv3d_bias": 1, "conv3d_add_relu": 1}
    rules |= {"slice_gradient": 1} if gradients else {}
    all_fused(code, args, rules, 3 * gradients, known, 4096)


def layer(x, w, b):
    """One that can be repeated."""
    return tf.nn.tanh(biased(x, w / 5, b))


def looped(x, w, b):
    return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, layer(x, w, b)), [0, x])[1]


def branched(x, w, b):
    return tf.cond(tf.reduce_sum(x) < 1e6, lambda: layer(x, w, b), lambda: x)


@pytest.mark.parametrize("code", [looped, branched, tf.function(layer)])
def test_other_functions(code):
    """Chains in the bodies of loops, branches and calls; the gradients may be stock's."""
    args = values(VOLUME[0], (3, 3, 3, 3, 3), (3,))
    compiled = as_stock(lambda *args: code(*args), args)
    assert rule_counts(compiled) == {"conv3d_bias_tanh": 1}
    found = op_counts(compiled.get_concrete_function(*args))
    assert (found[OP], found["Conv3D"]) == (1, 0)
    as_stock(lambda *args: taped(code, args), args, units=1024)


def test_waits():
    """For what the replaced ops had to wait for; and what waited for them, for the fused op."""
    state = tf.Variable(0.0)

    def chain(x, w, b):
        with tf.control_dependencies([state.assign_add(1.0)]):
            z = conv(x, w)
        y = tf.nn.relu(tf.nn.bias_add(z, b))
        return y, after(y, x)

    compiled = function(chain)
    assert_same(compiled(X, W, B)[0], tf.nn.relu(biased(X, W, B)))
    op = the_op(compiled, X, W, B)
    assert [other.type for other in op.control_inputs] == ["AssignAddVariableOp"]
    assert op.graph.get_operation_by_name("Identity").control_inputs == [op]
    assert state.numpy() == 1.0


RELU = "conv3d_bias_relu"
LINEAR = {"conv3d_bias": 1}


def first(x):
    return tf.transpose(x, [0, 4, 1, 2, 3])


def used(use):
    def code(x, w, b):
        z = conv(x, w)
        return tf.nn.relu(tf.nn.bias_add(z, b)), use(z, x)

    return code


def on(*devices):
    def code(x, w, b):
        with tf.device(devices[0]):
            z = conv(x, w)
        with tf.device(devices[-1]):
            return tf.nn.relu(tf.nn.bias_add(z, b))

    return code


def plus(x, w, b):
    return tf.nn.relu(conv(x, w) + b)


def strided(x, w, b):
    return tf.nn.relu(biased(x, w, b, 3))


def of_first(x, w, *b):
    z = conv(first(x), w, data_format="NCDHW")
    return tf.nn.relu(tf.nn.bias_add(z, *b, "NCDHW") if b else z)


def bias_of_depth(x, w, b):
    z = tf.raw_ops.BiasAdd(value=conv(x, w), bias=b, data_format="NCHW")
    return tf.nn.relu(z)


XS, WS, BS, SS = VOLUME
DEEP = (2, 4, 6, 5, 3)
OTHER_AXIS = "attribute data_format of BiasAdd differs"
MISFIT = "its channels are not known or do not fit: "
GAPS = "its windows leave pixels between them"
MAY = "may broadcast"
# Code, what is known of the arguments, what fuses, the rule that must not, and why, unless it does
# not nearly fit.
# fmt: off
NEIGHBOURS = {
    "first": (of_first, [XS, WS], {}, "conv3d_relu", "its layout is NCDHW, not NDHWC"),
    "first, bias": (of_first, VOLUME[:3], {}, RELU, OTHER_AXIS),
    "bias of depth": (bias_of_depth, [DEEP, WS, BS], {}, RELU, OTHER_AXIS),
    "channels": (plus, [[None] * 5, WS, BS], {}, RELU, MISFIT + "None in the input, 3 in the"),
    "channels of filters": (plus, [XS, (3, 3, 3, None, 4), BS], {}, RELU, "None in the filters"),
    "filters": (plus, [XS, [None] * 5, BS], {}, RELU, MISFIT + "3 in the input, None in the"),
    "rank": (lambda x, w: tf.nn.relu(conv(x, w)), [None, WS], {}, "conv3d_relu", "not 5"),
    "groups": (plus, [(2, 3, 6, 5, 6), WS, BS], {}, RELU, MISFIT + "6 in the input, 3 in the"),
    "gaps": (strided, [XS, (1, 1, 1, 3, 4), BS], {}, RELU, GAPS),
    "gaps of depth": (strided, [XS, (1, 2, 3, 3, 4), BS], {}, RELU, GAPS),
    "gaps of windows unknown": (strided, [XS, (2, None, 2, 3, 4), BS], {}, RELU, GAPS),
    "alone": (lambda x, w: conv(x, w), [XS, WS], {}, "conv3d", ""),
    "used": (used(lambda z, x: tf.exp(z)), VOLUME[:3], {}, RELU, "Conv3D:0 is also used by Exp"),
    "fetched": (used(lambda z, x: z), VOLUME[:3], {}, RELU, "Conv3D:0 is an output of the graph"),
    "waited for": (used(after), VOLUME[:3], {}, RELU, "has a control edge from Conv3D"),
    "sum used": (
        lambda x, w, b: (lambda z: (tf.nn.relu(z), tf.exp(z)))(biased(x, w, b)),
        VOLUME[:3], LINEAR, RELU, "BiasAdd:0 is also used by Exp",
    ),
    "kept": (
        lambda x, w, b: tf.nn.relu(tf.nn.bias_add(keep(conv(x, w)), b)),
        VOLUME[:3], {}, RELU, "is marked _grappler_do_not_remove",
    ),
    "guided": (
        lambda x, w, b: guided_relu(biased(x, w, b)),
        VOLUME[:3], LINEAR, RELU, "the gradient of Relu is overridden",
    ),
    "devices": (on("", "CPU:0"), VOLUME[:3], {}, RELU, "the nodes are on different devices"),
    "gpu": (on("GPU:0"), VOLUME[:3], {}, RELU, f"{OP} has no float32 kernel on GPU"),
    "bias of one": (plus, [XS, WS, (1,)], {}, RELU, "may not be a bias"),
    "bias of unknown length": (plus, [XS, WS, (None,)], {}, RELU, "may not be a bias"),
    "bias that broadcasts": (plus, [XS, (3, 3, 3, 3, 1), (5,)], {}, RELU, "may not be a bias"),
    "bias of two dimensions": (plus, [XS, WS, (1, 4)], {}, RELU, ""),
    "bias of five dimensions": (plus, [XS, WS, (1, 1, 1, 1, 4)], {}, RELU, ""),
    "one number": (plus, [XS, WS, (1,) * 5], {}, RELU, "is no bias of 4 channels"),
    "side that broadcasts": (plus, [XS, WS, (2, 3, 6, 1, 4)], {}, "conv3d_add_relu", MAY),
    "side that is larger": (plus, [(1, *XS[1:]), WS, SS], {}, "conv3d_add_relu", MAY),
    "side of unknown batch": (plus, [XS, WS, (None, *SS[1:])], {}, "conv3d_add_relu", MAY),
    "sum of three": (
        lambda x, w, b, s: tf.nn.relu(tf.add_n([biased(x, w, b), s, s])),
        VOLUME, LINEAR, "conv3d_bias_add_relu", "",
    ),
}
# fmt: on


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_must_not_fuse(name):
    code, shapes, rules, rule, reason = NEIGHBOURS[name]
    compiled = function(code)
    concrete = compiled.get_concrete_function(*map(tf.TensorSpec, shapes))
    assert rule_counts(compiled) == rules, compiled.remap_reports
    found = op_counts(concrete)
    assert (found[OP], found["Conv3D"]) == ((1, 0) if rules else (0, 1))
    assert not found[GRAD]
    if reason:
        assert reason in reasons(compiled)[rule]
    else:
        assert not any(refused.startswith(rule) for refused in reasons(compiled))
    known = None not in [n for shape in shapes for n in shape or [None]]
    if known and name not in ("gpu", "groups") and "first" not in name:
        args = values(*shapes)
        with plain():
            assert_same(compiled(*args), tf.function(code)(*args), units=256)


def relu(x, w, b):
    return tf.nn.relu(biased(x, w, b))


@pytest.mark.parametrize("pattern", ["conv3d*", "conv3d_bias*", "*_relu", "*"])
def test_switched_off(pattern, monkeypatch):
    monkeypatch.setattr(trained_convs, "isa", lambda: "avx2")
    compiled = function(step_of(relu), remap=RemapOptions(disable=[pattern]))
    scaled(compiled(X, W, B), step_of(relu)(X, W, B))
    rest = {"*_relu": LINEAR, "*": {}}.get(pattern, {"trained_conv3d": 1})
    assert rule_counts(compiled) == rest
    assert gradient_count(compiled) == len(rest)


@pytest.mark.parametrize(
    ("isa", "window", "channels", "dtype", "fused"),
    [
        ("avx512", (3, 3, 3), 9, "float32", False),
        ("avx512_bf16", (2, 1, 2), 9, "float32", False),
        ("amx", (3, 3, 3), 9, "float32", True),
        ("avx2", (3, 3, 3), 9, "float32", True),
        ("avx512", (3, 3, 3), 8, "float32", True),
        ("avx512", (1, 3, 3), 9, "float32", True),
        ("avx512", (3, 1, 1), 9, "float32", True),
        ("avx512", (3, 3, 3), 9, "bfloat16", True),
    ],
)
def test_many_channels(isa, window, channels, dtype, fused, monkeypatch):
    monkeypatch.setattr(conv3d, "isa", lambda: isa)
    args = values((2, 3, 6, 5, channels), (*window, channels, 4), (4,), dtype=dtype)
    compiled = function(step_of(relu))
    found = compiled(*args)
    if dtype == "float32":  # of which stock has gradients
        scaled(found, step_of(relu)(*args))
    assert rule_counts(compiled) == ({"conv3d_bias_relu": 1} if fused else {})
    assert fused or "stock ops are faster" in reasons(compiled)["conv3d_bias_relu"]


def block():
    """What has a bias, none, a batch norm behind it, a summand, strides, one channel."""
    inputs = keras.Input((4, 6, 6, 2))
    y = keras.layers.Conv3D(4, 3, padding="same", activation="relu")(inputs)
    z = keras.layers.Conv3D(4, (1, 3, 3), padding="same", use_bias=False)(y)
    z = keras.layers.ReLU()(keras.layers.BatchNormalization()(z))
    z = keras.layers.Conv3D(4, (3, 1, 1), padding="same")(z)
    z = keras.layers.ReLU()(keras.layers.Add()([z, y]))
    z = keras.layers.Conv3D(4, 3, 2, padding="same", use_bias=False, activation="silu")(z)
    return keras.Model(inputs, keras.layers.Conv3D(1, 1, activation="sigmoid")(z))


def test_training(monkeypatch):
    """A convolution without bias, too, before the batch norm, which fuses with the activation."""
    monkeypatch.setattr(trained_convs, "isa", lambda: "avx2")
    compiled = check_training(block, (4, 2, 3, 3, 1))
    found = {rule: n for rule, n in rule_counts(compiled).items() if "descent" not in rule}
    names = ("conv3d_bias_relu", "conv3d_bias_add_relu", "conv3d_silu", "conv3d_bias_sigmoid")
    others = ("trained_conv3d", "moments_batch_norm_relu")
    assert found == dict.fromkeys((*names, *others), 1)
    assert gradient_count(compiled) == 6
    (concrete,) = compiled._list_all_concrete_functions()
    assert not op_counts(concrete).keys() & STOCK


@pytest.mark.filterwarnings("ignore")
def test_accelerated_fit():
    """The last batch is a smaller one."""
    losses, outputs = [], []
    for accelerate in (False, True):
        keras.utils.set_random_seed(0)
        model = block()
        x, y = (v.numpy() for v in values((3, *model.input_shape[1:]), (3, 2, 3, 3, 1)))
        if accelerate:
            model = tfo.accelerate(model) or model
        model.compile(keras.optimizers.SGD(0.01), "mse")
        history = model.fit(x, y, batch_size=2, epochs=3, shuffle=False, verbose=0)
        losses.append(history.history["loss"])
        outputs.append(model.predict(x, verbose=0))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-3, atol=1e-4)
    assert losses[0][-1] < losses[0][0]


LAYERS = {
    "conv3d_bias_relu": keras.layers.Conv3D(4, 3, activation="relu"),
    "conv3d_bias_gelu_erf": keras.layers.Conv3D(4, 2, 2, padding="same", activation="gelu"),
    "conv3d_bias_leaky_relu": keras.layers.Conv3D(4, 1, activation="leaky_relu"),
    "conv3d_elu": keras.layers.Conv3D(4, 3, use_bias=False, activation="elu"),
    "conv3d_bias": keras.layers.Conv3D(4, 3),
    "conv3d_bias_tanh": keras.layers.Conv3D(1, 3, activation="tanh"),
    "conv3d_bias_silu": keras.layers.Conv3D(4, 3, activation="silu", dtype="mixed_bfloat16"),
    "conv3d_relu6": keras.layers.Conv3D(
        4, (1, 3, 3), use_bias=False, activation="relu6", dtype="mixed_bfloat16"
    ),
}


@pytest.mark.parametrize("rule", LAYERS)
def test_layers(rule):
    layer = LAYERS[rule]
    layer.build(VOLUME[0])
    layer.set_weights([v.numpy() for v in values(*(w.shape for w in layer.weights))])

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            loss = tf.reduce_sum(y**2)
        gradients = tape.gradient(loss, [x, *layer.trainable_variables])
        return y, [tf.cast(gradient, y.dtype) for gradient in gradients]

    units = 1024 if layer.compute_dtype == "float32" else 16
    compiled = all_fused(step, [X], {rule: 1}, 1, [NO_SIZES], units)
    assert the_op(compiled).get_attr("T") == layer.compute_dtype


def test_layers_in_groups_stay():
    """They are XLA's."""
    layer = keras.layers.Conv3D(3, 2, activation="relu", groups=3)
    compiled = as_stock(step_of(lambda x: layer(x)), [X], 2048)
    assert rule_counts(compiled) == {}


@pytest.mark.parametrize("gradients", [False, True])
def test_portable(gradients, tmp_path):
    """All in one model."""
    acts = [(family, act) for family in FAMILIES for act in KINDS if family + act != "conv3d"]

    def code(x, w, b, s):
        found = []
        for i, (family, act) in enumerate(acts):
            chain, _ = chain_of(family, KINDS[act])
            args = [x + i, w, *[b] * ("bias" in family), *[s] * ("add" in family)]
            found.append((step_of(chain) if gradients else chain)(*args))
        return found

    # Grappler forgets the slope of leaky relu behind a stock convolution with bias and summand.
    with plain():
        check_portable(code, [X, W, B, S], tmp_path)
    # Without bias, the gradients of four read what is before the activation: they are bare then.
    # The spelling of gelu that stands for the fused op's is none that is known behind a bare one.
    again = len(acts) - (4 if gradients else 1)
    found = [fused_ops(tmp_path / name) for name in ("fused", "portable", "again")]
    assert [ops.get("Conv3DBiasAct", 0) for ops in found] == [len(acts), 0, again]
    assert found[1] == {} and ("Conv3DBiasActGrad" in found[0]) == gradients


def test_keras_export(tmp_path):
    """Fused, made portable, and fused again."""
    model = block()
    (x,) = values((2, *model.input_shape[1:]))
    expected = model(x)
    paths = [str(tmp_path / name) for name in ("stock", "fused", "portable", "again")]
    model.export(paths[0], verbose=False)
    convert(*paths[:2])
    convert(*paths[1:3], to_stock=True)
    convert(*paths[2:])
    assert [fused_ops(path).get("Conv3DBiasAct", 0) for path in paths] == [0, 4, 0, 4]
    for path in paths:
        loaded = tf.saved_model.load(path)
        assert_same(loaded.serve(x), expected, units=256)
