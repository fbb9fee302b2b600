"""Before any process starts: what is wrong with the machine is one sentence, what is there already stays."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path

import pytest
from django.core.management import CommandError
from django.db import OperationalError

from harness_web import bootstrap
from harness_web.bootstrap import Demo, UpError
from scheduler.models import Deployment
from tenants.models import ApiKey, KeySecret, Tier


@pytest.fixture
def said() -> list[str]:
    return []


def options_of_demo() -> dict[str, object]:
    options: dict[str, object] = Deployment.objects.get(model="demo").options
    return options


class TestMachine:
    def test_a_full_disk_is_said_before_anything_is_written(self, tmp_path: Path) -> None:
        with pytest.raises(UpError, match=r"disk of .* is full: \d+ MB free, \d+ MB needed"):
            bootstrap.check_disk(tmp_path, needed=2**60)

    @pytest.mark.parametrize(
        ("cause", "sentence"),
        [
            (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "is full"),
            (OperationalError("database or disk is full"), "is full"),
            (OperationalError("connection refused\n\tIs it on?"), "The database cannot be used: connection refused."),
            (OperationalError("connection refused"), "The database cannot be used: connection refused."),
            (PermissionError(errno.EACCES, "Permission denied", "/some/file"), "/some/file: Permission denied."),
            (CommandError("no such policy"), "no such policy"),
        ],
    )
    def test_what_the_disk_and_the_database_say_becomes_a_sentence(
        self, tmp_path: Path, cause: Exception, sentence: str
    ) -> None:
        with pytest.raises(UpError) as caught, bootstrap.clear_errors(tmp_path):
            raise cause
        assert sentence in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_a_port_in_use_names_the_port(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(UpError, match=f"Port {port} on 127.0.0.1 is in use"):
                bootstrap.listen("127.0.0.1", port)

    def test_connections_send_small_packets_at_once(self) -> None:
        """Else an answer's body would wait for the acknowledgement of its headers."""
        with bootstrap.listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0

    @pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("no.such.host.invalid", 8000)])
    def test_an_impossible_address_is_a_sentence(self, host: str, port: int) -> None:
        with pytest.raises(UpError, match=r"\.$"):
            bootstrap.listen(host, port)

    def test_one_data_directory_holds_one_product(self, tmp_path: Path) -> None:
        with (
            bootstrap.only_one(tmp_path / "run"),
            pytest.raises(UpError, match=f"process {os.getpid()}"),
            bootstrap.only_one(tmp_path / "run"),
        ):
            pass
        with bootstrap.only_one(tmp_path / "run"):
            pass  # the first has let go


class TestOptions:
    def test_an_unknown_engine_is_refused_with_the_choices(self) -> None:
        with pytest.raises(UpError, match="choose one of: simulated, vllm"):
            Demo(engine="steam")

    def test_the_simulated_engine_takes_no_model(self) -> None:
        with pytest.raises(UpError, match="no model"):
            Demo(engine="simulated", model="some/model")

    def test_a_folder_is_served_from_where_it_is_and_a_name_as_a_name(self, tmp_path: Path) -> None:
        folder = Demo(engine="vllm", model=str(tmp_path)).document()["deployments"][0]["options"]
        assert folder["path"] == str(tmp_path)
        name = Demo(engine="vllm", model="org/model").document()["deployments"][0]["options"]
        assert name["model"] == "org/model"
        assert "path" not in name


@pytest.mark.django_db(transaction=True)
class TestSeed:
    def test_an_empty_database_gets_tiers_keys_and_a_deployment(self, tmp_path: Path, said: list[str]) -> None:
        bootstrap.seed(Demo(engine="simulated"), tmp_path, said.append)
        assert set(Tier.objects.values_list("name", flat=True)) == {"vip", "paid", "free"}
        assert Deployment.objects.get(model="demo").engine == "simulated"
        secrets = json.loads((tmp_path / bootstrap.SECRETS_FILE).read_text())["keys"]
        assert len(secrets) == ApiKey.objects.count() == 4
        assert all(any(key["key"] in line for line in said) for key in secrets)
        assert [path.name for path in tmp_path.iterdir()] == [bootstrap.SECRETS_FILE]

    def test_a_later_start_creates_nothing_and_keeps_what_was_tuned(self, tmp_path: Path, said: list[str]) -> None:
        bootstrap.seed(Demo(engine="simulated"), tmp_path, said.append)
        deployment = Deployment.objects.get(model="demo")
        deployment.options |= {"max_seqs": 7}
        deployment.save()
        before = list(KeySecret.objects.values_list("lookup", flat=True))
        bootstrap.seed(Demo(engine="simulated"), tmp_path, said.append)
        bootstrap.seed(Demo(), tmp_path, said.append)
        assert options_of_demo()["max_seqs"] == 7
        assert list(KeySecret.objects.values_list("lookup", flat=True)) == before

    def test_another_engine_changes_only_the_demo_deployment(self, tmp_path: Path, said: list[str]) -> None:
        bootstrap.seed(Demo(engine="simulated"), tmp_path, said.append)
        bootstrap.apply({"version": 1, "deployments": [{"model": "own", "engine": "simulated", "options": {}}]})
        bootstrap.seed(Demo(engine="vllm", model="org/model"), tmp_path, said.append)
        assert Deployment.objects.get(model="demo").engine == "vllm"
        assert Deployment.objects.get(model="own").engine == "simulated"

    def test_secrets_that_cannot_be_written_leave_no_keys_behind(self, tmp_path: Path, said: list[str]) -> None:
        with pytest.raises(OSError, match="No such file"):
            bootstrap.seed(Demo(engine="simulated"), tmp_path / "absent", said.append)
        assert not ApiKey.objects.exists()
        assert not Tier.objects.exists()

    def test_a_policy_that_does_not_exist_is_refused_before_anything_is_created(self) -> None:
        with pytest.raises(UpError, match=r"'guesswork'; choose one of: .*priority"):
            bootstrap.check_policy("guesswork")
