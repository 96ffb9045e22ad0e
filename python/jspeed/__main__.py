"""``python -m jspeed``: the command ``jspeed``."""

from jspeed.cli.main import main

if __name__ == "__main__":
    main()
