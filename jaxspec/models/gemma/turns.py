"""Conversations in the turn format that Gemma was trained on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.errors import RequestError, one_of, wrong_argument
from jaxspec_checkpoints.gemma.published import TURN_MARKERS

START_OF_TURN, END_OF_TURN = TURN_MARKERS
SYSTEM = "system"

# Names of roles in a request, and in Gemma's turns.
_ROLES = {"user": "user", "assistant": "model", "model": "model"}


@dataclass(frozen=True)
class GemmaTurns:
    """Turns between markers, the user's first; there are no system turns.

    Attributes:
        folds_system: Put a leading system message before the user's first text, as
            Gemma 3's template does. Gemma 2's rejects it.
    """

    folds_system: bool = False
    markers: tuple[str, str] = TURN_MARKERS

    @property
    def roles(self) -> tuple[str, ...]:
        """See `jaxspec.models.families.Turns`."""
        return ((SYSTEM,) if self.folds_system else ()) + tuple(_ROLES)

    def write(
        self,
        messages: list[dict[str, Any]],
        *,
        marks: Any,
        pieces: Mapping[str, str],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """See `jaxspec.models.families.Turns`."""
        text, prefix = pieces["bos_token"], ""
        num_folded = int(self.folds_system and messages[0]["role"] == SYSTEM)
        if num_folded:
            # The system text is not trimmed, unlike the texts of turns.
            prefix = messages[0]["content"] + "\n\n"
            if len(messages) == 1:
                allowed = "followed by a user's message"
                raise wrong_argument(RequestError, "messages[0]", allowed, SYSTEM)
        turns = messages[num_folded:]
        for number, message in enumerate(turns):
            role = self._turn(number, number + num_folded, message["role"])
            content = prefix + message["content"].strip()
            prefix = ""
            text += f"{START_OF_TURN}{role}\n{marks.on(content) if marks else content}"
            if not (continue_final_message and number == len(turns) - 1):
                text += f"{END_OF_TURN}\n"
        return text + (f"{START_OF_TURN}model\n" if add_generation_prompt else "")

    def _turn(self, number: int, position: int, role: str) -> str:
        """Return Gemma's name of a role; reject a role that is out of turn."""
        name, turn = f"messages[{position}]['role']", ("user", "model")[number % 2]
        # Two of the errors below begin with the words of Gemma's own templates.
        if role == SYSTEM and not self.folds_system:
            raise RequestError(
                f"System role not supported: {name} must be {one_of(_ROLES)}, got "
                "'system'. Gemma 2 was trained without one: say it in the first user "
                "message.",
                parameter=name,
                value=role,
            )
        if role not in (*_ROLES, SYSTEM):
            raise wrong_argument(RequestError, name, one_of(self.roles), role)
        if _ROLES.get(role) != turn:
            allowed = "'user'" if turn == "user" else "'assistant'"
            raise RequestError(
                "Conversation roles must alternate user/assistant/user/assistant/...: "
                f"{name} must be {allowed}, got {role!r}.",
                parameter=name,
                value=role,
            )
        return turn
