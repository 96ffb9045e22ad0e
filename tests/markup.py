"""Test helpers: read a page of HTML, and the texts of a picture."""

import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

VOID = ("meta", "br", "path", "rect", "use", "img")
SVG = "{http://www.w3.org/2000/svg}"


class Reader(HTMLParser):
    """Collects a page's elements, their attributes and its text; every element must close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def texts_of(path: Path) -> list[str]:
    """Return every text in an SVG; raises when it is not XML."""
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    return ["".join(element.itertext()).strip() for element in root.iter(f"{SVG}text")]
