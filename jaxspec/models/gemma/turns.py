"""The turns of a conversation, as Gemma 2 was trained on them."""

from collections.abc import Mapping
from typing import Any

from jaxspec.errors import RequestError, one_of, wrong_argument
from jaxspec_checkpoints.gemma.published import TURN_MARKERS

START_OF_TURN, END_OF_TURN = TURN_MARKERS

# Their names in a request, and in Gemma's turns.
_ROLES = {"user": "user", "assistant": "model", "model": "model"}


class Gemma2Turns:
    """Turns between markers, begun by the user; there is no system's."""

    markers: tuple[str, str] = TURN_MARKERS
    roles: tuple[str, ...] = tuple(_ROLES)

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
        text = pieces["bos_token"]
        for position, message in enumerate(messages):
            role, content = _turn(position, message["role"]), message["content"].strip()
            text += f"{START_OF_TURN}{role}\n{marks.on(content) if marks else content}"
            if not (continue_final_message and position == len(messages) - 1):
                text += f"{END_OF_TURN}\n"
        return text + (f"{START_OF_TURN}model\n" if add_generation_prompt else "")


def _turn(position: int, role: str) -> str:
    """Return Gemma's name of a role, if it is this one's turn."""
    name, turn = f"messages[{position}]['role']", ("user", "model")[position % 2]
    # The first words of two of the errors are those of Gemma's own template.
    if role == "system":
        raise RequestError(
            f"System role not supported: {name} must be {one_of(_ROLES)}, got "
            "'system'. Gemma 2 was trained without one: say it in the first user "
            "message.",
            parameter=name,
            value=role,
        )
    if role not in _ROLES:
        raise wrong_argument(RequestError, name, one_of(_ROLES), role)
    if _ROLES[role] != turn:
        allowed = "'user'" if turn == "user" else "'assistant'"
        raise RequestError(
            "Conversation roles must alternate user/assistant/user/assistant/...: "
            f"{name} must be {allowed}, got {role!r}.",
            parameter=name,
            value=role,
        )
    return turn
