"""Checks of a user's own function on several devices, and pictures of arrays on them."""

from jspeed.sharding.check import Exchange, Placed, Report, check, picture

__all__ = ["Exchange", "Placed", "Report", "check", "picture"]
