"""The argument that says which program a command is about."""

import tensorflow as tf

from tf_fused_ops.cli.errors import UsageError
from tf_fused_ops.viz import sources
from tf_fused_ops.viz.errors import VizError, sentence

_HELP = """a .pb, .pbtxt or .keras file, the folder of a SavedModel, or a function or model:
package.module:name or file.py:name"""


def add_arguments(parser):
    """Adds THING and what belongs to it to a parser."""
    parser.add_argument("thing", metavar="THING", help=_HELP)
    parser.add_argument(
        "--signature",
        metavar="SPECS",
        help='the inputs of a function: "float32[8,28,28,1], int32[?]"; ? is unknown',
    )
    parser.add_argument(
        "--outputs",
        metavar="NAMES",
        help="the tensors to fetch from a .pb or .pbtxt, separated by commas",
    )
    parser.add_argument(
        "--library",
        action="append",
        default=[],
        metavar="FILE",
        help="shared object with further ops that the graph uses; can be repeated",
    )


def _signature(args):
    if args.signature is None:
        return None
    try:
        return sources.parse_signature(args.signature)
    except VizError as error:
        raise UsageError(f"--signature: {error}") from error


def load(args):
    """Returns the Source that the arguments name.

    Raises:
        UsageError: There is none.
    """
    for library in args.library:
        try:
            tf.load_op_library(library)
        except Exception as error:
            raise UsageError(f"--library {library}: {sentence(error)}") from error
    try:
        thing = args.thing
        title = None
        if ":" in thing:
            title, thing = thing, sources.import_object(thing)
        signature = _signature(args)
        outputs = [name.strip() for name in args.outputs.split(",")] if args.outputs else None
        return sources.load(thing, None, signature, outputs, title)
    except VizError as error:
        raise UsageError(str(error)) from error
