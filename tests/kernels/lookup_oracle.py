"""Looking up what followed, in plain Python over lists: what the kernel and the drafters on it are held to."""


def matched(text: list[int], end: int, own: list[int], longest: int) -> int:
    """How many tokens up to ``text[end]`` equal the last ones of ``own``."""
    m = 0
    while m < min(longest, len(own), end + 1) and text[end - m] == own[-1 - m]:
        m += 1
    return m


def followed(text: list[int], end: int, k: int, loops: bool) -> list[int]:
    """The k tokens behind ``text[end]``: going on with what was just copied, or ending with the text or at -1."""
    tokens: list[int] = []
    grown = list(text)
    for i in range(end + 1, end + 1 + k):
        if i >= len(grown) or grown[i] < 0:
            break
        tokens.append(grown[i])
        if loops:
            grown.append(grown[i])
    return tokens


def drafts_of(
    own: list[int],
    ring: list[int],
    k: int,
    longest: int,
    shortest: int = 1,
    voters: int = 1,
    factor: float = 1e6,
    share: float = 0.0,
) -> list[int]:
    """What ``lookup`` drafts for a request whose tokens are ``own``, -1 behind; ``ring`` from its oldest token on."""
    booths: dict[int, tuple[int, int, list[int]]] = {}
    for text, base, ends in ((ring, 0, len(ring)), (own, len(ring), len(own) - 1)):
        for end in range(ends):
            m, lane = matched(text, end, own, longest), end % voters
            if m >= shortest and (m, base + end) > booths.get(lane, (0, 0, []))[:2]:
                booths[lane] = (m, base + end, followed(text, end, k, loops=text is own))
    best: tuple[int, int, int] = (-1, 0, 0)
    drafts: list[int] = []
    for m, rank, proposal in booths.values():
        electorate = [p for n, _, p in booths.values() if n >= m]
        score, length = 0, 0
        for i in range(1, len(proposal) + 1):
            part = 65536 * sum(p[:i] == proposal[:i] for p in electorate) // len(electorate)
            if i > int(factor * m) or part < round(share * 65536):
                break
            score, length = score + part, i
        if (score, m, rank) > best:
            best, drafts = (score, m, rank), proposal[:length]
    return drafts + [-1] * (k - len(drafts))


def replay(prompt: list[int], output: list[int], k: int, **options) -> tuple[int, int]:
    """(rounds, accepted drafts) of a request that is known to answer ``output``, drafted with these options."""
    at, rounds, accepted = 1, 0, 0  # the prompt's own pass samples the first token
    options = {"ring": [], **options}
    while at < len(output):
        drafts = drafts_of(prompt + output[:at], k=k, **options)
        right = 0
        while right < k and at + right < len(output) and drafts[right] == output[at + right]:
            right += 1
        committed = min(right + 1, len(output) - at)
        at, rounds, accepted = at + committed, rounds + 1, accepted + committed - 1
    return rounds, accepted


def paths_of(own: list[int], sizes: list[int], k: int, longest: int, shortest: int) -> list[list[int]]:
    """The drafts of each path for a request with tokens ``own``, padded with -1 to k. sizes: tokens per path."""
    ends = [(matched(own, end, own, longest), end) for end in range(len(own) - 1)]
    ends = sorted((m, end) for m, end in ends if m >= shortest)[::-1]
    paths: list[list[int]] = []
    for size in sizes:
        tokens = (followed(own, end, size, loops=True) for _, end in ends)
        new = next((t for t in tokens if all(path[:size] != t for path in paths)), [])
        paths.append(new + [-1] * (k - len(new)))
    return paths
