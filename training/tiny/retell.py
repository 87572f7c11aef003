"""Rewords training questions, so that the model does not memorise their wordings.

``retell`` changes words and the order of sentences, and adds or drops words. It never changes numbers or the answer.
Only training text is reworded; test problems stay as they are.
"""

from __future__ import annotations

import re
from functools import partial
from random import Random

from training.tiny.stories import LISTS

OTHERWISE = 0.35
"""Probability that a phrase with known synonyms is replaced by one."""

WORDS = {
    r"\bbuys\b": "gets|purchases|picks up|brings home|takes",
    r"\bgives\b(?! (away|half|a |him|her))": "hands|passes|offers",
    r"\bgives away\b": "hands out|gets rid of|loses",
    r"\bin total\b": "altogether|in all|overall|all together",
    r"\baltogether\b": "in total|in all|overall|in sum",
    r"\btogether\b(?! that)": "in total|combined|as a pair|in all",
    r"\bare left\b": "remain|are still there|are there at the end|stay",
    r"\bremain\b": "are left|are still there|stay",
    r"\bdoes (\w+) have left\b": r"does \1 still have|is \1 left with|does \1 keep|remain with \1",
    r"\bdoes (\w+) have now\b": r"does \1 have|does \1 own now|does \1 end up with|has \1 at the end",
    r"\bHow much money\b": "How many dollars|What amount of money|How much",
    r"\bHow much (does|do)\b": r"How many dollars \1|How much money \1|What \1",
    r"\bWhat is the total (number|cost|price)\b": r"Find the total \1|Tell me the total \1|What is the whole \1",
    r"\bFind the\b": "What is the|Calculate the|Tell me the|Work out the|Give the",
    r"\bFind how\b": "Tell me how|Work out how|Calculate how|Say how",
    r"\$(\d+) each\b": r"$\1 apiece|$\1 per piece|$\1 for each one|a price of $\1 each|$\1 a piece",
    r"(?<=\d )(\w+) each\b": r"\1 apiece|\1 in each|\1 in every one",
    r"(?<=[a-z]) has (?=\d)": " owns | has got | keeps | holds | possesses ",
    r"\b(an|per|each|every) hour\b": "an hour|per hour|each hour|every hour|hourly",
    r"\b(a|per|each|every) day\b": "a day|per day|each day|every day|daily",
    r"\b(a|per|each|every) week\b": "a week|per week|each week|every week|weekly",
    r"\b(a|per|each|every) minute\b": "a minute|per minute|each minute|every minute",
    r"\bmiles (an|per) hour\b": "miles an hour|miles per hour|mph|miles each hour",
    r"\bshares\b": "splits|divides|deals out|hands out",
    r"\bshare\b": "split|divide",
    r"\bequally\b": "evenly|in equal parts|fairly",
    r"\bspends (\$\d+) on\b": r"pays \1 for|uses \1 for|gives \1 for|loses \1 on",
    r"\bcosts (?=\$)": "is priced at |is sold for |has a price of |sells for |is ",
    r"\bcost (?=\$)": "are priced at |are sold for |have a price of |sell for |are ",
    r"\bThen (?=[a-z])": "After that |Later |Next |Afterwards |Soon ",
    r"\bthen (?=[a-z])": "afterwards |later |after that |next ",
    r"\bfriends\b": "people|kids|classmates|neighbors|guests|cousins",
    r"\bchildren\b": "kids|pupils|young people",
    r"\bkids\b": "children|young people",
    r"\bearns\b": "makes|gets|receives|is given",
    r"\bsaves\b": "puts aside|keeps|lays by|puts away|sets aside",
    r"\bThere are (?=\d)": "We see |Somebody counts |We have |One finds |Here are ",
    r"\b(Each|Every)\b(?= \w)": "Each|Every|Any",
    r"\bholds\b": "contains|has|carries|has room for",
    r"\bcontains\b": "holds|has",
    r"\bis (\d+) years old\b": r"is \1|is aged \1|has the age of \1|turned \1",
    r"\bwants to\b": "plans to|would like to|has to|hopes to",
    r"\bfinds\b": "discovers|gets|comes across",
    r"\bcollects\b": "gathers|picks up|gets",
    r"\bpicks\b": "gathers|collects|takes",
    r"\bbakes\b": "makes|prepares|cooks",
    r"\bpacks\b": "puts|places|stores",
    r"\bputs\b": "places|lays|sets",
    r"\bsells\b": "trades|gives away",
    r"\bworks\b": "is at work|is busy",
    r"\breads\b": "gets through|studies",
    r"\bdrives\b": "travels|goes|rides",
    r"\bloses\b": "drops|misses|is robbed of",
    r"\bthe rest\b": "the others|what is left|the remaining ones|all that remains",
    r"\bthe others\b": "the rest|what is left|the remaining ones",
    r"\bis left\b": "remains|is still there|stays",
    r"\bget off\b": "leave|step out|go out",
    r"\bget on\b": "enter|step in|come in",
    r"\bthe number of\b": "how many make up the|the count of|the amount of",
    r"\b(and|while)\b": "and|while|and also|and",
    r"\bolder\b": "older|ahead in years|more in age",
    r"\bhas to\b": "must|needs to|should",
    r"\bmust\b": "has to|needs to|should",
    r"\bhow many\b": "how many|what number of|which number of",
    r"\bHow many (?=[a-z]+ (are|do|does|did|will)\b)": (
        "How many |What number of |Which number of |Tell me how many |Say how many "
    ),
}
_OPENING = re.compile(r"^(He|She|They|There|A|The|Each|Every|Then|One|Any|In|On|At|It|We|Here|Later|After)\b")
_RULES = [(re.compile(pattern), words.split("|")) for pattern, words in WORDS.items()]

PADDING = (
    "It is a sunny day.",
    "It rains all day.",
    "{N} is a friend of mine.",
    "Read with care.",
    "Here is a story.",
    "This is about {N}.",
    "{N} likes to count.",
    "It is summer.",
    "Everybody is happy.",
    "The weather is cold.",
    "{N} has a good day.",
    "Listen.",
    "It was a long week.",
    "A new month begins.",
    "{N} lives in a small town.",
    "This happened last year.",
)

KEPT = frozenset(LISTS["kept"])
"""Words that ``_drop`` keeps, because the meaning of a question may depend on them."""


def retell(question: str, rng: Random) -> str:
    """The question in other words; 40 % of the questions stay unchanged."""
    if rng.random() < 0.4:
        return question
    for pattern, words in _RULES:
        question = pattern.sub(partial(_say, words, rng), question)
    if rng.random() < 0.2:
        question = _question_first(question)
    if rng.random() < 0.1:
        question = _pad(question, rng)
    if rng.random() < 0.3:
        question = _drop(question, rng)
    return question


def _say(words: list[str], rng: Random, match: re.Match[str]) -> str:
    return match.expand(rng.choice(words)) if rng.random() < OTHERWISE else match[0]


def _question_first(question: str) -> str:
    """ "A has 3. He eats 1. How many are left?" becomes "How many are left if A has 3 and he eats 1?"."""
    *told, asked = re.split(r"(?<=[.?]) ", question)
    if not told or not asked.endswith("?") or any("?" in sentence for sentence in told) or " if " in question.lower():
        return question
    told = [_OPENING.sub(lambda m: m[0].lower(), sentence).rstrip(".") for sentence in told]
    return f"{asked[:-1]} if {' and '.join(told)}?"


def _pad(question: str, rng: Random) -> str:
    """Put a sentence without information before the question."""
    names = re.findall(r"(?<![.?] )\b([A-Z][a-z]+)\b", question)
    return f"{rng.choice(PADDING).format(N=names[-1] if names else 'Somebody')} {question}"


def _drop(question: str, rng: Random) -> str:
    """Drop some words at random; names, numbers and the words in ``KEPT`` stay."""
    chance = rng.choice((0.08, 0.15, 0.3))

    def stays(word: str) -> bool:
        return not (word.islower() and word.isalpha() and word not in KEPT and rng.random() < chance)

    return " ".join(filter(stays, question.split(" ")))
