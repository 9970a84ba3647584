"""Operation with which a CPU program calls Python for token masks.

A program with it can be cached on disk, unlike one with `jax.pure_callback`.
"""

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_log = logging.getLogger(__name__)

TARGET = "jaxspec_token_masks"
# (number of words, grammar ids, known tokens, newest, drafts, drafts before each row)
Answer = Callable[[int, Any, Any, Any, Any, Any], np.ndarray]

_answers: list[Answer] = []


def answer_with(answer: Answer) -> None:
    """Set the function that computes the masks of all programs of this process."""
    _answers[:] = [answer]


def ask(form: jax.ShapeDtypeStruct, *arguments: Any) -> jax.Array:
    """Compute masks, uint32[seq, row, word], inside a program.

    Args:
        arguments: Arguments of the mask function except the first; int32.
    """
    return jax.ffi.ffi_call(TARGET, form)(*arguments)


def install(library: ctypes.CDLL) -> None:
    """Make a library's operation call `_compute`."""
    library.jaxspec_set_mask_function(_compute)


_numbers, _words = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_uint32)


@ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.POINTER(ctypes.c_int64), *[_numbers] * 5, _words
)
def _compute(
    sizes: Any,
    grammar_id: Any,
    num_tokens: Any,
    newest: Any,
    drafts: Any,
    before: Any,
    masks: Any,
) -> int:
    try:
        rows, window, num_levels, width, words = sizes[:5]
        array = np.ctypeslib.as_array
        array(masks, (rows, width, words))[:] = _answers[0](
            words,
            array(grammar_id, (rows,)),
            array(num_tokens, (rows,)),
            array(newest, (rows, window)),
            array(drafts, (rows, num_levels)),
            array(before, (width,)),
        )
    except BaseException:  # noqa: BLE001 - nothing can be raised into C++
        _log.exception("Token masks could not be computed")
        return 1
    return 0
