"""Interface to NIXL: a peer reads an agent's registered memory through UCX. Nothing else imports ``nixl``.

An agent serves one connection, and the peer's access ends with it. One thread at a time uses it. It has no progress
thread, which would poll for ever; its owner calls :meth:`Agent.progress` while a peer may be reading.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np

from unisono.transport.channel import ChannelError

BACKEND = "UCX"
MEMORY = "DRAM"
"""Memory type: host memory. Its device number is 0."""


class NixlError(ChannelError):
    """NIXL is missing or failed."""


def why_not() -> str:
    """Return the reason why this process cannot use NIXL; empty if it can."""
    try:
        Agent(np.zeros(4096, np.uint8)).close()
    except NixlError as error:
        return str(error)
    return ""


class Agent:
    """Agent of one connection. memory: uint8 [bytes], contiguous; registered until :meth:`close`. Raises NixlError."""

    def __init__(self, memory: np.ndarray) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise NixlError(f"NIXL is not usable here ({error}): pip install 'unisono[nixl]'") from None
        self.memory = memory
        self._peer: str | None = None
        with nixl_errors():
            config = nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
            self._agent = nixl_agent(f"unisono-{os.urandom(16).hex()}", config)
            if BACKEND not in self._agent.backends:
                raise NixlError(f"NIXL has no backend {BACKEND} here")
            self._registered = self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], MEMORY)

    def metadata(self) -> bytes:
        """Metadata with which a peer can read the registered memory."""
        with nixl_errors():
            metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def connect(self, metadata: bytes) -> None:
        """Add the agent with this metadata as the peer, once. Raises NixlError."""
        with nixl_errors():
            name = self._agent.add_remote_agent(metadata)
            self._peer = name.decode() if isinstance(name, bytes) else name

    def read(self, address: int, size: int) -> Reading:
        """Begin to read the peer's ``size`` bytes at ``address`` into the beginning of this agent's memory.

        Raises NixlError, also for memory that the peer has not registered.
        """
        assert 0 < size <= self.memory.nbytes
        with nixl_errors():
            here = self._agent.get_xfer_descs([(self.memory.ctypes.data, size, 0)], MEMORY)
            there = self._agent.get_xfer_descs([(address, size, 0)], MEMORY)
            return Reading(self._agent, self._agent.initialize_xfer("READ", here, there, self._peer))

    def progress(self) -> None:
        """Advance a peer's reads on networks that need it (TCP). Raises NixlError."""
        with nixl_errors():
            self._agent.get_new_notifs()  # nobody sends any

    def close(self) -> None:
        """Forget the peer, then the memory, then the agent. Nothing is written to the memory afterwards."""
        if self._peer is not None:
            with contextlib.suppress(Exception):  # the peer may be gone
                self._agent.remove_remote_agent(self._peer)
        with contextlib.suppress(Exception):
            self._agent.deregister_memory(self._registered)
        del self._agent, self._registered


class Reading:
    """A read in progress."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent, self._handle, self._state = agent, handle, ""

    def done(self) -> bool:
        """True once the bytes are there. Raises NixlError if the read failed."""
        with nixl_errors():
            check = self._agent.check_xfer_state if self._state else self._agent.transfer
            self._state = check(self._handle)
        if self._state not in ("PROC", "DONE"):
            raise NixlError(f"NIXL's read ended as {self._state}")
        return self._state == "DONE"

    def release(self) -> None:
        """Give the read up, done or not. An unfinished one may still write until its agent is closed."""
        with contextlib.suppress(Exception):  # not every backend can cancel
            self._agent.release_xfer_handle(self._handle)


@contextlib.contextmanager
def nixl_errors() -> Any:
    """Raise the library's errors, a class for each code without a common base, as NixlError."""
    try:
        yield
    except NixlError:
        raise
    except Exception as error:
        raise NixlError(str(error) or type(error).__name__) from None
