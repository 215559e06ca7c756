"""Warnings that point to the user's line, however deep in JAX they arise."""

import contextlib
import functools
import os
import sys
import types
import warnings

import jax
import jaxlib

_FOLDERS = tuple(os.path.dirname(m) + os.sep for m in (__file__, jax.__file__, jaxlib.__file__))
# JAX's frames have these of the standard library between them.
_FILES = (contextlib.__file__, functools.__file__)


def warn_user(message: str) -> None:
    """Emits a UserWarning at the innermost frame outside JAX and this package.

    Under `jit` that is the line which compiles.  As Python has it, one line shows one
    message once.
    """
    frame = _user_frame()
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _user_frame() -> types.FrameType:
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith((*_FOLDERS, *_FILES)):
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame
