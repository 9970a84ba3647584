"""The input of one launch: static sizes, and a plan of the sequences in it.

A value that the device stores for a request is declared here, as a column of a record,
and nowhere else: the plan's layout, the rows of the state and the arrays that a launch
gathers iterate over the declaration. Plain numpy: the engine imports this without jax.
"""

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxspec.program.tree.tree import Tree

NO_TOKEN = -1  # pads lists of ids; never a legal token
# Prompts are split into tiles of one sequence each, right-aligned.
TILE = 32
# Filters and distributions take several times the memory of their logits: gigabytes for
# hundreds of sequences. Groups whose logits take this number of bytes are verified one
# after another; that is enough to keep a device busy.
MAX_GROUP_BYTES = 2**28
# End-of-text ids plus a request's own stop_token_ids.
MAX_STOP_IDS = 40

# Maximum number of admissions with controls in one launch, and the limits of each.
MAX_CONTROLLED = 4
MAX_BIAS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_LEN = 8
MAX_LOGPROB_TOKEN_IDS = 128  # as in vLLM
# As a column's size: words of 32 bits that hold one bit per token of the vocabulary.
VOCAB_WORDS = -1

# A row, an index in the row's page table, a page id.
PageUpdate = tuple[int, int, int]

STANDARD, BLOCK, COUPLED = 0, 1, 2
RULES = {"standard": STANDARD, "block": BLOCK, "coupled": COUPLED}


@dataclass(frozen=True, kw_only=True)
class Features:
    """Optional parts of a program, beyond temperature, top-k, top-p and min-p.

    Attributes:
        all_greedy: Every request takes the argmax: the program has no sampling in it.
        has_controls: Penalties, logit bias, allowed ids, bad words.
        has_grammar: Token masks that the host makes from the drafts.
        num_logprobs: Most probable tokens returned per generated token; None returns no
            logprobs, 0 the generated token's own alone.
        num_prompt_logprobs: The same for the tokens of prompts.
    """

    all_greedy: bool = False
    has_controls: bool = False
    has_grammar: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    def __or__(self, other: "Features") -> "Features":
        """Return the features of a launch whose requests need `self` or `other`."""
        return Features(
            all_greedy=self.all_greedy and other.all_greedy,
            has_controls=self.has_controls or other.has_controls,
            has_grammar=self.has_grammar or other.has_grammar,
            num_logprobs=_most(self.num_logprobs, other.num_logprobs),
            num_prompt_logprobs=_most(
                self.num_prompt_logprobs, other.num_prompt_logprobs
            ),
        )

    @property
    def needs_one_path(self) -> bool:
        """Whether the features require that the drafts are a chain."""
        return self.has_controls or self.has_grammar or self.num_logprobs is not None

    @property
    def name(self) -> str:
        """Name in logs."""
        extras = {
            "controls": self.has_controls,
            "grammar": self.has_grammar,
            "logprobs": self.num_logprobs is not None,
            "prompt-logprobs": self.num_prompt_logprobs is not None,
        }
        names = [name for name, has_one in extras.items() if has_one]
        return "_".join(["greedy" if self.all_greedy else "sampled", *names])

    @property
    def num_logprob_token_ids(self) -> int:
        """Number of logprobs per generated token for ids that a request chose."""
        has_ids = self.has_controls and self.num_logprobs is not None
        return MAX_LOGPROB_TOKEN_IDS if has_ids else 0

    def covers(self, other: "Features") -> bool:
        """Return whether a program of these features serves what `other` needs."""
        return self | other == self


# Features of a launch without requests: the neutral element of `|`.
NO_FEATURES = Features(all_greedy=True)


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The static sizes of one executable.

    Attributes:
        num_seqs: Rows of the decode region.
        num_levels: Levels of drafts. K is at most this, for each sequence. 0 leaves
            the draft model out of the program.
        max_prompt_tokens: Room for prompt tokens, a multiple of `TILE`; 0 for none.
        features: Optional parts that the requests of the launch need.
        is_draft_prefill: No sequence decodes. The draft model reads prompts and tokens
            that only the target has read, and compares the tokens with its own.
        max_rounds: Maximum number of rounds of a launch; the actual number is data.
            With 1 there is no loop.
        template: The engine's tree of drafts, of `num_levels`; None: a chain.
    """

    num_seqs: int
    num_levels: int
    max_prompt_tokens: int
    features: Features = Features()
    is_draft_prefill: bool = False
    max_rounds: int = 1
    template: Tree | None = None

    # A key of several dictionaries that every round reads.
    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, one.name) for one in dataclasses.fields(self)))

    @classmethod
    def draft_prefill(cls, max_prompt_tokens: int) -> "StepShape":
        """Return the program of a draft prefill."""
        return cls(
            num_seqs=0,
            num_levels=0,
            max_prompt_tokens=max_prompt_tokens,
            is_draft_prefill=True,
        )

    @property
    def name(self) -> str:
        """Name in logs: `8x5+512_sampled`, sequences x drafts + prompt tokens.

        `8x5x4_sampled` may run four such rounds; in `8x5t10` ten drafts form a tree of
        five levels.
        """
        if self.is_draft_prefill:
            return f"draft-prefill+{self.max_prompt_tokens}"
        chunk = f"+{self.max_prompt_tokens}" if self.max_prompt_tokens else ""
        rounds = f"x{self.max_rounds}" if self.max_rounds > 1 else ""
        tree = self.tree
        nodes = "" if tree.is_chain else f"t{tree.num_nodes}"
        size = f"{self.num_seqs}x{self.num_levels}{nodes}{rounds}{chunk}"
        return f"{size}_{self.features.name}"

    @functools.cached_property
    def tree(self) -> Tree:
        """The drafts of a sequence.

        A chain for requests with controls, grammars or logprobs, which depend on the
        tokens before and are computed for one path only.
        """
        levels = self.num_levels
        if self.template is None or not levels or self.features.needs_one_path:
            return Tree.chain(levels)
        assert self.template.num_levels == levels, (self.template, levels)
        return self.template

    @property
    def num_slots(self) -> int:
        """Maximum number of slots that a sequence reserves, the newest token's too."""
        return (self.template or self.tree).num_rows

    @property
    def num_tiles(self) -> int:
        """Tiles of the prefill region."""
        return self.max_prompt_tokens // TILE

    @property
    def max_controlled(self) -> int:
        """Maximum number of admissions with controls; each has at least one tile."""
        return min(MAX_CONTROLLED, self.num_tiles) if self.features.has_controls else 0


@dataclass(frozen=True, kw_only=True)
class PoolShape:
    """The static sizes of the engine's state.

    Attributes:
        num_rows: Requests admitted at once; row `num_rows` is the pad.
        num_pages: Pages of the pool; page `num_pages` is the pad.
        unit_pages: None: all layers use one page table. Otherwise layers with a sliding
            window use a local page table: a local page takes this number of consecutive
            page ids, and the table holds the first of them, a multiple of it.
        page_size: Tokens per page.
        max_model_len: Tokens per sequence.
        vocab_size: Of the target and its draft.
        kv_cache_dtype: Type of keys and values in pages: a name of
            `jaxspec.config.KV_CACHE_DTYPES`.
    """

    num_rows: int
    num_pages: int
    page_size: int
    max_model_len: int
    vocab_size: int
    kv_cache_dtype: str = "auto"
    unit_pages: int | None = None

    @property
    def table_len(self) -> int:
        """Pages that the longest sequence needs."""
        return -(-self.max_model_len // self.page_size)

    @property
    def num_units(self) -> int:
        """Units of the pool: groups of `unit_pages` pages."""
        return self.num_pages // (self.unit_pages or 1)


@dataclass(frozen=True)
class Column:
    """One array of a vector or of the state.

    Attributes:
        shape: Shape of one entry or, in a vector's layout, of the whole array.
        pad: Value of unset entries.
        is_right_aligned: Whether shorter entries are aligned to the end.
    """

    dtype: Any = np.int32
    shape: tuple[int, ...] = ()
    pad: int | float = 0
    is_right_aligned: bool = False

    def of(self, count: int, vocab_size: int) -> "Column":
        """`count` entries side by side."""
        words = -(-vocab_size // 32)
        shape = tuple(words if size == VOCAB_WORDS else size for size in self.shape)
        return dataclasses.replace(self, shape=(count, *shape))

    def empty(self) -> np.ndarray:
        """Return an array filled with the pad value."""
        return np.full(self.shape, self.pad, self.dtype)


def column(
    dtype: Any,
    *shape: int,
    pad: int | float = 0,
    is_right_aligned: bool = False,
    default: Any = dataclasses.MISSING,
) -> Any:
    """Declare a field of a record that is sent to the device."""
    declared = Column(dtype, shape, pad, is_right_aligned)
    return field(default=default, metadata={"column": declared})


def columns(record: Any) -> dict[str, Column]:
    """Return the columns of a record's class, by name, in order."""
    return {
        entry.name: entry.metadata["column"]
        for entry in dataclasses.fields(record)
        if "column" in entry.metadata
    }


@dataclass(frozen=True, kw_only=True)
class RequestValues:
    """Values that the device stores for a request, declared here and only here.

    A plan's admission has one value in each field; the rows of the state and the
    sequences of a launch, which add fields of their own, have arrays with one entry per
    row or sequence.
    """

    num_prompt: Any = column(np.int32)  # tokens of the prompt; the others are output
    min_total: Any = column(np.int32)  # stop ids are masked below this number of tokens
    max_total: Any = column(np.int32)  # the sequence ends at this number of tokens
    temperature: Any = column(np.float32)  # 0 is greedy
    top_k: Any = column(np.int32)  # 0 keeps everything
    top_p: Any = column(np.float32, pad=1)
    min_p: Any = column(np.float32)
    seed: Any = column(np.uint32, 2)
    rule: Any = column(np.int32)  # an index of `RULES`
    salt: Any = column(np.uint32, 2, default=(0, 0))  # of the answer cache
    stop_ids: Any = column(np.int32, MAX_STOP_IDS, pad=NO_TOKEN)


@dataclass(frozen=True, kw_only=True)
class ControlValues:
    """Values of a request's `TokenControls` on the device."""

    penalties: Any = column(np.float32, 3)  # presence, frequency, repetition
    bias_ids: Any = column(np.int32, MAX_BIAS, pad=NO_TOKEN)
    bias_values: Any = column(np.float32, MAX_BIAS)
    allowed: Any = column(np.uint32, VOCAB_WORDS)  # a bit per token of the vocabulary
    # A match of the other columns forbids the last one.
    bad_words: Any = column(np.int32, MAX_BAD_WORDS, MAX_BAD_WORD_LEN, pad=NO_TOKEN)
    logprob_token_ids: Any = column(np.int32, MAX_LOGPROB_TOKEN_IDS, pad=NO_TOKEN)


@dataclass(frozen=True, kw_only=True)
class TokenControls:
    """Penalties, logit bias, allowed ids, bad words; the defaults change nothing.

    Attributes:
        presence_penalty: Subtracted from the logit of every token of the output so far.
        frequency_penalty: The same, once per occurrence.
        repetition_penalty: Divides the positive logits, and multiplies the negative
            ones, of every token of prompt and output so far.
        bias: (token, value added to its logit), at most `MAX_BIAS`.
        allowed: The tokens that may be generated; None for all.
        bad_words: At most `MAX_BAD_WORDS` sequences of at most `MAX_BAD_WORD_LEN`
            tokens that the output may not contain.
        logprob_token_ids: At most `MAX_LOGPROB_TOKEN_IDS` tokens whose logprobs are
            returned with those of every generated token.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprob_token_ids: tuple[int, ...] = ()

    def values(self, vocab_size: int) -> ControlValues:
        """Return the values that are sent to the device."""
        assert len(self.bias) <= MAX_BIAS, f"{len(self.bias)} biased tokens"
        assert len(self.bad_words) <= MAX_BAD_WORDS, "too many bad words"
        num_ids = len(self.logprob_token_ids)
        assert num_ids <= MAX_LOGPROB_TOKEN_IDS, f"{num_ids} logprob token ids"
        bad_words = columns(ControlValues)["bad_words"].empty()
        for index, word in enumerate(self.bad_words):
            assert 0 < len(word) <= MAX_BAD_WORD_LEN, f"a bad word of {len(word)}"
            bad_words[index, MAX_BAD_WORD_LEN - len(word) :] = word
        # Token t is bit t % 32 of word t // 32, from the lowest bit on.
        is_allowed = np.zeros(-(-vocab_size // 32) * 32, bool)
        is_allowed[slice(None) if self.allowed is None else list(self.allowed)] = True
        bits = np.packbits(is_allowed, bitorder="little").view("<u4")
        return ControlValues(
            penalties=(
                self.presence_penalty,
                self.frequency_penalty,
                self.repetition_penalty,
            ),
            bias_ids=[token for token, _ in self.bias],
            bias_values=[value for _, value in self.bias],
            allowed=bits.astype(np.uint32),
            bad_words=bad_words,
            logprob_token_ids=self.logprob_token_ids,
        )


@dataclass(frozen=True, kw_only=True)
class Admission(RequestValues):
    """A request that gets a row.

    Attributes:
        controls: None for none; at most `StepShape.max_controlled` in a launch.
    """

    row: int
    controls: TokenControls | None = None


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Up to `TILE` consecutive known tokens of one sequence.

    Attributes:
        start: Position of the first token.
        is_last: The prompt ends here: sample the next token.
        next_token: The known token after these, if there is one; used by prompt
            logprobs, heads and draft prefill.
    """

    row: int
    start: int = column(np.int32)
    tokens: np.ndarray = column(np.int32, TILE, is_right_aligned=True)
    is_last: bool = column(bool)
    next_token: int = column(np.int32, pad=NO_TOKEN, default=NO_TOKEN)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One launch: decoding sequences and their drafts, prompt tiles, new pages.

    Attributes:
        decode: (row, number of wanted draft levels) of every decoding sequence.
        pages: (row, index in the row's page table, page id).
        local_pages: The same for the table of layers with a sliding window.
        num_rounds: Maximum number of rounds of these sequences; fewer run if one of
            them ends.
        grammars: By row, the object whose `grammar_id` names the grammar's state.
    """

    decode: list[tuple[int, int]] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    pages: list[PageUpdate] = field(default_factory=list)
    local_pages: list[PageUpdate] = field(default_factory=list)
    num_rounds: int = 1
    grammars: dict[int, Any] = field(default_factory=dict)


def _most(left: int | None, right: int | None) -> int | None:
    return max((n for n in (left, right) if n is not None), default=None)
