"""Certificates and keys: which files are taken, and what is said of those that are not."""

from __future__ import annotations

import datetime
import hashlib
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
from authorities import NAME, Authority, der
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from tunnel.certificates import ClientTls, ServerTls
from tunnel.errors import ConfigError


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    (tmp_path / "stranger").mkdir()
    return Authority(tmp_path / "stranger")


class TestServerFiles:
    @pytest.fixture
    def tls(self, authority: Authority) -> ServerTls:
        return authority.server()

    def test_the_binding_is_the_hash_of_the_certificate(self, tls: ServerTls) -> None:
        assert tls.load().binding == hashlib.sha256(der(Path(tls.cert))).digest()

    def test_what_is_older_than_tls_1_2_is_not_spoken(self, tls: ServerTls) -> None:
        assert tls.load().context.minimum_version is ssl.TLSVersion.TLSv1_2

    def test_clients_need_a_certificate_only_where_there_is_an_authority_for_them(
        self, tls: ServerTls, authority: Authority
    ) -> None:
        assert tls.load().context.verify_mode is ssl.CERT_NONE
        assert replace(tls, client_ca=authority.ca).load().context.verify_mode is ssl.CERT_REQUIRED

    def test_its_paths_are_all_that_is_read(self, tls: ServerTls, authority: Authority) -> None:
        assert tls.paths == (tls.cert, tls.key)
        assert replace(tls, client_ca=authority.ca).paths == (tls.cert, tls.key, authority.ca)

    @pytest.mark.parametrize("which", ["cert", "key", "client_ca"])
    def test_a_file_that_is_missing_is_named(self, tls: ServerTls, tmp_path: Path, which: str) -> None:
        missing = tmp_path / "missing"
        with pytest.raises(ConfigError, match=f"^{missing}: No such file or directory$"):
            replace(tls, **{which: missing}).load()

    @pytest.mark.parametrize("content", [b"", b"rubbish\n", b"\xff\xfe\0", b"half"])
    @pytest.mark.parametrize("which", ["cert", "key", "client_ca"])
    def test_a_file_that_holds_something_else_is_named(
        self, tls: ServerTls, authority: Authority, tmp_path: Path, which: str, content: bytes
    ) -> None:
        tls, bad = replace(tls, client_ca=authority.ca), tmp_path / "bad"
        whole = Path(getattr(tls, which)).read_bytes()
        bad.write_bytes(whole[: len(whole) // 4] if content == b"half" else content)
        bad.chmod(0o600)
        what = "private key" if which == "key" else "certificate"
        with pytest.raises(ConfigError, match=f"^{bad}: holds no {what}; taken: PEM"):
            replace(tls, **{which: bad}).load()

    @pytest.mark.parametrize("kind", trustme.KeyType)
    def test_the_key_of_another_certificate_is_named(
        self, tls: ServerTls, tmp_path: Path, kind: trustme.KeyType
    ) -> None:
        key = tmp_path / "other.key"
        key.write_bytes(trustme.CA(key_type=kind).issue_cert(NAME, key_type=kind).private_key_pem.bytes())
        key.chmod(0o600)
        with pytest.raises(ConfigError, match=f"^{key}: is not the key of the certificate in {tls.cert}$"):
            replace(tls, key=key).load()

    def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked(self, tls: ServerTls) -> None:
        key = Path(tls.key)
        private = load_pem_private_key(key.read_bytes(), None)
        key.write_bytes(
            private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"open sesame"))
        )
        with pytest.raises(ConfigError, match=f"^{key}: has a passphrase"):
            tls.load()

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
    def test_a_key_that_others_may_use_is_refused(self, tls: ServerTls, mode: int) -> None:
        Path(tls.key).chmod(mode)
        with pytest.raises(ConfigError, match=f"^{tls.key}: others than its owner may use it"):
            tls.load()

    def test_a_certificate_in_older_words_is_refused(self, tls: ServerTls) -> None:
        """The ssl module would take it, and we could not say which one it shows."""
        cert = Path(tls.cert)
        cert.write_text(cert.read_text().replace(" CERTIFICATE-----", " X509 CERTIFICATE-----"))
        with pytest.raises(ConfigError, match=f"^{cert}: holds no certificate; taken: PEM that begins with BEGIN CERT"):
            tls.load()

    def test_what_the_ssl_module_has_against_a_certificate_is_said(self, tls: ServerTls) -> None:
        cert, key = Path(tls.cert), Path(tls.key)
        cert.write_bytes(_self_signed(short := rsa.generate_private_key(65537, 1024)))
        key.write_bytes(short.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        with pytest.raises(ConfigError, match=f"^{cert}: is not taken: ee key too small$"):
            tls.load()

    def test_a_certificate_that_is_replaced_while_it_is_read_is_not_taken(
        self, tls: ServerTls, authority: Authority, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The context would show another certificate than the one that the binding names."""
        other, _ = authority.issue("other")
        load = ssl.SSLContext.load_cert_chain

        def load_and_replace(context: ssl.SSLContext, *args: object) -> None:
            load(context, *args)  # type: ignore[arg-type]
            other.rename(tls.cert)

        monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load_and_replace)
        with pytest.raises(ConfigError, match=f"^{tls.cert}: was replaced while it was read$"):
            tls.load()


def _self_signed(key: rsa.RSAPrivateKey) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(Encoding.PEM)


class TestClientFiles:
    def test_the_systems_authorities_are_taken_where_none_is_given(
        self, authority: Authority, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
        assert ClientTls().load().get_ca_certs(binary_form=True) == [der(authority.ca)]

    def test_no_other_authority_is_taken_where_one_is_given(self, authority: Authority, stranger: Authority) -> None:
        assert ClientTls(stranger.ca).load().get_ca_certs(binary_form=True) == [der(stranger.ca)]

    def test_certificate_and_name_of_the_server_are_checked(self, authority: Authority) -> None:
        context = ClientTls(authority.ca).load()
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2

    def test_its_paths_are_all_that_is_read_but_for_what_the_system_has(self, authority: Authority) -> None:
        assert ClientTls().paths == ()
        tls = authority.client()
        assert tls.paths == (authority.ca, tls.cert, tls.key)

    @pytest.mark.parametrize("which", ["ca", "cert", "key"])
    def test_a_file_that_is_missing_is_named(self, authority: Authority, tmp_path: Path, which: str) -> None:
        missing = tmp_path / "missing"
        with pytest.raises(ConfigError, match=f"^{missing}: No such file or directory$"):
            replace(authority.client(), **{which: missing}).load()  # type: ignore[arg-type]

    @pytest.mark.parametrize("half", [{"cert": "c.pem"}, {"key": "c.pem"}])
    def test_a_certificate_without_a_key_is_none_nor_is_a_key_without_a_certificate(self, half: dict[str, str]) -> None:
        with pytest.raises(ConfigError, match=r"^c\.pem: taken: a certificate and its key, or neither"):
            ClientTls(**half)

    def test_a_name_is_one_that_could_be_dialled(self) -> None:
        assert ClientTls(name="Server.Test.").name == "server.test"
        with pytest.raises(ConfigError, match="is not a host"):
            ClientTls(name=".test")
