"""``python -m jspeed``: the command ``jspeed``."""

import os
import sys

if sys.path[0] == os.getcwd():
    del sys.path[0]  # as python -P: a jax.py or a numpy/ in the current folder is not the package of that name

from jspeed.commands.main import main

if __name__ == "__main__":
    main()
