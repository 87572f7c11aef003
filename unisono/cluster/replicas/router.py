"""Router: sends a request to the replica with the least work, including the request's own cost there.

Costs are counted in prompt tokens. A request costs its prompt's uncached tokens, the tokens that it is expected to
generate, and a constant for its row in every round. A replica's *work* is the remaining cost of its open requests. A
cached prefix therefore attracts requests until the queue that it saves is shorter than the queue that it causes.
Requests that must run together, or on one replica for a session, take precedence. Runs in the API process's event loop;
``replicas.client`` alone calls it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from unisono.cluster.engines import ANYWHERE, Placement
from unisono.cluster.replicas.prefixes import DEFAULT_PAGE_SIZE, PrefixIndex, page_hashes
from unisono.types import BadRequest, EngineDead, EngineRequest, EngineUnavailable

ROW_COST = 16
"""Cost of an open request beyond its tokens, in prompt tokens: a page."""
TOKEN_COST = 2
"""Cost of a token to be generated, in prompt tokens: the increase of a round by one row, not a round of its own.

Qwen3-8B in bf16 on an H200: 63 more rows add 3.07 ms to a round, 0.049 ms each; 8,192 prompt tokens take 223 ms, 0.027
ms each.
"""
FIRST_GUESS = 128.0
"""Expected tokens of an answer before any has ended."""
LEARNING = 0.05
"""Weight of the last answer's length in the expected length."""
SESSIONS = 1 << 16
"""Remembered sessions and groups; beyond it the least recently used are forgotten."""
MAX_NAME = 256
"""Significant characters of a session's name."""


@dataclass
class ReplicaLoad:
    """Load of one replica. serves: it takes requests. prompt, tokens, requests: remaining cost of its open requests."""

    serves: bool = True
    prompt: int = 0
    tokens: int = 0
    requests: int = 0
    pages: PrefixIndex = field(default_factory=lambda: PrefixIndex(1 << 16))

    @property
    def work(self) -> int:
        """Work in prompt tokens."""
        return self.prompt + TOKEN_COST * self.tokens + ROW_COST * self.requests


@dataclass
class OpenRequest:
    """An open request on a replica, with its remaining cost there."""

    request: EngineRequest
    placement: Placement
    prompt: int
    tokens: int


class Sticky:
    """Map from names (sessions, groups) to their replicas."""

    def __init__(self, limit: int = SESSIONS) -> None:
        self._limit = limit
        self._places: OrderedDict[str, int] = OrderedDict()

    def get(self, name: str) -> int | None:
        return self._places.get(name[:MAX_NAME])

    def set(self, name: str, replica: int) -> None:
        """Assign the name to ``replica``."""
        if not name:
            return
        self._places[name[:MAX_NAME]] = replica
        self._places.move_to_end(name[:MAX_NAME])
        if len(self._places) > self._limit:
            self._places.popitem(last=False)


class Router:
    """Place requests on ``count`` replicas and count their costs.

    ``routed``: requests by replica and reason. ``matched``: prompt tokens that were expected to be cached, by replica.
    """

    def __init__(self, count: int, page_size: int = DEFAULT_PAGE_SIZE) -> None:
        self.loads = [ReplicaLoad() for _ in range(count)]
        self.page_size = page_size
        self.routed: Counter[tuple[int, str]] = Counter()
        self.matched: Counter[int] = Counter()
        self._entries: dict[tuple[int, str], OpenRequest] = {}
        self._sessions, self._groups = Sticky(), Sticky()
        self._length = FIRST_GUESS
        self._turn = 0

    def sized(self, replica: int, pages: int, page_size: int) -> None:
        """Record a started replica: it has this number of pages, all empty, and takes requests."""
        self.page_size = page_size
        self.loads[replica].pages = PrefixIndex(pages)
        self.loads[replica].serves = True

    def lost(self, replica: int) -> None:
        """Record a replica's death: it takes no request, and its cache is gone."""
        self.loads[replica].serves = False
        self.loads[replica].pages.clear()

    def forget(self, replica: int) -> None:
        """Record a reset of a replica's prefix cache."""
        self.loads[replica].pages.clear()

    def choose(self, request: EngineRequest, placement: Placement, waiting: Collection[int] = ()) -> int:
        """Choose a replica for ``request``, which counts there until :meth:`close`.

        waiting: replicas that are being restarted; candidates if none serves. Raises BadRequest for an unknown rank,
        EngineUnavailable for a rank that does not serve, EngineDead if no replica is left.
        """
        group = placement.group or request.shares_with or request.request_id
        hashes = page_hashes(request, request.prompt_token_ids, self.page_size)
        serving = [i for i, load in enumerate(self.loads) if load.serves] or sorted(waiting)
        replica, reason = self._place(request, placement, group, serving, hashes)
        self._groups.set(group, replica)
        self._sessions.set(placement.session, replica)
        self.routed[replica, reason] += 1
        self._open(replica, request, placement, hashes)
        return replica

    def placement(self, replica: int, request_id: str) -> Placement:
        """Return the placement hints of an open request on ``replica``."""
        entry = self._entries.get((replica, request_id))
        return ANYWHERE if entry is None else entry.placement

    def _place(
        self, request: EngineRequest, placement: Placement, group: str, serving: Sequence[int], hashes: Sequence[int]
    ) -> tuple[int, str]:
        if placement.rank is not None:
            if not 0 <= placement.rank < len(self.loads):
                raise BadRequest(
                    f"X-data-parallel-rank={placement.rank} is not valid: this server has the engines 0 to "
                    f"{len(self.loads) - 1}.",
                    "X-data-parallel-rank",
                )
            if placement.rank not in serving:
                raise EngineUnavailable(
                    f"Engine {placement.rank}, requested by X-data-parallel-rank, does not serve now."
                )
            return placement.rank, "rank"
        if not serving:
            raise EngineDead("no engine serves")
        for places, name, reason in ((self._groups, group, "group"), (self._sessions, placement.session, "session")):
            if (place := places.get(name)) in serving:
                assert place is not None
                return place, reason
        return self._cheapest(request, serving, hashes)

    def _cheapest(self, request: EngineRequest, serving: Sequence[int], hashes: Sequence[int]) -> tuple[int, str]:
        """Return the replica with the least work, including this request's; equal ones take turns."""
        self._turn += 1
        length, count = len(request.prompt_token_ids), len(self.loads)
        matches = {i: self.loads[i].pages.match(hashes) for i in serving}

        def cost(i: int) -> tuple[int, int]:
            return self.loads[i].work + length - matches[i] * self.page_size, (i + self._turn) % count

        best = min(serving, key=cost)
        return best, "prefix" if matches[best] and matches[best] > min(matches.values()) else "least_work"

    def _open(self, replica: int, request: EngineRequest, placement: Placement, hashes: Sequence[int]) -> None:
        load = self.loads[replica]
        cached = load.pages.match(hashes) * self.page_size
        load.pages.add(hashes)
        self.matched[replica] += cached
        prompt = len(request.prompt_token_ids) - cached
        if request.shares_with is not None and (replica, request.shares_with) in self._entries:
            prompt = 0  # it begins with the other one's pages
        limit = request.params.max_tokens
        tokens = round(self._length) if limit is None else min(limit, round(self._length))
        self._entries[replica, request.request_id] = OpenRequest(request, placement, prompt, tokens)
        load.prompt += prompt
        load.tokens += tokens
        load.requests += 1

    def progress(self, replica: int, request_id: str, tokens: int) -> None:
        """Count new tokens of a request; with the first ones its prompt is done."""
        if (entry := self._entries.get((replica, request_id))) is None:
            return
        load = self.loads[replica]
        load.prompt -= entry.prompt
        entry.prompt = 0
        done = min(tokens, entry.tokens)
        load.tokens -= done
        entry.tokens -= done

    def close(self, replica: int, request_id: str, tokens: Sequence[int], ended: bool) -> None:
        """Remove a request from this replica. tokens: of its answer. ended: it was not aborted."""
        if (entry := self._entries.pop((replica, request_id), None)) is None:
            return
        load = self.loads[replica]
        load.prompt -= entry.prompt
        load.tokens -= entry.tokens
        load.requests -= 1
        if not ended:
            return
        limit = entry.request.params.max_tokens
        if limit is None or limit >= self._length:  # an answer that a limit cut short does not count
            self._length += LEARNING * (len(tokens) - self._length)
        if load.serves and len(tokens) >= self.page_size:  # the next turn of a conversation begins with the answer
            whole = [*entry.request.prompt_token_ids, *tokens]
            load.pages.add(page_hashes(entry.request, whole, self.page_size))
