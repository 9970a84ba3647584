"""Structural tags match the texts that xgrammar 0.2.8 matches, and no others."""

import json
from typing import Any

import pytest

from jaxspec.config.structured_outputs import StructuredOutputsParams
from jaxspec.engine.grammar_matcher import GrammarFailure
from jaxspec.engine.structured_output import GrammarCompiler
from jaxspec.errors import RequestError
from tests.support.engines import StubTokenizer

# Tokens 4 to 93 are the printable characters from "%" on, one each.
SIZE, END = 94, 1
TOKENIZER = StubTokenizer(SIZE)
COMPILER = GrammarCompiler(TOKENIZER, SIZE, (END,))
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def constant(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def made(kind: str, *elements: Any, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **({"elements": [*elements]} if elements else {}), **fields}


TAGS = [tag("<f=a>", NUMBER, "</f>"), tag("<f=b>", ANY, "</g>")]
CALLS = made("triggered_tags", triggers=["<f="], tags=TAGS)
LIST = made(
    "tags_with_separator",
    tags=[tag("a", NUMBER, "b"), tag("c", ANY, "d")],
    separator=",",
)
RULES = made("grammar", grammar='root ::= "a" x\nx ::= "b" | "c" x')
DISPATCH = made("dispatch", rules=[["ab", NUMBER], ["cc", constant("d")]])


def matches(wanted: Any, text: str) -> bool:
    """Return whether a text, generated token by token, may end where it ends."""
    matcher = COMPILER.matcher(StructuredOutputsParams(structural_tag=wanted))
    try:
        for token in TOKENIZER.encode(text):
            mask = matcher.mask()
            if not mask[token // 32] >> (token % 32) & 1 or not matcher.read(token):
                return False
        return bool(matcher.mask()[0] >> END & 1)
    except GrammarFailure:
        return False


MATCHES: list[tuple[Any, ...]] = [
    (
        CALLS,
        "|x|x<f=a>1</f>|x<f=a>1</f>y<f=b>z</g>|<f=a>1</f><f=a>1</f>|<f=b>a</g>b</g>",
        "<f=c>|x<f=|<f=a>x</f>|<f=a>1</g>|<f=b>z</f>",
    ),
    (
        CALLS | {"at_least_one": True},
        "<f=a>1</f>|<f=a>1</f>y|<f=a>1</f>y<f=b>z</g>",
        "|x|x<f=a>1</f>",
    ),
    (
        CALLS | {"stop_after_first": True},
        "|x|x<f=a>1</f>",
        "<f=a>1</f>y|<f=a>1</f><f=a>1</f>",
    ),
    (
        CALLS | {"stop_after_first": True, "at_least_one": True},
        "<f=a>1</f>|<f=b></g>",
        "|x|x<f=a>1</f>|<f=a>1</f>y",
    ),
    (tag("[", CALLS, "]"), "[]|[x]|[x<f=a>1</f>y]|[<f=b>]</g>]", "[|[]x|x[]|[x]]"),
    (
        made(
            "triggered_tags",
            triggers=["<a", "b"],
            tags=[tag("<ac", NUMBER, "d"), tag("b", constant("1"), "")],
            excludes=["dd"],
        ),
        "x<ac12dxb1|d",
        "b2|<ab|dd|b1dd",
    ),
    (LIST, "|a1b|a1b,cxd|c,d,c,d", "a1b,|a1bc"),
    (LIST | {"at_least_one": True}, "a1b|a1b,cxd", "|a1b,"),
    (LIST | {"stop_after_first": True}, "|a1b|cxd", "a1b,cxd"),
    (ANY | {"excludes": ["ab", "c"]}, "|ba|aa", "ab|bab|c"),
    (ANY | {"max_chars": 2}, "|a|ab", "abc"),
    (tag("a", ANY, "aab"), "aaab|axaab|aaaaaab", "aab|aaabx|aaabaab"),
    (tag("a", NUMBER, ["b", "c"]), "a1b|a1c", "a1|a1bc"),
    (tag("a", ANY, ""), "a|abc", "b"),
    (made("sequence", ANY, constant("b"), NUMBER), "b1|acb12", "abb1|a1"),
    (made("sequence", tag("a", ANY, "b"), ANY), "ab|axbb", "b|ax"),
    (made("sequence", made("regex", pattern="a*/"), NUMBER), "/1|aa/1", "aa1|a/"),
    (made("or", constant("ab"), NUMBER, made("regex", pattern="c+")), "ab|1|cc", "a|"),
    (made("optional", content=NUMBER), "|1", "a"),
    (tag("a", made("optional", content=ANY), "b"), "ab|axb", "a|axbb"),
    (made("plus", content=tag("a", NUMBER, "b")), "a1b|a1ba2b", "|a1"),
    (made("star", content=tag("a", ANY, "b")), "|ab|axbab", "a|abx"),
    (made("repeat", content=constant("ab"), min=1, max=2), "ab|abab", "|ababab"),
    (made("repeat", content=NUMBER, min=1, max=-1), "1|12", ""),
    (tag("(", RULES, ")"), "(ab)|(accb)", "(a)|ab"),
    (DISPATCH, "|x|xab1y|ccd|ccdab2", "abx|ccc"),
    (DISPATCH | {"loop": False, "excludes": ["z"]}, "|x|xab1|ccd", "xab1y|z"),
]


@pytest.mark.parametrize(("wanted", "texts", "others"), MATCHES)
def test_matches_what_xgrammar_matches(wanted: Any, texts: str, others: str):
    for text in texts.split("|"):
        assert matches({"type": "structural_tag", "format": wanted}, text), text
    for text in others.split("|"):
        assert not matches({"format": wanted}, text), text


def test_older_notation_is_read_from_a_dict_and_from_text():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    closed = schema | {"additionalProperties": False}
    for one in (NUMBER["json_schema"], json.dumps(NUMBER["json_schema"])):
        older = {
            "type": "structural_tag",
            "structures": [{"begin": "<f=a>", "schema": one, "end": "</f>"}],
            "triggers": ["<f="],
        }
        for wanted in (older, json.dumps(older)):
            assert matches(wanted, "x<f=a>12</f>y")
            assert not matches(wanted, "x<f=a>y</f>")
    older["structures"][0]["schema"] = closed
    assert matches(older, "<f=a>{}</f>")


def test_tags_of_a_list_may_have_no_type():
    tags = [{"begin": "<f=a>", "content": NUMBER, "end": "</f>"}]
    assert matches({"format": CALLS | {"tags": tags}}, "x<f=a>1</f>")
    with pytest.raises(RequestError, match="formats of type tag, got any_text"):
        matches({"format": CALLS | {"tags": [ANY]}}, "")


def test_schemas_have_the_options_of_the_request():
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
    wanted = tag("<", {"type": "json_schema", "json_schema": schema}, ">")
    params = StructuredOutputsParams(
        structural_tag={"format": wanted}, whitespace_pattern="_"
    )
    matcher = COMPILER.matcher(params)
    assert all(map(matcher.read, TOKENIZER.encode("<[_1,_2]>")))


REFUSED: list[tuple[Any, ...]] = [
    ("[]", "must be an object, got"),
    ("{", "Expecting property name"),
    ({}, r'either "format", or "structures" and "triggers", got \[\]'),
    ({"type": "x", "format": ANY}, '"type" must be "structural_tag"'),
    ({"structures": [{"begin": "a"}], "triggers": ["a"]}, "must have begin, schema"),
    ({"format": {"type": "text"}}, "'text' is not a format: use one of const_st"),
    ({"format": {"type": "token", "token": 5}}, "token is not supported: name texts"),
    ({"format": {"type": "tag"}}, "the format tag has no begin"),
    ({"format": ANY | {"exclude": []}}, "any_text has no field 'exclude'"),
    ({"format": ANY | {"max_tokens": 3}}, "max_tokens of the format any_text is not"),
    ({"format": NUMBER | {"style": "qwen_xml"}}, "style of the format json_schema"),
    ({"format": made("star", content=ANY)}, "any_text does not say where it ends"),
    ({"format": made("sequence", ANY, NUMBER)}, "any_text does not say where it end"),
    ({"format": CALLS | {"triggers": ["<g"]}}, "exactly one of the triggers"),
    ({"format": CALLS | {"triggers": ["<f=", "<g"]}}, "no tag begins with the trig"),
    ({"format": tag("a", ANY, ["", "b"])}, "an empty end does not end any_text"),
    ({"format": made("repeat", content=NUMBER, min=3, max=2)}, "max must be -1, or"),
    ({"format": NUMBER | {"json_schema": False}}, "must be a JSON schema, got False"),
]


@pytest.mark.parametrize(("wanted", "message"), REFUSED)
def test_refuses_other_tags(wanted: Any, message: str):
    with pytest.raises(RequestError, match=message) as refused:
        COMPILER.matcher(StructuredOutputsParams(structural_tag=wanted))
    assert str(refused.value).startswith("structured_outputs.structural_tag cannot be")
