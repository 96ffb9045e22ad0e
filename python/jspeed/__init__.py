"""jspeed: train a small GPT to a target loss as fast as JAX can, and keep an honest record of it."""

__version__ = "0.1.0"
