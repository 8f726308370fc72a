"""The benchmark: its cases and costs, what it prints, and how it ends."""

import dataclasses
import functools
import json
import time
import types

import numpy as np
import pytest
import tensorflow as tf

import tf_fused_ops
from tf_fused_ops import RemapOptions, _core
from tf_fused_ops.bench import (
    contest,
    costs,
    grid,
    machine,
    memory,
    report,
    table,
    tensorflow_programs,
    worker,
)
from tf_fused_ops.bench.cases import (
    MODES,
    ApplicationCase,
    BatchNormCase,
    ConvCase,
    DecoderCase,
    MatMulCase,
    QuantizedCase,
    RecurrentCase,
    WeightOnlyCase,
)
from tf_fused_ops.bench.contest import Timing
from tf_fused_ops.cli import main
from tf_fused_ops.remapper import recurrent, rules

ROOFS = machine.Roofs(operations=500e9, bytes=50e9)
SETTINGS = {"dtype": "float32", "threads": 2}


def test_quick_run(tmp_path, capsys):
    path = tmp_path / "times.json"
    arguments = ["--cases", "*_tiny", "--quick", "--peers", "ours,stock", "--json", str(path)]
    assert main(["bench", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n| conv 3x3 17→33, 2x7x7, relu ") == 2
    assert "[9/9]" in printed.err
    measured = json.loads(path.read_text())
    assert measured["settings"]["threads"] == machine.cores()
    assert measured["machine"]["instruction set"] == _core.isa()
    names = ("conv_tiny", "matmul_tiny", "batch_norm_tiny")
    assert {(case["name"], case["mode"]) for case in measured["cases"]} == {
        ("decoder_tiny", "forward"),
        *((name, mode) for name in names for mode in MODES),
    }
    for case in measured["cases"]:
        times = {peer: values["ms"] for peer, values in case["peers"].items()}
        assert list(times) == ["stock", "ours"] and min(times.values()) > 0
        assert case["best_peer"] == "stock"
        assert case["ratio_to_stock"] == pytest.approx(times["stock"] / times["ours"])
        assert case["fraction_of_limit"] == pytest.approx(case["limit_ms"] / times["ours"])
        assert all(v["least_ms"] <= v["ms"] and v["spread"] >= 0 for v in case["peers"].values())
    (mean,) = (m for m in measured["geometric means"] if m["mode"] == "step")
    ratios = [c["ratio_to_best"] for c in measured["cases"] if c["mode"] == "step"]
    assert mean["ratio_to_best"] == pytest.approx(np.prod(ratios) ** (1 / len(ratios)))


@pytest.mark.skipif(machine.cores() < 2, reason="needs two cores")
def test_scaling(tmp_path, capsys):
    path = tmp_path / "scaling.json"
    arguments = ["--scaling", "--cases", "matmul_tiny", "--quick", "--peers", "ours"]
    assert main(["bench", *arguments, "--threads", "2", "--json", str(path)]) == 0
    assert "forward, 1 to 2 threads" in capsys.readouterr().out
    forward, step = json.loads(path.read_text())["scaling"]
    assert (forward["mode"], step["mode"]) == MODES
    one, two = step["peers"]["ours"]["ms"]
    assert step["peers"]["ours"]["speedup"] == pytest.approx(one / two)


def test_memory_of_every_peer(tmp_path, capsys):
    path = tmp_path / "memory.json"
    arguments = ["--memory", "tiny", "--peers", "stock,ours", "--json", str(path)]
    assert main(["bench", *arguments]) == 0
    assert "training step, MB over the start" in capsys.readouterr().out
    (tiny,) = json.loads(path.read_text())["memory"]
    assert list(tiny["peers"]) == ["stock", "ours"]
    for measured in tiny["peers"].values():
        assert measured["peak"] > measured["start"] > 50e6


# In a process of its own, which frees nothing else meanwhile.
MEMORY = """
import numpy as np
from tf_fused_ops.bench import memory

sizes = iter([400, 200])  # MB
measured = memory.measure(lambda: np.ones(next(sizes) << 17))
print(measured["peak"] - measured["start"])
"""


def test_memory_is_the_peak_of_the_second_call(run_python):
    assert 190e6 < float(run_python(MEMORY)) < 300e6
    assert memory.over_start({"start": 1e6, "peak": 4e6}) == 3
    assert memory.over_start({"error": "no"}) is None


@pytest.mark.parametrize(
    ("names", "count"),
    [(["*_tiny"], 7), (["*_short", "simple_rnn*"], 6), (["quantized_16*", "quantized_odd"], 2)],
)
def test_torch_computes_the_same(names, count, tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "times.json"
    arguments = ["--cases", *names, "--quick", "--peers", "stock,torch", "--json", str(path)]
    assert main(["bench", *arguments]) == 0
    peers = [case["peers"] for case in json.loads(path.read_text())["cases"]]
    assert [values["torch"].get("error") for values in peers] == [None] * count


@pytest.mark.parametrize(
    ("peer", "really", "message"),
    [
        ("ours", "stock", "nothing was fused"),
        ("stock", "ours", "fused"),
        ("stock", "xla", "compiled by XLA"),
        ("xla", "stock", "not compiled by XLA"),
        ("winograd", "ours", "Winograd's algorithm is not allowed"),
        ("ours", "winograd", "Winograd's algorithm is allowed"),
    ],
)
def test_peer_must_run_what_it_claims(peer, really, message, monkeypatch):
    case, programs = table.CASES["conv_tiny"], tensorflow_programs.Programs(peer)
    assert len(programs.load(case, "step")[1]) == 4
    monkeypatch.setattr(programs, "decorate", tensorflow_programs.Programs(really).decorate)
    with pytest.raises(tensorflow_programs.NotWhatItClaims, match=f"^{message}$"):
        programs.load(case, "step")


def test_loops_of_layers_must_be_gone(monkeypatch):
    case, programs = table.CASES["gru_short"], tensorflow_programs.Programs("ours")
    assert len(programs.load(case, "step")[1]) == 5
    kept = functools.partial(tf_fused_ops.function, remap=RemapOptions(disable=("gru",)))
    monkeypatch.setattr(programs, "decorate", kept)
    left = "not fused: MatMul, StatelessWhile"
    with pytest.raises(tensorflow_programs.NotWhatItClaims, match=left):
        programs.load(case, "step")


def test_peer_must_compute_on_the_device():
    other = "cpu" if tf.config.list_physical_devices("GPU") else "gpu"
    programs = tensorflow_programs.Programs("stock", other)
    with pytest.raises(tensorflow_programs.NotWhatItClaims, match=f"^not computed on the {other}$"):
        programs.load(table.CASES["conv_tiny"], "forward")


def test_calls_that_are_timed_together_are_counted():
    """As on a GPU: the time of a turn is that of one call."""
    calls, waits = [], []
    server = worker.Server(
        types.SimpleNamespace(wait=lambda: waits.append(len(calls))), together=20
    )
    server._call = lambda: calls.append(time.sleep(1e-3))
    (seconds,) = server.run(0)
    assert waits == [1, 21] and 1e-3 <= seconds < 20e-3


def test_card_is_what_was_timed():
    values = collected(stock=3.0, ours=2.0)
    values["settings"] = {**SETTINGS, "graphics card": "NVIDIA H200"}
    assert next(report.lines(values)) == report.hardware(values) == "NVIDIA H200; float32"


def collected(**milliseconds):
    """A report on one case with these times."""
    timings = {
        peer: Timing(error=ms) if isinstance(ms, str) else Timing(1e-3 * ms, 1e-3 * ms, 0.0)
        for peer, ms in milliseconds.items()
    }
    case = table.CASES["conv3x3_64"]
    return report.collect(SETTINGS, ROOFS, [("conv3x3_64", case, "forward", timings)])


def row(values):
    return next(line for line in report.lines(values) if line.startswith("| conv"))


def test_slower_is_shown_as_slower():
    values = collected(stock=20, torch=10, ours=16)
    assert "1.25x " in row(values) and "0.62x slower" in row(values)
    assert values["cases"][0]["best_peer"] == "torch"
    assert "slower" not in row(collected(stock=20, torch=10, ours=9))


@pytest.mark.parametrize("times, advice", [(15.6, False), (6.8, True)])
def test_a_busy_tile_unit_is_shown(times, advice):
    roofs = ROOFS._replace(tiles=times * ROOFS.operations)
    (line,) = [
        line for line in report.lines(report.collect(SETTINGS, roofs, [])) if line.startswith("AMX")
    ]
    assert f"bfloat16, {times} times that" in line
    assert ("TF_FUSED_OPS_ISA=avx512" in line) is advice
    assert not any("AMX" in line for line in report.lines(report.collect(SETTINGS, ROOFS, [])))


def test_tiles_are_measured_where_they_multiply(monkeypatch):
    for isa, dtype, measured in [
        ("amx", "float32", True),
        ("amx", "float16", False),
        ("amx", "bfloat16", False),
        ("avx512", "float32", False),
    ]:
        monkeypatch.setattr(_core, "isa", lambda isa=isa: isa)
        assert (machine.measure(dtype, 1).tiles > 0) is measured


@pytest.mark.parametrize(
    ("isa", "times"), [("amx", 4), ("avx512_bf16", 4), ("avx512", 2), ("avx2", 2), ("portable", 2)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rate_of_integers_follows_from_that_of_float32(isa, times, dtype, monkeypatch):
    rates = {"float32": 1e11, "bfloat16": 2e11}
    monkeypatch.setattr(_core, "isa", lambda: isa)
    monkeypatch.setattr(_core, "multiply_add_rate", lambda dtype, threads: rates[dtype])
    monkeypatch.setattr(_core, "copy_rate", lambda threads: 1e10)
    roofs = machine.measure(dtype, 1)
    assert (roofs.operations, roofs.integers) == (rates[dtype], times * 1e11)


def test_peer_that_fails_is_named_with_its_error():
    values = collected(stock="no such kernel", xla=12, ours=8)
    assert values["cases"][0]["ratio_to_stock"] is None
    assert "| -" in row(values).replace("  ", " ") and "1.50x" in row(values)
    assert list(report.lines(values))[-1] == "TF, conv 3x3 64→64, 16x56x56, relu: no such kernel"
    values = collected(stock=3, ours="nothing was fused")
    assert values["cases"][0]["ratio_to_best"] is None
    assert "nothing was fused" in list(report.lines(values))[-1]


@pytest.mark.parametrize(
    ("case", "mode", "macs", "elements"),
    [
        # x, w and y; then also y, dy, x and w read, dx and dw written.
        (ConvCase(2, (5, 6), 3, 4), "forward", 2 * 30 * 27 * 4, 180 + 108 + 240),
        (ConvCase(2, (5, 6), 3, 4), "step", 3 * 2 * 30 * 27 * 4, 3 * (180 + 108 + 240)),
        (ConvCase(1, (7, 7), 1, 1, strides=(2, 2)), "forward", 16 * 9, 49 + 9 + 16),
        # The pre-activation is written and read.
        (MatMulCase(m=5, k=4, n=3), "step", 3 * 60, (20 + 12 + 15) + 30 + 15 + 2 * (20 + 12)),
        (BatchNormCase((2, 3), 5), "forward", 0, 3 * 30),
        (BatchNormCase((2, 3), 5, side=True), "step", 0, 10 * 30),
        # x, kernels and y; then also those and dy read, dx and those of the kernels written.
        (RecurrentCase("lstm", 2, 3, 4, 5), "forward", 6 * 180, 24 + 180 + 30),
        (RecurrentCase("simple_rnn", 2, 3, 4, 5), "step", 3 * 6 * 45, 3 * (24 + 45 + 30)),
        # What is kept besides is written and read.
        (RecurrentCase("lstm", 2, 3, 4, 5), "step", 3 * 6 * 180, 3 * (24 + 180 + 30) + 10 * 30),
        # Weights, and keys and values of 3 and of 4 positions; queries have more heads than those.
        (
            DecoderCase(2, 3, 8, 4, 2, 5, 4, 2),
            "forward",
            2 * 2 * 3 * (64 + 32 + 32 + 64 + 3 * 40) + 2 * 3 * 2 * 7 * 8,
            2 * (3 * (64 + 32 + 32 + 64 + 3 * 40) + 7 * 8) + 2 * 3 * 2 * 7 * 4,
        ),
        (RecurrentCase("gru", 2, 3, 4, 5), "step", 3 * 6 * 135, 3 * (24 + 135 + 30) + 8 * 30),
    ],
)
def test_work(case, mode, macs, elements):
    assert costs.work(case, mode) == (macs, 4 * elements)
    double = dataclasses.replace(case, dtype="float64")
    assert costs.work(double, mode).bytes == 8 * elements


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_work_of_quantized_layers(dtype, size):
    """Weights have a byte each, and products the rate of integers, where that is known."""
    case = QuantizedCase(m=2, k=3000, n=5000, dtype=dtype)
    work = costs.work(case, "forward")
    assert work == (30_000_000, size * 2 * (3000 + 5000) + 15_000_000)
    slow, fast = (ROOFS._replace(integers=rate) for rate in (100e9, 100e12))
    assert work.limit_seconds(slow) == 60e6 / 100e9
    assert work.limit_seconds(fast) == work.limit_seconds(ROOFS) == work.bytes / ROOFS.bytes


@pytest.mark.parametrize(("bits", "read"), [(4, 480 // 2 + 5 * 4 * 20), (8, 480 + 4 * 20)])
def test_work_of_weights_alone_quantized(bits, read):
    case = WeightOnlyCase(m=3, k=24, n=20, bits=bits, group=6)
    assert costs.work(case, "forward") == (3 * 480, 4 * 3 * (24 + 20) + read)


def test_limit_is_the_larger_of_both():
    assert costs.Work(500_000, 1).limit_seconds(ROOFS) == pytest.approx(2e-6)
    assert costs.Work(1, 500_000).limit_seconds(ROOFS) == pytest.approx(1e-5)


@pytest.mark.parametrize(
    "name", [name for name, case in table.CASES.items() if isinstance(case, ApplicationCase)]
)
def test_work_of_models(name):
    keras = pytest.importorskip("keras")
    case = table.CASES[name]
    build = getattr(keras.applications, case.name)
    model = build(weights=None, input_shape=(case.size, case.size, 3))
    macs = weights = 0
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, (keras.layers.Conv2D, keras.layers.Dense)) or "kernel" in vars(layer):
            image = layer._inbound_nodes[0].outputs[0].shape[1:-1]
            weights += np.prod(layer.kernel.shape)
            macs += np.prod(layer.kernel.shape) * np.prod(image)
    work = costs.work(case, "forward")
    assert work == (case.batch * macs, 4 * (weights + case.batch * case.size**2 * 3))


def test_grid_has_no_zero_before_the_rectifier_and_no_rounding():
    case = ConvCase(1, (6, 6), 16, 8, (1, 1))
    x, w, b, _ = grid.inputs(case)
    z = np.tensordot(x, w[0, 0], 1) + b
    assert np.abs(z).min() > 0
    single = np.tensordot(x.astype(np.float32), w[0, 0].astype(np.float32), 1) + b.astype("f4")
    np.testing.assert_array_equal(single, z)


def test_every_family_of_rules_has_a_case():
    """Also the backward pass alone of those that have it, and every activation on its own."""
    others = (ApplicationCase, RecurrentCase, DecoderCase)
    cases = [case for case in table.CASES.values() if not isinstance(case, others)]
    trained = {case.family for case in cases if getattr(case, "trained", False)}
    assert trained == {rule.family for rule in rules.RULES if not rule.forward_alone}
    alone = {case.family for case in cases if case.modes == ("step",)} - trained
    stays = {rule.family for rule in rules.RULES if rule.backward_alone}
    never = {"grouped_conv2d", "trained_conv2d"}
    assert alone == stays - never, "of which the forward pass never has to stay"
    forward = [case for case in cases if MODES[0] in case.modes]
    # One that emits stock ops alone is not told from stock here.
    families = {rule.family for rule in rules.RULES if rule.fused_ops}
    assert {case.family for case in forward} | trained == families
    names = {rule.name for rule in rules.RULES if rule.family == "act"}
    assert names <= {case.rule() for case in forward}
    loops = [case for case in table.CASES.values() if isinstance(case, RecurrentCase)]
    assert {case.rule() for case in loops} == {loop.name for loop in recurrent.LOOPS}


RULE_CASES = [
    (name, mode)
    for group in ("rules", "recurrent")
    for name, case in table.GROUPS[group].items()
    for mode in case.modes
]


@pytest.mark.parametrize(("name", "mode"), RULE_CASES)
def test_rule_cases_are_fused_by_their_rule(name, mode):
    (case,) = table.select([name], "float32").values()
    known = {rule.name for rule in (*rules.RULES, *recurrent.LOOPS)}
    assert case.rule().removesuffix("_grad") in known
    stock, ours = (tensorflow_programs.Programs(p).load(case, mode)[1] for p in ("stock", "ours"))
    for value, expected in zip(ours, stock, strict=True):
        near = np.abs(value - expected) <= contest.TOLERANCE["float32"] * np.sqrt(
            np.mean(np.square(expected))
        )
        assert np.mean(~near) <= contest.FAR_ELEMENTS


@pytest.mark.parametrize("peer", ["stock", "ours"])
@pytest.mark.parametrize("name", ["conv_tiny", "matmul_tiny", "batch_norm_tiny", "gru_short"])
def test_programs_take_bfloat16(peer, name):
    (case,) = table.select([name], "bfloat16").values()
    y, *gradients = tensorflow_programs.Programs(peer).load(case, "step")[1]
    assert len(gradients) == len(grid.inputs(case)) - 1
    assert np.isfinite(y).all() and np.abs(y).max() > 0


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in table.GROUPS["quantized"]),
        ("quantized_odd", "float16"),
        ("quantized_odd", "bfloat16"),
        *((name, "float32") for name in table.GROUPS["weight_only"]),
        *((name, "float32") for name in table.GROUPS["weight_only_forms"]),
        ("weight_only_odd", "float16"),
        ("weight_only_odd", "bfloat16"),
        ("weight_only_16_rows", "bfloat16"),
    ],
)
def test_quantized_layers_compute_the_same(name, dtype):
    """As stock ops do in float32: in half precision their products can overflow."""
    cases = [table.select([name], d)[name] for d in ("float32", dtype)]
    assert cases[0].modes == ("forward",)
    stock, ours = (
        tensorflow_programs.Programs(peer).load(case, "forward")[1]
        for peer, case in zip(("stock", "ours"), cases, strict=True)
    )
    (expected,), (value,) = stock, ours
    rms = np.sqrt(np.mean(np.square(expected)))
    assert np.abs(value - expected).max() <= contest.TOLERANCE[dtype] * rms


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_decoders_compute_the_same(dtype):
    """As stock does in float32, with all of a step fused but products of small matrices."""
    cases = [table.select(["decoder_tiny"], d)["decoder_tiny"] for d in ("float32", dtype)]
    stock, ours = (
        tensorflow_programs.Programs(peer).load(case, "forward")[1]
        for peer, case in zip(("stock", "ours"), cases, strict=True)
    )
    (expected,), (value,) = stock, ours
    rms = np.sqrt(np.mean(np.square(expected)))
    assert value.shape == (2, 1, 24)
    assert np.abs(value - expected).max() <= contest.TOLERANCE[dtype] * rms


def decoder_left(monkeypatch, *disabled):
    """Loads a decoder with matrices that are read for a few rows, without some rules."""
    case = DecoderCase(1, 1, 512, 4, 2, 512, 9, 2)
    programs = tensorflow_programs.Programs("ours")
    kept = functools.partial(tf_fused_ops.function, remap=RemapOptions(disable=disabled))
    monkeypatch.setattr(programs, "decorate", kept)
    return programs.load(case, "forward")


def test_steps_of_decoders_must_be_fused(monkeypatch):
    assert len(decoder_left(monkeypatch)[1]) == 1
    for rule, left in [
        ("update_cache", "Pack, XlaDynamicUpdateSlice"),
        ("attention", "BatchMatMulV2"),
        ("few_rows_batch_matmul", "BatchMatMulV2"),
    ]:
        with pytest.raises(tensorflow_programs.NotWhatItClaims, match=f"not fused: {left}"):
            decoder_left(monkeypatch, rule)


@pytest.mark.parametrize("act", ["none", "relu", "silu", "gelu"])
def test_quantized_program_is_what_keras_computes(act):
    keras = pytest.importorskip("keras")
    case = QuantizedCase(7, 30, 20, act={"gelu": "gelu_erf"}.get(act, act))
    a, kernel = (np.random.default_rng(i).normal(size=s) for i, s in ((0, (7, 30)), (1, (30, 20))))
    layer = keras.layers.Dense(20, activation=None if act == "none" else act)
    layer.build(a.shape)
    layer.set_weights([kernel, np.linspace(-1, 1, 20)])
    layer.quantize("int8")
    inputs = tf.constant(a, tf.float32), layer._kernel, layer.kernel_scale, layer.bias
    value = tensorflow_programs._forward(case)(*map(tf.convert_to_tensor, inputs))
    np.testing.assert_allclose(value, layer(a.astype(np.float32)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_weight_only_program_is_what_keras_computes(bits):
    quantizers = pytest.importorskip("keras.src.quantizers.quantization_config")
    import keras

    case = WeightOnlyCase(7, 48, 20, bits, group=16, act="silu")
    a, kernel = (np.random.default_rng(i).normal(size=s) for i, s in ((0, (7, 48)), (1, (48, 20))))
    layer = keras.layers.Dense(20, activation="silu")
    layer.build(a.shape)
    layer.set_weights([kernel, np.linspace(-1, 1, 20)])
    options = (
        quantizers.Int4QuantizationConfig(block_size=16)
        if bits == 4
        else quantizers.Int8QuantizationConfig(activation_quantizer=None)
    )
    layer.quantize(config=options)
    groups = [layer.kernel_zero, tf.cast(layer.g_idx, tf.int32)] if bits == 4 else []
    inputs = tf.constant(a, tf.float32), layer._kernel, layer.kernel_scale, *groups, layer.bias
    value = tensorflow_programs._forward(case)(*map(tf.convert_to_tensor, inputs))
    np.testing.assert_allclose(value, layer(a.astype(np.float32)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("remark", "expected"),
    [
        (
            {"doubt": "output 3 differs"},
            "output 3 differs from the same in float32; timed all the same",
        ),
        ({"spread": 0.3}, "the rounds' medians spread over 30% of their median"),
        ({"slow_rounds": 2}, "the machine stayed slow beside 2 of the rounds"),
    ],
    ids=["doubt", "spread", "slow"],
)
def test_remark_is_told(remark, expected):
    case = table.CASES["conv3x3_64"]
    steady = Timing(1.0, 1.0, 0.0)
    timings = {"stock": steady._replace(**remark), "ours": steady}
    settings = {"dtype": "bfloat16", "threads": 2}
    values = report.collect(settings, ROOFS, [("conv3x3_64", case, "step", timings)])
    lines = [line for line in report.lines(values) if ": " in line and "training step" in line]
    assert lines == [f"TF, {case.title()}, training step: {expected}"]


def test_the_package_is_no_peer_of_itself():
    (case,) = collected(stock=3.0, ours=2.0, winograd=1.0)["cases"]
    assert (case["best_peer"], case["ratio_to_best"]) == ("stock", 1.5)


def test_rates():
    rates = {
        dtype: _core.multiply_add_rate(dtype, 1, 10_000)
        for dtype in ("float16", "bfloat16", "float32", "float64")
    }
    assert min(rates.values()) > 1e8
    assert _core.copy_rate(1, 1 << 20) > 1e8
    for arguments in (("int8", 1, 10), ("float32", 0, 10), ("float32", 1, 0)):
        with pytest.raises(ValueError, match=r"dtype|num_threads|rounds"):
            _core.multiply_add_rate(*arguments)
    with pytest.raises(ValueError, match="bytes"):
        _core.copy_rate(1, 0)


def test_list(capsys):
    assert main(["bench", "--list", "--cases", "batch_norm", "*_short", "*_odd", "resnet50"]) == 0
    printed = capsys.readouterr().out.splitlines()
    short = ["lstm_short", "gru_short"]
    odd = ["quantized_odd", "weight_only_odd"]
    names = [line.split()[0] for line in printed]
    assert names == [*table.GROUPS["batch_norm"], *short, *odd, "resnet50"]


def test_list_of_all(capsys):
    """Without names, the groups that are not timed by default are listed, too."""
    assert main(["bench", "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == list(table.CASES)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--cases", "nonsense*"], "--cases: 'nonsense*' is none of"),
        (["--dtype", "int8"], "--dtype"),
        (["--threads", "0"], "--threads: 0 is not between 1 and"),
        (["--threads", "9999"], "--threads: 9999"),
        (["--threads", "two"], "--threads"),
        (["--peers", "stock,nonsense"], "--peers: 'nonsense' is none of"),
        (["--json", "/dev/null/times.json"], "--json: /dev/null/times.json"),
        (["--picture", "roofline.txt"], "--picture: roofline.txt ends in none of"),
        (["--picture", "/dev/null/roofline.svg"], "--picture"),
        (["--memory", "nonsense"], "--memory"),
        (["--memory", "--scaling"], "--scaling: not allowed with argument --memory"),
        (["--scaling", "--threads", "1"], "--threads: --scaling compares"),
        (["--scaling", "--picture", "roofline.svg"], "--picture: it shows times"),
        (["--device", "tpu"], "--device: invalid choice"),
        (
            ["--device", "gpu", "--memory"],
            "--device: memory and scaling are measured on the processor",
        ),
        (["--device", "gpu"], "--device: TensorFlow sees no GPU"),
    ],
)
def test_bad_input_is_one_sentence(arguments, expected, capsys, monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "--quick", *arguments])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert expected in printed.err.splitlines()[-1]
