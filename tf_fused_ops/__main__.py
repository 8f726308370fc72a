"""The command line: `python -m tf_fused_ops info | rules | explain | viz | demo`."""

import sys

from tf_fused_ops.cli import main

if __name__ == "__main__":
    sys.exit(main())
