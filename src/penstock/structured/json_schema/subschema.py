"""The schemas within a schema, each with its JSON pointer, and the targets of references between them."""

from urllib.parse import unquote

from penstock.dataclass import dataclass
from penstock.structured.json_schema.document import Json, SchemaError, child, show

IN_PLACE = ("allOf", "anyOf", "oneOf")
"""Keywords whose schemas apply to the same value as the one that they are in."""
_UNSUPPORTED = frozenset(
    {
        *("not", "if", "then", "else", "contains", "minContains", "maxContains"),
        *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords that no grammar enforces."""


@dataclass(frozen=True, slots=True)
class Subschema:
    """A schema within a document, and its JSON pointer.

    Raises:
        SchemaError: the value is not a schema.
    """

    pointer: str
    value: Json

    def __post_init__(self) -> None:
        if not isinstance(self.value, (bool, dict)):
            raise SchemaError(self.pointer, f"a schema is an object, true or false, not {show(self.value)}")

    @property
    def keywords(self) -> dict[str, Json]:
        """The keywords of the schema; none if it is true or false."""
        return self.value if isinstance(self.value, dict) else {}

    def check_keywords(self) -> None:
        """
        Raises:
            SchemaError: it has keywords that no grammar enforces.
        """
        missing = sorted(_UNSUPPORTED & self.keywords.keys())
        if missing:
            raise SchemaError(self.pointer, f"these keywords are not supported: {', '.join(missing)}")

    def path(self, *steps: str | int) -> str:
        """The JSON pointer to a value within the schema."""
        return child(self.pointer, *steps)

    def one(self, keyword: str) -> "Subschema":
        """The schema under a keyword; true if the keyword is missing."""
        return Subschema(self.path(keyword), self.keywords.get(keyword, True))

    def listed(self, keyword: str) -> "list[Subschema]":
        """The schemas in the list under a keyword; none if it is missing.

        Raises:
            SchemaError: it is no list of schemas.
        """
        if keyword not in self.keywords:
            return []
        items = self.keywords[keyword]
        if not isinstance(items, list) or not items:
            raise SchemaError(self.path(keyword), f"it must be a list of schemas, not {show(items)}")
        return [Subschema(self.path(keyword, schema), item) for schema, item in enumerate(items)]

    def named(self, keyword: str) -> "dict[str, Subschema]":
        """The schemas in the object under a keyword, by their names; none if it is missing.

        Raises:
            SchemaError: it is no object of schemas.
        """
        schemas = self.keywords.get(keyword, {})
        if not isinstance(schemas, dict):
            raise SchemaError(self.path(keyword), f"it must be an object of schemas, not {show(schemas)}")
        return {name: Subschema(self.path(keyword, name), schema) for name, schema in schemas.items()}

    def names(self, keyword: str) -> list[str]:
        """The strings in the list under a keyword; none if it is missing.

        Raises:
            SchemaError: it is no list of strings.
        """
        listed = self.keywords.get(keyword, [])
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise SchemaError(self.path(keyword), f"it must be a list of strings, not {show(listed)}")
        return [name for name in listed if isinstance(name, str)]


class References:
    """Resolves the references within one document."""

    def __init__(self, root: Subschema) -> None:
        self._root = root
        base = root.keywords.get("$id")
        self._document = base.partition("#")[0] if isinstance(base, str) else ""
        self._anchors = _anchors(root.value)

    def resolve(self, schema: Subschema) -> Subschema:
        """The target of a schema's `$ref`.

        Raises:
            SchemaError: there is no schema, or it is in another document.
        """
        reference, pointer = schema.keywords["$ref"], schema.path("$ref")
        if not isinstance(reference, str):
            raise SchemaError(pointer, f"a reference is a string, not {show(reference)}")
        document, _, fragment = reference.partition("#")
        if document and document != self._document:
            raise SchemaError(pointer, f"{show(reference)} is in another document, which is not loaded")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            targets = self._anchors.get(fragment, [])
            if len(targets) != 1:
                raise SchemaError(
                    pointer, f"{show(reference)} leads to {len(targets)} anchors of this name, not to one"
                )
            fragment = targets[0]
        return Subschema(fragment, self._find(fragment, SchemaError(pointer, f"{show(reference)} leads nowhere")))

    def _find(self, target: str, error: SchemaError) -> Json:
        value = self._root.value
        for step in target.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                raise error
        return value


def _anchors(root: Json) -> dict[str, list[str]]:
    """Pointers to the schemas with an `$anchor`, by its name."""
    found: dict[str, list[str]] = {}
    pending = [("", root)]
    while pending:
        pointer, value = pending.pop()
        if isinstance(value, list):
            pending += [(child(pointer, schema), item) for schema, item in enumerate(value)]
        elif isinstance(value, dict):
            if isinstance(anchor := value.get("$anchor"), str):
                found.setdefault(anchor, []).append(pointer)
            pending += [(child(pointer, name), item) for name, item in value.items()]
    return found
