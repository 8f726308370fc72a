"""The command line: `python -m tf_fused_ops info | rules | explain | viz | demo | bench`."""

import sys

from tf_fused_ops.cli import main

if __name__ == "__main__":
    sys.exit(main())
