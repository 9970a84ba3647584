"""Who drew each token of a text, told with the part of the text that came with it."""

from collections.abc import Sequence

from jaxspec.outputs import TokenOrigin


class OriginStream:
    """The origins of one request's tokens, of a request that wants to know them."""

    def __init__(self):
        self._origins: list[str] = []

    def push(self, num_tokens: int, num_draft_tokens: int, num_accepted: int) -> None:
        """Take the tokens of one step: the drafts that it kept, then the target's own.

        Where an accepted draft ended the text there is none of the target's.
        """
        own = "target"
        if num_draft_tokens:
            own = "bonus" if num_accepted == num_draft_tokens else "recovered"
        self._origins += ["draft"] * num_accepted
        self._origins += [own] * (num_tokens - num_accepted)

    def keep(self, count: int) -> None:
        """Forget all but the first `count` tokens."""
        del self._origins[count:]

    def tell(
        self,
        token_ids: Sequence[int],
        ends: Sequence[int],
        *,
        first: int,
        start: int,
        text: str,
    ) -> list[TokenOrigin]:
        """Cut a part of the text into what each of its tokens brought.

        Text that was held back, since it might have begun a stop string, is released
        after its own tokens were told: it goes to the first token of this part.

        Args:
            token_ids: All tokens so far, from the first.
            ends: How much text there was after each; a last token that ends the text
                without being part of it has no entry.
            first: The token that the part begins with.
            start: The character that it begins with.
            text: The part.
        """
        assert len(self._origins) == len(token_ids)
        pieces, done = [], 0
        for index in range(first, len(token_ids)):
            end = ends[index] - start if index < len(ends) else len(text)
            piece = text[done : max(end, done)]
            done += len(piece)
            pieces.append(TokenOrigin(piece, self._origins[index], token_ids[index]))
        return pieces
