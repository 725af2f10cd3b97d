"""``docker/compose.yaml``: what it names is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

DOCKER = Path(__file__).parents[2] / "docker"


@pytest.fixture
def compose() -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def test_services(compose: Any) -> None:
    services = compose["services"]
    assert set(services) == {"master", "worker", "jupyter", "demo"}
    assert services["worker"]["deploy"]["replicas"] == 2
    targets = [
        line.split()[-1]
        for line in (DOCKER / "Dockerfile").read_text().splitlines()
        if line.startswith("FROM") and " AS " in line
    ]
    for service in services.values():
        build = service["build"]
        assert (DOCKER / build["context"] / build["dockerfile"]).exists()
        assert build.get("target", targets[0]) in targets
        assert set(service.get("depends_on", {})) <= set(services)


def test_nothing_listens_beyond_this_machine(compose: Any) -> None:
    ports = [port for one in compose["services"].values() for port in one.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
