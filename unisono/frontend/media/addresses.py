"""Which addresses of the network a server may fetch from: public ones only."""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
"""Networks whose last 32 bits are an IPv4 address (RFC 6052, RFC 8215)."""


def is_public(text: str) -> bool:
    """Whether an address is of the public internet, and so is every IPv4 address that it carries.

    Not public are loopback, private, link-local (with the metadata services of clouds), shared (RFC 6598), multicast,
    unspecified and reserved ones. A zone (``fe80::1%eth0``) makes an address local.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if getattr(address, "scope_id", None) is not None:
        return False
    return all(_is_global(one) for one in (address, *_carried(address)))


def _is_global(address: Address) -> bool:
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not address.is_unspecified
        and not (isinstance(address, ipaddress.IPv6Address) and address.is_site_local)
    ) or _carries(address)


def _carries(address: Address) -> bool:
    """Whether the address is an envelope of IPv4 ones alone, which are checked in its place."""
    return isinstance(address, ipaddress.IPv6Address) and (
        address.ipv4_mapped is not None or any(address in one for one in NAT64)
    )


def _carried(address: Address) -> list[ipaddress.IPv4Address]:
    """The IPv4 addresses that an IPv6 address carries: mapped, 6to4, Teredo, NAT64."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found = [one for one in (address.ipv4_mapped, address.sixtofour) if one is not None]
    found += list(address.teredo or ())
    if any(address in one for one in NAT64):
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return found
