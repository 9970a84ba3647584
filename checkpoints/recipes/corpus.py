"""Prepares the training text: the SentencePiece model, packed token rows.

Knows nothing about networks. A document is one line of `*.jsonl.xz` with the keys
`domain`, `source` and `text`; conversations are already in Gemma's turn format.
"""

import io

import numpy as np
import sentencepiece

PAD_ID, EOS_ID, BOS_ID, UNK_ID = 0, 1, 2, 3
START_OF_TURN_ID, END_OF_TURN_ID = 106, 107

# Sampling weight of each domain. Conversational domains are small, but demos show them,
# so they are drawn more often than their share of the text.
DOMAIN_WEIGHTS = {
    "math": 0.26,
    "shell": 0.22,
    "stories": 0.20,
    "code": 0.19,
    "fiction": 0.13,
}


def train_tokenizer(documents: list[dict[str, str]], vocab_size: int) -> bytes:
    """Train a SentencePiece BPE model with Gemma's special ids; return its bytes.

    Gemma keeps white space: no dummy prefix, no collapsing, and runs of newlines and
    spaces are pieces of their own.
    """
    # Ids 4..107 in Gemma's order; SentencePiece numbers symbols as they are listed.
    control = ["<mask>", "<2mass>", "[@BOS@]"]
    control += [f"<unused{i}>" for i in range(99)]
    control += ["<start_of_turn>", "<end_of_turn>"]
    white_space = ["\n" * count for count in range(1, 5)]
    white_space += ["\u2581" * count for count in range(2, 17)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(
            document["text"]
            .replace("<start_of_turn>", "\n")
            .replace("<end_of_turn>", "\n")
            for document in documents
        ),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        pad_id=PAD_ID,
        eos_id=EOS_ID,
        bos_id=BOS_ID,
        unk_id=UNK_ID,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        unk_piece="<unk>",
        user_defined_symbols=control + white_space,
        byte_fallback=True,
        character_coverage=0.9995,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=True,
        max_sentence_length=1 << 20,
        num_threads=2,
        minloglevel=2,
    )
    return model.getvalue()


def tokenize(
    documents: list[dict[str, str]], processor: sentencepiece.SentencePieceProcessor
) -> dict[str, list[np.ndarray]]:
    """Return token ids by domain, each document as `<bos> ... <eos>`.

    The turn markers are user-defined symbols, so they encode to ids 106 and 107.
    """
    by_domain: dict[str, list[np.ndarray]] = {}
    for document in documents:
        ids = [BOS_ID, *processor.encode(document["text"].rstrip("\n")), EOS_ID]
        by_domain.setdefault(document["domain"], []).append(np.array(ids, np.int32))
    return by_domain


class PackedRows:
    """Yields rows of `length + 1` tokens with segment ids, drawn by domain weight.

    Short documents are packed into one row (segment ids separate their attention); long
    ones are cut at the row's end and continued in a later row of the domain.
    """

    def __init__(
        self, by_domain: dict[str, list[np.ndarray]], *, length: int, seed: int
    ):
        self.by_domain = by_domain
        self.length = length
        self.random = np.random.default_rng(seed)
        self.domains = sorted(by_domain)
        weights = np.array([DOMAIN_WEIGHTS[domain] for domain in self.domains])
        self.weights = weights / weights.sum()
        self.pending: dict[str, np.ndarray] = {}
        self.queue: dict[str, list[int]] = {domain: [] for domain in self.domains}

    def _next_document(self, domain: str) -> np.ndarray:
        if domain in self.pending:
            return self.pending.pop(domain)
        if not self.queue[domain]:
            order = self.random.permutation(len(self.by_domain[domain]))
            self.queue[domain] = order.tolist()
        return self.by_domain[domain][self.queue[domain].pop()]

    def _row(self) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.full(self.length + 1, PAD_ID, np.int32)
        segments = np.zeros(self.length + 1, np.int32)
        filled, segment = 0, 1
        # One domain per row, so that a domain's weight is its share of tokens.
        domain = self.domains[self.random.choice(len(self.domains), p=self.weights)]
        while filled <= self.length:
            document = self._next_document(domain)
            room = self.length + 1 - filled
            if len(document) > room:
                # Keep the last token, because it is the first input of the next row.
                self.pending[domain] = document[room - 1 :]
                document = document[:room]
            tokens[filled : filled + len(document)] = document
            segments[filled : filled + len(document)] = segment
            filled += len(document)
            segment += 1
        return tokens, segments

    def batch(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and segment ids, both `[rows, length + 1]`."""
        drawn = [self._row() for _ in range(rows)]
        return np.stack([row[0] for row in drawn]), np.stack([row[1] for row in drawn])
