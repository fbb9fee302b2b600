"""What only real sockets have: files, modes, ports, certificates."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import socket
import ssl
import stat
import tempfile
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from scheduler.clock import ManualClock
from scheduler.wire.connection import Connection
from scheduler.wire.messages import Cancel
from scheduler.wire.transport import AddressError, SocketTransport, socket_path
from tests.wire.cast import RawPeer, Wire, make_wire, until


@pytest.fixture
async def unix(tmp_path: Path) -> Iterator[Wire]:
    wire = make_wire("unix", tmp_path)
    yield wire
    await wire.aclose()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- files -----------------------------------------------------------------------------------------------------------


async def test_only_this_user_can_reach_the_socket(unix: Wire, tmp_path: Path) -> None:
    await unix.serve()

    assert mode(tmp_path / "run") == 0o700
    assert mode(tmp_path / "run" / "scheduler.sock") == 0o600


async def test_the_socket_of_a_process_that_died_is_taken_over(unix: Wire, tmp_path: Path) -> None:
    path = tmp_path / "run" / "scheduler.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    web, _ = await unix.pair()

    assert web.welcome is not None


async def test_a_socket_where_somebody_listens_is_left_alone(unix: Wire) -> None:
    web, scheduler = await unix.pair()

    with pytest.raises(AddressError, match="in use"):
        await unix.serve()

    web.connection.send(Cancel("r1"))
    assert await scheduler.received(1) == [Cancel("r1")]


async def test_a_file_that_is_no_socket_is_left_alone(unix: Wire, tmp_path: Path) -> None:
    path = tmp_path / "run" / "scheduler.sock"
    path.parent.mkdir()
    path.write_text("precious")

    with pytest.raises(AddressError, match="not a socket"):
        await unix.serve()

    assert path.read_text() == "precious"


async def test_the_socket_file_is_gone_when_its_listener_is(unix: Wire, tmp_path: Path) -> None:
    server = await unix.serve()

    await server.aclose()

    assert not (tmp_path / "run" / "scheduler.sock").exists()


async def test_a_listener_that_stops_does_not_take_its_successors_file_away(unix: Wire, tmp_path: Path) -> None:
    server = await unix.serve()
    path = tmp_path / "run" / "scheduler.sock"
    path.unlink()
    successor = await unix.serve()

    await server.aclose()

    assert path.exists()
    await successor.aclose()


async def test_a_path_too_long_for_the_kernel_moves_to_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        path = socket_path(tmp_path / ("x" * 100), "scheduler")
        assert path.is_relative_to(short)
        assert path == socket_path(tmp_path / ("x" * 100), "scheduler")
        assert path != socket_path(tmp_path / ("y" * 100), "scheduler")
        wire = Wire(SocketTransport(), path)

        web, _ = await wire.pair()

        assert web.welcome is not None
        assert mode(path.parent) == 0o700
        await wire.aclose()


def test_a_short_path_stays_in_the_data_directory() -> None:
    assert socket_path(Path("/srv/harness/run"), "scheduler") == Path("/srv/harness/run/scheduler.sock")


async def test_a_folder_of_another_user_is_trusted_neither_to_listen_nor_to_connect(
    unix: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await unix.serve()
    monkeypatch.setattr(os, "getuid", lambda: 12345)

    with pytest.raises(AddressError, match="not a folder of this user"):
        await unix.dial()
    with pytest.raises(AddressError, match="not a folder of this user"):
        await unix.serve()


# --- machines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["192.0.2.1:7000", "0.0.0.0:0", "example.com:7000"])
async def test_nothing_leaves_the_machine_without_tls(address: str) -> None:
    transport = SocketTransport()

    with pytest.raises(AddressError, match="mutual TLS"):
        await transport.listen(address, RawPeer)
    with pytest.raises(AddressError, match="mutual TLS"):
        await transport.connect(address, RawPeer)


@pytest.mark.parametrize("address", ["7000", "localhost", "localhost:http", ":7000"])
async def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(AddressError, match="host:port"):
        await SocketTransport().connect(address, RawPeer)


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    wire = make_wire("tcp", tmp_path)
    await wire.serve()

    with pytest.raises(AddressError, match=r"Cannot listen on 127\.0\.0\.1"):
        await wire.serve()

    await wire.aclose()


def test_tls_that_does_not_demand_a_certificate_is_refused() -> None:
    with pytest.raises(AddressError, match="mutual"):
        SocketTransport(server_tls=ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))


async def test_over_mutual_tls_the_conversation_is_the_same(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    wire = Wire(SocketTransport(server_tls=ours.server(), client_tls=ours.client()), "127.0.0.1:0")

    web, scheduler = await wire.pair()
    for number in range(1_000):
        web.connection.send(Cancel(str(number)))

    assert await scheduler.received(1_000) == [Cancel(str(number)) for number in range(1_000)]
    await wire.aclose()


async def test_a_stranger_with_a_certificate_of_another_authority_gets_nowhere(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    wire = Wire(SocketTransport(server_tls=ours.server(), client_tls=ours.client()), "127.0.0.1:0")
    await wire.serve()
    stranger = theirs.client()
    stranger.load_verify_locations(tmp_path / "ours" / "ca.pem")  # it trusts us; we must not trust it
    peer = RawPeer()

    with contextlib.suppress(OSError):  # in TLS 1.3 the refusal may come after the stranger's side is done
        await SocketTransport(client_tls=stranger).connect(wire.address, lambda: peer)
        await until(lambda: peer.lost)

    assert wire.sessions == []
    await wire.aclose()


class Authority:
    """A certificate authority for one test, and what it vouches for: 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._ca = folder / "ca.pem"
        self._pair = folder / "pair.pem"
        ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        ca = _certificate("authority", ca_key.public_key(), "authority", ca_key, is_authority=True)
        leaf = _certificate("127.0.0.1", key.public_key(), "authority", ca_key, is_authority=False)
        self._ca.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self._pair.write_bytes(private + leaf.public_bytes(serialization.Encoding.PEM))

    def server(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self._ca)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self._pair)
        return context

    def client(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self._ca)
        context.load_cert_chain(self._pair)
        return context


def _certificate(
    subject: str,
    key: ec.EllipticCurvePublicKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


# --- the end of a socket ---------------------------------------------------------------------------------------------


class ClosedTransport(asyncio.Transport):
    """The peer has left, and the protocol has not been told yet: uvloop refuses every write from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.closed:
            raise RuntimeError("the handler is closed")
        self.written += data


async def test_words_to_a_peer_that_has_just_left_are_dropped_without_a_fault() -> None:
    reasons: list[str] = []
    connection = Connection(ManualClock(), on_open=lambda _: None, on_message=lambda _: None, on_closed=reasons.append)
    transport = ClosedTransport()
    connection.connection_made(transport)

    connection.send(Cancel("r1"))
    transport.close()
    assert await connection.room()  # flushes
    connection.close("done")
    connection.connection_lost(None)

    assert not transport.written
    assert reasons == ["done"]
