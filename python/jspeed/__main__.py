"""``python -m jspeed``: the command ``jspeed``."""

import os
import sys

if sys.path[0] == os.getcwd():
    # as python -P: a jax.py or a numpy/ in the current folder is not the package of that name
    del sys.path[0]

from jspeed.cli.main import main

if __name__ == "__main__":
    main()
