"""`demo`: trains and runs real models, stock and fused, and checks the claims about them."""

import importlib.util
from pathlib import Path

from tf_fused_ops.cli.errors import UsageError

_NEEDED = {
    "matplotlib": "matplotlib",
    "py_mini_racer": "mini-racer",
    "rich": "rich",
    "sklearn": "scikit-learn",
}


def add_parser(subparsers):
    """Adds the subcommand and returns its parser."""
    parser = subparsers.add_parser(
        "demo",
        help="train a network on handwritten digits and run ResNet50, stock and fused",
        epilog="example: python -m tf_fused_ops demo --quick --output pictures",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer training steps, smaller photographs"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo_output"),
        help="folder for the pictures (default: %(default)s)",
    )
    return parser


def run(args):
    """Runs the demo and returns 0, or 1 when a claim fails."""
    missing = [name for module, name in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)} missing: run pip install {' '.join(missing)}")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output: {error}") from error
    from tf_fused_ops.demo.runner import FULL, QUICK, Demo

    return 1 if Demo(QUICK if args.quick else FULL, args.output).run() else 0
