"""Tokens: what a file of them may say, what each allows, and that a secret is shown nowhere."""

from __future__ import annotations

import hashlib
import hmac
import tomllib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tunnel.address import Identifier, Target
from tunnel.config import Claims
from tunnel.credentials import (
    LEAST_SECRET,
    ROLES,
    Grant,
    Token,
    Tokens,
    new_token,
    of_role,
    read_tokens,
    stranger,
)
from tunnel.errors import ConfigError
from tunnel.patterns import Pattern

SECRET = "0123456789abcdefghijklmnopqrstuvwxyz"

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file that is its owner's alone."""

    def write(text: str) -> Path:
        path = tmp_path / "tokens.toml"
        path.touch(0o600)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def entry(token_id: str = "edge", role: str = "agent", secret: str = SECRET, **more: str) -> str:
    lines = [f'id = "{token_id}"', f'role = "{role}"', f'secret = "{secret}"', *(f"{k} = {v}" for k, v in more.items())]
    return "\n".join(["[[token]]", *lines, ""])


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_tokens(path)
    shown = "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown
    return str(caught.value)


def one_of(path: Path) -> Token:
    (token,) = read_tokens(path).values()
    return token


def claims(*texts: str, default_route: bool = False) -> Claims:
    return Claims(tuple(map(Identifier.parse, texts)), default_route)


# -- files


def test_a_file_gives_its_tokens_by_id(write: Write) -> None:
    path = write(
        entry(agents='["edge-*"]', identifiers='["suffix=.db.internal", "default-route"]')
        + entry("laptop", "client", SECRET[::-1], targets='["*.db.internal:5432"]')
        + entry("ops", "admin", SECRET * 2)
    )
    edge = Grant(("edge-*",), (Identifier.parse("suffix=.db.internal"),), default_route=True)
    assert read_tokens(path) == {
        "edge": Token("edge", "agent", SECRET.encode(), str(path), edge),
        "laptop": Token(
            "laptop", "client", SECRET[::-1].encode(), str(path), Grant(targets=(Pattern.parse("*.db.internal:5432"),))
        ),
        "ops": Token("ops", "admin", SECRET.encode() * 2, str(path)),
    }


@pytest.mark.parametrize("role", ROLES)
def test_what_is_left_out_is_not_allowed(write: Write, role: str) -> None:
    grant = read_tokens(write(entry(role=role)))["edge"].grant
    assert grant == Grant()
    assert grant.refuses_name("edge")
    assert grant.refuses_claims(claims("host=db"))
    assert grant.refuses_claims(claims(default_route=True))
    assert not grant.refuses_claims(claims())
    assert not grant.allows_target(Target("db", 1))


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_its_owner_alone_is_taken(write: Write, mode: int) -> None:
    path = write(entry())
    path.chmod(mode)
    assert set(read_tokens(path)) == {"edge"}


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o610, 0o604, 0o602, 0o601, 0o644, 0o666, 0o777])
def test_a_file_that_others_may_use_is_refused(write: Write, mode: int) -> None:
    path = write(entry())
    path.chmod(mode)
    assert refusal(path) == f"{path}: others than its owner may use it; taken: a file of mode 600 or 400"


def test_it_is_the_file_that_counts_and_not_a_link_to_it(write: Write, tmp_path: Path) -> None:
    path = write(entry())
    link = tmp_path / "link"
    link.symlink_to(path)
    assert set(read_tokens(link)) == {"edge"}
    path.chmod(0o644)
    assert "others than its owner" in refusal(link)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == f"{tmp_path / 'none'}: No such file or directory"


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path}: Is a directory"


def test_a_file_that_is_not_utf8_is_refused(write: Write) -> None:
    path = write("")
    path.write_bytes(b"# \xff\n" + entry().encode())
    assert refusal(path).startswith(f"{path}: not UTF-8: ")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"[[token]]\nsecret = {SECRET}", 2),
        (f'[[token]]\nsecret = "{SECRET}', 2),
        (f"{SECRET}\n", 1),
        (f'[[token]]\nsecret = "{SECRET}"\nsecret = "{SECRET}"', 3),
        (f'[[token]]\nsecret = "{SECRET}\\x"', 2),
        (f'[[token]]\nsecret = """{SECRET}\n', 3),
    ],
)
def test_what_is_not_toml_is_refused_with_its_line_and_not_shown(write: Write, text: str, line: int) -> None:
    path = write(text)
    assert refusal(path).startswith(f"{path}:{line}: not TOML: ")


@pytest.mark.parametrize("text", ["token = " + "[" * 5000, "token = " + "{a=" * 5000, f"token = {'1' * 5000}"], ids=len)
def test_what_overstrains_the_reader_of_toml_is_refused(write: Write, text: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError, match="not TOML") as caught:
        read_tokens(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "token = []",
        "token = 1",
        'token = "edge"',
        "[token]",
        '[token]\nid = "edge"',
        "token = [1]",
        "token = [{}, 1]",
        "token = {}",
        "token = [[]]",
        "[[tokens]]",
        f"{entry()}[server]\n",
        f"version = 1\n{entry()}",
    ],
)
def test_what_is_not_only_tokens_is_refused(write: Write, text: str) -> None:
    path = write(text)
    assert refusal(path) == f"{path}: taken: one or more [[token]], and nothing else"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("", "no id"),
        ('ID = "edge"', "no id"),
        ("id = 1", "the id 1"),
        ('id = ""', "the id ''"),
        ('id = ["edge"]', "the id ['edge']"),
        ('id = "a b"', "the id 'a b'"),
        ('id = "é"', "the id 'é'"),
        ('id = "edge\\n"', "the id 'edge\\n'"),
        ('id = "a/b"', "the id 'a/b'"),
        (f'id = "{"x" * 65}"', "the id 'xxxxxxxxxxxx...xxxxxxxxxxxxx'"),
    ],
)
def test_a_token_without_an_id_that_is_one_is_refused_with_its_number(write: Write, line: str, what: str) -> None:
    path = write(entry("one") + f'[[token]]\nrole = "agent"\nsecret = "{SECRET}"\n{line}')
    assert refusal(path) == f"{path}: token 2 has {what}; taken: 1 to 64 letters, digits, '.', '_' or '-'"


@pytest.mark.parametrize("token_id", ["e", "edge-1.eu_WEST", "-", "..", "x" * 64])
def test_an_id_is_of_letters_digits_and_a_few_signs(write: Write, token_id: str) -> None:
    assert set(read_tokens(write(entry(token_id)))) == {token_id}


@pytest.mark.parametrize("line", ["", "role = 1", 'role = ""', 'role = "Agent"', 'role = "server"', "role = []"])
def test_a_token_without_a_role_is_refused(write: Write, line: str) -> None:
    path = write(f'[[token]]\nid = "edge"\nsecret = "{SECRET}"\n{line}')
    assert refusal(path) == f"{path}: token edge has no role; taken: agent, client, admin"


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        '""',
        f'"{"x" * (LEAST_SECRET - 1)}"',
        f'"{"x" * 1025}"',
        f'"{SECRET} {SECRET}"',
        f'"{SECRET}\\n"',
        f'"{SECRET}\\u0000"',
        f'"{SECRET}é"',
        f'["{SECRET}"]',
    ],
)
def test_a_token_without_a_secret_that_is_one_is_refused(write: Write, value: object) -> None:
    path = write(f'[[token]]\nid = "edge"\nrole = "agent"\n{"" if value is None else f"secret = {value}"}')
    what = "no secret" if value is None else "a secret that is not taken"
    taken = "32 or more printable ASCII characters, no spaces"
    assert refusal(path) == f"{path}: token edge has {what}; taken: {taken}"


@pytest.mark.parametrize("size", [LEAST_SECRET, 1024])
def test_a_secret_is_of_so_many_characters(write: Write, size: int) -> None:
    assert read_tokens(write(entry(secret="~" * size)))["edge"].secret == b"~" * size


@pytest.mark.parametrize(
    ("role", "key", "taken"),
    [
        ("agent", "targets", "agents, identifiers"),
        ("agent", "x", "agents, identifiers"),
        ("client", "agents", "targets"),
        ("client", "identifiers", "targets"),
        ("client", "Secret", "targets"),
        ("admin", "agents", "nothing"),
        ("admin", "targets", "nothing"),
    ],
)
def test_a_key_that_means_nothing_is_refused_with_those_that_do(write: Write, role: str, key: str, taken: str) -> None:
    path = write(entry(role=role, **{key: '["x"]'}))
    assert refusal(path) == f"{path}: token edge: {key!r} means nothing for the role {role}; taken: {taken}"


@pytest.mark.parametrize("value", ['"x"', "1", "[1]", '["x", 1]', "{}", "true", '[["x"]]'])
@pytest.mark.parametrize(("role", "key"), [("agent", "agents"), ("agent", "identifiers"), ("client", "targets")])
def test_a_value_that_is_no_list_of_texts_is_refused(write: Write, role: str, key: str, value: str) -> None:
    path = write(entry(role=role, **{key: value}))
    assert refusal(path) == f"{path}: token edge: {key} is no list of texts"


@pytest.mark.parametrize(
    ("role", "key", "text", "named"),
    [
        ("agent", "agents", "", "'' is no name of agents; taken: a name, in which * stands for any characters"),
        ("agent", "agents", "a b", "'a b' is no name of agents"),
        ("agent", "agents", "edge-?", "'edge-?' is no name of agents"),
        ("agent", "agents", "edge-[12]", "'edge-[12]' is no name of agents"),
        ("agent", "agents", "a\\tb", "'a\\tb' is no name of agents"),
        ("agent", "agents", "x" * 129, "is no name of agents"),
        ("agent", "identifiers", "db", "'db' is not an identifier"),
        ("agent", "identifiers", "cidr=10.0.0.1/8", "'cidr=10.0.0.1/8' has host bits set"),
        ("agent", "identifiers", "Default-Route", "'Default-Route' is not an identifier"),
        ("agent", "identifiers", "suffix=*", "'*' is not a host"),
        ("client", "targets", "a:0", "'a:0' has ports out of range or order"),
        ("client", "targets", "a b", "'a b' is not a host"),
        ("client", "targets", "", "'' is not a pattern"),
    ],
)
def test_an_item_that_is_none_is_refused_by_name(write: Write, role: str, key: str, text: str, named: str) -> None:
    path = write(entry(role=role, **{key: f'["{text}"]'}))
    shown = refusal(path)
    assert shown.startswith(f"{path}: token edge: ")
    assert named in shown


def test_two_tokens_of_one_id_are_refused(write: Write) -> None:
    path = write(entry() + entry("other") + entry(role="client", secret=SECRET[::-1]))
    assert refusal(path) == f"{path}: two tokens have the same id"


def test_ids_that_differ_in_case_are_two(write: Write) -> None:
    assert set(read_tokens(write(entry("edge") + entry("Edge")))) == {"edge", "Edge"}


def test_a_program_finds_its_own_token_by_role(write: Write) -> None:
    path = write(entry() + entry("ops", "admin"))
    tokens = read_tokens(path, own="agent")
    assert [token.id for token in of_role("agent", tokens)] == ["edge"]
    assert set(tokens) == {"edge", "ops"}


@pytest.mark.parametrize(("role", "count"), [("client", 0), ("agent", 2)])
def test_a_program_wants_exactly_one_token_of_its_role(write: Write, role: str, count: int) -> None:
    path = write(entry() + entry("other"))
    with pytest.raises(ConfigError) as caught:
        read_tokens(path, own=role)
    assert str(caught.value) == f"{path}: holds {count} tokens of the role {role}; taken: exactly one"


def test_tokens_of_a_role_are_all_of_them(write: Write) -> None:
    tokens = read_tokens(write(entry() + entry("ops", "admin") + entry("other")))
    assert [token.id for token in of_role("agent", tokens)] == ["edge", "other"]
    assert of_role("client", tokens) == ()


_values = st.recursive(
    st.booleans()
    | st.integers()
    | st.text(max_size=40)
    | st.sampled_from(
        [SECRET, "agent", "client", "admin", "*", "default-route", "suffix=.a", "a:1", "cidr=10.0.0.0/8"]
    ),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
_keys = st.sampled_from(["id", "role", "secret", "agents", "identifiers", "targets", "x"])


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, int):
        return str(value)
    return '"' + "".join(f"\\U{ord(char):08X}" for char in str(value)) + '"'


def _table(entries: dict[str, Any]) -> str:
    return "[[token]]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in entries.items())


_good: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"id": st.sampled_from(["edge", "laptop"]), "role": st.sampled_from(ROLES), "secret": st.just(SECRET)}
)
_tables = st.builds(
    lambda good, changes: _table(good | changes), _good | st.just({}), st.dictionaries(_keys, _values, max_size=3)
)


@st.composite
def _damaged(draw: st.DrawFn) -> str:
    """A good file in which some characters were lost, doubled, or replaced."""
    text = list(entry(agents='["edge-*"]', identifiers='["suffix=.a"]') + entry("ops", "admin"))
    for _ in range(draw(st.integers(1, 3))):
        position = draw(st.integers(0, len(text) - 1))
        text[position] = draw(st.sampled_from(["", text[position] * 2, '"', "\n", "=", "[", "]", "#", "\\", "\0", " "]))
    return "".join(text)


def _is_shown(text: str) -> bool:
    """Whether what should be secret is the name of a token: names are shown."""
    try:
        tables = tomllib.loads(text).get("token")
    except tomllib.TOMLDecodeError:
        return False
    return isinstance(tables, list) and any(SECRET in str(table.get("id")) for table in tables if type(table) is dict)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(text=st.one_of(st.text(), st.lists(_tables, max_size=3).map("".join), _damaged()))
def test_no_text_raises_anything_but_a_config_error_or_shows_a_secret(write: Write, text: str) -> None:
    assume(not _is_shown(text))
    path = write(text)
    try:
        tokens = read_tokens(path)
    except ConfigError as error:
        assert str(error).startswith(str(path))  # noqa: PT017
        assert SECRET not in "".join(traceback.format_exception(error))  # noqa: PT017
    else:
        assert tokens
        assert all(token.role in ROLES and len(token.secret) >= LEAST_SECRET for token in tokens.values())
        assert SECRET not in repr(tokens)


# -- grants: names


@pytest.mark.parametrize(
    ("pattern", "taken", "refused"),
    [
        ("edge", ["edge"], ["edge-1", "Edge", "edg", "xedge", "edge\n"]),
        ("edge-*", ["edge-1", "edge-", "edge-a*b", "edge-Zürich"], ["edge", "core-1", "xedge-1"]),
        ("*-eu", ["edge-eu", "-eu"], ["edge-eu-1", "edge"]),
        ("a*b*c", ["abc", "a1b2c", "abbcc"], ["ab", "acb", "abcd"]),
        ("*", ["edge", "*", "Zürich"], []),
        ("e.ge", ["e.ge"], ["edge"]),
        ("e+", ["e+"], ["ee", "e"]),
        ("!e", ["!e"], ["x"]),
        ("e\\\\d", ["e\\d"], ["e1"]),
    ],
)
def test_a_name_pattern_means_names(write: Write, pattern: str, taken: list[str], refused: list[str]) -> None:
    grant = read_tokens(write(entry(agents=f'["{pattern}"]')))["edge"].grant
    assert [name for name in taken if grant.refuses_name(name)] == []
    assert [name for name in refused if not grant.refuses_name(name)] == []


def test_a_name_that_is_refused_is_named_with_those_that_are_taken() -> None:
    text = Grant(agents=("edge-*", "core")).refuses_name("x")
    assert text == "it may not be used by an agent called x; allowed: edge-*, core"
    assert Grant().refuses_name("x") == "it may not be used by an agent called x; allowed: nothing"


def test_a_name_pattern_with_many_stars_is_soon_done_with() -> None:
    assert Grant(agents=("*a" * 64,)).refuses_name("a" * 127 + "b")


# -- grants: claims


@pytest.mark.parametrize(
    ("allowed", "claim"),
    [
        ("host=db.internal", "host=DB.internal."),
        ("ipv4=10.0.0.7", "host=10.0.0.7"),
        ("suffix=.internal", "host=db.internal"),
        ("suffix=.internal", "host=a.b.internal"),
        ("suffix=.internal", "suffix=.internal"),
        ("suffix=.internal", "suffix=.db.internal"),
        ("cidr=10.0.0.0/8", "ipv4=10.1.2.3"),
        ("cidr=10.0.0.0/8", "cidr=10.0.0.0/8"),
        ("cidr=10.0.0.0/8", "cidr=10.1.0.0/16"),
        ("cidr=0.0.0.0/0", "ipv4=192.0.2.1"),
        ("cidr=10.0.0.7/32", "ipv4=10.0.0.7"),
        ("cidr=2001:db8::/32", "ipv6=2001:db8::1"),
        ("cidr=2001:db8::/32", "cidr=2001:db8:1::/48"),
        ("cidr=10.0.0.0/8", "ipv4=::ffff:10.0.0.7"),
    ],
)
def test_a_claim_that_lies_within_what_is_allowed_is_taken(allowed: str, claim: str) -> None:
    assert Grant(identifiers=(Identifier.parse(allowed),)).refuses_claims(claims(claim)) == ""


@pytest.mark.parametrize(
    ("allowed", "claim"),
    [
        ("host=db.internal", "host=db2.internal"),
        ("host=db.internal", "host=x.db.internal"),
        ("host=db.internal", "suffix=.db.internal"),
        ("ipv4=10.0.0.7", "ipv4=10.0.0.8"),
        ("ipv4=10.0.0.7", "cidr=10.0.0.0/29"),
        ("suffix=.internal", "host=internal"),
        ("suffix=.internal", "host=dbinternal"),
        ("suffix=.db.internal", "suffix=.internal"),
        ("suffix=.db.internal", "suffix=.xdb.internal"),
        ("suffix=.db.internal", "host=db.internal"),
        ("suffix=.internal", "ipv4=10.0.0.7"),
        ("cidr=10.1.0.0/16", "cidr=10.0.0.0/8"),
        ("cidr=10.1.0.0/16", "ipv4=10.2.0.1"),
        ("cidr=10.1.0.0/16", "cidr=10.2.0.0/16"),
        ("cidr=10.0.0.0/8", "host=db.internal"),
        ("cidr=10.0.0.0/8", "suffix=.internal"),
        ("cidr=0.0.0.0/0", "ipv6=2001:db8::1"),
        ("cidr=::/0", "ipv4=10.0.0.7"),
        ("cidr=::/0", "cidr=10.0.0.0/8"),
        ("cidr=0.0.0.0/0", "cidr=::/0"),
    ],
)
def test_a_claim_that_does_not_is_refused_by_name(allowed: str, claim: str) -> None:
    text = Grant(identifiers=(Identifier.parse(allowed),)).refuses_claims(claims(claim))
    assert text == f"it may not claim {Identifier.parse(claim)}; allowed: {allowed}"


def test_every_claim_has_to_be_allowed() -> None:
    grant = Grant(identifiers=(Identifier.parse("suffix=.a"), Identifier.parse("ipv4=10.0.0.7")))
    assert grant.refuses_claims(claims("host=x.a", "ipv4=10.0.0.7")) == ""
    assert "host=x.b" in grant.refuses_claims(claims("host=x.a", "host=x.b"))


@pytest.mark.parametrize(
    ("lists", "alone", "with_host", "host_alone"),
    [
        ('["default-route"]', True, False, False),
        ('["*"]', True, True, True),
        ('["suffix=.a"]', False, False, True),
        ('["default-route", "suffix=.a"]', True, True, True),
        ("[]", False, False, False),
    ],
)
def test_the_default_route_is_a_claim_of_its_own(
    write: Write, lists: str, alone: bool, with_host: bool, host_alone: bool
) -> None:
    grant = read_tokens(write(entry(identifiers=lists)))["edge"].grant
    wanted = [claims(default_route=True), claims("host=x.a", default_route=True), claims("host=x.a")]
    assert [not grant.refuses_claims(claim) for claim in wanted] == [alone, with_host, host_alone]


def test_a_default_route_that_is_refused_is_named() -> None:
    text = Grant(identifiers=(Identifier.parse("host=a"),)).refuses_claims(claims(default_route=True))
    assert text == "it may not claim the default route; allowed: host=a"


def test_the_default_route_does_not_allow_to_claim_all_hosts() -> None:
    assert Grant(default_route=True).refuses_claims(claims("cidr=0.0.0.0/0"))


def test_no_claims_are_always_taken() -> None:
    assert Grant().refuses_claims(claims()) == ""


# -- grants: targets


@pytest.mark.parametrize(
    ("target", "allowed"),
    [
        ("x.db.internal:5432", True),
        ("x.db.internal:5433", False),
        ("db.internal:5432", False),
        ("10.1.2.3:443", True),
        ("10.1.2.3:8443", True),
        ("11.1.2.3:443", False),
        ("web:80", True),
        ("WEB.:80", True),
        ("web:81", False),
        ("[2001:db8::1]:1", False),
    ],
)
def test_a_client_may_ask_for_what_a_pattern_means(write: Write, target: str, allowed: bool) -> None:
    path = write(entry(role="client", targets='["*.db.internal:5432", "10.0.0.0/8:1-9999", "web:80"]'))
    assert read_tokens(path)["edge"].grant.allows_target(Target.parse(target)) is allowed


def test_a_star_allows_every_target(write: Write) -> None:
    grant = read_tokens(write(entry(role="client", targets='["*"]')))["edge"].grant
    assert all(grant.allows_target(Target.parse(text)) for text in ("a:1", "10.0.0.7:65535", "[::1]:1"))


# -- secrets


def test_a_secret_is_in_no_text_of_its_token() -> None:
    token = Token("edge", "agent", SECRET.encode(), "tokens.toml")
    texts = (repr(token), str(token), f"{token}", repr({"edge": token}), repr(token.facts), repr((token.grant,)))
    assert not [text for text in texts if SECRET[:8] in text]


def test_what_a_log_says_of_a_token_is_its_id_its_file_and_its_fingerprint() -> None:
    token = Token("edge", "agent", SECRET.encode(), "tokens.toml")
    fingerprint = hashlib.sha256(b"trio-tunnel fingerprint" + SECRET.encode()).hexdigest()[:8]
    assert token.facts == {"token": "edge", "source": "tokens.toml", "fingerprint": fingerprint}


def test_of_a_token_that_is_not_known_a_log_says_the_id_alone() -> None:
    assert stranger("edge").facts == {"token": "edge"}


def test_a_fingerprint_is_that_of_the_secret_alone() -> None:
    one = Token("edge", "agent", SECRET.encode(), "a")
    assert one.fingerprint == Token("other", "client", SECRET.encode(), "b").fingerprint
    assert one.fingerprint != Token("edge", "agent", SECRET.encode() + b"x", "a").fingerprint


def test_a_proof_is_an_hmac_with_a_label_for_each_side() -> None:
    token = Token("edge", "agent", SECRET.encode(), "")
    for side in ("dialling", "accepting"):
        message = b"trio-tunnel " + side.encode() + b"\0" + b"transcript"
        assert token.proof(side, b"transcript") == hmac.new(SECRET.encode(), message, hashlib.sha256).digest()


def test_a_proof_is_taken_for_its_own_side_transcript_and_secret_only() -> None:
    token, other = (Token("edge", "agent", secret, "") for secret in (SECRET.encode(), b"x" * 32))
    proof = token.proof("dialling", b"transcript")
    assert token.proves("dialling", b"transcript", proof)
    assert not token.proves("accepting", b"transcript", proof)
    assert not token.proves("dialling", b"transcripT", proof)
    assert not other.proves("dialling", b"transcript", proof)
    assert not token.proves("dialling", b"transcript", proof[:-1])
    assert not token.proves("dialling", b"transcript", b"")


def test_a_secret_is_shown_by_exactly_its_text() -> None:
    token = Token("ops", "admin", SECRET.encode(), "")
    assert token.authorization == f"Bearer {SECRET}"
    shown = [SECRET, SECRET[:-1], f"{SECRET}x", SECRET.upper(), "", "é"]
    assert [token.is_shown(text) for text in shown] == [True, False, False, False, False, False]


def test_a_stranger_has_a_secret_that_nobody_knows() -> None:
    one, other = stranger("edge"), stranger("edge")
    assert one.secret != other.secret
    assert len(one.secret) == LEAST_SECRET
    assert one.role not in ROLES
    assert one.grant == Grant()


# -- new tokens


@pytest.mark.parametrize(
    ("role", "lists"),
    [
        ("agent", {"agents": ["edge-*"], "identifiers": ["suffix=.db.internal", "default-route"]}),
        ("agent", {"agents": ["*"], "identifiers": ["*"]}),
        ("agent", {"agents": [], "identifiers": ()}),
        ("agent", {"agents": ['"', "\\", "'", "é", "a\\nb", '"""', "#"]}),
        ("client", {"targets": ["*.db.internal:5432", "[2001:db8::/32]:1-9", "10.0.0.0/8"]}),
        ("admin", {}),
    ],
)
def test_a_new_token_is_read_again(write: Write, role: str, lists: dict[str, list[str]]) -> None:
    token = one_of(write(new_token("edge-1", role, lists)))
    assert (token.id, token.role) == ("edge-1", role)
    assert token.grant.agents == tuple(lists.get("agents", ()))
    wanted = [text for text in lists.get("identifiers", ()) if text not in ("*", "default-route")]
    assert [str(identifier) for identifier in token.grant.identifiers] == wanted
    assert token.grant.anything is ("*" in lists.get("identifiers", ()))
    assert [str(pattern) for pattern in token.grant.targets] == [
        str(Pattern.parse(text)) for text in lists.get("targets", ())
    ]


def test_no_two_new_tokens_have_the_same_secret(write: Write) -> None:
    one, other = (one_of(write(new_token("ops", "admin", {}))) for _ in range(2))
    assert one.secret != other.secret
    assert len(one.secret) >= LEAST_SECRET


def test_new_tokens_may_stand_in_one_file(write: Write) -> None:
    tokens: Tokens = read_tokens(write(new_token("a", "agent", {}) + new_token("b", "client", {"targets": ["*"]})))
    assert set(tokens) == {"a", "b"}


@pytest.mark.parametrize(
    ("token_id", "role", "lists", "text"),
    [
        ("a b", "agent", {}, "this command: token 1 has the id 'a b'; taken: 1 to 64 letters, digits, '.', '_' or '-'"),
        ("edge", "server", {}, "this command: token edge has no role; taken: agent, client, admin"),
        (
            "edge",
            "client",
            {"agents": ["x"]},
            "this command: token edge: 'agents' means nothing for the role client; taken: targets",
        ),
    ],
)
def test_a_new_token_that_no_file_could_hold_is_refused(
    token_id: str, role: str, lists: dict[str, list[str]], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        new_token(token_id, role, lists)
    assert str(caught.value) == text


_items = st.text(max_size=20) | st.sampled_from(["*", "edge-*", "suffix=.a", "default-route", "ipv4=10.0.0.7", "a:1"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    token_id=st.text(max_size=5) | st.just("edge"),
    role=st.sampled_from(ROLES),
    lists=st.dictionaries(st.sampled_from(["agents", "identifiers", "targets"]), st.lists(_items, max_size=3)),
)
def test_whatever_a_new_token_is_made_of_a_file_takes_it(
    write: Write, token_id: str, role: str, lists: dict[str, list[str]]
) -> None:
    try:
        text = new_token(token_id, role, lists)
    except ConfigError as error:
        assert str(error).startswith("this command: ")  # noqa: PT017
    else:
        token = one_of(write(text))
        assert (token.id, token.grant.agents) == (token_id, tuple(lists.get("agents", ())))
