"""Fields of a record by type: for modules that other parts of issue 68 move and write anew."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tasks import readers

KINDS = {
    str: "a text", list: "a list", dict: "an object", int: "a whole number", float: "a number",
    bool: "true or false",
}  # fmt: skip


@dataclass
class Record(readers.Record):
    """Give access to the fields of one record.

    A field counts as present if it exists, has the required type and is not empty; otherwise a
    `UserError` names the file and the place.
    """

    def get(self, name: str, kind: type, value: object = None) -> object:
        """Return the field `name`, checked; or `value`, a part of that field, checked likewise."""
        value = self.fields.get(name) if value is None else value
        if value is None:
            raise self.error(f"the field '{name}' is missing")
        if type(value) is not kind:
            actual = KINDS.get(type(value), "something else")
            raise self.error(f"'{name}' must be {KINDS[kind]}, this is {actual}")
        if kind is not int and not (value.strip() if kind is str else value):
            raise self.error(f"'{name}' is empty")
        return value

    def maybe(self, name: str, kind: type):
        """Return the field, or an empty value of its type if it is missing or empty."""
        return self.get(name, kind) if self.fields.get(name) not in (None, "", [], {}) else kind()

    def text(self, name: str, value: object = None) -> str:
        try:
            (text := self.get(name, str, value)).encode()
        except UnicodeEncodeError:
            half = "half of a surrogate pair (\\ud800 to \\udfff), which is no text"
            raise self.error(f"'{name}' holds {half}") from None
        return text

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts, at least one."""
        values = self.get(name, list)
        return tuple(self.text(name, "" if value is None else value) for value in values)

    def inside(self, name: str, value: object = None) -> Record:
        """Return a nested object as a record of the same place."""
        return replace(self, fields=self.get(name, dict, value))

    def parts(self, name: str, least: int = 1) -> list[Record]:
        """Return the objects of a list as records that name their place: "line 3, qa 2".

        least: 0 = the list may be empty, or missing.
        """
        values = self.get(name, list) if least else self.maybe(name, list)
        places = (f"{self.place}, {name} {n}".removeprefix(", ") for n in range(1, len(values) + 1))
        return [
            replace(self, place=place).inside(name, value)
            for place, value in zip(places, values, strict=True)
        ]
