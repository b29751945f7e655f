"""Egress rules: every non-public address is refused, however it is written (SEC, TOOL-7)."""

from __future__ import annotations

import ipaddress
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pawl.chassis.ids import StoreId
from pawl.server.egress.addresses import Reach, plain_address, reach_of
from pawl.server.egress.policy import EgressRefused, EgressRules, Target, read_rules, read_target, rules_of
from tests.tables import for_each, not_explained, not_refused

REFUSED_IPV4 = [
    "0.0.0.0",  # noqa: S104  # one that must be refused
    "0.1.2.3",
    "10.0.0.1",
    "10.255.255.255",
    "100.64.0.1",
    "100.100.100.200",
    "100.127.255.255",
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",
    "169.254.0.1",
    "169.254.169.254",
    "169.254.170.2",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.0.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
]
REFUSED_IPV6 = [
    "::",
    "::1",
    "::2",
    "100::1",
    "64:ff9b:1::1",
    "2001::1",
    "2001:db8::1",
    "2001:20::1",
    "2002:808:808::1",
    "3fff::1",
    "5f00::1",
    "4000::1",
    "fc00::1",
    "fd00:ec2::254",
    "fd20:ce::254",
    "fe80::1",
    "fec0::1",
    "ff02::1",
]
PUBLIC = ["1.1.1.1", "8.8.8.8", "93.184.216.34", "172.32.0.1", "100.128.0.1", "2606:4700::1", "2a00:1450::1"]


def inside_ipv6(address: IPv4Address) -> list[IPv6Address]:
    number = int(address)
    return [
        IPv6Address((0xFFFF << 32) | number),  # mapped
        IPv6Address(number),  # compatible
        IPv6Address((0x0064FF9B << 96) | number),  # NAT64
        IPv6Address((0x0064FF9B0001 << 80) | number),  # NAT64 of a private network
        IPv6Address((0x2002 << 112) | (number << 80) | 1),  # 6to4
        IPv6Address((0x20010000 << 96) | (1 << 64) | (number ^ 0xFFFFFFFF)),  # Teredo, as its client
        IPv6Address((0x20010000 << 96) | (number << 64) | 1),  # Teredo, as its server
    ]


def spellings(address: IPv4Address) -> list[str]:
    number, parts = int(address), str(address).split(".")
    first, second, third, fourth = map(int, parts)
    return [
        str(address),
        f"{address}.",
        str(number),
        hex(number),
        hex(number).upper().replace("X", "x"),
        f"0{number:o}",
        ".".join(f"0{int(part):o}" for part in parts),
        ".".join(f"000{int(part):03o}" for part in parts),
        ".".join(hex(int(part)) for part in parts),
        f"{first}.{number & 0xFFFFFF}",
        f"{first}.{second}.{(third << 8) | fourth}",
        f"{first}.0x{second:x}.{third}.0{fourth:o}",
        str(number + 2**32),
        str(address).translate({ord(str(digit)): chr(0xFF10 + digit) for digit in range(10)}),
        str(address).replace(".", "\u3002"),
        str(address).replace(".", "\uff0e"),
        str(address).replace(".", "\uff61"),
        str(address).replace("1", "\u2460"),
        str(address).translate({ord(str(digit)): chr(0x1D7D8 + digit) for digit in range(10)}),
        "".join(f"%{ord(character):02x}" for character in str(address)),
        f"[{address}]",
        *(f"[{form}]" for form in inside_ipv6(address)),
        f"[::ffff:{address}]",
        f"[0:0:0:0:0:FFFF:{address}]",
        f"[{IPv6Address((0xFFFF << 32) | number).exploded}]",
        f"[::ffff:{address}%25lo]",
        f"[::ffff:{address}%lo]",
        f"user@{address}",
        f"example.com@{address}",
        f"example.com:80@{address}",
        f"{address}:80@example.com",
        f"example.com%40{address}",
        f"{address}\\@example.com",
        f"example.com\\@{address}",
        f" {address}",
        f"{address}\t",
        f"{address}\n.example.com",
        f"{address}\0.example.com",
    ]


def is_refused(url: str, rules: EgressRules | None = None) -> bool:
    try:
        (rules or EgressRules()).check_target(read_target(url))
    except EgressRefused:
        return True
    return False


@for_each(("texts", "is_public"), [((*REFUSED_IPV4, *REFUSED_IPV6), False), ((*PUBLIC, "64:ff9b::808:808"), True)])
def test_only_public_addresses_are_allowed(texts: tuple[str, ...], is_public: bool) -> None:
    """A public address may also be behind NAT64."""
    for text in texts:
        host = f"[{text}]" if ":" in text else text
        refused = [is_refused(url) for url in (f"http://{host}/", f"https://{host}:443/")]
        reach = reach_of(ipaddress.ip_address(text)) is Reach.PUBLIC
        assert (reach, refused) == (is_public, [not is_public] * 2), text


@given(st.ip_addresses())
def test_public_addresses_are_public_in_python_too(address: IPv4Address | IPv6Address) -> None:
    """Python's tables are an independent reading of the same registries."""
    kinds = (address.is_global, address.is_multicast, address.is_loopback, address.is_link_local)
    assert reach_of(address) is not Reach.PUBLIC or kinds == (True, False, False, False)


@given(st.sampled_from(REFUSED_IPV4) | st.ip_addresses(v=4).filter(lambda a: reach_of(a) is not Reach.PUBLIC).map(str))
def test_a_refused_address_is_also_refused_inside_an_ipv6_address(text: str) -> None:
    for form in inside_ipv6(IPv4Address(text)):
        assert Reach.PUBLIC not in {reach_of(form), reach_of(plain_address(str(form)))}, form


@given(
    st.sampled_from([IPv4Address(text) for text in REFUSED_IPV4])
    | st.ip_addresses(v=4).filter(lambda a: reach_of(a) is not Reach.PUBLIC),
    st.sampled_from(["http", "https", "HTTP"]),
    st.sampled_from(["", ":80", ":443", ":0080"]),
    st.sampled_from(["", "/", "/a?b=c", "?a", "#a", "/@example.com"]),
)
@example(IPv4Address("169.254.169.254"), "http", "", "/latest/meta-data/")
def test_a_refused_address_is_refused_in_every_spelling(
    address: IPv4Address, scheme: str, port: str, rest: str
) -> None:
    for host in spellings(address):
        assert is_refused(f"{scheme}://{host}{port}{rest}"), host


@given(st.text(max_size=60))
def test_any_text_is_refused_or_read_as_an_unambiguous_host(text: str) -> None:
    for url in (text, f"http://{text}", f"http://{text}/", f"https://example.com{text}"):
        try:
            target = read_target(url)
        except EgressRefused:
            continue
        assert (target.url.isascii(), target.url.isprintable()) == (True, True)
        is_name = set(target.host) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_.")
        assert is_name if target.address is None else str(target.address) == target.host
        again = read_target(target.url)
        assert (again.host, again.port, again.scheme) == (target.host, target.port, target.scheme)


NO_URLS = [
    "",
    "example.com",
    "//example.com",
    "file:///etc/passwd",
    "ftp://example.com",
    "gopher://example.com",
    "http:/example.com",
    "http:example.com",
    "http://",
    "http:///path",
    "http://.",
    "http://a..b",
    "http://[::1",
    "http://[::1]x",
    "http://[v1.x]",
    "http://example.com:0",
    "http://example.com:65536",
    "http://example.com:\uff18\uff10",
    "http://example.com:-1",
    "http://example.com:80:80",
    "http://" + "a" * 64 + ".com",
    "http://" + "a." * 127 + "com",
    "http://example.com/" + "a" * 9000,
    "http://exa mple.com",
    "http://example.com/a b",
    "http://example.com/\r\nHost: x",
    "http://user:password@example.com",
    "http://example.com/\ud800",
    "http://1.2.3",
    "http://1.2.3.4.5",
    "http://256.1.1.1",
    "http://example.1",
    "http://example.0x1f",
]


def test_anything_but_a_plain_url_is_refused() -> None:
    assert not_refused(EgressRefused, read_target, NO_URLS) == []


def test_a_url_is_normalised() -> None:
    assert read_target("HTTPS://Bücher.Example.:8443/a/ü?q=ä b".replace(" ", "%20") + "#part") == Target(
        scheme="https",
        host="xn--bcher-kva.example",
        port=8443,
        target="/a/%C3%BC?q=%C3%A4%20b",
        address=None,
    )
    urls = {"http://[2606:4700:0::1]": "http://[2606:4700::1]/", "https://example.com:443?q": "https://example.com/?q"}
    assert {url: read_target(url).url for url in urls} == urls


def test_ports_other_than_80_and_443_are_refused_unless_a_rule_names_them() -> None:
    rules, urls = read_rules(["example.com:8080"], []), ("http://example.com:8080", "https://example.com:443")
    assert [is_refused(url) for url in urls] == [True, False]
    assert [is_refused(url, rules) for url in (*urls, "http://example.com")] == [False, True, True]


def test_with_an_allow_list_only_its_hosts_are_reachable() -> None:
    rules = read_rules(["*.Example.com", "bücher.example", "1.1.1.1"], ["10.1.2.3:8080", "wiki:9000", "172.16.0.0/12"])
    for url in (
        "https://a.example.com",
        "https://a.b.example.com",
        "http://xn--bcher-kva.example",
        "http://1.1.1.1",
        "http://10.1.2.3:8080",
        "http://wiki:9000",
        "http://172.20.1.1",
    ):
        assert not is_refused(url, rules), url
    for url in (
        "https://example.com",
        "https://badexample.com",
        "https://example.com.evil.example",
        "http://8.8.8.8",
        "http://10.1.2.3",
        "http://10.1.2.4:8080",
        "http://wiki",
        "http://172.20.1.1:22",
    ):
        assert is_refused(url, rules), url
    assert is_refused("https://example.com", read_rules([], []))


def addresses_are_refused(url: str, addresses: list[str], rules: EgressRules | None = None) -> bool:
    try:
        (rules or EgressRules()).check_addresses(read_target(url), [plain_address(text) for text in addresses])
    except EgressRefused as refused:
        return "has no allowed address" in str(refused)
    return False


def test_a_name_is_refused_if_any_of_its_addresses_is_refused() -> None:
    assert not addresses_are_refused("http://a.example", ["8.8.8.8", "2606:4700::1"])
    assert addresses_are_refused("http://a.example", ["8.8.8.8", "10.0.0.1"])
    assert addresses_are_refused("http://a.example", ["8.8.8.8", "::ffff:127.0.0.1"])
    assert addresses_are_refused("http://a.example", ["fe80::1%lo"])
    assert addresses_are_refused("http://a.example", [])


def test_private_addresses_are_reachable_only_if_a_rule_allows_them() -> None:
    rules = read_rules(None, ["10.1.2.3:8080", "192.168.0.0/16", "wiki:9000", "[fd00::1]:80"])
    assert not addresses_are_refused("http://a.example:8080", ["10.1.2.3"], rules)
    assert addresses_are_refused("http://a.example", ["10.1.2.3"], rules)
    assert addresses_are_refused("http://a.example:8080", ["8.8.8.8"], rules)
    assert not addresses_are_refused("http://a.example", ["192.168.3.4"], rules)
    assert addresses_are_refused("http://a.example:8080", ["192.168.3.4"], rules)
    assert not addresses_are_refused("http://wiki:9000", ["10.9.9.9"], rules)
    assert addresses_are_refused("http://wiki", ["10.9.9.9"], rules)
    assert not addresses_are_refused("http://a.example", ["fd00::1", "8.8.8.8"], rules)


def test_secrets_are_sent_over_https_or_to_explicitly_allowed_hosts() -> None:
    rules = read_rules(None, ["wiki:8080", "10.1.0.0/16"])
    for url in ("https://a.example", "http://wiki:8080", "http://10.1.2.3"):
        rules.check_secrets(read_target(url))
    for url in ("http://a.example", "http://wiki", "http://10.2.3.4", "http://8.8.8.8"):
        with pytest.raises(EgressRefused, match="over unencrypted http"):
            rules.check_secrets(read_target(url))


def test_rules_cannot_allow_metadata_addresses() -> None:
    rules = read_rules(None, ["wiki:80", "100.64.0.0/10", "fc00::/7"])
    for address in ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "fe80::1", "224.0.0.1"):
        assert addresses_are_refused("http://wiki", [address], rules), address
        assert is_refused(f"http://{f'[{address}]' if ':' in address else address}", rules), address


def test_an_invalid_egress_rule_is_refused() -> None:
    private = "10.1.2.3 wiki 8.8.8.8:80 0.0.0.0/0 169.254.0.0/16 169.254.169.254:80 10.0.0.1/8 ::/0"
    assert not_refused(ValueError, lambda rule: read_rules(None, [rule]), private.split()) == []
    hosts = ("http://example.com", "*.10.0.0.1", "*", "a b")
    assert not_explained(ValueError, lambda rule: read_rules([rule], []), dict.fromkeys(hosts, "^hosts: ")) == []


def test_a_store_uses_its_own_rules_or_the_common_ones() -> None:
    common, own = read_rules(["a.example"], []), read_rules(["b.example"], [])
    assert rules_of({"*": common, "acme": own}, StoreId("acme")) is own
    assert rules_of({"*": common, "acme": own}, StoreId("other")) is common
    assert rules_of({}, StoreId("acme")) == EgressRules()
