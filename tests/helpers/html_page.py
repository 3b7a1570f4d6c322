"""Parses an HTML page."""

import html.parser

_VOID = {"meta", "img", "br", "input", "col", "link"}


class Page(html.parser.HTMLParser):
  """The elements of a page: (tag, attributes, text), by id if they have one.

  The text of an element includes that of its descendants.
  """

  def __init__(self, text: str):
    super().__init__()
    self.elements, self._open = [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    element = {"tag": tag, "text": "", "path": list(self._open), **dict(attrs)}
    self.elements.append(element)
    if tag not in _VOID:
      self._open.append(element)

  def handle_endtag(self, tag):
    while self._open and self._open.pop()["tag"] != tag:
      pass

  def handle_data(self, data):
    for element in self._open:
      element["text"] += data

  def text(self, name: str) -> str:
    (found,) = [x["text"] for x in self.elements if x.get("id") == name]
    return found
