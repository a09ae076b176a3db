"""What a sequence's text must match, as plain data that travels between processes."""

from dataclasses import dataclass
from typing import Literal

StructureKind = Literal["json_schema", "regex", "choice", "grammar", "lark"]

JSON_OBJECT = '{"type":"object"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A restriction on a sequence's text.

    ``source`` is a JSON schema's text, a regular expression, the allowed texts (``choice``), or a
    grammar in Lark's or GBNF's notation (``lark``: certainly Lark's). With ``after``, which must
    be one token, the restriction begins behind that token: what comes before it, a model's
    reasoning, is free. With ``opens``, one token as well, only a text that begins with that token
    has such a free part.
    ``field`` is the request's field that it came from, for errors.
    """

    kind: StructureKind
    source: str | tuple[str, ...]
    after: str = ""
    opens: str = ""
    field: str = "structured_outputs"
