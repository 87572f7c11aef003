"""Addresses that a server may fetch from: public unicast ones, by the table below.

The table lists the special-purpose blocks of IANA's registries (iana-ipv4-special-registry and
iana-ipv6-special-registry, as of November 2026) and addresses that clouds answer inside their networks. Python's
``ipaddress.is_global`` is not used: its table changes with the patch version and has no cloud addresses.
"""

from __future__ import annotations

import ipaddress

IPv4 = ipaddress.IPv4Address
IPv6 = ipaddress.IPv6Address

SPECIAL_V4 = tuple(
    ipaddress.IPv4Network(block)
    for block in (
        "0.0.0.0/8",  # this network (RFC 791)
        "10.0.0.0/8",  # private (RFC 1918)
        "100.64.0.0/10",  # shared (RFC 6598); Alibaba's metadata is 100.100.100.200
        "127.0.0.0/8",  # loopback (RFC 1122)
        "169.254.0.0/16",  # link-local (RFC 3927) with the metadata of most clouds
        "172.16.0.0/12",  # private (RFC 1918)
        "192.0.0.0/24",  # protocol assignments (RFC 6890); Oracle's metadata is 192.0.0.192
        "192.0.2.0/24",  # documentation (RFC 5737)
        "192.31.196.0/24",  # AS112 (RFC 7535)
        "192.52.193.0/24",  # AMT relays (RFC 7450)
        "192.88.99.0/24",  # 6to4 relays (RFC 7526)
        "192.168.0.0/16",  # private (RFC 1918)
        "192.175.48.0/24",  # AS112 (RFC 7534)
        "198.18.0.0/15",  # benchmarks (RFC 2544)
        "198.51.100.0/24",  # documentation (RFC 5737)
        "203.0.113.0/24",  # documentation (RFC 5737)
        "224.0.0.0/4",  # multicast (RFC 5771)
        "240.0.0.0/4",  # reserved (RFC 1112), with the limited broadcast
        "168.63.129.16/32",  # Azure's WireServer
        "161.26.0.0/16",  # IBM Cloud, services inside its network
        "166.8.0.0/14",  # IBM Cloud, services inside its network
        "199.36.153.4/30",  # Google Cloud, restricted.googleapis.com
        "199.36.153.8/30",  # Google Cloud, private.googleapis.com
    )
)
GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
"""The only IPv6 unicast block that IANA assigns from; unique local, link-local and multicast addresses lie outside."""
SPECIAL_V6 = tuple(
    ipaddress.IPv6Network(block)
    for block in (
        "2001::/23",  # protocol assignments (RFC 2928): Teredo, ORCHID, benchmarks, AMT, anycast
        "2001:db8::/32",  # documentation (RFC 3849)
        "2002::/16",  # 6to4 (RFC 3056, deprecated)
        "2620:4f:8000::/48",  # AS112 (RFC 7534)
        "3fff::/20",  # documentation (RFC 9637)
        "3ffe::/16",  # 6bone (RFC 3701, returned)
    )
)
EMBEDDING = (ipaddress.IPv6Network("::ffff:0:0/96"), ipaddress.IPv6Network("64:ff9b::/96"))
"""Blocks whose last 32 bits are the IPv4 destination: IPv4-mapped (RFC 4291) and NAT64 (RFC 6052)."""
ISATAP = (0x00005EFE, 0x02005EFE)
"""Third quarter of an IPv6 address whose last 32 bits are an IPv4 address (RFC 5214)."""


def is_public(text: str) -> bool:
    """True for an address of the public internet whose embedded IPv4 address, if any, is public too.

    A zone (``fe80::1%eth0``) makes an address local. Text that is not an address is not public.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, IPv4):
        return _is_public_v4(address)
    if address.scope_id is not None:
        return False
    embedded = IPv4(int(address) & 0xFFFFFFFF)
    if any(address in block for block in EMBEDDING):
        return _is_public_v4(embedded)
    if (int(address) >> 32) & 0xFFFFFFFF in ISATAP and not _is_public_v4(embedded):
        return False
    return address in GLOBAL_V6 and not any(address in block for block in SPECIAL_V6)


def _is_public_v4(address: IPv4) -> bool:
    return not any(address in block for block in SPECIAL_V4)
