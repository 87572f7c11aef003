"""Regular expressions of JSON Schema's ``format`` values, for whole texts, in syntax common to ECMA and Rust.

Sources: RFC 3339 (dates and times; appendix A for durations), RFC 5321 (email), RFC 1123 (host names), RFC 4291 (IPv6),
RFC 3986 (URI), RFC 6901 (JSON pointers), RFC 9562 (UUID), RFC 6570 (URI templates).
"""

from __future__ import annotations

from collections.abc import Mapping

_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_ZONE = f"(?:[zZ]|[+-]{_CLOCK})"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]+)?{_ZONE}"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_H16 = "[0-9a-fA-F]{1,4}"
_LS32 = f"(?:{_H16}:{_H16}|{_IPV4})"


def _ipv6() -> str:
    """An address with ``::`` in any place: n groups before it, and at most 7 - n after it."""
    ways = [f"(?:{_H16}:){{6}}{_LS32}"]
    for after in range(5, -1, -1):
        before = f"(?:(?:{_H16}:){{0,{4 - after}}}{_H16})?" if after < 5 else ""
        ways.append(f"{before}::(?:{_H16}:){{{after}}}{_LS32}")
    ways += [f"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}", f"(?:(?:{_H16}:){{0,6}}{_H16})?::"]
    return "(?:" + "|".join(ways) + ")"


_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+".replace("^", r"\^")
_UNRESERVED = "a-zA-Z0-9._~-"
_PCT = "%[0-9a-fA-F]{2}"
_PCHAR = f"(?:[!$&'()*+,;=:@{_UNRESERVED}]|{_PCT})"
_NO_COLON = f"(?:[!$&'()*+,;=@{_UNRESERVED}]|{_PCT})"
_AUTHORITY = (
    f"(?:(?:[!$&'()*+,;=:{_UNRESERVED}]|{_PCT})*@)?"
    rf"(?:\[(?:{_ipv6()}|[vV][0-9a-fA-F]+\.[!$&'()*+,;=:{_UNRESERVED}]+)\]|(?:[!$&'()*+,;={_UNRESERVED}]|{_PCT})*)"
    "(?::[0-9]*)?"
)
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_ABSOLUTE = f"//{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?"
_URI = f"[a-zA-Z][a-zA-Z0-9+.-]*:(?:{_ABSOLUTE}|{_PCHAR}+(?:/{_PCHAR}*)*|){_TAIL}"
_RELATIVE = f"(?:{_ABSOLUTE}|{_NO_COLON}+(?:/{_PCHAR}*)*|){_TAIL}"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_DAYS = "(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
_HOURS = "T(?:[0-9]+S|[0-9]+M(?:[0-9]+S)?|[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?)"

FORMATS: Mapping[str, str] = {
    "date-time": f"{_DATE}[tT]{_TIME}",
    "date": _DATE,
    "time": _TIME,
    "duration": f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "uri": _URI,
    "uri-reference": f"(?:{_URI}|{_RELATIVE})",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
"""The formats that are enforced."""

REFUSED = ("idn-email", "idn-hostname", "iri", "iri-reference", "uri-template", "regex")
"""Formats of the standard without an expression here: a schema with one is refused."""
