"""`bench`: times the package beside its peers, and beside what the machine can do at best."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import tensorflow as tf

from tf_fused_ops.bench import (
    contest,
    costs,
    drawn,
    machine,
    memory,
    progress,
    report,
    scaling,
    stacks,
    table,
)
from tf_fused_ops.bench.workers import DEVICES, OURS, PEERS, WINOGRAD, installed
from tf_fused_ops.cli.errors import UsageError

_EXAMPLES = """\
examples:
  python -m tf_fused_ops bench --quick
  python -m tf_fused_ops bench --cases "conv*" matmul_gelu_tanh --dtype bfloat16
  python -m tf_fused_ops bench --cases contraction --json times.json --picture roofline.svg
  python -m tf_fused_ops bench --cases resnet50 --peers stock,xla,ours
  python -m tf_fused_ops bench --random 20 --seed 7 --peers stock,ours
  python -m tf_fused_ops bench --cases rules --peers stock,ours
  python -m tf_fused_ops bench --cases "conv3x3*" --peers stock,torch,ours,winograd
  python -m tf_fused_ops bench --memory
  python -m tf_fused_ops bench --scaling --cases contraction --peers stock,ours
  python -m tf_fused_ops bench --device gpu --dtype bfloat16
"""
_LIMITS = "the machine's limits"
# Device -> the groups that are timed unless others are named.
_CASES = {"cpu": ("contraction", "dense", "batch_norm", "off_track", "groups"), "gpu": ("large",)}
_PICTURES = (".svg", ".png", ".pdf")


def add_parser(subparsers):
    """Adds the subcommand and returns its parser."""
    parser = subparsers.add_parser(
        "bench",
        help="time the package beside TensorFlow, XLA and PyTorch, and beside the machine's limits",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="GLOB",
        help=f"names, or groups ({', '.join(table.GROUPS)}); * is a wildcard (default: "
        f"{', '.join(_CASES['cpu'])}; on a GPU {', '.join(_CASES['gpu'])})",
    )
    parser.add_argument(
        "--random",
        type=int,
        metavar="N",
        help="N cases of each family with sizes drawn at random, instead or beside those named",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of --random (default: %(default)s)"
    )
    parser.add_argument(
        "--device", choices=tuple(DEVICES), default="cpu", help="default: %(default)s"
    )
    parser.add_argument(
        "--list", action="store_true", help="list the cases, all or those named, and end"
    )
    parser.add_argument(
        "--dtype", choices=tuple(costs.BYTES), default="float32", help="default: %(default)s"
    )
    parser.add_argument(
        "--threads", type=int, default=machine.cores(), metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--peers",
        metavar="NAMES",
        help=f"with commas between them, of {', '.join(PEERS)} "
        f"(default: all that are installed but {WINOGRAD}: the package with Winograd's algorithm)",
    )
    parser.add_argument("--quick", action="store_true", help="measure for a shorter time")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--memory",
        nargs="*",
        choices=tuple(stacks.STACKS),
        metavar="STACK",
        help=f"measure the memory of training steps instead, of {', '.join(stacks.STACKS)} "
        "(default: all but the last)",
    )
    kind.add_argument(
        "--scaling", action="store_true", help="compare the times of one thread and of N instead"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the rates under the machine's roofs"
    )
    return parser


def run(args):
    """Measures and prints; returns 0, or 1 if the package failed in a case."""
    cases = _cases(args)
    if args.list:
        print("\n".join(_listing(cases)))
        return 0
    peers = _peers(args)
    _check(args)
    effort = contest.QUICK if args.quick else contest.FULL
    settings = {
        "device": args.device,
        "dtype": args.dtype,
        "threads": args.threads,
        "effort": effort._asdict(),
    }
    if args.memory is not None:
        key, collected = "memory", _memory(args, peers, settings)
    elif args.scaling:
        key, collected = "scaling", _scaling(args, cases, peers, effort, settings)
    else:
        key, collected = "cases", _times(args, cases, peers, effort, settings)
    print("\n".join(report.lines(collected)))
    if args.json:
        args.json.write_text(json.dumps(collected, indent=2, ensure_ascii=False) + "\n")
    if args.picture:
        from tf_fused_ops.bench import roofline

        roofline.draw(collected, args.picture)
    failed = any("error" in result["peers"].get(OURS, {}) for result in collected[key])
    return 1 if failed else 0


def _times(args, cases, peers, effort, settings):
    contestants = {peer: contest.Contestant(peer, args.threads) for peer in peers}
    results = []
    contesting = contest.Contest(list(contestants.values()), effort, args.device)
    with progress.shown(2 + _count(cases)) as step, contesting as running:

        def measure():
            step(_LIMITS)
            if args.device == "cpu":
                return machine.measure(args.dtype, args.threads)
            settings["graphics card"], roofs = running.card(args.dtype)
            return roofs

        roofs = measure()
        for name, case in cases.items():
            for mode in case.modes:
                step(_title(case, mode))
                timings = running.run(name, args.dtype, mode)
                by_peer = {peer: timings[key] for peer, key in contestants.items()}
                results.append((name, case, mode, by_peer))
        roofs = roofs.best(measure())
    return report.collect(settings, roofs, results)


def _memory(args, peers, settings):
    chosen = args.memory or list(stacks.STACKS)[:-1]
    with progress.shown(len(chosen) * len(peers)) as step:
        measured = memory.run(chosen, peers, args.threads, step)
    return {**report.heading({**settings, "dtype": "float32"}), "memory": measured}


def _scaling(args, cases, peers, effort, settings):
    with progress.shown(_count(cases)) as step:
        measured = scaling.run(
            cases, peers, args.threads, effort, lambda case, mode: step(_title(case, mode))
        )
    return {**report.heading(settings), "scaling": measured}


def _count(cases):
    return sum(len(case.modes) for case in cases.values())


def _title(case, mode):
    return f"{case.title()}: {report.MODE_TITLES[mode]}"


def _listing(cases):
    width = max(map(len, cases))
    for name, case in cases.items():
        yield f"{name:<{width}}  {table.group_of(name)}: {case.title()}"


def _cases(args):
    random_ones = _random_ones(args)
    default = tuple(table.GROUPS) if args.list else _CASES[args.device]
    named = args.cases or (() if random_ones else default)
    try:
        return table.select([*named, *random_ones], args.dtype)
    except ValueError as error:
        raise UsageError(f"--cases: {error}") from error


def _random_ones(args):
    for option, least in (("random", 1), ("seed", 0)):
        value = getattr(args, option)
        if value is not None and value < least:
            raise UsageError(f"--{option}: {value} is less than {least}")
    return drawn.names(args.seed, args.random or 0)


def _peers(args):
    if args.peers is None:
        for peer in PEERS:
            if not installed(peer):
                print(f"{PEERS[peer]} is left out: PyTorch is not installed", file=sys.stderr)
        return [peer for peer in PEERS if installed(peer) and peer != WINOGRAD]
    names = [name.strip() for name in args.peers.split(",")]
    for name in names:
        if name not in PEERS:
            raise UsageError(f"--peers: '{name}' is none of {', '.join(PEERS)}")
        if not installed(name):
            raise UsageError(f"--peers: {name} needs PyTorch: run pip install torch")
    return [peer for peer in PEERS if peer in names]


def _check(args):
    if args.device == "gpu":
        if args.memory is not None or args.scaling:
            raise UsageError("--device: memory and scaling are measured on the processor")
        if not tf.config.list_physical_devices("GPU"):
            raise UsageError("--device: TensorFlow sees no GPU")
    try:
        machine.processors(args.threads)
    except ValueError as error:
        raise UsageError(f"--threads: {error}") from error
    if args.scaling and args.threads < 2:
        raise UsageError("--threads: --scaling compares one thread with several")
    if args.picture and (args.memory is not None or args.scaling):
        raise UsageError("--picture: it shows times, not memory or scaling")
    for option, path in (("--json", args.json), ("--picture", args.picture)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UsageError(f"{option}: {path} is not a file in an existing folder")
    if args.picture is None:
        return
    if args.picture.suffix not in _PICTURES:
        raise UsageError(f"--picture: {args.picture} ends in none of {', '.join(_PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--picture: needs matplotlib: run pip install matplotlib")
