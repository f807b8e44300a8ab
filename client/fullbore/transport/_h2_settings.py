"""SETTINGS: what the server allows us, and what we tell it (RFC 9113, 6.5).

Owns the parameters, their limits and their bytes. Knows nothing of streams.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

from h2.errors import ErrorCodes

from ._h2_frames import HEADER, SETTINGS, ConnectionFaultError

HEADER_TABLE_SIZE: Final = 0x1
ENABLE_PUSH: Final = 0x2
MAX_CONCURRENT_STREAMS: Final = 0x3
INITIAL_WINDOW_SIZE: Final = 0x4
MAX_FRAME_SIZE: Final = 0x5
MAX_HEADER_LIST_SIZE: Final = 0x6

LARGEST_WINDOW: Final = 2**31 - 1
LARGEST_FRAME: Final = 2**24 - 1

_PARAMETER = struct.Struct(">HI")


class PeerSettings:
    """What the server has said; until then the protocol's defaults.

    Attributes:
        header_table_size: Bytes of the table its HPACK decoder keeps for us.
        max_concurrent_streams: Most streams it lets us have open.
        initial_window_size: Bytes of body it takes on a new stream before it grants more.
        max_frame_size: Most bytes of payload in a frame to it.
    """

    __slots__ = (
        "header_table_size",
        "initial_window_size",
        "max_concurrent_streams",
        "max_frame_size",
    )

    def __init__(self) -> None:
        self.header_table_size = 4_096
        self.max_concurrent_streams = LARGEST_WINDOW
        self.initial_window_size = 65_535
        self.max_frame_size = 16_384

    def update(self, payload: bytes) -> None:
        """Take in the payload of a SETTINGS frame; parameters nobody knows are skipped.

        Raises:
            ConnectionFaultError: A value that the protocol forbids.
        """
        if len(payload) % _PARAMETER.size:
            raise ConnectionFaultError(
                ErrorCodes.FRAME_SIZE_ERROR, f"it sent SETTINGS of {len(payload)} bytes"
            )
        for parameter, value in _PARAMETER.iter_unpack(payload):
            if parameter == HEADER_TABLE_SIZE:
                self.header_table_size = value
            elif parameter == ENABLE_PUSH and value:
                self._refuse("ENABLE_PUSH", value)
            elif parameter == MAX_CONCURRENT_STREAMS:
                self.max_concurrent_streams = value
            elif parameter == INITIAL_WINDOW_SIZE:
                if value > LARGEST_WINDOW:
                    self._refuse("INITIAL_WINDOW_SIZE", value, ErrorCodes.FLOW_CONTROL_ERROR)
                self.initial_window_size = value
            elif parameter == MAX_FRAME_SIZE:
                if not 16_384 <= value <= LARGEST_FRAME:
                    self._refuse("MAX_FRAME_SIZE", value)
                self.max_frame_size = value

    @staticmethod
    def _refuse(name: str, value: int, code: ErrorCodes = ErrorCodes.PROTOCOL_ERROR) -> None:
        raise ConnectionFaultError(code, f"it set {name} to {value}, which is not allowed")


def settings_frame(parameters: Mapping[int, int]) -> bytes:
    """A SETTINGS frame with these parameters."""
    payload = b"".join(_PARAMETER.pack(*parameter) for parameter in parameters.items())
    return HEADER.pack(len(payload) << 8 | SETTINGS, 0, 0) + payload
