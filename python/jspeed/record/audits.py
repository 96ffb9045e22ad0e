"""What ``jspeed audit`` found of a run: audit-HASH.json beside its record."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, TypedDict

from jspeed.fields import NotNegative, check_json, parse_json
from jspeed.record.schema import LossOrNull, Moment

NAME = re.compile(r"audit-[0-9a-f]{8}\.json")
SAME = 2e-3
"""Nats: two kinds of devices round the mean over a validation set in bf16 less differently."""
MOST_NUMBERS = {"initial state": 256, "step": 2048, "evaluation": 256}
"""Numbers that programs of a run on a track may carry as constants.

Recipes of the house have at most 151 in first states and evaluations, and 1,170 in steps (r92's
schedules). A table of which letter follows which has 4,225.
"""
MOST_PLACES = {"initial state": 512, "step": 8192, "evaluation": 2048}
"""Places of numbers in a program (:class:`jspeed.run.compute.inside.Inside`), equal ones included.

Recipes of the house have at most 193, 3,321 and 1,352.
"""


class Audit(TypedDict):
    """The content of audit-HASH.json."""

    run: str  # sha256 of the run.json
    weights: str  # SHA-256 of the file of parameters
    made: Moment
    commit: str | None  # of the code that audited
    machine: str | None
    val_loss: float  # scored again
    difference: NotNegative  # from the record's
    second: LossOrNull  # loss on the track's second text, scored again; null: the data lack it
    causality: dict[str, Any]  # the probe, drawn anew
    numbers: dict[str, int]  # in constants of the evaluation


def file_of(audit: Audit) -> tuple[str, bytes]:
    """Return name and content of the file that keeps ``audit``."""
    content = (json.dumps(audit, indent=2) + "\n").encode()
    return audit_name(content), content


def audit_name(content: bytes) -> str:
    """Return the file name of an audit-HASH.json with that content."""
    return f"audit-{hashlib.sha256(content).hexdigest()[:8]}.json"


def parse_audit(content: bytes, path: Path) -> Audit:
    """Return what an audit-HASH.json holds, checked; ``path`` names it in error messages."""
    return parse_json(
        content, path, lambda found: check_json(found, Audit), "restore it, or remove it"
    )
