"""What an hour of a device costs, and so what a run does (records/history/prices.csv)."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

from jspeed.base.files import read_text
from jspeed.errors import BadInput
from jspeed.record.schema import Devices

COLUMNS = ("device", "dollars_per_hour", "date", "source")


class Price(NamedTuple):
    """Dollars an hour of one device, on demand, whose kind holds the word ``device``."""

    device: str
    dollars_per_hour: float
    date: str
    source: str


def read_prices(records: Path) -> list[Price]:
    """Return the prices of a records folder, none where it has no such table; raises BadInput for a
    wrong one."""
    path = records / "history" / "prices.csv"
    if not path.exists():
        return []
    return [_price(row, path, number) for number, row in enumerate(lines_of(path, COLUMNS), 2)]


def lines_of(path: Path, columns: Sequence[str]) -> Iterable[dict[str, str]]:
    """Return the lines of a table by column; raises BadInput where it has other ``columns``."""
    reader = csv.DictReader(io.StringIO(read_text(path, "restore it"), newline=""))
    if list(reader.fieldnames or ()) != [*columns]:
        raise BadInput(
            f"{path}: expected the columns {', '.join(columns)}, found {reader.fieldnames}; restore"
            " it"
        )
    return reader


def _price(row: dict[str, str], path: Path, number: int) -> Price:
    try:
        price = Price(row["device"], float(row["dollars_per_hour"]), row["date"], row["source"])
        date.fromisoformat(price.date)
        if not (price.device and price.source and 0 < price.dollars_per_hour < float("inf")):
            raise ValueError("a field is empty, or no price")
    except (ValueError, TypeError) as error:
        raise BadInput(f"{path}: line {number} is not a price ({error}); restore it") from None
    return price


def dollars(devices: Devices, seconds: float, prices: Sequence[Price]) -> float | None:
    """Return what ``seconds`` of all ``devices`` cost; None where their kind has no price."""
    for price in prices:
        if re.search(rf"\b{re.escape(price.device)}\b", devices["kind"]):
            return seconds / 3600 * devices["count"] * price.dollars_per_hour
    return None
