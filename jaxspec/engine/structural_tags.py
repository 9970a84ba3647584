"""Converts structural tags, which constrain parts of a text, to a Lark grammar.

Owns both notations of vLLM's `structural_tag`: "structures" with "triggers", and a
"format", which is a tree of formats. Formats that name tokens are not supported.

A format such as "any_text" does not say where it ends. It is converted together with
the texts that end it (`ends`), and matches the shortest text up to one of them.

A format without JSON and without rules is a regular expression. It becomes one terminal
of the grammar: the library's lexer would otherwise let its first part match as much as
possible.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from jaxspec.engine.grammar_matcher import grammar_of_rules

_ANY_TEXT, _SOME_TEXT = "/(?s:.*)/", "/(?s:.+)/"
_EMPTY = '""'
# A slash in a regular expression, or an escaped character.
_SLASH = re.compile(r"\\.|/", re.DOTALL)
_OPEN = (
    "the format {} does not say where it ends: put it last, into a tag with an end, or "
    "before a const_string"
)
# Required and optional fields of each format, besides "type".
_FIELDS = {
    "const_string": (["value"], []),
    "regex": (["pattern"], []),
    "any_text": ([], ["excludes", "max_chars", "max_tokens"]),
    "json_schema": (
        ["json_schema"],
        ["style", "any_order", "max_whitespace_cnt", "excludes"],
    ),
    "grammar": (["grammar"], []),
    "sequence": (["elements"], []),
    "or": (["elements"], []),
    "optional": (["content"], []),
    "plus": (["content"], []),
    "star": (["content"], []),
    "repeat": (["min", "max", "content"], []),
    "tag": (["begin", "content", "end"], []),
    "tags_with_separator": (
        ["tags", "separator"],
        ["at_least_one", "stop_after_first"],
    ),
    "triggered_tags": (
        ["triggers", "tags"],
        ["at_least_one", "stop_after_first", "excludes"],
    ),
    "dispatch": (["rules"], ["loop", "excludes"]),
}
_OF_TOKENS = {
    "token",
    "exclude_token",
    "any_tokens",
    "token_triggered_tags",
    "token_dispatch",
}
# Fields that change nothing with these values, and are not supported with others.
_ONLY = {
    "any_text": {"max_tokens": None},
    "json_schema": {
        "style": "json",
        "any_order": False,
        "max_whitespace_cnt": None,
        "excludes": [],
    },
}


class _Part(NamedTuple):
    """An expression of the grammar.

    Attributes:
        text: In Lark's notation.
        is_regular: Whether it has no reference to a rule or a schema.
    """

    text: str
    is_regular: bool = True


def grammar_of_tag(
    tag: str | Mapping[str, Any], schema_text: Callable[[Any], str]
) -> str:
    """Convert a structural tag to llguidance's format.

    Args:
        tag: The tag, or its JSON text.
        schema_text: Converts a schema to JSON text with the request's options.

    Raises:
        ValueError: The tag is not valid, or uses a format that is not supported.
    """
    if isinstance(tag, str):
        tag = json.loads(tag)
    if not isinstance(tag, Mapping):
        raise ValueError(f"it must be an object, got {tag!r}")
    if tag.get("type", "structural_tag") != "structural_tag":
        raise ValueError(f'"type" must be "structural_tag", got {tag["type"]!r}')
    given = tag.keys() - {"type"}
    if given == {"structures", "triggers"}:
        wanted = _triggered(tag)
    elif given == {"format"}:
        wanted = tag["format"]
    else:
        raise ValueError(
            'it must have either "format", or "structures" and "triggers", got '
            f"{sorted(given)}"
        )
    return _Grammar(schema_text).text(wanted)


def _triggered(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the older notation to the newer one."""
    tags = []
    for one in _formats(tag, "structures"):
        if not isinstance(one, Mapping) or one.keys() != {"begin", "schema", "end"}:
            raise ValueError(
                f'each of "structures" must have begin, schema and end, got {one!r}'
            )
        schema = one["schema"]
        content = json.loads(schema) if isinstance(schema, str) else schema
        shape = {"type": "json_schema", "json_schema": content}
        ends = {"begin": one["begin"], "end": one["end"]}
        tags.append({"type": "tag", "content": shape, **ends})
    return {"type": "triggered_tags", "tags": tags, "triggers": tag["triggers"]}


class _Grammar:
    """The terminals and inner grammars written so far."""

    def __init__(self, schema_text: Callable[[Any], str]):
        self._schema_text = schema_text
        self._terminals: dict[str, str] = {}
        self._inner: list[dict[str, str]] = []

    def text(self, wanted: Any) -> str:
        """Return the grammar of a format, in llguidance's format."""
        start = self._in_rule(self._part(wanted, []))
        terminals = [f"{name}: {text}" for text, name in self._terminals.items()]
        lines = ["%llguidance {}", f"start: {start}", *terminals]
        main = {"name": "structural_tag", "lark_grammar": "\n".join(lines)}
        return json.dumps({"grammars": [main, *self._inner]})

    def _in_rule(self, part: _Part) -> str:
        """Return an expression for a rule; a regular part becomes a terminal."""
        if not part.is_regular:
            return f"({part.text})"
        return self._terminals.setdefault(part.text, f"T{len(self._terminals)}")

    def _sequence(self, parts: Sequence[_Part]) -> _Part:
        """Concatenate parts; regular neighbors become one terminal."""
        runs: list[_Part] = []
        for is_regular, run in groupby(parts, lambda one: one.is_regular):
            runs.append(_Part(" ".join(f"({one.text})" for one in run), is_regular))
        if len(runs) < 2:
            return runs[0] if runs else _Part(_EMPTY)
        return _Part(" ".join(map(self._in_rule, runs)), False)

    def _either(self, parts: Sequence[_Part]) -> _Part:
        if all(one.is_regular for one in parts):
            return _Part(" | ".join(f"({one.text})" for one in parts))
        return _Part(" | ".join(map(self._in_rule, parts)), False)

    def _repeated(self, part: _Part, times: str) -> _Part:
        text = f"({part.text})" if part.is_regular else self._in_rule(part)
        return _Part(f"{text}{times}", part.is_regular)

    def _part(self, wanted: Any, ends: Sequence[str]) -> _Part:
        """Convert a format and, if there are any, one of the texts that end it."""
        kind = _kind(wanted)
        if kind == "any_text":
            return self._free_text([], ends, _excluded(wanted), _max_chars(wanted))
        if kind in ("triggered_tags", "dispatch"):
            return self._triggers(kind, wanted, ends)
        if kind == "tag":
            return self._tag(wanted, ends)
        if kind == "or":
            elements = _formats(wanted, "elements")
            return self._either([self._part(one, ends) for one in elements])
        if kind == "sequence":
            return self._elements(_formats(wanted, "elements"), ends)
        if kind == "optional" and ends:
            return self._either([self._part(wanted["content"], ends), _one_of(ends)])
        part = self._closed(kind, wanted)
        return self._sequence([part, _one_of(ends)]) if ends else part

    def _closed(self, kind: str, wanted: Mapping[str, Any]) -> _Part:
        """Convert a format that does not depend on the text after it."""
        if kind == "const_string":
            return _Part(_literal(_text(wanted, "value")))
        if kind == "regex":
            pattern = _text(wanted, "pattern").replace("\n", "\\n")
            return _Part(f"/{_SLASH.sub(_escaped, pattern)}/")
        if kind == "json_schema":
            schema = wanted["json_schema"]
            if not isinstance(schema, Mapping) and schema is not True:
                raise ValueError(f'"json_schema" must be a JSON schema, got {schema!r}')
            return _Part(
                f"%json {self._schema_text({} if schema is True else schema)}", False
            )
        if kind == "grammar":
            name = f"rules{len(self._inner)}"
            rules = grammar_of_rules(_text(wanted, "grammar"))
            self._inner.append({"name": name, "lark_grammar": rules})
            return _Part(f"@{name}", False)
        if kind == "tags_with_separator":
            return self._separated(wanted)
        content = self._item(wanted["content"])
        return self._repeated(content, _times(kind, wanted))

    def _item(self, wanted: Any) -> _Part:
        """Convert a format that other text may follow."""
        if _is_open(wanted):
            raise ValueError(_OPEN.format(wanted["type"]))
        return self._part(wanted, [])

    def _elements(self, elements: Sequence[Any], ends: Sequence[str]) -> _Part:
        """Convert a sequence: a constant text may end the format before it."""
        parts, number = [], 0
        while number < len(elements) - 1:
            element, after = elements[number], elements[number + 1]
            number += 1
            if not _is_open(element):
                parts.append(self._part(element, []))
            elif _kind(after) == "const_string" and _text(after, "value"):
                parts.append(self._part(element, [after["value"]]))
                number += 1
            else:
                raise ValueError(_OPEN.format(element["type"]))
        if number < len(elements):
            parts.append(self._part(elements[number], ends))
        elif ends:
            parts.append(_one_of(ends))
        return self._sequence(parts)

    def _tag(self, tag: Mapping[str, Any], ends: Sequence[str]) -> _Part:
        begin, content, own = _text(tag, "begin"), tag["content"], _ends(tag)
        if not any(own):
            inner = [self._part(content, ends)]
        elif _is_open(content) and not all(own):
            raise ValueError(f"an empty end does not end {content['type']}")
        else:
            inner = [self._part(content, own), *([_one_of(ends)] if ends else [])]
        return self._sequence([*([_Part(_literal(begin))] if begin else []), *inner])

    def _separated(self, wanted: Mapping[str, Any]) -> _Part:
        tags = self._either([self._item(tag) for tag in _tags(wanted)])
        separator = _text(wanted, "separator")
        if not _flag(wanted, "stop_after_first"):
            after = [_Part(_literal(separator)), tags] if separator else [tags]
            tags = self._sequence([tags, self._repeated(self._sequence(after), "*")])
        return tags if _flag(wanted, "at_least_one") else self._repeated(tags, "?")

    def _triggers(
        self, kind: str, wanted: Mapping[str, Any], ends: Sequence[str]
    ) -> _Part:
        first, rules = None, []
        if kind == "dispatch":
            rules, is_repeated = _rules(wanted), _flag(wanted, "loop", default=True)
        else:
            tags, is_repeated = _tags(wanted), not _flag(wanted, "stop_after_first")
            for trigger, started in _by_trigger(wanted, tags).items():
                rules.append((trigger, {"type": "or", "elements": started}))
            if _flag(wanted, "at_least_one"):
                first = self._either([self._item(tag) for tag in tags])
        if first is not None and not is_repeated:
            return self._sequence([first, *([_one_of(ends)] if ends else [])])
        rest = self._free_text(rules, ends, _excluded(wanted), "*", is_repeated)
        return rest if first is None else self._sequence([first, rest])

    def _free_text(
        self,
        rules: Sequence[tuple[str, Any]],
        ends: Sequence[str],
        excluded: Sequence[str],
        times: str,
        is_repeated: bool = True,
    ) -> _Part:
        """Convert text in which a trigger is followed by its format.

        Args:
            times: Number of characters between two triggers, as in a regular
                expression.
        """
        stops = [*(trigger for trigger, _ in rules), *ends]
        text = f"/(?s:.){times}/"
        if excluded:
            text += f" & ~({_ANY_TEXT} ({_any_of(excluded)}) {_ANY_TEXT})"

        def up_to(stop: str) -> _Part:
            earlier = f"{_ANY_TEXT} ({_any_of(stops)}) {_SOME_TEXT}"
            return _Part(f"(({text}) {_literal(stop)}) & ~({earlier})")

        if ends:
            tail = self._either([up_to(end) for end in ends])
        elif stops:
            tail = _Part(f"({text}) & ~({_ANY_TEXT} ({_any_of(stops)}) {_ANY_TEXT})")
        else:
            tail = _Part(text)
        if not rules:
            return tail
        started = self._either(
            [
                self._sequence([up_to(trigger), self._item(one)])
                for trigger, one in rules
            ]
        )
        if is_repeated:
            return self._sequence([self._repeated(started, "*"), tail])
        after = [_one_of(ends)] if ends else []
        return self._either([self._sequence([started, *after]), tail])


def _kind(wanted: Any) -> str:
    """Return a format's type; check the names of its fields."""
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if not isinstance(kind, str):
        raise ValueError(f'a format must be an object with a "type", got {wanted!r}')
    if kind in _OF_TOKENS:
        raise ValueError(f"the format {kind} is not supported: name texts, not tokens")
    if kind not in _FIELDS:
        raise ValueError(f"{kind!r} is not a format: use one of {', '.join(_FIELDS)}")
    required, optional = _FIELDS[kind]
    missing = [name for name in required if name not in wanted]
    unknown = sorted(wanted.keys() - {"type", *required, *optional})
    if missing or unknown:
        problem = f"has no {missing[0]}" if missing else f"has no field {unknown[0]!r}"
        raise ValueError(f"the format {kind} {problem}")
    for name, only in _ONLY.get(kind, {}).items():
        if wanted.get(name, only) != only:
            raise ValueError(f"{name} of the format {kind} is not supported")
    return kind


def _is_open(wanted: Any) -> bool:
    """Return whether a format ends only where another text begins."""
    kind = _kind(wanted)
    if kind in ("any_text", "triggered_tags", "dispatch"):
        return True
    if kind == "or":
        return any(map(_is_open, _formats(wanted, "elements")))
    if kind == "sequence":
        return any(map(_is_open, _formats(wanted, "elements")[-1:]))
    if kind == "tag":
        return not any(_ends(wanted)) and _is_open(wanted["content"])
    return kind == "optional" and _is_open(wanted["content"])


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _any_of(texts: Sequence[str]) -> str:
    return " | ".join(map(_literal, texts))


def _one_of(texts: Sequence[str]) -> _Part:
    return _Part(_any_of(texts))


def _escaped(match: re.Match[str]) -> str:
    return "\\/" if match[0] == "/" else match[0]


def _formats(wanted: Mapping[str, Any], name: str) -> list[Any]:
    value = wanted[name]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} must be a list of at least one format, got {value!r}")
    return value


def _tags(wanted: Mapping[str, Any]) -> list[Any]:
    # Their type may be missing: only one is allowed.
    tags = [
        {"type": "tag", **tag} if isinstance(tag, Mapping) else tag
        for tag in _formats(wanted, "tags")
    ]
    for tag in tags:
        if _kind(tag) != "tag":
            raise ValueError(f"tags must be formats of type tag, got {tag['type']}")
    return tags


def _text(wanted: Mapping[str, Any], name: str) -> str:
    value = wanted[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {value!r}")
    return value


def _texts(wanted: Mapping[str, Any], name: str) -> list[str]:
    value = wanted.get(name, [])
    if not isinstance(value, list) or not all(
        isinstance(one, str) and one for one in value
    ):
        raise ValueError(f"{name} must be a list of non-empty strings, got {value!r}")
    return value


def _ends(tag: Mapping[str, Any]) -> list[str]:
    ends = tag["end"] if isinstance(tag["end"], list) else [tag["end"]]
    if not ends or not all(isinstance(end, str) for end in ends):
        raise ValueError(f"end must be a string or a list of strings, got {ends!r}")
    return ends


def _excluded(wanted: Mapping[str, Any]) -> list[str]:
    return _texts(wanted, "excludes")


def _flag(wanted: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = wanted.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def _count(wanted: Mapping[str, Any], name: str) -> int:
    value = wanted[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
    return value


def _max_chars(wanted: Mapping[str, Any]) -> str:
    if wanted.get("max_chars") is None:
        return "*"
    return f"{{0,{_count(wanted, 'max_chars')}}}"


def _times(kind: str, wanted: Mapping[str, Any]) -> str:
    if kind != "repeat":
        return {"optional": "?", "plus": "+", "star": "*"}[kind]
    least = _count(wanted, "min")
    if wanted["max"] == -1:
        return f"{{{least},}}"
    most = _count(wanted, "max")
    if most < max(least, 1):
        raise ValueError(f"max must be -1, or at least 1 and min={least}, got {most}")
    return f"{{{least},{most}}}"


def _rules(wanted: Mapping[str, Any]) -> list[tuple[str, Any]]:
    rules = _formats(wanted, "rules")
    for rule in rules:
        if not isinstance(rule, list) or len(rule) != 2 or not isinstance(rule[0], str):
            raise ValueError(f"each rule must be a text and a format, got {rule!r}")
    triggers = _texts({"rules": [trigger for trigger, _ in rules]}, "rules")
    return list(zip(triggers, (content for _, content in rules), strict=True))


def _by_trigger(
    wanted: Mapping[str, Any], tags: Sequence[Mapping[str, Any]]
) -> dict[str, list[Any]]:
    """Return, for each trigger, its tags without the trigger."""
    found: dict[str, list[Any]] = {}
    triggers = _texts(wanted, "triggers")
    for tag in tags:
        begin = _text(tag, "begin")
        matching = [trigger for trigger in triggers if begin.startswith(trigger)]
        if len(matching) != 1:
            raise ValueError(
                f"begin={begin!r} must start with exactly one of the triggers "
                f"{triggers}, it starts with {len(matching)}"
            )
        rest = {**tag, "begin": begin.removeprefix(matching[0])}
        found.setdefault(matching[0], []).append(rest)
    for trigger in triggers:
        if trigger not in found:
            raise ValueError(f"no tag begins with the trigger {trigger!r}")
    return found
