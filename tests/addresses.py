"""Strategies of what addresses are made of: texts of names, addresses, networks and identifiers, right or nearly so."""

from __future__ import annotations

import ipaddress

from hypothesis import strategies as st

from tunnel.address import Identifier

_labels = st.from_regex(r"[a-z_][a-z0-9_-]{0,20}", fullmatch=True)
names = st.lists(_labels, min_size=1, max_size=5).map(".".join)
addresses = st.ip_addresses().map(str).filter(lambda text: "%" not in text)
_v4_networks = st.tuples(st.ip_addresses(v=4), st.integers(0, 32))
_plain_v6 = st.ip_addresses(v=6).filter(lambda ip: ip.scope_id is None and ip.ipv4_mapped is None)
_v6_networks = st.tuples(_plain_v6, st.integers(0, 128))
networks = (_v4_networks | _v6_networks).map(lambda pair: str(ipaddress.ip_network(pair, strict=False)))
identifiers = st.one_of(
    st.builds("host={}".format, names | addresses),
    st.builds("suffix=.{}".format, names),
    st.builds("cidr={}".format, networks),
).map(Identifier.parse)
_near_misses = st.text(st.sampled_from("0129.:=/%*xsufhoctidrpv46-_ \x00à"), max_size=30)
_kinds = st.sampled_from(["host=", "ipv4=", "ipv6=", "suffix=", "cidr=", ""])
identifier_texts = st.tuples(_kinds, st.text() | _near_misses).map("".join)
